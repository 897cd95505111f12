"""Device meshes: their dimensions, who reads which batches, and what is refused before a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import distributed as dist

from hookline import FSDP, OptionError
from hookline.distributed.mesh import (
    check_counts,
    check_mesh,
    data_mesh,
    data_ranks,
    describe_mesh,
    make_mesh,
    mesh_shape,
    tensor_mesh,
)


def join() -> None:
    """Become the second of four ranks. Nothing is sent to the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)


@pytest.fixture
def make() -> Iterator[Any]:
    """Make a mesh of four ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    join()
    yield lambda shape, names=None: init_device_mesh("cpu", shape, mesh_dim_names=names)
    dist.destroy_process_group()


def test_the_options_give_the_dimensions_in_order() -> None:
    assert mesh_shape(8, 1, 1) == {"shard": 8}
    assert mesh_shape(8, 2, 1) == {"replicate": 2, "shard": 4}
    assert list(mesh_shape(8, 2, 2).items()) == [("replicate", 2), ("shard", 2), ("tp", 2)]
    assert mesh_shape(4, 1, 4) == {"shard": 1, "tp": 4}
    assert describe_mesh(["shard", "tp"], [2, 2]) == "shard 2 x tp 2"
    assert describe_mesh(None, [2, 2]) == "dimension 0 2 x dimension 1 2"


def test_ranks_of_a_tensor_parallel_group_have_one_data_parallel_rank(make: Any) -> None:
    assert data_ranks(8, 2, None) == (0, 0, 1, 1, 2, 2, 3, 3)
    assert data_ranks(4, 1, make((2, 2), ("tp", "x"))["x"]) == (0, 1, 2, 3)  # no dimension named tp
    both = make((2, 2), ("shard", "tp"))
    assert data_ranks(4, 1, both) == (0, 0, 1, 1)
    assert data_ranks(4, 1, make((1, 4), ("shard", "tp"))) == (0, 0, 0, 0)
    assert data_ranks(4, 1, make((2, 1, 2), ("replicate", "shard", "tp"))) == (0, 0, 1, 1)
    assert data_ranks(4, 1, make((4,))) == (0, 1, 2, 3)


def test_runs_of_one_process_share_a_mesh_until_its_process_group_ends(make: Any) -> None:
    dims = {"shard": 2, "tp": 2}
    first = make_mesh("cpu", dims)
    groups = len(dist.distributed_c10d._world.pg_map)
    assert make_mesh("cpu", dict(dims)) is first and len(dist.distributed_c10d._world.pg_map) == groups
    others = [make_mesh("cpu", {"shard": 4}), make_mesh("cpu", {"tp": 2, "shard": 2})]
    assert all(first is not each for each in others) and others[0] is make_mesh("cpu", {"shard": 4})
    dist.destroy_process_group()
    join()
    again = make_mesh("cpu", dims)
    assert again is not first and again.get_group("tp") in dist.distributed_c10d._world.pg_map


def test_a_mesh_is_divided_into_the_parts_for_data_and_for_tensors(make: Any) -> None:
    both = make((2, 2), ("shard", "tp"))
    assert data_mesh(both).mesh.tolist() == [1, 3]
    assert tensor_mesh(both).mesh.tolist() == [0, 1]
    three = make((2, 1, 2), ("replicate", "shard", "tp"))
    assert data_mesh(three).mesh.tolist() == [[1], [3]]
    copies = make((2, 2), ("replicate", "shard"))
    assert data_mesh(copies) is copies
    assert tensor_mesh(copies) is tensor_mesh(None) is None


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((4,), None),
        ((4,), ("anything",)),
        ((2, 2), None),
        ((2, 2), ("dp", "tp")),
        ((2, 2), ("replicate", "shard")),
        ((1, 4), ("fsdp", "tp")),
        ((1, 2, 2), ("replicate", "shard", "tp")),
    ],
    ids=str,
)
def test_meshes_of_copies_shards_and_tensor_parallel_parts_are_accepted(
    make: Any, shape: Any, names: Any
) -> None:
    check_mesh(make(shape, names), 4, "cpu")


@pytest.mark.parametrize(
    ("shape", "names", "text"),
    [
        ((2, 2), ("dp", "tensor"), r"has a dimension 'tensor'\. For tensor parallelism, name it 'tp'"),
        ((2, 2), ("dp", "TP"), "has a dimension 'TP'"),
        ((2, 2), ("tp", "dp"), "'tp' last, because FSDP shards the parts of tensor parallelism"),
        ((4,), ("tp",), r"FSDP\(tensor_parallel=4\)"),
        ((2, 2), ("pp", "shard"), "'pp' for pipeline parallelism, which Hookline does not support"),
        ((1, 2, 2), None, r"must have one dimension \(shards\) or two \(copies, shards\)"),
        ((1, 1, 2, 2), ("a", "b", "c", "tp"), r"must have one dimension \(shards\) or two"),
    ],
    ids=str,
)
def test_other_dimensions_are_refused_with_the_right_mesh(
    make: Any, shape: Any, names: Any, text: str
) -> None:
    with pytest.raises(OptionError, match=text):
        check_mesh(make(shape, names), 4, "cpu")


def test_a_mesh_must_cover_all_ranks_on_this_device(make: Any) -> None:
    with pytest.raises(OptionError, match="covers ranks 0, 1, 2, 3 of 8 ranks, and must cover all"):
        check_mesh(make((4,)), 8, "cpu")
    with pytest.raises(OptionError, match="must be for 'cuda', the device of this strategy"):
        check_mesh(make((4,)), 4, "cuda")
    with pytest.raises(OptionError, match=r"a DeviceMesh, such as init_device_mesh\('cpu', \(4,\)\)"):
        check_mesh([0, 1, 2, 3], 4, "cpu")


@pytest.mark.parametrize("value", [0, -2, 3, True, 2.0, "2"], ids=repr)
def test_sizes_that_do_not_divide_the_ranks_are_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="tensor_parallel.*a whole number that divides the 4 ranks"):
        check_counts(4, 1, value)
    with pytest.raises(OptionError, match="replicas.*a whole number that divides the 4 ranks"):
        check_counts(4, value, 1)


def test_copies_of_tensor_parallel_groups_need_enough_ranks() -> None:
    with pytest.raises(OptionError, match="replicas=2 with tensor_parallel=4 needs a multiple of 8 ranks"):
        check_counts(4, 2, 4)


def test_one_process_has_no_mesh_and_no_tensor_parallelism() -> None:
    strategy = FSDP(device="cpu")
    strategy.connect()
    strategy.make_mesh()
    assert strategy.mesh is strategy.tensor_mesh is None and strategy.mesh_text == ""
    assert strategy.ranks.data_ranks == (0,) and strategy.ranks.is_reader
    with pytest.raises(OptionError, match="divides the 1 ranks"):
        FSDP(device="cpu", tensor_parallel=2)
