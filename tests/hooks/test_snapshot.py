"""A snapshot restores weights, buffers, gradients, optimizers and schedulers, as often as it is asked to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookline.hooks._snapshot import Snapshot


def everything(net: nn.Module, optimizer: Any, scheduler: Any) -> list[Tensor]:
    state = [each for values in optimizer.state_dict()["state"].values() for each in values.values()]
    rates = [torch.tensor([group["lr"] for group in optimizer.param_groups] + [scheduler.last_epoch])]
    grads = [each.grad for each in net.parameters() if each.grad is not None]
    return [each.clone() for each in (*net.state_dict().values(), *state, *rates, *grads)]


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_what_training_changes_is_restored_twice(on_cpu: bool, has_state: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def train() -> None:
        optimizer.zero_grad()
        net(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()

    if has_state:
        train()
    before, weights = everything(net, optimizer, scheduler), [*net.parameters()]
    snapshot = Snapshot(net, [optimizer], [scheduler], on_cpu=on_cpu)
    for _ in range(2):
        train()
        train()
        after = everything(net, optimizer, scheduler)
        assert len(after) != len(before) or not all(map(torch.equal, after, before))
        snapshot.restore()
        restored = everything(net, optimizer, scheduler)
        assert len(restored) == len(before) and all(map(torch.equal, restored, before))
        assert all(one is other for one, other in zip(net.parameters(), weights, strict=True))
