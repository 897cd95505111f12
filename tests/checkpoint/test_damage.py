"""Hundreds of damaged checkpoints: every one is refused, with the file and the reason."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import CheckpointError
from hookline.checkpoint.files import read, read_manifest, verify, write

NAMES = ("model.safetensors", "state.safetensors", "state.json", "manifest.json")


def contents(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "module": {
            "weight": torch.randn(8, 8, generator=generator),
            "half": torch.randn(5, generator=generator).bfloat16(),
        },
        "optimizers": [
            {"state": {0: {"m": torch.randn(8, 8, generator=generator)}}, "groups": ({"lr": 0.1},)}
        ],
        "counters": {"step": step, "epoch": 0},
        "metrics": {"loss": float("nan")},
    }


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Path, Path]:
    for step in (1, 2):
        write(contents(step), tmp_path / f"step-{step}", {"metrics": {"val/loss": 1.5}})
    return tmp_path / "step-1", tmp_path / "step-2"


def refused(path: Path, name: str) -> None:
    for look in (verify, read):
        with pytest.raises(CheckpointError) as caught:
            look(path)
        assert path.name in str(caught.value)
        assert name in str(caught.value) or "has format" in str(caught.value), str(caught.value)


def flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    file.write_bytes(data)


def truncate(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def lengthen(file: Path, rng: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(b"\0" * rng.randrange(1, 20))


def exchange(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    half = len(data) // 2
    file.write_bytes(data[half:] + data[:half])


DAMAGES: list[tuple[Callable[[Path, random.Random], Any], int]] = [
    (flip, 60),
    (truncate, 25),
    (lengthen, 8),
    (exchange, 1),
    (lambda file, rng: file.write_bytes(b""), 1),
    (lambda file, rng: file.unlink(), 1),
]


@pytest.mark.parametrize("name", NAMES)
def test_no_damage_to_any_file_goes_unseen(whole: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    rng = random.Random(name)
    for damage, times in DAMAGES:
        for _ in range(times):
            copy = tmp_path / "copy"
            shutil.copytree(whole[0], copy)
            damage(copy / name, rng)
            refused(copy, name)
            shutil.rmtree(copy)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_checkpoint_is_noticed(whole: tuple[Path, Path], name: str) -> None:
    shutil.copy(whole[1] / name, whole[0] / name)
    with pytest.raises(CheckpointError, match="step-1 is damaged"):
        read(whole[0])


def test_two_files_of_one_checkpoint_that_were_swapped_are_noticed(whole: tuple[Path, Path]) -> None:
    one, other = (whole[0] / name for name in NAMES[:2])
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    refused(whole[0], ".safetensors")


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


def test_one_more_file_of_ours_is_named_and_files_of_others_are_left_alone(whole: tuple[Path, Path]) -> None:
    (whole[0] / ".nfs0001").write_text("")
    (whole[0] / "notes.txt").write_text("")
    verify(whole[0])
    (whole[0] / "rank-1.safetensors").write_text("")
    refused(whole[0], "rank-1.safetensors")


@pytest.mark.parametrize("name", NAMES[:3])
def test_what_is_no_regular_file_is_never_opened(whole: tuple[Path, Path], name: str) -> None:
    file = whole[0] / name
    file.unlink()
    os.mkfifo(file)  # reading it would wait for ever
    refused(whole[0], name)
    file.unlink()
    file.mkdir()
    refused(whole[0], name)


def test_a_manifest_that_is_no_regular_file_is_never_opened(whole: tuple[Path, Path]) -> None:
    (whole[0] / "manifest.json").unlink()
    os.mkfifo(whole[0] / "manifest.json")
    refused(whole[0], "manifest.json")


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_link_out_of_the_checkpoint_is_refused_even_if_the_bytes_fit(
    whole: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    file = whole[0] / name
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    refused(whole[0], name)
    file.unlink()
    file.symlink_to(file)
    refused(whole[0], name)


def test_a_link_to_a_whole_checkpoint_is_followed(whole: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "last").symlink_to(whole[1])
    assert read(tmp_path / "last")["counters"]["step"] == 2


def test_what_is_whole_is_read_as_it_came_in(whole: tuple[Path, Path]) -> None:
    restored = read(whole[0])
    assert restored["optimizers"][0]["groups"] == ({"lr": 0.1},)
    assert list(restored["optimizers"][0]["state"]) == [0]
    assert restored["metrics"]["loss"] != restored["metrics"]["loss"]
    assert torch.equal(restored["module"]["weight"], contents(1)["module"]["weight"])
