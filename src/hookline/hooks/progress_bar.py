"""Show progress: live bars on a terminal, one cell in a notebook, plain lines every few seconds elsewhere."""

from __future__ import annotations

import datetime
import html
import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from rich.cells import cell_len

from hookline.engine.checks import Number, checked_parameters
from hookline.engine.hook import Hook
from hookline.metrics.metric_log import Metrics
from hookline.util.terminal import load_rich

# ---- layout of a line --------------------------------------------------------------------------------------


BAR, LONGEST_BAR, NOTEBOOK_BAR, CLOCK = 5, 40, 30, 8


class BarTexts(Protocol):
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
class LineLayout:
    """The widths of name and bar (0: none), whether the clock is shown, and the end of each line."""

    name: int
    bar: int
    clock: bool
    ends: list[str]


def fit_lines(
    bars: Sequence[BarTexts], width: int, longest_bar: int = LONGEST_BAR, clock: bool = True
) -> LineLayout:
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
    return LineLayout(
        name, min(longest_bar, bar + max(left, 0)) if bar else 0, clock, [" ".join(end) for end in ends]
    )


def _add_numbers(numbers: list[str], end: list[str], room: int) -> int:
    """Append as many numbers as fit, and return the width of all of them."""
    wide = sum(cell_len(each) + 1 for each in end)
    for text in numbers:
        if wide + cell_len(text) + 1 > room:
            break
        wide += cell_len(text) + 1
        end.append(text)
    return wide


class Bar:
    """Progress, rate and newest numbers of one pass over data."""

    def __init__(
        self, name: str, total: int | None, done: int = 0, plain: str = "", began: float | None = None
    ) -> None:
        """`plain`: the name in a log file, by default `name`."""
        self.name, self.total, self.done, self.plain = name, total, done, plain or name
        self.numbers: list[str] = []
        self.ended = ""
        """How the run ended, if it was not completed: `failed`, `interrupted`, `stopped`."""
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
        """Return `eta 0:00:24`, or an empty string if nothing is left or the length is unknown.

        If the run ended early, return how.
        """
        rate = self._per_second()
        if self.ended or self.total is None or rate == 0 or self.done >= self.total:
            return self.ended
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
    load_rich()
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
        print(f"{bar.plain} {bar.count} {bar.rest}", file=sys.stderr, flush=True)

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


def _blocks(bar: Bar) -> str:
    full = 0 if not bar.total else min(NOTEBOOK_BAR, NOTEBOOK_BAR * bar.done // bar.total)
    return "█" * full + "░" * (NOTEBOOK_BAR - full)


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
        fitted = (
            fit_lines(bars, width) if before is None else fit_lines(bars, width, before.bar, before.clock)
        )
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


# ---- the hook ----------------------------------------------------------------------------------------------


class ProgressBar(Hook):
    """Shows batches, rate, time left and metrics of training, sanity check, validation, test and prediction.

    Between two refreshes a batch only reads the clock. Only a refresh reads numbers from the device.
    """

    tier = "builtin"
    observes = True
    ranks = "zero"
    on_error = "disable"
    only_one = "progress bar"
    """A second one is refused when it is added."""

    @checked_parameters
    def __init__(
        self, refresh: Annotated[float, Number(0.0)] = 0.25, plain_every: Annotated[float, Number(0.0)] = 5.0
    ) -> None:
        """`refresh`: seconds between two refreshes. `plain_every`: the same without a terminal."""
        self.refresh = refresh
        self.plain_every = plain_every
        self._next = math.inf
        self._screen: Screen | None = None
        self._training: Bar | None = None
        self._in_pass = False
        """Whether an evaluation or prediction is running."""
        self._passes: list[Bar] = []
        """One bar per loader of the current evaluation."""

    # ---- training ------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, state: Any) -> None:
        self._open()
        last, name = trainer.options.max_epochs, f"epoch {state.epoch}"
        self._training = Bar(
            f"{name}/{last}" if last >= 0 else name,
            trainer.num_training_batches,
            state.batch_idx,
            plain=f"{name} batch",
        )

    def on_train_batch_end(self, state: Any, clock: Any = time.monotonic) -> None:
        if clock() >= self._next:
            self._show_training(state)

    def on_train_epoch_end(self, state: Any) -> None:
        if self._screen is not None and self._screen.live:
            self._show_training(state)

    def on_train_end(self, state: Any) -> None:
        if self._training is not None and state.status != "completed":
            self._training.ended = state.status
        self._show_training(state)

    def _show_training(self, state: Any) -> None:
        if self._training is not None:
            numbers = {"loss": state.loss, **state.log.bar, **_of_pass(state, "val/")}
            done, total = state.batch_idx + 1, self._training.total
            # a resume in the last validation of an epoch has no batch left, and batch_idx is the next one
            self._training.advance(done if total is None else min(done, total), numbers)
            self._draw()

    # ---- evaluation and prediction -------------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, sanity_checking: bool) -> None:
        self._begin_pass(
            trainer,
            "val",
            "sanity check" if sanity_checking else "validation",
            trainer.options.num_sanity_val_steps if sanity_checking else -1,
        )

    def on_test_start(self, trainer: Any) -> None:
        self._begin_pass(trainer, "test", "test")

    def on_predict_start(self, trainer: Any) -> None:
        self._begin_pass(trainer, "predict", "prediction")

    def on_validation_batch_end(self, state: Any, clock: Any = time.monotonic) -> None:
        if clock() >= self._next:
            self._show_pass(state)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, state: Any) -> None:
        self._end_pass(state, {} if state.sanity_checking else _of_pass(state, "val/"))

    def on_test_epoch_end(self, state: Any) -> None:
        self._end_pass(state, _of_pass(state, "test/"))

    def on_predict_epoch_end(self, state: Any) -> None:
        self._end_pass(state, {})

    def _begin_pass(self, trainer: Any, kind: str, name: str, limit: int = -1) -> None:
        self._open()
        self._in_pass = True
        self._began = time.monotonic()
        lengths = trainer.num_batches(kind)
        self._waiting = [
            (
                f"{name} {loader}" if len(lengths) > 1 else name,
                length if limit < 0 else min(limit, length or limit),
            )
            for loader, length in lengths.items()
        ]

    def _show_pass(self, state: Any, numbers: dict[str, Any] | None = None) -> None:
        while len(self._passes) <= state.dataloader_idx:  # the loaders before this one are done
            self._finish_passes()
            self._passes.append(Bar(*self._waiting[len(self._passes)], began=self._began))
        self._passes[-1].advance(state.batch_idx + 1, numbers or {})
        self._draw()

    def _finish_passes(self) -> None:
        for bar in self._passes:
            bar.advance(bar.total or bar.done, {})

    def _end_pass(self, state: Any, numbers: dict[str, Any]) -> None:
        self._in_pass = False
        if state.stage != "fit":  # outside a fit there is no bar of training to show the results
            self._show_pass(state, numbers)
        else:
            self._passes.clear()
            if self._training is not None:
                self._training.pause(time.monotonic() - self._began)

    # ---- the screen ----------------------------------------------------------------------------------------

    def setup(self) -> None:
        self._screen, self._training, self._next, self._in_pass = None, None, math.inf, False
        self._passes.clear()

    def teardown(self, state: Any) -> None:
        if self._screen is not None:
            if state.status in ("error", "interrupted") and self._screen.live:
                self._show_failure(state)
            self._screen.close()  # restores the terminal, also after an error
            self._screen = None

    def _show_failure(self, state: Any) -> None:
        """Show that the run failed, because a bar that stays as it was looks as if the run continued."""
        shown = [each for each in (self._training, *self._passes[-1:]) if each is not None]
        if not shown or shown[0].ended:
            return
        if self._in_pass == bool(self._passes):  # `batch_idx` is that of the last bar; a device is not read
            shown[-1].done = max(shown[-1].done, state.batch_idx)
        for bar in shown:
            bar.ended = "failed" if state.status == "error" else state.status
        self._draw()

    def _open(self) -> None:
        if self._screen is None:
            self._screen = choose_screen()
            self._pause = self.refresh if self._screen.live else self.plain_every
            self._next = time.monotonic() + self._pause

    def _draw(self) -> None:
        if self._screen is not None:
            self._screen.draw([*([self._training] if self._training else []), *self._passes])
            self._next = time.monotonic() + self._pause


def _of_pass(state: Any, prefix: str) -> dict[str, Any]:
    """Return an evaluation's results without reading the device, and without those of single loaders."""
    values = state.metrics.raw().items()
    return {
        key: value for key, value in values if key.startswith(prefix) and not key.startswith(f"{prefix}dl_")
    }
