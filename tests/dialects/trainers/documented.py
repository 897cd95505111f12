"""The code blocks of the document of trainers, and what runs them."""

from __future__ import annotations

import re
from typing import Any

import torch
from tiny import batches
from torch import nn

from hookline.interop.trainers import BaseTrainer, TrainingHook, get_trainer

QUICK_START = """\
from trainers import get_trainer

# Create trainer
trainer = get_trainer("simple", model, dataloader, optimizer, device)

# Add built-in hooks
trainer.add_console_logging(log_every_n_batches=10)
trainer.add_json_logging(log_every_n_batches=100)  
trainer.add_checkpointing(save_every_n_epochs=1)

# Train with hooks
trainer.train()
"""  # noqa: W291


ARCHITECTURE = """\
TrainingHook (base class)
    ↓
HookManager (manages multiple hooks)
    ↓  
BaseTrainer (hook integration)
    ↓
SimpleTrainer / AccelerateTrainer (concrete implementations)
"""  # noqa: W291


LIFECYCLE = """\
trainer.train()
# ↓ calls hooks at these points:

hooks.on_train_begin(state)              # Training starts
    hooks.on_epoch_begin(epoch, state)      # Each epoch starts
        hooks.on_batch_end(batch, loss, state)  # After each batch
    hooks.on_epoch_end(epoch, state)        # Each epoch ends
hooks.on_train_end(state)                # Training complete
"""


CUSTOM_HOOK = """\
from trainers.hooks import TrainingHook

class CustomHook(TrainingHook):
    def __init__(self):
        super().__init__("my_custom_hook")
        self.losses = []
    
    def on_batch_end(self, batch_idx, loss, state):
        self.losses.append(loss)
        if batch_idx % 100 == 0:
            print(f"Average loss: {sum(self.losses)/len(self.losses):.4f}")

# Use it
trainer.add_hook(CustomHook())
"""  # noqa: W293


MANAGEMENT = """\
# Add hooks
trainer.add_hook(my_hook)
trainer.add_console_logging()

# Manage hooks
trainer.remove_hook("console_log")
trainer.disable_hook("json_log")
trainer.enable_hook("json_log")

# List active hooks
print(trainer.hooks.list_hooks())
"""


STATE = """\
state = {
    'model': model,
    'optimizer': optimizer,
    'device': device,
    'current_epoch': 3,
    'current_batch_idx': 150,
    'latest_loss': 0.245,
    'avg_loss': 0.312,
    'model_params': 125_000_000,
    'status': 'training'  # or 'completed', 'error'
}
"""


def run_block(block: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a block of the document with its import line changed and nothing else."""
    exec(re.sub(r"^from trainers", "from hookline.interop.trainers", block, flags=re.M), names)
    return names


def parts(n: int = 4) -> dict[str, Any]:
    """What the document's blocks take for granted."""
    model = nn.Linear(4, 2)
    return {
        "model": model,
        "dataloader": batches(n),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "device": torch.device("cpu"),
    }


def simple(n: int = 4, **options: Any) -> BaseTrainer:
    trainer: BaseTrainer = get_trainer("simple", **parts(n), **{"num_epochs": 1, **options})
    return trainer


class Heard(TrainingHook):
    """The document's methods, writing down what they are called with."""

    def __init__(self, name: str = "heard") -> None:
        super().__init__(name)
        self.heard: list[tuple[Any, ...]] = []

    def on_train_begin(self, state: Any) -> None:
        self.heard.append(("train begin",))

    def on_epoch_begin(self, epoch: int, state: Any) -> None:
        self.heard.append(("epoch begin", epoch))

    def on_batch_end(self, batch: Any, loss: float, state: Any) -> None:
        self.heard.append(("batch end", batch, loss))

    def on_epoch_end(self, epoch: int, state: Any) -> None:
        self.heard.append(("epoch end", epoch))

    def on_train_end(self, state: Any) -> None:
        self.heard.append(("train end",))
