"""Checkpoints of several ranks: exact at the same number of them, and read by any other."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.checkpointed import Net, SaveAt, digest, train
from ranks.torchrun import torchrun
from thorough import some

from hookline import CheckpointError, Hook, load_weights
from hookline.checkpoint.export import export_weights
from hookline.checkpoint.files import read, read_manifest, verify
from hookline.cli import main

STRATEGIES = ("ddp", "fsdp")
PARTS = {"weights", "buffers", "optimizer", "metrics", "counters", "random", "seen", "scale", "averages"}
OTHERS = some(["accelerate", "hsdp", "ddp 16-mixed"], ["fsdp bf16-mixed"])

TRAINED = """
import json, os
import torch
from hookline import FSDP
from ranks.checkpointed import ByHand, Net, SaveAt, digest, train

found = {}
for strategy in ("ddp", "fsdp"):
    options = {"accumulate_grad_batches": 3}
    at = {name: f"{strategy}-{name}" for name in ("whole", "cut", "async")}
    found[strategy] = told = {"whole": digest(*train(at["whole"], strategy, **options))}
    cut = train(at["cut"], strategy, SaveAt(4, stop=True), **options)
    told["cut"] = digest(*cut)
    path = f"{at['cut']}/checkpoints/batch-4"
    told["resumed"] = digest(*train(at["cut"], strategy, SaveAt(), resume=path, **options))
    saves = SaveAt(3, 5, 9)
    told["async"] = digest(*train(at["async"], strategy, saves, save="async", **options))
    told["told"] = saves.told
    path = f"{at['async']}/checkpoints/batch-5"
    told["async resumed"] = digest(*train(at["async"], strategy, SaveAt(), resume=path, save="async", **options))
    told["cut samples"] = cut[1].samples()

class Layered(Net):  # torch has no batch norm of mixed types
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(7)

others = {"accelerate": {"strategy": "accelerate"}, "hsdp": {"strategy": FSDP(device="cpu", replicas=2), "device": "auto"},
          "ddp 16-mixed": {"strategy": "ddp", "precision": "16-mixed"},
          "fsdp bf16-mixed": {"strategy": "fsdp", "precision": "bf16-mixed", "make": Layered}}
BY_HAND = {f"{each} by hand": {"strategy": each, "make": ByHand, "accumulate_grad_batches": 1} for each in ("ddp", "fsdp")}
for name, options in [*((each, others[each]) for each in OTHERS), *BY_HAND.items()]:
    options = {"accumulate_grad_batches": 3, "run_dir": name, **options}
    found[name] = {"whole": digest(*train(hooks=[SaveAt(4)], **options))}
    found[name]["resumed"] = digest(*train(hooks=[SaveAt()], resume=f"{name}/checkpoints/batch-4", **options))
json.dump(found, open(f"trained-{os.environ['RANK']}.json", "w"))
"""

READ = """
import json, logging, os, time
from collections.abc import Iterator
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from hookline import Hook, Trainer, load_weights
from hookline.checkpoint.background import BackgroundSaver
from hookline.training import saving
from ranks.checkpointed import Net, Noisy, SaveAt, digest, train

rank, found, logged = int(os.environ["RANK"]), {}, []

class Lines(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())

class AtStart(Hook):
    def on_train_start(self, trainer):
        self.digest = digest(trainer)

def problem(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

class Unstorable(Hook):
    def state_dict(self):
        return {"value": object() if rank == 1 else 1}

logging.getLogger("hookline").addHandler(Lines())
for strategy in ("ddp", "fsdp"):
    found[strategy] = told = {}
    other = f"{'ddp' if strategy == 'fsdp' else 'fsdp'}-cut/checkpoints/batch-4"
    for name, source in {"single": "single/checkpoints/start", "other": other, "one": "one/checkpoints/batch-5"}.items():
        start = AtStart()
        trainer, record = train(f"{strategy}-from-{name}", strategy, start, resume=source, accumulate_grad_batches=3)
        told[name] = start.digest
        told[f"{name} samples"] = record.samples()
    told["unstorable"] = problem(lambda: train(f"{strategy}-unstorable", strategy, SaveAt(2), Unstorable(), max_epochs=1))
    told["left"] = os.listdir(f"{strategy}-unstorable/checkpoints") if Path(f"{strategy}-unstorable/checkpoints").exists() else []

    folder = f"{strategy}-async/checkpoints"
    if rank == 0:
        newest = Path(folder, "batch-9", "rank-1.safetensors")
        data = bytearray(newest.read_bytes())
        data[-3] ^= 1
        newest.write_bytes(data)
        os.rename(f"{folder}/last", f"{strategy}-last")  # the state that the run ended with is newer
    torch.distributed.barrier()
    told["damaged"] = problem(lambda: train(f"{strategy}-damaged", strategy, resume=f"{folder}/batch-9"))
    logged.clear()
    start = AtStart()
    train(f"{strategy}-async", strategy, start, resume="auto", accumulate_grad_batches=3, max_epochs=3)
    told["passed over"] = list(logged)
    told["auto"] = start.digest

    measures = Trainer(strategy=strategy, device="cpu", logger=False, enable_progress_bar=False, run_dir=f"{strategy}-measured")
    metrics = measures.validate(Net(), DataLoader(Noisy(8, noise=0.0), 2), checkpoint=f"{strategy}-cut/checkpoints/batch-4")
    told["validated"], told["validated weights"] = metrics["val/loss"], digest(measures)["weights"]
    told["loaded"] = load_weights(measures.state.module, f"{strategy}-cut/checkpoints/batch-4").complete
    told["loaded weights"] = digest(measures)["weights"]

class Uneven(BackgroundSaver):  # rank zero hears of what is written before the next save point, the other long after
    def start(self, contents, path, about, on_done, staging=None):
        def tell(error):
            time.sleep(0.3 * rank)
            on_done(error)
        super().start(contents, path, about, tell, staging)
        if rank == 0:
            self.wait()

saving.BackgroundSaver, saves = Uneven, SaveAt(2, 4)
train("uneven", "ddp", saves, save="async", max_epochs=1)
found["uneven"] = saves.told
json.dump(found, open(f"read-{rank}.json", "w"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def trained(folder: Path) -> list[dict[str, Any]]:
    """What each of two ranks found when it trained, cut and resumed."""
    return launched(f"OTHERS = {OTHERS!r}\n{TRAINED}", folder, "trained")


@contextlib.contextmanager
def warnings_of_hookline() -> Iterator[list[str]]:
    """The text of the warnings, for a fixture of the module, which cannot use caplog."""
    texts: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        texts.append(record.getMessage())
        return True

    logger = logging.getLogger("hookline")
    logger.addFilter(note)
    try:
        yield texts
    finally:
        logger.removeFilter(note)


@pytest.fixture(scope="module")
def single(folder: Path, trained: Any) -> dict[str, Any]:
    """One process continues from the FSDP checkpoint of two, saves what it begins with, and trains to the end; another starts anew."""

    class Start(Hook):
        def on_train_start(self, trainer: Any) -> None:
            found.update(digest(trainer))
            trainer.save_checkpoint(folder / "single" / "checkpoints" / "start")

    found: dict[str, Any] = {}
    source = folder / "fsdp-cut" / "checkpoints" / "batch-4"
    with warnings_of_hookline() as found["warnings"]:
        found["samples"] = train(
            str(folder / "single"), "single", Start(), resume=source, accumulate_grad_batches=3
        )[1].samples()
    found["one"] = train(str(folder / "one"), "single", SaveAt(5, stop=True), accumulate_grad_batches=3)[
        1
    ].samples()
    return found


@pytest.fixture(scope="module")
def read_again(folder: Path, single: Any) -> list[dict[str, Any]]:
    """What each of two ranks found when they read checkpoints of other kinds, and damaged ones."""
    return launched(READ, folder, "read")


def launched(source: str, folder: Path, name: str) -> list[dict[str, Any]]:
    done = torchrun(source, folder, deadline=300)
    assert done.code == 0, done.output
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_cut_inside_an_accumulation_window_ends_with_the_same_bits_on_each_rank(
    trained: Any, strategy: str
) -> None:
    for rank in trained:
        assert set(rank[strategy]["whole"]) == PARTS
        assert rank[strategy]["resumed"] == rank[strategy]["whole"]
    assert trained[0][strategy]["whole"]["random"] != trained[1][strategy]["whole"]["random"]
    assert trained[0][strategy]["whole"]["seen"] != trained[1][strategy]["whole"]["seen"]
    assert trained[0][strategy]["whole"]["weights"] == trained[1][strategy]["whole"]["weights"]


@pytest.mark.parametrize("name", [*OTHERS, "ddp by hand", "fsdp by hand"])
def test_other_ways_to_run_resume_exactly_too(trained: Any, name: str) -> None:
    for rank in trained:
        assert rank[name]["resumed"] == rank[name]["whole"]


def test_of_copies_of_shards_one_is_written(folder: Path, trained: Any) -> None:
    path = folder / "hsdp" / "checkpoints" / "batch-4"
    of_ranks = [json.loads((path / f"rank-{rank}.json").read_text())["shards"] for rank in range(2)]
    assert "module.layers.0.weight" in of_ranks[0] and not of_ranks[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_asynchronous_saves_change_nothing_and_resume_exactly(trained: Any, strategy: str) -> None:
    for rank in trained:
        assert rank[strategy]["async"] == rank[strategy]["whole"]
        assert rank[strategy]["async resumed"] == rank[strategy]["whole"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_hears_of_an_asynchronous_save_at_the_same_batch(trained: Any, strategy: str) -> None:
    told = trained[0][strategy]["told"]
    assert [name for name, _ in told] == ["batch-3", "batch-5", "batch-9", "last"]
    assert trained[1][strategy]["told"] == told


def test_a_rank_that_is_late_to_hear_of_its_own_part_hears_at_the_same_batch(read_again: Any) -> None:
    assert [name for name, _ in read_again[0]["uneven"]] == ["batch-2", "batch-4", "last"]
    assert read_again[0]["uneven"] == read_again[1]["uneven"]


def test_each_rank_writes_its_own_shards_and_what_differs_from_rank_zero(folder: Path, trained: Any) -> None:
    manifest = read_manifest(folder / "fsdp-cut" / "checkpoints" / "batch-4")
    assert manifest["world_size"] == 2
    shards = {
        name: facts["bytes"] for name, facts in manifest["files"].items() if name.endswith(".safetensors")
    }
    assert (
        min(shards["rank-0.safetensors"], shards["rank-1.safetensors"]) > 2 * shards["model.safetensors"]
    )  # only buffers there
    assert manifest["shared"]["again.weight"] == "head.weight"
    of_ddp = read_manifest(folder / "ddp-cut" / "checkpoints" / "batch-4")
    assert [name for name in of_ddp["files"] if name.startswith("rank-")] == [
        "rank-1.json",
        "rank-1.safetensors",
    ]
    own = json.loads((folder / "ddp-cut" / "checkpoints" / "batch-4" / "rank-1.json").read_text())["own"]
    assert {"rng", "window", "hooks/record", "module buffers"} <= set(own)
    assert "counters" not in own and "schedulers" not in own


def test_no_file_of_a_checkpoint_is_a_pickle(folder: Path, trained: Any) -> None:
    for path in (folder / "fsdp-cut" / "checkpoints" / "batch-4").iterdir():
        data = path.read_bytes()
        if path.suffix == ".json":
            json.loads(data)
        else:
            assert path.suffix == ".safetensors" and json.loads(
                data[8 : 8 + int.from_bytes(data[:8], "little")]
            )


def test_one_process_reads_the_shards_of_two_as_whole_tensors(
    folder: Path, trained: Any, single: Any
) -> None:
    for part in ("weights", "optimizer", "counters", "averages"):
        assert single[part] == trained[0]["fsdp"]["cut"][part], part
    contents = read(folder / "fsdp-cut" / "checkpoints" / "batch-4")
    assert contents["module"]["layers.0.weight"].shape == (7, 8)
    assert all(type(each) is torch.Tensor for each in contents["module"].values())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("source", ["single", "other"])
def test_two_ranks_continue_from_one_process_and_from_another_strategy(
    trained: Any, read_again: Any, strategy: str, source: str
) -> None:
    came_from = "fsdp" if source == "single" or strategy == "ddp" else "ddp"
    for rank in read_again:
        for part in ("weights", "optimizer"):
            assert rank[strategy][source][part] == trained[0][came_from]["cut"][part]


def test_another_global_batch_is_reported(single: Any) -> None:
    (text,) = [each for each in single["warnings"] if "global batch" in each]
    assert re.search(
        r": (\d+) -> (\d+) \(batch size x ranks: (\d+) x 2 -> \3 x 1\)\. To keep it, set batch_size=\1\.",
        text,
    )


def test_one_process_continues_with_the_samples_that_two_ranks_had_left(trained: Any, single: Any) -> None:
    # the record of one process continues from rank zero's
    assert sorted([*single["samples"], *trained[1]["fsdp"]["cut samples"]]) == sorted([*range(48)] * 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_continue_with_the_samples_that_one_process_had_left(
    single: Any, read_again: Any, strategy: str
) -> None:
    before, after = single["one"], [rank[strategy]["one samples"] for rank in read_again]
    assert len(before) == 20 and all(each[:20] == before for each in after)
    assert sorted([*before, *after[0][20:], *after[1][20:]]) == sorted([*range(48)] * 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_damage_in_one_ranks_file_is_found_by_all_and_passed_over(
    read_again: Any, trained: Any, strategy: str
) -> None:
    for rank in read_again:
        assert "rank-1.safetensors does not match the manifest" in rank[strategy]["damaged"]
        assert rank[strategy]["auto"]["counters"] != trained[0][strategy]["whole"]["counters"]
    said = "\n".join(read_again[0][strategy]["passed over"])
    assert " skips " in said and "rank-1.safetensors" in said and "batch-5" in said
    assert not any("resume=" in line for line in read_again[1][strategy]["passed over"])  # said once


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_that_one_rank_cannot_store_is_an_error_on_all_that_names_the_rank(
    read_again: Any, strategy: str
) -> None:
    for rank in read_again:
        assert (
            "rank 1" in rank[strategy]["unstorable"]
            and "hooks.unstorable.value" in rank[strategy]["unstorable"]
        )
        assert rank[strategy]["left"] == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_validate_and_load_weights_take_checkpoints_of_several_ranks(
    trained: Any, read_again: Any, strategy: str
) -> None:
    assert read_again[0][strategy]["validated"] == read_again[1][strategy]["validated"]
    for rank in read_again:
        assert rank[strategy]["loaded"] is True
        for name in ("validated weights", "loaded weights"):
            assert rank[strategy][name] == trained[0][strategy]["cut"]["weights"]


def test_weights_of_shards_are_exported_imported_and_shown(
    folder: Path, trained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "fsdp-cut" / "checkpoints" / "batch-4"
    for suffix in (".safetensors", ".pt"):
        weights = export_weights(path, folder / f"net{suffix}").weights
        assert weights["head.weight"].shape == (3, 5)
    assert load_weights(Net(), folder / "net.safetensors").complete
    assert load_weights(Net(), path).complete
    exported = torch.load(folder / "net.pt", weights_only=True)
    assert torch.equal(Net.load_from_checkpoint(path).head.weight, exported["head.weight"])
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert main(["checkpoint", "show", str(path), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert (
        "layers.0.weight" in shown
        and "[7, 8]" in shown
        and "rank-1.safetensors" in shown
        and "world size  2" in shown
    )
    assert "again.weight = head.weight" in shown


def test_a_lost_shard_is_damage(folder: Path, trained: Any, tmp_path: Path) -> None:
    path = shutil.copytree(folder / "fsdp-cut" / "checkpoints" / "batch-4", tmp_path / "copy")
    verify(path)
    (path / "rank-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank-0.safetensors is missing"):
        read(path)
