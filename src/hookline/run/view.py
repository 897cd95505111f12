"""The interface of `trainer` in hooks, in Hookline's trainer and in other loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.engine.events import EVENTS
from hookline.engine.hook_list import Handle, HookList
from hookline.engine.plan import Plan
from hookline.loggers.base import Loggers
from hookline.metrics.metric_log import Metrics
from hookline.run.state import State
from hookline.util.errors import AdvisesOnNames, HooklineError, closest


class View(AdvisesOnNames):
    """The base of the trainer, and of the objects that replace it in a loop that is not Hookline's."""

    state: State
    plan: Plan
    hooks: HookList
    loggers: Loggers
    plans_validations: bool = True
    """Whether an epoch's end shows if the run has validations. A loop of your own may validate later."""

    def __repr__(self) -> str:
        s = self.state
        at = f"{s.stage} {s.status} at {s.progress}" if s.stage else "no run yet"
        return (
            f"<{type(self).__name__}: {at}; hooks: "
            f"{', '.join(each.name for each in self.hooks.entries()) or 'none'}>"
        )

    # ---- the run -------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        """The id of the run, which a resumed run keeps; empty if it has none."""
        return ""

    @property
    def should_stop(self) -> bool:
        """Whether the run will stop. Set it to True in a hook to stop at the next batch boundary."""
        return self.state.should_stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        if stop:
            self.stop("trainer.should_stop was set")
        else:
            self.state.ending.withdraw_stop()

    def stop(
        self,
        reason: str = "trainer.stop() was called",
        status: str = "stopped",
        raises: BaseException | None = None,
    ) -> None:
        """End the run at the next batch boundary. If a stop was requested before, that one is kept.

        status: 'stopped', or 'pruned' if a search for hyperparameters ends the run. raises: an exception that
        `fit` raises once the run has ended in this way and everything is saved. It is not a failure: the run
        keeps its status.

        reason: text for the log and the run record.
        """
        self.state.request_stop(reason, status, raises)

    @property
    def metrics(self) -> Metrics:
        """The newest values, read as floats."""
        return self.state.log.newest

    @property
    def model(self) -> Any:
        """The user's module."""
        return self.state.module

    module = model

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of the run."""
        return self.state.optimizers

    @property
    def global_step(self) -> int:
        """Optimizer updates so far."""
        return self.state.step

    @property
    def current_epoch(self) -> int:
        """The current epoch, from 0."""
        return self.state.epoch

    @property
    def status(self) -> str:
        """'training', 'completed', 'stopped', 'pruned', 'preempted', 'interrupted' or 'error'."""
        return self.state.status

    # ---- logging -------------------------------------------------------------------------------------------

    @property
    def logger(self) -> Loggers:
        """All loggers as one."""
        return self.loggers

    def log(
        self,
        name: str,
        value: Any,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        prog_bar: bool = False,
        reduce: str = "mean",
        batch_size: int | None = None,
    ) -> None:
        """Log a number from a hook; as `Module.log`.

        name: the name of the metric, such as 'train/acc'. value: a number, or a tensor with one element.
        on_step, on_epoch: log the value of each step, or one value for the epoch; None: each step in
        training, the epoch in an evaluation. prog_bar: also show it in the progress bar. reduce: 'mean',
        'sum', 'min', 'max' or 'last', over the batches of the epoch and over the ranks. batch_size: the
        weight of the value in a mean; None: the samples of the batch.
        """
        self.state.log.log(name, value, on_step, on_epoch, prog_bar, reduce, batch_size)

    def log_dict(self, values: Mapping[str, Any], **options: Any) -> None:
        """Log several numbers from a hook.

        values: numbers by name. options: those of `log`.
        """
        for name, value in values.items():
            self.log(name, value, **options)

    # ---- hooks ---------------------------------------------------------------------------------------------

    def add_hook(self, hook: Any, name: str | None = None) -> Handle:
        """Register a hook, before or during a run. During a run it is set up at once.

        hook: an instance, a class without required arguments, or a function marked with `@on`. name: the name
        of the hook; None: its own.
        """
        return self.hooks.add(hook, name)

    def remove_hook(self, hook: Any) -> Any:
        """Remove a hook and return it. During a run its teardown is called.

        hook: its name, the object or its class.
        """
        return self.hooks.remove(hook)

    def enable_hook(self, name: str) -> None:
        """Switch a hook on again.

        name: the name of the hook.
        """
        self.hooks.enable(name)

    def disable_hook(self, name: str) -> None:
        """Switch a hook off; it keeps its order and its state.

        name: the name of the hook.
        """
        self.hooks.disable(name)

    def emit(self, event: str, **facts: Any) -> Any:
        """Emit an event that `hookline.declare_event` declared; return the replaced fact, if it has one.

        event: its name. facts: the value of every fact of the event.
        """
        row = EVENTS.named(event)
        if row.inside != "own":
            raise HooklineError(f"{row.name} is emitted by the loops; emit() takes events that you declared.")
        if facts.keys() != set(row.facts):
            known, got = ", ".join(row.facts) or "none", ", ".join(facts) or "none"
            unknown = [each for each in facts if each not in row.facts]
            missing = ", ".join(each for each in row.facts if each not in facts)
            why = closest(unknown[0], row.facts) if unknown else f" Missing: {missing}."
            raise HooklineError(f"{row.name} has the facts {known}; got {got}.{why}")
        before, self.state.subject.own = self.state.own, dict(facts)
        try:
            getattr(self.plan, row.name)(self.state)
            return self.state.own.get(row.replaces)
        finally:
            self.state.subject.own = before
