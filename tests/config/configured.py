"""A project with the parts that configurations name, and what is made of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hookline import Trainer
from hookline.config import Config, load_config

STOP = "hookline.hooks.early_stopping.EarlyStopping"


KEEP = "hookline.hooks.model_checkpoint.ModelCheckpoint"


PARTS = """
from __future__ import annotations
import abc
from typing import Literal
import torch
from torch import nn
from torch.nn import functional as F
from hookline import DataModule, Hook, Logger, Module, OptionError, on
from hookline.distributed import SingleDevice

class Net(Module):
    def __init__(self, width: int = 4, act: nn.Module | None = None, kind: Literal["plain", "deep"] = "plain") -> None:
        super().__init__()
        self.layer, self.width, self.act, self.kind = nn.Linear(4, 2), width, act, kind
    def training_step(self, batch, batch_idx): return F.mse_loss(self.layer(batch[0]), batch[1])
    def validation_step(self, batch, batch_idx): return self.training_step(batch, batch_idx)
    test_step = validation_step
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)

class Needy(Net):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

class Untyped(Hook):
    def __init__(self, url): self.url = url

class Several(DataModule):
    def train_dataloader(self): return {name: [(torch.ones(2, 4), torch.ones(2, 2))] * 4 for name in ("web", "code")}

class Data(DataModule):
    def __init__(self, batches: int = 3) -> None: self.batches = batches
    def train_dataloader(self): return [(torch.ones(2, 4), torch.ones(2, 2))] * self.batches
    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

class Threshold(Hook):
    def __init__(self, threshold: float = 10.0, tags: list[str] | None = None) -> None:
        self.threshold, self.tags = threshold, tags
        if threshold < 0:
            raise OptionError(f"tags={tags} and a negative threshold", option="threshold", value=threshold)
        if tags == []:
            raise ValueError("tags=[] must not be empty")

class Second(Hook):
    def on_train_start(self, config): self.config = config

class Typo(Hook):
    def on_step_ned(self): pass

class Abstract(Hook, abc.ABC):
    @abc.abstractmethod
    def choose(self): ...

class Nested(Hook):
    def __init__(self, loss: nn.Module, anything=None) -> None: self.loss, self.anything = loss, anything

class Lines(Logger):
    def __init__(self, prefix: str = "") -> None: self.prefix = prefix

class Here(SingleDevice):
    def __init__(self) -> None: super().__init__(torch.device("cpu"))

@on("train_start")
def hello(step): print("hello at", step)

def not_a_class(): pass

def mean_loss(outputs, targets): return (outputs - targets).abs().mean()
"""


QUIET = "[trainer]\nmax_epochs = 1\nenable_progress_bar = false\n"


BASIC = f'module = "parts_here.Net"\ndatamodule = "parts_here.Data"\nloggers = false\n{QUIET}'


def config_of(
    project: Path, text: str = BASIC, *overrides: str, name: str = "run.toml", **more: Any
) -> Config:
    (project / name).write_text(text)
    return load_config(project / name, overrides, **more)


def trainer_of(project: Path, text: str = BASIC, *overrides: str, **more: Any) -> tuple[Trainer, Any]:
    parts = config_of(project, text, *overrides, **more).build()
    return parts.make_trainer(Trainer), parts
