"""The trainer of a recorded run, made again: which hooks it has, and which options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import Net, batches

from hookline import Hook, OptionError, Trainer, observer, on
from hookline.engine.hook import FunctionHook
from hookline.engine.registry import BUILTIN_HOOKS, hook_class
from hookline.rewind.rebuild import ACTS_OUTSIDE, OBSERVES, from_config, from_program, why_left_out
from hookline.rewind.recorded import RecordedRun


def test_the_built_in_hooks_that_take_part_in_training_are_called_again() -> None:
    called = {name for name in BUILTIN_HOOKS if not why_left_out(hook_class(name))}
    assert called == {
        "accumulation_schedule",
        "activation_monitor",
        "batch_size_finder",
        "early_stopping",
        "exclude_samples",
        "freeze_schedule",
        "loss_schedule",
        "lr_finder",
        "lr_schedule",
        "mixture_schedule",
        "nan_guard",
        "parameter_schedule",
        "spike_guard",
        "weight_averaging",
    }, "decide for a new hook: is the training the same without it? Then declare observes or rewinds = False"


def test_a_hook_can_declare_whether_it_is_called_again() -> None:
    class Own(Hook): ...

    class Watches(Hook):
        observes = True

    class Scores(Hook):
        observes, logs_metrics = True, ("val/score",)

    class Wanted(Hook):
        observes, rewinds = True, True

    class Sends(Hook):
        rewinds = False

    @observer
    @on("step_end")
    def look() -> None: ...

    assert [why_left_out(each) for each in (Own(), Watches(), Scores(), Wanted(), Sends())] == [
        "",
        OBSERVES,
        "",
        "",
        ACTS_OUTSIDE,
    ]
    assert why_left_out(FunctionHook(look, ["step_end"])) == OBSERVES


def test_the_options_of_a_program_are_those_of_the_record(tmp_path: Path) -> None:
    trainer = Trainer(
        run_dir=tmp_path / "run",
        max_time="2 hours",
        max_steps=3,
        accumulate_grad_batches=2,
        count_tokens=len,
        precision=64,
        enable_progress_bar=False,
        checkpoint={"every": "3 minutes"},
    )
    trainer.fit(Net(), batches(2))
    recorded = RecordedRun(tmp_path / "run")

    def rebuilt(**options: Any) -> Trainer:
        return from_program(recorded, [], {"module": Net()}, [], options).trainer

    with pytest.raises(OptionError, match=r"count_tokens(.|\n)*rewound\(..., count_tokens=...\)"):
        rebuilt()
    made = rebuilt(count_tokens=len)
    assert (made.options.max_steps, made.options.accumulate_grad_batches) == (3, 2)
    assert made.options.max_epochs == -1 and made.strategy.precision.name == "64"
    assert made.options.run_dir is None and not made.options.control and not made.options.saving.last
    assert rebuilt(count_tokens=len, accumulate_grad_batches=1).options.accumulate_grad_batches == 1
    with pytest.raises(OptionError, match="was started by a program"):
        from_program(recorded, [], {}, [], {})


def test_a_configuration_is_made_again_without_its_loggers_and_outside_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "module": {"class_path": "torch.nn.Linear", "in_features": 4, "out_features": 2},
        "loss": "mse_loss",
        "optimizer": {"class_path": "torch.optim.SGD", "lr": 0.1},
        "trainer": {"max_epochs": 1, "run_dir": "elsewhere", "checkpoint": "async"},
        "loggers": {"mine": "absent.Logger"},
        "checkpoint": "absent",
        "hooks": {
            "webhook": {"url": "(not shown)"},
            "weight_averaging": {},
            "console": "console_log",
            "guard": "nan_guard",
        },
    }
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {"id": "x", "status": "completed", "step": 1, "reason": "", "limits": {}}
    (tmp_path / "run.json").write_text(json.dumps({**known, "config": config}))
    rebuilt = from_config(RecordedRun(tmp_path), [], without=["guard"])
    assert rebuilt.left_out == {"webhook": OBSERVES, "console": OBSERVES, "guard": "it was excluded"}
    assert [each.name for each in rebuilt.trainer.hooks.entries()] == ["weight_averaging"]
    assert rebuilt.trainer.options.run_dir is None and not rebuilt.trainer.loggers
    assert rebuilt.is_from_config and set(rebuilt.arguments) == {"module", "datamodule", "loss", "optimizer"}
