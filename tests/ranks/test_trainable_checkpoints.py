"""Checkpoints of trainable weights on several ranks: exact, small, with one fingerprint for every strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.checkpointed import Frozen, digest, train
from ranks.torchrun import torchrun

from hookline import load_weights
from hookline.checkpoint.files import read, read_manifest

STRATEGIES = ("ddp", "fsdp")
TRAINABLE = {"weights": "trainable"}
HELD = {"head.weight", "head.bias", "again.weight", "again.bias", "gain"}
STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}

SCRIPT = """
import json, os
from torch.utils.data import DataLoader
from hookline import Trainer
from ranks.checkpointed import Frozen, Noisy, SaveAt, digest, train

rank, found = int(os.environ["RANK"]), {}

class Other(Frozen):
    def __init__(self):
        super().__init__()
        self.layers[1].bias.data += 1

class OtherOnRankOne(Frozen):
    def __init__(self):
        super().__init__()
        self.layers[1].bias.data += rank

def problem(act):
    try:
        act()
    except Exception as error:
        return str(error)

options = {"make": Frozen, "accumulate_grad_batches": 3, "checkpoint": {"weights": "trainable", "write": "async"}}
for strategy in ("ddp", "fsdp"):
    found[strategy] = told = {"whole": digest(*train(f"{strategy}-whole", strategy, **options))}
    train(f"{strategy}-cut", strategy, SaveAt(4, stop=True), **options)
    path = f"{strategy}-cut/checkpoints/batch-4"
    told["resumed"] = digest(*train(f"{strategy}-resumed", strategy, SaveAt(), resume=path, **options))
    other = options | {"make": Other}
    told["other base"] = problem(lambda: train(f"{strategy}-other", strategy, resume=path, **other))
    if strategy == "ddp":  # rank zero's weights reach the other ranks in a fit, but not in an evaluation
        one = options | {"make": OtherOnRankOne}
        told["other base on rank 1"] = digest(*train("ddp-one", strategy, SaveAt(), resume=path, **one))
        measures = Trainer(strategy="ddp", device="cpu", logger=False, enable_progress_bar=False, run_dir="measured")
        data = DataLoader(Noisy(8, noise=0.0), 2)
        told["evaluated"] = measures.validate(Frozen(), data, checkpoint="ddp-whole")["val/loss"]
        told["evaluated with another base on rank 1"] = problem(
            lambda: measures.validate(OtherOnRankOne(), data, checkpoint="ddp-whole")
        )
for strategy, source in (("ddp", "fsdp"), ("fsdp", "ddp")):
    path = f"{source}-cut/checkpoints/batch-4"
    trainer, _ = train(f"{strategy}-from-{source}", strategy, SaveAt(), resume=path, **options)
json.dump(found, open(f"found-{rank}.json", "w"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainable")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What each of two ranks found when it trained, cut, resumed and evaluated."""
    done = torchrun(SCRIPT, folder, deadline=300)
    assert done.code == 0, done.output
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_ends_with_the_same_bits_on_each_rank(found: Any, strategy: str) -> None:
    for rank in found:
        assert rank[strategy]["resumed"] == rank[strategy]["whole"]
    assert found[0][strategy]["whole"]["weights"] == found[1][strategy]["whole"]["weights"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_holds_what_trains_and_what_changes(found: Any, folder: Path, strategy: str) -> None:
    contents = read(folder / f"{strategy}-cut" / "checkpoints" / "batch-4")
    held = {name for name, each in contents["module"].items() if isinstance(each, torch.Tensor)}
    assert held == HELD | STATISTICS
    assert contents["hooks"]["weight_averaging"]["averages"].keys() <= held
    files = read_manifest(folder / f"{strategy}-cut" / "checkpoints" / "batch-4")["files"]
    assert ("rank-0.safetensors" in files) == (strategy == "fsdp")


def test_the_fingerprint_is_the_same_for_every_strategy_and_number_of_ranks(found: Any, folder: Path) -> None:
    train(str(folder / "single"), "single", make=Frozen, checkpoint=TRAINABLE, max_epochs=1)
    paths = [*folder.glob("*/checkpoints/batch-4"), *folder.glob("*-from-*/checkpoints/last")]
    fingerprints = {
        read_manifest(path)["base"] for path in [*paths, folder / "single" / "checkpoints" / "last"]
    }
    assert len(paths) == 4 and len(fingerprints) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_another_base_is_refused_on_all_ranks_with_both_fingerprints(
    found: Any, folder: Path, strategy: str
) -> None:
    base = read_manifest(folder / f"{strategy}-cut" / "checkpoints" / "batch-4")["base"]
    for rank in found:
        problem = rank[strategy]["other base"]
        assert f"the base model {base}, and Other was built on another base model, " in problem
        assert "1 of the 6 weights that are left out differ: layers.1.bias" in problem


def test_rank_zero_brings_the_base_to_the_other_ranks_in_a_fit_with_ddp(found: Any) -> None:
    for rank in found:
        assert rank["ddp"]["other base on rank 1"] == rank["ddp"]["whole"]


def test_an_evaluation_refuses_a_rank_with_another_base(found: Any) -> None:
    assert found[0]["ddp"]["evaluated"] == found[1]["ddp"]["evaluated"]
    for rank in found:
        assert "was built on another base model" in rank["ddp"]["evaluated with another base on rank 1"]


def test_one_process_continues_the_sharded_checkpoint_and_loads_its_weights(found: Any, folder: Path) -> None:
    path = folder / "fsdp-cut" / "checkpoints" / "batch-4"
    net = Frozen()
    report = load_weights(net, path, weights="raw")
    assert set(report.loaded) == HELD | STATISTICS and report.base == read_manifest(path)["base"]
    saved = read(path)["module"]
    assert all(torch.equal(net.state_dict()[name], saved[name]) for name in report.loaded)
    trainer, _ = train(str(folder / "one"), "single", make=Frozen, resume=path, accumulate_grad_batches=3)
    assert digest(trainer)["counters"]
    assert read_manifest(folder / "one" / "checkpoints" / "last").get("base") is None
