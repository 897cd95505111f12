"""Paths of values that a schedule writes to: what they find, and what the errors say."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from hookline import Hook
from hookline.hooks._targets import find_targets, parse_path
from hookline.training.trainer import Trainer
from hookline.util.errors import HooklineError


class Range(NamedTuple):
    low: float
    high: float


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.scale = 2.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
        self.register_buffer("temperature", torch.tensor(1.0))
        self.register_buffer("table", torch.ones(3))
        self.weights = {"kl": 0.5, "aux": 0.25}
        self.range, self.pair, self.several = Range(0.0, 1.0), (1.0, 2.0), [1, 2]
        self.mode, self.masks, self.k = "hard", False, 5
        self.scalar = nn.Parameter(torch.tensor(1.0))


class Weighs(Hook):
    def __init__(self) -> None:
        super().__init__("weighs")
        self.alpha = 0.1


@pytest.fixture(name="model")
def _model() -> Model:
    return Model()


def find(path: str, model: Model, groups: Any = None, several: bool = False) -> Any:
    layers = list(model.head.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": layers[:1], "name": "decay"},
            {"params": layers[1:], "name": "plain", "weight_decay": 0.0},
        ]
    )
    optimizers: list[Any] = [optimizer]
    if several:
        optimizers.append(torch.optim.SGD([model.scalar], lr=torch.tensor(0.1), momentum=0.9))
    hooks = Trainer(hooks=[Weighs()], logger=False, enable_progress_bar=False).hooks
    return find_targets(path, model, optimizers, hooks, groups, "target")


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("optimizer.weight_decay", ["optimizer", "weight_decay"]),
        ("optimizers[1].param_groups[0].betas[1]", ["optimizer", 1, "param_groups", 0, "betas", 1]),
        ("module.layers.0.drop.p", ["module", "layers", "0", "drop", "p"]),
        ("module.weights['kl']", ["module", "weights", "kl"]),
        ('module.weights["k.l"]', ["module", "weights", "k.l"]),
    ],
)
def test_a_path_has_names_and_items(path: str, parts: list[Any]) -> None:
    assert parse_path(path, "target") == parts


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("optimizer.weight_decay", [0.01, 0.0], 0.5),
        ("optimizer.betas[0]", [0.9, 0.9], 0.5),
        ("optimizer[0].param_groups[1].eps", [1e-8], 0.5),
        ("module.temperature", [1.0], 0.5),
        ("module.encoder.1.drop.p", [0.3], 0.5),
        ("module.encoder[1].drop.p", [0.3], 0.5),
        ("module.encoder.*.drop.p", [0.3] * 3, 0.5),
        ("module.*.p", [0.3] * 3 + [0.1], 0.5),
        ("module.head[1].p", [0.1], 0.5),
        ("module.weights['kl']", [0.5], 0.75),
        ("module.range[1]", [1.0], 0.5),
        ("module.pair[0]", [1.0], 0.5),
        ("module.several[1]", [2], 7),
        ("module.mode", ["hard"], "soft"),
        ("module.masks", [False], True),
        ("hooks.weighs.alpha", [0.1], 0.5),
    ],
)
def test_a_path_finds_values_to_read_and_write(
    path: str, before: list[Any], after: Any, model: Model
) -> None:
    found = find(path, model)
    assert [each.read() for each in found] == pytest.approx(before)
    for each in found:
        each.write(each.check(after, "test"))
        assert each.read() == after


def test_what_is_beside_an_item_stays(model: Model) -> None:
    for path in ("module.range[1]", "module.weights['kl']", "module.pair[0]"):
        find(path, model)[0].write(9.0)
    assert model.range == Range(0.0, 9.0) and type(model.range) is Range
    assert model.weights == {"kl": 9.0, "aux": 0.25} and model.pair == (9.0, 2.0)


def test_tensors_are_filled_in_place(model: Model) -> None:
    (buffer,), (rate,) = find("module.temperature", model), find("optimizer[1].lr", model, several=True)
    held = model.temperature, rate.held()
    buffer.write(0.5)
    rate.write(0.01)
    assert model.temperature is held[0] and float(held[0]) == 0.5
    assert rate.held() is held[1] and float(held[1]) == pytest.approx(0.01)


def test_groups_are_chosen_by_name(model: Model) -> None:
    assert [each.label for each in find("optimizer.eps", model, "dec*")] == ["optimizer.param_groups[0].eps"]
    assert len(find("optimizer.eps", model, ["plain", "decay"])) == 2


def test_places_that_overlap(model: Model) -> None:
    first, other = find("optimizer.betas[0]", model)
    again = type(first)("", first.owner, "betas", 1)
    whole = type(first)("", first.owner, "betas")
    assert not first.overlaps(other) and not first.overlaps(again)
    assert first.overlaps(first) and first.overlaps(whole) and whole.overlaps(again)


@pytest.mark.parametrize(
    ("path", "groups", "several", "text"),
    [
        ("", None, False, "must be the path of a value"),
        (7, None, False, "must be the path of a value"),
        ("module", None, False, "must be the path of a value"),
        ("module..p", None, False, "must be the path of a value"),
        ("optimiser.lr", None, False, "must begin with .*Did you mean 'optimizer'"),
        ("optimizer.weight_decy", None, False, "AdamW has no 'weight_decy'. Did you mean 'weight_decay'"),
        ("optimizer.params", None, False, "AdamW has no 'params'"),
        ("optimizer.lr", None, True, r"several optimizers; write optimizer\[0\].*\[1\] SGD"),
        ("optimizer[2].lr", None, False, "the run has 1 optimizers, counted from 0"),
        ("optimizer.betas[2]", None, False, r"param_groups\[0\].betas has no item 2; it is \(0.9, 0.999\)"),
        ("optimizer.betas", None, False, "tuple .*not a number"),
        ("optimizer.maximize.x", None, False, "has no item 'x'"),
        ("optimizer.param_groups[5].lr", None, False, r"write param_groups\[0\] up to param_groups\[1\]"),
        ("optimizer.param_groups[0]", None, False, "must end with one hyper-parameter"),
        ("optimizer.eps", "slow", False, "groups='slow' matches no parameter group.*Names: decay, plain"),
        ("optimizer.foreach", None, False, "is None, not a number"),
        ("module.encodr.0.drop.p", None, False, r"module \(Model\) has no 'encodr'. Did you mean 'encoder'"),
        ("module.head.1.q", None, False, r"\(Dropout\) has no 'q'.*It has: p"),
        ("module.head[7].p", None, False, "module.head has no item 7"),
        (
            "module.encoder.*.drp.p",
            None,
            False,
            "no submodule 'encoder.[*].drp' with a value 'p'.*Did you mean",
        ),
        ("module.head", None, False, "module.head is Sequential, not a number.*It has: 0, 1"),
        ("module.scalar", None, False, "is a parameter, which an optimizer trains. Make it a buffer"),
        ("module.table", None, False, r"a tensor of shape \(3,\), not a single number"),
        ("module.temperature", "decay", False, "groups= is for the parameter groups"),
        ("hooks.wighs.alpha", None, False, "there is no hook 'wighs'. Did you mean 'weighs'"),
        ("hooks.weighs.alhpa", None, False, "has no 'alhpa'. Did you mean 'alpha'"),
        ("hooks.weighs", None, False, "must end with an attribute"),
    ],
    ids=str,
)
def test_a_path_that_leads_nowhere_is_refused(
    path: Any, groups: Any, several: bool, text: str, model: Model
) -> None:
    with pytest.raises(HooklineError, match=text):
        find(path, model, groups, several)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("module.temperature", "hot", "must be a finite number; the schedule gives 'hot'"),
        ("module.temperature", float("nan"), "a finite number; the schedule gives nan"),
        ("module.temperature", True, "a finite number; the schedule gives True"),
        ("optimizer.weight_decay", None, "a finite number; the schedule gives None"),
        ("module.masks", 1.0, "must be True or False; the schedule gives 1.0"),
        ("module.mode", 2, "must be text; the schedule gives 2"),
    ],
)
def test_a_value_of_another_kind_is_refused(path: str, value: Any, text: str, model: Model) -> None:
    with pytest.raises(HooklineError, match=text):
        find(path, model)[0].check(value, "ParameterSchedule")
