"""What `hookline new` writes must work as it stands: it is the first thing a newcomer changes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from cli.configured import STRICT, hookline, strict_python

from hookline import OptionError
from hookline.cli import main
from hookline.cli.scaffold import PROJECT, write_project
from hookline.testing import fire


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "project"
    write_project(folder)
    return folder


def test_its_run_learns(folder: Path) -> None:
    done = hookline("fit", "run.toml", "--json", "--hooks.rises.by", "0.5", cwd=folder)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["status"] == "completed"
    assert told["metrics"]["val/accuracy"] > 0.8
    assert [each.name for each in (folder / "runs").iterdir()] == [Path(told["run_dir"]).name]


def test_its_model_can_be_loaded_from_the_run_whatever_it_was_made_with(folder: Path) -> None:
    words = ("--trainer.max_epochs", "1", "--module.width", "24", "--trainer.run_dir", "wide")
    fitted = hookline("fit", "run.toml", *words, cwd=folder)
    assert fitted.returncode == 0, fitted.stderr
    code = "from model import Classifier\nprint(Classifier.load_from_checkpoint('wide').net[0].out_features)"
    loaded = strict_python("-c", STRICT + code, cwd=folder)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == ["24"]


def test_its_tests_pass(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_its_test_fails_when_the_hook_does_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, works in (
        (PROJECT["hooks.py"], True),
        (PROJECT["hooks.py"].replace("self.rises += 1", "pass"), False),
    ):
        for name, text in (("model", PROJECT["model.py"]), ("hooks", source)):
            module = types.ModuleType(name)
            exec(text, vars(module))
            monkeypatch.setitem(sys.modules, name, module)
        names: dict[str, Any] = {}
        exec(PROJECT["test_hooks.py"], names)
        with contextlib.nullcontext() if works else pytest.raises(AssertionError):
            names["test_a_rise_is_counted_and_said"](fire, capsys)


def test_nothing_that_exists_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hooks.py").write_text("mine")
    with pytest.raises(OptionError, match=r"already has hooks.py; nothing was written"):
        write_project(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["hooks.py"]
    assert main(["new", str(tmp_path)]) == 2
    assert "already has hooks.py" in capsys.readouterr().err


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="is a file"):
        write_project(tmp_path / "file")


def test_the_command_says_what_it_wrote_and_what_is_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", str(tmp_path / "deep" / "inside")]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in PROJECT)
    assert "hookline fit run.toml" in said
    assert "pip install pytest && python -m pytest" in said
