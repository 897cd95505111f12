"""The blocks of the migration page that need Lightning run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch.utils.data import DataLoader

PAGE = (Path(__file__).parents[2] / "docs" / "migrating-lightning.md").read_text()
BLOCKS = re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


class Logs(BoringModel):
    """Lightning's demonstration model, which logs what the page monitors."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", BLOCKS, ids=["before", "after", "modules"])
def test_a_block_runs(block: str) -> None:
    loaders = [DataLoader(torch.randn(4, 32)) for _ in range(2)]  # type: ignore[arg-type]
    model = Logs()
    given = {
        "model": model,
        "train_loader": loaders[0],
        "val_loader": loaders[1],
        "lightning_model": model,
        "lightning_data": BoringDataModule(),
    }
    exec(block, given)
    assert (
        float(
            given["trainer"].callback_metrics["val_loss"]
            if "pytorch import Trainer" in block
            else given["trainer"].metrics["val_loss"]
        )
        > 0
    )  # type: ignore[attr-defined]
