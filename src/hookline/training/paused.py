"""A fit that pauses after an update, for a caller that examines the run there. `hookline.rewind` uses it.

The events up to the pause are those of any fit. Then the caller works with the run, whose hooks, optimizers
and batch are all in place. After that everything is torn down. No event of an ending is emitted but
`teardown`, and nothing is saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hookline.data.seeding import seed_everything
from hookline.distributed.comm import Ranks
from hookline.reliability.watchdog import Watchdog
from hookline.run.record import record_end
from hookline.run.run import Run
from hookline.training import run_events
from hookline.training.fit import fit
from hookline.training.lifecycle import (
    RunParticipants,
    controlled,
    determinism,
    join_ranks,
    leave_run,
    locked,
    monitoring_ranks,
    prepare_run,
    set_up_strategy,
    wait_for_ranks,
)
from hookline.training.participants import raise_first
from hookline.training.resume import Start, choose_start
from hookline.training.rules import LoopRules

if TYPE_CHECKING:
    from hookline.training.trainer import Trainer


class Reached(BaseException):
    """Leaves the loop of a fit at its pause. It is not an error."""


class NotReached(Exception):
    """The fit has ended before its pause. The message is the reason why the fit has ended."""


class PausingRules(LoopRules):
    """Hookline's decisions in a fit that pauses; `after_update` decides where."""

    def __init__(
        self,
        after_update: Callable[[Run], bool],
        keeps_failure: Callable[[Run, Exception], bool] | None = None,
    ) -> None:
        """Take after_update, which is called after every batch that made an update, and returns whether to
        pause. keeps_failure: returns whether to pause at an error of the training instead of raising it.
        """
        self._after_update = after_update
        self.keeps_failure = keeps_failure or (lambda run, error: False)
        self._step: int | None = None
        """The updates at the last call."""

    def warn_of_other_hooks(self, run: Run, warn_of_hooks: Callable[[], None]) -> None:
        """Do not warn: some hooks of the run are left out on purpose."""

    def validation_due(self, run: Run) -> Callable[[], bool] | None:
        """Return a function that pauses the fit, or else decides as usual; it is called after each batch."""
        due = super().validation_due(run)

        def is_due() -> bool:
            self.window_closed(run)
            return due is not None and due()

        self._step = run.state.step  # an earlier one, if the run has gone back to a checkpoint
        return is_due

    def window_closed(self, run: Run) -> None:
        """Pause if the update that was just made is the last one."""
        step = run.state.step
        if step != self._step:
            self._step = step
            if self._after_update(run):
                raise Reached


class DroppedRequests(list[Any]):
    """The requests for checkpoints of a run that saves none."""

    def append(self, request: Any) -> None:
        """Ignore the request."""


@contextlib.contextmanager
def paused_fit(
    trainer: Trainer,
    arguments: Mapping[str, Any],
    find_start: Callable[[Ranks], Start | None],
    rules: PausingRules,
    prepare: Callable[[Run], None] = lambda run: None,
) -> Iterator[Run]:
    """Run a fit to its pause, and yield the run; tear it down at the end of the `with`.

    arguments: those of `fit`, without `resume`. find_start: returns the checkpoint to begin with; all ranks
    call it. prepare: called when all hooks are known, before they are set up. Signals have their usual
    effect: Ctrl-C raises KeyboardInterrupt at once.
    """
    given = {"datamodule": None, "loss": None, "step": None, "optimizer": None, "mixture": None, **arguments}
    loaders = {"train": given.get("train"), "val": given.get("val")}
    run = trainer._start(
        "fit", given["module"], given["datamodule"], loaders, given["loss"], given["step"], given["optimizer"]
    )
    run.traits.rules = rules
    run.saves.requests = DroppedRequests()
    wait_for_ranks(run)
    run.data.mixture = given["mixture"]
    trainer._directory.renew()
    with locked(run):
        choose_start(run, find_start(run.strategy.ranks), trainer._directory)
        with (
            determinism(trainer.options.deterministic),
            controlled(run),
            monitoring_ranks(run),
            _current(trainer, run),
            trainer.auditing.during(run),
            trainer.digesting.during(run),
            _standing(run, rules, prepare),
        ):
            yield run


@contextlib.contextmanager
def _current(trainer: Trainer, run: Run) -> Iterator[None]:
    """Make this the current run of the trainer, and seed it."""
    if trainer.options.seed is not None:
        seed_everything(trainer.options.seed)
    trainer._run = trainer._last = trainer._fitted = run
    trainer.state = run.state
    try:
        yield
    finally:
        trainer._run = None


@contextlib.contextmanager
def _standing(run: Run, rules: PausingRules, prepare: Callable[[Run], None]) -> Iterator[None]:
    """Set up the run and train to the pause; tear down at the end, also after a failure."""
    participants = RunParticipants(run)
    run.plan.up.clear()
    failures: list[BaseException] = []
    strategy_is_up = False
    try:
        participants.attach()
        prepare(run)
        hangs = run.options.hangs
        with Watchdog(run, hangs.after, abort=hangs.action == "abort"):
            if not run.strategy.ranks.alone:
                join_ranks(run)
            participants.begin()
            prepare_run(run)
            strategy_is_up = True
            set_up_strategy(run)
            _train_to_pause(run, rules)
        run_events.set_paused(run, True)
        yield
        run_events.end_as(run, "stopped")
    except BaseException as error:
        run_events.mark_failed(run, error)
        if run.failure_monitor is not None:
            run.failure_monitor.report_failure(error)
        failures.append(error)
    run_events.set_paused(run, False)
    record_end(run)
    if strategy_is_up:
        failures += run_events.tear_down_strategy(run)
    failures += leave_run(run, participants)
    raise_first(failures)


def _train_to_pause(run: Run, rules: PausingRules) -> None:
    try:
        fit(run)
    except Reached:
        run.rows.write_pending()
        run.rows.reduce({}, "pause")
    except Exception as error:
        if not rules.keeps_failure(run, error):
            raise
    else:
        raise NotReached(run.state.stop_reason or "its limits are reached")
