"""The device mesh of a run: which ranks hold copies, shards or tensor-parallel parts of the model.

A mesh has up to three dimensions, in this order: copies, shards, and `tp` for tensor parallelism. The ranks
of one tensor-parallel group compute one model together, so they read the same batches.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import distributed as dist

from hookline.distributed.comm import format_ranks
from hookline.engine.checks import refused
from hookline.util.errors import OptionError

TENSOR = "tp"
"""The name of the dimension for tensor parallelism."""
OTHER_NAMES = ("tensor", "tensor_parallel", "model", "model_parallel", "mp")
"""Names that other programs use for the same dimension."""
UNSUPPORTED = {
    **dict.fromkeys(("pp", "pipe", "pipeline"), "pipeline parallelism"),
    **dict.fromkeys(("cp", "context"), "context parallelism"),
    **dict.fromkeys(("ep", "expert"), "expert parallelism"),
}


def mesh_shape(world_size: int, replicas: int, tensor_parallel: int) -> dict[str, int]:
    """Return the dimensions of the mesh for these options, by name."""
    dims = {"replicate": replicas} if replicas > 1 else {}
    dims["shard"] = world_size // (replicas * tensor_parallel)
    return dims | ({TENSOR: tensor_parallel} if tensor_parallel > 1 else {})


_MADE: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""The meshes of each process group, by device and dimensions."""


def make_mesh(device: str, dims: dict[str, int]) -> Any:
    """Return the device mesh with these dimensions. All ranks must call this.

    Later runs of this process use the same mesh: a mesh has process groups, whose threads and connections
    last as long as the process.
    """
    from torch.distributed.device_mesh import init_device_mesh

    made = _MADE.setdefault(dist.group.WORLD, {})
    key = device, *dims.items()
    if key not in made:
        made[key] = init_device_mesh(device, tuple(dims.values()), mesh_dim_names=tuple(dims))
    return made[key]


def describe_mesh(names: Any, shape: Any) -> str:
    """Return a mesh as text: `shard 2 x tp 2`."""
    names = names or [f"dimension {number}" for number in range(len(shape))]
    return " x ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True))


def data_mesh(mesh: Any) -> Any:
    """Return the part of the mesh over which FSDP copies and shards the model."""
    names = mesh.mesh_dim_names or ()
    return mesh[tuple(name for name in names if name != TENSOR)] if TENSOR in names else mesh


def tensor_mesh(mesh: Any) -> Any:
    """Return the part of the mesh for tensor parallelism; None if it has none."""
    return mesh[TENSOR] if mesh is not None and TENSOR in (mesh.mesh_dim_names or ()) else None


def data_ranks(world_size: int, tensor_parallel: int, mesh: Any) -> tuple[int, ...]:
    """Return the data-parallel rank of each rank, without communication. mesh: the user's own, or None."""
    if mesh is None:
        return tuple(rank // tensor_parallel for rank in range(world_size))
    if tensor_mesh(mesh) is None:
        return tuple(range(world_size))
    groups = mesh.mesh.reshape(-1, mesh.size(mesh.ndim - 1)).tolist()
    return tuple(
        next(number for number, group in enumerate(groups) if rank in group) for rank in range(world_size)
    )


def data_group(mesh: Any) -> Any:
    """Return the process group of this rank and the ranks with other batches; None: all ranks."""
    if tensor_mesh(mesh) is None:
        return None
    data = data_mesh(mesh)
    return (data if data.ndim == 1 else data._flatten()).get_group()


# ---- checks ------------------------------------------------------------------------------------------------


def check_counts(world_size: int, replicas: Any, tensor_parallel: Any) -> None:
    """Raise if the ranks cannot be divided into so many copies and tensor-parallel groups."""
    for name, value in (("replicas", replicas), ("tensor_parallel", tensor_parallel)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 or world_size % value:
            raise refused(f"FSDP: {name}", value, f"a whole number that divides the {world_size} ranks")
    if world_size % (replicas * tensor_parallel):
        raise OptionError(
            f"FSDP: replicas={replicas} with tensor_parallel={tensor_parallel} needs a multiple of "
            f"{replicas * tensor_parallel} ranks, and there are {world_size}.",
            option="tensor_parallel",
            value=tensor_parallel,
        )


def check_mesh(mesh: Any, world_size: int, device: str) -> None:
    """Raise for a mesh that FSDP cannot use.

    It must cover all ranks: the others would train separately, or wait for ever.
    """
    from torch.distributed.device_mesh import DeviceMesh

    right = f"init_device_mesh({device!r}, ({world_size},))"
    if not isinstance(mesh, DeviceMesh):
        raise refused("FSDP: mesh", mesh, f"a DeviceMesh, such as {right}")
    ranks = sorted(mesh.mesh.flatten().tolist())
    if ranks != list(range(world_size)):
        raise _refused_mesh(
            mesh, f"covers {format_ranks(ranks)} of {world_size} ranks, and must cover all: {right}"
        )
    if mesh.device_type != device:
        raise _refused_mesh(mesh, f"must be for {device!r}, the device of this strategy: {right}")
    _check_dimensions(mesh, device, world_size)


def _check_dimensions(mesh: Any, device: str, world_size: int) -> None:
    names = list(mesh.mesh_dim_names or ())
    half = world_size // 2 or 1
    right = (
        f'init_device_mesh({device!r}, ({half}, {world_size // half}), mesh_dim_names=("shard", "{TENSOR}"))'
    )
    for name in names:
        if name.lower() in OTHER_NAMES or name.lower() == TENSOR != name:
            raise _refused_mesh(
                mesh, f"has a dimension {name!r}. For tensor parallelism, name it {TENSOR!r}: {right}"
            )
        if name.lower() in UNSUPPORTED:
            raise _refused_mesh(
                mesh,
                f"has a dimension {name!r} for {UNSUPPORTED[name.lower()]}, which Hookline does not support. "
                f"Its dimensions may be copies, shards and {TENSOR!r}, in this order",
            )
    if TENSOR in names and (names[-1] != TENSOR or mesh.ndim == 1):
        raise _refused_mesh(
            mesh,
            f"needs a dimension for shards before {TENSOR!r}, and {TENSOR!r} last, because FSDP shards the "
            f"parts of tensor parallelism. A dimension of size 1 shards nothing: {right}, or "
            f"FSDP(tensor_parallel={mesh.size(names.index(TENSOR))})",
        )
    if mesh.ndim - (TENSOR in names) > 2:
        raise _refused_mesh(
            mesh,
            f"must have one dimension (shards) or two (copies, shards), and a last one named {TENSOR!r} for "
            f"tensor parallelism: {right}",
        )


def _refused_mesh(mesh: Any, reason: str) -> OptionError:
    return OptionError(f"FSDP: mesh={mesh!r} {reason}.", option="mesh", value=mesh)
