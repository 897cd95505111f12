"""The same small training in loops of other packages, for hooks of ours to hear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate
import lightning.pytorch as lightning
import torch
import transformers
from tiny import Net, batches, quiet
from torch.nn import functional as F

import hookline
from hookline import Line

EPOCHS, DATA, VAL = 2, batches(5), batches(2)


def new_layer() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


class LightningNet(lightning.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.layer = new_layer()
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class TransformersNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = new_layer()

    def forward(self, x: Any, labels: Any = None) -> Any:
        return {"loss": F.mse_loss(self.layer(x), labels), "logits": self.layer(x)}


def loader(data: Any) -> Any:
    return torch.utils.data.DataLoader(data, batch_size=None)


def in_hookline(hooks: list[Any], window: int = 1) -> None:
    net = Net()
    net.layer.load_state_dict(new_layer().state_dict())
    quiet(hooks=hooks, max_epochs=EPOCHS, accumulate_grad_batches=window).fit(net, DATA, VAL)


def lightning_trainer(callbacks: list[Any], window: int = 1, **options: Any) -> Any:
    return lightning.Trainer(
        **{
            "max_epochs": EPOCHS,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": callbacks,
            "accumulate_grad_batches": window,
            "num_sanity_val_steps": 0,
            **options,
        }
    )


def in_lightning(
    hooks: list[Any],
    window: int = 1,
    *,
    epochs: int = EPOCHS,
    lr: float = 0.1,
    line: Any = None,
    **options: Any,
) -> Any:
    callback = hookline.hosts.lightning(hooks, **(line or {}))
    lightning_trainer([callback], window, max_epochs=epochs, **options).fit(
        LightningNet(lr), loader(DATA), loader(VAL)
    )
    return callback.line


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *given: Any, **options: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def samples(data: Any) -> list[dict[str, Any]]:
    return [{"x": x, "labels": y} for xs, ys in data for x, y in zip(xs, ys, strict=True)]


def transformers_trainer(
    callbacks: list[Any], folder: Any, window: int = 1, *, lr: float = 0.1, **options: Any
) -> Any:
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "num_train_epochs": EPOCHS,
            "per_device_train_batch_size": 3,
            "per_device_eval_batch_size": 3,
            "gradient_accumulation_steps": window,
            "eval_strategy": "epoch",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "max_grad_norm": 0.0,
            "lr_scheduler_type": "constant",
            **options,
        }
    )
    net = TransformersNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    return InOrder(
        model=net,
        args=arguments,
        train_dataset=samples(DATA),
        eval_dataset=samples(VAL),
        callbacks=callbacks,
        optimizers=(optimizer, None),
    )


def in_transformers(
    hooks: list[Any],
    window: int = 1,
    *,
    epochs: int = EPOCHS,
    lr: float = 0.1,
    line: Any = None,
    **options: Any,
) -> Any:
    callback = hookline.hosts.transformers(hooks, **(line or {}))
    with callback:
        transformers_trainer([callback], "out", window, lr=lr, num_train_epochs=epochs, **options).train()
    return callback.line


def by_hand(
    hooks: list[Any], window: int = 1, *, epochs: int = EPOCHS, lr: float = 0.1, line: Any = None
) -> Any:
    net = torch.nn.Sequential(new_layer())
    sgd = torch.optim.SGD(net.parameters(), lr=lr)
    line = Line(net, sgd, hooks=hooks, **(line or {}))
    with line:
        for _ in line.epochs(epochs):
            for index, (x, y) in enumerate(line.epoch(DATA)):
                loss = F.mse_loss(net(x), y)
                if index % window == 0:
                    sgd.zero_grad()
                line.backward(loss, divide_by=min(window, len(DATA) - index // window * window))
                if (index + 1) % window == 0 or index + 1 == len(DATA):
                    sgd.step()
            for x, y in line.validation(VAL):
                line.log("val/loss", F.mse_loss(net(x), y))
    return line


def on_accelerate(
    hooks: list[Any], window: int = 1, *, epochs: int = EPOCHS, lr: float = 0.1, line: Any = None
) -> Any:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=window)
    net = torch.nn.Sequential(new_layer())
    net, sgd, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=lr), loader(DATA))
    line = hookline.hosts.accelerate(accelerator, net, sgd, hooks=hooks, **(line or {}))
    with line:
        for _ in line.epochs(epochs):
            for x, y in line.epoch(data):
                with accelerator.accumulate(net):
                    line.backward(F.mse_loss(net(x), y))
                    sgd.step()
                    sgd.zero_grad()
            for x, y in line.validation(VAL):
                line.log("val/loss", F.mse_loss(net(x), y))
    return line


LOOPS: dict[str, Callable[..., Any]] = {
    "lightning": in_lightning,
    "transformers": in_transformers,
    "raw loop": by_hand,
    "accelerate": on_accelerate,
}
