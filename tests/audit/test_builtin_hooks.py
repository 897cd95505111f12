"""Every built-in hook in an audited run: those that declare that they observe change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.trial import FixedTrial
from tiny import Net, batches, quiet
from torch.nn import functional as F

from hookline.audit import observation as kinds
from hookline.engine.registry import BUILTIN_HOOKS, hook_class

ARGUMENTS: dict[str, dict[str, Any]] = {
    "accumulation_schedule": {"schedule": {2: 2}},
    "activation_monitor": {"every": 2},
    "console_log": {"log_every_n_batches": 2},
    "device_stats": {"every": 2},
    "early_stopping": {"monitor": "val/loss"},
    "freeze_schedule": {"schedule": {"layer.bias": "2 steps"}},
    "garbage_collection": {"every": 2},
    "generate_samples": {
        "prompts": [torch.ones(4)],
        "generate": lambda module, prompt: str(F.dropout(module.layer(prompt), 0.5, training=True)),
        "every": "2 steps",
    },
    "gradient_monitor": {"log_frequency": 2},
    "json_log": {"log_every_n_batches": 2},
    "loss_schedule": {"weight": lambda step: 0.5},
    "lr_schedule": {"schedule": "cosine", "warmup": 2},
    "memory_monitor": {"every": 2},
    "model_checkpoint": {"every_n_train_steps": 2},
    "model_summary": {"flops": True, "shapes": True},
    "nan_guard": {"check": ("batch", "activations", "loss", "gradients", "parameters")},
    "open_telemetry": {"endpoint": "http://127.0.0.1:9"},
    "optuna_pruning": {"trial": FixedTrial({})},
    "parameter_schedule": {"target": "optimizer.momentum", "end": 0.5},
    "throughput": {"every": 2},
    "timer": {"duration": "1 hours"},
    "webhook": {"url": "http://127.0.0.1:9/x"},
}
ELSEWHERE = {
    "batch_size_finder": "needs a DataLoader, and its trials are runs of their own",
    "exclude_samples": "needs a DataLoader",
    "export_pretrained": "needs a model of transformers",
    "lr_finder": "turns the run into a test, which changes everything and restores it",
    "mixture_schedule": "needs a mixture of loaders",
    "slurm_requeue": "acts when a signal arrives",
}
"""Hooks that this run cannot show, and why."""
CHANGE: dict[str, set[str]] = {
    "activation_monitor": {kinds.MODULE_HOOKS},
    "freeze_schedule": {kinds.REQUIRES_GRAD, kinds.GRADIENTS},
    "loss_schedule": {kinds.RETURNED},
    "lr_schedule": {kinds.LEARNING_RATES},
    "model_summary": {kinds.MODULE_HOOKS},
    "nan_guard": {kinds.MODULE_HOOKS},
    "parameter_schedule": {kinds.OPTIMIZER_SETTINGS},
    "weight_averaging": {kinds.PARAMETERS},
}
"""Hooks that change something, and the kinds of it that are allowed."""


class Sgd(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("name", [name for name in BUILTIN_HOOKS if name not in ELSEWHERE])
def test_a_built_in_hook_changes_what_it_declares_and_nothing_else(name: str, tmp_path: Path) -> None:
    given = {"url": tmp_path.as_uri()} if name == "upload_checkpoint" else ARGUMENTS.get(name, {})
    hook = hook_class(name)(**given)
    trainer = quiet(
        hooks=[hook],
        audit=True,
        max_epochs=2,
        run_dir="run",
        logger=True,
        checkpoint=True,
        log_every_n_steps=2,
    )
    module = Sgd()
    trainer.fit(module, batches(6), batches(2))
    changed = {row.kind for row in trainer.hooks.changes()}
    trainer.predict(module, batches(2))
    changed |= {row.kind for row in trainer.hooks.changes()}
    assert changed <= CHANGE.get(name, set())
    assert not (hook.observes and name in CHANGE)
    assert bool(changed) == (name in CHANGE)


def test_every_hook_is_tried_or_says_why_not() -> None:
    assert set(ELSEWHERE) <= set(BUILTIN_HOOKS)
    assert set(ARGUMENTS) | set(CHANGE) <= set(BUILTIN_HOOKS)
