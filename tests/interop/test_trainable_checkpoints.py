"""A LoRA adapter of peft on a transformers model: checkpoints of trainable weights, a killed run, another base."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
from interop.processes import environment

from hookline.checkpoint.files import read, read_manifest

SCRIPT = """
import hashlib, json, os, signal, sys
from pathlib import Path
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel
from hookline import CheckpointError, Hook, Module, Trainer, load_weights
from hookline.hooks import ModelCheckpoint, WeightAveraging
from hookline.loggers import read_log

class Adapter(Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)  # stands for from_pretrained, which gives the same weights every time
        base = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=128, vocab_size=2000, n_positions=32))
        torch.seed()  # peft draws the weights of the adapter: another process has others
        self.model = get_peft_model(base, LoraConfig(r=2, lora_dropout=0.2, target_modules=["c_attn"], fan_in_fan_out=True))

    def training_step(self, batch):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.01)

class Killed(Hook):
    def on_train_batch_end(self, step):
        if step == 8:
            os.kill(os.getpid(), signal.SIGKILL)

class Merges(Hook):
    def on_train_end(self, module):
        module.model.merge_adapter()

def data():
    return DataLoader(torch.randint(2000, (20, 8), generator=torch.Generator().manual_seed(0)), 2, shuffle=True)

def train(name, *hooks, module=None, resume=None, weights="trainable"):
    torch.manual_seed(1)
    saves = ModelCheckpoint(every_n_train_steps=3, save_top_k=-1, filename="{step}", weights=weights)
    trainer = Trainer(
        max_epochs=2, seed=4, device="cpu", run_dir=name, log_every_n_steps=1, enable_progress_bar=False,
        hooks=[saves, WeightAveraging(decay=0.9), *hooks], checkpoint={"weights": weights},
    )
    module = Adapter() if module is None else module
    trainer.fit(module, data(), resume=resume)
    return module

def digest(module):
    weights = {name: each.detach().numpy().tobytes() for name, each in module.state_dict().items()}
    return {name: hashlib.sha256(each).hexdigest() for name, each in weights.items()}

def problem(act):
    try:
        act()
    except CheckpointError as error:
        return str(error)

def losses(name):
    rows = [row for row in read_log(Path(name)) if row["type"] == "metrics" and row["over"] == "step"]
    return [[row["step"], row["metrics"]["loss"]] for row in rows]

if sys.argv[1] == "start":
    first = Adapter()
    torch.save({name: each for name, each in first.state_dict().items() if "lora" in name}, "adapter.pt")
    train("cut", Killed(), module=first)
else:
    found = {"resumed": digest(train("cut", resume="auto"))}
    whole = Adapter()
    whole.load_state_dict(torch.load("adapter.pt", weights_only=True), strict=False)
    found["whole"] = digest(train("whole", module=whole))
    found["losses"] = {name: losses(name) for name in ("cut", "whole")}
    found["other base"] = problem(lambda: train("other", module=Adapter(seed=1), resume="cut/checkpoints/last"))
    found["loaded into another base"] = problem(lambda: load_weights(Adapter(seed=1), "whole"))
    loaded = Adapter()
    load_weights(loaded, "whole", weights="raw")
    found["loaded"] = digest(loaded)
    train("all", weights="all")
    train("merged", Merges())
    json.dump(found, open("found.json", "w"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed by SIGKILL and resumed by another process, which also trains without a kill."""
    folder = tmp_path_factory.mktemp("lora")
    (folder / "script.py").write_text(SCRIPT)
    for stage, code in (("start", -signal.SIGKILL), ("resume", 0)):
        done = preloaded.run(
            [sys.executable, "script.py", stage],
            cwd=folder,
            env=environment(TRANSFORMERS_VERBOSITY="error"),
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Any:
    return json.loads((folder / "found.json").read_text())


def size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.iterdir())


def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(found: Any) -> None:
    assert found["resumed"] == found["whole"]
    assert found["losses"]["cut"] == found["losses"]["whole"]
    assert [step for step, _ in found["losses"]["whole"]] == list(range(1, 21))


def test_a_checkpoint_is_a_small_part_of_a_full_one(folder: Path, found: Any) -> None:
    small, full = (folder / name / "checkpoints" / "last" for name in ("whole", "all"))
    assert size(small) < size(full) / 20
    held = [name for name, each in read(small)["module"].items() if hasattr(each, "numel")]
    assert len(held) == 4 and all("lora_" in name for name in held)
    assert read_manifest(small)["base"] and "base" not in read_manifest(full)


def test_another_base_is_refused_with_both_fingerprints(folder: Path, found: Any) -> None:
    base = read_manifest(folder / "whole" / "checkpoints" / "last")["base"]
    for name in ("other base", "loaded into another base"):
        text = f"holds only the trainable weights of the base model {base}, and Adapter was built on another base model, "
        assert text in found[name]
        other = found[name].partition("another base model, ")[2][:32]
        assert len(other) == 32 and other != base


def test_weights_are_loaded_into_a_model_that_was_built_again(found: Any) -> None:
    assert found["loaded"] == found["whole"]


def test_an_adapter_that_is_merged_into_the_base_brings_the_changed_weights_along(
    folder: Path, found: Any
) -> None:
    weights = read(folder / "merged" / "checkpoints" / "last")["module"]
    held = {name for name, each in weights.items() if hasattr(each, "numel")}
    assert {name for name in held if "lora_" not in name} == {
        f"model.base_model.model.transformer.h.{layer}.attn.c_attn.base_layer.weight" for layer in range(2)
    }
