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

from hookline import JSONLines, OptionError, on
from hookline.hooks.hparams import HParams


class Wide(Net):
    def __init__(
        self, width: int, sizes: tuple[int, ...] = (1, 2), lr: float = 0.1, extra: Any = None
    ) -> None:
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


class Keeps(Net):
    """Keeps nothing of its arguments."""

    def __init__(self, width: int, *sizes: int, activation: Any = None, **more: Any) -> None:
        super().__init__()
        self.body = nn.Linear(4, width)
        self.heads = nn.ModuleList(nn.Linear(width, size) for size in sizes)
        if more:
            self.tail = nn.Linear(2, more["tail"])


@pytest.mark.parametrize(
    "made",
    [lambda: Keeps(32), lambda: Keeps(8, 2, 3), lambda: Keeps(width=5, tail=3)],
    ids=["by position", "several", "any keyword"],
)
def test_arguments_that_are_not_kept_as_attributes_are_recorded(made: Any) -> None:
    net = made()
    path = saved(net, HParams())
    again = Keeps.load_from_checkpoint(path)
    assert {name: value.shape for name, value in again.state_dict().items()} == {
        name: value.shape for name, value in net.state_dict().items()
    }
    for name, value in net.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_an_argument_that_must_be_given_and_cannot_be_kept_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Backbone(Net):
        def __init__(self, backbone: nn.Module, width: int = 2) -> None:
            super().__init__()
            self.body = backbone

    path = saved(Backbone(nn.Linear(4, 4)), HParams())
    assert (
        "cannot hold backbone (a torch.nn.modules.linear.Linear), which Backbone was made with: pass it"
        in caplog.text
    )
    with pytest.raises(
        OptionError,
        match=r"backbone \(a torch.nn.modules.linear.Linear, which a checkpoint cannot hold\). "
        r"Pass them \(load_from_checkpoint\(path, backbone=...\)\)\.$",
    ):
        Backbone.load_from_checkpoint(path)
    assert isinstance(Backbone.load_from_checkpoint(path, backbone=nn.Linear(4, 4)).body, nn.Linear)


def test_a_dataclass_module_is_made_again_from_its_fields() -> None:
    @dataclasses.dataclass(eq=False)
    class Fields(Net):
        width: int = 3
        lr: float = 0.1

        def __post_init__(self) -> None:
            super().__init__(self.lr)
            self.body = nn.Linear(4, self.width)

    assert Fields.load_from_checkpoint(saved(Fields(5), HParams())).width == 5


class Plain(nn.Module):
    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__()
        self.width = width
        self.body = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.body(x)


def fit_plain(net: nn.Module, *hooks: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    quiet(hooks=hooks).fit(net, batches(1), loss=nn.functional.mse_loss, optimizer=optimizer)


def test_of_a_plain_module_it_is_said_before_the_first_step_that_it_remembers_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook, said = HParams(), []
    fit_plain(Plain(3), hook, on("train_batch_start", once=True)(lambda: said.append(caplog.text)))
    assert (
        "HParams: Plain does not record its arguments, as only a hookline.Module does. Saved are its attributes "
        "with the names of its arguments: width. Not known: depth. Derive it from hookline.Module, or pass them: "
        "HParams({...})." in said[0]
    )
    assert hook.params == {"width": 3}
    caplog.clear()
    fit_plain(nn.Sequential(nn.Linear(4, 2)), HParams())
    assert "Saved are its attributes with the names of its arguments: none. Not known: args." in caplog.text


def test_nothing_is_said_if_they_are_given_or_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    class Bare(Plain):
        def __init__(self) -> None:
            super().__init__(3)

    fit_plain(Plain(3), HParams({"width": 3, "depth": 2}))
    fit_plain(Bare(), HParams())
    saved(Net(), HParams())
    assert "HParams" not in caplog.text


def test_a_checkpoint_of_an_earlier_version_that_knows_less_is_no_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = saved(Keeps(4), HParams({"activation": None}))  # it had kept attributes only
    quiet(max_epochs=2, hooks=[HParams()]).fit(Keeps(4), batches(1), resume=path)
    assert "other hyper-parameters" not in caplog.text


def test_arguments_can_be_overridden_while_loading() -> None:
    again = Wide.load_from_checkpoint(saved(Wide(7, lr=0.01), HParams()), lr=0.5)
    assert (again.width, again.lr) == (7, 0.5)


def test_they_are_logged() -> None:
    saved(Wide(7), HParams(), logger=JSONLines())
    rows = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    assert {"width": 7, "sizes": [1, 2], "lr": 0.1, "extra": None} in [
        row["params"] for row in rows if row["type"] == "hyperparams"
    ]


@dataclasses.dataclass
class Config:
    width: int = 3
    note: str = "x"


@pytest.mark.parametrize(
    "params", [{"width": 3, "note": "x"}, Config(), argparse.Namespace(width=3, note="x")]
)
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
    assert (
        "a checkpoint cannot hold extra (a torch.nn.modules.activation.ReLU), which Wide was made with"
        in caplog.text
    )
    caplog.clear()
    assert Wide.load_from_checkpoint(path).width == 3
    assert (
        "Wide was created with extra=a torch.nn.modules.activation.ReLU, which a checkpoint cannot hold: the default is used instead. "
        "To set it: load_from_checkpoint(path, extra=...)" in caplog.text
    )
    caplog.clear()
    Wide.load_from_checkpoint(path, extra=nn.ReLU())
    assert "extra" not in caplog.text
    assert "extra" not in HParams(ignore=("extra",)).left_out


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"params": 3}, "params=3"), ({"params": {1: 2}}, "names as keys"), ({"ignore": "lr"}, "ignore='lr'")],
)
def test_wrong_parameters_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        HParams(**arguments)
