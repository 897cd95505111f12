"""Random runs whose batches name their samples, so that the samples behind each update are known for certain.

Used in one process by tests/training/test_samples.py, and by ranks under torchrun.
"""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from hookline import SKIP_BATCH, SKIP_STEP, Hook, Mixture, Module, Trainer
from hookline.run.sample_order import read_order

Found = dict[int, list[tuple[str, int, int]]]
"""The samples behind each step: loader, rank and index, sorted."""


class Weighed(Module):
    """A model of one weight; its loss does not depend on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.layer(batch[0] * 0).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Witness(Hook):
    """Sees the samples of each update in the batches themselves, and skips some batches and updates."""

    def __init__(self, seed: int, skips: bool, crash: int = -1) -> None:
        super().__init__("witness")
        self.seed, self.skips, self.crash = seed, skips, crash
        self.window: list[tuple[str, int, int]] = []
        self.steps: Found = {}
        self.wrong: list[Any] = []

    def chance(self, *place: int) -> float:
        return random.Random(repr((self.seed, *place))).random()

    def on_train_batch_start(
        self,
        trainer: Any,
        batch: Any,
        epoch: int,
        batch_idx: int,
        dataloader_name: str,
        rank: int,
        sample_ids: Any,
    ) -> Any:
        ids = batch[0].int().flatten().tolist()
        if sample_ids != ids:
            self.wrong.append((epoch, batch_idx, sample_ids, ids))
        if self.skips and self.chance(epoch, batch_idx) < 0.1:
            return SKIP_BATCH
        totals = trainer._run.data.totals
        if totals is None or not totals.rank_batch.is_padding:  # such a batch has no weight
            self.window += [(dataloader_name or "train", rank, each) for each in ids]
        return None

    def on_before_optimizer_step(self, epoch: int, batch_idx: int) -> Any:
        if self.skips and self.chance(epoch, batch_idx, 1) < 0.1:
            return SKIP_STEP
        return None

    def on_step_skipped(self) -> None:
        self.window = []

    def on_train_epoch_end(self) -> None:
        self.window = []

    def on_after_optimizer_step(self, step: int) -> None:
        self.steps[step], self.window = sorted(self.window), []

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen == self.crash:
            trainer.save_checkpoint()
        elif batches_seen == self.crash + 2 >= 2:
            raise RuntimeError("half way")

    def state_dict(self) -> dict[str, Any]:
        return {"window": self.window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window = [tuple(each) for each in state["window"]]


def loader(rng: random.Random, world_size: int, workers: bool = False) -> DataLoader[Any]:
    """An ordinary loader, any of them."""
    samples = rng.randint(12, 30) * world_size
    data = TensorDataset(torch.arange(float(samples)).reshape(-1, 1))
    more: dict[str, Any] = {"batch_size": rng.randint(1, 4), "drop_last": rng.random() < 0.3}
    kind = rng.choice(["sequential", "shuffled", "shuffled", "generator", "subset", "weighted", "drawn"])
    seed = rng.randint(0, 99)
    if kind in ("shuffled", "generator"):
        more["shuffle"] = True
    if kind == "generator":
        more["generator"] = torch.Generator().manual_seed(seed)
    elif kind == "subset":
        more["sampler"] = SubsetRandomSampler(sorted(rng.sample(range(samples), samples // 2 + 1)))
    elif kind == "weighted":
        more["sampler"] = WeightedRandomSampler([rng.random() for _ in range(samples)], samples)
    elif kind == "drawn":
        more["sampler"] = torch.utils.data.RandomSampler(data, replacement=True, num_samples=samples // 2 + 1)
    if workers:
        more["num_workers"] = 2
    return DataLoader(data, **more)


def plan(seed: int, world_size: int = 1, workers: bool = False) -> dict[str, Any]:
    """The settings of a random run."""
    rng = random.Random(seed)
    names = [f"data{number}" for number in range(rng.choice([1, 1, 1, 2, 3]))]
    order = rng.choice(["weighted", "alternating", "sequential", "random", "proportional"])
    return {
        "seed": seed,
        "names": names,
        "order": order,
        "weights": {name: rng.choice([1.0, 2.0, 5.0]) for name in names},
        "exhausted": rng.choice(["cycle", "end"]),
        "accumulate": rng.choice([1, 1, 2, 3]),
        "epochs": rng.randint(2, 4),
        "skips": rng.random() < 0.4,
        "stops": rng.random() < 0.6,
        "excludes": rng.random() < 0.3,
        "workers": workers,
        "world_size": world_size,
    }


def data_of(chosen: dict[str, Any]) -> dict[str, Any]:
    """The training data of a run, made as new."""
    rng = random.Random(chosen["seed"] + 1)
    loaders = {name: loader(rng, chosen["world_size"], chosen["workers"]) for name in chosen["names"]}
    if len(loaders) == 1:
        return {"train": next(iter(loaders.values()))}
    settings: dict[str, Any] = {"when_exhausted": chosen["exhausted"]}
    if chosen["order"] in ("weighted", "random"):
        settings["weights"] = chosen["weights"]
    if chosen["order"] == "alternating":
        settings["pattern"] = chosen["names"]
    order = chosen["order"] if chosen["order"] != "proportional" else "weighted"
    if chosen["order"] == "proportional":
        settings["weights"] = chosen["weights"]
    return {"train": loaders, "mixture": Mixture(order, **settings)}


class Excludes(Hook):
    """Leaves out samples in the middle of an epoch, so from the next one on."""

    def __init__(self, at: int, samples: dict[str | None, list[int]]) -> None:
        super().__init__("excludes")
        self.at, self.samples = at, samples

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen == self.at:
            for name, ids in self.samples.items():
                trainer.exclude_samples(ids, name, reason="a test")


def run(chosen: dict[str, Any], folder: Path) -> tuple[Found, list[Any], Trainer]:
    """Run it, in one or two lives; return what was seen on this rank, wrong facts, and the trainer."""
    rng = random.Random(chosen["seed"] + 2)
    first = rng.choice([{"max_steps": rng.randint(1, 6)}, {"crash": rng.randint(1, 9)}])
    seen, wrong, trainer = Found(), [], None
    for life, end in enumerate([first, {}] if chosen["stops"] else [{}]):
        witness = Witness(chosen["seed"], chosen["skips"], end.get("crash", -1))
        hooks: list[Any] = [witness]
        if chosen["excludes"]:
            names = [None] if len(chosen["names"]) == 1 else chosen["names"]
            hooks.append(
                Excludes(rng.randint(1, 5) if life == 0 else 10**9, {name: [1, 3, 4] for name in names})
            )
        trainer = Trainer(
            max_epochs=chosen["epochs"],
            max_steps=end.get("max_steps", -1),
            accumulate_grad_batches=chosen["accumulate"],
            seed=chosen["seed"],
            run_dir=folder,
            hooks=hooks,
            logger=False,
            enable_progress_bar=False,
            control=False,
        )
        torch.manual_seed(chosen["seed"])
        with contextlib.suppress(RuntimeError):
            trainer.fit(Weighed(), **data_of(chosen), **({"resume": "auto"} if life else {}))
        seen |= witness.steps
        wrong += witness.wrong
    assert trainer is not None
    return seen, wrong, trainer


def compare(seen: Found, trainer: Trainer, folder: Path, rank: int = 0) -> list[str]:
    """Compare the samples of each step, as the trainer and the record compute them, with those that were seen."""
    ways = {"trainer": trainer.samples}
    if rank == 0:
        ways["record"] = read_order(json.loads((folder / "run.json").read_text())["order"]).samples
    problems = []
    for step, expected in seen.items():
        for who, found in [(name, way(step)) for name, way in ways.items()]:
            names = sorted((each.loader, each.rank, each.id) for each in found if each.rank == rank)
            if names != expected:
                problems.append(f"step {step} by the {who}: {names}, trained on {expected}")
    return problems
