"""Norms, clipping and scaling of gradients, whole or sharded over ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from ranks.torchrun import torchrun

from hookline.distributed.sharded_norms import (
    agree_on_overflow,
    clip_norm,
    clip_values,
    is_sharded,
    local_part,
    norm_of,
    scale_gradients,
    shards_of,
)


def grads() -> list[torch.Tensor]:
    return [torch.tensor([3.0, 0.0]), torch.tensor([[4.0], [0.0]])]


def test_the_norm_is_that_of_all_gradients_together() -> None:
    assert norm_of(grads()).item() == 5.0
    assert (
        shards_of(grads()) == 1
        and not is_sharded(grads()[0])
        and local_part(grads()[0]).tolist() == [3.0, 0.0]
    )


def test_clipping_scales_all_by_one_factor_and_returns_the_norm_before() -> None:
    clipped = grads()
    assert clip_norm(clipped, 1.0).item() == 5.0
    assert norm_of(clipped).item() == pytest.approx(1.0, rel=1e-5)
    assert clipped[0][0].item() / clipped[1][0].item() == pytest.approx(3 / 4)
    small = grads()
    clip_norm(small, 100.0)
    assert all(torch.equal(one, other) for one, other in zip(small, grads(), strict=True))


def test_complex_gradients_beside_half_precision_have_a_norm() -> None:
    mixed = [torch.tensor([3j, 0]), torch.tensor([4.0], dtype=torch.bfloat16)]
    assert clip_norm(mixed, 1.0).item() == 5.0
    assert norm_of(mixed).item() == pytest.approx(1.0, rel=1e-2)


def test_values_are_clamped_on_both_sides() -> None:
    clipped = [torch.tensor([-3.0, 0.5, 7.0])]
    assert clip_values(clipped, 1.0) is None
    assert clipped[0].tolist() == [-1.0, 0.5, 1.0]


def test_scaling_takes_numbers_and_tensors_and_leaves_empty_ones_out() -> None:
    scaled = [*grads(), torch.empty(0)]
    scale_gradients(scaled, 2.0)
    scale_gradients(scaled, torch.tensor(0.5))
    scale_gradients(scaled, torch.tensor(3.0))
    assert norm_of(scaled[:2]).item() == 15.0


def test_one_overflow_is_an_overflow_of_all() -> None:
    device, other = torch.device("cpu"), torch.device("meta")
    found = {device: torch.zeros(1)}
    assert not agree_on_overflow(found, []) and found[device].tolist() == [0.0]
    found = {device: torch.ones(1)}
    assert agree_on_overflow(found, []) and other not in found and found[device].tolist() == [1.0]


ON_A_RANK = """
import json
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from hookline.distributed.sharded_norms import (
    agree_on_overflow, clip_norm, gather_rows, is_sharded, local_part, norm_of, shards_of
)

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
whole = torch.arange(12, dtype=torch.float64).reshape(6, 2)
sharded = distribute_tensor(whole, mesh, [Shard(0)])
plain = torch.ones(3, dtype=torch.float64)
norm = norm_of([sharded, plain]).item()
before = clip_norm([sharded, plain], 1.0).item()
after = norm_of([sharded, plain]).item()
rows = gather_rows([torch.full((rank + 1,), float(rank))], [sharded])
overflow = agree_on_overflow({torch.device("cpu"): torch.tensor([float(rank)])}, [sharded])
result = {
    "norms": [norm, before, after],
    "is_sharded": [is_sharded(sharded), is_sharded(plain), shards_of([plain, sharded])],
    "held": list(local_part(sharded).shape),
    "rows": [each.tolist() for each in rows],
    "overflow": overflow,
}
print("RESULT", json.dumps([rank, result]))
dist.destroy_process_group()
"""


def test_shards_have_the_norm_of_the_whole_on_every_rank(tmp_path: Path) -> None:
    done = torchrun(ON_A_RANK, tmp_path)
    assert done.code == 0, done.output
    found = dict(json.loads(each) for each in done.lines("RESULT"))
    norm = math.sqrt(sum(number**2 for number in range(12)) + 3)
    for rank in range(2):
        assert found[rank] == {
            "norms": [pytest.approx(norm), pytest.approx(norm), pytest.approx(1.0, rel=1e-5)],
            "is_sharded": [True, False, 2],
            "held": [3, 2],
            "rows": [[0.0, 1.0, 1.0]],
            "overflow": True,  # of rank 1 alone
        }
