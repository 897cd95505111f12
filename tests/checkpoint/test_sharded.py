"""Tensors in the files of several ranks: any block is read, only what is needed is looked at, and what is missing is said."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist

from hookline.checkpoint.sharded import (
    LazyFile,
    ShardedTensor,
    ShardLocation,
    materialize,
    materialize_gradients,
    materialize_optimizer,
    own_shard,
)
from hookline.util.errors import CheckpointError


def cut(whole: Tensor, folder: Path, cuts: list[int]) -> ShardedTensor:
    """Store it in one file for each stretch of rows."""
    edges = [0, *sorted(cuts), len(whole)]
    locations = []
    for number, (start, end) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        if end > start:
            save_file({"x": whole[start:end].contiguous()}, folder / f"{number}.safetensors")
            offset = (start, *(0,) * (whole.dim() - 1))
            locations.append(
                ShardLocation(LazyFile(folder / f"{number}.safetensors"), "x", offset, whole[start:end].shape)
            )
    return ShardedTensor("x", whole.shape, whole.dtype, lambda: iter(locations))


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), cuts=st.lists(st.integers(0, 9), max_size=3), seed=st.integers(0, 1000))
def test_any_block_is_what_it_is_in_the_whole(
    rows: int, cuts: list[int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = torch.arange(rows * 12.0).reshape(rows, 4, 3)
    pieces = cut(whole, tmp_path_factory.mktemp("pieces"), [min(each, rows) for each in cuts])
    assert torch.equal(pieces.whole(), whole)
    rng = random.Random(seed)
    start = [rng.randint(0, each) for each in whole.shape]
    size = [rng.randint(0, each - at) for each, at in zip(whole.shape, start, strict=True)]
    expected = whole[tuple(slice(at, at + length) for at, length in zip(start, size, strict=True))]
    assert torch.equal(pieces.read(start, size), expected)


def test_a_rank_that_has_all_it_needs_looks_at_no_other_file(tmp_path: Path) -> None:
    whole = torch.arange(8.0)
    locations = list(cut(whole, tmp_path, [4]).locations())

    def first_only() -> Iterator[ShardLocation]:
        yield locations[0]
        raise AssertionError("the second file is of no use here")

    assert torch.equal(ShardedTensor("x", whole.shape, whole.dtype, first_only).read((1,), (3,)), whole[1:4])


def test_a_file_without_anything_of_a_block_is_not_opened(tmp_path: Path) -> None:
    whole = torch.arange(8.0)
    pieces = cut(whole, tmp_path, [4])
    (tmp_path / "0.safetensors").unlink()
    assert torch.equal(pieces.read((5,), (2,)), whole[5:7])


def test_a_tensor_without_dimensions_and_one_without_numbers(tmp_path: Path) -> None:
    save_file({"x": torch.tensor(3.5)}, tmp_path / "0.safetensors")
    place = ShardLocation(LazyFile(tmp_path / "0.safetensors"), "x", (), ())
    assert ShardedTensor("x", torch.Size(()), torch.float32, lambda: iter([place])).whole() == 3.5
    assert ShardedTensor("x", torch.Size((0, 3)), torch.float32, lambda: iter(())).whole().shape == (0, 3)


def test_numbers_that_are_in_no_file_are_an_error(tmp_path: Path) -> None:
    whole = torch.arange(8.0)
    locations = list(cut(whole, tmp_path, [5]).locations())
    with pytest.raises(CheckpointError, match="x: 3 of its 8 elements are in no file"):
        ShardedTensor("x", whole.shape, whole.dtype, lambda: iter(locations[:1])).whole()


def test_what_was_read_is_whole_and_in_memory_of_its_own(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    mapped = torch.ones(2)
    contents: dict[str, Any] = {"a": cut(whole, tmp_path, [2]), "b": [(mapped, 3)], "c": "text"}
    laid = materialize(contents, {})
    assert torch.equal(laid["a"], whole)
    assert laid["c"] == "text"
    mapped.zero_()
    assert torch.equal(laid["b"][0][0], torch.ones(2))


def test_state_of_an_optimizer_and_gradients_become_whole(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(6))])
    state = {
        "state": {0: {"exp_avg": cut(whole, tmp_path, [3]), "step": torch.tensor(2.0)}},
        "param_groups": [{"params": [0], "lr": 0.1}],
    }
    materialize_optimizer(state, optimizer)
    assert torch.equal(state["state"][0]["exp_avg"], whole)  # type: ignore[index]
    window: dict[str, Any] = {
        "gradients": {"w": cut(whole, tmp_path, [3])},
        "count": 1,
        "loss": (mapped := torch.ones(1)),
    }
    materialize_gradients(window, {})
    assert torch.equal(window["gradients"]["w"], whole)
    assert window["loss"] is not mapped  # which lies in a file


@contextlib.contextmanager
def as_rank(rank: int, shape: tuple[int, ...], names: tuple[str, ...]) -> Iterator[Any]:
    """A mesh of several ranks, seen from one of them. Nothing is sent to the others."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def shard_on(mesh: Any, rows: int, local: int, placements: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        torch.zeros(local, 3), mesh, placements, run_check=False, shape=torch.Size((rows, 3)), stride=(3, 1)
    )


def test_a_dimension_that_tensor_parallelism_and_fsdp_both_shard_is_stored_in_blocks() -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found = []
    for rank, local in enumerate((3, 3, 2, 2)):  # each half of 10 rows is sharded over 2 ranks
        with as_rank(rank, (2, 2), ("shard", "tp")) as mesh:
            shard = own_shard(shard_on(mesh, 10, local, (_StridedShard(0, split_factor=2), Shard(0))), "w")
            assert shard is not None and shard.values.shape == (local, 3)
            found.append(shard.offset)
    assert found == [(0, 0), (5, 0), (3, 0), (8, 0)]


def test_rows_that_are_not_contiguous_are_refused() -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    with as_rank(0, (2, 2), ("a", "b")) as mesh:
        weight = shard_on(mesh, 8, 2, (Shard(0), _StridedShard(0, split_factor=2)))  # rows 0 and 2
        with pytest.raises(CheckpointError, match="w is sharded twice .* rows that are not contiguous"):
            own_shard(weight, "w")


def test_equal_copies_on_parallel_parts_of_a_mesh_are_written_once() -> None:
    from torch.distributed.tensor import Replicate, Shard

    writes = []
    for rank in range(4):
        with as_rank(rank, (2, 2), ("shard", "tp")) as mesh:
            whole_layer = shard_on(mesh["shard"], 4, 2, (Shard(0),))
            bias = shard_on(mesh, 4, 2, (Shard(0), Replicate()))
            writes.append([own_shard(each, "w") is not None for each in (whole_layer, bias)])
    assert writes == [[True, True], [False, False], [True, True], [False, False]]
