"""What a module was made with: kept, logged, and used to make it again."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn

from hookline import JSONLines, OptionError
from hookline.hooks.hparams import HParams


class Wide(Net):
    def __init__(self, width: int, sizes: tuple[int, ...] = (1, 2), lr: float = 0.1, extra: Any = None) -> None:
        super().__init__(lr)
        self.width, self.sizes = width, sizes
        self.body = nn.Linear(4, width)


def saved(net: nn.Module, *hooks: Any, **options: Any) -> Path:
    trainer = quiet(**{"run_dir": "run", "hooks": hooks, **options})
    trainer.fit(net, batches(1))
    trainer.save_checkpoint("run/made")
    return Path("run/made")


def test_a_module_is_made_again_with_its_own_arguments() -> None:
    net = Wide(7, sizes=(3, 4), lr=0.01)
    again = Wide.load_from_checkpoint(saved(net, HParams()))
    assert (again.width, again.sizes, again.lr) == (7, (3, 4), 0.01)
    for name, value in net.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_arguments_can_be_overridden_while_loading() -> None:
    again = Wide.load_from_checkpoint(saved(Wide(7, lr=0.01), HParams()), lr=0.5)
    assert (again.width, again.lr) == (7, 0.5)


def test_they_are_logged() -> None:
    saved(Wide(7), HParams(), logger=JSONLines())
    rows = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    assert {"width": 7, "sizes": [1, 2], "lr": 0.1} in [row["params"] for row in rows if row["type"] == "hyperparams"]


@dataclasses.dataclass
class Config:
    width: int = 3
    note: str = "x"


@pytest.mark.parametrize("params", [{"width": 3, "note": "x"}, Config(), argparse.Namespace(width=3, note="x")])
def test_they_can_be_given(params: Any) -> None:
    hook = HParams(params)
    again = Wide.load_from_checkpoint(saved(Wide(3), hook))
    assert hook.params == {"width": 3, "note": "x"}  # the note is for the log: __init__ does not take it
    assert again.width == 3


def test_arguments_can_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    hook = HParams(ignore=("lr",))
    with caplog.at_level(logging.INFO, "hookline"):
        path = saved(Wide(3, extra=nn.ReLU()), hook)
    assert hook.params == {"width": 3, "sizes": (1, 2)}
    assert "extra of Wide.__init__ cannot be kept" in caplog.text
    assert Wide.load_from_checkpoint(path).width == 3


def test_a_resume_with_other_values_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    path = saved(Wide(3, lr=0.1), HParams())
    with caplog.at_level(logging.WARNING, "hookline"):
        quiet(max_epochs=2, hooks=[HParams()]).fit(Wide(3, lr=0.2), batches(1), resume=path)
    assert "lr: 0.1 -> 0.2" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hookline"):
        quiet(max_epochs=2, hooks=[HParams()]).fit(Wide(3, lr=0.1), batches(1), resume=path)
    assert caplog.text == ""


def test_values_that_a_checkpoint_cannot_hold_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match="'device' is a torch.device"):
        HParams({"lr": 0.1, "device": torch.device("cpu")})
    with pytest.raises(OptionError, match="'net' is a torch.nn.modules.linear.Linear"):
        HParams({"net": {"a": [nn.Linear(1, 1)]}})


@pytest.mark.parametrize(("arguments", "message"), [
    ({"params": 3}, "params=3"), ({"params": {1: 2}}, "names as keys"), ({"ignore": "lr"}, "ignore='lr'"),
])  # fmt: skip
def test_wrong_parameters_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        HParams(**arguments)
