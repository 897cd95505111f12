"""The progress bar: plain lines off a terminal, a live line on one, and a clean terminal whatever happens."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from hooks.shown import Logs, Terminal, plain_environment
from test_budgets import per_step
from tiny import Net, batches, quiet

from hookline import Trainer
from hookline.hooks import progress_bar
from hookline.hooks.progress_bar import ProgressBar
from hookline.util.errors import HookError, OptionError

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # what a terminal is told to hide and show its cursor


def screen(text: str) -> list[str]:
    """The lines that a terminal shows after this was written to it; knows what rich uses."""
    lines, row = [""], 0
    for code, char in re.findall(r"(\x1b\[[?\d;]*[A-Za-z])|([^\x1b])", text):
        if code.endswith("A"):
            row -= int(code[2:-1] or 1)
        elif code == "\x1b[2K":
            lines[row] = ""
        elif char == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif char and char != "\r":
            lines[row] += char
    return [line.rstrip() for line in lines if line.strip()]


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
    lines = [line for line in log.getvalue().splitlines() if line.startswith("epoch")]
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


def test_validation_has_lines_of_its_own_and_the_sanity_check_says_what_it_is(log: io.StringIO) -> None:
    with redirect_stderr(log):
        quiet(num_sanity_val_steps=1, hooks=[ProgressBar(plain_every=0.0)]).fit(Net(), batches(1), batches(2))
    lines = [re.match(r"[a-z ]+\d?[a-z ]* \d+/\d+", line) for line in log.getvalue().splitlines()]
    assert [line[0] for line in lines if line] == [
        "sanity check 1/1",
        "epoch 0 batch 1/1",
        "validation 1/2",
        "validation 2/2",
        "epoch 0 batch 1/1",
    ]


def test_with_several_loaders_each_is_named(log: io.StringIO) -> None:
    with redirect_stderr(log):
        quiet(hooks=[ProgressBar(plain_every=0.0)]).validate(
            Net(), {"clean": batches(2), "noisy": batches(1)}
        )
    text = log.getvalue()
    assert (
        "validation clean 1/2" in text and "validation clean 2/2" in text and "validation noisy 1/1" in text
    )
    assert "val/loss" in text.splitlines()[-1]
    assert "val/dl_" not in text  # results of single loaders would not fit on a line


@pytest.mark.parametrize(
    ("verb", "says"), [("validate", "validation 3/3"), ("test", "test 3/3"), ("predict", "prediction 3/3")]
)
def test_the_other_verbs_end_with_one_line_that_has_their_results(
    log: io.StringIO, verb: str, says: str
) -> None:
    trainer = quiet(hooks=[ProgressBar(plain_every=3600.0)])
    with redirect_stderr(log):
        getattr(trainer, verb)(Net(), batches(3))
    (line,) = log.getvalue().splitlines()
    assert line.startswith(says)
    assert ("loss" in line) is (verb != "predict")


def test_what_is_left_is_told_as_long_as_something_is(log: io.StringIO) -> None:
    with redirect_stderr(log):
        quiet(hooks=[ProgressBar(plain_every=0.0)]).fit(Net(), batches(3))
    first, *_, last = log.getvalue().splitlines()
    assert re.search(r" eta \d+:\d\d:\d\d ", first)
    assert "eta" not in last


def test_a_slow_run_tells_seconds_per_batch_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 8.0, 16.0])
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: next(now))
    bar = progress_bar.Bar("epoch 0", 10)
    bar.advance(2, {})
    bar.advance(4, {})
    assert bar.rest == "4.0 s/it eta 0:00:24"


def test_time_spent_in_validation_does_not_slow_the_training_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 101.0])
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: next(now))
    bar = progress_bar.Bar("epoch 0", 4)
    bar.pause(100.0)
    bar.advance(4, {})
    assert bar.rest == "4.0 it/s"


def test_a_resumed_epoch_continues_where_it_was(log: io.StringIO, tmp_path: Path) -> None:
    saver = quiet(run_dir=tmp_path, max_steps=2)
    saver.on("train_batch_end", every=2)(lambda trainer: trainer.save_checkpoint(tmp_path / "half"))
    saver.fit(Net(), batches(5))
    with redirect_stderr(log):
        quiet(hooks=[ProgressBar(plain_every=0.0)]).fit(Net(), batches(5), resume=tmp_path / "half")
    assert log.getvalue().startswith("epoch 0 batch 3/5 ")


def test_a_run_that_resumes_in_the_last_validation_of_an_epoch_counts_no_batch_twice(
    log: io.StringIO, tmp_path: Path
) -> None:
    saver = quiet(run_dir=tmp_path, max_epochs=1)
    saver.on("validation_end")(lambda trainer: trainer.save_checkpoint(tmp_path / "inside"))
    saver.fit(Net(), batches(4), batches(2))
    with redirect_stderr(log):
        bar = ProgressBar(plain_every=0.0)
        quiet(hooks=[bar], max_epochs=1).fit(Net(), batches(4), batches(2), resume=tmp_path / "inside")
    assert "4/4" in log.getvalue() and "5/4" not in log.getvalue()


def test_a_log_file_stays_free_of_control_codes_even_if_colour_is_forced(
    log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with redirect_stderr(log):
        quiet(hooks=[ProgressBar(plain_every=0.0)]).fit(Net(), batches(2), batches(1))
    assert "batch 2/2" in log.getvalue()
    assert "\x1b" not in log.getvalue()


def test_a_long_line_stays_one_line_and_odd_names_are_shown_as_they_are(
    log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for index in range(20):
                self.log(f"[red]a long name {index}[/]", 1.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

    monkeypatch.setenv("COLUMNS", "40")
    with redirect_stderr(log):
        quiet(hooks=[ProgressBar()]).fit(Odd(), batches(1))
    (line,) = log.getvalue().splitlines()
    assert "[red]a long name 19[/] 1" in line


@pytest.mark.parametrize(
    "wrong",
    [{"refresh": -1}, {"plain_every": "often"}, {"refresh": float("nan")}, {"refresh": True}],
    ids=str,
)
def test_times_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"ProgressBar: {next(iter(wrong))}=.*number from 0"):
        ProgressBar(**wrong)


def test_a_step_between_two_refreshes_costs_a_few_calls_and_reads_nothing(log: io.StringIO) -> None:
    def calls(*hooks: ProgressBar) -> float:
        def run(data: Any) -> None:
            with redirect_stderr(log):
                quiet(hooks=hooks).fit(Net(), data)

        return per_step(run)

    # its method, the caller made for it, the account, the policy for failures, and the way to it
    assert calls(ProgressBar(plain_every=3600.0)) - calls() <= 5


# ---- on a terminal -----------------------------------------------------------------------------------------------


def test_on_a_terminal_one_line_lives_and_the_cursor_comes_back(terminal: Terminal) -> None:
    with redirect_stderr(terminal.file):
        quiet(hooks=[ProgressBar(refresh=0.0)]).fit(Logs(), batches(3), batches(1))
    text = terminal.text()
    for shown in ("epoch 0", "1/3", "2/3", "3/3", "it/s", "loss", "acc 0.25", "val/loss"):
        assert shown in text
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.rindex(SHOW) > text.rindex(HIDE)
    (left,) = screen(text)  # the validation's line is gone
    assert left.startswith("epoch 0") and "3/3" in left and "val/loss" in left


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
    assert len(screen(text)) == 1


def test_every_epoch_is_drawn_at_its_end_however_short(terminal: Terminal) -> None:
    with redirect_stderr(terminal.file):
        quiet(max_epochs=2, hooks=[ProgressBar(refresh=3600.0)]).fit(Net(), batches(2))
    assert "epoch 0" in terminal.text() and "epoch 1" in terminal.text()


def test_the_next_verb_does_not_show_the_training_before_it(terminal: Terminal) -> None:
    trainer = quiet(hooks=[ProgressBar(refresh=0.0)])
    with redirect_stderr(terminal.file):
        trainer.fit(Net(), batches(2))
        trainer.validate(Net(), batches(2))
    assert [line.split(" ")[0] for line in screen(terminal.text())] == ["epoch", "validation"]


def test_validation_has_a_line_below_the_training_as_long_as_it_lasts(terminal: Terminal) -> None:
    seen: list[list[str]] = []
    trainer = quiet(hooks=[ProgressBar(refresh=0.0)], num_sanity_val_steps=1)

    @trainer.on("validation_epoch_end")
    def look() -> None:
        seen.append(screen(terminal.so_far()))

    with redirect_stderr(terminal.file):
        trainer.fit(Net(), batches(2), {"a": batches(2), "b": batches(1)})
    sanity, during = seen
    assert [line.split(" ")[0] for line in sanity] == ["sanity", "sanity"]
    assert [re.sub(r" +", " ", line).split(" ")[:2] for line in during] == [
        ["epoch", "0/1"],
        ["validation", "a"],
        ["validation", "b"],
    ]
    assert "2/2" in during[1] and "1/1" in during[2]
    assert len(screen(terminal.text())) == 1


def test_a_narrow_terminal_cuts_the_line_instead_of_breaking_it(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with redirect_stderr(terminal.file):
        quiet(hooks=[ProgressBar(refresh=0.0)]).fit(Logs(), batches(3), batches(1))
    assert len(screen(terminal.text())) == 1


@pytest.mark.parametrize(
    ("columns", "shown", "gone"),
    [
        (20, ["epoch 0", "3/3"], ["loss", "it/s"]),
        (24, ["epoch 0", "3/3"], ["loss"]),
        (30, ["epoch 0", "3/3", "it/s"], ["loss"]),
        (39, ["epoch 0", "3/3", "it/s"], []),
        (70, ["epoch 0", "━━━━━", "3/3", "it/s", "loss", "acc 0.25"], []),
    ],
)
def test_name_and_count_outlive_the_metrics_on_a_narrow_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int, shown: list[str], gone: list[str]
) -> None:
    monkeypatch.delenv("COLUMNS")
    fcntl.ioctl(terminal.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    monkeypatch.setattr(
        os,
        "get_terminal_size",
        lambda _: os.terminal_size(
            struct.unpack("HHHH", fcntl.ioctl(terminal.slave, termios.TIOCGWINSZ, bytes(8)))[1::-1]
        ),
    )  # rich asks the process's own terminal, which is not this one
    with redirect_stderr(terminal.file):
        quiet(hooks=[ProgressBar(refresh=0.0)]).fit(
            Logs(), batches(3), {"clean": batches(2), "noisy": batches(2)}
        )
    (line,) = screen(terminal.text())
    assert len(line) <= columns
    assert all(each in line for each in shown) and not any(each in line for each in gone), line


# ---- one of them -------------------------------------------------------------------------------------------------


def test_a_progress_bar_among_the_hooks_takes_the_place_of_the_trainers_own() -> None:
    trainer = Trainer(hooks=[ProgressBar(refresh=7.0)], logger=False)
    assert [type(each).__name__ for each in trainer.hooks] == ["ProgressBar"]
    assert trainer.hooks["progress_bar"].refresh == 7.0
    assert [type(each).__name__ for each in Trainer(logger=False).hooks] == ["ProgressBar"]


class Own(ProgressBar):
    """Of a user's own."""


@pytest.mark.parametrize("second", [ProgressBar, Own])
def test_two_progress_bars_are_refused(second: type[ProgressBar]) -> None:
    with pytest.raises(
        OptionError, match="enable_progress_bar=True and the hook '.*' would make two progress bars"
    ):
        Trainer(hooks=[second()], enable_progress_bar=True, logger=False)
    with pytest.raises(
        HookError, match="A trainer can have one progress bar, and the hook 'progress_bar' is one"
    ):
        Trainer(hooks=[ProgressBar(), second()], logger=False)
    trainer = Trainer(logger=False)
    with pytest.raises(HookError, match=r"remove_hook\('progress_bar'\)"):
        trainer.add_hook(second())
    trainer.remove_hook("progress_bar")
    trainer.add_hook(second())
