"""Keys of the framework that do not exist here, or that Hookline replaces."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from dialects.model_training_framework.documented import Coder, make, silent
from tiny import Net, batches

from hookline import HooklineError, OptionError
from hookline.interop.model_training_framework import (
    GenericTrainer,
    GenericTrainerConfig,
    HooksConfig,
    LoggingConfig,
    PreemptionConfig,
    TrainerHooks,
    ValidationConfig,
)


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
