"""`checkpoints/last`: a fit saves its newest state there while it trains, when it ends and when it fails."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from hookline.checkpoint.base_weights import bit_sums
from hookline.checkpoint.files import read_manifest
from hookline.run.commands import handles_command
from hookline.run.directory import LAST, LAST_STATE
from hookline.run.finite import state_tensors
from hookline.run.run import Run
from hookline.run.save_request import Saved, SaveRequest
from hookline.training.restore import hooks_with_state
from hookline.training.saving import finish_saving, save
from hookline.util.errors import CheckpointError, OptionError, Preempted, RunLockedError
from hookline.util.processes import join
from hookline.util.urls import is_url, shown, url_beside

log = logging.getLogger("hookline")
OWN_REASONS = ("last", "signal", "exception")
"""Reasons of the checkpoints that this module writes. A `last` with another reason is not replaced."""
ENDING_SECONDS = 5.0
"""Seconds in which the timer's thread ends."""


class LastCheckpoint:
    """Save the newest state of a fit under one name, again and again after a fixed time.

    A thread of rank zero watches the clock and sends a command, which reaches all ranks at the same batch.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.began = run.stamp
        """The progress of the run when this process began to train."""
        self.saved: Saved | None = None
        """The newest checkpoint under this name that is durable."""
        self.asked: Saved | None = None
        """The newest durable checkpoint that a hook requested."""
        self.failed: Saved | None = None
        """The newest attempt, if it failed."""
        self._every = run.options.saving.every
        self._due: float | None = time.monotonic() + self._every
        """None: a save was requested and is not finished yet."""
        self._changed = threading.Event()
        self.is_over = False
        """Whether training has ended: then `save_final_state` saves."""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self.run.state.rank == 0:
            self._thread = threading.Thread(
                target=self._watch_the_clock, name="hookline last checkpoint", daemon=True
            )
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self.is_over = True
        self._changed.set()
        if self._thread is not None:
            join(self._thread, ENDING_SECONDS)

    def _watch_the_clock(self) -> None:
        while not self.is_over:
            self._changed.clear()
            due = self._due
            if (
                not self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
                and not self.is_over
            ):
                self._due = None
                self.run.participants.commands.send("keep_last")

    def note(self, saved: Saved) -> None:
        """Record the result of a save. The time to the next one counts from here."""
        known = self.run.directory.existing()
        # a signal, or a hook such as ModelCheckpoint(save_last=True), may have this path
        has_own_name = (
            known is not None
            and saved.reason in OWN_REASONS
            and Path(saved.path) == known / "checkpoints" / LAST
        )
        is_own = not is_url(saved.path) and (saved.is_automatic or has_own_name)
        if is_own:
            self.failed = saved if saved.error is not None else None
            self._due = time.monotonic() + self._every
            self._changed.set()
        if saved.error is None and is_own:
            self.saved = saved
        elif saved.error is None and not saved.is_automatic:
            self.asked = saved

    def path(self) -> Path:
        """Return the path that rank zero chooses: `checkpoints/last`, unless something else has that name."""
        path, problem = self.run.strategy.ranks.decide(self._choose_path)
        if problem:
            raise CheckpointError(f"checkpoints/{LAST} could not be written: {problem}")
        return Path(path)

    def _choose_path(self) -> tuple[str, str]:
        """Return the path, or the reason why there is none, so that all ranks raise, not only rank zero."""
        try:
            folder = self.run.run_dir() / "checkpoints"
            return str(folder / (LAST if _is_free(folder / LAST, self.run) else LAST_STATE)), ""
        except (OptionError, OSError) as error:
            return "", str(error)

    def is_behind(self) -> bool:
        """Return whether any rank has not yet tried to save its present state."""
        tried = self.failed or self.saved
        return any(self.run.strategy.ranks.gather(tried is None or tried.progress != self.run.stamp))

    def url(self) -> str | None:
        """Return a second path, beside the checkpoints of hooks that save to a URL; None if they do not."""
        return self.run.strategy.ranks.decide(self._choose_url)

    def _choose_url(self) -> str | None:
        newest = self.asked
        if (
            newest is None
            or not is_url(newest.path)
            or newest.reason == "manual"
            or newest.progress == self.run.stamp
        ):
            return None
        return url_beside(str(newest.path), LAST)


@handles_command("keep_last")
def _keep_last(run: Run, sender: int) -> None:
    if not run.saves.last.is_over:
        run.saves.requests.append(SaveRequest(None, "last", is_automatic=True))


def keeping_last(run: Run) -> contextlib.AbstractContextManager[None]:
    """Return a context around training that saves `checkpoints/last`, if the options ask for it."""
    if not run.options.saving.last or run.options.fast_dev_run:
        return contextlib.nullcontext()
    run.saves.last = LastCheckpoint(run)
    return run.saves.last  # type: ignore[no-any-return]


def save_final_state(run: Run) -> None:
    """Save the state that a fit ends with, unless `checkpoints/last` has it; wait until it is durable.

    Called before on_train_end and after it. What listeners of on_fit_end change is not saved.
    """
    if run.saves.is_final or run.resume.finished or run.saves.last is None:
        return
    finish_saving(run)
    if run.saves.last.is_behind():
        save(run, SaveRequest(None, "last", is_automatic=True))
        finish_saving(run)
        _report_unsaved(run)
    if (url := run.saves.last.url()) is not None:
        save(run, SaveRequest(url, "last", is_automatic=True))
        finish_saving(run)


def warn_of_missed_events(run: Run) -> None:
    """Warn if a batch is counted, and hooks with a state may not have received all of its events.

    Its weights are updated, so a resume does not train on it again.
    """
    s = run.state
    if s.current.returned is None or run.progress.position == s.current.batch_idx:
        return
    listening = {
        each.name
        for event in ("on_train_batch_end", "on_step_end")
        for each in run.plan.listeners(event)
        if each.receiver == "H"
    }
    if keeping := [each.name for each in hooks_with_state(s.hooks.entries()) if each.name in listening]:
        log.warning(
            "The run failed after the update of batch %d and before all hooks had received its events. The "
            "saved state counts the batch, so these hooks may lack it after a resume: %s. For the same bits, "
            "resume from an earlier checkpoint.",
            s.batch_idx,
            ", ".join(keeping),
        )


def keeps_failed_state(run: Run) -> bool:
    """Return whether to save the state of a failed fit: only if it has progressed and is consistent.

    A failure inside an optimizer step leaves some weights updated and some not. A second signal asks to exit
    without saving. A directory that another job has taken over must not be written to.
    """
    error, last = run.state.exception, run.saves.last
    if (
        last is None
        or error is None
        or run.saves.is_final
        or run.watch.broken
        or not run.state.step
        or run.stamp == last.began
    ):
        return False
    if isinstance(error, RunLockedError) or (
        run.signals.received and isinstance(error, KeyboardInterrupt | Preempted)
    ):
        return False
    return last.is_behind() and not run.progress.is_updating


@contextlib.contextmanager
def recording_changes(run: Run) -> Iterator[None]:
    """Count it as progress if listeners change weights or optimizer state inside the context.

    Averaged weights are often swapped in at on_train_end.
    """
    own_code = [
        each for each in run.plan.listeners("on_train_end") if getattr(each.owner, "tier", "user") == "user"
    ]
    before = sum_of_bits(run) if own_code else {}
    yield
    if own_code and (before is None or sum_of_bits(run) != before):
        run.progress.mark_changed()


def sum_of_bits(run: Run) -> dict[str, int] | None:
    """Return a sum over the bits of each parameter, buffer and optimizer state, to detect changes.

    None if a tensor (sparse, quantized) does not give access to its bits.
    """
    tensors = [*run.module.parameters(), *run.module.buffers()]
    tensors += [each for optimizer in run.state.optimizers for each in state_tensors(optimizer)]
    try:
        return bit_sums({str(index): each for index, each in enumerate(tensors) if not each.is_meta})
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def _is_free(path: Path, run: Run) -> bool:
    """Return whether the run may use this path: it is free, or has a checkpoint that may be replaced."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        return False
    if not path.exists():
        return True
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        # a damaged checkpoint may be replaced; the writer refuses a directory that is not a checkpoint
        return True
    return manifest["reason"] in OWN_REASONS or manifest.get("run") != run.identity.id


def _report_unsaved(run: Run) -> None:
    s = run.state
    if s.rank or run.saves.last.failed is None:
        return
    newest = (
        "Nothing of this run is saved."
        if run.saves.newest is None
        else f"The newest checkpoint is {shown(run.saves.newest.path)}, of step {run.saves.newest.step}."
    )
    log.warning(
        "This run was %s at step %d, but the model is NOT saved: its last state, of step %d, is not saved. "
        "%s",
        s.status,
        s.step,
        s.step,
        newest,
    )
