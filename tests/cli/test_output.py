"""Exit codes: what programs that start the command line rely on."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hookline import OptionError
from hookline.cli import CODES, main, make_parser
from hookline.cli.output import USAGE, print_error


def test_every_exit_code_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    from hookline.cli import output

    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    for name in ("OK", "FAILED", "USAGE", "DIFFERENT", "INTERRUPTED", "BROKEN_PIPE"):
        assert f"{getattr(output, name)} " in said


def test_a_wrong_call_with_trained_weights_is_not_a_run_that_failed() -> None:
    error = OptionError("predict needs a loader")
    error.add_note("the run ended in predict at epoch 4, batch 0, step 60")
    assert print_error(error, []) == USAGE


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m hookline events --json; echo code $? >&2"
    done = subprocess.run(["bash", "-c", f"({command}) | true"], capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr
    assert "code 141" in done.stderr


def test_the_page_on_the_command_line_names_every_command_and_exit_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    commands = next(
        action for action in make_parser({})._actions if isinstance(action, argparse._SubParsersAction)
    ).choices
    assert [name for name in commands if not re.search(rf"`(?:hookline )?{name}[ `]", page)] == []
    codes = {code for row in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) for code in row.split(", ")}
    assert codes == set(re.findall(r"\b\d+\b", CODES))
