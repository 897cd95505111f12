"""Rows of metrics: listeners may edit them before they go to the loggers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from hookline.engine.plan import Plan, noop
from hookline.engine.slots import add_failure_note
from hookline.metrics.accumulator import Accumulator
from hookline.metrics.metric_log import Metrics, NotANumber
from hookline.run.state import State


class MetricRows:
    """The rows of a run in one process."""

    def __init__(self, plan: Plan, state: State) -> None:
        self.plan = plan
        self.state = state

    def write(
        self, values: dict[str, Any], over: str = "step", step: int | None = None, epoch: int | None = None
    ) -> None:
        """Let listeners edit a row, then send it to the loggers. over: 'step', 'epoch' or 'evaluation'."""
        write_row(self.plan, self.state, values, over, step, epoch)

    def write_pending(self) -> None:
        """Write the values that were logged since the last row."""
        log = self.state.log
        if log.pending:
            pending, log.pending = log.pending, {}
            self.write(pending)

    def reduce(self, values: dict[str, Any], kind: str = "row") -> dict[str, Any]:
        """Return a row's values over all processes. kind: identifies the caller."""
        return values

    def finish(
        self, mode: str, more: Mapping[str, Accumulator], pending: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the results of a pass over data. pending: values that were logged for the next row."""
        return self.state.log.finish(mode, more=more)

    def flush(self) -> None:
        """Write rows that are still waiting, at the end of a run."""


def write_row(
    plan: Plan, s: State, values: dict[str, Any], over: str, step: int | None = None, epoch: int | None = None
) -> None:
    """Let listeners edit a row of metrics, then send it to the loggers, with one device read for the row.

    over: 'step', 'epoch' or 'evaluation', which the numbers are values or means of. step, epoch: by default
    the current ones.
    """
    has_listeners = over != "evaluation" and plan.on_train_metrics is not noop
    if not values or not (s.logger or has_listeners):
        return
    row: Mapping[str, float] = {}
    s.subject.row_over = over
    if has_listeners:
        measured = dict(values)
        with rescued_row(s, measured, over, step, epoch, with_pending=False):
            edited = edit_row(plan, s, values)
            row = _read_edited(plan, s, edited, measured) if s.logger else {}
    else:
        row = Metrics(values).read()
    if s.logger:
        s.logger.log_row(row, s.step if step is None else step, s.epoch if epoch is None else epoch, over)


def edit_row(plan: Plan, s: State, values: dict[str, Any]) -> Metrics:
    """Emit on_train_metrics and return the edited row."""
    s.subject.row = Metrics(values)
    plan.on_train_metrics(s)
    row: Metrics = s.subject.row
    s.subject.row = None
    return row


def _read_edited(plan: Plan, s: State, row: Metrics, measured: dict[str, Any]) -> Mapping[str, float]:
    """Read an edited row from the device; blame the hooks for a value that is not a number."""
    try:
        return row.read()
    except NotANumber as error:
        if error.name not in measured or measured[error.name] is not row.raw()[error.name]:
            _blame_editors(error, plan, s)
        raise


@contextlib.contextmanager
def rescued_row(
    s: State,
    values: dict[str, Any],
    over: str,
    step: int | None = None,
    epoch: int | None = None,
    with_pending: bool = True,
) -> Iterator[None]:
    """Write the measured row if a listener fails inside the `with`, then raise its error.

    with_pending: also write what listeners have logged inside it.
    """
    try:
        yield
    except BaseException as error:
        if s.logger and not s.sanity_checking:
            try:
                pending, s.log.pending = (s.log.pending, {}) if with_pending else ({}, s.log.pending)
                row = Metrics({**values, **pending}).read()
                s.logger.log_row(
                    row, s.step if step is None else step, s.epoch if epoch is None else epoch, over
                )
            except Exception as problem:  # raise the first error
                error.add_note(f"its metrics could not be logged: {type(problem).__name__}: {problem}")
        raise


def _blame_editors(error: NotANumber, plan: Plan, s: State) -> None:
    """Name the hook, or the candidates, that added a metric to a row."""
    editors = plan.listeners("on_train_metrics")
    if len(editors) == 1:
        add_failure_note(error, editors[0], s)
    else:
        error.add_note(
            f"put there in on_train_metrics, by one of {', '.join(each.label for each in editors)}"
        )
