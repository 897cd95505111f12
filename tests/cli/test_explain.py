"""`hookline explain`: what will happen in a run, what happened, and what differs."""

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
