"""`hookline hooks`, `events` and `schema`."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest

from hookline import EVENTS
from hookline.cli import main
from hookline.cli.lists import hook_data
from hookline.engine.listener import event_methods
from hookline.engine.registry import BUILTIN_HOOKS, hook_class


def test_hooks_are_listed_and_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hooks", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert set(BUILTIN_HOOKS) <= {each["name"] for each in listed}
    assert all(each["doc"] for each in listed)
    assert main(["hooks", "progress_bar", "--json"]) == 0
    bar = json.loads(capsys.readouterr().out)
    assert {"name": "refresh", "type": "a number", "required": False, "default": 0.25} in bar["parameters"]
    assert "on_train_batch_end" in bar["events"]
    assert main(["hooks", "progress_bar"]) == 0
    assert "refresh" in capsys.readouterr().out
    assert main(["hooks", "progres_bar"]) != 0
    assert "Did you mean 'progress_bar'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", BUILTIN_HOOKS)
def test_every_built_in_hook_can_be_described(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hooks", name]) == 0
    said = capsys.readouterr().out
    assert name in said and "Parameters:" in said
    listed = said.partition("Parameters:")[2].partition("Listens to")[0]
    assert not re.search(r"\bAny\b|class_path|null|\)\s+\(|typing", listed), listed


def test_a_hooks_events_come_in_the_order_of_a_run_and_what_it_needs_is_in_the_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["hooks", "webhook"]) == 0
    said = capsys.readouterr().out
    events = re.findall(r"\w+", said.partition("Listens to")[2].partition(".")[0])
    assert events == [each.name for each in EVENTS if each.name in events] and events[0] == "setup"
    assert "  url = ...  # text\n" in said + "\n" and "text; required" in said
    assert main(["hooks", "lr_schedule"]) == 0
    assert "  **options     further arguments, by name\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("garbage_collection", {"full_at": ["epoch", "validation", "checkpoint"]}),
        ("accumulation_schedule", {"schedule": {"0 steps": 2, "3 steps": 4}}),
        ("freeze_schedule", {"schedule": {"layer.*": "1 steps"}}),
        ("generate_samples", {"prompts": ["x"], "generate": str, "every": "2 steps"}),
        ("mixture_schedule", {"phases": {"0 tokens": {"train": 1}, "9 tokens": {"train": 2}}}),
        ("model_checkpoint", {"every_n_train_steps": 5, "save_on_exception": True}),
        ("parameter_schedule", {"target": "optimizer.weight_decay", "end": 0.0, "log": True}),
        ("spike_guard", {"action": "skip"}),
        ("spike_guard", {"action": "report"}),
        ("weight_averaging", {}),
    ],
    ids=str,
)
def test_events_that_a_setting_adds_are_listed_too(name: str, options: dict[str, Any]) -> None:
    cls = hook_class(name)
    made = cls(**options)
    added = {each for each in vars(made) if each in {event.name for event in EVENTS}}
    assert added and added <= set(cls.may_listen), "it declares them"
    listens = {event.name for _, events in event_methods(made, "H", EVENTS) for event in events}
    assert listens <= set(hook_data(name)["events"])


def test_every_hook_that_sets_listeners_on_itself_declares_them() -> None:
    for name, path in BUILTIN_HOOKS.items():
        cls = hook_class(name)
        sets = re.search(r'self\.__dict__\[(?!"_)', inspect.getsource(inspect.getmodule(cls) or cls))
        assert bool(sets) == bool(cls.may_listen), path


def test_events_are_those_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == [each.name for each in EVENTS]
    assert main(["events", "train_batch_end"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("on_train_batch_end: ")
    assert "dataloader_idx" in said
    assert main(["events", "train_batch_edn"]) != 0
    assert "Did you mean" in capsys.readouterr().err


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["required"] == ["module"]


def test_a_wrong_name_is_a_wrong_command() -> None:
    assert main(["hooks", "early_stoping"]) == 2
    assert main(["events", "nope"]) == 2


def test_the_list_of_hooks_has_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hooks", "--json"]) == 0
    assert [
        each["name"]
        for each in json.loads(capsys.readouterr().out)
        if each["builtin"] and not each["doc"].endswith(".")
    ] == []
