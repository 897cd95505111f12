"""Layers of a model by pattern, class or function, as FSDP, activation checkpointing and compile choose them."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import Block, Blocks
from torch import nn

from hookline import OptionError
from hookline.distributed.layer_choice import choose_layers, default_layers, outermost


def test_the_blocks_of_a_model_are_the_items_of_its_lists_that_have_parameters() -> None:
    model = Blocks()
    model.others = nn.ModuleList([nn.ReLU(), model.head])
    assert default_layers(model) == [*model.layers, model.head]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("layers.*.up", ["layers.0.up", "layers.1.up"]),
        ("Block", ["layers.0", "layers.1"]),
        (Block, ["layers.0", "layers.1"]),
        (lambda name, module: name == "head", ["head"]),
    ],
)
def test_layers_are_chosen_by_pattern_class_or_function(choice: Any, names: list[str]) -> None:
    model = Blocks()
    by_name = dict(model.named_modules())
    assert choose_layers("FSDP: wrap", [choice], model) == [by_name[name] for name in names]


def test_several_choices_keep_the_order_of_the_model_and_name_each_layer_once() -> None:
    model = Blocks()
    expected = [model.layers[0], model.layers[1], model.head]
    assert choose_layers("FSDP: wrap", ["head", Block, "layers.1"], model) == expected


def test_a_choice_that_names_nothing_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match="FSDP: wrap='Blok' names no part of Blocks. Did you mean 'Block'"):
        choose_layers("FSDP: wrap", ["Blok"], Blocks())


def test_layers_inside_chosen_ones_can_be_left_out() -> None:
    model = Blocks()
    chosen = choose_layers(
        "wrap", ["layers.*", "head"], model
    )  # a pattern also matches names with further dots
    assert len(chosen) == 7 and outermost(chosen) == [*model.layers, model.head]
