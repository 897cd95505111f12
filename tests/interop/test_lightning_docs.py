"""The blocks of the migration page that need Lightning run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import preloaded
import pytest
import torch
from interop.processes import environment
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch.utils.data import DataLoader

import hookline as library

PAGE = (Path(__file__).parents[2] / "docs" / "migrating-lightning.md").read_text()
BLOCKS = re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


class Logs(BoringModel):
    """Lightning's demonstration model, which logs what the page monitors."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", BLOCKS[:3], ids=["before", "after", "modules"])
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


@pytest.mark.filterwarnings("ignore")
def test_a_directory_becomes_a_file_of_lightning_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep = pl.callbacks.ModelCheckpoint("kept", filename="best")
    library.Trainer(max_epochs=1, hooks=[keep], logger=False, enable_progress_bar=False).fit(Logs())
    assert Path("kept/best.ckpt").is_dir()
    given: dict[str, Any] = {"hookline": library, "pl": pl, "MyModel": Logs}
    exec(BLOCKS[3], given)
    found = Logs.load_from_checkpoint("best.ckpt")
    assert torch.equal(found.layer.weight, given["model"].layer.weight)


PROGRAM = re.findall(r"^```python-lightning\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
CLI_FILE = re.findall(r"^```yaml\n(seed_everything.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
ENDS_WITH = re.findall(r"^best: .*$", PAGE, re.MULTILINE)


def hookline(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "hookline", *arguments)


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program that imports Lightning itself."""
    options: Any = {"capture_output": True, "text": True, "timeout": 300, "check": True}
    return preloaded.run([sys.executable, *words], cwd=folder, env=environment(), **options)


def test_the_program_gives_the_numbers_of_the_page_without_a_change(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    assert len(PROGRAM.splitlines()) > 80 and len(set(ENDS_WITH)) == 1
    done = hookline(tmp_path, "run", "--as", "lightning", "train.py")
    theirs = python(tmp_path, "train.py")
    assert done.stdout.splitlines()[-1] == theirs.stdout.splitlines()[-1]
    assert done.stdout.splitlines()[-1].startswith("best: 0.9") and "model_checkpoint" in done.stderr
    ours, written = (
        {path.name for path in (tmp_path / "runs" / "spirals" / version / "checkpoints").iterdir()}
        for version in ("version_0", "version_1")
    )
    assert ours == written


def test_the_file_of_lightning_cli_is_converted_and_trains(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "lightning.yaml").write_text(CLI_FILE)
    said = hookline(tmp_path, "convert", "lightning.yaml").stdout
    assert "Next: hookline fit lightning.hookline.yaml --allow lightning" in said
    done = hookline(
        tmp_path, "fit", "lightning.hookline.yaml", "--allow", "lightning", "--trainer.max_epochs", "2"
    )
    assert "val_accuracy" in done.stdout + done.stderr
