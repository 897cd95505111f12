"""A small training with everything that a resume must bring back, on any number of ranks, and a digest of where it ended."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hookline import Hook, Module, Trainer
from hookline.hooks import WeightAveraging


class Noisy(Dataset[Any]):
    """Samples with their number and a random augmentation."""

    def __init__(self, length: int, noise: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(length, 8, generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return index, self.inputs[index] + self.noise * torch.randn(8), self.inputs[index, :3] * 2


class Net(Module):
    """Uneven shards (7, 5 and 3 rows on 2 ranks), a single row, tied weights, batch statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 7), nn.Linear(7, 5)])
        self.norm = nn.BatchNorm1d(7)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(5, 3)
        self.again = self.head
        self.gain = nn.Parameter(torch.ones(1, 3))

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.drop(torch.relu(self.norm(self.layers[0](inputs))))
        return self.head(torch.relu(self.layers[1](hidden))) * self.gain

    def training_step(self, batch: Any) -> Any:
        loss = F.mse_loss(self(batch[1]), batch[2])
        self.log("train/error", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any) -> Any:
        return F.mse_loss(self(batch[1]), batch[2])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Frozen(Net):
    """The same with a frozen base, the same in every process; only the head trains, and batch statistics change."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(("head", "again", "gain")))


class ByHand(Net):
    """The same with manual optimization, which updates after every third batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch)
        optimizer = self.optimizers()
        self.manual_backward(loss / 3)
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Record(Hook):
    """Which samples this rank used at which step, every loss and every validation."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: Any, loss: float, step: int) -> None:
        self.seen.append([step, batch[0].tolist(), float(loss).hex()])

    def on_validation_end(self, metrics: Any) -> None:
        self.seen.append(["validated", float(metrics["val/loss"]).hex()])

    def samples(self) -> list[int]:
        """The samples alone."""
        return [sample for each in self.seen if each[0] != "validated" for sample in each[1]]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class SaveAt(Hook):
    """Asks for a checkpoint after these batches, and stops after the last of them if told to."""

    def __init__(self, *batches: int, stop: bool = False) -> None:
        self.batches, self.stops = batches, stop
        self.told: list[Any] = []

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen in self.batches:
            trainer.save_checkpoint(f"{trainer.run_dir}/checkpoints/batch-{batches_seen}")
            if self.stops and batches_seen == self.batches[-1]:
                trainer.stop("cut")

    def on_checkpoint_save(self, path: Any, state: Any) -> None:
        self.told.append([path.name if hasattr(path, "name") else path, state.batches_seen])


def train(
    run_dir: str,
    strategy: Any,
    *saves: Any,
    hooks: Any = (),
    resume: Any = None,
    make: type[Net] = Net,
    **options: Any,
) -> tuple[Trainer, Record]:
    """Train it, from wherever it is told to continue."""
    torch.manual_seed(3)
    net, record = make(), Record()
    usual: dict[str, Any] = {
        "max_epochs": 2,
        "seed": 5,
        "device": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
    }
    average = WeightAveraging(decay=0.7, buffers="average")
    trainer = Trainer(
        run_dir=run_dir, strategy=strategy, hooks=[record, average, *saves, *hooks], **(usual | options)
    )
    trainer.fit(
        net, DataLoader(Noisy(48), 4, shuffle=True), DataLoader(Noisy(8, noise=0.0), 2), resume=resume
    )
    return trainer, record


def digest(trainer: Trainer, record: Record | None = None) -> dict[str, Any]:
    """A short sum for each thing that must be the same; tensors that are spread over ranks count as a whole."""
    s = trainer.state
    parts = {
        "weights": {
            name: each for name, each in trainer.module.state_dict().items() if "norm.running" not in name
        },
        "buffers": [*trainer.module.buffers()],  # each rank's own
        "optimizer": [each.state_dict()["state"] for each in s.optimizers],
        "metrics": dict(trainer.metrics.items()),
        "counters": [s.step, s.epoch, s.batches_seen, s.samples_seen],
        "random": torch.get_rng_state(),
        "scale": trainer.strategy.precision.state_dict(),
        "averages": [each.averages for each in trainer.hooks if isinstance(each, WeightAveraging)],
        "seen": record.seen if record is not None else [],
    }
    return {name: _sum(value) for name, value in parts.items()}


def _sum(value: Any) -> str:
    into = hashlib.sha256()
    _feed(into, value)
    return into.hexdigest()[:12]


def _feed(into: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        whole: Any = value
        whole = whole.full_tensor() if hasattr(value, "full_tensor") else whole
        into.update(
            f"{whole.dtype}{tuple(whole.shape)}".encode()
            + whole.detach().contiguous().view(-1).numpy().tobytes()
        )
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            into.update(repr(key).encode())
            _feed(into, value[key])
    elif isinstance(value, list | tuple):
        for each in value:
            _feed(into, each)
    else:
        into.update((float(value).hex() if isinstance(value, float) else repr(value)).encode())
