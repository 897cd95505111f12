"""Lightning's modules and callbacks on two ranks of Hookline's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.processes import IMPORTED
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
    outcome = torchrun(SCRIPT, folder, deadline=300, **IMPORTED)
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


METRICS = """
import json, sys, warnings
warnings.filterwarnings("ignore")
import torch
import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
KIND
class Rows(Logger):
    name, version, rows = "rows", 0, []
    def log_metrics(self, metrics, step=None):
        self.rows.append([dict(metrics), step])
    def log_hyperparams(self, *args, **kwargs):
        pass

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.mean = torch.nn.Linear(4, 2), MeanMetric()

    def training_step(self, batch, batch_idx):
        value = float(batch_idx + self.global_rank)
        for reduce in ("mean", "sum", "max"):
            self.log(f"{reduce}_synced", value, on_step=True, on_epoch=True, sync_dist=True, reduce_fx=reduce)
        self.log("of_this_rank", value, on_step=True, on_epoch=True)
        self.mean(value)
        self.log("object", self.mean, on_step=False, on_epoch=True)
        return self.layer(batch[0]).sum()

    def validation_step(self, batch, batch_idx):
        self.log("v", float(self.global_rank), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2)
logger = Rows()
trainer = Trainer(strategy="ddp", accelerator="cpu", devices=2, max_epochs=1, logger=logger, log_every_n_steps=2,
                  enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False)
model = Model()
trainer.fit(model, data, data)
told = {"metrics": {name: value.item() for name, value in trainer.callback_metrics.items()}, "rows": logger.rows,
        "results": trainer.validate(model, data, verbose=False)}
open(f"told-{trainer.global_rank}.json", "w").write(json.dumps(told))
"""


def test_metrics_of_lightnings_trainer_are_reduced_over_ranks_as_lightning_does(tmp_path: Path) -> None:
    found = []
    for name in ("lightning.pytorch", "hookline.interop.lightning"):
        folder = tmp_path / name
        folder.mkdir()
        outcome = torchrun(
            METRICS.replace("KIND", f"from {name} import Trainer"), folder, deadline=300, **IMPORTED
        )
        assert outcome.code == 0, outcome.output
        found.append([json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)])
    (theirs, theirs_1), (ours, ours_1) = found
    assert ours["metrics"] == theirs["metrics"] and ours_1["metrics"] == theirs_1["metrics"]
    assert ours["rows"] == theirs["rows"]
    assert ours["results"] == theirs["results"] and ours_1["results"] == theirs_1["results"]


FILES = (
    SCRIPT.partition("stop, keep =")[0].replace(
        "Linear(4, 2)", "Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.4))"
    )
    + """
import torch.distributed as dist
from hookline.interop.lightning import Trainer

def fit(seed, ckpt_path=None, folder="kept"):
    torch.manual_seed(0)
    model = Model()
    pl.seed_everything(seed, verbose=False)
    keep = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=3)
    trainer = Trainer(callbacks=[keep], strategy="ddp", accelerator="cpu", devices=2, max_epochs=3, logger=False,
                      enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, DataLoader(data, batch_size=2, shuffle=True), DataLoader(data, batch_size=4), ckpt_path=ckpt_path)
    return trainer, model.layer[0].weight.flatten().tolist()

trainer, whole = fit(1)
names = sorted(os.listdir("kept"))
resumed = [fit(7, f"kept/{name}", "again")[1] for name in names]
found = {"names": names, "same": [each == whole for each in resumed]}
open(f"found-{trainer.global_rank}.json", "w").write(json.dumps(found))
"""
)


def test_two_ranks_write_one_file_and_resume_from_it_bit_exactly(tmp_path: Path) -> None:
    outcome = torchrun(FILES, tmp_path, deadline=300, **IMPORTED)
    assert outcome.code == 0, outcome.output
    zero, one = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    names = [f"epoch={epoch}-step={step}.ckpt" for epoch, step in ((0, 3), (1, 6), (2, 12), (2, 9))]
    assert zero == one == {"names": names, "same": [True] * 4}
    assert all(path.is_file() for path in (tmp_path / "kept").iterdir())
    ranks = torch.load(tmp_path / "kept" / names[0], weights_only=True)["hookline"]["ranks"]
    assert ranks[0] is None and "rng" in ranks[1]["structure"]
