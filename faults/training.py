"""The training that the faults happen to: small, but with everything that a resume must bring back, and a
digest at its end.

As a script, `python faults/training.py FOLDER SETTINGS`, it is one really fresh process of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import os
import random
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from hookline import Hook, Module, Trainer
from hookline.hooks import EarlyStopping, ModelCheckpoint

PHASES = ("starting", "set-up", "steps", "validation", "save", "ending", "over")
RUN, RESULT, PHASE, NOTES, OUTPUT = "run", "result.json", "phase", "notes", "output.txt"
"""What lies in a trial's folder: the run's directory, what it ended with, where it is, what it announced,
what it said.
"""

WITHOUT_WORKERS = ("torch", "memory", "iterable")
"""The ways to read batches without workers."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What varies from trial to trial."""

    precision: str = "32"
    accumulate: int = 2
    validate_every: float = 0.5
    """A fraction of an epoch, so that there are cuts before and after a validation in the middle of one."""
    workers: int = 0
    save: str = "sync"
    on_save_error: str = "raise"
    logger: bool = True
    stop_at: int = 0
    """End the process at this step, as if its time was over; 0: go on to the end."""
    strategy: str = "auto"
    persistent: bool = False
    """Whether workers stay from one epoch to the next."""
    loader: str = "torch"
    """How batches are read: by torch's DataLoader, "memory" (rows of tensors), "iterable" (an object with
    `__iter__`), or by the DataLoader of "torchdata", which says itself where it is, and so is left alone.
    """
    backend: str = ""
    """Compile the training step with this backend of torch.compile; empty: do not compile."""

    @property
    def numbers(self) -> Settings:
        """Return the settings that the numbers depend on; the others must change nothing.

        Without workers a dataset draws its random numbers from the main stream, with any number of them from
        one of its own.
        """
        loader = self.loader if self.loader in WITHOUT_WORKERS else "torch"
        return Settings(
            self.precision,
            self.accumulate,
            self.validate_every,
            workers=min(1, self.workers),
            loader=loader,
            backend=self.backend,
        )


class Noisy(Dataset[Any]):
    """Samples with their number and a random augmentation."""

    def __init__(self, length: int, noise: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(length, 8, generator=generator)
        self.targets = self.inputs[:, :2] * 2 + torch.randn(length, 2, generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return index, self.inputs[index] + self.noise * torch.randn(8), self.targets[index]


class Stream:
    """Batches of these samples in an order that Python and numpy draw, each with a random augmentation."""

    def __init__(self, length: int, size: int) -> None:
        self.samples, self.size = Noisy(length), size

    def __len__(self) -> int:
        return -(-len(self.samples) // self.size)

    def __iter__(self) -> Iterator[Any]:
        order = random.sample(range(len(self.samples)), len(self.samples))
        for first in range(0, len(order), self.size):
            shift = float(np.random.randn())  # every second one is kept from the first
            yield [
                each + shift * (place == 1)
                for place, each in enumerate(
                    default_collate([self.samples[index] for index in order[first : first + self.size]])
                )
            ]


class Net(Module):
    """Dropout, batch statistics, AdamW and a schedule by the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss; log it by epoch as well."""
        loss = mse_loss(self.layers(batch[1]).float(), batch[2])
        self.log("train/error", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        return mse_loss(self.layers(batch[1]).float(), batch[2])

    def configure_optimizers(self) -> Any:
        """Return both kinds of state: moments and a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.97), "interval": "step"},
        }


class Record(Hook):
    """Which samples were used at which step, every loss and every validation: a hook's state, so a resume
    must bring it back.
    """

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, batch: Any, step: int) -> None:
        """Record the samples of this batch."""
        self.seen.append([step, batch[0].tolist()])

    def on_train_batch_end(self, loss: float) -> None:
        """Record the loss to its last bit."""
        self.seen.append(float(loss).hex())

    def on_validation_end(self, metrics: Any, sanity_checking: bool) -> None:
        """Record the results of the validation."""
        if not sanity_checking:
            self.seen.append(["validated", float(metrics["val/loss"]).hex()])

    def state_dict(self) -> dict[str, Any]:
        """Return everything recorded so far."""
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from that."""
        self.seen = list(state["seen"])


class Witness(Hook):
    """Writes where the run is and what it has announced, to files that outlive the process."""

    def __init__(self, folder: Path, stop_at: int = 0) -> None:
        self.stop_at = stop_at
        with (folder / PHASE).open("r+b") as file:
            self.place = mmap.mmap(file.fileno(), 2)
        self.notes = os.open(folder / NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def enter(self, phase: str) -> None:
        """Write the phase. The second byte counts, so that the third save differs from the first."""
        self.place[0], self.place[1] = PHASES.index(phase), (self.place[1] + 1) % 256

    def note(self, *words: object) -> None:
        """Append one line and flush it."""
        os.write(self.notes, (" ".join(map(str, words)) + "\n").encode())

    def setup(self) -> None:
        """Enter set-up: from here on the trainer handles signals."""
        self.enter("set-up")

    def on_checkpoint_load(self, path: Path, step: int) -> None:
        """Announce the checkpoint from which the run continues."""
        self.note("resumed", step, Path(path).name)

    def on_train_batch_start(self) -> None:
        """Enter the training."""
        self.enter("steps")

    def on_validation_start(self) -> None:
        """Enter a validation."""
        self.enter("validation")

    def on_save_checkpoint(self) -> None:
        """Enter a save; with `save="async"` it continues in the background."""
        self.enter("save")

    def on_checkpoint_save(self, step: int, path: Path) -> None:
        """Announce the checkpoint: from here on it may not be lost."""
        self.note("saved", step, Path(path).name)
        self.enter("steps")

    def on_step_end(self, step: int) -> None:
        """End the process at its last step without flushing or closing anything."""
        if step == self.stop_at:
            os._exit(0)

    def on_train_end(self) -> None:
        """Announce the end."""
        self.enter("ending")


def prepare(folder: Path) -> Path:
    """Create the files through which a run reports to its observer; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PHASE).write_bytes(bytes(2))
    (folder / RESULT).unlink(missing_ok=True)
    return folder


def train(
    folder: Path, settings: Settings, hooks: tuple[Hook, ...] = (), run_dir: Path | None = None
) -> Trainer:
    """Train from wherever the run is, and write down what it ended with."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    net = Net()
    torch.manual_seed(os.getpid())  # from here on the trainer's seed counts, and what a resume brings back
    witness, record = Witness(folder, settings.stop_at), Record()
    trainer = Trainer(
        max_epochs=3,
        run_dir=run_dir or folder / RUN,
        seed=7,
        device="cpu",
        enable_progress_bar=False,
        log_every_n_steps=4,
        precision=settings.precision,
        accumulate_grad_batches=settings.accumulate,
        val_check_interval=settings.validate_every,
        num_sanity_val_steps=1,
        save=settings.save,
        on_save_error=settings.on_save_error,
        logger=settings.logger,
        strategy=settings.strategy,
        compile={"step": True, "backend": settings.backend} if settings.backend else False,
        hooks=[
            record,
            witness,
            *hooks,
            EarlyStopping("val/loss", patience=50),
            ModelCheckpoint(every_n_train_steps=3, save_top_k=3, save_last=True),
            ModelCheckpoint("val/loss", save_top_k=1, dirpath="checkpoints/best", name="best"),
        ],
    )
    loader = make_loader(settings)
    trainer.fit(net, loader, DataLoader(Noisy(6, noise=0.0), batch_size=3), resume="auto")
    result = {"status": trainer.status, "step": trainer.global_step, "digest": digest(trainer, record)}
    (folder / f".{RESULT}").write_text(json.dumps(result))
    os.rename(folder / f".{RESULT}", folder / RESULT)
    witness.enter("over")
    return trainer


def make_loader(settings: Settings) -> Any:
    """Return the training data."""
    if settings.loader == "iterable":
        return Stream(35, 3)
    if settings.loader == "memory":
        samples = Noisy(40)
        rows = TensorDataset(torch.arange(40), samples.inputs, samples.targets)
        return DataLoader(Subset(rows, range(5, 40)), batch_size=3, shuffle=True)
    loader: Any = DataLoader
    if settings.loader == "torchdata":
        from torchdata import stateful_dataloader

        loader = stateful_dataloader.StatefulDataLoader
    return loader(
        Noisy(35),
        batch_size=3,
        shuffle=True,
        num_workers=settings.workers,
        persistent_workers=settings.persistent,
    )


def digest(trainer: Trainer, record: Record) -> dict[str, str]:
    """Return one sha256 for each part that must be the same, so that a difference has a name."""
    hooks = {
        name: trainer.hooks[name].state_dict()
        for name in trainer.hooks.list_hooks()
        if hasattr(trainer.hooks[name], "state_dict") and trainer.hooks[name] is not record
    }
    # a checkpoint written beside a damaged one of its name gets a number after it
    hooks = json.loads(re.sub(r'-v\d+(?=")', "", json.dumps(hooks).replace(str(trainer.run_dir), "RUN")))
    state = trainer.state
    parts = {
        "weights": trainer.module.state_dict(),
        "optimizer": [each.state_dict() for each in state.optimizers],
        "schedule": [each.state_dict() for each in state.schedulers],
        "counters": [state.step, state.epoch, state.epochs_seen, state.batches_seen, state.samples_seen],
        "metrics": dict(trainer.metrics.items()),
        "kept checkpoints": {name: hooks.pop(name) for name in ("model_checkpoint", "best")},
        "hooks": {name: kept for name, kept in hooks.items() if kept},
        "samples": record.seen,
    }
    found = {}
    for name, value in parts.items():
        into = hashlib.sha256()
        feed(into, value)
        found[name] = into.hexdigest()
    return found


def feed(into: Any, value: Any) -> None:
    """Put nested values into a hash, with their types and every bit of their numbers."""
    if isinstance(value, Tensor):
        if hasattr(value, "to_local"):  # this rank's part of it
            value = value.to_local()
        into.update(
            f"{value.dtype}{tuple(value.shape)}".encode()
            + value.detach().contiguous().view(-1).numpy().tobytes()
        )
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            into.update(repr(key).encode())
            feed(into, value[key])
    elif isinstance(value, list | tuple):
        into.update(f"[{len(value)}".encode())
        for item in value:
            feed(into, item)
    else:
        into.update((float(value).hex() if isinstance(value, float) else repr(value)).encode())


def main() -> int:
    """Run one process of the training, for trials that are not forked."""
    folder, settings = Path(sys.argv[1]), Settings(**json.loads(sys.argv[2]))
    try:
        train(folder, settings)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
