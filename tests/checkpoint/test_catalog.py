"""Checkpoints below a folder, in order of their age or score, whatever they are called."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.older_run import run as older_run
from tiny import Net, batches, quiet

from hookline import Hook, load_weights
from hookline.checkpoint import manifest
from hookline.checkpoint.catalog import (
    abandoned_saves,
    best_first,
    clean_up_below,
    find_checkpoints,
    first_whole,
    newest_first,
    without_abandoned,
)
from hookline.checkpoint.files import write
from hookline.checkpoint.writer import machine_id
from hookline.cli import main
from hookline.hooks import ModelCheckpoint


def save(path: Path, step: int, **about: Any) -> Path:
    write(
        {"module": {"weight": torch.ones(2)}, "counters": {"step": step, "batches_seen": step}}, path, about
    )
    return path


def scored(path: Path, score: float, mode: str = "min", name: str = "val/loss") -> Path:
    return save(path, 1, monitor={"name": name, "mode": mode, "score": score})


def names(found: list[Any]) -> list[str]:
    return [each.path.name for each in found]


def test_the_newest_is_first_wherever_it_lies_and_whatever_its_name_says(tmp_path: Path) -> None:
    save(tmp_path / "deep" / "down" / "step-9", 9)
    save(tmp_path / "checkpoints" / "step-3", 3)
    assert names(find_checkpoints(tmp_path)[0]) == ["step-3", "step-9"]


def test_what_is_being_written_or_removed_is_not_found(tmp_path: Path) -> None:
    save(tmp_path / "step-1", 1)
    save(tmp_path / ".step-2.gone", 2)
    save(tmp_path / f".step-3.{machine_id()}-1.new", 3)
    assert names(find_checkpoints(tmp_path)[0]) == ["step-1"]


def test_what_is_left_of_one_is_named_with_the_reason(tmp_path: Path) -> None:
    (save(tmp_path / "no manifest", 1) / "manifest.json").unlink()
    manifest = save(tmp_path / "changed", 2) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 7'))
    found, broken = find_checkpoints(tmp_path)
    assert not found
    assert "no manifest.json" in broken[tmp_path / "no manifest"]
    assert "manifest.json was changed after it was written" in broken[tmp_path / "changed"]


def test_the_best_is_by_the_scores_and_the_mode_of_the_newest_monitor(tmp_path: Path) -> None:
    scored(tmp_path / "of another monitor", 0.0, "max", "val/accuracy")
    scored(tmp_path / "worse", 0.9)
    scored(tmp_path / "better", 0.1)
    save(tmp_path / "kept for no score", 5)
    assert names(best_first(find_checkpoints(tmp_path)[0])) == ["better", "worse"]
    scored(tmp_path / "high", 0.8, "max", "val/accuracy")
    assert names(best_first(find_checkpoints(tmp_path)[0])) == ["high", "of another monitor"]
    assert best_first([]) == []


def test_the_first_that_can_be_read_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    save(tmp_path / "older", 1)
    (save(tmp_path / "newer", 2) / "state.json").write_text("{")
    chosen, contents, passed_over = first_whole(find_checkpoints(tmp_path)[0])
    assert chosen is not None and chosen.path.name == "older" and contents["counters"]["step"] == 1
    assert "state.json" in passed_over[tmp_path / "newer"]
    (tmp_path / "older" / "state.json").unlink()
    assert first_whole(find_checkpoints(tmp_path)[0])[0] is None


def test_one_that_was_being_replaced_when_its_process_died_is_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    save(folder / "last", 4).rename(folder / f".last.{machine_id()}-999999999.old")
    clean_up_below(tmp_path / "run")
    (found,) = find_checkpoints(tmp_path)[0]
    assert (
        found.path == folder / "last" and json.loads((found.path / "manifest.json").read_text())["step"] == 4
    )


# ---- a clock that goes back --------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[datetime.datetime]:
    """What the wall clock shows from now on; each look takes it back by an hour."""
    shown = [datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)]

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            shown[0] -= datetime.timedelta(hours=1)
            return shown[0]

    monkeypatch.setattr(manifest, "datetime", Clock)
    return shown


def began_at(run_dir: Path, **options: Any) -> str:
    """The checkpoint that a run continues from."""

    class Notes(Hook):
        path = ""

        def on_checkpoint_load(self, path: Path) -> None:
            self.path = Path(path).name

    notes = Notes()
    quiet(
        run_dir=run_dir,
        hooks=[notes, ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)],
        checkpoint=True,
        **options,
    ).fit(Net(), batches(4), resume=options.pop("resume", "auto"))
    return notes.path


@pytest.mark.usefixtures("clock")
def test_the_newest_state_is_found_although_the_clock_goes_back(tmp_path: Path) -> None:
    assert began_at(tmp_path / "run", max_epochs=1) == ""
    assert [each.manifest["step"] for each in find_checkpoints(tmp_path / "run")[0]] == [4, 4, 3, 2, 1]
    assert find_checkpoints(tmp_path / "run")[0][0].path.name == "last"  # the state that the run ended with
    assert began_at(tmp_path / "run", max_epochs=2) == "last"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "last")
    assert began_at(tmp_path / "run", max_epochs=3) == "epoch=1-step=8"


@pytest.mark.usefixtures("clock")
def test_what_was_saved_after_a_resume_from_an_older_checkpoint_is_newer_although_its_step_is_lower(
    tmp_path: Path,
) -> None:
    run_dir, every = tmp_path / "run", ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)
    began_at(run_dir, max_epochs=1)
    older = run_dir / "checkpoints" / "epoch=0-step=1"
    quiet(run_dir=run_dir, hooks=[every], max_steps=2, checkpoint=True).fit(Net(), batches(4), resume=older)
    newest = find_checkpoints(run_dir)[0]
    assert [each.path.name for each in newest] == [
        "last",
        "epoch=0-step=2-v1",
        "epoch=0-step=4",
        "epoch=0-step=3",
        "epoch=0-step=2",
        "epoch=0-step=1",
    ]
    shutil.rmtree(run_dir / "checkpoints" / "last")
    assert began_at(run_dir, max_epochs=1) == "epoch=0-step=2-v1"


@pytest.mark.usefixtures("clock")
def test_a_run_that_begins_afresh_is_newer_than_what_was_in_its_directory_before(tmp_path: Path) -> None:
    torch.manual_seed(1)
    quiet(run_dir=tmp_path / "run", hooks=[ModelCheckpoint(filename="first")]).fit(Net(), batches())
    second = Net()
    quiet(run_dir=tmp_path / "run", hooks=[ModelCheckpoint(filename="second")]).fit(second, batches())
    assert [each.path.name for each in find_checkpoints(tmp_path / "run")[0]] == ["second", "first"]
    loaded = Net()
    load_weights(loaded, tmp_path / "run")
    assert torch.equal(loaded.layer.weight, second.layer.weight)


def test_runs_below_one_folder_are_in_the_order_in_which_they_were_started_last(tmp_path: Path) -> None:
    for name in ("one", "two", "one"):
        epochs = 2 if (tmp_path / name).exists() else 1
        began_at(tmp_path / name, max_epochs=epochs)
    runs = [each.path.parent.parent.name for each in find_checkpoints(tmp_path)[0]]
    assert runs == ["one"] * 9 + ["two"] * 5


@pytest.mark.usefixtures("clock")
def test_what_this_version_saves_of_a_run_that_an_older_one_began_is_newer(
    tmp_path: Path, clock: list[datetime.datetime]
) -> None:
    clock[0] = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
    shutil.copytree(Path(__file__).with_name("older"), tmp_path / "run" / "checkpoints" / "older")
    trainer = older_run(tmp_path / "run", resume=tmp_path / "run" / "checkpoints" / "older")
    trainer.save_checkpoint()
    new, last, old = find_checkpoints(tmp_path / "run")[0]
    assert (new.path.name, last.path.name, old.path.name) == (
        "step-6",
        "last",
        "older",
    ) and new.run == last.run == old.run
    assert new.manifest["saved_at"] < old.manifest["saved_at"]


def test_checkpoints_at_a_url_are_in_the_same_order(
    tmp_path: Path, clock: list[datetime.datetime], capsys: pytest.CaptureFixture[str]
) -> None:
    net, url = Net(), f"file://{tmp_path}/far"
    keep = ModelCheckpoint(dirpath=url, every_n_train_steps=1, save_top_k=-1)
    quiet(run_dir=tmp_path / "run", hooks=[keep], checkpoint=True).fit(net, batches(4))
    assert main(["checkpoint", "show", url, "--json"]) == 0
    assert [each["step"] for each in json.loads(capsys.readouterr().out)["checkpoints"]] == [4, 4, 3, 2, 1]
    loaded = Net()
    load_weights(loaded, url)
    assert torch.equal(loaded.layer.weight, net.layer.weight)


def test_manifests_that_say_nothing_of_it_are_the_oldest() -> None:
    said: list[dict[str, Any]] = [
        {},
        {"saves": "9"},
        {"saved_at": "2030", "saves": None},
        {"run": 3, "saves": 1, "started_at": "2031"},
    ]
    assert newest_first([0, 1, 2, 3], lambda each: said[each]) == [3, 2, 0, 1]


def test_what_a_kill_in_the_very_first_save_of_a_folder_left_is_removed_there_too(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints" / "step-1", 1)
    left = tmp_path / "checkpoints" / "best" / f".step-2.{machine_id()}-999999999.new"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    inside = tmp_path / "checkpoints" / "step-1" / "hf" / ".notes.gone"
    inside.mkdir(parents=True)
    clean_up_below(tmp_path)
    assert not left.exists() and inside.exists()  # what lies in a checkpoint is others'


def test_what_a_rollback_has_abandoned_is_known_by_the_newest_of_its_run(tmp_path: Path) -> None:
    def numbered(name: str, number: int, run: str = "one", **about: Any) -> None:
        monitor = {"name": "val/loss", "mode": "min", "score": 1.0 / number}
        save(tmp_path / name, number, run=run, saves=number, monitor=monitor, started_at="2026", **about)

    for number in range(1, 5):
        numbered(f"step-{number}", number)
    found = find_checkpoints(tmp_path)[0]
    assert without_abandoned(found) == found
    numbered("last", 5, abandoned=[[3, 4]])
    numbered("other", 4, run="two")
    found = find_checkpoints(tmp_path)[0]
    assert {each.path.name for each in without_abandoned(found)} == {"last", "step-2", "step-1", "other"}
    assert [each.path.name for each in best_first([each for each in found if each.run == "one"])] == [
        "last",
        "step-2",
        "step-1",
    ]


@pytest.mark.parametrize(
    ("listed", "known"),
    [(None, []), ("3", []), ([[1, 2], [3], "ab", [1.0, 2], [True, 2], [4, 5]], [(1, 2), (4, 5)]), ({}, [])],
)
def test_a_list_of_abandoned_ones_that_is_not_one_is_ignored(listed: Any, known: list[Any]) -> None:
    assert abandoned_saves({"abandoned": listed}) == known
