"""The framework's built-in hooks, switched on by its configuration."""

from __future__ import annotations

import pytest
from dialects.model_training_framework.documented import Rows, make, names, run
from tiny import batches

from hookline import OptionError
from hookline.interop.model_training_framework import EarlyStoppingHook, HooksConfig, ModelCheckpointHook


def test_the_logging_hook_says_when_training_and_epochs_begin_and_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(run("Logging Hook")["config"]).fit([batches()], max_epochs=2)
    lines = capsys.readouterr().out.splitlines()
    assert [
        line.split(":")[0].split(" in ")[0]
        for line in lines
        if "epoch" in line or line.startswith("training")
    ] == [
        "training started",
        "epoch 0 started",
        "epoch 0 completed",
        "epoch 1 started",
        "epoch 1 completed",
        "training completed",
    ]


def test_the_gradient_monitor_logs_norms_percentiles_and_histograms_of_the_layers_named_every_100_steps() -> (
    None
):
    rows = Rows()
    make(run("Gradient Monitor Hook")["config"], logger=rows).fit([batches(200)], max_epochs=1)
    found = {step: row for step, row in rows.rows if "grad_norm" in row}
    assert sorted(found) == [100, 200]
    kinds = ("grad_norm", "gradients/p10", "gradients/p50", "gradients/p90")
    assert {name for name in found[100] if name.startswith(kinds) and "/" in name} == {
        f"{kind}/{layer}" for kind in kinds for layer in ("encoder", "decoder")
    }
    assert {tag.rpartition("/")[2] for tag in rows.histograms} == {"encoder", "decoder"}


def test_the_checkpoint_hook_keeps_the_three_best_and_the_last_under_the_documented_names() -> None:
    losses = (3.0, 1.0, 2.0, 2.5, 5.0)
    make(run("Model Checkpoint Hook")["config"], losses=losses).fit([batches(2)], [batches(1)], max_epochs=5)
    assert names("checkpoints/experiment/best") == [
        "epoch_1_loss_1.00",
        "epoch_2_loss_2.00",
        "epoch_3_loss_2.50",
        "last",
    ]


def test_the_early_stopping_hook_waits_ten_epochs_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(run("Early Stopping Hook")["config"], losses=(2.0, 1.0, 0.99995))
    trainer.fit([batches(1)], [batches(1)], max_epochs=50)
    assert (
        trainer.status == "stopped" and trainer.state.epochs_seen == 12
    )  # the last gain was below min_delta
    assert "(10 of 10)" in capsys.readouterr().out


def test_the_early_stopping_hook_crashes_if_its_metric_is_not_found() -> None:
    trainer = make(run("Early Stopping Hook")["config"])
    trainer.set_validation_step(lambda trainer, batch, i, j, name: {"accuracy": 0.5})
    with pytest.raises(OptionError, match="val/loss"):
        trainer.fit([batches(1)], [batches(1)], max_epochs=3)


def test_the_rate_monitor_logs_rate_momentum_and_weight_decay_once_an_epoch() -> None:
    rows = Rows()
    make(run("Learning Rate Monitor Hook")["config"], logger=rows).fit([batches(3)], max_epochs=2)
    found = [{name: value for name, value in row.items() if name.startswith("lr-")} for _, row in rows.rows]
    expected = {"lr-SGD": 0.1, "lr-SGD-momentum": 0.9, "lr-SGD-weight_decay": 0.01}
    assert [row for row in found if row] == [expected, expected]


def test_switches_alone_have_the_defaults_of_the_framework() -> None:
    stopping, saving = HooksConfig(
        enable_early_stopping_hook=True, enable_model_checkpoint_hook=True
    ).build()[::-1]
    assert isinstance(stopping, EarlyStoppingHook | ModelCheckpointHook)
    by_class = {type(each): each for each in (stopping, saving)}
    assert (
        by_class[EarlyStoppingHook].patience == 10 and by_class[EarlyStoppingHook].watch.min_delta == 0.0001
    )
    assert (
        by_class[ModelCheckpointHook].save_top_k == 3 and by_class[ModelCheckpointHook].monitor == "val/loss"
    )
