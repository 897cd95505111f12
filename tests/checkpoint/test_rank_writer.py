"""A checkpoint of several ranks: written by all of them, and whole or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.threads import on_ranks

from hookline import CheckpointError
from hookline.checkpoint import rank_writer
from hookline.checkpoint.files import read, read_manifest, verify
from hookline.checkpoint.format import Packed
from hookline.checkpoint.rank_state import PerRankState
from hookline.checkpoint.rank_writer import write_on_all_ranks
from hookline.distributed.comm import Ranks


def contents(rank: int, step: int = 4) -> dict[str, Any]:
    return {
        "run": "r",
        "world_size": 2,
        "module": {"w": torch.arange(3.0)},
        "optimizers": [],
        "hooks": {},
        "counters": {"step": step},
        "rng": torch.arange(4) + rank,
    }


def packed(rank: int, **more: Any) -> Packed:
    zero, mine = PerRankState(contents(0, **more), {}), PerRankState(contents(rank, **more), {})
    return mine.for_rank(rank, zero.sums)


def save(path: Path | str, ranks: Ranks, **more: Any) -> None:
    write_on_all_ranks(packed(ranks.rank, **more), path, {"step": 4}, ranks, staging=None)


def test_each_rank_writes_its_files_and_the_checkpoint_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step-4"
    assert on_ranks(2, lambda ranks: save(path, ranks)) == [None, None]
    verify(path)
    manifest = read_manifest(path)
    assert any("1" in name for name in manifest["files"]), "rank 1 has random streams of its own"
    assert torch.equal(read(path)["module"]["w"], torch.arange(3.0))
    assert [each.name for each in path.parent.iterdir()] == ["step-4"]


def test_a_second_write_replaces_the_first(tmp_path: Path) -> None:
    path = tmp_path / "last"
    for step in (4, 8):
        assert on_ranks(2, lambda ranks, step=step: save(path, ranks, step=step)) == [None, None]  # type: ignore[misc]
    assert read(path)["counters"] == {"step": 8}
    assert [each.name for each in tmp_path.iterdir()] == ["last"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_is_an_error_on_all_and_the_older_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    path = tmp_path / "last"
    on_ranks(2, lambda ranks: save(path, ranks))
    real = rank_writer.write_parts

    def write_parts(folder: Path, packed: Packed, rank: int) -> dict[str, Any]:
        if rank == failing:
            raise OSError(28, "No space left on device")
        return real(folder, packed, rank)

    monkeypatch.setattr(rank_writer, "write_parts", write_parts)
    for error in on_ranks(2, lambda ranks: save(path, ranks, step=8)):
        assert type(error) is CheckpointError
        assert f"rank {failing}: " in str(error) and "No space left" in str(error) and str(path) in str(error)
    assert read(path)["counters"] == {"step": 4}
    assert [each.name for each in tmp_path.iterdir()] == ["last"]


def test_a_path_that_rank_zero_cannot_use_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for error in on_ranks(2, lambda ranks: save(tmp_path / "file" / "last", ranks)):
        assert type(error) is CheckpointError and "rank 0: " in str(error)


def test_a_directory_that_only_rank_zero_sees_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_writer, "WRITE_TIMEOUT", 0.0)
    with pytest.raises(CheckpointError, match="it must be on a shared disk"):
        rank_writer._wait_for_directory(tmp_path / "elsewhere" / "temporary")
    rank_writer._wait_for_directory(tmp_path)


def test_shards_that_do_not_make_whole_tensors_are_refused(tmp_path: Path) -> None:
    def save_part(ranks: Ranks) -> None:
        mine = packed(ranks.rank)
        part = replace(mine.part, elements_wanted=10, elements_here=4)
        write_on_all_ranks(replace(mine, part=part), tmp_path / "last", {}, ranks, None)

    for error in on_ranks(2, save_part):
        assert type(
            error
        ) is CheckpointError and "have 10 elements, but the shards of all ranks have 8" in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("memory_urls")
def test_ranks_write_to_a_url_together(tmp_path: Path) -> None:
    url = "memory://bucket/last"

    def save_there(ranks: Ranks) -> None:
        write_on_all_ranks(packed(ranks.rank), url, {"step": 4}, ranks, lambda: tmp_path)

    assert on_ranks(2, save_there) == [None, None]
    assert read(url)["counters"] == {"step": 4}
    assert list(tmp_path.iterdir()) == []  # what was put together is gone
