"""What planning a sharded checkpoint takes: with the planners of torch.distributed.checkpoint, and with
Hookline's rule. See docs/checkpoints.md, "Why not the planners".

One process is rank 0 of many: torch's fake process group sends nothing, and the plans of the other ranks are
made here. CPU time, so that other programs do not count.
`python benchmarks/planners.py --ranks 4 64 256 --tensors 3000`
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hookline.checkpoint.format import Shards, pack_contents
from hookline.checkpoint.rank_state import RankFiles

ROWS, COLUMNS = 2, 4
"""Of each shard: planning does not depend on the size of tensors."""


def seconds(act: Callable[[], Any], times: int = 1) -> tuple[float, Any]:
    """Return the shortest CPU time of a call, and what it returns."""
    found, result = [], None
    for _ in range(times):
        began = time.process_time()
        result = act()
        found.append(time.process_time() - began)
    return min(found), result


def of_rank(plan: SavePlan, rank: int) -> SavePlan:
    """Return the plan that another rank would make for its shards."""
    offset = torch.Size((ROWS * rank, 0))
    items = []
    for item in plan.items:
        assert item.tensor_data is not None
        chunk = dataclasses.replace(item.tensor_data.chunk, offsets=offset)
        data = dataclasses.replace(item.tensor_data, chunk=chunk)
        items.append(
            dataclasses.replace(item, index=dataclasses.replace(item.index, offset=offset), tensor_data=data)
        )
    return dataclasses.replace(plan, items=items)


def planned_load(state: dict[str, Any], metadata: Metadata) -> Any:
    """Return what a rank reads, by torch's planner."""
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(state, metadata, True)
    return planner.create_local_plan()


def own_load(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Find the shards that rank 0 reads on the mesh that it was saved on."""
    files = RankFiles(folder, 0)
    for entry in entries:
        assert next(files.sharded(entry).locations()).offset == [0, 0]


def measure(ranks: int, tensors: int) -> str:
    """Return a row of the table."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    state: dict[str, Any] = {
        f"module.layers.{number}.weight": DTensor.from_local(
            torch.zeros(ROWS, COLUMNS), mesh, [Shard(0)], run_check=False
        )
        for number in range(tensors)
    }
    own, packed = seconds(lambda: pack_contents({"module": dict(state)}, Shards()), 3)

    def plan_here() -> tuple[Any, Any]:
        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(state, None, True)
        return planner, planner.create_local_plan()

    local, (planner, plan) = seconds(plan_here, 3)
    plans = [of_rank(plan, rank) for rank in range(ranks)]
    merged, (_, metadata) = seconds(lambda: planner.create_global_plan(plans))
    load, _ = seconds(lambda: planned_load(state, metadata), 3)
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            shards = {
                name: [[ROWS * rank, 0], size] for name, (_, size) in packed.part.structure["shards"].items()
            }
            Path(folder, f"rank-{rank}.json").write_text(
                json.dumps({"own": {}, "shards": shards, "shared": {}})
            )
        entries = [*packed.structure["module"].values()]
        own_read, _ = seconds(lambda: own_load(Path(folder), entries), 3)
    dist.destroy_process_group()
    gathered = ranks * len(pickle.dumps(plan)) / 1e6
    columns = (ranks, tensors, f"{own:.2f}", f"{local:.2f} + {merged:.2f}", f"{gathered:.1f}")
    return f"| {' | '.join(map(str, columns))} | {own_read:.2f} | {load:.2f} |"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[4, 64, 256])
    options.add_argument("--tensors", type=int, default=3000)
    given = options.parse_args()
    torch.set_num_threads(1)
    print("| ranks | tensors | save: rule, s | save: planners, s | gathered plans, MB", end="")
    print(" | resume: rule, s | resume: planner, s |")
    print("|---|---|---|---|---|---|---|")
    for ranks in given.ranks:
        print(measure(ranks, given.tensors), flush=True)


if __name__ == "__main__":
    main()
