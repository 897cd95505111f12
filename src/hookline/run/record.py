"""`run.json`, the run record: the run's id, settings, progress and ending.

Rank zero writes it when a fit starts, at checkpoints and ends of epochs, and when the fit ends. In the
directory of an earlier run, a new run writes it after its first update, and a resumed run after its
checkpoint was restored. Whether the run can be resumed depends on checkpoints alone, not on the record. A
process that is killed leaves the status "training"; the lock of the directory shows whether a job is still
running (`lock.is_running`).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hookline.run.provenance import data_settings, provenance
from hookline.run.run import Run
from hookline.util.errors import HangError, HookError, LossError, OptionError
from hookline.util.limited_json import RECORD_BYTES, is_count, parse_json, read_within
from hookline.util.text import error_text, mask, mask_text
from hookline.util.urls import is_url, shown

log = logging.getLogger("hookline")
RECORD = "run.json"
RECORD_VERSION = 1
"""The version of the fields. Older files have no version, and only WHOLE, `epochs` and `noted_at`."""
WHOLE: dict[str, type] = {"id": str, "status": str, "step": int, "reason": str, "limits": dict}
MOST_SESSIONS = 100
"""The number of sessions (starts and resumes) that are kept: the first and the newest ones."""
MOST_ENTRIES = 100
"""The number of rollbacks and exclusions that are kept: the first and the newest ones of each."""
MOST_FILES = 200
"""The number of checkpoint files of another format that are kept: the newest ones."""
UPDATE_SECONDS = 1.0
"""The shortest time between two updates during a run; a write takes about 0.3 ms."""
FILE_FACTS = ("step", "epoch", "reason", "monitor", "saved_at")
"""The facts of a checkpoint file that the record has, as the manifest of a directory has them."""
LARGE = ("order", "config", "settings", "hooks", "module", "options", "data", "metrics")
"""The fields to leave out, in this order, if the record is larger than the reader accepts."""


def limits(run: Run) -> dict[str, Any]:
    """Return the limits that must change for a finished run to continue."""
    options = run.options
    return {"max_epochs": options.max_epochs, "max_steps": options.max_steps, "max_time": options.max_seconds}


class RunRecord:
    """The record of a running fit, in the process that writes it."""

    def __init__(self, run: Run, run_dir: Path) -> None:
        self.path = run_dir / RECORD
        known = read_record(run_dir)
        is_same = known.get("id") == run.identity.id
        self.before = known if is_same else {}
        """The record of the same run before this session; empty for a new run."""
        self.earlier = {} if is_same else known
        """The record of another run that the directory still belongs to; empty after `take_directory`."""
        self._resume = run.resume
        self.on_taken: list[Callable[[], None]] = []
        """What is logged once this run has taken the directory."""
        self._written = -UPDATE_SECONDS
        self._warned = False
        now = _now()
        counters = run.resume.contents.get("counters", {})
        at = (
            [counters.get(name) for name in ("step", "epochs_seen")] if isinstance(counters, dict) else [0, 0]
        )
        step, epochs = (each if is_count(each) else 0 for each in at)
        self.session: dict[str, Any] = {
            "started_at": now,
            "ended_at": None,
            "status": "training",
            "reason": "",
            "first_step": step,
            "step": step,
            "resumed_from": None if run.resume.path is None else shown(run.resume.path),
        }
        self.data: dict[str, Any] = {
            "version": RECORD_VERSION,
            "id": run.identity.id,
            "status": "training",
            "reason": "",
            "error": None,
            "step": step,
            "epochs": epochs,
            "limits": limits(run),
            "loggers": [_class_name(each) for each in run.state.logger.members],
            "noted_at": now,
            "started_at": _string_or_empty(self.before.get("started_at")) or now,
            "ended_at": None,
            "starts": _count_starts(self.before) + 1,
            "sessions": [*_ended_sessions(self.before), self.session],
            "rollbacks": _tables(self.before, "rollbacks"),
            "exclusions": _tables(self.before, "exclusions"),
            "files": _tables(self.before, "files"),
            **_started_with(run),
        }
        position = run.resume.contents.get("position")
        if isinstance(position, dict) and position.get("order"):
            self.data["order"] = position[
                "order"
            ]  # a kill before the next update keeps that of the steps so far

    def update(self, run: Run, at_once: bool = False) -> None:
        """Write the progress, `at_once` or if the last update was at least `UPDATE_SECONDS` ago."""
        if at_once or time.monotonic() - self._written >= UPDATE_SECONDS:
            is_new = "settings" not in self.data  # the directory was created after training had started
            self._set_progress(run)
            if is_new:
                self.describe(run)
            else:
                self.write()

    def describe(self, run: Run) -> None:
        """Write the settings of the optimizers and the loaders, after they are made, and log the file."""
        self.data.update(
            settings=mask(run.identity.settings),
            data=data_settings(run),
            monitors=monitors_of(run.state.hooks.entries()),
        )
        self.write()
        if not self.earlier:
            run.state.logger.log_config(self.path, run.identity.id)

    def add(self, run: Run, field: str, done: dict[str, Any]) -> None:
        """Add an entry to 'rollbacks' or 'exclusions', and write the record at once."""
        entries: list[Any] = self.data[field]
        entries.append({"at": _now(), **done, "reason": mask_text(done["reason"])})
        del entries[1 : len(entries) - MOST_ENTRIES + 1]
        self._set_progress(run)
        self.write()

    def add_file(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Add a checkpoint that is a file of another format, and leave out those that do not exist any more.

        A path in the run's directory is relative to it, so that the directory can be moved.
        """
        folder, target = self.path.parent.absolute(), path.absolute()
        name = str(target.relative_to(folder) if target.is_relative_to(folder) else target)
        facts = {**facts, "saved_at": _now()}
        entry = {"path": name, "saves": facts["saves"], **{key: mask(facts[key]) for key in FILE_FACTS}}
        there = [
            each
            for each in self.data["files"]
            if each.get("path") != name and (folder / str(each.get("path"))).is_file()
        ]
        self.data["files"] = [*there, entry][-MOST_FILES:]

    def end(self, run: Run) -> None:
        """Write how the run ended."""
        s, error = run.state, run.state.exception
        ended = {"status": s.status, "reason": mask_text(s.stop_reason)}
        known = None if error is None else _describe_error(error)
        self._set_progress(run)
        self.data["noted_at"] = self.data["ended_at"] = self.session["ended_at"] = _now()
        self.session.update(ended)
        self.data.update(ended, error=known)
        self.write()

    def _set_progress(self, run: Run) -> None:
        s = run.state
        self.data.update(
            step=s.step,
            epochs=s.epochs_seen,
            noted_at=_now(),
            monitors=monitors_of(run.state.hooks.entries()),
            checkpoint=_newest_checkpoint(run),
            order=None
            if run.data.order is None
            else {**run.data.order.state_dict(), "reached": list(run.reached)},
        )
        self.session["step"] = s.step

    def write(self) -> None:
        """Write the file atomically. A failure is a warning and does not end the run.

        A resumed run keeps the record as it was until its checkpoint is restored, because a resume that is
        refused must not change the run: the next one compares its limits with those in the record.
        """
        if self.earlier or self._resume.was_refused:
            return
        temporary = self.path.with_name(f".{RECORD}.{os.getpid()}")
        sessions: list[Any] = self.data["sessions"]
        if len(sessions) > MOST_SESSIONS:
            del sessions[1 : len(sessions) - MOST_SESSIONS + 1]
        try:
            temporary.write_text(_encode_record(self.data), encoding="ascii")
            temporary.replace(self.path)
        except (OSError, ValueError, TypeError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            log_once = log.debug if self._warned else log.warning
            log_once("%s could not be written: %s. The run continues without it.", self.path, error)
            self._warned = True
        self._written = time.monotonic()


def begin_record(run: Run) -> None:
    """Write the record when a fit starts, if the fit writes files. Call it on every rank; rank zero writes.

    That is a fit with loggers or checkpoints and a directory, or one in the directory of an earlier run.
    """
    if (
        run.stage != "fit"
        or run.state.rank
        or run.options.fast_dev_run
        or run.resume.finished
        or run.identity.record is not None
    ):
        return
    known = run.directory.existing()
    if run.options.saving.last or (known is not None and (run.traits.logs or (known / RECORD).exists())):
        run.identity.record = RunRecord(run, run.run_dir())
        run.identity.record.write()


def take_directory(run: Run) -> None:
    """Replace the record and the log of an earlier run in the directory by those of this run.

    It is called at the first update or checkpoint. A run that ends before it, or is killed, has nothing to
    resume from or to show: it leaves the directory to the run that was there.
    """
    record = run.identity.record
    if record is not None and record.earlier:
        record.earlier = {}
        for action in record.on_taken:
            action()
        record._set_progress(run)
        record.describe(run)


def take_if_trained(run: Run) -> None:
    """Take the directory if an update was made, also that of a window which the epoch's end has closed."""
    record = run.identity.record
    if record is not None and record.earlier and run.state.step != record.session["first_step"]:
        take_directory(run)


def leaves_directory(run: Run) -> bool:
    """Return whether the run must not write into its directory: it still belongs to an earlier run, or the
    checkpoint to resume from is not restored yet and may be refused.
    """
    return run.resume.was_refused or (run.identity.record is not None and bool(run.identity.record.earlier))


def is_refused(run: Run, error: BaseException | None = None) -> bool:
    """Return whether a new fit was refused, by an error about its arguments, before its first batch ended.

    error: the one that ended it; None: that of the state, which has it until the run is over.
    """
    error, record = error or run.state.exception, run.identity.record
    return (
        isinstance(error, OptionError | HookError | LossError)
        and not isinstance(error, HangError)
        and run.stage == "fit"
        and not (run.state.batches_seen or run.resume.path or run.saves.newest)
        and not (record is not None and record.before)
    )


def discard_files(run: Run) -> None:
    """Delete the record and the logs of a fit that was refused. Its directory is removed if it is empty then.

    A directory that belongs to an earlier run, or has other files, keeps them. So does one in which a tracker
    has begun a run.
    """
    record = run.identity.record
    if record is not None and not record.earlier:
        record.path.unlink(missing_ok=True)
    run.state.logger.discard()
    run.directory.is_abandoned = True


def update_record(run: Run) -> None:
    """Write the progress at the end of an epoch; loggers may have created the directory only now."""
    known = run.identity.record
    take_if_trained(run)
    begin_record(run)
    record = run.identity.record
    if record is not None and known is None:
        record.describe(run)
    elif record is not None:
        record.update(run)


def record_checkpoint(run: Run, saved: Path | str, facts: Mapping[str, Any] | None = None) -> None:
    """Write the progress after a checkpoint. A run without loggers gets its record with the first one.

    facts: those of a file in another format, which has no manifest.
    """
    is_recorded = (
        run.stage == "fit" and not run.state.rank and not run.resume.finished and not run.options.fast_dev_run
    )
    if run.identity.record is None and is_recorded and not is_url(saved):
        run_dir = run.directory.existing()
        if run_dir is not None and Path(saved).resolve().is_relative_to(run_dir.resolve()):
            run.identity.record = RunRecord(run, run_dir)
    take_directory(run)
    if run.identity.record is not None and run.state.status == "training":
        is_file = facts is not None and not is_url(saved)
        if facts is not None and is_file:
            run.identity.record.add_file(Path(saved), facts)
        run.identity.record.update(run, at_once=is_file)  # nothing else lists such a file


def record_rollback(run: Run, done: dict[str, Any]) -> None:
    """Write from which step to which the run went back, and why."""
    if run.identity.record is not None:
        run.identity.record.add(run, "rollbacks", done)


def record_exclusion(run: Run, done: dict[str, Any]) -> None:
    """Write which samples are left out, and why."""
    if run.identity.record is not None:
        run.identity.record.add(run, "exclusions", done)


def recorded_rollbacks(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rollbacks of a run, from its record."""
    return _tables(record, "rollbacks")


def _tables(record: dict[str, Any], field: str) -> list[dict[str, Any]]:
    known = record.get(field)
    return [each for each in known if isinstance(each, dict)] if isinstance(known, list) else []


def record_end(run: Run) -> None:
    """Write how the run ended."""
    take_if_trained(run)
    if run.identity.record is not None and not is_refused(run):
        run.identity.record.end(run)


def restore_ending(run: Run) -> None:
    """Set status and reason of a run that had already ended to those in its record."""
    known = run.directory.existing()
    record = read_record(known) if known is not None else {}
    if record:
        run.state.ending.restore(record["status"], record["reason"])


def unsaved_end(record: dict[str, Any], counters: Mapping[str, Any]) -> str:
    """Return a sentence if a run's newest checkpoint, with these counters, is not its last state; else empty.

    For example: 'completed at step 8, but its newest checkpoint is of step 5'. It is empty for a run that
    failed or was killed.
    """
    if not record or record["status"] in ("training", "error"):
        return ""
    # a file of another format has no number of epochs in its facts
    step, epochs = counters.get("step"), counters.get("epochs_seen", record.get("epochs"))
    if (step, epochs) == (record["step"], record.get("epochs", epochs)):
        return ""
    before = " before the end of its epoch" if step == record["step"] else ""
    return f"{record['status']} at step {record['step']}, but its newest checkpoint is of step {step}{before}"


def run_dir_of(checkpoint: Path, folder: Path) -> Path | None:
    """Return the nearest directory with a record above a checkpoint, up to `folder`."""
    for parent in checkpoint.parents:
        if (parent / RECORD).is_file():
            return parent
        if parent == folder:
            break
    return None


def read_record(run_dir: Path) -> dict[str, Any]:
    """Return the record; empty if it is missing or damaged, so that the caller relies on the checkpoints."""
    try:
        path = run_dir / RECORD
        # is_file, because reading a pipe would wait for ever
        record = parse_json(read_within(path, RECORD_BYTES)) if path.is_file() else {}
    except (OSError, ValueError):
        return {}
    is_valid = isinstance(record, dict) and all(
        isinstance(record.get(name), kind) for name, kind in WHOLE.items()
    )
    return record if is_valid and is_count(record["step"]) else {}


def module_class(record: dict[str, Any]) -> str:
    """Return the name of the class of the run's module; empty if the record does not say it."""
    module = record.get("module")
    return str(module.get("class") or "").rpartition(".")[2] if isinstance(module, dict) else ""


# ---- the fields --------------------------------------------------------------------------------------------


def _encode_record(data: dict[str, Any]) -> str:
    """Return the record as JSON, without its largest fields if it is larger than the reader accepts."""
    text = json.dumps(data, indent=1, allow_nan=False)
    for name in LARGE:
        if len(text) < RECORD_BYTES:
            break
        if name == "order" and data.get(name):  # a reader says why
            data[name] = {"why": f"it is too large: run.json has at most {RECORD_BYTES // 2**20} MB"}
        else:
            data[name] = None
        text = json.dumps(data, indent=1, allow_nan=False)
    return text


def _class_name(logger: Any) -> str:
    """Return the name of a logger's class as the user wrote it, without a queue or an adapter around it."""
    queued = getattr(logger, "logger", logger)
    return type(getattr(queued, "original", queued)).__name__


def _now() -> str:
    # runs of a quick sweep start in the same second, and lists sort them
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _started_with(run: Run) -> dict[str, Any]:
    try:
        return provenance(run)
    except Exception as error:  # it reads user objects; an error there must not end the run
        log.debug("run.json does not have how the run was started", exc_info=True)
        return {"problem": "{type}: {message}".format(**_describe_error(error))}


def _count_starts(record: dict[str, Any]) -> int:
    return record["starts"] if is_count(record.get("starts")) else len(_ended_sessions(record))


def _ended_sessions(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sessions of an earlier record. A last session without an end was killed."""
    known = record.get("sessions")
    sessions = [each for each in known if isinstance(each, dict)] if isinstance(known, list) else []
    if record and not sessions:  # an older version had no sessions
        fields = {name: record[name] for name in ("status", "reason", "step")}
        sessions = [{"started_at": None, "ended_at": record.get("noted_at"), **fields}]
    if sessions and sessions[-1].get("status") == "training":
        sessions[-1] = {
            **sessions[-1],
            "status": "killed",
            "ended_at": record.get("noted_at"),
            "step": record["step"],
        }
    return sessions


def _string_or_empty(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _describe_error(error: BaseException) -> dict[str, str]:
    kind, message = error_text(error)
    return {"type": kind, "message": mask_text(" ".join(message.split()), 500)}


def monitors_of(entries: Iterable[Any]) -> dict[str, Any]:
    """Return the metrics that hooks monitor, each with the best value so far; first those that checkpoints
    are kept for.
    """
    found: dict[str, Any] = {}
    keeping: dict[str, Any] = {}
    for entry in entries:
        own = getattr(entry.given, "__dict__", {})  # properties are not called, because they are user code
        own = {**getattr(own.get("watch"), "__dict__", {}), **own}
        name, mode = own.get("monitor"), own.get("mode")
        if isinstance(name, str) and isinstance(mode, str) and mode in ("min", "max"):
            best = _as_number(own.get("best_model_score", own.get("best_score")))
            kind = keeping if "best_model_path" in own else found
            kind[entry.name] = {"metric": mask_text(name), "mode": mode, "best": best}
    return keeping | found


def _as_number(score: Any) -> Any:
    """Return a score as JSON can hold it; None if it is not a number. Callbacks of Lightning keep tensors."""
    if isinstance(score, Tensor) and score.numel() == 1 and not score.is_meta:
        score = score.item()
    return mask(score) if isinstance(score, int | float) else None


def _newest_checkpoint(run: Run) -> dict[str, Any] | None:
    """Return the newest checkpoint of this session."""
    return (
        None
        if run.saves.newest is None
        else {"path": shown(run.saves.newest.path), "step": run.saves.newest.step}
    )
