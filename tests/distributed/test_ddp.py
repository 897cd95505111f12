"""DDP: its options, and graphs that do not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks.worlds import CLOSE
from torch import nn

from hookline import OptionError
from hookline.distributed.ddp import synced_batchnorm

Found = dict[str, list[Any]]


@pytest.fixture
def found(from_strategy_cases: Found) -> Found:
    return from_strategy_cases


def test_a_static_graph_is_learnt_also_where_gradients_are_accumulated(found: Found) -> None:
    for far, steps, expected in found["static graph, windows"]:
        assert far < CLOSE and steps == expected == 2


def test_all_ranks_begin_with_the_weights_of_rank_zero(found: Found) -> None:
    one, other = found["started alike"]
    assert one == other
    assert one[0] == pytest.approx(one[2]) and one[1] == pytest.approx(one[2])


def test_batch_norm_over_ranks_needs_an_accelerator() -> None:
    with pytest.raises(OptionError, match="sync_batchnorm=True works on accelerators only"):
        synced_batchnorm(nn.BatchNorm1d(2), torch.device("cpu"))
    converted = synced_batchnorm(nn.Sequential(nn.BatchNorm1d(2)), torch.device("cuda"))
    assert type(converted[0]) is nn.SyncBatchNorm  # type: ignore[index]
