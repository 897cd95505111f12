"""A project with functions and classes that configurations name, and how one is built or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hookline.config import ConfigError, load_config

PARTS = """
import os
from collections.abc import Callable, Mapping
import torch
from torch import nn
from torch.nn import functional as F
from hookline import DataModule, Hook, Logger, Module

class Net(Module):
    def __init__(self, width: int = 4, act: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.width, self.act = nn.Linear(4, 2), width, act
    def training_step(self, batch, batch_idx): return F.mse_loss(self.layer(batch[0]), batch[1])
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)

class Other(Net): pass

class Data(DataModule):
    def __init__(self, batches: int = 3) -> None: self.batches = batches
    def train_dataloader(self): return [(torch.ones(2, 4), torch.ones(2, 2))] * self.batches

class Lines(Logger):
    def __init__(self, prefix: str = "", digits: int = 3) -> None: self.prefix, self.digits = prefix, digits

class Calls(Hook):
    def __init__(self, what: Callable[[int], float], more: Mapping[str, Callable[..., float]] | None = None) -> None:
        self.what, self.more = what, more

class Threshold(Hook):
    def __init__(self, threshold: float = 10.0, tags: list[str] | None = None, note: str = "") -> None:
        self.threshold, self.tags, self.note = threshold, tags, note

class Ramp:
    def __init__(self, by: float = 0.5) -> None: self.by = by
    def __call__(self, step): return self.by**step

class Outer:
    @staticmethod
    def inner(step): return 0.25

def halves(step): return 0.5**step
def asks_too_much(weather): return 1.0
number = 3
"""


HEAD = """
module = {class_path = "typed_here.Net", width = 5}
datamodule = "typed_here.Data"
loggers = false
[trainer]
max_epochs = 1
enable_progress_bar = false
"""


HOOK = '[hooks.one]\nclass_path = "typed_here.Threshold"\nthreshold = 3.0\ntags = ["a"]\non_error = "warn"\n'


SCHEDULE = '[hooks.lr]\nclass_path = "lr_schedule"\n'


def build(project: Path, text: str, *typed: str) -> Any:
    (project / "run.toml").write_text(HEAD + text)
    return load_config(project / "run.toml", typed).build()


def refused(project: Path, text: str, *typed: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        build(project, text, *typed)
    assert caught.value.key and caught.value.key in str(caught.value)
    return caught.value
