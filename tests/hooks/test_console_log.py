"""ConsoleLog: what a run prints when it has no bar."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from tiny import Net, batches, quiet

from hookline import LossError
from hookline.hooks.console_log import ConsoleLog
from hookline.run.state import State
from hookline.util.errors import OptionError


class Fixed(Net):
    """A loss that is known beforehand: 0, 1, 2, ..."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 0.0 * super().training_step(batch, batch_idx) + float(batch_idx)


def test_the_start_and_end_of_run_and_epochs_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(max_epochs=2, hooks=[ConsoleLog()]).fit(Net(), batches(3), batches(1))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training started: Net, 10 parameters, on cpu"
    assert lines[1] == "epoch 0 started"
    assert re.fullmatch(r"epoch 0 completed in [\d.]+ s, loss \d\.\d{4}, val/loss \d\.\d{4}", lines[2])
    assert lines[3] == "epoch 1 started"
    assert re.fullmatch(r"training completed: 2 epochs, 6 steps, [\d.]+ s", lines[-1])


def test_every_nth_batch_has_its_loss_the_running_average_and_the_perplexity(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quiet(hooks=[ConsoleLog(log_every_n_batches=2)]).fit(Fixed(), batches(5))
    lines = [line for line in capsys.readouterr().out.splitlines() if "batch" in line]
    assert lines == [
        f"epoch 0, batch 2/5, loss 1.0000, average 0.5000, perplexity {math.e:.4g}",
        f"epoch 0, batch 4/5, loss 3.0000, average 1.5000, perplexity {math.exp(3):.4g}",
    ]


def test_a_loss_too_large_for_a_perplexity_is_no_error(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Huge(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return 0.0 * super().training_step(batch, batch_idx) + 1e6

    quiet(hooks=[ConsoleLog(1)]).fit(Huge(), batches(1))
    assert "perplexity inf" in capsys.readouterr().out
    assert not caplog.records


def test_perplexity_and_batch_lines_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(hooks=[ConsoleLog(1, perplexity=False)]).fit(Net(), batches(1))
    assert "batch 1/1, loss" in (out := capsys.readouterr().out) and "perplexity" not in out
    quiet(hooks=[ConsoleLog(None)]).fit(Net(), batches(20))
    assert "batch" not in (out := capsys.readouterr().out) and "epoch 0 completed" in out


def test_a_batch_without_a_loss_still_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Empty(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.raises(LossError, match="returned no loss"):
        quiet(hooks=[ConsoleLog(1)]).fit(Empty(), (each for each in batches(1)))
    assert "epoch 0, batch 1\n" in capsys.readouterr().out


def test_an_early_stop_says_why_and_a_failure_says_what(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet(hooks=[ConsoleLog()])
    trainer.on("train_batch_end")(lambda trainer: trainer.stop("enough"))
    trainer.fit(Net(), batches(3))
    assert "training stopped (enough): 0 epochs, 1 step," in capsys.readouterr().out

    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        quiet(hooks=[ConsoleLog()]).fit(Fails(), batches(1))
    assert "fit ended by RuntimeError at epoch 0, batch 0, step 0: broken" in capsys.readouterr().out


def test_a_resumed_run_says_where_it_continues(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    first = quiet()
    first.on("train_epoch_end")(lambda trainer: trainer.save_checkpoint(tmp_path / "one"))
    first.fit(Net(), batches(3))
    quiet(max_epochs=2, hooks=[ConsoleLog()]).fit(Net(), batches(3), resume=tmp_path / "one")
    assert "resumed in epoch 1 at step 3" in capsys.readouterr().out


def test_the_trainer_adds_and_removes_it_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet()
    trainer.add_console_logging(log_every_n_batches=1)
    trainer.fit(Net(), batches(1))
    assert "batch 1/1, loss" in capsys.readouterr().out
    trainer.remove_hook("console_log")
    trainer.fit(Net(), batches(1))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "10", True])
def test_an_interval_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match="ConsoleLog: log_every_n_batches=.* whole number from 1"):
        ConsoleLog(log_every_n_batches=wrong)


def test_the_loss_is_read_only_when_a_line_is_due(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[int] = []
    plain = State.loss.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        State, "loss", property(lambda state: (read.append(state.batch_idx), plain(state))[1])
    )
    quiet(hooks=[ConsoleLog(log_every_n_batches=10)]).fit(Net(), batches(25))
    assert read == [9, 19]
