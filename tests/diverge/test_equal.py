"""Runs that are equal are reported as equal: also resumed ones, with workers, and on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diverge.planted import Net, samples
from ranks.torchrun import torchrun
from tiny import quiet, shown
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hookline import Hook, OptionError, read_digests
from hookline.digests.diverge import diverge, diverge_attempts, diverge_ranks

EVERY: dict[str, Any] = {"digest": {"every": 1, "modules": True}}


class Saves(Hook):
    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.steps = steps

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step in self.steps:
            trainer.save_checkpoint(Path(trainer.run_dir) / "checkpoints" / f"step-{step}")


class Stops(Hook):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.at = step

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == self.at:
            raise RuntimeError("stopped")


class GoesBack(Hook):
    done = False

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 5 and not self.done:
            self.done = True
            trainer.roll_back(reason="a test")


def loader(workers: int = 0) -> Any:
    inputs, targets = (torch.cat(each) for each in zip(*samples(), strict=True))
    return DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True, num_workers=workers)


def train(folder: str, data: Any = None, resume: Any = None, net: type[Any] = Net, **options: Any) -> None:
    torch.manual_seed(3)
    given = {"seed": 1, "logger": True, "control": False, "max_epochs": 2, **EVERY, **options}
    quiet(run_dir=folder, **given).fit(net(), samples() if data is None else data, resume=resume)


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Recomputes(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class Sparse(Net):
    """A gradient that is a sparse tensor, and a parameter without one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.unused = nn.Embedding(4, 4, sparse=True), nn.Linear(1, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs + self.table(torch.tensor([0, 2, 2, 1]))[: len(inputs)])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Mapped(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch["inputs"], batch["labels"]), batch_idx)


PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"digest": "every 2 steps"}),
    ({}, {"digest": {"every": 3, "modules": True}, "audit": True}),
    ({}, {"trace": True, "log_every_n_steps": 1}),
    ({"accumulate_grad_batches": 2}, {"accumulate_grad_batches": 2}),
    ({"accumulate_grad_batches": 4, "max_epochs": 1}, {"accumulate_grad_batches": 4, "max_epochs": 2}),
    ({"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.1}),
    ({"nonfinite": "skip"}, {"nonfinite": "skip"}),
    ({"precision": "bf16-mixed"}, {"precision": "bf16-mixed"}),
    ({"precision": "bf16-true", "net": Manual}, {"precision": "bf16-true", "net": Manual}),
    ({"net": Sparse}, {"net": Sparse}),
    ({"net": Manual}, {"net": Manual}),
    ({"net": Recomputes}, {"net": Recomputes}),
    ({"data": loader()}, {"data": loader()}),
    ({"data": loader()}, {"data": loader(workers=1)}),
    ({"activation_checkpointing": "norm"}, {"activation_checkpointing": "norm"}),
    (
        {"net": Mapped, "data": [{"inputs": a, "labels": b, "names": ["x", "y"]} for a, b in samples()]},
        {"net": Mapped, "data": [{"inputs": a, "labels": b, "names": ["x", "y"]} for a, b in samples()]},
    ),
]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=[f"{n} {shown(b)}" for n, (_, b) in enumerate(PAIRS)])
def test_equal_runs_are_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    train("a", **one)
    train("b", **other)
    report = diverge("a", "b")
    assert report.is_equal and report.basis == "digests" and report.steps[0] == 1, report.text()


@pytest.mark.parametrize("digest", [{"every": 1, "modules": True}, "every 3 steps"], ids=str)
def test_a_resumed_run_writes_the_digests_of_one_that_was_not_interrupted(digest: Any) -> None:
    train("whole", loader(), digest=digest)
    with pytest.raises(RuntimeError, match="stopped"):
        train("broken", loader(), hooks=[Saves(4), Stops(8)], digest=digest)
    train("broken", loader(), hooks=[Saves(4)], resume="broken/checkpoints/step-4", digest=digest)
    whole, broken = read_digests("whole"), read_digests("broken")
    assert [each.from_step for each in broken.attempts] == [0, 4]
    assert whole.current.keys() == broken.current.keys()
    fields = ("random", "batches", "weights", "buffers", "state", "gradients", "used", "settings", "updated")
    for key, record in whole.current.items():
        assert {name: record.get(name) for name in fields} == {
            name: broken.current[key].get(name) for name in fields
        }
    assert diverge("whole", "broken").is_equal
    own = diverge_attempts("broken")
    assert own.is_equal and own.steps and own.steps[0] > 4, own.text()


def test_a_run_that_went_back_repeats_its_steps_and_keeps_both_attempts() -> None:
    train("whole")
    train("back", hooks=[Saves(3), GoesBack()])
    back = read_digests("back")
    assert [(each.from_step, each.about["in_run"]) for each in back.attempts] == [(0, False), (3, True)]
    assert {(4, 3), (5, 4)} <= back.attempts[0].digests.keys() & back.attempts[1].digests.keys()
    assert diverge("whole", "back").is_equal
    own = diverge_attempts("back")
    assert own.is_equal and own.steps == [4, 5]


RANKS = """
import sys, torch
from diverge.planted import Net, samples
from tiny import quiet
from hookline import Hook

class Nudges(Hook):
    def on_step_end(self, module, step, rank):
        if step == 3 and rank == 1:
            module.last.bias.data[0] += 1e-4

def train(folder, hooks=(), strategy="ddp"):
    torch.manual_seed(3)
    trainer = quiet(run_dir=folder, strategy=strategy, seed=1, logger=True, hooks=list(hooks), gradient_clip_val=0.1,
                    digest={"every": 1, "modules": True})
    trainer.fit(Net(), samples(12))

for folder, hooks in (("a", ()), ("b", ()), ("c", [Nudges()])):
    train(folder, hooks)
for folder in ("sharded", "again"):
    train(folder, strategy="fsdp")
"""


def test_two_ranks_are_equal_to_two_ranks_and_a_rank_that_drifts_is_found(tmp_path: Path) -> None:
    outcome = torchrun(RANKS, tmp_path)
    assert outcome.code == 0, outcome.output
    assert diverge(tmp_path / "a", tmp_path / "b").is_equal
    same = diverge_ranks(tmp_path / "a")
    assert same.is_equal and same.steps == [1, 2, 3, 4, 5, 6], same.text()
    drifted = diverge_ranks(tmp_path / "c")
    assert drifted.divergence is not None and drifted.names == ("rank 0", "rank 1")
    assert (drifted.divergence.step, drifted.divergence.first.kind) == (4, "weights")
    assert "in rank 1 last.bias changed" in drifted.divergence.first.text
    assert diverge(tmp_path / "sharded", tmp_path / "again").is_equal
    shards = [read_digests(tmp_path / "sharded", rank).current[2, 1] for rank in (0, 1)]
    assert shards[0]["weights"] != shards[1]["weights"]  # each rank digests its own shard
    with pytest.raises(OptionError, match="FSDP"):
        diverge_ranks(tmp_path / "sharded")
    other = diverge(tmp_path / "a", tmp_path / "c")
    assert other.divergence is not None and (other.divergence.step, other.rank) == (4, 1)
