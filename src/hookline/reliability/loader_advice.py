"""Warn once if a fit mostly waits for its training loader, with advice for that loader."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader

from hookline.engine.cost import format_seconds
from hookline.run.run import Run
from hookline.run.state import State
from hookline.run.timer import RunTimer

MOSTLY = 0.4
"""The share of the training time above which waiting is worth a warning."""
ENOUGH_SECONDS, ENOUGH_BATCHES = 10.0, 20
"""There is no warning before this, because workers start, caches fill and kernels compile."""
FEWEST_WORKERS = 2
"""One worker alone is as slow as the main process."""
MOST_WORKERS = 8
"""More are not suggested at once: each one takes memory."""
log = logging.getLogger("hookline")


@dataclass(frozen=True, slots=True)
class Waiting:
    """The seconds that a fit has spent so far."""

    data: float
    """Seconds spent waiting for the loader."""
    first: float
    """The part of `data` until the first batch of each epoch."""
    epochs: int
    training: float
    """Seconds of training, including the waiting."""
    batches: int

    @classmethod
    def of(cls, s: State) -> Waiting:
        """Return what the timer of a fit has measured."""
        timer: RunTimer = s.timer
        batches = s.batches_seen - timer.batches_before
        return cls(timer.data_seconds, timer.first_waits / 1e9, timer.epochs, timer.training_seconds, batches)


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """The settings of a training loader."""

    name: str
    workers: int | None
    """None if it is not a DataLoader."""
    persistent: bool = False
    pinned: bool = False
    ahead: int = 0
    """Batches that a thread fetches ahead."""
    may_run_ahead: bool = False
    """Whether `prefetch_batches` has an effect on it."""


def check_waiting(run: Run, timer: RunTimer, is_last: bool = False) -> None:
    """Warn once, on one rank, that the run mostly waits for its loader. is_last: the fit ends."""
    s = run.state
    if timer.data_seconds < MOSTLY * ENOUGH_SECONDS or timer.warned or run.options.fast_dev_run:
        return
    waiting = Waiting.of(s)
    if not mostly_waits(waiting):
        return
    if s.rank and not timer.is_second_check and not is_last:
        timer.is_second_check = True  # if all ranks wait, rank zero warns at its first check
        return
    timer.warned = True
    if not run.strategy.ranks.is_first(f"slow loader {run.identity.id} {run.identity.started_at}"):
        return
    loaders = [loader_facts(each) for each in run.data.loaders["train"]]
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or s.world_size)
    log.warning(
        "%s",
        advice(
            waiting,
            loaders,
            max(1, usable_cores() // local),
            on_cuda=run.strategy.device.type == "cuda",
            who=f"Rank {s.rank}" if s.rank else "Training",
        ),
    )


def warn_of_waiting(s: State, loader: Any) -> None:
    """Warn once, on rank 0, if a hand-written loop mostly waits for its loader."""
    if s.timer.warned or not mostly_waits(waiting := Waiting.of(s)):
        return
    s.timer.warned = True
    if s.rank == 0:
        cores = max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE") or s.world_size))
        on_cuda = getattr(s.device, "type", "") == "cuda"
        log.warning("%s", advice(waiting, [source_facts("train", loader)], cores, on_cuda))


def compare_waiting(run: Run) -> None:
    """Find the rank that has waited longest for its loader. All ranks call this once, at the end of a fit."""
    ranks, timer = run.strategy.ranks, run.state.timer
    if not ranks.alone:
        waits = [seconds for (seconds,) in ranks.gather_numbers([timer.data_seconds])]
        timer.longest_wait = max(waits), waits.index(max(waits))


def mostly_waits(waiting: Waiting) -> bool:
    """Return whether waiting takes most of the training time, without the wait for the first batch of all."""
    if waiting.training < ENOUGH_SECONDS or waiting.batches < ENOUGH_BATCHES:
        return False
    once = waiting.first if waiting.epochs < 2 else 0.0
    return waiting.data - once >= MOSTLY * (waiting.training - once)


def advice(
    waiting: Waiting, loaders: list[LoaderFacts], cores: int, on_cuda: bool, who: str = "Training"
) -> str:
    """Return how long the run waits for data, and what to change. who: waits, the run or a rank."""
    share, each = waiting.data / waiting.training, waiting.data / max(1, waiting.batches)
    head = (
        f"{who} waits for data {share:.0%} of its time ({format_seconds(waiting.data)} of "
        f"{format_seconds(waiting.training)}, {format_seconds(each)} a batch)."
    )
    loader = min(loaders, key=lambda one: (one.workers or 0, one.name))
    at_starts = waiting.epochs > 1 and waiting.first > waiting.data / 2
    return f"{head} {_change(loader, cores, on_cuda, at_starts)}"


def _change(loader: LoaderFacts, cores: int, on_cuda: bool, at_starts: bool) -> str:
    name, many = repr(loader.name), min(MOST_WORKERS, max(FEWEST_WORKERS, cores - 1))
    has = f"this process can use {cores} cores"
    if cores == 1 and not loader.workers:
        return (
            f"The loader {name} makes its batches in the main process, and this process can use only 1 core: "
            "give it more cores, for worker processes, or do less work for each "
            "sample."
        )
    if loader.workers is None:
        return (
            f"The loader {name} makes its batches in the main process: pass a "
            f"torch.utils.data.DataLoader(dataset, num_workers={many}), which makes them in worker "
            f"processes ({has})."
        )
    if not loader.workers:
        return (
            f"The loader {name} makes its batches in the main process: DataLoader(..., num_workers={many}) "
            f"makes them in worker processes ({has})."
        )
    if at_starts and not loader.persistent:
        return (
            f"Most of it is before the first batch of an epoch, when the {loader.workers} workers of the "
            f"loader {name} start: DataLoader(..., persistent_workers=True) keeps them."
        )
    changes = []
    if loader.workers < cores:
        more = min(cores, max(many, 2 * loader.workers))
        changes.append(f"DataLoader(..., num_workers={more}) instead of {loader.workers} ({has})")
    else:  # more workers do not help
        workers = "1 worker is" if loader.workers == 1 else f"{loader.workers} workers are"
        changes.append(
            f"less work for each sample: {workers} not enough, so the dataset itself is "
            "slow, its __getitem__ or its transforms (decode and resize once before training, use faster "
            "storage)"
        )
    if on_cuda and not loader.pinned:
        changes.append("DataLoader(..., pin_memory=True)")
    if loader.may_run_ahead and not loader.ahead:
        changes.append("Trainer(prefetch_batches=2), which fetches batches while the model trains")
    return f"For the loader {name} try {', or '.join(changes)}."


def loader_facts(loader: Any) -> LoaderFacts:
    """Return the settings of a loader."""
    found = source_facts(loader.name, loader.source)
    return replace(found, ahead=loader.ahead, may_run_ahead=loader.reader.may_run_ahead)


def source_facts(name: str, source: Any) -> LoaderFacts:
    """Return the settings of a loader as the user has made it."""
    if not isinstance(source, DataLoader):
        return LoaderFacts(name, None)
    return LoaderFacts(name, source.num_workers, bool(source.persistent_workers), bool(source.pin_memory))


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
