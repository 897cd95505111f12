"""The benchmark of a training step: trainings alternate, each reads its own source, and the table has what the page promises."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    from lockstep import Runner

    return Runner


def test_trainings_alternate_in_slices_of_their_own_steps(runner: Any) -> None:
    seen: list[str] = []

    def training(name: str) -> Any:
        def train(own: Any) -> None:
            for _ in range(runner.steps(1, 2, turns=3)):
                own.step()
                seen.append(name)

        return train

    a, b = (runner(training(name), 1, 2, turns=3) for name in "ab")
    for _ in range(3):
        a.turn()
        b.turn()
    assert seen == ["a", "a", "a", "b", "b", "b"] * 3
    for each in (a, b):
        each.finish()
        assert len(each.nanoseconds) == 3


def test_a_training_that_ends_too_early_is_an_error_and_not_a_number(runner: Any) -> None:
    early = runner(lambda own: [own.step() for _ in range(runner.steps(1, 2, turns=2))], 1, 2, turns=3)
    early.turn()
    early.turn()
    with pytest.raises(RuntimeError, match="ended after 2 of 3 turns"):
        early.turn()


def test_an_error_in_a_training_ends_the_measurement(runner: Any) -> None:
    def broken(own: Any) -> None:
        own.step()
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        runner(broken, 1, 2, turns=3).turn()


def test_one_command_makes_the_table_with_medians_quartiles_minimum_and_both_baselines(
    tmp_path: Path,
) -> None:
    sections = {"loader-1": "Linear, DataLoader(batch 1)", "validation": "Linear, validation pass, list"}
    command = [
        sys.executable,
        str(FOLDER / "overhead.py"),
        "--hookline-only",
        "--rounds",
        "2",
        "--minutes",
        "0.001",
        "--out",
        str(tmp_path),
        "--sections",
        *sections,
    ]
    environment = {**os.environ, "COLUMNS": "200", "MPLCONFIGDIR": str(tmp_path)}
    ended = preloaded.run(command, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "overhead.json").read_text())["rows"]
    text = (tmp_path / "overhead.md").read_text()
    for section, title in sections.items():
        own = [row for row in rows if row["section"] == section and row["driver"] == "hookline"]
        assert len(own) == 1 and own[0]["low"] <= own[0]["ratio"] <= own[0]["high"] and own[0]["minimum"] > 0
        drivers = ["bare", "bare"] if section == "validation" else ["bare", "bare", "by hand"]
        assert [row["driver"] for row in rows if row["section"] == section] == [*drivers, "hookline"]
        assert (own[0]["by_hand"] is None) == (section == "validation")
        assert f"| {title} |" in text and title in ended.stdout
    assert (tmp_path / "overhead.png").stat().st_size > 10_000


def test_the_costs_of_audits_and_digests_are_measured_on_the_gpt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import audit
    import digest

    assert len(audit.step_times(True, 3)) == 2
    times, size = digest.step_times(True, 3)
    assert len(times) == 2 and size > 500
