"""Optimizer and schedule of a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from config.configured import QUIET, trainer_of
from torch import nn

from hookline.config import ConfigError


def test_loggers_strategy_optimizer_schedule_and_own_values(project: Path) -> None:
    text = """
module = "parts_here.Net"
datamodule = {class_path = "parts_here.Data", batches = 2}
loggers.first = {class_path = "parts_here.Lines", prefix = "x"}
loggers.second = "JSONLines"
[trainer]
max_epochs = 1
enable_progress_bar = false
strategy = "parts_here.Here"
[optimizer]
class_path = "AdamW"
lr = 0.5
betas = [0.8, 0.9]
[lr_scheduler]
class_path = "StepLR"
step_size = 1
interval = "step"
[config]
debug = true
[hooks.second]
class_path = "parts_here.Second"
"""
    trainer, parts = trainer_of(project, text)
    trainer.fit(parts.module, datamodule=parts.datamodule)
    assert [type(each).__name__ for each in trainer.loggers.members] == ["Lines", "JSONLines"]
    assert type(trainer.strategy).__name__ == "Here"
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.1**2)
    assert parts.hooks["second"].config == {"debug": True}


def test_a_plain_module_with_a_loss_and_an_optimizer(project: Path) -> None:
    text = f"""
datamodule = "parts_here.Data"
loggers = false
loss = "parts_here.mean_loss"
optimizer = {{class_path = "torch.optim.SGD", lr = 0.1}}
module = {{class_path = "torch.nn.Linear", in_features = 4, out_features = 2}}
{QUIET}"""
    trainer, parts = trainer_of(project, text)
    trainer.fit(parts.module, datamodule=parts.datamodule, **parts.fit_arguments)
    assert trainer.global_step == 3
    _, parts = trainer_of(project, text, "--loss.class_path", "torch.nn.SmoothL1Loss", "--loss.beta", "2")
    assert isinstance(parts.fit_arguments["loss"], nn.SmoothL1Loss)
    assert parts.fit_arguments["loss"].beta == 2


GROUPS = f"""
module = "parts_here.Net"
datamodule = "parts_here.Data"
loggers = false
{QUIET}
[optimizer]
class_path = "AdamW"
lr = 0.5
weight_decay = 0.1
[optimizer.groups]
biases = {{ weight_decay = 0, lr = 0.25 }}
"""


def test_parameter_groups_by_pattern(project: Path) -> None:
    trainer, parts = trainer_of(project, GROUPS, "--optimizer.groups.biases.lr", "0.125")
    trainer.fit(parts.module, datamodule=parts.datamodule)
    assert [
        (each["name"], each["lr"], each["weight_decay"]) for each in trainer.optimizers[0].param_groups
    ] == [("rest", 0.5, 0.1), ("biases", 0.125, 0)]
    plain = GROUPS.replace(
        '"parts_here.Net"', '{ class_path = "torch.nn.Linear", in_features = 4, out_features = 2 }'
    )
    trainer, parts = trainer_of(project, f"loss = 'mse_loss'\n{plain}")
    trainer.fit(parts.module, datamodule=parts.datamodule, **parts.fit_arguments)
    assert [each["param_names"] for each in trainer.optimizers[0].param_groups] == [["weight"], ["bias"]]


def test_layer_wise_decay_takes_the_learning_rate_of_the_optimizer(project: Path) -> None:
    (project / "stacked.py").write_text(
        "from torch import nn\nfrom parts_here import Net\n"
        "class Stack(Net):\n    def __init__(self):\n        super().__init__()\n"
        "        self.blocks = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])\n"
    )
    text = GROUPS.replace("parts_here.Net", "stacked.Stack").partition("[optimizer.groups]")[0]
    _, parts = trainer_of(project, f"{text}layer_decay = 0.5\n")
    groups = parts.make_groups()
    assert {each["name"]: each["lr"] for each in groups} == {
        "rest/depth_2": 0.25,
        "biases/depth_2": 0.25,
        "rest/depth_1": 0.125,
        "biases/depth_1": 0.125,
        "rest/depth_0": 0.0625,
        "biases/depth_0": 0.0625,
    }
    default = text.replace("lr = 0.5\n", "")
    assert trainer_of(project, f"{default}layer_decay = 1.0\n")[1].make_groups()[0]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "biases =",
            "bises =",
            "optimizer.groups.bises: 'bises' matches no parameter.*Did you mean 'biases'",
        ),
        ("lr = 0.25", "lrr = 0.25", "optimizer.groups.biases: 'biases' sets 'lrr'.*Did you mean 'lr'"),
        ("lr = 0.25", "lr = -1", "optimizer.groups.biases: 'biases': lr=-1 must be a number"),
        (
            "[optimizer.groups]",
            "layer_decay = 3\n[optimizer.groups]",
            "optimizer.layer_decay: layer_decay=3 must",
        ),
        ("[optimizer.groups]", "layer_deca = 1\n[optimizer.groups]", "Did you mean 'layer_decay'"),
        ("[optimizer.groups]\nbiases = {", "groups = 3\nother = {", "optimizer.groups: The rules are 3"),
    ],
)
def test_a_wrong_group_names_its_key(project: Path, old: str, new: str, said: str) -> None:
    text = GROUPS.replace(old, new)
    assert text != GROUPS
    text = text.partition("other = {")[0]
    with pytest.raises(ConfigError, match=said):
        trainer_of(project, text)
