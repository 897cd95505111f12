"""The report of runs as the output of a notebook's cell."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hookline.report.page import render_page, write_report
from hookline.report.reader import LOG, RecordedRun, check_run_dir, read_run
from hookline.report.run_events import missing_log, position, status_in_words
from hookline.report.runs import ListedRun, Listing
from hookline.run.state import count_noun
from hookline.util.errors import OptionError
from hookline.util.notebook import frame
from hookline.util.text import printable


class HasRunDirectory(Protocol):
    """A trainer, or another object that writes a run's directory."""

    @property
    def run_dir(self) -> Path:
        """The directory of the run."""
        ...


class Report:
    """The report of a run, or of several runs to compare, in a notebook: `hookline.Report(trainer)`.

    In the last line of a cell it shows the page that `hookline report` writes. `print` shows a line per run.
    """

    def __init__(
        self,
        *runs: str
        | Path
        | HasRunDirectory
        | Listing
        | ListedRun
        | Sequence[str | Path | HasRunDirectory | ListedRun],
        height: int = 900,
    ) -> None:
        """`runs`: trainers, or directories of runs, or one list of them, such as `hookline.list_runs()`.
        `height`: of the page, in pixels.
        """
        given: Any = runs[0].runs if len(runs) == 1 and isinstance(runs[0], Listing) else runs
        found: Sequence[Any] = given[0] if len(given) == 1 and isinstance(given[0], list | tuple) else given
        if not found:
            raise OptionError("A report needs a trainer or the directory of a run: Report(trainer).")
        if not isinstance(height, int) or isinstance(height, bool) or height < 1:
            raise OptionError(
                f"Report: height={height!r} must be a whole number of pixels.", option="height", value=height
            )
        self.run_dirs = [_directory_of(each) for each in found]
        self.height = height

    def save(self, path: str | Path | None = None) -> Path:
        """Write the page as one file, by default `report.html` in the run's directory; return its path."""
        return write_report(self.run_dirs, path)[0]

    def __repr__(self) -> str:
        now = time.time()
        return "\n".join(describe(read_run(path), now) for path in self.run_dirs)

    def _repr_html_(self) -> str:
        return frame(render_page([read_run(path) for path in self.run_dirs]), self.height)


def _directory_of(run: Any) -> Path:
    if isinstance(run, ListedRun):
        return run.path
    is_path = isinstance(run, (str, Path))
    found = run if is_path else getattr(run, "run_dir", None)
    if found is None:
        raise OptionError(f"Report: {run!r} is not a trainer or the directory of a run.")
    try:
        check_run_dir(Path(found))
    except OptionError as error:
        if is_path:
            raise
        raise OptionError(
            f"Report: this trainer has no run yet ({error}) Call fit() first, or pass the directory of a run."
        ) from None
    return Path(found)


def describe(run: RecordedRun, now: float) -> str:
    """Return `runs/first: completed, step 150, 1 epoch, 54 records`."""
    missing = missing_log(run)
    records = f"no {LOG}. {missing}" if missing else count_noun(run.records, "record", "records")
    return printable(f"{run.path}: {status_in_words(run, now)[0]}, {position(run)}, {records}")
