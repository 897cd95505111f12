"""Show progress as live lines on a terminal, in one cell of a notebook, or as plain lines in a log file."""

from __future__ import annotations

import datetime
import html
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.cells import cell_len

from hookline.metrics.metric_log import Metrics

# ---- layout of a line --------------------------------------------------------------------------------------


BAR, LONGEST_BAR, CLOCK = 5, 40, 8


class Progress(Protocol):
    """The texts about one pass over data."""

    name: str
    numbers: list[str]

    @property
    def count(self) -> str:
        """Return `3/10`."""
        ...

    @property
    def rate(self) -> str:
        """Return `4.0 it/s`."""
        ...

    @property
    def eta(self) -> str:
        """Return `eta 0:00:24`, or an empty string."""
        ...


@dataclass(frozen=True, slots=True)
class Fit:
    """The widths of name and bar (0: none), whether the clock is shown, and the end of each line."""

    name: int
    bar: int
    clock: bool
    ends: list[str]


def fit(bars: Sequence[Progress], width: int, longest_bar: int = LONGEST_BAR, clock: bool = True) -> Fit:
    """Return the layout of lines with common columns."""
    left = width - max(cell_len(each.count) for each in bars)
    name = min(max(cell_len(each.name) for each in bars), max(left - 1, 0))
    left -= name + 1
    bar = min(BAR, longest_bar) if left > BAR else 0
    left -= bar + 1 if bar else 0
    ends: list[list[str]] = [[] for _ in bars]
    used = 0
    for texts in ([each.rate for each in bars], [each.eta for each in bars]):
        wide = max(cell_len(text) + 1 for text in texts)
        if used + wide > left:
            break
        used += wide
        for end, text in zip(ends, texts, strict=True):
            end += [text] if text else []
    else:  # metrics only if everything else fits
        used = max(_add_numbers(each.numbers, end, left) for each, end in zip(bars, ends, strict=True))
    left -= used
    clock = clock and left >= CLOCK and bar > 0
    left -= CLOCK if clock else 0
    return Fit(
        name, min(longest_bar, bar + max(left, 0)) if bar else 0, clock, [" ".join(end) for end in ends]
    )


def _add_numbers(numbers: list[str], end: list[str], room: int) -> int:
    """Append as many numbers as fit, and return the width of all of them."""
    wide = sum(cell_len(each) + 1 for each in end)
    for each in numbers:
        if wide + cell_len(each) + 1 > room:
            break
        wide += cell_len(each) + 1
        end.append(each)
    return wide


class Bar:
    """Progress, rate and newest numbers of one pass over data."""

    def __init__(
        self, name: str, total: int | None, done: int = 0, word: str = "", began: float | None = None
    ) -> None:
        self.name, self.total, self.done, self.word = name, total, done, word
        self.numbers: list[str] = []
        start = (time.monotonic() if began is None else began, done)
        self._marks = deque([start], maxlen=16)  # for a recent rate

    def advance(self, done: int, numbers: dict[str, Any]) -> None:
        """Set the number of done batches, and read all numbers from the device at once."""
        self.done = done
        self._marks.append((time.monotonic(), done))
        known = Metrics({name: value for name, value in numbers.items() if value is not None}).read()
        self.numbers = [f"{name} {value:.4g}" for name, value in known.items()]

    def pause(self, seconds: float) -> None:
        """Leave these seconds out of the rate."""
        self._marks = deque([(when + seconds, done) for when, done in self._marks], maxlen=16)

    @property
    def count(self) -> str:
        """Return `3/10`."""
        return f"{self.done}/{'?' if self.total is None else self.total}"

    @property
    def rate(self) -> str:
        """Return `4.0 it/s`, or seconds per batch below one batch a second."""
        rate = self._per_second()
        return f"{rate:.1f} it/s" if rate >= 1 or rate == 0 else f"{1 / rate:.1f} s/it"

    @property
    def eta(self) -> str:
        """Return `eta 0:00:24`, or an empty string if nothing is left or the length is unknown."""
        rate = self._per_second()
        if self.total is None or rate == 0 or self.done >= self.total:
            return ""
        return f"eta {datetime.timedelta(seconds=round((self.total - self.done) / rate))}"

    def _per_second(self) -> float:
        (start, before), (now, done) = self._marks[0], self._marks[-1]
        return (done - before) / max(now - start, 1e-9)

    @property
    def rest(self) -> str:
        """Return rate, time left and numbers."""
        return " ".join(each for each in (self.rate, self.eta, *self.numbers) if each)


# ---- screens -----------------------------------------------------------------------------------------------


class Screen(Protocol):
    """Shows bars. A live screen replaces its earlier output."""

    live: bool

    def draw(self, bars: list[Bar]) -> None:
        """Show the current state of the bars."""
        ...

    def close(self) -> None:
        """Restore the terminal."""
        ...


def choose_screen() -> Screen:
    """Return the screen that suits stderr."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter:
        return Notebook()
    # check the file too, because FORCE_COLOR makes rich treat a log file as a terminal
    return Terminal(console) if console.is_interactive and console.file.isatty() else Lines()


class Lines:
    """Prints a line of progress from time to time, for a log file."""

    live = False

    def draw(self, bars: list[Bar]) -> None:
        bar = bars[-1]
        print(f"{bar.name}{bar.word} {bar.count} {bar.rest}", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class Notebook:
    """Replaces one text output: needs no widgets and is readable in a saved notebook."""

    live = True

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, bars: list[Bar]) -> None:
        from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

        text = "\n".join(f"{bar.name} {_blocks(bar)} {bar.count} {bar.rest}" for bar in bars)
        shown = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def close(self) -> None:
        pass


def _blocks(bar: Bar, width: int = 30) -> str:
    full = 0 if not bar.total else min(width, width * bar.done // bar.total)
    return "█" * full + "░" * (width - full)


class Terminal:
    """Shows live lines, one per bar, below other output."""

    live = True

    def __init__(self, console: Any) -> None:
        from rich.progress import Progress

        self._progress = Progress(console=console, auto_refresh=False)
        self._tasks: dict[Bar, Any] = {}
        self._fitted: dict[tuple[int, int], Any] = {}
        """The last layout by width of the terminal and number of lines."""
        self._progress.start()

    def draw(self, bars: list[Bar]) -> None:
        if not bars:
            return
        for gone in [bar for bar in self._tasks if bar not in bars]:
            self._progress.remove_task(self._tasks.pop(gone))
        fitted = self._fit(bars)
        for bar, end in zip(bars, fitted.ends, strict=True):
            if bar not in self._tasks:
                self._tasks[bar] = self._progress.add_task(bar.name, total=bar.total, count="", end="")
            self._progress.update(self._tasks[bar], completed=bar.done, count=bar.count, end=end)
        self._progress.refresh()

    def _fit(self, bars: list[Bar]) -> Any:
        """Return the layout for the terminal's current size. For one size the bar only shrinks, so that it
        does not jump with every number.
        """
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        width = self._progress.console.width
        before = self._fitted.get((width, len(bars)))
        fitted = fit(bars, width) if before is None else fit(bars, width, before.bar, before.clock)
        self._fitted[width, len(bars)] = fitted
        name = Column(width=fitted.name, no_wrap=True, overflow="ellipsis")
        count, end = Column(no_wrap=True, overflow="crop"), Column(no_wrap=True, overflow="crop")
        self._progress.columns = (
            *([TextColumn("{task.description}", markup=False, table_column=name)] if fitted.name else []),
            *([BarColumn(fitted.bar)] if fitted.bar else []),
            TextColumn("{task.fields[count]}", markup=False, table_column=count),
            *([TimeElapsedColumn()] if fitted.clock else []),
            *([TextColumn("{task.fields[end]}", markup=False, table_column=end)] if any(fitted.ends) else []),
        )
        return fitted

    def close(self) -> None:
        self._progress.stop()
