"""Possible causes: hooks of the audit, differences between run records, and logged values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hookline.digests import causes
from hookline.digests import compare as kinds
from hookline.digests.compare import Difference, Divergence


def run(path: Path, record: dict[str, Any] | None = None, *lines: dict[str, Any]) -> Path:
    path.mkdir()
    whole = {"id": "x", "status": "completed", "step": 1, "reason": "", "limits": {}, **(record or {})}
    (path / "run.json").write_text(json.dumps(whole))
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def changes(hook: str, first_step: int, kind: str = "parameters", count: int = 1) -> dict[str, Any]:
    row = {
        "hook": hook,
        "event": "on_step_end",
        "kind": kind,
        "names": ["w"],
        "count": count,
        "first_step": first_step,
        "rank": 0,
    }
    return {"type": "changes", "rows": [row]}


def diverged(step: int, kind: str = kinds.WEIGHTS) -> Divergence:
    return Divergence(step, 0, 0, Difference(kind, "x"))


def test_the_hook_that_began_to_change_something_then_is_named(tmp_path: Path) -> None:
    runs = (run(tmp_path / "a"), run(tmp_path / "b", None, changes("nudge", 5)))
    blamed = causes.blame_hook(diverged(6), runs, ("A", "B"))
    assert blamed is not None and blamed.names == ("nudge",)
    assert blamed.text == "hook 'nudge' changed parameters (w) in on_step_end of B"
    assert causes.blame_hook(diverged(7), runs, ("A", "B")) is None  # it changed something before
    assert causes.blame_hook(diverged(6, kinds.RATE), runs, ("A", "B")) is None  # something else


def test_a_hook_that_changes_both_runs_alike_is_not_blamed(tmp_path: Path) -> None:
    runs = (run(tmp_path / "a", None, changes("ema", 5)), run(tmp_path / "b", None, changes("ema", 5)))
    assert causes.blame_hook(diverged(6), runs, ("A", "B")) is None


def test_records_are_compared_without_places_and_repeats(tmp_path: Path) -> None:
    one = run(tmp_path / "a", {
        "options": {"seed": 1, "run_dir": "a", "digest": 1}, "versions": {"torch": "2.13.0"},
        "machine": {"host": "x", "device": "cpu", "world_size": 1}, "git": {"commit": "abc", "dirty": False},
        "hooks": {"bar": {"class": "Bar", "params": {"n": 1}}},
    })  # fmt: skip
    other = run(tmp_path / "b", {
        "options": {"seed": 2, "run_dir": "b", "digest": 5}, "versions": {"torch": "2.12.0"},
        "machine": {"host": "y", "device": "cuda:0", "world_size": 2}, "git": {"commit": "def", "dirty": True}, "hooks": {},
    })  # fmt: skip
    found = causes.different_records(one, other)
    assert [each["key"] for each in found] == [
        "git.commit", "git.dirty", "versions.torch", "machine.device", "machine.world_size", "options.seed", "hooks.bar.class",
    ]  # fmt: skip
    assert causes.cause_text(found[2], ("A", "B")) == "versions.torch: 2.13.0 in A, 2.12.0 in B"
    assert causes.cause_text(found[-1], ("A", "B")) == "hooks.bar.class: Bar in A, nothing in B"
    assert causes.different_records(one, one) == [] and causes.different_records(one, tmp_path) == []


def test_logs_are_compared_without_times_and_memory(tmp_path: Path) -> None:
    def row(step: int, **values: Any) -> dict[str, Any]:
        return {"type": "metrics", "step": step, "over": "step", "metrics": values}

    one = run(tmp_path / "a", None, row(1, loss=1.0, step_seconds=2.0), row(2, loss=0.5, memory=1))
    other = run(
        tmp_path / "b", None, row(1, loss=1.0, step_seconds=3.0), row(2, loss=0.25, memory=2), row(3, loss=1)
    )
    steps, found = causes.compare_logs(one, other, ("A", "B"))
    assert steps == [1] and found is not None
    assert (found.step, found.last_equal, found.is_exact, found.first.kind) == (2, 1, False, kinds.METRIC)
    assert found.first.text == "loss is 0.5 in A and 0.25 in B"
    assert causes.compare_logs(one, one, ("A", "B")) == ([1, 2], None)


def test_only_whole_words_say_that_a_metric_is_measured() -> None:
    measured = [
        "step_seconds",
        "time/step",
        "throughput/samples_per_sec",
        "tokens/s",
        "gpu/memory_gb",
        "gc/collected",
    ]
    assert all(
        causes.MEASURED.search(each) for each in [*measured, "samples_per_second", "fetch_time", "ETA"]
    )
    trained = [
        "val/sentiment",
        "beta",
        "loss_per_sample",
        "train/meta_loss",
        "retained",
        "preserved",
        "seconded",
    ]
    assert not any(causes.MEASURED.search(each) for each in trained)


def test_a_metric_that_differs_where_the_runs_are_equal_is_left_out(tmp_path: Path) -> None:
    def rows(chance: float, loss: float) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = [{"chance": chance, "loss": 1.0}, {"chance": 2 * chance, "loss": loss}]
        return [
            {"type": "metrics", "step": step, "over": "step", "metrics": row} for step, row in enumerate(made)
        ]

    one, other, third = (
        run(tmp_path / name, None, *rows(chance, loss))
        for name, chance, loss in (("a", 1.0, 0.5), ("b", 3.0, 0.5), ("c", 1.0, 0.25))
    )
    assert causes.compare_logs(one, other, ("A", "B"), equal_until=0) == ([0, 1], None)
    found = causes.compare_logs(other, third, ("B", "C"), equal_until=0)[1]
    assert found is not None and (found.step, found.first.names) == (1, ("loss",))
