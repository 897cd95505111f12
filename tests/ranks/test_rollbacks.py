"""Ranks that go back to a checkpoint together, and spikes that only one rank has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks.torchrun import torchrun
from thorough import some

WAYS = some(
    [
        ("ddp", "all ranks"),
        ("ddp", "one rank"),
        ("fsdp", "all ranks"),
        ("fsdp", "trainable"),
        ("fsdp", "async"),
    ],
    [("ddp", "trainable"), ("ddp", "async"), ("fsdp", "one rank")],
)
"""How ranks go back, by strategy."""

ROLLED_BACK = """
import json, os
from hookline import Hook
from ranks.checkpointed import Frozen, SaveAt, digest, train

class GoBack(Hook):
    def __init__(self, at, only, **request):
        self.at, self.only, self.request, self.asked = at, only, request, 0
        self.loaded = []
    def on_train_batch_end(self, trainer, batches_seen, rank):
        if batches_seen >= self.at and not self.asked and self.only in (None, rank):
            self.asked += 1
            trainer.roll_back(**self.request)
    def on_checkpoint_load(self, step, state):
        self.loaded.append([step, state.trainer._run.progress.position])

found = {}
cases = {"all ranks": (8, None, {}), "one rank": (7, 1, {}), "trainable": (8, None, {"make": Frozen, "checkpoint": {"weights": "trainable"}}),
         "async": (10, None, {"checkpoint": "async"})}
for strategy, name in WAYS:
    at, only, options = cases[name]
    folder = f"{strategy}-{name}".replace(" ", "-")
    options = {"accumulate_grad_batches": 3, **options}
    goes = GoBack(at, only, to=f"{folder}/checkpoints/batch-4", reason="try")
    here = digest(*train(folder, strategy, SaveAt(4), hooks=[goes], **options))
    there = digest(*train(f"{folder}-again", strategy, SaveAt(), resume=f"{folder}/checkpoints/batch-4", **options))
    found[f"{strategy} {name}"] = {"here": here, "there": there, "loaded": goes.loaded}
json.dump(found, open(f"found-{os.environ['RANK']}.json", "w"))
"""

SPIKED = """
import json, os
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from hookline import Hook, Module, Trainer
from hookline.hooks import ModelCheckpoint, SpikeGuard

RANK = int(os.environ["RANK"])

class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 8)
        self.last = torch.nn.Linear(8, 1)
    def forward(self, x):
        return self.last(torch.tanh(self.layer(x)))
    def training_step(self, batch):
        return F.mse_loss(self(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

def data(*bad):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(104, 4, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    for batch in bad:  # of each four samples, the odd ones are of rank one
        targets[4 * batch + 1] = 1e3
    return DataLoader(TensorDataset(inputs, targets), 2)

class Seen(Hook):
    def __init__(self):
        self.batches, self.losses = [], []
    def on_train_batch_end(self, batch_idx, loss):
        self.batches.append(batch_idx)
        self.losses.append(loss)
    def state_dict(self):
        return {"batches": list(self.batches), "losses": list(self.losses)}
    def load_state_dict(self, state):
        self.batches, self.losses = list(state["batches"]), list(state["losses"])

def weights(trainer):
    return [(each.full_tensor() if hasattr(each, "full_tensor") else each).flatten().tolist() for each in trainer.module.parameters()]

found = {}
for strategy in ("ddp", "fsdp"):
    for action, options in (("report", {}), ("skip", {}), ("skip", {"monitor": "grad_norm"}), ("rollback", {})):
        for windows in (1, 2):
            guard, seen = SpikeGuard(action, window=8, patience=1, **options), Seen()
            name = "-".join([strategy, action, options.get("monitor", "loss"), str(windows)])
            trainer = Trainer(max_epochs=1, seed=3, strategy=strategy, device="cpu", run_dir=name, logger=False, enable_progress_bar=False,
                              log_every_n_steps=3, accumulate_grad_batches=windows, gradient_clip_val=5.0 if windows == 2 else None,
                              hooks=[seen, guard, ModelCheckpoint(every_n_train_steps=4 if action == "rollback" else 12, save_top_k=-1)])
            trainer.fit(Net(), data(20))
            found[name] = {"guard": guard.state_dict(), "seen": seen.batches, "weights": weights(trainer), "step": trainer.global_step,
                           "own": max(seen.losses[20:]), "hooks": trainer.hooks.list_hooks(), "steers": trainer._last.boundary.waits_for_signals}
json.dump(found, open(f"spiked-{RANK}.json", "w"))
"""


def run(source: str, name: str, folder: Path) -> list[dict[str, Any]]:
    outcome = torchrun(source, folder)
    assert outcome.code == 0, outcome.output
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(f"WAYS = {WAYS!r}\n{ROLLED_BACK}", "found", tmp_path_factory.mktemp("rolled_back"))


@pytest.fixture(scope="module")
def spiked(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(SPIKED, "spiked", tmp_path_factory.mktemp("spiked"))


@pytest.mark.parametrize(("strategy", "name"), WAYS)
def test_ranks_that_go_back_are_as_new_ones_that_resume(
    rolled_back: list[dict[str, Any]], strategy: str, name: str
) -> None:
    for found in rolled_back:
        assert found[f"{strategy} {name}"]["here"] == found[f"{strategy} {name}"]["there"]
        assert found[f"{strategy} {name}"]["loaded"] == [[1, 4]]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("windows", [1, 2])
@pytest.mark.parametrize("action", ["report-loss", "skip-loss", "skip-grad_norm", "rollback-loss"])
def test_ranks_decide_alike_on_a_spike_of_one_rank(
    spiked: list[dict[str, Any]], strategy: str, action: str, windows: int
) -> None:
    zero, one = (each[f"{strategy}-{action}-{windows}"] for each in spiked)
    assert zero["guard"]["recent"] == one["guard"]["recent"]
    assert zero["guard"] == one["guard"]
    assert zero["weights"] == one["weights"]
    assert zero["own"] < 1e4 < one["own"] or action == "rollback-loss"  # only rank one had it
    assert zero["guard"]["spikes"] >= 1
    updates = 26 // windows
    assert zero["step"] == one["step"] == (updates if action.startswith("report") else updates - 1)
    if action == "rollback-loss":
        first = 20 // windows * windows
        left_out = [*range(first, first + windows)]
        assert zero["guard"]["left_out"] == [[0, left_out[0], left_out[-1]]]
        assert zero["seen"] == one["seen"] == [each for each in range(26) if each not in left_out]
        assert zero["guard"]["rollbacks"] == 1
    assert zero["hooks"] == ["seen", "spike_guard", "model_checkpoint"]
    assert zero["steers"] is False  # ranks wait for each other before a batch only while some are left out
