"""A signal that nothing has declared is an error on several ranks, and the error shows the line to add."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.torchrun import torchrun

SCRIPT = """
import sys
import torch
from tiny import Net, batches, quiet
from hookline import END_EPOCH, SKIP_STEP, Hook
from hookline.interop.lightning import LightningModule


class Undeclared(Hook):
    on_error = "warn"  # no policy passes over it

    def on_before_optimizer_step(self, rank, batch_idx):
        return SKIP_STEP if rank == 1 and batch_idx == 2 else None


class AgainstItsAnnotation(Hook):
    steers = True

    def on_train_batch_start(self, rank, batch_idx) -> None:
        return END_EPOCH if rank == 1 and batch_idx == 2 else None


class OfTheModule(Net):
    def on_train_batch_start(self, rank, batch_idx):
        return -1 if rank == 1 and batch_idx == 2 else None


class WrittenForLightning(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.global_rank == 1 and batch_idx == 2 else None


made = {cls.__name__: cls for cls in (Undeclared, AgainstItsAnnotation, OfTheModule, WrittenForLightning)}[sys.argv[1]]()
trainer = quiet(hooks=[made] if isinstance(made, Hook) else [])
try:
    trainer.fit(Net() if isinstance(made, Hook) else made, batches(12))
    print("STEPS", trainer.state.rank, trainer.global_step, flush=True)
except Exception as error:
    print(f"ERROR {trainer.state.rank} {' '.join(' '.join([str(error), *error.__notes__]).split())}", flush=True)
"""


@pytest.mark.parametrize(
    ("case", "said", "method"),
    [
        ("Undeclared", "hook 'undeclared' returned SKIP_STEP", "on_before_optimizer_step"),
        ("AgainstItsAnnotation", "hook 'against_its_annotation' returned END_EPOCH", "on_train_batch_start"),
        ("OfTheModule", "module OfTheModule returned END_EPOCH", "on_train_batch_start"),
    ],
)
def test_a_signal_that_no_declaration_announces_is_an_error_that_shows_the_line_to_add(
    case: str, said: str, method: str, tmp_path: Path
) -> None:
    zero, one = torchrun(SCRIPT, tmp_path, case).lines("ERROR ")
    assert f"{said} from {method} on rank 1 of 2" in one
    assert f"def {method}(...) -> Signal | None:" in one and "steers = True" in one and "script.py:" in one
    assert zero.startswith("0 ") and said in zero  # the other rank ends with it, and says why


def test_a_module_written_for_lightning_ends_an_epoch_without_a_declaration(tmp_path: Path) -> None:
    assert torchrun(SCRIPT, tmp_path, "WrittenForLightning").lines("STEPS ") == ["0 2", "1 2"]
