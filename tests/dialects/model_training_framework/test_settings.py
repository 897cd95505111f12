"""The framework's configuration: each key does what it says."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from dialects.model_training_framework.documented import Coder, make, names, silent, training_step
from tiny import Net, batches

from hookline import HooklineError, OptionError
from hookline.interop.model_training_framework import (
    CheckpointConfig,
    GenericTrainer,
    GenericTrainerConfig,
    GradientMonitorHook,
    HooksConfig,
    LoggingConfig,
    PerformanceConfig,
    PreemptionConfig,
    TrainerHooks,
    ValidationConfig,
    ValidationFrequency,
)
from hookline.interop.model_training_framework.settings import loggers_of


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_happens_when_a_hook_fails_is_decided_by_the_configuration(
    goes_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(TrainerHooks):
        def on_epoch_end(self, trainer: Any, epoch: int) -> None:
            raise ValueError("broken on purpose")

    trainer = make(silent(hooks=HooksConfig(continue_on_hook_error=goes_on)), Fails)
    if goes_on:
        trainer.fit([batches(1)], max_epochs=2)
        assert caplog.text.count("hook 'fails' failed in on_train_epoch_end") == 2
    else:
        with pytest.raises(ValueError, match="broken on purpose"):
            trainer.fit([batches(1)], max_epochs=2)


def test_performance_keys_change_the_update() -> None:
    norms: list[float] = []

    class Clips(TrainerHooks):
        def on_gradient_clip(self, trainer: Any, grad_norm: float) -> None:
            norms.append(grad_norm)

    config = silent(performance=PerformanceConfig(gradient_accumulation_steps=2, clip_grad_norm=0.01), seed=7)
    trainer = make(config, Clips())
    trainer.fit([batches(4)], max_epochs=1)
    assert trainer.global_step == len(norms) == 2 and trainer.options.seed == 7
    make(silent(performance=PerformanceConfig(clip_grad_norm=None)), Clips()).fit([batches(1)], max_epochs=1)
    assert len(norms) == 2


def test_checkpoints_are_kept_by_epoch_by_step_and_by_metric_without_removing_each_others() -> None:
    checkpoint = CheckpointConfig(
        root_dir="saved", save_every_n_steps=2, max_checkpoints=2, monitor_metric="val_loss"
    )
    make(silent(experiment_name="mine", checkpoint=checkpoint), losses=(3.0, 1.0, 2.0)).fit(
        [batches(2)], [batches(1)], max_epochs=3
    )
    assert names("saved/mine/checkpoints") == ["epoch_001_step_000004.ckpt", "epoch_002_step_000006.ckpt"]
    assert names("saved/mine/checkpoints_by_step") == [
        "epoch_001_step_000004.ckpt",
        "epoch_002_step_000006.ckpt",
    ]
    assert names("saved/mine/checkpoints_best") == ["epoch_001_step_000004.ckpt"]


def test_a_job_is_put_back_into_its_queue_unless_told_otherwise() -> None:
    assert "slurm_requeue" in make(GenericTrainerConfig()).hooks.list_hooks()
    assert (
        "slurm_requeue"
        not in make(GenericTrainerConfig(preemption=PreemptionConfig(requeue_job=False))).hooks.list_hooks()
    )


def test_validation_every_n_steps_counts_updates() -> None:
    seen: list[int] = []

    class Notes(TrainerHooks):
        def on_validation_start(self, trainer: Any, epoch: int) -> None:
            seen.append(trainer.global_step)

    validation = ValidationConfig(frequency=ValidationFrequency.EVERY_N_STEPS, every_n_steps=2)
    config = silent(validation=validation, performance=PerformanceConfig(gradient_accumulation_steps=2))
    make(config, Notes()).fit([batches(8)], [batches(1)], max_epochs=1)
    assert seen == [2, 4]


@pytest.mark.parametrize(
    ("source", "hooks_own", "trainers_own", "epochs"),
    [("both", 1, 3, 2), ("both", 3, 1, 2), ("hook", 3, 1, 4), ("legacy", 1, 3, 4)],
)
def test_which_early_stopping_counts_can_be_chosen(
    source: str, hooks_own: int, trainers_own: int, epochs: int
) -> None:
    hooks = HooksConfig(enable_early_stopping_hook=True, early_stopping_config={"patience": hooks_own})
    validation = ValidationConfig(early_stopping_source=source)
    trainer = make(silent(early_stopping_patience=trainers_own, hooks=hooks, validation=validation))
    trainer.fit([batches(1)], [batches(1)], max_epochs=9)
    assert trainer.state.epochs_seen == epochs


def test_loggers_are_those_of_the_configuration(tmp_path: Path) -> None:
    logging_config = LoggingConfig(
        logger_type="composite",
        composite_loggers=["csv", "tensorboard"],
        tensorboard_dir="tb",
        log_scalars_every_n_steps=1,
    )
    trainer = make(silent(logging=logging_config))
    assert [type(each).__name__ for each in loggers_of(logging_config, "experiment")] == [
        "CSV",
        "TensorBoard",
    ]
    assert trainer.options.log_every_n_steps == 1
    model = Coder()
    trainer = GenericTrainer(
        silent(logging=LoggingConfig(log_scalars_every_n_steps=1)),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    trainer.set_training_step(training_step)
    trainer.fit([batches(3)])
    assert (tmp_path / "checkpoints/experiment/metrics.csv").read_text().startswith("step")


def test_a_line_with_the_loss_comes_every_so_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "hookline"):
        make(silent(log_loss_every_n_steps=2)).fit([batches(5)], max_epochs=1)
    assert [record.message.split(":")[0] for record in caplog.records if "loss" in record.message] == [
        "step 2",
        "step 4",
    ]


def test_keys_that_ask_for_more_to_be_seen_add_hooks() -> None:
    more = silent(profile_training=True, logging=LoggingConfig(log_gradients=True, log_system_metrics=True))
    assert {"profiler", "gradient_monitor_hook", "device_stats"} <= set(make(more).hooks.list_hooks())
    more.hooks = HooksConfig(enable_gradient_monitor=True, gradient_monitor_config={"log_frequency": 7})
    assert [
        each.log_frequency for each in make(more).hook_manager.hooks if isinstance(each, GradientMonitorHook)
    ] == [7]
    by_time = silent(checkpoint=CheckpointConfig(save_every_n_epochs=None, save_every_n_minutes=0.5))
    assert "every 30 seconds" in str(make(by_time).explain())


def test_a_dry_run_does_one_batch_of_everything() -> None:
    trainer = make(silent(dry_run=True))
    found = trainer.fit([batches(5)], [batches(3)], max_epochs=7)
    assert trainer.global_step == 1 and trainer.state.batches_in_pass == 1 and "val/loss" in found


def test_schedulers_advance_once_an_epoch() -> None:
    model = Coder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = GenericTrainer(
        silent(), model, [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)], logger=False
    )
    trainer.set_training_step(training_step)
    trainer.fit([batches(3)], max_epochs=3)
    assert optimizer.param_groups[0]["lr"] == 0.125


# ---- keys that do not exist here, or that Hookline replaces -------------------------------------------------------


def test_every_key_of_the_configuration_is_read_or_refused_with_what_to_do_instead() -> None:
    folder = Path(inspect.getfile(TrainerHooks)).parent
    trees = [ast.parse((folder / f"{name}.py").read_text()) for name in ("settings", "trainer", "loaders")]
    source = "\n".join(
        ast.unparse(node)
        for tree in trees
        for node in tree.body
        if not (
            isinstance(node, ast.ClassDef) and node.name.endswith("Config")
        )  # which only declares the keys
    )
    whole = GenericTrainerConfig()
    tables = [
        whole,
        *(getattr(whole, each.name) for each in fields(whole) if is_dataclass(getattr(whole, each.name))),
    ]
    for table in [each for each in tables if not isinstance(each, HooksConfig)]:
        for each in fields(table):
            if "instead" in each.metadata:
                setattr(table, each.name, 1)
                with pytest.raises(OptionError, match=f"{each.name}=1 is not taken here: .+"):
                    GenericTrainer(whole, Coder(), [])
                setattr(table, each.name, None)
            elif not each.name.startswith("use_") and each.name not in ("debug_mode", "fault_tolerance"):
                assert re.search(rf"\.{each.name}\b", source), f"{each.name} is never read"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: GenericTrainer({}, Coder(), []),
            "takes a GenericTrainerConfig or a HooksConfig first, not dict",
        ),
        (lambda: GenericTrainer(silent(), Net(), []), "trained by hookline.Trainer"),
        (lambda: GenericTrainer(silent(), Coder(), ["adam"]), "str is not a torch.optim.Optimizer"),
        (lambda: GenericTrainerConfig(experiment="mine"), "Did you mean 'experiment_name'"),
        (lambda: HooksConfig(enable_loging_hook=True), "Did you mean 'enable_logging_hook'"),
        (lambda: make(fabric=object()), "Leave it out and pass strategy="),
        (
            lambda: make().set_training_step(lambda batch: None),
            r"called with \(trainer, batch, batch_idx, dataloader_idx, dataloader_name\)",
        ),
        (lambda: make().set_validation_step("step"), "takes a function"),
        (lambda: make().fit([]), "train_loaders is an empty list"),
        (lambda: make().fit([batches()], max_epochs=0), "max_epochs=0 must be a whole number from 1"),
        (
            lambda: make().hook_manager.register_hook("mypackage.Hook"),
            r"HooksConfig\(hook_classes=\['mypackage.Hook'\]\)",
        ),
        (lambda: make().hook_manager.register_hook(object()), "has no event method"),
        (lambda: make(silent(preemption=PreemptionConfig(signal=9))), "allowed: SIGUSR1, SIGTERM"),
        (
            lambda: make(silent(logging=LoggingConfig(logger_type="wanbd")), logger=True),
            "Did you mean 'wandb'",
        ),
        (lambda: make(silent(logging=LoggingConfig(logger_type="composite"))), "needs composite_loggers"),
        (
            lambda: make(silent(logging=LoggingConfig(composite_loggers=["csv"]))),
            "has no effect without logger_type='composite'",
        ),
        (
            lambda: make(
                silent(
                    logging=LoggingConfig(console_log_level="LOUD"),
                    hooks=HooksConfig(enable_logging_hook=True),
                )
            ),
            "log_level='LOUD'",
        ),
        (
            lambda: make(silent(validation=ValidationConfig(every_n_steps=3))),
            "EVERY_N_STEPS needs every_n_steps",
        ),
        (
            lambda: make(silent(validation=ValidationConfig(early_stopping_source="hooks"))),
            "Did you mean 'hook'",
        ),
    ],
)
def test_wrong_use_is_refused_before_anything_runs(wrong: Any, message: str) -> None:
    with pytest.raises(HooklineError, match=message):
        wrong()
