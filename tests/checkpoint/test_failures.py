"""A disk that is full, a folder that is gone or may not be written: the error says so, and the older checkpoints stay."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch

from hookline import CheckpointError
from hookline.checkpoint.files import read, remove, verify, write


def contents(numbers: int = 10) -> dict[str, Any]:
    return {
        "module": {"w": torch.ones(numbers)},
        "optimizers": [{"m": torch.ones(numbers)}],
        "counters": {"step": numbers},
    }


def mounted(folder: Path, options: str) -> bool:
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "hookline-test", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte, where mounting is permitted."""
    folder = tmp_path / "disk"
    if not mounted(folder, "size=1m"):
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.mark.parametrize("numbers", [100_000, 130_000, 1_000_000])
def test_a_full_disk_is_said_with_the_file_and_what_was_needed(small_disk: Path, numbers: int) -> None:
    write(contents(), small_disk / "step-1")
    with pytest.raises(
        CheckpointError,
        match=r"step-2 could not be written: (model|state)\.(safetensors|json): No space left.* need [\d.]+ MB, [\d.]+ MB are free",
    ):
        write(contents(numbers + 50_000), small_disk / "step-2")
    assert names(small_disk) == ["step-1"]
    verify(small_disk / "step-1")
    with pytest.raises(CheckpointError, match="No space left"):
        write(contents(numbers + 50_000), small_disk / "step-1")
    assert read(small_disk / "step-1")["counters"]["step"] == 10
    write(contents(20), small_disk / "step-2")  # and there is room again at once
    verify(small_disk / "step-2")


def test_a_disk_that_became_read_only_is_said(tmp_path: Path, small_disk: Path) -> None:
    write(contents(), small_disk / "step-1")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match="step-2 could not be written: .*Read-only file system"):
        write(contents(), small_disk / "step-2")
    with pytest.raises(CheckpointError, match="step-1 could not be removed: .*Read-only file system"):
        remove(small_disk / "step-1")
    verify(small_disk / "step-1")


LIMITED = """
import resource, signal, sys
from pathlib import Path
import torch
from hookline import CheckpointError
from hookline.checkpoint.files import read, write
path = Path(sys.argv[1])
write({"module": {"w": torch.ones(10)}}, path)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    write({"module": {"w": torch.ones(100_000)}}, path)
except CheckpointError as error:
    print(error, len(read(path)["module"]["w"]), [each.name for each in path.parent.iterdir()])
"""


def test_a_file_that_may_not_grow_so_large_is_said(tmp_path: Path) -> None:
    done = preloaded.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "step-1")], capture_output=True, text=True, check=True
    )
    assert (
        "step-1 could not be written: model.safetensors: File too large; its tensors need 0.4 MB"
        in done.stdout
    )
    assert done.stdout.endswith(" 10 ['step-1']\n")


def test_permission_lost_is_said(tmp_path: Path) -> None:
    write(contents(), tmp_path / "step-1")
    user = os.geteuid()
    tmp_path.chmod(0o500)
    try:
        if user == 0:
            os.seteuid(65534)  # root may do everything
        with pytest.raises(CheckpointError, match="step-2 could not be written: .*Permission denied"):
            write(contents(), tmp_path / "step-2")
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)
    verify(tmp_path / "step-1")
    assert names(tmp_path) == ["step-1"]


def test_a_parent_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"step-1 could not be written: .*checkpoints.*(Not a directory|File exists)"
    ):
        write(contents(), tmp_path / "checkpoints" / "step-1")
    assert (tmp_path / "checkpoints").read_text() == "mine"


def test_a_folder_that_is_gone_is_made_again(tmp_path: Path) -> None:
    write(contents(), tmp_path / "run" / "step-1")
    (tmp_path / "run").rename(tmp_path / "moved")
    write(contents(), tmp_path / "run" / "step-2")
    verify(tmp_path / "run" / "step-2")


def test_a_folder_that_goes_while_it_is_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = tmp_path / "run", os.rename

    def gone(old: Any, new: Any) -> None:
        monkeypatch.setattr(os, "rename", real)
        folder.rename(tmp_path / "moved")
        real(old, new)

    monkeypatch.setattr(os, "rename", gone)
    with pytest.raises(CheckpointError, match="step-1 could not be written: .*No such file or directory"):
        write(contents(), folder / "step-1")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path, what: str) -> None:
    mine = tmp_path / "mine"
    if what == "file":
        mine.write_text("precious")
    else:
        mine.mkdir()
        (mine / "thesis.tex").write_text("precious")
    with pytest.raises(
        CheckpointError,
        match=f"mine could not be written: a {'file' if what == 'file' else 'directory'} of that name exists",
    ):
        write(contents(), mine)
    assert (mine if what == "file" else mine / "thesis.tex").read_text() == "precious"
    assert names(tmp_path) == ["mine"]


def test_an_empty_folder_is_room_for_one(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    write(contents(), tmp_path / "made")
    verify(tmp_path / "made")


MEASURED = """
import re, sys
from pathlib import Path
import torch
from hookline.checkpoint.files import write

folder, peak = Path(sys.argv[1]), lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
write({"module": {"a": torch.ones(1000)}}, folder / "first")  # whatever is loaded the first time
before, big = peak(), torch.ones(20_000_000)  # 80 MB
with_tensor = peak()
write({"module": {"a": big[:10_000_000], "b": big[10_000_000:]}}, folder / "second")
print(with_tensor - before, peak() - with_tensor)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="Linux tells a process its peak of memory there"
)
def test_saving_makes_no_second_copy_of_the_tensors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path)], capture_output=True, text=True, check=True
    )  # a peak of its own
    tensor, more = map(int, done.stdout.split())
    assert tensor > 60_000  # in kilobytes
    assert more < 40_000
