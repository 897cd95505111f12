"""`ExportPretrained` with real models: `from_pretrained` reads what was trained, also after a kill and from ranks."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from interop.processes import IMPORTED, environment
from interop.transformers.made import batches, causal, logits, tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from ranks.torchrun import torchrun
from tiny import quiet
from transformers import AutoModelForCausalLM, AutoTokenizer

from hookline import Module, load_weights
from hookline.hooks import ExportPretrained, ModelCheckpoint, WeightAveraging


class Wrapped(Module):
    """A module of Hookline's around a model, beside another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Linear(1, 1)
        self.net = causal()

    def training_step(self, batch: Any) -> Any:
        return self.net(**batch)

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


def trained(model: Any, folder: Path, *hooks: Any, checkpoint: Any = True) -> None:
    """Train for two epochs; the best is the last, because the data are those of the training."""
    optimizer = (
        {} if isinstance(model, Wrapped) else {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}
    )
    kept = ModelCheckpoint(monitor="val/loss")
    trainer = quiet(
        max_epochs=2,
        run_dir=folder,
        checkpoint=checkpoint,
        hooks=[kept, ExportPretrained(tokenizer()), *hooks],
    )
    trainer.fit(model, batches(), batches(), **optimizer)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_export_gives_the_logits_of_the_trained_model(tied: bool, tmp_path: Path) -> None:
    model = causal(tied=tied)
    trained(model, tmp_path)
    for name in ("best", "last"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained" / name)
        assert torch.equal(logits(again), logits(model))
        assert again.config.tie_word_embeddings is tied
    words = AutoTokenizer.from_pretrained(tmp_path / "pretrained" / "last")
    assert words("w3 w4")["input_ids"] == tokenizer()("w3 w4")["input_ids"]


def test_a_model_inside_a_module_is_found_and_exported(tmp_path: Path) -> None:
    module = Wrapped()
    trained(module, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained" / "last")
    assert torch.equal(logits(again), logits(module.net))


def test_averaged_weights_are_exported_where_evaluations_use_them(tmp_path: Path) -> None:
    model, averaged = causal(), causal(1)
    trained(model, tmp_path, WeightAveraging(decay=0.5))
    load_weights(averaged, tmp_path / "checkpoints" / "last")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained" / "last")
    assert torch.equal(logits(again), logits(averaged))
    assert not torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("weights", ["all", "trainable"])
def test_of_a_peft_model_the_adapter_is_exported(weights: str, tmp_path: Path) -> None:
    model = get_peft_model(causal(), LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1))
    trained(model, tmp_path, checkpoint={"weights": weights})
    for name in ("best", "last"):
        folder = tmp_path / "pretrained" / name
        assert not (folder / "model.safetensors").exists()
        again = PeftModel.from_pretrained(causal(), folder)
        assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(model), logits(causal()))


def test_frozen_weights_that_checkpoints_leave_out_are_in_the_export(tmp_path: Path) -> None:
    model = causal()
    model.model.embed_tokens.requires_grad_(False)
    trained(model, tmp_path, checkpoint={"weights": "trainable"})
    kept = json.loads((tmp_path / "checkpoints" / "last" / "manifest.json").read_text())
    assert kept["base"], "the checkpoint has all weights, so this shows nothing"
    for name in ("best", "last"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained" / name)
        assert torch.equal(logits(again), logits(model))


# ---- killed and resumed ------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
import torch
from interop.processes import IMPORTED, environment
from interop.transformers.made import batches, causal, tokenizer
from hookline import Hook
from hookline.hooks import ExportPretrained, ModelCheckpoint
from tiny import quiet

folder, at = sys.argv[1], sys.argv[2]

class Dies(Hook):
    def on_train_batch_end(self, batches_seen):
        if at == "batch" and batches_seen == 6:
            os.kill(os.getpid(), signal.SIGKILL)

class Words(type(tokenizer())):
    def save_pretrained(self, path, **options):
        super().save_pretrained(path, **options)
        if at == "export" and "best" in str(path) and os.path.exists(f"{folder}/pretrained/best"):
            os.kill(os.getpid(), signal.SIGKILL)

words = tokenizer()
words.__class__ = Words
model = causal()
torch.manual_seed(0 if at else 5)
hooks = [Dies(), ModelCheckpoint(monitor="val/loss"), ExportPretrained(words)]
trainer = quiet(max_epochs=3, run_dir=folder, checkpoint={"last": True}, hooks=hooks, seed=4)
trainer.fit(model, batches(), batches(), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), resume="auto")
print("STEP", trainer.global_step)
"""


def digest(folder: Path) -> dict[str, str]:
    """The bytes of the exports, without the record of their checkpoint, which has a time in it."""
    files = [each for each in sorted(folder.rglob("*")) if each.is_file() and each.name != "hookline.json"]
    return {str(each.relative_to(folder)): hashlib.sha256(each.read_bytes()).hexdigest() for each in files}


def test_a_run_that_was_killed_and_resumed_exports_the_same_files_bit_for_bit(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)

    def life(folder: str, at: str = "") -> Any:
        return preloaded.run(
            [sys.executable, str(script), str(tmp_path / folder), at],
            env=environment(),
            capture_output=True,
            text=True,
        )

    whole = life("whole", "never")
    assert whole.returncode == 0, whole.stderr
    expected = digest(tmp_path / "whole" / "pretrained")
    assert {"best/model.safetensors", "last/model.safetensors", "last/tokenizer.json"} <= set(expected)
    for at in ("batch", "export"):
        killed = life(at, at)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        AutoModelForCausalLM.from_pretrained(tmp_path / at / "pretrained" / "best")  # the first best, whole
        left = [each.name for each in (tmp_path / at / "pretrained").iterdir()]
        assert ("best" in left) and (len(left) == 2) is (at == "export")
        resumed = life(at)
        assert resumed.returncode == 0, resumed.stderr
        assert "STEP 12" in resumed.stdout
        assert digest(tmp_path / at / "pretrained") == expected


# ---- on two ranks ------------------------------------------------------------------------------------------

RANKS = """
import json, os
import torch
from interop.processes import IMPORTED, environment
from interop.transformers.made import batches, causal, logits
from hookline import load_weights
from hookline.hooks import ExportPretrained, ModelCheckpoint
from tiny import quiet
from transformers import AutoModelForCausalLM

found = {}

def train(name, strategy, reentrant=None, weights="all"):
    model = causal()
    if weights == "trainable":
        model.model.embed_tokens.requires_grad_(False)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    hooks = [ModelCheckpoint(monitor="val/loss"), ExportPretrained()]
    trainer = quiet(strategy=strategy, run_dir=name, checkpoint={"weights": weights}, hooks=hooks, seed=2)
    trainer.fit(model, batches(), batches(), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    found[name] = trainer.metrics["train/loss"], trainer.metrics["val/loss"]

train("ddp", "ddp")
train("ddp-reentrant", "ddp", True)
train("ddp-checkpointing", "ddp", False)
train("fsdp", "fsdp")
train("fsdp-checkpointing", "fsdp", False)
try:
    train("fsdp-trainable", "fsdp", weights="trainable")
except Exception as error:  # rank one fails because rank zero did
    found["refused"] = str(error)
if os.environ["RANK"] == "0":
    for name in ("ddp", "fsdp"):
        kept = causal(1)
        load_weights(kept, f"{name}/checkpoints/last")
        found[f"{name} export"] = [
            torch.equal(logits(AutoModelForCausalLM.from_pretrained(f"{name}/pretrained/{each}")), logits(kept))
            for each in ("best", "last")
        ]
    print("RESULT", json.dumps(found), flush=True)
"""


def test_two_ranks_train_with_gradient_checkpointing_and_export_whole_weights(tmp_path: Path) -> None:
    outcome = torchrun(RANKS, tmp_path, deadline=500, **IMPORTED)
    assert outcome.code == 0, outcome.output
    found = json.loads(outcome.lines("RESULT")[0])
    assert found["ddp export"] == found["fsdp export"] == [True, True]
    for name in ("ddp-reentrant", "ddp-checkpointing"):
        assert found[name] == pytest.approx(found["ddp"], rel=1e-5)
    assert found["fsdp-checkpointing"] == pytest.approx(found["fsdp"], rel=1e-5)
    assert "Pass weights='all'" in found["refused"]
