"""The progress bar: plain lines off a terminal, a live line on one, and a clean terminal whatever happens."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest
from tiny import Net, batches, quiet

from hookline import Trainer
from hookline.hooks.progress_bar import ProgressBar

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # what a terminal is told to hide and show its cursor


class Terminal:
    """A real pseudo-terminal to put in place of stderr; `text()` is everything that was written to it."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.file = os.fdopen(self.slave, "w", buffering=1)
        self.chunks: list[bytes] = []
        self.reader = threading.Thread(target=self._drain, daemon=True)
        self.reader.start()

    def _drain(self) -> None:
        while True:
            try:
                chunk = os.read(self.master, 65536)
            except OSError:  # Linux says so when the other end is closed
                return
            if not chunk:
                return
            self.chunks.append(chunk)

    def text(self) -> str:
        if not self.file.closed:
            self.file.close()
            self.reader.join(timeout=10)
            os.close(self.master)
        return b"".join(self.chunks).decode()


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


def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")


class Logs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("acc", 0.25, prog_bar=True)
        self.log("hidden", 0.75)
        return super().training_step(batch, batch_idx)


class Fails(Net):
    error: BaseException = RuntimeError("broken")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise self.error
        return super().training_step(batch, batch_idx)


# ---- off a terminal ----------------------------------------------------------------------------------------------


def test_off_a_terminal_there_are_plain_lines(log: io.StringIO) -> None:
    with redirect_stderr(log):
        quiet(max_epochs=2, hooks=[ProgressBar(plain_every=0.0)]).fit(Logs(), batches(3), batches(1))
    lines = log.getvalue().splitlines()
    places = [re.match(r"epoch (\d+) batch (\d+)/3 ", line) for line in lines]
    assert [(place[1], place[2]) for place in places[:6] if place] == [(e, b) for e in "01" for b in "123"]
    assert "\x1b" not in log.getvalue() and "\r" not in log.getvalue()
    assert all("it/s" in line and "loss" in line and "acc 0.25" in line for line in lines)
    assert "hidden" not in log.getvalue()
    assert "val/loss" in lines[-1]


def test_a_short_run_writes_one_line_not_one_per_batch(log: io.StringIO) -> None:
    with redirect_stderr(log):
        quiet(hooks=[ProgressBar(plain_every=3600.0)]).fit(Net(), batches(50))
    (line,) = log.getvalue().splitlines()
    assert line.startswith("epoch 0 batch 50/50 ")


def test_an_unknown_length_is_shown_as_unknown(log: io.StringIO) -> None:
    with redirect_stderr(log):
        quiet(hooks=[ProgressBar()], max_steps=2).fit(Net(), (each for each in batches(3)))
    assert "batch 2/? " in log.getvalue()


def test_nothing_goes_to_stdout(log: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    with redirect_stderr(log):
        quiet(hooks=[ProgressBar(plain_every=0.0)]).fit(Net(), batches(2))
    assert capsys.readouterr().out == ""


def test_it_is_there_by_default_and_can_be_left_out() -> None:
    assert "progress_bar" in Trainer().hooks.list_hooks()
    assert "progress_bar" not in Trainer(enable_progress_bar=False).hooks.list_hooks()


def test_a_run_without_training_shows_nothing(log: io.StringIO) -> None:
    trainer = quiet(hooks=[ProgressBar()])
    with redirect_stderr(log):
        trainer.validate(Net(), batches(1))
        trainer.predict(Net(), batches(1))
    assert log.getvalue() == ""


# ---- on a terminal -----------------------------------------------------------------------------------------------


def test_on_a_terminal_one_line_lives_and_the_cursor_comes_back(terminal: Terminal) -> None:
    with redirect_stderr(terminal.file):
        quiet(hooks=[ProgressBar(refresh=0.0)]).fit(Logs(), batches(3), batches(1))
    text = terminal.text()
    for shown in ("epoch 0", "1/3", "2/3", "3/3", "it/s", "loss", "acc 0.25", "val/loss"):
        assert shown in text
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.rindex(SHOW) > text.rindex(HIDE)
    assert text.count("\n") == 1  # the line stays one line


def test_between_refreshes_nothing_is_drawn(terminal: Terminal) -> None:
    with redirect_stderr(terminal.file):
        quiet(hooks=[ProgressBar(refresh=3600.0)]).fit(Net(), batches(200))
    text = terminal.text()
    assert "200/200" in text
    assert "100/200" not in text


def test_a_second_fit_has_its_bar_too(terminal: Terminal, caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(hooks=[ProgressBar(refresh=0.0)])
    with redirect_stderr(terminal.file):
        trainer.fit(Net(), batches(2))
        trainer.fit(Net(), batches(5))
    assert caplog.records == []
    assert trainer.hooks.list_hooks() == ["progress_bar"]
    assert "5/5" in terminal.text()


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_after_an_exception_the_terminal_is_as_it_was(terminal: Terminal, error: BaseException) -> None:
    net = Fails()
    net.error = error
    with redirect_stderr(terminal.file):
        before = sys.stdout, sys.stderr
        with pytest.raises(type(error)):
            quiet(hooks=[ProgressBar(refresh=0.0)]).fit(net, batches(4))
        assert (sys.stdout, sys.stderr) == before  # both are taken over while the bar is there
    text = terminal.text()
    assert "2/4" in text
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.rindex(SHOW) > text.rindex(HIDE)
    assert text.endswith(("\n", SHOW))


def test_what_a_hook_prints_stands_above_the_live_line(terminal: Terminal) -> None:
    trainer = quiet(hooks=[ProgressBar(refresh=0.0)])
    trainer.on("train_batch_end")(lambda batch_idx: print(f"note {batch_idx}", file=sys.stderr))
    with redirect_stderr(terminal.file):
        trainer.fit(Net(), batches(2))
    text = terminal.text()
    assert "note 0" in text and "note 1" in text
    assert text.count(SHOW) == 1


def test_several_epochs_follow_each_other_on_one_line(terminal: Terminal) -> None:
    with redirect_stderr(terminal.file):
        quiet(max_epochs=3, hooks=[ProgressBar(refresh=0.0)]).fit(Net(), batches(2))
    text = terminal.text()
    assert all(f"epoch {epoch}" in text for epoch in range(3))
    assert text.count("\n") == 1
