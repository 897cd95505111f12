"""Metrics on the screen."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loggers.everything import ODD_TAGS, tell_everything
from tiny import Net, batches, quiet

from hookline import OptionError
from hookline.loggers import Console


def test_a_run_prints_a_line_per_report(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(logger=Console(), log_every_n_steps=1).fit(Net(lr=0.25), batches(2))
    lines = capsys.readouterr().out.splitlines()
    assert "parameter  options/max_epochs 1" in lines
    rows = [line for line in lines if line.startswith("step")]
    assert rows[0].startswith("step 1  epoch 0  train/loss ") and rows[0].endswith("  lr 0.25")
    assert [row.split("  ")[0] for row in rows] == ["step 1", "step 2", "step 2"]


def test_every_kind_of_record_is_one_clean_line(tmp_path: Path) -> None:
    stream = io.StringIO()
    tell_everything(Console(stream), tmp_path)
    text = stream.getvalue()
    assert "\x1b" not in text and "\0" not in text
    lines = text.splitlines()
    assert all(line.startswith(("step ", "parameter  ")) for line in lines)
    assert "step 1  epoch 0  train/loss 1.5  bad nan  up inf  down -inf" in lines
    assert "step -  array 0.25" in lines
    assert "step 3  weights 10 values: min 0 mean 4.5 max 9" in lines
    assert "step 3  weights 2 values: min 1 mean 1 max 1, 1 not finite" in lines
    assert "step 3  weights 0 values: no finite values" in lines
    assert "step 3  note hello <b> \\ud800" in lines
    assert "step 3  image image 3x4x5" in lines and "step 3  figure figure" in lines
    assert sum(line.startswith("step 5  ") for line in lines) == len(ODD_TAGS)
    assert not list(tmp_path.iterdir())


def test_colour_only_on_a_terminal_unless_told_and_tags_are_no_markup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, color, colored in (
        (Terminal(), None, True),
        (Terminal(), False, False),
        (io.StringIO(), None, False),
        (io.StringIO(), True, True),
    ):
        Console(stream, color).add_scalar("[red]x[/red]", 1.0, 3)
        assert ("\x1b[" in stream.getvalue()) == colored
        assert "[red]x[/red]" in stream.getvalue()
    wide = Terminal()
    Console(wide).log_metrics({f"metric{n}": float(n) for n in range(50)}, 1, 0)
    assert wide.getvalue().count("\n") == 1


def test_a_screen_that_cannot_show_a_character_shows_another() -> None:
    raw = io.BytesIO()
    screen = io.TextIOWrapper(raw, encoding="latin-1")
    Console(screen).add_scalar("ü€", 1.0, 3)
    assert raw.getvalue().decode("latin-1") == "step 3  ü? 1\n"


def test_it_prints_to_the_standard_output_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, late = Console(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", late)
    logger.add_text("a", "b", 1)
    assert late.getvalue() == "step 1  a b\n"


def test_a_closed_screen_does_not_stop_the_training(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    stream.close()
    trainer = quiet(logger=Console(stream), log_every_n_steps=1)
    trainer.fit(Net(), batches(3))
    assert trainer.state.step == 3
    assert [record.message for record in caplog.records] == [
        "Console failed in log_hyperparams and is switched off for this run"
    ]


@pytest.mark.parametrize("options", [{"stream": "out.txt"}, {"color": "yes"}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(options))}="):
        Console(**options)


def test_a_tensor_is_read_from_its_device() -> None:
    stream = io.StringIO()
    Console(stream).add_scalar("loss", torch.tensor(0.5, requires_grad=True), 1)
    assert stream.getvalue() == "step 1  loss 0.5\n"
