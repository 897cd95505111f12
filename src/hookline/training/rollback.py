"""Going back to a checkpoint inside a running fit (`trainer.roll_back`).

A hook requests it at any time. The loop carries it out at the next boundary of all ranks. After it the run is
as in a new process that resumes from the checkpoint, bit for bit:

- `find_target` finds and reads the checkpoint before anything changes.
- `roll_back` clears what a new process would not have, restores the checkpoint with the functions of a
  resume, and saves the restored state. So a kill at any moment leaves a run that can be resumed: before this
  save from the checkpoints as they were, after it from the restored state.
- The checkpoints of the abandoned steps stay on disk. The newer ones list their numbers in their manifests,
  and no search chooses them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hookline.checkpoint.base_weights import left_out_in
from hookline.checkpoint.catalog import (
    EVERY_MONITOR,
    FoundCheckpoint,
    KeptBest,
    best_first,
    find_checkpoints,
    first_whole,
    is_within,
    save_number,
    with_outside,
)
from hookline.checkpoint.files import read_manifest, read_on_all_ranks
from hookline.metrics.metric_objects import metric_objects
from hookline.reliability.model_location import kept_best
from hookline.run.directory import ROLLBACK
from hookline.run.record import record_rollback
from hookline.run.run import Run, phase
from hookline.run.save_request import RollbackRequest, SaveRequest
from hookline.run.state import count_noun
from hookline.run.timer import timed
from hookline.training.batch_events import forget_batch
from hookline.training.composition import restart_accumulation
from hookline.training.restore import restore_module, restore_progress
from hookline.training.resume import Start, find_checkpoint
from hookline.training.run_events import report_loaded
from hookline.training.saving import finish_saving, save, save_due
from hookline.util.errors import CheckpointError, HooklineError
from hookline.util.urls import is_url, shown

log = logging.getLogger("hookline")
RESTORING = "going back to a checkpoint"
KEPT_REQUESTS = ("signal", "manual")
"""Reasons of requested checkpoints that are written after a rollback; others are of the abandoned state."""


# ---- the checkpoint to go back to --------------------------------------------------------------------------


@timed("saving")
def find_target(run: Run) -> bool:
    """Find and read the checkpoint of the requested rollback; return whether there is one.

    All ranks call it at the same boundary. Without a checkpoint it raises, or drops the request and warns.
    """
    request = run.resume.rollback
    assert request is not None
    if run.resume.target is not None:
        return True
    finish_saving(run)
    unusable: dict[Path, str] = {}
    if request.to is None or request.to == "best":
        found, unusable = _search(run, request)
    else:
        found = find_checkpoint(request.to, run.directory, ranks=run.strategy.ranks, option="to")
    if found is not None:
        _refuse_changed_base(run, found)
        run.resume.target = found
        return True
    limit = "" if request.before is None else f" of step {request.before} or before"
    which = "no monitor has kept a checkpoint" if request.to == "best" else f"there is no checkpoint{limit}"
    known = run.directory.existing()
    missing = (
        f"The run cannot go back at step {run.state.step} ({request.reason or 'requested by a hook'}): "
        f"{which} of this run{'' if known is None else f' below {known}'} that can be read. To save more "
        "often: ModelCheckpoint(every_n_train_steps=...) without a monitor, or Trainer(checkpoint={'every': "
        "'1 minute'}). With a monitor, ModelCheckpoint saves only when its metric has a new value."
    )
    text = "\n  ".join([missing, *unusable.values()])
    if request.on_missing == "raise":
        raise CheckpointError(text)
    run.resume.end_rollback()
    if run.state.rank == 0:
        excluded = sum(len(each.exclusions.pending) for each in run.data.loaders["train"])
        log.warning(
            "%s The run continues without going back.%s",
            text,
            f" From the next epoch on, {count_noun(excluded, 'sample', 'samples')} will be left out."
            if excluded
            else "",
        )
    return False


def _search(run: Run, request: RollbackRequest) -> tuple[Start | None, dict[Path, str]]:
    """Return the first checkpoint of the run that can be read, and why others before it cannot."""
    ranks, is_best = run.strategy.ranks, request.to == "best"
    kept = kept_best(run.state.hooks.entries()) if is_best else EVERY_MONITOR
    listed, url = ranks.decide(
        lambda: ([(str(each.path), each.manifest) for each in _candidates(run, is_best, kept)], kept.url)
    )
    candidates = [
        FoundCheckpoint(Path(path), manifest)
        for path, manifest in listed
        if request.before is None or manifest["step"] <= request.before
    ]
    chosen, contents, unusable = first_whole(candidates, lambda path: read_on_all_ranks(path, ranks))
    if chosen is None and url:
        return Start(url, read_on_all_ranks(url, ranks)), unusable
    return (None if chosen is None else Start(chosen.path, contents)), unusable


def _candidates(run: Run, is_best: bool, kept: KeptBest) -> list[FoundCheckpoint]:
    """Return the checkpoints of this run, the newest or the best first, without abandoned ones."""
    known = run.directory.existing()
    found = with_outside(find_checkpoints(known)[0] if known is not None else [], kept.paths, known)
    own = [
        each
        for each in found
        if each.run == run.identity.id and not is_within(save_number(each.manifest), run.saves.abandoned)
    ]
    return best_first(own, kept) if is_best else [*own, *_began_with(run, own)]


def _began_with(run: Run, known: list[FoundCheckpoint]) -> Iterator[FoundCheckpoint]:
    """Yield the checkpoint that the run was resumed from, if it is in another directory."""
    path = run.resume.path
    if path is not None and not is_url(path) and Path(path).is_dir():
        here = Path(path).resolve()
        if all(each.path.resolve() != here for each in known):
            yield FoundCheckpoint(Path(path), read_manifest(path))


def _refuse_changed_base(run: Run, found: Start) -> None:
    """Raise if the checkpoint leaves out weights that were trained after it: only a new process has them."""
    base = run.saves.base
    left_out = left_out_in(found.contents.get("module"))
    if base is None or not left_out:
        return
    base.hold_changed(run.module.state_dict(), run.strategy.ranks)
    if changed := sorted(left_out.keys() & base.held):
        raise CheckpointError(
            f"The run cannot go back to {shown(found.path)}: it leaves out weights that were frozen then and "
            f"have been trained since ({len(changed)}, such as {changed[0]}). Resume from it in a new "
            "process, or save with weights='all'."
        )


def check_can_roll_back(run: Run) -> None:
    """Raise if the loop has the rules of another package, or the training data cannot be read again."""
    if run.trainer.rules is not None:
        raise HooklineError(
            f"roll_back() works with hookline.Trainer, not with the rules of another trainer "
            f"({type(run.trainer.rules).__name__})."
        )
    for loader in run.data.loaders.get("train", ()):
        if loader.reader.kind == "stream" and isinstance(loader.source, Iterator):
            raise HooklineError(
                f"roll_back(): the training loader {loader.name!r} is an iterator "
                f"({type(loader.source).__name__}), which can be read only once. Pass a list, a DataLoader, "
                "or an object whose __iter__ begins again."
            )


# ---- going back --------------------------------------------------------------------------------------------


@phase(RESTORING)
def roll_back(run: Run) -> None:
    """Restore the checkpoint that `find_target` has found, on all ranks, and save the restored state."""
    s, request, target = run.state, run.resume.rollback, run.resume.target
    assert request is not None
    left = {"from_step": s.step, "from_epoch": s.epoch, "from_batch": run.progress.position}
    run.rows.write_pending()  # rows of the abandoned steps belong before the record that supersedes them
    run.rows.reduce({}, "rollback")
    run.progress.is_updating = True  # a failure in here leaves a state that must not be saved
    _clear_state(run, target.contents)
    run.resume.take_target()
    restore_module(run)
    restore_progress(run)
    run.progress.is_updating = False
    _abandon_saves(run, target.contents)
    s.logger.resume(run.resume.contents.pop("loggers", None), s.step, s.epoch, target.path)
    where = shown(target.path)
    done = {**left, "step": s.step, "epoch": s.epoch, "checkpoint": where, "reason": request.reason}
    s.logger.log_event("rollback", done)
    if s.rank == 0:
        log.warning(
            "Went back from step %d to step %d (%s)%s.",
            left["from_step"],
            s.step,
            where,
            f": {request.reason}" if request.reason else "",
        )
    run.resume.end_rollback()
    report_loaded(run, target.path)
    record_rollback(run, done)
    if not run.signals.number:  # else the checkpoint of the signal has this state
        # save it as the newest checkpoint, so that a resume does not choose an abandoned one
        path = None if run.saves.last is not None else run.run_dir() / "checkpoints" / ROLLBACK
        save(run, SaveRequest(path, "last", is_automatic=True))
        finish_saving(run)
    run.boundary.sync_point()
    save_due(run)  # before the next batch, because hooks request checkpoints of the restored state


def _clear_state(run: Run, saved: dict[str, Any]) -> None:
    """Clear what a checkpoint does not hold, so that the run is as in a new process."""
    s = run.state
    run.saves.requests[:] = [
        each for each in run.saves.requests if each is not None and each.reason in KEPT_REQUESTS
    ]
    run.data.train.leave(saved["loader"])
    run.saves.first_batches = None
    restart_accumulation(run)
    run.strategy.drop_window()
    if run.gradient_sync is not None:
        run.gradient_sync = run.gradient_sync.renewed()
    run.manual.forget_scaling()
    run.progress.abandon()
    run.watch.forget()
    for metric in metric_objects(run.module, s.log.objects()):
        metric.reset()
    s.log.clear()
    forget_batch(s)


def _abandon_saves(run: Run, contents: dict[str, Any]) -> None:
    """Record the numbers of the checkpoints after this one, for the manifests of later ones."""
    number, saves = save_number(contents), run.saves
    if contents.get("run") != run.identity.id or not number:
        return
    kept = [(first, last) for first, last in saves.abandoned if not first <= number <= last]
    after = [(number + 1, saves.count)] if saves.count > number else []
    saves.abandoned = [
        *(each for each in kept if not any(first <= each[0] and each[1] <= last for first, last in after)),
        *after,
    ]
