"""The events of a run, its epochs and its checkpoints: each is emitted here and nowhere else, with its facts.

The trainer's loops call these functions, and so does a hosted run (`interop/hosted`) from another loop.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hookline.metrics.metric_log import MissingMetric
from hookline.run.parts import EmittingRun
from hookline.run.rows import rescued_row
from hookline.run.save_request import Saved
from hookline.training.batch_events import set_outputs

log = logging.getLogger("hookline")

# ---- from set-up to teardown -------------------------------------------------------------------------------


def begin(run: EmittingRun, status: str) -> None:
    """Set the status of a new run, and clear the ending of an earlier one."""
    ending = run.state.ending
    ending.withdraw_stop()
    ending.status, ending.exception = status, None


def set_up(run: EmittingRun) -> None:
    """Emit setup. From here on `tear_down` emits teardown to every listener."""
    run.participants.setup_began = True
    run.plan.setup(run.state)


def start_fit(run: EmittingRun) -> None:
    """Emit on_fit_start, after set-up is complete."""
    run.plan.on_fit_start(run.state)


def start_training(run: EmittingRun) -> None:
    """Emit on_train_start."""
    run.plan.on_train_start(run.state)


def set_paused(run: EmittingRun, is_paused: bool) -> None:
    """Let `trainer.validate()` work while the run is paused, as at the end of a step."""
    run.state.nested_validate = is_paused


def end_training(run: EmittingRun) -> None:
    """Emit on_train_end. Call `end_as` first."""
    run.plan.on_train_end(run.state)


def end_fit(run: EmittingRun) -> None:
    """Emit on_fit_end, the last event of a fit that did not fail."""
    run.plan.on_fit_end(run.state)


def end_as(run: EmittingRun, status: str) -> None:
    """Set the status of a run that ended without a failure."""
    run.state.ending.status = status


def mark_failed(run: EmittingRun, error: BaseException) -> None:
    """Set the status and the exception of a failed run, before anything else is done."""
    s = run.state
    s.ending.exception, s.running = error, None
    s.ending.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"


def report_failure(run: EmittingRun) -> list[BaseException]:
    """Emit on_exception; return what its listeners raised."""
    return run.plan.on_exception(run.state) or []


def tear_down(run: EmittingRun) -> list[BaseException]:
    """Emit teardown to every listener whose set-up began; return what they raised."""
    return run.plan.teardown(run.state) or []


def tear_down_strategy(run: EmittingRun) -> list[BaseException]:
    """Emit strategy_teardown; return what it raised."""
    return run.plan.strategy_teardown(run.state) or []


def release(run: EmittingRun) -> None:
    """Free the traceback and the tensors of a failed step."""
    run.state.ending.exception = None
    set_outputs(run.state, None)


# ---- epochs ------------------------------------------------------------------------------------------------


def start_epoch(run: EmittingRun, first: int, loader: str = "", emits: bool = True) -> None:
    """Emit on_train_epoch_start. first: the number of its first batch, above 0 in a resumed epoch."""
    s = run.state
    s.counts.epoch = s.counts.epochs_seen
    s.current.batch_idx, s.current.dataloader_idx, s.current.dataloader_name = first, 0, loader
    if not first:
        s.log.begin("train")
    if emits:
        run.plan.on_train_epoch_start(s)


def end_epoch(run: EmittingRun, results: dict[str, Any], is_complete: bool) -> dict[str, Any]:
    """Emit on_train_epoch_end; return the metrics of the epoch with what listeners logged for their row.

    Values of steps since the last row are not values of the epoch: they get a row of their own before it.
    results: the epoch's metrics.
    """
    s = run.state
    if is_complete:
        s.counts.epochs_seen += 1
    of_steps = s.log.step_values()
    s.nested_validate = True
    with rescued_row(s, results, "epoch"):
        try:
            run.plan.on_train_epoch_end(s)
        except MissingMetric as error:
            if is_complete:
                raise
            log.warning("%s The epoch was cut short before they were logged: use metrics.get().", error)
    s.nested_validate = False
    run.progress.mark_changed()
    pending, s.log.pending = s.log.pending, {}
    unchanged = {name for name, value in of_steps.items() if pending.get(name) is value}
    reduced = run.rows.reduce(pending, "epoch")
    run.rows.write({name: value for name, value in reduced.items() if name in unchanged})
    return results | {name: value for name, value in reduced.items() if name not in unchanged}


def count_epoch(run: EmittingRun) -> None:
    """Count an epoch of another loop that ran without its events."""
    counts = run.state.counts
    counts.epoch, counts.epochs_seen = counts.epochs_seen, counts.epochs_seen + 1


# ---- checkpoints -------------------------------------------------------------------------------------------


def edit_saved(run: EmittingRun, contents: dict[str, Any], path: Path | str, reason: str) -> dict[str, Any]:
    """Emit on_save_checkpoint; return the contents as listeners have edited them."""
    s = run.state
    s.subject.checkpoint, s.subject.path, s.subject.reason = contents, path, reason
    run.plan.on_save_checkpoint(s)
    contents, s.subject.checkpoint = s.subject.checkpoint, None
    return contents


def report_saved(run: EmittingRun, saved: Saved, on_error: str) -> None:
    """Emit on_checkpoint_save or on_checkpoint_failed; raise for a failed save if `on_error` is 'raise'."""
    s = run.state
    s.subject.path, s.subject.reason, s.subject.saved_step = saved.path, saved.reason, saved.step
    if saved.error is None:
        s.logger.log_checkpoint(saved.path, saved.reason, saved.step)  # before listeners remove older ones
        run.plan.on_checkpoint_save(s)
    elif on_error == "raise" and not saved.is_automatic:
        raise saved.error
    else:
        log.warning("%s The run continues without it.", saved.error)
        s.ending.exception = saved.error
        run.plan.on_checkpoint_failed(s)
        s.ending.exception = None


def begin_loading(run: EmittingRun, contents: dict[str, Any]) -> None:
    """Set `state.checkpoint` to the contents that are about to be restored."""
    run.state.subject.checkpoint = contents


def edit_loaded(run: EmittingRun) -> dict[str, Any]:
    """Emit on_load_checkpoint; return the contents as listeners have edited them."""
    run.plan.on_load_checkpoint(run.state)
    contents: dict[str, Any] = run.state.subject.checkpoint
    return contents


def report_loaded(run: EmittingRun, path: Path | str | None) -> None:
    """Emit on_checkpoint_load, after everything was restored."""
    s = run.state
    s.subject.checkpoint, s.subject.path = None, path
    run.plan.on_checkpoint_load(s)
