"""`hookline trace` and `hookline replay`, as people and programs use them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.configured import said


@pytest.mark.usefixtures("in_traced_project")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["trace", "run/trac.json"], "There is no trace run/trac.json. Did you mean 'trace.json'?"),
        (["trace", "run/trace.json", "--out", "run.toml"], "run.toml exists and is not a trace"),
        (
            ["replay", "run/trace.json", "trace_parts:Loook"],
            "trace_parts has no 'Loook'. Did you mean 'Look'?",
        ),
        (["replay", "run/trace.json", "trace_parts:Look", "--set", "above"], "write it as NAME=VALUE"),
        (
            ["replay", "run/trace.json", "trace_parts:Look", "--set", "abov=3"],
            "Look has no parameter 'abov'. Did you mean 'above'?",
        ),
        (["replay", "run/trace.json", "trace_parts:Look", "--rank", "2"], "has no events of rank 2"),
    ],
)
def test_wrong_commands_are_told_what_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    assert why in said(capsys, *arguments, code=2)


@pytest.mark.usefixtures("in_traced_project")
def test_replay_plays_the_run_to_a_hook_and_says_what_it_would_have_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, "replay", "run/trace.json", "trace_parts:Look", "--set", "above=6")
    assert text.splitlines()[:2] == ["step 7 loss True", "step 8 loss True"]
    assert "hook 'look' replayed a run of 8 steps" in text and "on_step_end: 8 calls" in text
    found = json.loads(
        said(capsys, "replay", "run/trace.json", "trace_parts.Look", "--set", "above=100", "--json")
    )
    assert (found["hook"], found["steps"], found["asked"]) == ("look", 8, [])


@pytest.mark.usefixtures("in_traced_project")
def test_replay_names_the_facts_that_were_not_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert "requests facts that were not recorded: 'module' in on_step_end" in said(
        capsys, "replay", "run/trace.json", "trace_parts:Wants", code=1
    )


@pytest.mark.usefixtures("in_traced_project")
def test_a_hook_that_fails_in_a_replay_is_a_failure_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "replay", "run/trace.json", "trace_parts:Fails", code=1)
    assert "raised by hook 'fails' in on_step_end" in text and "step 6" in text


@pytest.mark.usefixtures("in_traced_project")
def test_trace_says_what_is_in_a_file_and_puts_several_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "run/trace.json: fit, rank 0 of 1, up to step 8: " in said(capsys, "trace", "run/trace.json")
    out = str(tmp_path / "both.json")
    assert f"wrote {out}: " in said(capsys, "trace", "run/trace.json", "--out", out)
    assert json.loads(said(capsys, "trace", out, "--json"))[0]["step"] == 8
