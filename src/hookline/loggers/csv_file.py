"""metrics.csv: a table that every spreadsheet reads, whole at any moment."""

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

from hookline.loggers.base import Logger, check_folder, flat, number, printable

OWN = ("step", "epoch")


class CSV(Logger):
    """Writes `metrics.csv` (one row per report, a column per metric) and `hparams.csv` into the run's
    directory.

    A row is appended; when a metric is new, the table is written anew beside the old one and put in its
    place. A run that goes on in the same directory goes on in the same table, after it has moved the rows
    that came after its checkpoint to `metrics.superseded-1.csv` (then 2, 3...): a table tells one course of
    events.
    """

    queued = False

    def __init__(self, name: str = "metrics.csv") -> None:
        self._name = check_folder("name", name)
        self._run_dir: Callable[[], Path] = Path
        self._file: IO[str] | None = None
        self._columns: list[str] = []
        self._last: list[str] = []
        self._found = self._count = 0
        """How many rows the table had when this run came to it, and how many it has."""

    def open(self, run_dir: Callable[[], Path]) -> None:
        """The file itself is made with the first row."""
        self._run_dir = run_dir

    @property
    def path(self) -> Path:
        """Where the table is."""
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
                    *(name for name in OWN if name not in self._columns),
                    *self._columns,
                    *(name for name in new if name not in OWN),
                ]
            )
        assert self._file is not None
        self._last = [row.get(name, "") for name in self._columns]
        csv.writer(self._file).writerow(self._last)
        self._file.flush()
        self._count += 1

    def _look(self) -> bool:
        """See what the table holds before this run's first row; says whether its end is torn."""
        rows, torn = _rows(self.path)
        self._columns, self._last = (rows[0], rows[-1]) if rows else ([], [])
        self._found = self._count = max(0, len(rows) - 1)
        return torn

    def _rewrite(self, columns: list[str]) -> None:
        """The table with these columns; whoever reads meanwhile sees the old one or the new one, never half
        of one.
        """
        if self._file is not None:
            self._file.close()
        before, _ = _rows(self.path)
        old = {name: position for position, name in enumerate(before[0] if before else [])}
        rows = (
            [row[old[name]] if old.get(name, len(row)) < len(row) else "" for name in columns]
            for row in before[1:]
        )
        _write_whole(self.path, columns, rows)
        self._columns = columns
        self._file = self.path.open("a", encoding="utf-8", newline="")

    def position(self) -> dict[str, Any]:
        """How many rows there are, and by what the table is known again."""
        if self._file is None:
            self._look()
        return {"rows": self._count, "known_by": self._mark(self._columns, self._last if self._count else [])}

    def resume(self, position: Any, step: int, epoch: int, path: Path | str) -> None:
        """Move aside what came after the position, unless it is another table. What this run has written
        itself stays.

        Killed in between, the rows are in both places, and the next resume moves them again.
        """
        if self._file is None:
            self._look()
        before, _ = _rows(self.path)
        if position is None or not position["rows"] < self._found <= len(before) - 1:
            return
        columns, rows, kept = before[0], before[1:], position["rows"]
        if self._mark(columns, rows[kept - 1] if kept else []) == position["known_by"]:
            self._move_aside(columns, rows, kept)

    def begin_afresh(self) -> None:
        """Move aside what another run has left here."""
        if self._file is None:
            self._look()
        if self._found:
            (columns, *rows), _ = _rows(self.path)
            self._move_aside(columns, rows, 0)

    def _move_aside(self, columns: list[str], rows: list[list[str]], kept: int) -> None:
        """All but the first rows, up to those of this run, into a table of their own."""
        numbered = (
            self.path.with_name(f"{self.path.stem}.superseded-{n}{self.path.suffix}")
            for n in itertools.count(1)
        )
        _write_whole(next(each for each in numbered if not each.exists()), columns, rows[kept : self._found])
        self.close()
        _write_whole(self.path, columns, rows[:kept] + rows[self._found :])

    def _mark(self, columns: Sequence[str], row: Sequence[str]) -> str:
        """A table is known by a row of it, whatever columns were added since; without one, by its place."""
        cells = sorted((name, cell) for name, cell in zip(columns, row, strict=False) if cell)
        return hashlib.sha256(json.dumps(cells or str(self.path.resolve())).encode()).hexdigest()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        rows = ([name, str(value)] for name, value in flat(params).items())
        _write_whole(self.path.parent / "hparams.csv", ["name", "value"], rows)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        self.log_metrics({tag: number(tag, scalar_value)}, global_step, None)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _column(metric: str) -> str:
    """A name that fits on one line, so that a row is a line; `step` and `epoch` are taken."""
    name = printable(metric).replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\0")
    return f"metric/{name}" if name in OWN else name


def _rows(path: Path) -> tuple[list[list[str]], bool]:
    """All whole rows, and whether the last one is not: a run that was killed may have left half a number."""
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
