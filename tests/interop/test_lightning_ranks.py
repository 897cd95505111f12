"""Lightning's modules and callbacks on two ranks of Hookline's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks.torchrun import torchrun

SCRIPT = """
import json, os, sys, warnings
warnings.filterwarnings("ignore")
import torch
import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
import hookline

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def loss(self, batch):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("score", float(abs(self.current_epoch - 1) + self.global_rank), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(0)
draw = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(16, 4, generator=draw), torch.randn(16, 2, generator=draw))
stop, keep = EarlyStopping("score", patience=2), ModelCheckpoint(monitor="score", save_last=True)
trainer = hookline.Trainer(hooks=[stop, keep], strategy="ddp", max_epochs=9, logger=False, enable_progress_bar=False, run_dir="run")
model = Model()
trainer.fit(model, DataLoader(data, batch_size=2), DataLoader(data, batch_size=4))
told = {"epochs": trainer.state.epochs_seen, "stopped": stop.stopped_epoch, "best": os.path.basename(keep.best_model_path),
        "score": float(keep.best_model_score), "weights": model.layer.weight.flatten().tolist(), "world": model.trainer.world_size}
open(f"told-{trainer.strategy.rank}.json", "w").write(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("two")
    outcome = torchrun(SCRIPT, folder, deadline=300)
    assert outcome.code == 0, outcome.output
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)], folder


def test_both_ranks_train_the_same_weights_and_stop_together(told: Any) -> None:
    (zero, one), _ = told
    assert zero == one
    assert (zero["epochs"], zero["stopped"], zero["world"]) == (4, 3, 2)


def test_the_best_one_is_written_once_and_scored_over_both_ranks(told: Any) -> None:
    (zero, _), folder = told
    assert (zero["best"], zero["score"]) == ("epoch=1-step=8.ckpt", 0.5)
    assert sorted(each.name for each in (folder / "run" / "checkpoints").iterdir()) == [
        "epoch=1-step=8.ckpt",
        "last",
        "last.ckpt",
    ]
