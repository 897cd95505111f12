"""The code in the documents that needs other packages, run with them. The rest runs with the other documents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import pytest
import torch
import transformers
from accelerate import Accelerator
from interop.hosted import LightningNet, TransformersNet, samples
from interop.transformers.made import causal, tokenizer
from tiny import batches
from torch.nn.functional import mse_loss

import hookline
from hookline.hooks import EarlyStopping, GradientMonitor

pytestmark = pytest.mark.filterwarnings("default")
DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name in ("hosts", "migrating-transformers", "migrating-keras")
    for number, block in enumerate(
        re.findall(r"^```py\n(.*?)^```", (DOCS / f"{name}.md").read_text(), re.S | re.M)
    )
]


class Logs(LightningNet):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().validation_step(batch, batch_idx)
        self.log("val_loss", loss)
        return loss


def names() -> dict[str, Any]:
    """What the documents take for granted."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    keras_model = keras.Sequential([keras.layers.Dense(1)])
    keras_model.compile(loss="mse", optimizer="sgd")
    return {
        "Accelerator": lambda **options: Accelerator(cpu=True, **options),
        "hookline": hookline,
        "mse_loss": mse_loss,
        "GradientMonitor": GradientMonitor,
        "EarlyStopping": EarlyStopping,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": torch.utils.data.DataLoader(batches(4), batch_size=None),
        "val_loader": torch.utils.data.DataLoader(batches(1), batch_size=None),
        "lightning_model": Logs(),
        "hf_model": TransformersNet(),
        "dataset": samples(batches(2)),
        "keras_model": keras_model,
        "causal_lm": causal(),
        "tokenizer": (words := tokenizer()),
        "rows": [words("w1 w2 w3") for _ in range(8)],
        "xs": torch.randn(8, 4).numpy(),
        "ys": torch.randn(8, 1).numpy(),
        "hf_args": transformers.TrainingArguments(
            "out",
            num_train_epochs=1,
            eval_strategy="epoch",
            save_strategy="epoch",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
        ),
    }


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 8


@pytest.mark.parametrize("block", BLOCKS)
def test_the_code_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "a block of the documents", "exec"), names())
