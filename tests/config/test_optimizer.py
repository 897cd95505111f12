"""Optimizer and schedule of a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from config.configured import QUIET, trainer_of
from torch import nn


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
