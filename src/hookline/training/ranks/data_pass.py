"""Evaluation and prediction of one rank among several, and padding batches for a rank without data."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hookline.data.loaders import Loader
from hookline.distributed.comm import Answer
from hookline.engine.binding import Caller
from hookline.engine.plan import Plan
from hookline.metrics.metric_log import MetricLog
from hookline.metrics.metric_objects import metric_objects
from hookline.run.run import Run
from hookline.run.state import State
from hookline.training.batch_events import transfer
from hookline.training.data_pass import DataPass


def empty_copy(log: MetricLog) -> MetricLog:
    """Return a log with the same newest values, for a padding batch to write into."""
    made = MetricLog()
    made.mode, made.prefix, made.loader, made.weight = log.mode, log.prefix, log.loader, 0
    made.newest = log.newest.copy()
    return made


@contextlib.contextmanager
def separate_log(s: State) -> Iterator[None]:
    """Let the steps inside the context log into a copy, which is discarded."""
    log, s.log = s.log, empty_copy(s.log)
    try:
        yield
    finally:
        s.log = log


def run_padding(run: Run, step: Caller) -> None:
    """Run a step on a padding batch, so that the collectives of a forward pass match; discard the result."""
    plan, s = run.plan, run.state
    transfer(plan, s, run.traits.transfers)  # its events may change the batch to what the step expects
    backup = PaddingBackup(run.module, s.log)
    try:
        with separate_log(s):
            step(s)
    finally:
        backup.restore()


class PaddingBackup:
    """A copy of what a padding batch would change: metrics, and buffers such as those of batch norm."""

    def __init__(self, module: nn.Module, log: MetricLog) -> None:
        self._metrics = [(each, _metric_state(each)) for each in metric_objects(module, log.objects())]
        self._buffers = [
            (owner, name, each, each.detach().clone())
            for owner in module.modules()
            for name, each in owner._buffers.items()
            if each is not None
        ]

    def restore_buffers(self) -> None:
        """Restore the buffers, once: later changes by hooks and the update happen on all ranks and stay."""
        for owner, name, buffer, before in self._buffers:
            buffer.data.copy_(before)  # .data: autograd may have saved the buffer for a backward pass
            owner._buffers[name] = buffer
        self._buffers = []

    def restore(self) -> None:
        """Restore the metrics, and the buffers if they were not restored yet."""
        self.restore_buffers()
        for metric, state in self._metrics:
            vars(metric).update(state)


def _metric_state(metric: Any) -> dict[str, Any]:
    """Return a copy of what an update changes, without methods: torchmetrics binds them to the instance."""
    return {
        name: copy.deepcopy(value)
        for name, value in vars(metric).items()
        if not callable(value) and name != "_modules"
    }


class RankPass(DataPass):
    """A pass of one rank: all ranks end it after the same batch; a rank without data runs padding batches."""

    def __init__(self, run: Run, can_be_cut: bool) -> None:
        super().__init__(run, can_be_cut)
        self._asked: Answer | None = None

    def take(self, loader: Loader, measure: Callable[[], None], step: Callable[[Plan], Caller]) -> None:
        """Measure the batch. For a padding batch only run the step, and only if the forward communicates."""
        if not loader.sharding.rank_batch.is_padding:
            measure()
        elif self.run.strategy.forward_communicates:
            run_padding(self.run, step(self.run.plan))

    def is_over(self) -> bool:
        """Return whether the pass is stopped, by the answer of all ranks to the batch before."""
        run = self.run
        mine = (run.signals.received, run.state.should_stop and run.stage != "fit")
        before, self._asked = self._asked, run.strategy.ranks.largest(mine)
        signal, stop = (0, False) if before is None else before.read()
        return self.end_if(signal, bool(stop))
