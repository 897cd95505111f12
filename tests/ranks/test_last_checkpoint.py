"""`checkpoints/last` of several ranks: written by all at the same batch, by rank zero's clock, and left alone by a failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.torchrun import torchrun
from tiny import Net

from hookline import load_weights
from hookline.checkpoint.files import read_manifest, verify

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
from tiny import Net, batches
from hookline import Hook, Trainer

rank = int(os.environ["RANK"])

class Clock(Hook):
    def __init__(self, *steps):
        self.steps, self.saved = steps, []

    def on_step_end(self, step, trainer):
        if step in self.steps and rank == 0:  # only its clock counts
            last = trainer._run.saves.last
            last._due = 0.0
            last._changed.set()
            while not trainer._run.participants.commands.waiting:
                time.sleep(0.001)

    def on_checkpoint_save(self, path, step, reason):
        self.saved.append([Path(path).name, step, reason])

class Fails(Hook):
    def on_train_batch_start(self, step):
        if step == 6 and rank == 1:
            raise RuntimeError("on purpose")

def train(run_dir, *hooks, **options):
    torch.manual_seed(1)
    net = Net()
    trainer = Trainer(run_dir=run_dir, strategy=sys.argv[1], device="cpu", logger=False, enable_progress_bar=rank == 0, max_epochs=1,
                      num_sanity_val_steps=0, hooks=hooks, **options)
    trainer.fit(net, batches(16))
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in net.parameters()]

found = {}
for how in ("sync", "async"):
    clock = Clock(3)
    weights = train(how, clock, checkpoint=how)
    found[how] = clock.saved
torch.save([each.detach() for each in weights], f"weights-{rank}.pt")
clock = Clock(3)
try:
    train("failed", clock, Fails())
except Exception as error:
    found["error"] = str(error)
found["failed"] = clock.saved
json.dump(found, open(f"found-{rank}.json", "w"))
os._exit(0)  # the ranks have parted
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_keep_it_by_the_clock_of_rank_zero_and_a_failure_leaves_the_one_before(
    tmp_path: Path, strategy: str
) -> None:
    done = torchrun(SCRIPT, tmp_path, strategy)
    found: list[dict[str, Any]] = [
        json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2)
    ]
    for each in found:
        for how in ("sync", "async"):
            (name, step, reason), *_, end = each[how]
            assert (name, reason) == ("last", "last") and 3 <= step <= 5  # at most two batches later
            assert end == ["last", 8, "last"]
    assert found[0]["sync"] == found[1]["sync"] and found[0]["failed"] == found[1]["failed"]
    for how in ("sync", "async"):
        verify(tmp_path / how / "checkpoints" / "last")
        load_weights(net := Net(), tmp_path / how / "checkpoints" / "last")
        for loaded, trained in zip(net.parameters(), torch.load(tmp_path / "weights-0.pt"), strict=True):
            assert torch.equal(loaded, trained)
    assert "on purpose" in found[1]["error"]
    assert read_manifest(tmp_path / "failed" / "checkpoints" / "last")["step"] == found[0]["failed"][0][1] < 6
    assert len(done.lines("Model: ")) == 2 and "Net.load_from_checkpoint(" in done.output
