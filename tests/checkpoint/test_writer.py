"""The order of what a save does to the disk, from a record of its calls. A kill cannot show a missing flush; this can."""

from __future__ import annotations

import os
import platform
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline.checkpoint import writer
from hookline.checkpoint.files import read, remove, write
from hookline.checkpoint.writer import exchange, machine_id

CONTENTS = {"module": {"w": torch.ones(100)}, "optimizers": [{"m": torch.ones(3)}], "counters": {"step": 1}}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """What is flushed, renamed and removed, as (call, path, target), in the order in which it is done."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("the path of an open file is read from /proc")
    done: list[tuple[str, str, str]] = []
    lock = threading.Lock()

    def note(name: str, real: Any, told: Any) -> None:
        def wrapped(*given: Any, **named: Any) -> Any:
            path, target = told(*given)
            result = real(*given, **named)
            with lock:
                done.append((name, str(path), str(target)))
            return result

        monkeypatch.setattr(shutil if name == "rmtree" else os, name, wrapped)

    note("fsync", os.fsync, lambda handle: (os.readlink(f"/proc/self/fd/{handle}"), ""))
    note("rename", os.rename, lambda old, new: (old, new))
    note("rmtree", shutil.rmtree, lambda path, *rest: (path, ""))
    return done


def test_everything_is_flushed_before_the_rename_the_manifest_last_and_the_parent_after_it(
    tmp_path: Path, calls: list[tuple[str, str, str]]
) -> None:
    path = tmp_path / "deep" / "checkpoints" / "step-1"
    write(CONTENTS, path)
    aside = f"{path.parent}/.step-1.{machine_id()}-{os.getpid()}.new"
    flushed = [each for call, each, _ in calls if call == "fsync"]
    # the names of new folders, the data in any order, then manifest, folder, and, after the rename, the parent
    assert flushed[:2] == [str(tmp_path), f"{tmp_path}/deep"]
    assert set(flushed[2:5]) == {
        f"{aside}/{name}" for name in ("model.safetensors", "state.safetensors", "state.json")
    }
    assert flushed[5:] == [f"{aside}/manifest.json", aside, str(path.parent)]
    order = [call for call, _, _ in calls if call != "rmtree"]
    assert order[-2:] == ["rename", "fsync"]
    assert [each[1:] for each in calls if each[0] == "rename"] == [(aside, str(path))]


def test_the_old_one_is_replaced_in_one_call_and_deleted_only_once_the_new_one_is_durable(
    tmp_path: Path, calls: list[tuple[str, str, str]]
) -> None:
    path = tmp_path / "step-1"
    write(CONTENTS, path)
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    if not exchange(tmp_path / "one", tmp_path / "two"):
        pytest.skip("this file system cannot exchange two names")
    calls.clear()
    write({**CONTENTS, "counters": {"step": 2}}, path)
    new = f"{tmp_path}/.step-1.{machine_id()}-{os.getpid()}.new"
    assert calls[-2:] == [("fsync", str(tmp_path), ""), ("rmtree", new, "")]
    assert ("fsync", new, "") in calls[:-2] and not [each for each in calls if each[0] == "rename"]
    assert read(path)["counters"]["step"] == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["one", "step-1", "two"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs Linux with glibc")
def test_linux_is_asked_to_exchange_names(tmp_path: Path) -> None:
    """It refuses names that do not exist; False would mean that it was not asked, or cannot."""
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "one", tmp_path / "two")


def test_where_names_cannot_be_exchanged_the_old_one_is_moved_away_first(
    tmp_path: Path, calls: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "exchange", lambda aside, path: False)
    path = tmp_path / "step-1"
    write(CONTENTS, path)
    calls.clear()
    write(CONTENTS, path)
    old, new = (
        f"{tmp_path}/.step-1.{machine_id()}-{os.getpid()}.old",
        f"{tmp_path}/.step-1.{machine_id()}-{os.getpid()}.new",
    )
    assert calls[-4:] == [
        ("rename", str(path), old),
        ("rename", new, str(path)),
        ("fsync", str(tmp_path), ""),
        ("rmtree", old, ""),
    ]
    assert ("fsync", new, "") in calls[:-4]


def test_a_checkpoint_loses_its_name_before_its_files(
    tmp_path: Path, calls: list[tuple[str, str, str]]
) -> None:
    path = tmp_path / "step-1"
    write(CONTENTS, path)
    calls.clear()
    remove(path)
    gone = f"{tmp_path}/.step-1.gone"
    assert [each for each in calls if each != ("rmtree", gone, "")] == [("rename", str(path), gone)]
    assert calls[-1] == ("rmtree", gone, "")
    assert not list(tmp_path.iterdir())
