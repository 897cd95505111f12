"""Checkpoints on disk: there whole or not at all, and read with care."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookline import CheckpointError
from hookline.checkpoint import writer
from hookline.checkpoint.files import read, write


def contents(value: float = 1.0) -> dict[str, Any]:
    return {
        "module": {"weight": torch.full((2, 2), value)},
        "optimizers": [
            {
                "state": {0: {"momentum": torch.full((2,), value)}},
                "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
            }
        ],
        "counters": {"step": 3},
        "rng": {"numpy": np.arange(4, dtype="u4")},
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "step-3"


def test_what_is_written_is_read(path: Path) -> None:
    write(contents(), path)
    restored = read(path)
    assert torch.equal(restored["module"]["weight"], torch.ones(2, 2))
    assert torch.equal(restored["optimizers"][0]["state"][0]["momentum"], torch.ones(2))
    assert restored["optimizers"][0]["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99)}]
    assert restored["counters"] == {"step": 3}
    assert restored["rng"]["numpy"].dtype == np.dtype("u4")


def test_nothing_on_disk_is_a_pickle(path: Path) -> None:
    write(contents(), path)
    assert {each.suffix for each in path.iterdir()} == {".json", ".safetensors"}
    for each in path.glob("*.safetensors"):
        size = int.from_bytes(each.read_bytes()[:8], "little")
        json.loads(each.read_bytes()[8 : 8 + size])  # a header of plain JSON, then numbers


def test_the_model_alone_can_be_loaded_by_anyone(path: Path) -> None:
    from safetensors.torch import load_file

    write(contents(), path)
    (weights,) = load_file(path / "model.safetensors").values()
    assert torch.equal(weights, torch.ones(2, 2))


def test_nothing_is_left_beside_a_finished_checkpoint(path: Path) -> None:
    write(contents(), path)
    assert [each.name for each in path.parent.iterdir()] == ["step-3"]


def test_a_file_of_that_name_is_not_replaced(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("notes")
    with pytest.raises(CheckpointError, match="a file of that name exists"):
        write(contents(), path)
    assert path.read_text() == "notes"
    assert [each.name for each in path.parent.iterdir()] == ["step-3"]


def test_a_directory_is_kept_from_cleanup_only_while_it_is_written(path: Path) -> None:
    write(contents(), path)
    write(contents(), path)
    assert not writer.writing


def test_writing_again_replaces_it(path: Path) -> None:
    write(contents(1.0), path)
    (path / "leftover").write_text("old")
    write(contents(2.0), path)
    assert float(read(path)["module"]["weight"][0, 0]) == 2.0
    assert not (path / "leftover").exists()


def test_what_an_interrupted_write_left_behind_is_no_checkpoint_and_no_hindrance(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(contents(), path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="step-3 does not exist"):
        read(path)
    write(contents(), path)
    assert read(path)["counters"] == {"step": 3}
    assert [each.name for each in path.parent.iterdir()] == ["step-3"]


def test_contents_that_cannot_be_stored_leave_the_old_checkpoint_alone(path: Path) -> None:
    write(contents(1.0), path)
    with pytest.raises(CheckpointError, match="hooks.mine is a builtins.object"):
        write({**contents(2.0), "hooks": {"mine": object()}}, path)
    assert float(read(path)["module"]["weight"][0, 0]) == 1.0
    assert [each.name for each in path.parent.iterdir()] == ["step-3"]


def test_a_disk_that_fails_leaves_the_old_checkpoint_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(contents(1.0), path)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="step-3 could not be written: .*No space left"):
        write(contents(2.0), path)
    monkeypatch.undo()
    assert float(read(path)["module"]["weight"][0, 0]) == 1.0
    assert [each.name for each in path.parent.iterdir()] == ["step-3"]


@pytest.mark.parametrize("nth", [1, 2])
def test_replacing_that_is_interrupted_leaves_a_whole_checkpoint(
    path: Path, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(contents(1.0), path)
    renames = []
    monkeypatch.setattr(writer, "exchange", lambda aside, path: False)  # as on a network file system

    def interrupted(rename: Any) -> Any:
        def wrapped(*given: Any, **named: Any) -> Any:
            renames.append(given)
            if len(renames) == nth:
                raise KeyboardInterrupt
            return rename(*given, **named)

        return wrapped

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, interrupted(getattr(os, name)))
    with contextlib.suppress(KeyboardInterrupt):
        write(contents(2.0), path)
    monkeypatch.undo()
    assert renames
    assert float(read(path)["module"]["weight"][0, 0]) in (1.0, 2.0)


def test_views_into_one_tensor_can_be_saved(path: Path) -> None:
    buffer = torch.arange(6.0)
    write({"module": {"all": buffer, "head": buffer[:2], "flat": buffer.view(2, 3)}}, path)
    restored = read(path)["module"]
    assert torch.equal(restored["all"], buffer)
    assert torch.equal(restored["head"], buffer[:2])
    assert torch.equal(restored["flat"], buffer.view(2, 3))


def test_tied_weights_stay_tied(path: Path) -> None:
    embedding = nn.Embedding(3, 2)
    head = nn.Linear(2, 3, bias=False)
    head.weight = embedding.weight
    write({"module": nn.ModuleDict({"embedding": embedding, "head": head}).state_dict()}, path)
    restored = read(path)["module"]
    assert restored["embedding.weight"] is restored["head.weight"]


def test_a_key_of_a_hook_never_hides_a_weight(path: Path) -> None:
    write({"module": {"weight": torch.zeros(1)}, "module.weight": torch.ones(1)}, path)
    restored = read(path)
    assert (float(restored["module"]["weight"]), float(restored["module.weight"])) == (0.0, 1.0)


@pytest.mark.parametrize("name", ["state.json", "state.safetensors", "model.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "missing", "empty"])
def test_a_damaged_checkpoint_is_refused_by_its_path(path: Path, name: str, damage: str) -> None:
    write(contents(), path)
    file = path / name
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(
            {"cut": whole[: len(whole) // 2], "garbage": b"\xff" * len(whole), "empty": b""}[damage]
        )
    with pytest.raises(CheckpointError, match="step-3"):
        read(path)


def test_a_changed_number_inside_a_tensor_is_noticed(path: Path) -> None:
    write(contents(), path)
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x40
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="step-3"):
        read(path)


def test_a_path_that_is_none_names_those_that_are(path: Path) -> None:
    write(contents(), path)
    with pytest.raises(
        CheckpointError, match="step-4 does not exist. Did you mean 'step-3'. .*checkpoints has: step-3.$"
    ):
        read(path.with_name("step-4"))
    with pytest.raises(CheckpointError, match="nowhere does not exist: there is no directory .*far"):
        read(path.parent.parent / "far" / "nowhere")
    path.with_name("step-5").mkdir()
    with pytest.raises(
        CheckpointError,
        match="step-5 is not a checkpoint: it has no manifest.json. Its directory has: step-3, step-5",
    ):
        read(path.with_name("step-5"))
    (path.parent / "file").write_text("")
    with pytest.raises(
        CheckpointError, match="file cannot be imported: .*A checkpoint of Hookline is a directory"
    ):
        read(path.parent / "file")
