"""Checkpoints at a URL: the manifest comes last there, and everything is verified on the way back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from hookline import CheckpointError
from hookline.checkpoint.background import BackgroundSaver
from hookline.checkpoint.files import read, read_manifest, remove, verify, write
from hookline.checkpoint.remote import list_urls
from hookline.checkpoint.writer import machine_id


def contents(step: int = 1) -> dict[str, Any]:
    return {
        "module": {"w": torch.full((3,), float(step))},
        "counters": {"step": step},
        "position": {1: (2, 3)},
    }


@pytest.fixture(params=["memory", "file"])
def base(request: pytest.FixtureRequest, tmp_path: Path, memory_urls: None) -> str:
    return f"file://{tmp_path}/there" if request.param == "file" else "memory://bucket/run"


def files(url: str) -> dict[str, bytes]:
    fs, root = fsspec.core.url_to_fs(url)
    return {each[len(root) + 1 :]: fs.cat_file(each) for each in fs.find(root)}


def test_what_is_written_to_a_url_is_read_from_it(base: str, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    manifest = write(contents(), f"{base}/step-1", {"reason": "best"}, staging=lambda: staging)
    restored = read(f"{base}/step-1")
    assert restored["counters"] == {"step": 1} and restored["position"] == {1: (2, 3)}
    assert torch.equal(restored["module"]["w"], torch.ones(3))
    assert read_manifest(f"{base}/step-1") == manifest and manifest["reason"] == "best"
    verify(f"{base}/step-1")
    assert list(staging.iterdir()) == []


def test_checkpoints_below_a_url_are_those_with_a_manifest(base: str) -> None:
    for step in (1, 2):
        write(contents(step), f"{base}/checkpoints/step-{step}")
    fs, root = fsspec.core.url_to_fs(base)
    fs.makedirs(f"{root}/checkpoints/step-3", exist_ok=True)
    fs.pipe_file(f"{root}/checkpoints/step-3/model.safetensors", b"half")
    assert list_urls(base) == [f"{base}/checkpoints/step-1", f"{base}/checkpoints/step-2"]
    remove(f"{base}/checkpoints/step-1")
    assert [read(each)["counters"]["step"] for each in list_urls(base)] == [2]
    assert list_urls(f"{base}/elsewhere") == []


def test_what_a_killed_process_had_put_together_goes_with_the_next_save(base: str, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    (tmp_path / f".staging-x.{machine_id()}-{process.pid}.new").mkdir()
    write(contents(), f"{base}/step-1", staging=lambda: tmp_path)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


@pytest.mark.parametrize("failing", ["model.safetensors", "state.json", "manifest.json"])
def test_an_upload_that_breaks_off_leaves_no_checkpoint_there(
    base: str, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, _ = fsspec.core.url_to_fs(base)
    write(contents(1), f"{base}/step-1")
    real = fs.put_file

    def broken(local: str, remote: str, **options: Any) -> Any:
        if remote.endswith(failing):
            raise ConnectionResetError("the line is dead")
        return real(local, remote, **options)

    monkeypatch.setattr(fs, "put_file", broken)
    with pytest.raises(
        CheckpointError, match="step-2 could not be written: ConnectionResetError: the line is dead"
    ):
        write(contents(2), f"{base}/step-2")
    with pytest.raises(CheckpointError, match=r"step-2 is not a checkpoint: it has no manifest\.json"):
        read(f"{base}/step-2")
    assert list_urls(base) == [f"{base}/step-1"]


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_damage_there_is_noticed_and_named_with_the_url(base: str, name: str, damage: str) -> None:
    write(contents(), f"{base}/step-1")
    fs, root = fsspec.core.url_to_fs(f"{base}/step-1")
    data = bytearray(fs.cat_file(f"{root}/{name}"))
    data[len(data) // 2] ^= 1
    if damage == "missing":
        fs.rm_file(f"{root}/{name}")
    else:
        fs.pipe_file(f"{root}/{name}", bytes(data if damage == "flip" else data[:-5]))
    for look in (read, verify):
        with pytest.raises(CheckpointError) as caught:
            look(f"{base}/step-1")
        assert f"{base}/step-1 is" in str(caught.value) and name in str(caught.value)


def test_in_the_background_as_well(base: str, tmp_path: Path) -> None:
    saver, told = BackgroundSaver(), list[Any]()
    saver.start(contents(5), f"{base}/step-5", {}, told.append, staging=lambda: tmp_path)
    saver.close()
    assert told == [None] and read(f"{base}/step-5")["counters"]["step"] == 5


def test_what_cannot_be_stored_is_refused_before_anything_is_copied(base: str) -> None:
    with pytest.raises(CheckpointError, match=r"hooks\.mine is a builtins\.object"):
        write({"hooks": {"mine": object()}}, f"{base}/step-1")
    assert not files(base)


def test_a_password_in_the_url_is_never_shown() -> None:
    with pytest.raises(CheckpointError) as caught:
        read("sftp://me:secret@host/c")
    assert "secret" not in str(caught.value) and "sftp://host/c" in str(caught.value)


def test_a_url_that_was_made_a_path_is_explained() -> None:
    with pytest.raises(
        CheckpointError, match="s3:/bucket/c is a URL that was converted to a Path; pass it as text"
    ):
        read(Path("s3://bucket/c"))


def test_without_fsspec_local_checkpoints_work_and_a_url_names_the_extra(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['fsspec'] = None\nfrom hookline import CheckpointError\n"
        "from hookline.checkpoint.files import read, write\n"
        f"write({{'a': 1}}, {str(tmp_path / 'c')!r})\nassert read({str(tmp_path / 'c')!r}) == {{'a': 1}}\n"
        "try:\n    read('s3://c')\nexcept CheckpointError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "hookline[upload]" in done.stdout
