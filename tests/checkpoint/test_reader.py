"""Hundreds of damaged checkpoints: every one is refused, with the file and the reason."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.damaged import contents, refused

from hookline import CheckpointError
from hookline.checkpoint.files import read, verify, write

NAMES = ("model.safetensors", "state.safetensors", "state.json", "manifest.json")


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Path, Path]:
    for step in (1, 2):
        write(contents(step), tmp_path / f"step-{step}", {"metrics": {"val/loss": 1.5}})
    return tmp_path / "step-1", tmp_path / "step-2"


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
