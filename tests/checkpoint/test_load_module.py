"""A module from a checkpoint: its arguments, its weights, and what is said when they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn

from hookline import CheckpointError, OptionError
from hookline.checkpoint.weights import load_module
from hookline.hooks.hparams import HParams


def saved(net: nn.Module, *hooks: Any) -> Path:
    trainer = quiet(run_dir="run", hooks=hooks)
    trainer.fit(net, batches(1))
    trainer.save_checkpoint("run/made")
    return Path("run/made")


class Sized(Net):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.body = nn.Linear(4, size)


def test_weights_are_those_of_the_checkpoint() -> None:
    net = Net()
    again = load_module(Net, saved(net))
    assert torch.equal(again.layer.weight, net.layer.weight)
    assert again.layer.weight.requires_grad


def test_the_path_may_be_text() -> None:
    assert isinstance(Net.load_from_checkpoint(str(saved(Net()))), Net)


def test_a_module_is_made_with_the_arguments_that_it_had() -> None:
    assert Sized.load_from_checkpoint(saved(Sized(3))).size == 3


def test_an_argument_that_was_not_kept_must_be_passed() -> None:
    path = saved(Sized(3), HParams({"other": 1}))
    with pytest.raises(OptionError, match=r"does not contain these arguments of Sized: size.*size=\.\.\."):
        Sized.load_from_checkpoint(path)
    assert Sized.load_from_checkpoint(path, size=3).size == 3


def test_an_unknown_argument_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match="no argument 'sice'. Did you mean 'size'"):
        Sized.load_from_checkpoint(saved(Sized(3)), sice=3)


def test_weights_that_do_not_fit_are_an_error_about_the_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="do not fit Sized"):
        Sized.load_from_checkpoint(saved(Sized(3)), size=5)


def test_any_keyword_goes_to_a_module_that_takes_any() -> None:
    class Open(Net):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.options = options

    assert Open.load_from_checkpoint(saved(Open(), HParams({"a": 1})), b=2).options == {"a": 1, "b": 2}


def test_layers_made_when_a_run_begins_are_made_and_the_module_may_edit_the_contents() -> None:
    class Late(Net):
        def configure_model(self) -> None:
            self.late = nn.Linear(2, 2)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["module"]["late.bias"] = torch.full((2,), 7.0)

    net = Late()
    again = Late.load_from_checkpoint(saved(net))
    assert torch.equal(again.late.weight, net.late.weight)
    assert again.late.bias.tolist() == [7.0, 7.0]


def test_what_is_no_checkpoint_is_refused() -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        Net.load_from_checkpoint("nowhere")
