"""One pass of one rank among several over data without training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hookline.data.loaders import Loader
from hookline.distributed.comm import Answer
from hookline.engine.binding import Caller
from hookline.engine.plan import Plan
from hookline.metrics.metric_log import MetricLog
from hookline.run.run import Run
from hookline.training.batch_events import transfer
from hookline.training.data_pass import DataPass

# ---- A rank that is out of batches while others are not


def blank(log: MetricLog) -> MetricLog:
    """A log that shows what the other one does and keeps what is written into it to itself."""
    made = MetricLog()
    made.mode, made.prefix, made.loader, made.weight = log.mode, log.prefix, log.loader, 0
    made.newest = log.newest.copy()
    return made


def run_padding(run: Run, step: Caller) -> None:
    """Run an evaluation's step for the sake of the others, whose forward needs this rank. Its batch counts
    for nothing.
    """
    plan, s = run.plan, run.state
    transfer(plan, s, run.traits.transfers)  # its events may make of a batch what the step expects
    log, kept = s.log, Kept(run.module, s.log)
    s.log = blank(log)
    try:
        step(s)
    finally:
        s.log = log
        kept.put_back()


class Kept:
    """What a step that counts for nothing would change, as it was before: metric objects, and buffers (batch
    norm's averages).
    """

    def __init__(self, module: nn.Module, log: MetricLog) -> None:
        self._metrics = [(each, _state(each)) for each in metric_objects(module, log)]
        self._buffers = [
            (owner, name, each, each.detach().clone())
            for owner in module.modules()
            for name, each in owner._buffers.items()
            if each is not None
        ]

    def put_back_buffers(self) -> None:
        """Once. What hooks and the update do with them later is done on all ranks, and stays."""
        for owner, name, each, before in self._buffers:
            each.data.copy_(before)  # not in the eyes of autograd, which may have kept it for a backward
            owner._buffers[name] = each
        self._buffers = []

    def put_back(self) -> None:
        """All that has not been put back yet."""
        self.put_back_buffers()
        for each, state in self._metrics:
            vars(each).update(state)


def metric_objects(module: nn.Module, log: MetricLog) -> Iterator[Any]:
    """Objects that add up what they see (torchmetrics, by duck type): parts of the module, or logged."""
    for each in {id(each): each for each in (*module.modules(), *log.objects())}.values():
        if all(callable(getattr(each, name, None)) for name in ("update", "compute", "reset")):
            yield each


def _state(metric: Any) -> dict[str, Any]:
    """What an update changes. Methods are left out: those of torchmetrics lie in the
    instance, bound to it.
    """
    return {
        name: copy.deepcopy(value)
        for name, value in vars(metric).items()
        if not callable(value) and name != "_modules"
    }


class RankPass(DataPass):
    """A pass of one rank among several: they end it after the same batch, and one that is out of data runs
    padding batches.
    """

    def __init__(self, run: Run, can_be_cut: bool) -> None:
        super().__init__(run, can_be_cut)
        self._asked: Answer | None = None

    def take(self, loader: Loader, measure: Callable[[], None], step: Callable[[Plan], Caller]) -> None:
        """Measure the batch. A padding batch only runs its step, and only where the other ranks' forward
        needs this rank.
        """
        if not loader.sharding.rank_batch.is_padding:
            measure()
        elif self.run.strategy.forward_communicates:
            run_padding(self.run, step(self.run.plan))

    def is_over(self) -> bool:
        """Return what all ranks have said one batch before."""
        run = self.run
        said = (run.signals.received, run.state.should_stop and run.stage != "fit")
        before, self._asked = self._asked, run.strategy.ranks.largest(said)
        signal, stop = (0, False) if before is None else before.read()
        return self.end_if(signal, bool(stop))
