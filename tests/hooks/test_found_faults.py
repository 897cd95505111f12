"""Faults of built-in hooks that a demanding user has found; each stays mended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import HookError
from hookline.config.problems import ConfigError, Override
from hookline.hooks import ActivationMonitor, EarlyStopping, LossSchedule, LRFinder, ModelCheckpoint, NaNGuard


@pytest.mark.parametrize("check", [None, False])
def test_a_validation_before_the_resume_is_not_checked_again(check: bool | None) -> None:
    def hooks() -> list[Any]:
        return [
            EarlyStopping(patience=1, check_on_train_epoch_end=check),
            ModelCheckpoint(monitor="val/loss", save_last=True),
        ]

    torch.manual_seed(0)
    first = quiet(max_epochs=2, hooks=hooks(), run_dir="first")
    first.fit(Net(lr=0.01), batches(4), batches(2))
    last = first.hooks["model_checkpoint"].last_model_path
    second = quiet(max_epochs=4, hooks=hooks(), run_dir="second")
    second.fit(Net(lr=0.01), batches(4), batches(2), resume=last)
    assert second.global_step == 16


def test_moments_may_be_written_as_text_as_in_a_file() -> None:
    seen: list[float] = []
    trainer = quiet(hooks=[LossSchedule(weight={"0": 1.0, "2": 3.0})])
    trainer.on("after_backward")(lambda module: seen.append(float(module.layer.weight.grad.abs().sum())))
    trainer.fit(Net(lr=0.0), [batches(1)[0]] * 4)
    assert [round(each / seen[0], 3) for each in seen] == [1.0, 1.0, 3.0, 3.0]


@pytest.mark.parametrize("hook", [ActivationMonitor(every=1), NaNGuard(check=["activations"])])
def test_no_hook_stays_on_the_modules_when_a_step_returns_no_loss(hook: Any) -> None:
    class Sometimes(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss if batch_idx % 2 == 0 else None

    left: list[int] = []
    trainer = quiet(hooks=[hook], val_check_interval=2)
    trainer.on("validation_batch_start")(lambda module: left.append(len(module.layer._forward_hooks)))
    trainer.fit(Sometimes(), batches(4), batches(1))
    assert left == [0, 0]


def test_a_table_typed_on_the_command_line_does_not_show_its_secrets() -> None:
    error = ConfigError(
        "no",
        key="hooks.w",
        value=Override('{"clas_path": "webhook", "url": "http://x/SECRET"}'),
        has_value=True,
    )
    assert "SECRET" not in str(error)
    assert "SECRET" not in str(error.data())


def test_a_noisy_second_batch_does_not_end_a_range_test() -> None:
    data = batches(40)
    data[1][1].mul_(4)
    finder = LRFinder(steps=40, plot=False)
    finder.find(quiet(), Net(), data)
    assert len(finder.lrs) > 10


def test_a_moment_that_is_none_is_refused_even_at_zero() -> None:
    with pytest.raises(HookError, match="unknown unit 'bananas'"):
        LossSchedule(weight={"0 bananas": 1.0})


def test_a_range_test_on_mere_noise_suggests_nothing(caplog: pytest.LogCaptureFixture) -> None:
    data = [
        (inputs, targets * (1 + 3 * (index % 3)))
        for index, (inputs, targets) in enumerate(batches(60, size=2))
    ]
    finder = LRFinder(min_lr=1e-9, max_lr=1e-6, steps=60, plot=False)
    assert finder.find(quiet(), Net(), data) is None
    assert "no suggestion" in caplog.text
