"""Hooks that come, go, fail or ask for something on one rank only. Run by test_hooks.py under torchrun."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from loggers.folder_tracker import FolderTracker, tracked
from ranks import start_cases
from ranks.worlds import RANK, Deep, distance, fit, in_float32, mine, pairs, quiet, report
from torch import Tensor, nn
from torch.nn import functional as F

from hookline import DDP, FSDP, SKIP_STEP, Hook, Trainer
from hookline.checkpoint.files import read
from hookline.distributed.comm import Round
from hookline.hooks import LRFinder, ModelCheckpoint, NaNGuard

DATA = pairs(8)
STRATEGIES: dict[str, Callable[..., Any]] = {"ddp": DDP, "fsdp": FSDP}


class Asks(Hook):
    """Asks for what takes all ranks to find out."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_step_end(self, step: int, loss: float, grad_norm: float, tokens_seen: int) -> None:
        self.seen.append([step, float(loss), float(grad_norm)])


class AsksOnZero(Asks):
    ranks = "zero"


class Fails(Asks):
    on_error = "disable"

    def on_step_end(self, step: int, loss: float, grad_norm: float, rank: int) -> None:  # type: ignore[override]
        if rank == 1 and step == 2:
            raise ValueError("not here")
        self.seen.append([step])


class Skips(Hook):
    def on_before_optimizer_step(self, step: int) -> Any:
        return SKIP_STEP if step == 5 else None


class Adds(Hook):
    """Adds a hook in the middle, on one rank only."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def on_train_batch_end(self, trainer: Trainer, rank: int, batch_idx: int) -> None:
        if rank == 1 and batch_idx == 1:
            trainer.add_hook(self.hook)


class Removes(Hook):
    def on_train_batch_end(self, trainer: Trainer, rank: int, batch_idx: int) -> None:
        if rank == 1 and batch_idx == 1:
            trainer.disable_hook("asks")


def ended(*hooks: Hook, strategy: Any, **options: Any) -> dict[str, Any]:
    """Where training with these hooks led, and what they have seen."""
    weights, trainer = fit(strategy, mine(DATA), hooks=list(hooks), **options)
    seen = [
        each.seen
        for each in (*hooks, *(one.hook for one in hooks if isinstance(one, Adds)))
        if isinstance(each, Asks)
    ]
    total = sum(each.double().sum().item() for each in weights.values())
    return {"step": trainer.state.step, "weights": total, "seen": seen, "on": trainer.hooks.list_hooks()}


class Reads(Hook):
    """Asks for nothing, but reads it."""

    def on_step_end(self, state: Any) -> None:
        float(state.grad_norm)


class Manual(Deep):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()


class Normed(Deep):
    """Batch norm: its averages are each rank's own until they are brought together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)) + self.blocks[0](self.blocks[1](self.first(x)))))

    def measure(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]).to(batch[1].dtype), batch[1])

    def on_validation_batch_end(self) -> None:
        self.averages = self.norm.running_mean.tolist()  # type: ignore[union-attr]


def batch_norm(precision: str) -> list[Any]:
    """How far sharded training is from training with copies, and the averages that validation has used."""
    far, averages = [], []
    for make in STRATEGIES.values():
        data = mine(pairs(8))
        weights, trainer = fit(make(precision=precision), data, Normed, data)
        far.append({name: each for name, each in weights.items() if "norm.running" not in name})
        averages.append(trainer.state.module.averages)
    return [distance(*far), averages]


def batch_norms() -> list[Any]:
    exact = batch_norm("32")
    with in_float32():
        return [exact, batch_norm("bf16-mixed")]


def range_test(make: Callable[..., Any]) -> list[Any]:
    torch.manual_seed(3)
    finder = LRFinder(min_lr=1e-5, steps=16, plot=False)
    suggested = finder.find(quiet(make(), max_epochs=9), Deep(), mine(DATA))
    return [suggested, finder.losses]


class Validates(Hook):
    def __init__(self, *ranks: int) -> None:
        self.on_ranks = ranks
        self.found: list[dict[str, float]] = []

    def on_step_end(self, trainer: Trainer, step: int, rank: int) -> None:
        if step == 3 and rank in self.on_ranks:
            self.found.append({name: float(value) for name, value in trainer.validate().items()})


def validated() -> list[Any]:
    hook = Validates(0, 1)
    fit(DDP(), mine(DATA), val=mine(DATA[:3]), hooks=[hook])
    return hook.found


class Spy(Hook):
    """Writes down which of the questions that ranks ask each other is asked, and which is read, from one batch to the next."""

    def setup(self) -> None:
        self.noted: list[list[Any]] = []
        self.rounds, self.number = dict[int, int](), 0
        begin, read = Round.begin, Round.read

        def begins(round_: Round, values: Any) -> None:
            self.number += 1
            self.rounds[id(round_)] = self.number
            self.noted.append(["asks", self.number])
            begin(round_, values)

        def reads(round_: Round) -> list[int]:
            self.noted.append(["reads", self.rounds.get(id(round_), 0)])
            return read(round_)

        self.before, Round.begin, Round.read = (begin, read), begins, reads  # type: ignore[method-assign,assignment]

    def on_train_batch_start(self, batch_idx: int) -> None:
        if batch_idx == 1:
            self.noted.clear()
        if batch_idx == 7:
            self.kept = list(self.noted)

    def teardown(self) -> None:
        Round.begin, Round.read = self.before  # type: ignore[method-assign]


def spied() -> list[Any]:
    hook = Spy()
    fit(DDP(), mine(DATA), hooks=[hook])
    return hook.kept


def logged(make: Callable[..., Any], save: str) -> list[Any]:
    """The checkpoints that the tracker of rank zero got: their names, files and steps."""
    run_dir = f"logged-{make.__name__}-{save}"
    tracker = FolderTracker(f"{run_dir}-tracked", artifacts=("config", "checkpoints"))
    saver = ModelCheckpoint(every_n_train_steps=4, save_top_k=1, filename="{step}")
    fit(
        make(),
        mine(DATA),
        hooks=[saver],
        logger=tracker,
        run_dir=run_dir,
        checkpoint={"write": save, "last": False},
    )
    if RANK:
        return []  # while rank zero may still be closing its logger
    got = [(path, facts["file"]) for path, facts in tracked("checkpoint", f"{run_dir}-tracked")]
    return [
        [name, sorted(each.name for each in path.iterdir()), read(path)["counters"]["step"]]
        for path, name in got
    ]


def main() -> None:
    importlib.import_module("ranks.patient")
    report("timeouts", start_cases.timeouts)
    for name, make in STRATEGIES.items():
        report(f"{name}: comes", lambda m=make: ended(Adds(Asks()), strategy=m()))
        report(f"{name}: goes", lambda m=make: ended(Asks(), Removes(), strategy=m()))
        report(f"{name}: fails", lambda m=make: ended(Fails(), strategy=m()))
        report(f"{name}: on zero", lambda m=make: ended(*[AsksOnZero()][RANK:], strategy=m()))
        report(f"{name}: skips", lambda m=make: ended(Adds(Skips()), strategy=m()))
        report(f"{name}: range test", lambda m=make: range_test(m))
    report("logged", lambda: [logged(DDP, "sync"), logged(FSDP, "async")])
    report("guard", lambda: ended(NaNGuard(check=("gradients", "parameters")), strategy=FSDP()))
    report("reads", lambda: ended(Reads(), strategy=FSDP()))
    report("manual", lambda: ended(AsksOnZero(), strategy=FSDP(), make=Manual))
    report("batch norm", batch_norms)
    report("validate on all", validated)
    report("questions", spied)
    start_cases.main()
    report(
        "validate on one", lambda: fit(DDP(), mine(DATA), val=mine(DATA[:3]), hooks=[Validates(0)])
    )  # no rank can continue after it
