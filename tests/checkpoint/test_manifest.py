"""The manifest of a checkpoint: signed as a whole, and refused if it is something else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from checkpoint.damaged import contents, refused

from hookline import CheckpointError
from hookline.checkpoint.files import read, read_manifest, write


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Path, Path]:
    for step in (1, 2):
        write(contents(step), tmp_path / f"step-{step}", {"metrics": {"val/loss": 1.5}})
    return tmp_path / "step-1", tmp_path / "step-2"


def test_every_line_of_the_manifest_is_signed(whole: tuple[Path, Path]) -> None:
    file = whole[0] / "manifest.json"
    sound = json.loads(file.read_text())
    for key in sound:
        for changed in (
            {**sound, key: "other"},
            {each: value for each, value in sound.items() if each != key},
        ):
            file.write_text(json.dumps(changed, indent=1) + "\n")
            with pytest.raises(CheckpointError, match=r"manifest\.json|has format"):
                read_manifest(whole[0])


def test_not_even_white_space_of_the_manifest_changes_unseen(whole: tuple[Path, Path]) -> None:
    file = whole[0] / "manifest.json"
    file.write_text(file.read_text().replace("\n", " ", 1))
    refused(whole[0], "manifest.json")


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", "null", "1", '{"format": "2"}', "[" * 100_000, '{"format": 2, "files": 3}'],
    ids=lambda t: t[:20],
)
def test_a_manifest_that_is_something_else_is_refused(whole: tuple[Path, Path], text: str) -> None:
    (whole[0] / "manifest.json").write_text(text)
    refused(whole[0], "manifest.json")


def test_a_checkpoint_of_the_first_format_is_refused_by_its_number(whole: tuple[Path, Path]) -> None:
    (whole[0] / "manifest.json").write_text(json.dumps({"format": 1, "files": {}}))
    with pytest.raises(CheckpointError, match="step-1 has format 1; this version reads only format 2"):
        read(whole[0])


def test_a_manifest_that_is_no_regular_file_is_never_opened(whole: tuple[Path, Path]) -> None:
    (whole[0] / "manifest.json").unlink()
    os.mkfifo(whole[0] / "manifest.json")
    refused(whole[0], "manifest.json")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "step-3"


def test_a_checkpoint_from_the_future_is_refused(path: Path) -> None:
    write(contents(1), path)
    (manifest,) = (each for each in path.glob("*.json") if "format" in json.loads(each.read_text()))
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="has format 99; this version reads only format"):
        read(path)
