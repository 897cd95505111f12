"""FSDP: which layers are sharded, what is refused, and weights that are made when they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks.worlds import CLOSE
from tiny import Blocks
from torch import nn

from hookline import OptionError
from hookline.distributed.fsdp import batch_norms, materialize_module, refuse_ties

Found = dict[str, list[Any]]


@pytest.fixture
def found(from_strategy_cases: Found) -> Found:
    return from_strategy_cases


@pytest.mark.parametrize("name", ["ddp", "single"])
def test_a_module_that_stays_sharded_is_refused_where_it_has_to_be_whole(found: Found, name: str) -> None:
    for each in found[f"sharded before, {name}"]:
        assert each["error"] == "OptionError" and "Deep was sharded by FSDP in an earlier run" in each["text"]


def test_a_parameter_that_two_layers_share_is_named_if_they_are_gathered_apart(found: Found) -> None:
    for each in found["tied"]:
        assert (
            each["error"] == "OptionError"
            and "blocks.0.weight and blocks.1.weight are the same parameter" in each["text"]
        )
    assert max(found["tied, together"]) < CLOSE


def test_a_part_to_wrap_that_is_not_there_is_an_error_with_the_nearest_name(found: Found) -> None:
    for each in found["wrong wrap"]:
        assert each["error"] == "OptionError" and "Did you mean 'blocks." in each["text"]


def test_a_mesh_that_does_not_cover_the_world_is_refused_when_the_strategy_is_made(found: Found) -> None:
    for each in found["mesh of some ranks"]:
        assert (
            each["error"] == "OptionError" and "covers rank 0 of 2 ranks, and must cover all" in each["text"]
        )
        assert "init_device_mesh('cpu', (2,))" in each["text"]
    for each in found["mesh of too many dimensions"]:
        assert each["error"] == "OptionError" and "must have one dimension (shards) or two" in each["text"]


def test_a_layers_weight_used_outside_of_it_is_an_error_that_says_what_to_do(found: Found) -> None:
    for each in found["outside"]:
        assert each["error"] == "RuntimeError" and "leave that layer out of wrap" in each["notes"]


def test_a_model_made_without_memory_gets_its_weights_when_it_is_sharded(found: Found) -> None:
    one, other = found["from meta"]
    assert one == other
    assert all(abs(each) < 100 for each in one[0]) and one[2] == "DTensor"


def test_a_parameter_that_layers_share_must_be_gathered_once() -> None:
    model = Blocks()
    model.head.weight = model.layers[0].down.bias = nn.Parameter(torch.ones(2, 2))
    units = list(model.layers)
    with pytest.raises(OptionError, match=r"layers.0.down.bias and head.weight are the same parameter"):
        refuse_ties(model, units)
    refuse_ties(model, [])
    within = Blocks()
    within.layers[1].up.weight = within.layers[1].down.weight
    refuse_ties(within, list(within.layers))


def test_only_layers_with_running_averages_and_parameters_stay_in_float32() -> None:
    kept, plain = nn.BatchNorm1d(2), nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    others = [nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, track_running_stats=False), nn.LayerNorm(2)]
    assert batch_norms(nn.Sequential(kept, *others, plain)) == [kept, plain]


def test_a_model_without_memory_is_initialized_or_refused() -> None:
    with torch.device("meta"):
        model = Blocks()
    materialize_module(model, torch.device("cpu"))
    weights = [each for each in model.parameters() if each.ndim == 2]
    assert all(each.device.type == "cpu" and each.abs().sum() > 0 for each in weights)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    with torch.device("meta"):
        model = nn.Sequential(Own())
    with pytest.raises(OptionError, match=r"0 \(Own\).*neither reset_parameters\(\) nor init_weights\(\)"):
        materialize_module(model, torch.device("cpu"))
