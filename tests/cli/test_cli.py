"""The command line as a whole: what it waits for, and what it says about a wrong command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hookline.cli import main


def test_what_needs_no_torch_does_not_wait_for_it(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("[")
    (tmp_path / "unknown.toml").write_text("modul = 'x.Y'")
    commands = [
        ["--help"],
        ["fit", "--help"],
        ["--version"],
        ["events"],
        ["events", "step_end"],
        ["hooks"],
        ["hooks", "--json"],
        ["new", "project"],
        ["fit", "missing.toml"],
        ["fit", "broken.toml"],
        ["fit", "unknown.toml", "--a"],
    ]
    code = f"""
import sys
from hookline.cli import main
codes = []
for command in {commands!r}:
    try:
        codes.append(main(command))
    except SystemExit as end:
        codes.append(end.code)
print(codes, [name for name in ("torch", "numpy", "jsonargparse", "rich") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2] []"
    assert "usage: hookline" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["fitt"], "invalid choice: 'fitt'"),
        (["reprt"], "Did you mean 'report'?"),
        (["fit"], "CONFIG"),
        (["fit", "run.toml", "--max_epochs", "3"], "This is an option of the trainer: --trainer.max_epochs"),
        (["fit", "run.toml", "trainer.max_epochs=2"], "begins with two dashes: --trainer.max_epochs=2"),
        (["fit", "run.toml", "--lr", "3"], "is written with its section: --module.lr"),
        (["events", "--jsn"], "unrecognized arguments: --jsn"),
    ],
)
def test_a_wrong_command_is_explained(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
