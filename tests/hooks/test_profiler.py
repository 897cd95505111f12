"""Profiler: a trace and a table of a few steps, and never a profiler that is left running."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline.hooks.profiler import Profiler
from hookline.util.errors import OptionError


def test_it_writes_a_trace_of_the_steps_asked_for_and_a_table() -> None:
    trainer = quiet(hooks=[Profiler(wait=1, warmup=1, active=2)], logger=True)
    trainer.fit(Net(), batches(8))
    folder = trainer.run_dir / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["operators-step-4.txt", "trace-step-4.json"]
    events = json.loads((folder / "trace-step-4.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["name"].startswith("ProfilerStep#")} == {
        "ProfilerStep#2",
        "ProfilerStep#3",
    }
    table = (folder / "operators-step-4.txt").read_text()
    assert "aten::linear" in table and "Self CPU" in table
    lines = [json.loads(line) for line in (trainer.run_dir / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["type"] == "text"] == [4]


def test_steps_are_updates_not_batches() -> None:
    hook = Profiler(wait=0, warmup=0, active=2)
    quiet(hooks=[hook], accumulate_grad_batches=2).fit(Net(), batches(8))
    assert [path.name for path in hook.traces] == ["trace-step-2.json"]


def test_cycles_repeat_and_then_it_is_off() -> None:
    hook = Profiler(wait=1, warmup=0, active=1, repeat=2)
    seen: list[bool] = []
    trainer = quiet(hooks=[hook])
    trainer.on("train_batch_start")(lambda: seen.append(torch.autograd._profiler_enabled()))
    trainer.fit(Net(), batches(6))
    assert [path.name for path in hook.traces] == ["trace-step-2.json", "trace-step-4.json"]
    assert seen == [False, True, False, True, False, False]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_failing_run_leaves_no_profiler_running(error: BaseException) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                assert torch.autograd._profiler_enabled()
                raise error
            return super().training_step(batch, batch_idx)

    hook = Profiler(wait=1, warmup=0, active=9)
    with pytest.raises(type(error)):
        quiet(hooks=[hook]).fit(Fails(), batches(4))
    assert not torch.autograd._profiler_enabled()
    assert hook.traces[0].exists()  # what was recorded up to the failure


def test_a_run_shorter_than_the_schedule_ends_cleanly() -> None:
    quiet(hooks=[Profiler(wait=5, warmup=2, active=3)]).fit(Net(), batches(2))
    assert not torch.autograd._profiler_enabled()


def test_a_profiler_of_the_users_own_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(hooks=[Profiler(wait=0, warmup=0, active=2)])
    with caplog.at_level(logging.WARNING), torch.profiler.profile() as own:
        trainer.fit(Net(), batches(4))
    assert trainer.global_step == 4 and "another profiler is running" in caplog.text
    assert any(each.key == "aten::linear" for each in own.key_averages())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"active": 0}, "active=0"),
        ({"wait": -1}, "wait=-1"),
        ({"sort_by": "cpu_time"}, "Did you mean"),
        ({"activities": ["gpu"]}, "allowed: 'cpu', 'cuda', 'xpu'"),
        ({"with_stack": 1}, "True or False"),
    ],
)
def test_wrong_parameters_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Profiler(**arguments)
