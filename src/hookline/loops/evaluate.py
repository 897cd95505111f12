"""Validation and test: the same loop under two sets of names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hookline.accumulator import Accumulator
from hookline.binding import Caller
from hookline.data.batch import batch_size
from hookline.data.loaders import Loader
from hookline.errors import OptionError, StopTraining
from hookline.loops.aggregating import aggregated
from hookline.loops.data_pass import DataPass
from hookline.loops.guests import see_off
from hookline.loops.rows import rescued_row
from hookline.loops.run import Run
from hookline.loops.timer import timed
from hookline.metrics import Metrics
from hookline.plan import Plan
from hookline.state import State, is_scalar

Slot = Callable[[Plan], Caller]


@dataclass(frozen=True, slots=True)
class Names:
    """The slots of one kind of evaluation, fetched at each event because hooks may come and go."""

    kind: str
    """Of loaders, and what its metrics begin with."""
    model_eval: Slot
    start: Slot
    epoch_start: Slot
    batch_start: Slot
    step: Slot
    batch_end: Slot
    epoch_end: Slot
    end: Slot
    model_train: Slot


VALIDATION = Names(
    "val",
    model_eval=attrgetter("on_validation_model_eval"),
    start=attrgetter("on_validation_start"),
    epoch_start=attrgetter("on_validation_epoch_start"),
    batch_start=attrgetter("on_validation_batch_start"),
    step=attrgetter("validation_step"),
    batch_end=attrgetter("on_validation_batch_end"),
    epoch_end=attrgetter("on_validation_epoch_end"),
    end=attrgetter("on_validation_end"),
    model_train=attrgetter("on_validation_model_train"),
)  # fmt: skip

TEST = Names(
    "test",
    model_eval=attrgetter("on_test_model_eval"),
    start=attrgetter("on_test_start"),
    epoch_start=attrgetter("on_test_epoch_start"),
    batch_start=attrgetter("on_test_batch_start"),
    step=attrgetter("test_step"),
    batch_end=attrgetter("on_test_batch_end"),
    epoch_end=attrgetter("on_test_epoch_end"),
    end=attrgetter("on_test_end"),
    model_train=attrgetter("on_test_model_train"),
)  # fmt: skip


@timed("validation")
def evaluate(run: Run, names: Names, limit: int | None = None, *, can_be_cut: bool = False) -> Metrics:
    """One pass over every loader. The training it may interrupt finds everything as it left it."""
    plan, s, log = run.plan, run.state, run.state.log
    loaders = run.data.loaders[names.kind]
    own = OwnMetrics(names.kind, several=len(loaders) > 1)
    logged = log.pending
    with Interlude(s), torch.no_grad():  # hooks around the batches often try out the model, and keep what comes out
        s.modes = [(module, module.training) for module in run.module.modules()]
        names.model_eval(plan)(s)
        run.strategy.begin_evaluation(run.module)
        names.start(plan)(s)
        names.epoch_start(plan)(s)
        log.begin("eval")
        log.prefix = names.kind
        data = make_pass(run, can_be_cut)
        for s.dataloader_idx, loader in enumerate(loaders):
            s.dataloader_name = loader.name
            log.loader = loader.name if own.several else ""
            if not go_through(run, names, own, loader, limit, data):
                break
        log.mode = "now"
        log.loader = ""
        results = run.rows.finish("eval", own.sums, logged)
        if own.several:
            results |= aggregated(results, names.kind, [each.name for each in loaders], run.options.val_aggregation)
        log.newest.raw().update(results)
        with rescued_row(s, results, "evaluation"):
            names.epoch_end(plan)(s)
            names.end(plan)(s)
            names.model_train(plan)(s)
        results.update(run.rows.reduce(log.pending, "evaluation"))
    if not s.sanity_checking:
        run.rows.write(results, "evaluation")
    return Metrics(results)


def make_pass(run: Run, can_be_cut: bool) -> DataPass:
    """Return the pass that this run needs."""
    if run.strategy.ranks.alone:
        return DataPass(run, can_be_cut)
    from hookline.loops.rank_pass import RankPass

    return RankPass(run, can_be_cut)


def go_through(run: Run, names: Names, own: OwnMetrics, loader: Loader, limit: int | None, data: DataPass) -> bool:
    """Evaluate one loader's batches; return whether the pass continues with the next loader."""
    plan, s = run.plan, run.state
    is_empty = True
    fetcher = data.open(loader, limit)
    while fetcher.fetch():
        is_empty = False
        data.take(loader, lambda: evaluate_batch(run, plan, s, names, own), names.step)
        if data.is_over():
            return False
    if is_empty:
        raise OptionError(f"The {names.kind} loader {loader.name!r} yielded no batch; a generator can be "
                          "iterated over only once, pass a list or a DataLoader.")  # fmt: skip
    return True


def evaluate_batch(run: Run, plan: Plan, s: State, names: Names, own: OwnMetrics) -> None:
    """One batch: move, measure, tell."""
    s.cache.clear()
    s.log.batch_values.clear()
    plan.on_before_batch_transfer(s)
    for move in run.traits.transfers:
        s.batch = move(s)
    plan.on_after_batch_transfer(s)
    s.batches_in_pass += 1
    s.log.mode = "eval"
    s.log.weight = batch_size(s.batch)
    names.batch_start(plan)(s)
    try:
        s.returned = names.step(plan)(s)
    except StopTraining as stop:
        s.returned = None
        s.request_stop(stop.reason)
    s.last_loss = own.take(s.returned, s.log.weight, s.dataloader_name)
    names.batch_end(plan)(s)
    if run.participants.leaving:
        see_off(run)


class OwnMetrics:
    """What the steps return, reduced without being asked: `val/loss`, and per loader if there are several."""

    def __init__(self, prefix: str, several: bool) -> None:
        self.prefix = prefix
        self.several = several
        self.sums: dict[str, Accumulator] = {}

    def take(self, returned: Any, weight: float, loader: str) -> Tensor | None:
        """Add a step's numbers; the loss among them is returned."""
        if isinstance(returned, dict):
            values = {key: value for key, value in returned.items() if is_scalar(value)}
        else:
            values = {"loss": returned} if isinstance(returned, Tensor) and returned.numel() == 1 else {}
        for key, value in values.items():
            value = value.detach() if isinstance(value, Tensor) else value
            self._add(f"{self.prefix}/{key}", value, weight)
            if self.several:
                self._add(f"{self.prefix}/dl_{loader}/{key}", value, weight)
        loss = values.get("loss")
        return loss.detach() if isinstance(loss, Tensor) else None

    def _add(self, name: str, value: Any, weight: float) -> None:
        if name not in self.sums:
            self.sums[name] = Accumulator()
        self.sums[name].add(value, weight)


def restore_modes(s: State) -> None:
    """Every submodule gets back its own flag, which need not be the same everywhere (a frozen part in eval mode)."""
    for module, training in s.modes:
        if module.training is not training:
            module.training = training


class Interlude:
    """Puts back the facts of the batch that an evaluation interrupts."""

    FACTS = ("batch", "batch_idx", "cache", "dataloader_idx", "dataloader_name", "fetch_ns", "last_loss", "modes", "returned")

    def __init__(self, s: State) -> None:
        self.s = s

    def __enter__(self) -> None:
        s = self.s
        self.facts = [getattr(s, name) for name in self.FACTS]
        self.log = (s.log.mode, s.log.weight, s.log.batch_values, s.log.pending, s.log.loader)
        s.cache, s.log.batch_values, s.log.pending, s.log.mode = {}, {}, {}, "now"

    def __exit__(self, kind: object, *error: object) -> None:
        s = self.s
        if kind is not None:
            restore_modes(s)  # the evaluation failed before it could
        for name, value in zip(self.FACTS, self.facts, strict=True):
            setattr(s, name, value)
        s.log.mode, s.log.weight, s.log.batch_values, s.log.pending, s.log.loader = self.log
