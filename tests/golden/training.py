"""The trainings behind the golden files, and everything that a resume must bring back, as plain data.

All arithmetic is exact on every CPU: weights and data are multiples of small powers of two in float64, the loss is an L1 norm, and
learning rates, momentum, decay and the lengths of accumulation windows are powers of two. So no result depends on the order of a sum or on the instruction set.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hookline import SKIP_STEP, Hook, Line, Mixture, Module, Trainer, every
from hookline.config import load_config
from hookline.control.client import ask
from hookline.hooks import EarlyStopping, HParams, LRMonitor, ModelCheckpoint, WeightAveraging
from hookline.loggers import CSV, JSONLines


class Samples(Dataset[Any]):
    """Sample `i` has the id `first + i`; its numbers follow from the id."""

    def __init__(self, length: int, first: int = 0, dtype: torch.dtype = torch.float64) -> None:
        self.length, self.first, self.dtype = length, first, dtype

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        number = self.first + index
        inputs = torch.tensor([(number * 3 + column * 5) % 7 - 3 for column in range(4)], dtype=self.dtype)
        targets = torch.tensor([(number * 2 + column * 3) % 5 - 2 for column in range(3)], dtype=self.dtype)
        return number, inputs, targets


class Net(Module):
    """Tied weights, a buffer, a parameter of a single row, and a step that draws from all random streams."""

    def __init__(self, width: int = 3, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.width = width
        self.layer = nn.Linear(4, width, dtype=dtype)
        self.again = self.layer
        self.gain = nn.Parameter(torch.zeros(1, width, dtype=dtype))
        self.register_buffer("drift", torch.zeros(4, dtype=dtype))
        with torch.no_grad():
            self.layer.weight.copy_((torch.arange(4 * width) % 5 - 2).view(width, 4) / 4)
            self.layer.bias.copy_((torch.arange(width) % 3 - 1) / 8)
        self.noise = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs) + self.gain
        return outputs

    def training_step(self, batch: Any) -> Any:
        _, inputs, targets = batch
        self.noise = (
            int(random.random() < 0.5) + 2 * int(np.random.randint(2)) + 4 * int(torch.randint(2, ()))
        ) / 8
        with torch.no_grad():
            self.drift.mul_(0.5).add_(inputs.sum(0) / 4)
        loss = (self(inputs) - targets + self.noise).abs().sum() / 16
        self.log("train/error", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any) -> Any:
        return (self(batch[1]) - batch[2]).abs().sum() / 16

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.25, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.layer.parameters(), lr=0.25, momentum=0.5),
            torch.optim.SGD([self.gain], lr=0.5),
        ]


class AdamNet(Net):
    """Its arithmetic is not exact: only what is loaded is compared bit for bit."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Record(Hook):
    """Keeps which samples were trained on at which step, with which noise and loss, and every validation."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, batch: Any, loss: float, step: int, dataloader_name: str, module: Any
    ) -> None:
        self.seen.append([step, dataloader_name, batch[0].tolist(), module.noise, float(loss).hex()])

    def on_validation_end(self, metrics: Any) -> None:
        self.seen.append(["validated", float(metrics["val/loss"]).hex()])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])

    def samples(self, after: int = 0) -> list[int]:
        """The ids alone, from this batch on."""
        batches = [each for each in self.seen if each[0] != "validated"]
        return [sample for each in batches[after:] for sample in each[2]]


class EveryThird(Hook):
    """Hears every third batch: how far that has counted is part of a checkpoint."""

    def __init__(self) -> None:
        self.counted: list[int] = []

    @every(3)
    def on_train_batch_end(self, batches_seen: int) -> None:
        self.counted.append(batches_seen)

    def state_dict(self) -> dict[str, Any]:
        return {"counted": list(self.counted)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counted = list(state["counted"])


class Cut(Hook):
    """Asks for a checkpoint after one batch, and ends the process's work in another: as a stop, or as a failure."""

    def __init__(self, save: int, fail: int = 0) -> None:
        self.save, self.fail = save, fail

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen == self.save:
            trainer.save_checkpoint(f"{trainer.run_dir}/checkpoints/batch-{batches_seen}")
            if not self.fail:
                trainer.stop("cut")
        if self.fail and batches_seen == self.fail:
            raise RuntimeError("cut")


class Loaded(Hook):
    """Takes down the whole state at the moment when a checkpoint is back in place."""

    found: Any = None

    def on_checkpoint_load(self, trainer: Any) -> None:
        self.found = facts(trainer)


Made = tuple[Trainer, Record, Any]
"""The trainer, its record, and the facts right after a checkpoint was loaded."""


def loader(
    length: int = 24, first: int = 0, shuffle: bool = True, dtype: torch.dtype = torch.float64
) -> DataLoader[Any]:
    return DataLoader(Samples(length, first, dtype), 4, shuffle=shuffle)


def fit(
    run_dir: str,
    hooks: Any = (),
    resume: Any = None,
    make: Callable[[], Net] = Net,
    train: Any = None,
    mixture: Any = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Made:
    """Train for three epochs of six batches."""
    record, loaded = Record(), Loaded()
    usual: dict[str, Any] = {
        "max_epochs": 3,
        "seed": 3,
        "device": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    trainer = Trainer(run_dir=run_dir, hooks=[record, *hooks, loaded], **(usual | options))
    module = make()
    trainer.fit(
        module,
        loader(dtype=dtype) if train is None else train,
        loader(8, 100, False, dtype),
        mixture=mixture,
        resume=resume,
    )
    return trainer, record, loaded.found


# ---- one function for each checkpoint; without `cut` it trains to the end, from `resume` or from the beginning --------------------


def one_device(run_dir: str, resume: Any = None, cut: bool = False) -> Made:
    """In the middle of the second epoch, of a run that failed a batch later, with loggers and monitors."""
    monitors = [
        ModelCheckpoint(monitor="val/loss", save_top_k=1),
        EarlyStopping("val/loss", patience=9),
        HParams(),
        LRMonitor(),
    ]
    hooks = [*monitors, EveryThird(), *([Cut(8, fail=9)] if cut else [])]
    return fit(run_dir, hooks, resume, logger=[JSONLines(), CSV()])


def window(run_dir: str, resume: Any = None, cut: bool = False) -> Made:
    """After two of the four batches of an accumulation window; the last one of an epoch is short."""
    return fit(run_dir, [Cut(8)] if cut else [], resume, accumulate_grad_batches=4)


def mixture(run_dir: str, resume: Any = None, cut: bool = False) -> Made:
    """Two loaders, two optimizers of which one loader trains only one, in a window, while a change of the weights waits."""
    mixed = Mixture(
        "weighted",
        {"web": 3, "code": 1},
        epoch_length=8,
        window=4,
        loss_weights={"code": 0.5},
        optimizers={"code": 1},
    )
    train = {"web": loader(), "code": loader(8, 50)}
    return fit(
        run_dir,
        [Reweigh(), *([Cut(11)] if cut else [])],
        resume,
        TwoOptimizers,
        train,
        mixed,
        accumulate_grad_batches=2,
    )


class Reweigh(Hook):
    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen == 10:
            trainer.loaders.set_weights({"web": 1, "code": 1})


def averaged(run_dir: str, resume: Any = None, cut: bool = False) -> Made:
    """With an exponential average of the weights and buffers, which the best score was measured with."""
    hooks = [WeightAveraging(decay=0.5, buffers="average"), ModelCheckpoint(monitor="val/loss", save_top_k=1)]
    return fit(run_dir, [*hooks, *([Cut(8)] if cut else [])], resume)


def adam(run_dir: str, resume: Any = None, cut: bool = False) -> Made:
    """AdamW and a gradient scaler."""
    return fit(run_dir, [Cut(8)] if cut else [], resume, AdamNet, dtype=torch.float32, precision="16-mixed")


def ddp(run_dir: str, resume: Any = None, cut: bool = False, strategy: str = "ddp") -> Made:
    """Two ranks, in an accumulation window, with averaged weights; each rank has random streams and hooks of its own."""
    hooks = [WeightAveraging(decay=0.5), *([Cut(3)] if cut else [])]
    return fit(run_dir, hooks, resume, strategy=strategy, accumulate_grad_batches=4, train=loader(48))


def fsdp(run_dir: str, resume: Any = None, cut: bool = False) -> Made:
    """The same, with parameters, optimizer state and averages spread over the ranks."""
    return ddp(run_dir, resume, cut, "fsdp")


def by_hand(run_dir: str, resume: Any = None, cut: bool = False) -> Any:
    """A loop that is written by hand, saved by `Line.save_checkpoint` at the end of its first epoch."""
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    net, record = Net(), Record()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25, momentum=0.5)
    line = Line(net, optimizer, hooks=[record, EveryThird(), WeightAveraging(decay=0.5)], run_dir=run_dir)
    with line:
        if resume is not None:
            line.load_checkpoint(resume)
        found = facts(line)
        for epoch in line.epochs(1 if cut else 2):
            for batch in line.epoch(loader(shuffle=False)):
                net.noise = epoch / 4
                optimizer.zero_grad()
                line.backward((net(batch[1]) - batch[2] + net.noise).abs().sum() / 16)
                optimizer.step()
            for batch in line.validation(loader(8, 100, False)):
                line.log("val/loss", net.validation_step(batch))
        if cut:
            line.save_checkpoint(f"{run_dir}/checkpoints/batch-6")
    return line, record, found


def logged(run_dir: str, resume: Any = None, cut: bool = False) -> Made:
    """A run with a log of every kind of record and a trace; it fails, is resumed from an earlier batch, and completes."""
    hooks = [
        Eventful(),
        LRMonitor(),
        ModelCheckpoint(save_top_k=0, save_last=True),
        *([Cut(8, fail=11)] if cut else []),
    ]
    return fit(run_dir, hooks, resume, logger=True, trace=True, max_epochs=2)


class Eventful(Hook):
    """Logs text, a histogram and a NaN, skips an update, and is asked for something from outside."""

    def on_before_optimizer_step(self, batches_seen: int) -> Any:
        return SKIP_STEP if batches_seen == 4 else None

    def on_train_batch_end(
        self, trainer: Any, logger: Any, step: int, batches_seen: int, resumed: bool
    ) -> None:
        trainer.log("odd", math.nan if step == 2 else step / 4)
        if batches_seen == 3:
            logger.add_text("sample", "once upon a time", step)
            logger.add_histogram("numbers", torch.arange(8.0), step)
        if batches_seen == 10 and resumed:
            threading.Thread(
                target=ask, args=(trainer.run_dir, "disable"), kwargs={"hook": "lr_monitor"}, daemon=True
            ).start()
            time.sleep(
                1
            )  # until the question is there; it is answered at the next boundary, when this batch is over


ONE_PROCESS: dict[str, Callable[..., Made]] = {
    "one-device": one_device,
    "window": window,
    "mixture": mixture,
    "averaged": averaged,
    "adam": adam,
}
TWO_RANKS: dict[str, Callable[..., Made]] = {"ddp": ddp, "fsdp": fsdp}


# ---- the state as plain data --------------------------------------------------------------------------------------------------------


def facts(trainer: Any) -> dict[str, Any]:
    """Everything that decides how a run continues; tensors that are spread over ranks count as a whole."""
    s = trainer.state
    optimizers = [each.state_dict() for each in s.optimizers]
    named: dict[str, Any] = {
        "weights": dict(s.module.state_dict()),
        "gradients": {
            name: each.grad
            for name, each in s.module.named_parameters()
            if each.grad is not None and s.stage == "fit"
        },
        "optimizers": [
            {"state": each["state"], "lr": [group["lr"] for group in each["param_groups"]]}
            for each in optimizers
        ],
        "schedulers": [{"last_epoch": each.last_epoch, "lr": each.get_last_lr()} for each in s.schedulers],
        "counters": {
            name: getattr(s, name)
            for name in ("epoch", "epochs_seen", "step", "batches_seen", "samples_seen")
        },
        "hooks": {
            each.name: each.hook.state_dict()
            for each in s.hooks.entries()
            if hasattr(each.hook, "state_dict")
        },
        "metrics": dict(s.metrics.items()),
        "random": [
            _sum(random.getstate()),
            _sum(np.random.get_state()),
            _sum(torch.get_rng_state().tolist()),
        ],
    }
    if isinstance(trainer, Trainer):
        named["precision"] = trainer.strategy.precision.state_dict()
    return {name: plain(value) for name, value in named.items()}


def _sum(value: Any) -> str:
    return hashlib.sha256(repr(plain(value)).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """What JSON can hold without losing a bit: floats are written in hexadecimal."""
    if isinstance(value, Tensor):
        spread: Any = value
        whole = spread.full_tensor() if hasattr(value, "full_tensor") else value
        return {
            "dtype": str(whole.dtype),
            "shape": list(whole.shape),
            "values": plain(whole.detach().flatten().tolist()),
        }
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    return float(value).hex() if isinstance(value, float) else value


def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    """What is not as expected. A later version may keep more than an earlier one: further keys are no difference."""
    if isinstance(expected, dict) and isinstance(found, dict):
        missing = [f"{where}.{key} is missing" for key in expected if key not in found]
        return missing + [
            text
            for key in expected
            if key in found
            for text in differences(expected[key], found[key], f"{where}.{key}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return [
            text
            for index, each in enumerate(expected)
            for text in differences(each, found[index], f"{where}[{index}]")
        ]
    return (
        []
        if expected == found and type(expected) is type(found)
        else [f"{where}: expected {expected!r}, found {found!r}"]
    )


# ---- configurations -----------------------------------------------------------------------------------------------------------------


def resolved(file: Any) -> dict[str, Any]:
    """What a configuration says, once everything it leaves out is filled in, and how its run ends; trains below `out`."""
    parts = load_config(file).build()
    trainer: Trainer = parts.make_trainer(Trainer)
    trainer.fit(parts.module, datamodule=parts.datamodule, **parts.fit_arguments)
    given = [each for each in trainer.hooks.entries() if each.name in load_config(file).values["hooks"]]
    named = {
        "values": load_config(file).values,
        "options": {
            name: getattr(trainer.options, name)
            for name in load_config(file).values["trainer"]
            if name != "device"
        },
        "hooks": {
            each.name: {"class": type(each.hook).__name__, "enabled": each.enabled, **_settings(each.hook)}
            for each in given
        },
        "mixture": parts.fit_arguments["mixture"].to_dict(),
        "module": {
            "width": parts.module.width,
            "scale": parts.module.scale,
            "batches": parts.datamodule.batches,
        },
        "config": trainer.config,
        "counters": [trainer.global_step, trainer.state.batches_seen, trainer.status],
        "weights": dict(parts.module.state_dict()),
        "optimizer": trainer.optimizers[0].state_dict()["state"],
        "metrics": dict(trainer.metrics.items()),
    }
    return {name: plain(value) for name, value in named.items()}


def _settings(hook: Any) -> dict[str, Any]:
    names = (
        "monitor",
        "patience",
        "digits",
        "words",
        "factor",
        "on_error",
        "order",
        "save_last",
        "save_top_k",
    )
    return {name: getattr(hook, name) for name in names if hasattr(hook, name)}
