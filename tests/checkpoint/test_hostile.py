"""Checkpoints that somebody has made, with checksums that are right: refused with a reason, and another one is taken."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Net, batches, quiet

from hookline import CheckpointError, Hook, HooklineError, NonFiniteLoss, load_weights
from hookline.checkpoint.catalog import best_first, find_checkpoints
from hookline.checkpoint.files import read, read_manifest, verify, write
from hookline.cli import main
from hookline.hooks.early_stopping import EarlyStopping
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.run.record import read_record
from hookline.run.state_parts import Counts


def load_kit() -> Any:
    """What `dev.py faults` makes hostile checkpoints with; its folder is not on the path, where its names would hide others."""
    spec = importlib.util.spec_from_file_location(
        "hostile", Path(__file__).parent.parent.parent / "faults" / "hostile.py"
    )
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


kit = load_kit()
ESCAPE: str = kit.ESCAPE
SAVED: dict[str, Any] = {
    "saved_at of another type": {"saved_at": 5},
    "saved_at of no type": {"saved_at": None},
    "saved_at missing": {"saved_at": ...},
    "a terminal's escapes in saved_at": {"saved_at": f"2026-01-01T00:00:00{ESCAPE}"},
    "files not a table": {"files": []},
    "files missing": {"files": ...},
    "a file without its size": {"files.state.json": {"sha256": "0" * 64}},
    "a size below zero": {"files.state.json": {"bytes": -1, "sha256": "0" * 64}},
    "a size that is true": {"files.state.json": {"bytes": True, "sha256": "0" * 64}},
    "a sum that is no sum": {"files.state.json": {"bytes": 1, "sha256": "x"}},
    "a path out of it": {"files.../../x": {"bytes": 1, "sha256": "0" * 64}},
    "an absolute path": {"files./etc/passwd": {"bytes": 1, "sha256": "0" * 64}},
    "a step below zero": {"step": -1},
    "a step that is true": {"step": True},
    "a huge step": {"step": 2**70},
    "a step that is text": {"step": "4"},
    "batches missing": {"batches_seen": ...},
    "an epoch of 1.5": {"epoch": 1.5},
    "a monitor without a score": {"monitor": {"name": "x", "mode": "min"}},
    "a monitor of another mode": {"monitor": {"name": "x", "mode": "avg", "score": 1}},
    "a monitor with text for a score": {"monitor": {"name": "x", "mode": "min", "score": "low"}},
    "a monitor that is a list": {"monitor": []},
    "a monitor with a huge score": {"monitor": {"name": "x", "mode": "min", "score": 10**400}},
    "no ranks": {"world_size": 0},
    "metrics that are a list": {"metrics": []},
    "versions of numbers": {"versions": {"torch": 2}},
    "shared names of numbers": {"shared": {"a": 1}},
    "a reason that is a table": {"reason": {}},
    "a run that is a number": {"run": 7},
    "deep nesting": {"metrics": {"a": kit.nested(100)}},
}
STATES: dict[str, Any] = {
    "no counters": {"counters": ...},
    "a step below zero": {"counters.step": -3},
    "a step that is true": {"counters.step": True},
    "a huge step": {"counters.step": {"$": "int", "value": hex(2**200)}},
    "a step that is not a number": {"counters.step": {"$": "float", "value": "nan"}},
    "counters that are a list": {"counters": [1]},
    "a position that is text": {"position.batches": "0"},
    "no position at all": {"position": {}},
    "no random streams": {"rng": ...},
    "random streams beyond their end": {"rng.numpy.value.2": 10**6},
    "random words that are text": {"rng.python.value.1.value.0": "x"},
    "a loader that is text": {"loader": "here"},
    "a loader with odd facts": {"loader.facts": {"length": "x"}},
    "loggers that are a list": {"loggers": []},
    "optimizers that are a table": {"optimizers": {}},
    "an optimizer without groups": {"optimizers": [{"state": {}}]},
    "a log without means": {"log.means": ...},
    "a sum that is text": {"log.train_loss": {"reduce": "mean", "total": "x", "count": 1}},
    "filters that are numbers": {"filters": {"a": [3]}},
    "metrics that are text": {"metrics": {"loss": "low"}},
    "a window that is a list": {"window": [1]},
    "kinds that are numbers": {"kinds": [1]},
    "a module that is a list": {"module": []},
    "a tensor that is nowhere": {"module": {"x": {"$": "tensor", "key": "nowhere"}}},
    "an odd tag": {"module": {"$": "what"}},
    "a run that is a number": {"run": 5},
    "ranks without end": {"world_size": 10**12},
    "a module of pieces that are nowhere": {
        "module": {"x": {"$": "sharded", "key": "x", "shape": [2**40], "dtype": "float32"}}
    },
}


def put(value: Any, path: str, new: Any) -> None:
    """Replace an entry, or remove it; a file's name has dots of its own."""
    if path.startswith("files."):
        value["files"][path.removeprefix("files.")] = new
        return
    *above, last = path.split(".")
    for each in above:
        value = value[int(each) if isinstance(value, list) else each]
    if new is ...:
        del value[last]
    else:
        value[int(last) if isinstance(value, list) else last] = new


def change_manifest(checkpoint: Path, changes: dict[str, Any]) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for path, new in changes.items():
        put(manifest, path, new)
    kit.sign(checkpoint, manifest)


def change_state(checkpoint: Path, changes: dict[str, Any]) -> None:
    state = json.loads((checkpoint / "state.json").read_text())
    for path, new in changes.items():
        put(state, path, new)
    kit.write_state(checkpoint, json.dumps(state))


class Fails(Hook):
    def on_train_batch_start(self, step: int) -> None:
        if step == 5:
            raise RuntimeError("killed")


def train(run_dir: Path, *hooks: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    keep = ModelCheckpoint(
        every_n_train_steps=2, save_top_k=-1, filename="s{step}", auto_insert_metric_name=False
    )
    trainer = quiet(
        run_dir=run_dir,
        hooks=[keep, EarlyStopping("train/loss", patience=99), *hooks],
        max_epochs=2,
        **options,
    )
    trainer.fit(Net(), batches(4), resume="auto")
    return trainer


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, cut in the middle."""
    folder = tmp_path_factory.mktemp("original") / "run"
    with pytest.raises(RuntimeError, match="killed"):
        train(folder, Fails())
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(original, tmp_path / "run", ignore=shutil.ignore_patterns("*.sock"))
    yield tmp_path / "run"


def newest(run: Path) -> Path:
    return run / "checkpoints" / "s4"


# ---- manifests ---------------------------------------------------------------------------------------------------


def test_one_that_is_signed_again_and_not_changed_is_taken(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_manifest(newest(run), {})
    change_state(newest(run), {})
    train(run)
    assert " skips " not in caplog.text and "step 4" in caplog.text


@pytest.mark.parametrize("name", SAVED)
def test_auto_passes_over_a_hostile_manifest_and_takes_the_next_one(
    name: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_manifest(newest(run), SAVED[name])
    with pytest.raises(CheckpointError, match=r"s4(.|\n)*manifest\.json"):
        read_manifest(newest(run))
    trainer = train(run)
    assert trainer.global_step == 8
    assert " skips " in caplog.text and "s2 (epoch 0, step 2" in caplog.text and "\x1b" not in caplog.text


@pytest.mark.parametrize("file", ["manifest.json", "state.json", "run.json"])
def test_a_file_of_gigabytes_is_not_read(file: str, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = run / file if file == "run.json" else newest(run) / file
    with path.open("r+b") as opened:
        opened.truncate(20 << 30)  # takes no room on the disk
    if file == "state.json":
        manifest = json.loads((newest(run) / "manifest.json").read_text())
        manifest["files"]["state.json"]["bytes"] = 20 << 30
        kit.sign(newest(run), manifest)
    began = time.process_time()
    if file == "run.json":
        assert read_record(run) == {}
    trainer = train(run)
    assert trainer.global_step == 8 and time.process_time() - began < 60
    assert (
        " skips " in caplog.text and ("larger than" in caplog.text or "an allowed size" in caplog.text)
    ) or file == "run.json"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"a":' * 100_000,
        '{"format": 2, "format": 2}',
        '{"format": NaN}',
        '{"format": ' + "9" * 5000 + "}",
        "\x00",
        '"\ud800"',
    ],
    ids=lambda text: ascii(text)[:20],
)
def test_odd_json_is_an_error_of_ours(text: str, run: Path) -> None:
    (newest(run) / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match="s4"):
        read_manifest(newest(run))
    kit.write_state(run / "checkpoints" / "s2", text)
    with pytest.raises(CheckpointError, match="s2"):
        read(run / "checkpoints" / "s2")


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    for about in ({"monitor": {"name": "x"}}, {"step": -1}, {"metrics": 3}, {"world_size": 0}):
        with pytest.raises(CheckpointError, match="A manifest cannot hold"):
            write({"a": 1}, tmp_path / "x", about)
    assert not list(tmp_path.iterdir())


def test_state_too_long_to_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hookline.checkpoint.writer.STRUCTURE_BYTES", 1000)
    with pytest.raises(
        CheckpointError,
        match=r"state\.json would have .* MB, most of it in 'hooks'.*Store large data in tensors",
    ):
        write({"hooks": {"mine": list(range(1000))}, "counters": {"step": 1}}, tmp_path / "x")
    write({"hooks": {"mine": np.arange(1000)}}, tmp_path / "x")
    assert read(tmp_path / "x")["hooks"]["mine"].sum() == 499_500


# ---- the state of a run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STATES)
def test_auto_passes_over_a_hostile_state_and_takes_the_next_one(
    name: str, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_state(newest(run), STATES[name])
    trainer = train(run)
    assert trainer.global_step == 8
    assert " skips " in caplog.text and "s2 (epoch 0, step 2" in caplog.text


@pytest.mark.parametrize(
    "odd",
    [torch.ones(3), [torch.ones(3)], "x", -1, None, {}, float("nan")],
    ids=["tensor", "tensors", "text", "negative", "none", "table", "nan"],
)
@pytest.mark.parametrize("name", ["settings", "settings.seed", "settings.precision", "record", "saves"])
def test_odd_values_that_a_resume_only_compares_or_looks_up_are_harmless(
    name: str, odd: Any, run: Path
) -> None:
    changed = {"settings": {name.partition(".")[2]: odd}} if "." in name else {name: odd}
    contents = {**read(newest(run)), **changed}
    manifest = read_manifest(newest(run))
    shutil.rmtree(newest(run))
    write(
        contents,
        newest(run),
        {
            each: value
            for each, value in manifest.items()
            if each in (*Counts.SAVED, "run", "reason", "saves")
        },
    )
    trainer = train(run)
    assert trainer.global_step == 8


@pytest.mark.parametrize(
    "odd",
    ["x", -1, None, [], {}, 1.5, 2**70],
    ids=["text", "negative", "none", "list", "table", "part", "huge"],
)
@pytest.mark.parametrize("name", ["saves", "started_at"])
def test_an_odd_number_of_a_save_or_time_of_a_start_does_not_end_the_search(
    name: str, odd: Any, run: Path
) -> None:
    change_manifest(newest(run), {name: odd})
    assert train(run).global_step == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"hooks.early_stopping.wait_count": "x"},
        {"hooks.early_stopping": []},
        {"hooks.early_stopping.wait_count": ...},
        {"hooks.model_checkpoint.best_k_models": {"a": "b"}},
        {"hooks.model_checkpoint.best_model_path": None},
        {"optimizers": [{"state": {}, "param_groups": [{"lr": "high", "params": [0, 1]}]}]},
        {"optimizers": [{"state": {}, "param_groups": [{"params": [0]}]}]},
        {"kinds": ["Adam"]},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_state_that_an_object_of_ours_cannot_have_is_an_error_of_ours(
    changes: dict[str, Any], run: Path
) -> None:
    change_state(newest(run), changes)
    with pytest.raises(HooklineError):
        train(run)


def test_paths_in_the_state_of_a_hook_lead_to_nothing_that_is_removed(run: Path, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    shutil.copytree(newest(run), thesis)
    inside = run / "checkpoints" / "thesis"
    inside.mkdir()
    (inside / "thesis.txt").write_text("mine")
    kept = {str(each): 1.0 for each in (thesis, f"{run}/checkpoints/..", inside, "..", "/")}
    change_state(newest(run), {"hooks.model_checkpoint.best_k_models": kept})
    torch.manual_seed(1)
    keep = ModelCheckpoint(
        every_n_train_steps=2, save_top_k=1, filename="s{step}", auto_insert_metric_name=False
    )
    trainer = quiet(run_dir=run, hooks=[keep], max_epochs=2)
    try:
        trainer.fit(Net(), batches(4), resume="auto")
    except CheckpointError as error:
        assert "was not removed" in str(error)
    verify(thesis)
    assert (inside / "thesis.txt").read_text() == "mine"


def test_weights_are_not_taken_from_what_holds_none(run: Path) -> None:
    for changes in ({"module": []}, {"module": ...}, {"module": {"$": "dict", "value": [[1, 2]]}}):
        change_state(newest(run), changes)
        for source in (newest(run), str(newest(run))):
            with pytest.raises(CheckpointError):
                load_weights(Net(), source)
        with pytest.raises(CheckpointError):
            Net.load_from_checkpoint(newest(run))
        assert main(["checkpoint", "export", str(newest(run)), "x.pt", "--force"]) == 1
    assert load_weights(Net(), run / "checkpoints" / "s2").complete


# ---- what is shown -----------------------------------------------------------------------------------------------


def test_no_control_character_of_a_manifest_reaches_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = {
        "reason": ESCAPE,
        "status": ESCAPE,
        "run": ESCAPE,
        "metrics": {ESCAPE: ESCAPE},
        "versions": {ESCAPE: ESCAPE},
        "monitor": {"name": f"{ESCAPE}\ud800", "mode": "min", "score": 1.0},
        "shared": {ESCAPE: ESCAPE},
    }
    change_manifest(newest(run), hostile)
    (newest(run) / ESCAPE.replace("/", "")).write_text("")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "reason": ESCAPE, "status": ESCAPE}))
    for command in (["show", str(newest(run))], ["show", str(run)], ["verify", str(run)]):
        assert main(["checkpoint", *command]) == 0
    assert main(["report", str(run)]) == 0
    shown = capsys.readouterr()
    assert "\\x1b[2J" in shown.out and "\\ud800" in shown.out
    assert all(each.isprintable() for each in (shown.out + shown.err).split("\n"))


def test_a_finished_run_is_told_without_control_characters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "done")
    record = json.loads((tmp_path / "done" / "run.json").read_text())
    (tmp_path / "done" / "run.json").write_text(json.dumps({**record, "reason": ESCAPE}))
    train(tmp_path / "done")
    assert "Nothing to train" in caplog.text and "\x1b" not in caplog.text


@pytest.mark.parametrize(
    "record",
    [
        [],
        {"id": 5, "status": "completed", "step": 1, "reason": "", "limits": {}},
        {"id": "a", "status": "completed", "step": True, "reason": "", "limits": {}},
        {"id": "a", "status": [], "step": 1, "reason": "", "limits": {}},
        {"id": "a", "status": "x", "step": 2**70, "reason": "", "limits": {}},
        {"id": "a", "status": "x", "step": 1, "reason": None, "limits": {}},
    ],
    ids=lambda record: str(record)[:50],
)
def test_a_record_with_odd_types_is_not_believed(record: Any, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert read_record(tmp_path) == {}


def test_the_best_is_found_among_what_can_be_compared(run: Path) -> None:
    change_manifest(newest(run), {"monitor": {"name": "x", "mode": "max", "score": "nan"}})
    change_manifest(run / "checkpoints" / "s2", {"monitor": {"name": "x", "mode": "max", "score": 1}})
    assert len(best_first(find_checkpoints(run)[0])) == 2


# ---- many of them ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_no_mutation_ends_a_resume_in_anything_but_a_checkpoint_or_an_error_of_ours(
    seed: int, run: Path
) -> None:
    rng = random.Random(seed)
    saved = shutil.copytree(run, run.with_name("saved"))
    for _ in range(8):
        shutil.rmtree(run)
        shutil.copytree(saved, run)
        said = kit.mutate(rng, newest(run))
        try:
            assert train(run).global_step >= 0
        except (HooklineError, NonFiniteLoss):
            pass
        except Exception as error:
            raise AssertionError(f"{said}: {type(error).__name__}: {error}") from error
