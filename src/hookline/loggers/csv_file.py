"""Write metrics.csv, a table for spreadsheets that is valid at any moment."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hookline.loggers.base import Logger, check_folder, flat_params, number, remove_files
from hookline.util.text import encodable

FIRST_COLUMNS = ("step", "epoch")


class CSV(Logger):
    """Writes `metrics.csv` (one row per report, a column per metric) and `hparams.csv` into the run's
    directory.

    It appends rows. For a new metric it writes a new table and replaces the old one atomically. A run that
    resumes in the same directory continues the table, after it has moved the rows that came after its
    checkpoint to `metrics.superseded-1.csv` (then 2, 3...).

    name: the file in the run's directory.
    """

    queued = False

    def __init__(self, name: str = "metrics.csv") -> None:
        self._name = check_folder("name", name)
        self._run_dir: Callable[[], Path] = Path
        self._file: IO[str] | None = None
        self._columns: list[str] = []
        self._last: list[str] = []
        self._found = self._count = 0
        """Rows of the table at the start of this run, or at its newest rollback, and now."""
        self._has_begun = False
        """Whether this run has moved superseded rows when it began."""
        self._made: list[Path] = []
        """The files that were not there before this run."""

    def open(self, run_dir: Callable[[], Path]) -> None:
        """Set the path. The first row makes the file."""
        self._run_dir, self._has_begun, self._made = run_dir, False, []

    @property
    def path(self) -> Path:
        """Return the path of the table."""
        return self._run_dir() / self._name

    def log_metrics(self, metrics: Mapping[str, float], step: int | None, epoch: int | None) -> None:
        row = {_column(name): repr(float(value)) for name, value in metrics.items()}
        row.update({"step": "" if step is None else str(step), "epoch": "" if epoch is None else str(epoch)})
        if self._file is None:
            torn = self._look()
            if self._columns and not torn:
                self._file = self.path.open("a", encoding="utf-8", newline="")
        new = [name for name in row if name not in self._columns]
        if new or self._file is None:
            self._rewrite(
                [
                    *(name for name in FIRST_COLUMNS if name not in self._columns),
                    *self._columns,
                    *(name for name in new if name not in FIRST_COLUMNS),
                ]
            )
        assert self._file is not None
        self._last = [row.get(name, "") for name in self._columns]
        csv.writer(self._file).writerow(self._last)
        self._file.flush()
        self._count += 1

    def _look(self) -> bool:
        """Read the table before this run's first row, and return whether its last line is incomplete."""
        rows, torn = _read_rows(self.path)
        self._columns, self._last = (rows[0], rows[-1]) if rows else ([], [])
        self._found = self._count = max(0, len(rows) - 1)
        return torn

    def _rewrite(self, columns: list[str]) -> None:
        """Write the table with these columns and replace the old one atomically."""
        if self._file is not None:
            self._file.close()
        self._note(self.path)
        before, _ = _read_rows(self.path)
        old = {name: position for position, name in enumerate(before[0] if before else [])}
        rows = (
            [row[old[name]] if old.get(name, len(row)) < len(row) else "" for name in columns]
            for row in before[1:]
        )
        _write_whole(self.path, columns, rows)
        self._columns = columns
        self._file = self.path.open("a", encoding="utf-8", newline="")

    def position(self) -> dict[str, Any]:
        """Return the number of rows and the mark that identifies the table."""
        if self._file is None:
            self._look()
        return {"rows": self._count, "known_by": self._mark(self._columns, self._last if self._count else [])}

    def resume(self, position: Any, step: int, epoch: int, path: Path | str) -> None:
        """Move the rows after the position to another file, unless the table differs. Rows of this run stay.

        After a kill in between, the rows are in both files, and the next resume moves them again.
        """
        if self._file is None:
            self._look()
        if self._has_begun:  # a rollback: the rows of this run are superseded too
            self._found = self._count
        self._has_begun = True
        before, _ = _read_rows(self.path)
        if position is None or not position["rows"] < self._found <= len(before) - 1:
            return
        columns, rows, kept = before[0], before[1:], position["rows"]
        if self._mark(columns, rows[kept - 1] if kept else []) == position["known_by"]:
            self._move_superseded(columns, rows, kept)

    def begin_afresh(self) -> None:
        """Move the rows of earlier runs to another file."""
        self._has_begun = True
        if self._file is None:
            self._look()
        if self._found:
            (columns, *rows), _ = _read_rows(self.path)
            self._move_superseded(columns, rows, 0)

    def _move_superseded(self, columns: list[str], rows: list[list[str]], kept: int) -> None:
        """Move all but the first `kept` rows, up to those of this run, into another table."""
        numbered = (
            self.path.with_name(f"{self.path.stem}.superseded-{n}{self.path.suffix}")
            for n in itertools.count(1)
        )
        _write_whole(next(each for each in numbered if not each.exists()), columns, rows[kept : self._found])
        self.close()
        _write_whole(self.path, columns, rows[:kept] + rows[self._found :])

    def _mark(self, columns: Sequence[str], row: Sequence[str]) -> str:
        """Return the mark of a row, which stays the same when columns are added."""
        cells = sorted((name, cell) for name, cell in zip(columns, row, strict=False) if cell)
        return hashlib.sha256(json.dumps(cells or str(self.path.resolve())).encode()).hexdigest()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        rows = ([name, str(value)] for name, value in flat_params(params).items())
        path = self.path.parent / "hparams.csv"
        self._note(path)
        _write_whole(path, ["name", "value"], rows)

    def _note(self, path: Path) -> None:
        if not path.exists():
            self._made.append(path)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        self.log_metrics({tag: number(tag, scalar_value)}, global_step, None)

    def discard(self) -> None:
        self.close()
        if self._made:
            remove_files(self._made, self._run_dir())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _column(metric: str) -> str:
    """Return the name of a column on one line, other than `step` and `epoch`."""
    name = encodable(metric).replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\0")
    return f"metric/{name}" if name in FIRST_COLUMNS else name


def _read_rows(path: Path) -> tuple[list[list[str]], bool]:
    """Return all complete rows, and whether the last line is incomplete after a kill."""
    if not path.exists():
        return [], False
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        text = file.read()
    rows = list(csv.reader(io.StringIO(text, newline="")))
    return (rows, False) if text.endswith("\n") or not text else (rows[:-1], True)


def _write_whole(path: Path, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
