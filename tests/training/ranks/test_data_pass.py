"""Padding batches: the forward of a rank without data changes nothing that is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchmetrics import MeanMetric

from hookline.metrics.metric_log import MetricLog
from hookline.training.ranks.data_pass import PaddingBackup, empty_copy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.mean = MeanMetric()


def log_of(weight: int, **values: float) -> MetricLog:
    log = MetricLog()
    log.weight = weight
    for name, value in values.items():
        log.log(name, value, True, False, False, "mean", None)
    return log


def state(net: Net) -> dict[str, Any]:
    return {name: each.clone() for name, each in net.state_dict().items()}


def test_buffers_and_metrics_are_as_before() -> None:
    net = Net()
    net.norm(torch.randn(4, 3))
    net.mean.update(2.0)
    before, running = state(net), net.norm.running_mean
    backup = PaddingBackup(net, MetricLog())
    net.norm(torch.randn(4, 3) + 5)
    net.mean.update(100.0)
    assert not torch.equal(net.norm.running_mean, before["norm.running_mean"])  # type: ignore[arg-type]
    backup.restore()
    for name, each in net.state_dict().items():
        assert torch.equal(each, before[name]), name
    assert net.mean.compute().item() == 2.0
    assert net.norm.running_mean is running  # a view of it that others hold stays true


def test_a_buffer_that_was_replaced_is_put_back() -> None:
    net = Net()
    kept = net.norm.running_mean
    backup = PaddingBackup(net, MetricLog())
    net.norm.running_mean = torch.ones(3)
    backup.restore()
    assert net.norm.running_mean is kept and kept is not None and kept.tolist() == [0.0] * 3


def test_what_changes_after_the_backward_stays() -> None:
    net = Net()
    backup = PaddingBackup(net, MetricLog())
    net.norm(torch.randn(4, 3))
    backup.restore_buffers()
    assert net.norm.num_batches_tracked.item() == 0  # type: ignore[union-attr]
    net.norm.running_mean.fill_(3.0)  # type: ignore[union-attr]
    backup.restore()
    assert net.norm.running_mean.tolist() == [3.0] * 3  # type: ignore[union-attr]


def test_a_padding_batch_logs_into_a_copy_that_is_thrown_away() -> None:
    log = log_of(4, loss=1.0)
    log.newest["val/loss"] = 0.5
    copy = empty_copy(log)
    assert (
        copy.newest["val/loss"] == 0.5
        and copy.weight == 0
        and (copy.mode, copy.prefix) == (log.mode, log.prefix)
    )
    copy.newest["val/loss"] = 9.0
    copy.log("loss", 100.0, True, False, False, "mean", None)
    assert log.newest["val/loss"] == 0.5 and log.newest["loss"] == 1.0
    assert log.weight == 4
