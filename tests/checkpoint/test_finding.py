"""Checkpoints below a folder, in order of their age or score, whatever they are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hookline.checkpoint.files import write
from hookline.checkpoint.finding import best_first, find, first_whole, tidy_below
from hookline.checkpoint.writing import machine


def save(path: Path, step: int, **about: Any) -> Path:
    write({"module": {"weight": torch.ones(2)}, "counters": {"step": step, "batches_seen": step}}, path, about)
    return path


def scored(path: Path, score: float, mode: str = "min", name: str = "val/loss") -> Path:
    return save(path, 1, monitor={"name": name, "mode": mode, "score": score})


def names(found: list[Any]) -> list[str]:
    return [each.path.name for each in found]


def test_the_newest_is_first_wherever_it_lies_and_whatever_its_name_says(tmp_path: Path) -> None:
    save(tmp_path / "deep" / "down" / "step-9", 9)
    save(tmp_path / "checkpoints" / "step-3", 3)
    assert names(find(tmp_path)[0]) == ["step-3", "step-9"]


def test_what_is_being_written_or_removed_is_not_found(tmp_path: Path) -> None:
    save(tmp_path / "step-1", 1)
    save(tmp_path / ".step-2.gone", 2)
    save(tmp_path / f".step-3.{machine()}-1.new", 3)
    assert names(find(tmp_path)[0]) == ["step-1"]


def test_what_is_left_of_one_is_named_with_the_reason(tmp_path: Path) -> None:
    (save(tmp_path / "no manifest", 1) / "manifest.json").unlink()
    manifest = save(tmp_path / "changed", 2) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 7'))
    found, broken = find(tmp_path)
    assert not found
    assert "no manifest.json" in broken[tmp_path / "no manifest"]
    assert "manifest.json is not as it was written" in broken[tmp_path / "changed"]


def test_the_best_is_by_the_scores_and_the_mode_of_the_newest_monitor(tmp_path: Path) -> None:
    scored(tmp_path / "of another monitor", 0.0, "max", "val/accuracy")
    scored(tmp_path / "worse", 0.9)
    scored(tmp_path / "better", 0.1)
    save(tmp_path / "kept for no score", 5)
    assert names(best_first(find(tmp_path)[0])) == ["better", "worse"]
    scored(tmp_path / "high", 0.8, "max", "val/accuracy")
    assert names(best_first(find(tmp_path)[0])) == ["high", "of another monitor"]
    assert best_first([]) == []


def test_the_first_that_can_be_read_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    save(tmp_path / "older", 1)
    (save(tmp_path / "newer", 2) / "state.json").write_text("{")
    chosen, contents, passed_over = first_whole(find(tmp_path)[0])
    assert chosen is not None and chosen.path.name == "older" and contents["counters"]["step"] == 1
    assert "state.json" in passed_over[tmp_path / "newer"]
    (tmp_path / "older" / "state.json").unlink()
    assert first_whole(find(tmp_path)[0])[0] is None


def test_one_that_was_being_replaced_when_its_process_died_is_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    save(folder / "last", 4).rename(folder / f".last.{machine()}-999999999.old")
    tidy_below(tmp_path / "run")
    (found,) = find(tmp_path)[0]
    assert found.path == folder / "last" and json.loads((found.path / "manifest.json").read_text())["step"] == 4


def test_what_a_kill_in_the_very_first_save_of_a_folder_left_is_removed_there_too(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints" / "step-1", 1)
    left = tmp_path / "checkpoints" / "best" / f".step-2.{machine()}-999999999.new"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    inside = tmp_path / "checkpoints" / "step-1" / "hf" / ".notes.gone"
    inside.mkdir(parents=True)
    tidy_below(tmp_path)
    assert not left.exists() and inside.exists()  # what lies in a checkpoint is others'
