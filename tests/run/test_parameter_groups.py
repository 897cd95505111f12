"""Parameter groups: which pattern matches which parameters, what wins, and what a wrong rule says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hookline import OptionError, parameter_groups
from hookline.run.parameter_groups import named_parameters


class OwnRMSNorm(nn.Module):
    """A norm that is none of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1)
        self.norm = OwnRMSNorm()


class Net(nn.Module):
    """An embedding that is tied to the head, three blocks, a norm, and a head with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.final = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8)
        self.head.weight = self.embed.weight


def names(groups: Any) -> dict[str, list[str]]:
    return {each["name"]: each["param_names"] for each in groups}


def test_by_default_norms_and_biases_have_no_weight_decay() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.LSTM(2, 2))
    groups = parameter_groups(net)
    assert names(groups) == {
        "rest": ["0.weight", "3.weight_ih_l0", "3.weight_hh_l0"],
        "norms": ["1.weight", "1.bias", "2.weight", "2.bias"],
        "biases": ["0.bias", "3.bias_ih_l0", "3.bias_hh_l0"],
    }
    optimizer = torch.optim.AdamW(groups, lr=0.5, weight_decay=0.1)
    assert [(each["lr"], each["weight_decay"]) for each in optimizer.param_groups] == [
        (0.5, 0.1),
        (0.5, 0.0),
        (0.5, 0.0),
    ]


def test_norms_of_other_packages_are_recognised_and_layers_with_normalized_weights_are_not() -> None:
    class NormalizedLinear(nn.Linear):
        pass

    class WeightNormLinear(nn.Linear):
        pass

    net = nn.ModuleDict({"a": OwnRMSNorm(), "b": NormalizedLinear(2, 2), "c": WeightNormLinear(2, 2)})
    assert names(parameter_groups(net, {"norms": {"weight_decay": 0.0}}))["norms"] == ["a.scale"]


def test_every_trainable_parameter_is_in_exactly_one_group_and_shared_ones_are_counted_once() -> None:
    net = Net()
    groups = parameter_groups(net, {"norms": {"lr": 0.1}, "head.*": {"lr": 0.2}, "biases": {"momentum": 0.5}})
    grouped = [id(each) for group in groups for each in group["params"]]
    assert sorted(grouped) == sorted(map(id, net.parameters()))
    # the shared weight has two names, and its second one matches
    assert names(groups)["head.*"] == ["embed.weight"]
    assert names(groups)["head.*+biases"] == ["head.bias"]


def test_a_parameter_gets_the_settings_of_all_patterns_and_the_first_wins() -> None:
    rules = {"head.bias": {"lr": 1.0}, "head.*": {"lr": 2.0, "momentum": 0.5}, "*": {"momentum": 0.25}}
    settings = {
        name: (group["lr"], group["momentum"])
        for group in parameter_groups(Net(), rules, lr=3.0)
        for name in group["param_names"]
    }
    assert settings["head.bias"] == (1.0, 0.5)
    assert settings["embed.weight"] == (2.0, 0.5)
    assert settings["final.weight"] == (3.0, 0.25)


def test_layers_are_selected_by_class() -> None:
    groups = parameter_groups(Net(), {"class:Embedding": {"lr": 0.1}, "class:*Norm": {"lr": 0.2}})
    assert names(groups)["class:Embedding"] == ["embed.weight"]
    assert names(groups)["class:*Norm"][-2:] == ["final.weight", "final.bias"]


def test_layer_wise_decay_counts_from_the_output() -> None:
    rates = {
        name: group["lr"]
        for group in parameter_groups(Net(), {"final.*": {"lr": 8.0}}, lr=16.0, layer_decay=0.5)
        for name in group["param_names"]
    }
    assert rates["head.bias"] == 16.0
    assert rates["final.weight"] == 8.0
    assert [rates[f"blocks.{index}.norm.scale"] for index in range(3)] == [2.0, 4.0, 8.0]
    assert rates["embed.weight"] == 1.0


def test_several_stacks_of_layers_follow_one_another_in_the_named_order() -> None:
    net = nn.ModuleDict(
        {
            "encoder": nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2)),
            "between": nn.Linear(1, 1, bias=False),
            "decoder": nn.Sequential(nn.Linear(1, 1, bias=False)),
        }
    )
    groups = parameter_groups(net, {"*": {"lr": 1.0}}, layer_decay=0.5, layers=["encoder", "decoder"])
    rates = {name: group["lr"] for group in groups for name in group["param_names"]}
    assert rates == {
        "encoder.0.weight": 0.125,
        "encoder.1.weight": 0.25,
        "between.weight": 0.25,
        "decoder.0.weight": 0.5,
    }


def test_the_table_shows_counts_settings_names_and_frozen_parameters() -> None:
    net = Net()
    net.blocks.requires_grad_(False)
    groups = parameter_groups(net, {"norms": {"weight_decay": 0.0}}, lr=0.5)
    assert str(groups).splitlines() == [
        "group     parameters  numbers   lr  weight_decay  first names",
        "rest               2       40  0.5   optimizer's  embed.weight, head.bias",
        "norms              2        8  0.5             0  final.weight, final.bias",
        "(frozen)          15      252    -             -  blocks.0.attention.in_proj_weight, "
        "blocks.0.attention.in_proj_bias and 13 more",
    ]
    assert groups.rows()[1].data() == {
        "name": "norms",
        "parameters": 2,
        "numbers": 8,
        "lr": 0.5,
        "weight_decay": 0.0,
        "names": ["final.weight", "final.bias"],
    }
    assert len(groups.frozen) == 15


def test_the_order_of_groups_does_not_depend_on_the_order_of_layers() -> None:
    class Turned(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed = self._modules.pop("embed")  # type: ignore[assignment]

    rules = {"head.*": {"lr": 0.1}, "norms": {"weight_decay": 0.0}}
    made = [[each["name"] for each in parameter_groups(net, rules)] for net in (Net(), Turned())]
    assert made == [["rest", "head.*", "norms"]] * 2


def test_names_are_those_without_the_wrappers_of_torch() -> None:
    wrapped = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"a": nn.Linear(1, 1, bias=False)})})
    assert [each.names for each in named_parameters(wrapped)] == [["a.weight"]]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"hed.*": {"lr": 1.0}}, r"'hed.\*' matches no parameter of Net. Did you mean 'head.\*'"),
        ({"blocks.1": {"lr": 1.0}}, r"Did you mean 'blocks.1.\*'\? Parameters: embed.weight, head.weight, "),
        ({"norm": {"lr": 1.0}}, "Did you mean 'norms'"),
        ({"class:Embeding": {"lr": 1.0}}, "no layer of Net. Did you mean 'class:Embedding'.*OwnRMSNorm"),
        (
            {"*": {"lr": 1.0}, "head.*": {"lr": 2.0}},
            r"'head.\*' has no effect.*'\*'.*put 'head.\*' before it",
        ),
        ({"norms": {}}, "'norms' has .* must have settings"),
        ({"norms": {"lr": -1.0}}, "'norms': lr=-1.0 must be a number from 0"),
        ({"norms": {"weight_decay": "no"}}, "weight_decay='no' must be a number"),
        ({"norms": {"params": []}}, "sets 'params', which is not a setting"),
        ({1: {"lr": 1.0}}, "1 is not a pattern"),
        (["norms"], "must be settings by pattern"),
    ],
)
def test_a_wrong_rule_says_what_is_right(rules: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parameter_groups(Net(), rules)


def test_a_rule_for_frozen_parameters_only_is_refused() -> None:
    net = Net()
    net.head.bias.requires_grad_(False)
    with pytest.raises(OptionError, match=r"'head.bias' matches only frozen parameters of Net: head.bias"):
        parameter_groups(net, {"head.bias": {"lr": 1.0}})
    net.requires_grad_(False)
    with pytest.raises(OptionError, match="no trainable parameter: all 19 are frozen"):
        parameter_groups(net)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layer_decay": 0.5}, "needs the learning rate that it scales: pass lr="),
        ({"layer_decay": 0.0, "lr": 1.0}, "layer_decay=0.0 must be a number above 0, up to 1"),
        ({"layer_decay": True, "lr": 1.0}, "layer_decay=True must be"),
        ({"layers": "blocks"}, "layers= names the layers for layer_decay"),
        ({"layer_decay": 0.5, "lr": 1.0, "layers": "block"}, "Did you mean 'blocks'"),
        ({"lr": float("nan")}, "lr=nan must be a number from 0"),
    ],
)
def test_a_wrong_option_says_what_is_right(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parameter_groups(Net(), **options)


def test_layers_that_cannot_be_found_must_be_named() -> None:
    with pytest.raises(OptionError, match=r"has none\. Name the layers in their order: layers='blocks'"):
        parameter_groups(nn.Linear(1, 1), lr=1.0, layer_decay=0.5)
    two = nn.ModuleDict({key: nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]) for key in "ab"})
    with pytest.raises(OptionError, match=r"has a \(2 layers\), b \(2 layers\).*layers=\['a', 'b'\]"):
        parameter_groups(two, lr=1.0, layer_decay=0.5)
