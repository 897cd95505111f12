"""Faults that happen to real trainings: a few of each kind here, hundreds with `python3 dev.py faults`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import preloaded
import pytest

ROOT = Path(__file__).parent.parent
FAULTS = ROOT / "faults"
KINDS = (
    "kills",
    "crashes",
    "damage",
    "disk-full",
    "signals",
    "exceptions",
    "ranks",
    "restarts",
    "extras",
    "manifests",
    "two-jobs",
    "clock",
    "workers",
)
Outcomes = Mapping[str, list[dict[str, Any]]]

pytestmark = pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="the trials are forked")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FAULTS / "run.py"), *arguments]
    return preloaded.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """All kinds in one process: loading torch takes longer than most trials. Not "compiled", which takes half a minute:
    tests/training/test_compiled_step.py resumes a compiled run.
    """
    path = tmp_path_factory.mktemp("faults") / "outcomes.json"
    done = run("--minutes", "0.1", "--kind", ",".join(KINDS), "--json", str(path))
    assert path.exists(), done.stdout + done.stderr
    found: Outcomes = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_no_fault_loses_a_run_or_changes_it_silently(outcomes: Outcomes, kind: str) -> None:
    assert outcomes[kind]
    assert [each["wrong"] for each in outcomes[kind] if each["wrong"]] == []
    for each in outcomes[kind]:
        assert (each["resumed"], each["exact"]) == (each["counts"], each["counts"])
        assert (each["lost"], each["silent"]) == (0, 0)


def test_the_order_of_file_system_calls_is_looked_at(outcomes: Outcomes) -> None:
    assert sum(each["note"] == "order of calls" for each in outcomes["crashes"]) == 2
    assert len(outcomes["crashes"]) > 4


@pytest.mark.parametrize(
    ("wrong", "calls"),
    [
        (
            "before .a.1.new/x is flushed",
            [("mkdir", ".a.1.new"), ("write", ".a.1.new/x"), ("fsync", ".a.1.new"), ("rename", "a")],
        ),
        (
            "is removed before",
            [
                ("mkdir", ".a.1.new"),
                ("fsync", ".a.1.new"),
                ("rename", "a"),
                ("unlink", "b/x"),
                ("fsync", "."),
            ],
        ),
        (
            "",
            [
                ("mkdir", ".a.1.new"),
                ("write", ".a.1.new/x"),
                ("fsync", ".a.1.new/x"),
                ("fsync", ".a.1.new"),
                ("rename", "a"),
                ("fsync", "."),
                ("unlink", "b/x"),
            ],
        ),
    ],
)
def test_a_wrong_order_of_calls_is_found(
    wrong: str, calls: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FAULTS))
    from filesystem import wrong_order  # type: ignore[import-not-found]

    assert wrong in wrong_order(calls)
    assert bool(wrong) == bool(wrong_order(calls))


def test_a_failed_trial_is_named_with_the_command_that_repeats_it_and_fails_the_whole() -> None:
    done = run("--kind", "crashes", "--trial", "99999")  # there is no such call, so nothing is killed
    assert done.returncode == 1
    assert "FAILED: exit code 0 instead of a kill at call 99999" in done.stdout
    assert "python3 dev.py faults --kind crashes --seed 0 --trial 99999" in done.stdout


def test_a_kind_that_is_none_is_refused_with_those_there_are() -> None:
    done = run("--kind", "kils")
    assert done.returncode == 2
    assert all(name in done.stderr for name in ("'kils'", *KINDS))


def test_the_scripts_are_short() -> None:
    for path in FAULTS.glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path.name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path.name}: {node.name}"
