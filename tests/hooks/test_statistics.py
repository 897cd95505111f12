"""Statistics of many tensors: right for rare tensors, by few kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks.torchrun import torchrun

from hookline.hooks._statistics import (
    local_values,
    norms,
    percentiles,
    samples_of,
    tensors_in,
    with_gradients,
)


def test_percentiles_of_a_sample_are_near_those_of_the_whole() -> None:
    torch.manual_seed(0)
    large, small = torch.randn(300, 256) * torch.linspace(0.1, 3, 256), torch.randn(7)
    rows = [*samples_of([large], 2048), *samples_of([small], 2048)]
    assert 1024 <= len(rows[0]) <= 2048 and torch.equal(rows[1], small)
    found = percentiles([each.abs() for each in rows], [10, 50, 90])
    for row, values in zip(found, (large, small), strict=True):
        wanted = values.abs().flatten().quantile(torch.tensor([0.1, 0.5, 0.9]))
        assert row.tolist() == pytest.approx(wanted.tolist(), rel=0.15)
    assert found[1].tolist() == pytest.approx(small.abs().quantile(torch.tensor([0.1, 0.5, 0.9])).tolist())


ON_A_RANK = """
import json
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from hookline.hooks._statistics import norms

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
whole = torch.randn(6, 4)
print("RESULT", json.dumps([dist.get_rank(), norms([distribute_tensor(whole, mesh, [Shard(0)]), whole]).tolist()]))
dist.destroy_process_group()
"""


def test_sharded_gradients_are_measured_over_all_ranks(tmp_path: Path) -> None:
    done = torchrun(ON_A_RANK, tmp_path)
    assert done.code == 0, done.output
    torch.manual_seed(0)
    expected = float(torch.randn(6, 4).norm())
    found = dict(json.loads(each) for each in done.lines("RESULT"))
    assert found == {rank: [pytest.approx(expected)] * 2 for rank in range(2)}


def test_sparse_and_complex_tensors_are_their_real_values() -> None:
    twice = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True
    )
    assert local_values(twice).tolist() == [3.0]  # values at one place are summed before they are looked at
    assert local_values(torch.tensor([3.0 + 4.0j])).tolist() == [[3.0, 4.0]]
    weight = torch.ones(2, requires_grad=True)
    assert not local_values(weight).requires_grad


def test_norms_do_not_overflow_in_half_precision_and_an_empty_tensor_has_none() -> None:
    large = torch.full((4,), 60000.0, dtype=torch.float16)
    assert norms([large, torch.empty(0)]).tolist() == [120000.0, 0.0]
    assert norms([torch.tensor([3.0, -4.0])], order=float("inf")).tolist() == [4.0]
    assert norms([torch.ones(1, dtype=torch.float64)]).dtype is torch.float64


def test_a_sample_is_of_all_tensors_and_of_all_columns() -> None:
    small = torch.cat(samples_of([torch.arange(3.0), torch.tensor(7.0)], limit=10))
    assert small.tolist() == [0.0, 1.0, 2.0, 7.0]
    columns = torch.arange(8.0).repeat(1000, 1)
    taken = torch.cat(samples_of([columns, torch.full((2000,), 100.0)], limit=500))
    assert 300 < len(taken) <= 500
    assert set(taken.tolist()) == {*map(float, range(8)), 100.0}


def test_percentiles_of_rows_of_other_lengths_are_interpolated() -> None:
    found = percentiles([torch.tensor([3.0, 1.0, 2.0]), torch.tensor([5.0])], [0, 25, 50, 100])
    assert found.tolist() == [[1.0, 1.5, 2.0, 3.0], [5.0] * 4]


def test_tensors_in_nested_containers_have_names() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    assert tensors_in("out", one) == [("out", one)]
    assert [name for name, _ in tensors_in("out", (one, {"a": [two], "b": "text"}))] == ["out.0", "out.1.a.0"]
    assert [name for name, _ in tensors_in("batch", {"x": one}, "{}[{!r}]")] == ["batch['x']"]


def test_only_the_parameters_of_an_optimizer_with_a_gradient_are_taken() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    assert with_gradients(net, optimizer) == []
    net[0].weight.grad, net[1].weight.grad = torch.ones(2, 2), torch.ones(1, 2)
    assert [name for name, _ in with_gradients(net, optimizer)] == ["0.weight"]
