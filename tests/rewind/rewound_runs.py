"""Small runs of every kind, each with a digest of its state after every update, and rewinds of them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hookline
from hookline import Hook, Module, Trainer
from hookline.hooks import FreezeSchedule, ModelCheckpoint, WeightAveraging
from hookline.rewind.rerun import make_run_again

SEED = 11


class Noisy(Module):
    """A model whose every update depends on its random streams, its buffers and its schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = F.dropout(self.norm(self.first(batch[0])), 0.3, training=True)
        loss = F.mse_loss(self.last(hidden), batch[1]) * (1 + random.random())
        self.log("twice", 2 * loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.last(self.norm(self.first(batch[0]))), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=int(min(1000, self.trainer.estimated_stepping_batches)) + 1
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Endless(IterableDataset[Any]):
    """Samples without a length, so that the last accumulation window of an epoch ends early."""

    def __iter__(self) -> Iterator[Any]:
        return iter(dataset(26))


def dataset(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 4, generator=generator), torch.randn(count, 2, generator=generator)
    )


KINDS: dict[str, dict[str, Any]] = {
    "workers": {"max_epochs": 2},
    "accumulation": {"max_epochs": 4, "accumulate_grad_batches": 4, "gradient_clip_val": 0.5},
    "mixture": {"max_epochs": 2, "val_check_interval": 5},
    "averaged": {"max_epochs": 3, "accumulate_grad_batches": 2},
    "ranks": {"max_epochs": 4, "accumulate_grad_batches": 2, "strategy": "ddp"},
}
"""Options of the trainer."""


def data(kind: str) -> dict[str, Any]:
    """The arguments of `fit`, made anew."""
    if kind == "accumulation":
        return {"train": DataLoader(Endless(), batch_size=2)}
    if kind == "mixture":
        loaders = {"a": DataLoader(dataset(24), 3, shuffle=True), "b": DataLoader(dataset(16, 1), 2)}
        mixture = {"order": "random", "weights": {"a": 0.7, "b": 0.3}}
        return {"train": loaders, "val": DataLoader(dataset(8, 2), 4), "mixture": mixture}
    workers = {"num_workers": 1, "multiprocessing_context": "fork"} if kind == "workers" else {}
    loader = DataLoader(dataset(30), 3, shuffle=True, **workers)
    return {"train": loader, "val": DataLoader(dataset(8, 2), 4)}


def hooks(kind: str) -> list[Any]:
    """The hooks of a run, made anew; some of them change the training."""
    saves = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
    if kind in ("averaged", "ranks"):
        return [WeightAveraging(decay=0.9), FreezeSchedule({"first.*": "6 steps"}), saves]
    return [saves]


def make_module() -> Noisy:
    hookline.seed_everything(SEED)
    return Noisy()


class Digests(Hook):
    """The digest of the whole state after every update."""

    order = 10_000  # after all others

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, str] = {}

    def on_step_end(self, step: int, trainer: Any) -> None:
        self.seen[step] = digest(trainer)


def digest(trainer: Any) -> str:
    """Return a hash of weights, optimizers, the state of hooks, the batch, and the next random numbers."""
    s, found = trainer.state, hashlib.sha256()
    averaged = [each.hook.state_dict() for each in trainer.hooks.entries() if each.name == "weight_averaging"]
    weights = trainer.model.state_dict()
    if s.rank:  # checkpoints hold the statistics of rank zero
        weights = {name: each for name, each in weights.items() if "running" not in name}
    parts = [weights, [each.state_dict() for each in trainer.optimizers], averaged]
    parts += [list(s.batch), s.step, s.epoch, s.batch_idx, torch.get_rng_state(), str(random.getstate())]
    _add(found, parts)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        found.update(str(value.dtype).encode() + value.detach().cpu().contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        for key, each in value.items():
            found.update(str(key).encode())
            _add(found, each)
    elif isinstance(value, list | tuple):
        for each in value:
            _add(found, each)
    else:
        found.update(repr(value).encode())


def record(kind: str, folder: Path, **options: Any) -> dict[int, str]:
    """Run a fit of this kind in a folder; return the digest after every update."""
    digests, module = Digests(), make_module()
    trainer = Trainer(
        **{
            "seed": SEED,
            "run_dir": folder,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "num_sanity_val_steps": 1,
            "hooks": [*hooks(kind), digests],
            **KINDS[kind],
            **options,
        }
    )
    trainer.fit(module, **data(kind))
    return digests.seen


def check_rewinds(kind: str, folder: Path, digests: dict[int, str], steps: Iterable[int]) -> int:
    """Rewind a run to each of these steps; the state and the logged values are those of the run, bit for bit.

    Return the number of values that were compared.
    """
    values = 0
    for step in steps:
        again = make_run_again(
            folder, step, {"module": make_module(), **data(kind)}, hooks(kind), probes=[Digests()]
        )
        torch.rand(step)  # the state before does not matter
        with again.paused() as trainer:
            assert digest(trainer) == digests[step], f"{kind}, step {step}: another state"
            found = again.compared()
        assert trainer.global_step == step
        assert found.differences == [] and again.may_differ == [] and again.collector.detached == {}
        assert trainer.strategy.rank or found.values >= 2
        values += found.values
    return values


def choose_steps(kind: str, digests: dict[int, str], count: int, seed: int = 0) -> list[int]:
    """Return so many steps of a run, by chance, and always the same ones."""
    chosen = random.Random(f"{kind} {seed}")
    return [chosen.choice(list(digests)) for _ in range(count)]


def tree(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return every file and directory with its content, times, mode and number."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        about = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (content, about.st_mtime_ns, about.st_ctime_ns, about.st_mode, about.st_ino)
    return found
