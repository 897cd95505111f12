"""`hookline convert`: what is written where, and the command that runs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from hookline.cli import main

MODEL = (
    "from hookline import Module\nclass Net(Module):\n    def __init__(self, width: int = 4) -> None: ...\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "converted_parts.py").write_text(MODEL)
    yield tmp_path
    sys.modules.pop("converted_parts", None)


def lightning_file(**trainer: Any) -> None:
    values = {"trainer": {"max_epochs": 3, **trainer}, "model": {"class_path": "converted_parts.Net"}}
    Path("run.yaml").write_text(yaml.safe_dump(values))


@pytest.mark.usefixtures("folder")
def test_the_file_is_written_beside_its_source_and_the_next_command_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lightning_file()
    assert main(["convert", "run.yaml"]) == 0
    wrote, left_out, _, command = capsys.readouterr().out.splitlines()
    assert (wrote, command) == ("wrote run.hookline.yaml", "Next: hookline fit run.hookline.yaml")
    assert left_out.startswith("not converted: ") and "link_arguments" in left_out
    text = Path("run.hookline.yaml").read_text()
    assert text.startswith("# converted from run.yaml by hookline convert\n")
    made = yaml.safe_load(text)
    assert made["module"]["class_path"] == "converted_parts.Net" and made["trainer"]["max_epochs"] == 3


@pytest.mark.usefixtures("folder")
def test_programs_get_json_and_several_devices_are_several_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lightning_file(devices=2, num_nodes=3, strategy="ddp")
    assert main(["convert", "run.yaml", "other.yml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "written": "other.yml",
        "command": "torchrun --nproc-per-node=2 --nnodes=3 -m hookline fit other.yml",
    }


@pytest.mark.usefixtures("folder")
def test_a_file_that_exists_is_replaced_on_request_only(capsys: pytest.CaptureFixture[str]) -> None:
    lightning_file()
    Path("run.hookline.yaml").write_text("mine")
    assert main(["convert", "run.yaml"]) == 2
    assert "run.hookline.yaml: this file exists; add --force" in capsys.readouterr().err
    assert Path("run.hookline.yaml").read_text() == "mine"
    assert main(["convert", "run.yaml", "--force"]) == 0
    assert Path("run.hookline.yaml").read_text() != "mine"


@pytest.mark.usefixtures("folder")
def test_only_yaml_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    lightning_file()
    assert main(["convert", "run.yaml", "other.toml"]) == 2
    assert "name a .yaml file" in capsys.readouterr().err and not Path("other.toml").exists()
