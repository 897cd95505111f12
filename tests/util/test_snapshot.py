"""A snapshot has the files of a checkpoint as they were, whatever happens to the checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hookline.util.snapshot import link_or_copy, remove_if_empty, remove_snapshot, take_snapshot


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    (folder / "mine").mkdir(parents=True)
    for name in ("manifest.json", "model.safetensors", "rank-1.safetensors", "note.txt", "mine/data.txt"):
        (folder / name).write_text(name)
    return folder


def test_files_of_the_checkpoint_are_links_and_other_files_are_copies(
    checkpoint: Path, tmp_path: Path
) -> None:
    held = tmp_path / "held" / "checkpoint"
    assert take_snapshot(checkpoint, held) == []
    linked = {
        str(path.relative_to(held)): path.stat().st_nlink == 2 for path in held.rglob("*") if path.is_file()
    }
    assert linked == {
        "manifest.json": True,
        "model.safetensors": True,
        "rank-1.safetensors": True,
        "note.txt": False,
        "mine/data.txt": False,
    }
    (checkpoint / "note.txt").write_text("changed")
    shutil.rmtree(checkpoint)
    assert all(path.read_text() == str(path.relative_to(held)) for path in held.rglob("*.*"))
    remove_snapshot(held)
    assert not held.exists()
    remove_if_empty(held.parent)
    assert not held.parent.exists()


def test_what_cannot_be_copied_is_named(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "link").symlink_to("note.txt")
    (checkpoint / "folder").symlink_to("mine")
    os.mkfifo(checkpoint / "pipe")
    assert take_snapshot(checkpoint, tmp_path / "held") == ["folder", "link", "pipe"]


def test_a_file_is_copied_under_any_name(checkpoint: Path, tmp_path: Path) -> None:
    held = tmp_path / "held" / "model.ckpt"
    assert take_snapshot(checkpoint / "model.safetensors", held) == []
    assert held.stat().st_nlink == 1 and held.read_text() == "model.safetensors"
    remove_snapshot(held)
    remove_snapshot(held)
    assert not held.exists()


def test_without_links_files_are_copied(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise OSError("another device")

    monkeypatch.setattr(os, "link", refuse)
    link_or_copy(checkpoint / "note.txt", tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_nlink == 1 and (tmp_path / "copy").read_text() == "note.txt"


def test_a_folder_with_something_in_it_stays(checkpoint: Path) -> None:
    remove_if_empty(checkpoint)
    assert checkpoint.is_dir()
