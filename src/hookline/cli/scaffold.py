"""`hookline new`: a small project to start from. The tests run it."""

from __future__ import annotations

from pathlib import Path

from hookline.util.errors import OptionError

MODEL_FILE = '''"""The model and its data."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hookline import DataModule, Module


class Classifier(Module):
    """Predict which of the first three numbers is the largest."""

    def __init__(self, width: int = 16, lr: float = 0.01) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.net(inputs), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        logits = self.net(inputs)
        self.log("val/accuracy", (logits.argmax(dim=1) == labels).float().mean())
        return F.cross_entropy(logits, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Points(DataModule):
    """Random points. Replace this with your own data."""

    def __init__(self, size: int = 512, batch_size: int = 32) -> None:
        self.size, self.batch_size = size, batch_size

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.size, 4, generator=generator)
        data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
        cut = self.size * 3 // 4
        self.train, self.val = torch.utils.data.random_split(data, [cut, self.size - cut], generator)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)
'''

HOOKS_FILE = '''"""Hooks: methods name the events they listen to, parameters the facts they ask for."""

from hookline import Hook


class WarnOnRise(Hook):
    """Says so when the validation loss rises, and counts how often it did."""

    def __init__(self, by: float = 0.0) -> None:
        self.by = by
        self.best = float("inf")
        self.rises = 0

    def on_validation_end(self, metrics, epoch, sanity_checking):
        if sanity_checking:
            return
        loss = metrics["val/loss"]
        if loss > self.best + self.by:
            self.rises += 1
            print(f"epoch {epoch}: the validation loss rose to {loss:.4f}, the best was {self.best:.4f}")
        self.best = min(self.best, loss)

    def state_dict(self):  # kept in checkpoints
        return {"best": self.best, "rises": self.rises}

    def load_state_dict(self, state):
        self.best, self.rises = state["best"], state["rises"]
'''

RUN_FILE = """# hookline fit run.toml                         run it
# hookline fit run.toml --trainer.max_epochs 3  with another value
# hookline explain run.toml                     who listens to what
# hookline hooks                                hooks that are ready to use

[module]
class_path = "model.Classifier"
width = 16

[datamodule]
class_path = "model.Points"

[trainer]
max_epochs = 5
seed = 1

[hooks.rises]
class_path = "hooks.WarnOnRise"
by = 0.05

[hooks.checkpoint]
class_path = "model_checkpoint"
monitor = "val/loss"

[hooks.hparams]  # logs the arguments of the module (`width`, `lr`) as hyper-parameters
class_path = "hparams"
"""

TEST_FILE = '''"""Tests of the hook and the model. `fire_event` and `hook_player` are fixtures of Hookline."""

from hooks import WarnOnRise
from model import Classifier, Points

from hookline import Trainer


def test_a_rise_is_counted_and_said(fire_event, capsys):
    hook = WarnOnRise(by=0.1)
    for epoch, loss in enumerate([1.0, 0.5, 0.55, 0.7]):
        fire_event(hook, "validation_end", metrics={"val/loss": loss}, epoch=epoch, sanity_checking=False)
    assert (hook.rises, hook.best) == (1, 0.5)
    assert "epoch 3: the validation loss rose to 0.7000" in capsys.readouterr().out


def test_it_is_called_at_every_validation(hook_player):
    hook, data = WarnOnRise(), Points(size=64)
    data.setup("fit")
    played = hook_player(
        hook, module=Classifier(), train=data.train_dataloader(), val=data.val_dataloader(), max_epochs=2
    )
    assert played.events("warn_on_rise").count("on_validation_end") >= 2
    assert hook.best <= played.trainer.metrics["val/loss"]


def test_a_trained_model_can_be_loaded_again(tmp_path):
    trainer = Trainer(max_epochs=1, run_dir=tmp_path, logger=False)
    trainer.fit(Classifier(width=8), datamodule=Points(size=64))
    trainer.save_checkpoint(tmp_path / "saved")
    assert Classifier.load_from_checkpoint(tmp_path / "saved").net[0].out_features == 8
'''

PROJECT = {
    "model.py": MODEL_FILE,
    "hooks.py": HOOKS_FILE,
    "run.toml": RUN_FILE,
    "test_hooks.py": TEST_FILE,
    ".gitignore": "runs/\n__pycache__/\n",
}


def write_project(directory: str | Path) -> list[Path]:
    """Write the project without overwriting files."""
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"{folder} is a file; name a directory.")
    there = [name for name in PROJECT if (folder / name).exists()]
    if there:
        raise OptionError(
            f"{folder} already has {', '.join(there)}; nothing was written. Name a new directory."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in PROJECT.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in PROJECT]
