"""`hookline explain`, `trace` and `replay`: what will happen in a run, what happened, and what differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.configured import TRACED_RUN, said

from hookline.cli import main

pytestmark = pytest.mark.usefixtures("in_traced_project")


def test_explain_shows_what_happened_beside_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "explain", "--from", "run/trace.json")
    assert "on_step_end · happened 8 times" in text
    assert "hook leaves: Leaves.on_step_end" in text and "called 3 times" in text
    assert (
        "hook leaves was called in on_step_end 3 of 8 times: the last at step 3"
        in text.partition("Not as planned:")[2]
    )


def test_explain_shows_the_parameter_groups_of_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    groups = '[optimizer]\nclass_path = "SGD"\nlr = 0.5\n[optimizer.groups]\nbiases = { weight_decay = 0 }\n'
    Path("groups.toml").write_text(TRACED_RUN + groups)
    table = said(capsys, "explain", "groups.toml").partition("Parameter groups:\n")[2].splitlines()
    assert [each.split()[:2] for each in table[1:]] == [["rest", "1"], ["biases", "1"]]
    rows = json.loads(said(capsys, "explain", "groups.toml", "--json"))
    (found,) = [each["parameter_groups"] for each in rows if "parameter_groups" in each]
    assert [each["name"] for each in found] == ["rest", "biases"]


def test_explain_compares_a_configuration_with_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "explain", "fails.toml", "--from", "run/trace.json", "--json"))
    assert any("hook fails was never called in on_step_end" in each for each in found["differences"])
    assert found["events"]["on_step_end"] == 8


def test_explain_names_the_differences_of_two_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        said(capsys, "explain", "--diff", "run.toml", "run.toml").strip()
        == "The same settings; the same events reach the same listeners in the same order."
    )
    text = said(capsys, "explain", "--diff", "run.toml", "other.toml")
    assert (
        "on_step_end: hook leaves, function: Leaves.on_step_end in run.toml, Look.on_step_end in other.toml"
        in text
    )
    assert "asks: trainer, step in run.toml, step, loss in other.toml" in text
    assert json.loads(said(capsys, "explain", "--diff", "run.toml", "fails.toml", "--json"))["differences"]


def test_two_spellings_of_a_part_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    short, table = 'module = "{}"\n', '[module]\nclass_path = "{}"\n'
    for name, part in (("short.toml", short), ("table.toml", table)):
        Path(name).write_text(part.format("hookline.testing.TinyModule"))
    assert said(capsys, "explain", "--diff", "short.toml", "table.toml").startswith("The same settings")


def test_it_names_settings_that_no_listener_shows_and_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = '[hooks.gradient_monitor]\nlog_frequency = {}\nbudget = "{}"\n[hooks.webhook]\nurl = "https://example.org/{}"\n'
    Path("one.toml").write_text(TRACED_RUN + monitor.format(10, "1%", "first-secret"))
    Path("two.toml").write_text(
        TRACED_RUN.replace("seed = 1", "accumulate_grad_batches = 4")
        + monitor.format(500, "2%", "other-secret")
    )
    text = said(capsys, "explain", "--diff", "one.toml", "two.toml")
    for line in (
        "trainer.seed: 1 in one.toml, not set in two.toml",
        "trainer.accumulate_grad_batches: not set in one.toml, 4 in two.toml",
        "hooks.gradient_monitor.log_frequency: 10 in one.toml, 500 in two.toml",
        'hooks.gradient_monitor.budget: "1%" in one.toml, "2%" in two.toml',
        "hooks.webhook.url: (not shown) in one.toml, (not shown) in two.toml",
    ):
        assert line in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["explain"], "explain needs a configuration, --from TRACE, or --diff CONFIG CONFIG"),
        (
            ["explain", "run.toml", "--diff", "run.toml", "other.toml"],
            "takes two configurations and nothing else",
        ),
        (["explain", "--from", "run.toml"], "run.toml is not a trace of Hookline"),
        (["explain", "--from", "run"], "run is a directory; name a trace. There are: run/trace.json"),
    ],
)
def test_a_wrong_explain_is_told_what_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    assert why in said(capsys, *arguments, code=2)


def test_explain_shows_the_listeners_and_runs_nothing(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(project / "run.toml")]) == 0
    said = capsys.readouterr().out
    assert "hook speaking: Speaking.on_train_start" in said
    assert "on_gradient_clip" not in said
    assert "the hook speaks" not in said
    assert main(["explain", str(project / "run.toml"), "--all"]) == 0
    assert "on_gradient_clip" in capsys.readouterr().out
    for option in ("--stage", "--verb"):  # the second is the older name
        assert main(["explain", str(project / "run.toml"), option, "test", "--json"]) == 0
        assert "on_test_end" in {each["event"] for each in json.loads(capsys.readouterr().out)}
    assert not Path("runs").exists()


# ---- trace and replay --------------------------------------------------------------------------------------


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


def test_replay_names_the_facts_that_were_not_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert "requests facts that were not recorded: 'module' in on_step_end" in said(
        capsys, "replay", "run/trace.json", "trace_parts:Wants", code=1
    )


def test_a_hook_that_fails_in_a_replay_is_a_failure_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "replay", "run/trace.json", "trace_parts:Fails", code=1)
    assert "raised by hook 'fails' in on_step_end" in text and "step 6" in text


def test_trace_says_what_is_in_a_file_and_puts_several_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "run/trace.json: fit, rank 0 of 1, up to step 8: " in said(capsys, "trace", "run/trace.json")
    out = str(tmp_path / "both.json")
    assert f"wrote {out}: " in said(capsys, "trace", "run/trace.json", "--out", out)
    about = json.loads(said(capsys, "trace", out, "--json"))[0]
    assert about["step"] == 8
    slowest = [each["total"] for each in about["slowest_events"]]
    assert slowest == sorted(slowest, reverse=True) and slowest[0] > 0
    assert sum(each["calls"] for each in about["slowest_calls"]) == about["calls"]
    assert sum(each["count"] for each in about["slowest_events"]) == about["events"]
