"""A recorded run: its record, its log and its checkpoints, read without changing a byte of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hookline.checkpoint.catalog import (
    FoundCheckpoint,
    find_checkpoints,
    first_whole,
    is_within,
    without_abandoned,
)
from hookline.checkpoint.files import read_on_all_ranks
from hookline.distributed.comm import Ranks
from hookline.loggers.log_reader import read_events, read_log, superseded_bytes
from hookline.run.lock import is_running
from hookline.run.record import RECORD, read_record
from hookline.training.resume import Start
from hookline.util.errors import OptionError, closest
from hookline.util.limited_json import is_count

LOG = "log.jsonl"
ENDED_BY_FAILURE = ("error", "training", "interrupted", "preempted")
"""Statuses of runs whose next update may have begun; "training" is that of a killed or a running one."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a run begins again."""

    start: Start | None = None
    """The checkpoint; None: the beginning of the run."""
    step: int = 0
    unusable: dict[str, str] = field(default_factory=dict)
    """Newer checkpoints that cannot be used, and why."""


class RecordedRun:
    """The directory of a run that was recorded."""

    def __init__(self, run: str | Path) -> None:
        path = Path(run).expanduser()
        below = Path("runs") / path
        if not path.exists() and not path.is_absolute() and below.is_dir():
            path = below  # a bare name may be a run in `runs/`
        self.path = path
        self.record = _read(path)

    # ---- how far it came -----------------------------------------------------------------------------------

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the valid rows of metrics in its log, in order; none if it has no log."""
        for each in read_log(self.path / LOG) if self.has_log else ():
            if each.get("type") == "metrics" and is_count(each.get("step")):
                yield each

    @property
    def has_log(self) -> bool:
        """Whether the run has a log to compare with."""
        return (self.path / LOG).is_file()

    @cached_property
    def last_step(self) -> int:
        """The last update that is known: from the record, the log and the checkpoints."""
        steps: list[int] = [self.record["step"], *self.checkpoint_steps]
        return max([*steps, max((each["step"] for each in self.rows()), default=0)])

    @property
    def world_size(self) -> int:
        """The number of its ranks."""
        machine = self.record.get("machine")
        size = machine.get("world_size") if isinstance(machine, dict) else None
        return size if is_count(size) and size else 1

    def check_trainer(self) -> None:
        """Refuse a run of a trainer with another package's rules. Older records do not name the trainer."""
        trainer = self.record.get("trainer")
        if isinstance(trainer, dict) and trainer.get("rules") is not None:
            raise OptionError(
                f"{self.path} was trained by {trainer.get('class')}: only runs of hookline.Trainer can be "
                "rewound, because another trainer's rules decide its steps."
            )

    def check_step(self, to: int) -> None:
        """Refuse a step that the run did not make. The step in which a run failed can be tried."""
        if isinstance(to, bool) or not isinstance(to, int) or to < 1:
            raise OptionError(f"to={to!r}: pass the number of an update, from 1 on.", option="to", value=to)
        last, (origin, first) = self.last_step, self.origin
        if to <= first:
            raise OptionError(
                f"to={to}: {self.path} began at step {first}, from {origin}: choose {first + 1} to {last}.",
                option="to",
                value=to,
            )
        failed = self.record["status"] in ENDED_BY_FAILURE
        if to > last + failed:
            running = " so far (it is still running)" if is_running(self.path) else ""
            retried = f", and {last + 1} to see the step that failed or was cut off" if failed else ""
            raise OptionError(
                f"to={to}: the last step of {self.path} is {last}{running}: choose 1 to {last}{retried}.",
                option="to",
                value=to,
            )

    # ---- where it begins again -----------------------------------------------------------------------------

    @cached_property
    def _checkpoints(self) -> tuple[list[FoundCheckpoint], dict[Path, str]]:
        """Its own checkpoints, without those of abandoned steps, and the damaged ones with the reason."""
        found, broken = find_checkpoints(self.path)
        return without_abandoned([each for each in found if each.run == self.record["id"]]), broken

    @property
    def checkpoint_steps(self) -> list[int]:
        """The steps of its checkpoints, in order."""
        return sorted({each.manifest["step"] for each in self._checkpoints[0]})

    def find_beginning(self, to: int, ranks: Ranks) -> Beginning:
        """Return the newest complete checkpoint before the update `to`, or the beginning of the run.

        All ranks call it. A checkpoint of steps that the run has abandoned, by a rollback or by a resume from
        an older one, is not used.
        """
        listed = ranks.decide(lambda: [(str(each.path), each.manifest) for each in self._before(to)])
        candidates = [FoundCheckpoint(Path(path), manifest) for path, manifest in listed]
        unusable = {} if ranks.rank else {str(path): why for path, why in self._checkpoints[1].items()}
        while candidates:
            chosen, contents, damaged = first_whole(candidates, lambda path: read_on_all_ranks(path, ranks))
            unusable |= {str(path): why for path, why in damaged.items()}
            if chosen is None:
                break
            if not self._is_superseded(contents):
                return Beginning(Start(chosen.path, contents), chosen.manifest["step"], unusable)
            candidates = candidates[candidates.index(chosen) + 1 :]
        origin, first = self.origin
        if origin is None:
            return Beginning(None, 0, unusable)
        return Beginning(Start(origin, read_on_all_ranks(origin, ranks)), first, unusable)

    def _before(self, to: int) -> list[FoundCheckpoint]:
        """Return the checkpoints before an update, the latest step first; of one step, the newest first."""
        return sorted(
            (each for each in self._checkpoints[0] if each.manifest["step"] < to),
            key=lambda each: each.manifest["step"],
            reverse=True,
        )

    def _is_superseded(self, contents: dict[str, Any]) -> bool:
        """Return whether the run has abandoned the steps of a checkpoint: its place in the log shows it."""
        at = log_position(contents)
        return at is not None and any(first < at <= last for first, last in self._superseded)

    @cached_property
    def _superseded(self) -> list[tuple[int, int]]:
        return superseded_bytes(self.path / LOG) if self.has_log else []

    def changes_since(
        self, beginning: Beginning, to: int
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the rollbacks after a checkpoint up to the last time that the update `to` was made, and the
        commands of `hookline control` that hold.

        The rollbacks are in order. One that a process made whose steps a resume has superseded is left out.
        """
        if not self.has_log:
            return [], []
        since = 0 if beginning.start is None else log_position(beginning.start.contents) or 0
        rollbacks: list[tuple[int, dict[str, Any]]] = []
        commands: list[dict[str, Any]] = []
        for at, record in read_events(self.path / LOG):
            marked = record.get("superseded")
            if record["type"] == "resume" and not record.get("in_run") and isinstance(marked, dict):
                rollbacks = [each for each in rollbacks if not marked["from"] <= each[0] < marked["to"]]
            elif record["type"] == "rollback" and at >= since:
                rollbacks.append((at, record))
            elif record["type"] == "control" and at >= since and "error" not in record:
                commands += [] if is_within(at, self._superseded) else [record]
        last = max((number for number, each in enumerate(rollbacks) if each[1]["step"] < to), default=-1)
        return [record for _, record in rollbacks[: last + 1]], commands

    # ---- what else is recorded -----------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any] | None:
        """The configuration that the run was started from; None: a program started it."""
        config = self.record.get("config")
        return config if isinstance(config, dict) else None

    @property
    def options(self) -> dict[str, Any]:
        """The options of its trainer; values that are not plain data are only described."""
        options = self.record.get("options")
        return dict(options) if isinstance(options, dict) else {}

    @property
    def origin(self) -> tuple[str | None, int]:
        """The checkpoint of another run that it began with, and its step; None and 0 if it began anew."""
        sessions = self.record.get("sessions")
        first = sessions[0] if isinstance(sessions, list) and sessions else None
        if not isinstance(first, dict) or not isinstance(first.get("resumed_from"), str):
            return None, 0
        return first["resumed_from"], first["first_step"] if is_count(first.get("first_step")) else 0

    @property
    def seed(self) -> Any:
        """The seed of the run; None if it had none."""
        return self.options.get("seed")


def _read(path: Path) -> dict[str, Any]:
    """Return the record of a run; raise if there is none."""
    if not path.is_dir():
        near = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        raise OptionError(
            f"{path} is not the directory of a run: it does not exist.{closest(path.name, near)}"
        )
    record = read_record(path)
    if record:
        return record
    below = sorted(each.parent.name for each in path.glob(f"*/{RECORD}"))
    hint = f" There are runs below it: {', '.join(below[:20])}." if below else ""
    why = f"its {RECORD} is damaged" if (path / RECORD).exists() else f"it has no {RECORD}"
    raise OptionError(f"{path} is not the directory of a run that can be rewound: {why}.{hint}")


def log_position(contents: dict[str, Any]) -> int | None:
    """Return the length of the run's log when a checkpoint was saved; None if it does not have it."""
    loggers = contents.get("loggers")
    own = loggers.get("JSONLines") if isinstance(loggers, dict) else None
    length = own.get("bytes") if isinstance(own, dict) else None
    return length if is_count(length) else None
