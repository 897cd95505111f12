"""`digests.jsonl` of a run: written by every rank, one line per digest, and read again by attempt.

A line `attempt` begins every start, resume and rollback. What was written after the step that it continues
from does not count any more, and is kept: so a run can be compared with its own resume.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hookline.digests.tensors import text_digest
from hookline.run.run import Run
from hookline.util.errors import OptionError

log = logging.getLogger("hookline")
NAME = "digests.jsonl"
FORMAT = 1
LONGEST_LINE = 2**26
"""Bytes."""
Key = tuple[int, int]
"""The step of a digest, and the number of batches before it: a step whose update was skipped comes again."""


def file_of_rank(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank: `digests.jsonl` for rank zero, `digests.rank3.jsonl` for rank 3."""
    return run_dir / (NAME if rank == 0 else f"digests.rank{rank}.jsonl")


class DigestFile:
    """Writes the digests of one fit of one rank."""

    def __init__(self, run_dir: Callable[[], Path], rank: int, about: dict[str, Any]) -> None:
        self._run_dir, self._rank, self._about = run_dir, rank, about
        self._file: IO[str] | None = None
        self._from: int | None = 0
        """The step that an attempt continues from, if its line is not written yet."""
        self._known: dict[str, str] = {}
        """The digests of the settings that this attempt has written."""
        self._failed = False

    def restart(self, run: Run, step: int) -> None:
        """Begin another attempt: the run was resumed, or has gone back, to this step.

        Its line follows at once if there are digests: the run may end before the next one.
        """
        self._from, self._known = step, {}
        if self._file is not None or file_of_rank(self._run_dir(), self._rank).is_file():
            self._attempt(lambda: self._write_start(run, step))

    def write(self, run: Run, record: dict[str, Any]) -> None:
        """Write one digest. A file that cannot be written ends the digests, not the run."""
        if self._failed:
            return
        values = record.pop("values")
        for name, each in values.items():
            record[name] = text_digest(sorted(each.items()))
            if self._known.get(name) != record[name]:
                record.setdefault("values", {})[name] = each
                self._known[name] = record[name]
        if self._from is not None:
            step = self._from
            self._attempt(lambda: self._write_start(run, step))
        self._attempt(lambda: self._put({"type": "digest", **record}))

    def _attempt(self, write: Callable[[], None]) -> None:
        """Write something, unless an earlier write has failed."""
        if self._failed:
            return
        try:
            write()
        except OSError as error:
            self._failed = True
            log.warning("The digests of this run cannot be written, and are switched off: %s", error)

    def _write_start(self, run: Run, step: int) -> None:
        path = file_of_rank(self._run_dir(), self._rank)
        if self._file is None:
            ends_well = not path.is_file() or _last_byte(path) in (b"\n", b"")
            self._file = path.open("a", encoding="utf-8", buffering=1)
            if not ends_well:  # a line that was cut off by a kill
                self._file.write("\n")
        resumed = run.resume.path
        self._put(
            {
                "type": "attempt",
                "format": FORMAT,
                "run": run.identity.id,
                "from_step": step,
                "checkpoint": None if resumed is None else Path(str(resumed)).name,
                "in_run": run.resume.rollbacks > 0,
                "rank": self._rank,
                "time": round(time.time(), 3),
                **self._about,
            }
        )
        self._from = None

    def _put(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:  # the rest of a line, which a full disk did not take
                if not self._failed:
                    log.warning("The last digest of this run cannot be written: %s", error)


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - 1))
        return file.read()


# ---- reading -----------------------------------------------------------------------------------------------


@dataclass
class Attempt:
    """One start, resume or rollback of a run, with the digests that it wrote."""

    number: int
    """From 1."""
    from_step: int
    about: dict[str, Any]
    digests: dict[Key, dict[str, Any]] = field(default_factory=dict)


@dataclass
class RunDigests:
    """The digests of one rank of a run.

    path: the file. rank: the rank. attempts: the digests of each fit, also those that were superseded.
    """

    path: Path
    rank: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    current: dict[Key, dict[str, Any]] = field(default_factory=dict)
    """The digests that count: those that led to the state at the end, in order."""

    @property
    def about(self) -> dict[str, Any]:
        """What the newest attempt says about itself."""
        return self.attempts[-1].about if self.attempts else {}

    @property
    def every(self) -> int:
        """Steps between two digests."""
        every = self.about.get("every")
        return every if isinstance(every, int) and every > 0 else 1


def read_digests(run: str | Path, rank: int = 0) -> RunDigests:
    """Return the digests of a run (its directory, or a file), empty if it has none.

    Lines that are damaged or of another kind are left out, and so are digests of an earlier run in the same
    directory.

    run: the directory of a run, or a file of digests. rank: of which rank.
    """
    path = Path(run)
    path = file_of_rank(path, rank) if path.is_dir() or not path.suffix else path
    found = RunDigests(path, rank)
    if not path.is_file():
        return found
    values: dict[str, Any] = {}
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(LONGEST_LINE), b""):
            record = _parse(line)
            if record.get("type") == "attempt":
                _begin_attempt(found, record)
                values = {}
            elif record.get("type") == "digest" and found.attempts and _key_of(record) is not None:
                values = {**values, **_table(record.get("values"))}
                record["values"] = values
                key = (record["step"], record["batch"])
                found.attempts[-1].digests[key] = found.current[key] = record
    found.current = dict(sorted(found.current.items()))
    return found


def _begin_attempt(found: RunDigests, record: dict[str, Any]) -> None:
    step = record.get("from_step")
    step = step if isinstance(step, int) else 0
    if record.get("format", FORMAT) > FORMAT:
        raise OptionError(
            f"{found.path} has digests of format {record['format']}, which this version does not read."
        )
    if found.attempts and found.attempts[-1].about.get("run") != record.get("run"):
        found.attempts.clear()
        found.current.clear()
    found.current = {key: each for key, each in found.current.items() if key[0] <= step}
    found.attempts.append(Attempt(len(found.attempts) + 1, step, record))


def _key_of(record: dict[str, Any]) -> Key | None:
    step, batch = record.get("step"), record.get("batch")
    return (step, batch) if isinstance(step, int) and isinstance(batch, int) else None


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def ranks_of(run_dir: Path) -> list[int]:
    """Return the ranks that have written digests."""
    found = [0] if (run_dir / NAME).is_file() else []
    for path in run_dir.glob("digests.rank*.jsonl"):
        number = path.name.removeprefix("digests.rank").removesuffix(".jsonl")
        found += [int(number)] if number.isdigit() else []
    return sorted(found)
