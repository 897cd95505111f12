"""Screens of the progress bar: lines that fit a terminal, one output in a notebook, plain lines elsewhere."""

from __future__ import annotations

import io
import re
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest
import rich.console
from hooks.shown import Logs, Terminal, plain_environment
from tiny import Net, batches, quiet

from hookline.hooks.progress_bar import ProgressBar, fit_lines


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    plain_environment(monkeypatch)
    terminal = Terminal()
    yield terminal
    terminal.text()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A log file in place of stderr."""
    plain_environment(monkeypatch)
    return io.StringIO()


class Told:
    """Something to say that is as long as a test wants it."""

    def __init__(
        self, name: str, count: str = "55/100", rate: str = "250.0 it/s", eta: str = "eta 0:00:10"
    ) -> None:
        self.name, self.count, self.rate, self.eta, self.numbers = (
            name,
            count,
            rate,
            eta,
            ["loss 0.1234", "acc 0.25"],
        )


@pytest.mark.parametrize("width", range(1, 160))
def test_a_line_is_never_wider_than_the_terminal_and_says_the_most_important_first(width: int) -> None:
    bars = [Told("epoch 0"), Told("validation 中文", "2/?", "3.0 it/s", "")]
    found = fit_lines(bars, width)
    count = 6
    clock = 8 if found.clock else 0
    whole = (
        found.name
        + 1
        + (found.bar + 1 if found.bar else 0)
        + count
        + clock
        + max(1 + len(each) if each else 0 for each in found.ends)
    )
    assert whole <= max(width, count + 1)
    said = [
        found.name >= 15,
        found.bar > 0,
        "it/s" in found.ends[0],
        "eta" in found.ends[0],
        "loss" in found.ends[0],
        "acc" in found.ends[0],
    ]
    assert said == sorted(said, reverse=True)  # nothing is shown while something more important is not
    assert width < 22 or said[0]
    assert width < 72 or all(said)


def test_a_bar_does_not_tremble_with_the_length_of_the_numbers() -> None:
    short, long = Told("epoch 0"), Told("epoch 0")
    long.numbers = ["loss 0.123456789"]
    first = fit_lines([short], 80)
    second = fit_lines([long], 80, first.bar, first.clock)
    third = fit_lines([short], 80, second.bar, second.clock)
    assert third.bar == second.bar <= first.bar


def test_a_dumb_terminal_gets_plain_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with redirect_stderr(terminal.file):
        quiet(hooks=[ProgressBar(plain_every=0.0)]).fit(Net(), batches(2))
    assert "\x1b" not in terminal.text()
    assert "epoch 0 batch 2/2" in terminal.text()


class Cell:
    """What IPython does with outputs that have an id: `display` makes one, its handle replaces it."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, str]] = []
        self.versions = 0

    def display(self, shown: dict[str, str], raw: bool, display_id: bool) -> Any:
        assert raw and display_id
        self.outputs.append(shown)
        self.index = len(self.outputs) - 1
        return self

    def update(self, shown: dict[str, str], raw: bool) -> None:
        assert raw
        self.versions += 1
        self.outputs[self.index] = shown


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell = Cell()
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=cell.display))  # type: ignore[arg-type]
    shell = type("ZMQInteractiveShell", (), {})  # what tells rich that this is a notebook
    monkeypatch.setattr(rich.console, "get_ipython", shell, raising=False)
    return cell


def test_a_notebook_has_one_output_that_is_replaced(log: io.StringIO, cell: Cell) -> None:
    with redirect_stderr(log), warnings.catch_warnings():
        warnings.simplefilter("error")  # rich itself would ask for ipywidgets
        quiet(max_epochs=2, hooks=[ProgressBar(refresh=0.0)]).fit(Logs(), batches(3), batches(1))
    (output,) = cell.outputs
    assert cell.versions > 5
    assert re.match(r"epoch 1/2 █+ 3/3 .*it/s loss .* acc 0.25 val/loss", output["text/plain"])
    assert output["text/html"] == f"<pre>{output['text/plain']}</pre>"
    assert log.getvalue() == ""


class Breaks(Logs):
    """Fails, or is interrupted, in a batch of training or validation."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__()
        self.method, self.error = method, error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._or_break("training_step", batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self._or_break("validation_step", batch, batch_idx)

    def _or_break(self, method: str, batch: Any, batch_idx: int) -> Any:
        if method == self.method and batch_idx == 2:
            raise self.error
        return getattr(super(), method)(batch, batch_idx)


@pytest.mark.parametrize("refresh", [0.0, 1000.0])
@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("broken"), "failed"), (KeyboardInterrupt(), "interrupted")], ids=str
)
def test_after_a_failure_the_bar_of_a_notebook_does_not_look_as_if_the_run_continued(
    log: io.StringIO, cell: Cell, error: BaseException, said: str, refresh: float
) -> None:
    with redirect_stderr(log), pytest.raises(type(error)):
        quiet(hooks=[ProgressBar(refresh=refresh)]).fit(Breaks("training_step", error), batches(4))
    (output,) = cell.outputs
    assert re.match(rf"epoch 0/1 █+░+ 2/4 .*it/s {said}", output["text/plain"])
    assert "eta" not in output["text/plain"]


def test_a_validation_that_fails_ends_its_bar_and_that_of_the_training(log: io.StringIO, cell: Cell) -> None:
    breaks = Breaks("validation_step", ValueError("broken"))
    with redirect_stderr(log), pytest.raises(ValueError, match="broken"):
        quiet(hooks=[ProgressBar(refresh=0.0)]).fit(breaks, batches(3), batches(4))
    training, validation = cell.outputs[0]["text/plain"].splitlines()
    assert re.match(r"epoch 0/1 █+ 3/3 .*it/s failed", training)
    assert re.match(r"validation █+░+ 2/4 .*it/s failed", validation)
    with redirect_stderr(log), pytest.raises(ValueError, match="broken"):
        quiet(hooks=[ProgressBar(refresh=0.0)]).validate(breaks, batches(4))
    assert re.match(r"validation █+░+ 2/4 .*it/s failed$", cell.outputs[1]["text/plain"])


def test_a_run_that_is_stopped_has_no_time_left(log: io.StringIO, cell: Cell) -> None:
    trainer = quiet(max_epochs=3, hooks=[ProgressBar(refresh=0.0)])
    trainer.on("step_end")(lambda step: trainer.stop("enough") if step == 2 else None)
    with redirect_stderr(log):
        trainer.fit(Logs(), batches(4))
    assert re.match(r"epoch 0/3 █+░+ 2/4 .*it/s stopped loss", cell.outputs[0]["text/plain"])
