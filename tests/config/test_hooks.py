"""Hooks of a configuration: by name, in lists, by switches, and overridden one by one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from config.configured import BASIC, STOP, trainer_of

from hookline import Hook, OptionError
from hookline.config import HooksConfig
from hookline.engine.registry import GROUP
from hookline.hooks.console_log import ConsoleLog
from hookline.hooks.early_stopping import EarlyStopping
from hookline.hooks.gradient_monitor import GradientMonitor
from hookline.hooks.lr_monitor import LRMonitor
from hookline.hooks.model_checkpoint import ModelCheckpoint


def test_hooks_as_a_plain_list_of_dotted_names(project: Path) -> None:
    text = 'hooks = ["parts_here.Second", "progress_bar", "parts_here.hello"]\nmodule = "parts_here.Net"'
    trainer, _ = trainer_of(project, text)
    assert trainer.hooks.list_hooks() == ["second", "progress_bar", "hello"]


def test_a_hook_of_a_list_can_be_overridden_by_its_name(project: Path) -> None:
    text = 'hooks = ["parts_here.Threshold"]\nmodule = "parts_here.Net"'
    _, parts = trainer_of(project, text, "--hooks.threshold.threshold", "4")
    assert parts.hooks["threshold"].threshold == 4.0


@pytest.mark.parametrize("written", ["patience = 3", "init_args.patience = 3", ""])
def test_one_named_hook_is_overridden_from_the_command_line(project: Path, written: str) -> None:
    text = f'{BASIC}[hooks.stop]\nclass_path = "{STOP}"\n{written}\n[hooks.other]\nclass_path = "parts_here.Threshold"\n'
    trainer, parts = trainer_of(project, text, "--trainer.max_epochs", "3", "--hooks.stop.patience", "9")
    assert trainer.options.max_epochs == 3
    assert parts.hooks["stop"].patience == 9
    assert parts.hooks["other"].threshold == 10.0


def test_a_name_given_to_the_class_is_the_hooks_name(project: Path) -> None:
    trainer, _ = trainer_of(project, f'{BASIC}[hooks.one]\nclass_path = "{STOP}"\nname = "brake"\n')
    assert trainer.hooks["brake"].patience == 3


def test_a_hook_is_left_out_switched_off_or_added_from_the_command_line(project: Path) -> None:
    text = f'{BASIC}[hooks.one]\nclass_path = "parts_here.Threshold"\n[hooks.two]\nclass_path = "parts_here.Second"\n'
    trainer, _ = trainer_of(
        project, text, "--hooks.one", "false", "--hooks.two.enabled", "false", hooks=["parts_here.hello"]
    )
    assert "one" not in trainer.hooks
    assert "two" in trainer.hooks
    assert trainer.hooks.list_hooks() == ["hello"]


def test_settings_of_any_hook_are_set_beside_its_own(project: Path) -> None:
    text = f'{BASIC}[hooks.one]\nclass_path = "parts_here.Second"\non_error = "warn"\norder = 7\nranks = "zero"\n'
    _, parts = trainer_of(project, text)
    assert (parts.hooks["one"].on_error, parts.hooks["one"].order, parts.hooks["one"].ranks) == (
        "warn",
        7,
        "zero",
    )


def test_a_hook_by_its_registered_name_needs_no_class_path(project: Path) -> None:
    text = BASIC.replace("enable_progress_bar = false\n", "") + "[hooks.progress_bar]\nrefresh = 0.5\n"
    trainer, _ = trainer_of(project, text)
    assert trainer.hooks["progress_bar"].refresh == 0.5


def offer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that offers a hook."""
    info = folder / "offering-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nshiny = offering_package.hooks:Shiny\n")
    package = folder / "offering_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "hooks.py").write_text(
        "from hookline import Hook\nclass Shiny(Hook):\n    def __init__(self, n: int = 1): self.n = n\n"
    )
    monkeypatch.syspath_prepend(str(folder))


def test_an_installed_package_offers_hooks_by_name_which_are_never_on_by_themselves(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, monkeypatch)
    trainer, _ = trainer_of(project)
    assert trainer.hooks.list_hooks() == []
    assert "offering_package" not in sys.modules
    trainer, _ = trainer_of(project, f'{BASIC}[hooks.mine]\nclass_path = "shiny"\nn = 4\n')
    assert trainer.hooks["mine"].n == 4
    trainer, _ = trainer_of(project, f'{BASIC}[hooks.mine]\nclass_path = "offering_package.hooks.Shiny"\n')
    assert trainer.hooks["mine"].n == 1


SWITCHED = {
    "enable_logging_hook": True,
    "enable_gradient_monitor": True,
    "gradient_monitor_config": {
        "log_frequency": 50,
        "log_histogram": True,
        "log_norm": True,
        "param_filter": ["encoder", "decoder"],
        "percentiles": [10, 50, 90],
    },
    "enable_model_checkpoint_hook": True,
    "model_checkpoint_config": {
        "save_top_k": 3,
        "monitor": "val/loss",
        "mode": "min",
        "save_last": True,
        "save_on_train_epoch_end": False,
        "filename": "epoch_{epoch}_loss_{val/loss:.2f}",
        "auto_insert_metric_name": False,
    },
    "enable_early_stopping_hook": True,
    "early_stopping_config": {
        "monitor": "val/loss",
        "patience": 7,
        "mode": "min",
        "min_delta": 0.0001,
        "check_on_train_epoch_end": False,
        "strict": True,
        "verbose": True,
    },
    "enable_lr_monitor": True,
    "lr_monitor_config": {"log_momentum": True, "log_weight_decay": True, "frequency": "epoch"},
    "hook_classes": ["parts_here.Threshold", "parts_here.Second"],
    "hook_configs": {"parts_here.Threshold": {"threshold": 5.0}},
}


IN_ORDER = [
    "Threshold",
    "Second",
    "ConsoleLog",
    "GradientMonitor",
    "ModelCheckpoint",
    "EarlyStopping",
    "LRMonitor",
]


def check_switched(hooks: list[Hook]) -> None:
    assert [type(each).__name__ for each in hooks] == IN_ORDER
    threshold, _, console, gradients, checkpoint, stop, rates = hooks
    assert threshold.threshold == 5.0
    assert isinstance(console, ConsoleLog)
    assert isinstance(gradients, GradientMonitor)
    assert (gradients.log_frequency, gradients.log_histogram, gradients.percentiles) == (
        50,
        True,
        (10, 50, 90),
    )
    assert isinstance(checkpoint, ModelCheckpoint)
    assert (checkpoint.save_top_k, checkpoint.monitor, checkpoint.save_last) == (3, "val/loss", True)
    assert isinstance(stop, EarlyStopping)
    assert (stop.patience, stop.verbose, stop.check_on_train_epoch_end) == (7, True, False)
    assert isinstance(rates, LRMonitor)
    assert (rates.log_momentum, rates.log_weight_decay, rates.frequency) == (True, True, "epoch")


def test_hooks_config_builds_every_hook_it_names_in_order(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(project))
    check_switched(HooksConfig(**SWITCHED).build())


def test_the_same_switches_in_a_file_build_the_same_hooks(project: Path) -> None:
    lines = "".join(f"{key} = {_toml(value)}\n" for key, value in SWITCHED.items())
    trainer, parts = trainer_of(project, f"{BASIC}[hooks]\n{lines}")
    check_switched([hook for name, hook in parts.hooks.items() if name != "check_monitors"])
    assert trainer.hooks["early_stopping"].patience == 7
    _, parts = trainer_of(project, f"{BASIC}[hooks]\n{lines}", "--hooks.early_stopping_config.patience", "2")
    assert parts.hooks["early_stopping"].patience == 2


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def test_nothing_is_switched_on_by_default() -> None:
    assert HooksConfig().build() == []


def test_hook_classes_may_be_names_of_hooks() -> None:
    assert [
        type(each).__name__ for each in HooksConfig(hook_classes=["progress_bar", "ProgressBar"]).build()
    ] == ["ProgressBar"] * 2


def test_the_bare_class_name_is_taken_where_it_is_clear(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(project))
    (hook,) = HooksConfig(
        hook_classes=["parts_here.Threshold"], hook_configs={"Threshold": {"threshold": 2.0}}
    ).build()
    assert hook.threshold == 2.0


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, None),
        ({"continue_on_hook_error": False}, "raise"),
        ({"continue_on_hook_error": True}, "warn"),
        ({"continue_on_hook_error": True, "log_hook_errors": False}, "disable"),
    ],
)
def test_what_happens_when_a_hook_fails_is_decided_by_its_switches(
    given: dict[str, bool], policy: str | None, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(project))
    (hook,) = HooksConfig(hook_classes=["parts_here.Second"], **given).build()
    assert hook.on_error == (policy or "raise")
    (rates,) = HooksConfig(enable_lr_monitor=True, **given).build()
    assert rates.on_error == (policy or LRMonitor.on_error)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"early_stopping_config": {"patience": 3}},
            "would do nothing: set enable_early_stopping_hook to true",
        ),
        ({"log_hook_errors": False}, "needs continue_on_hook_error=True"),
        ({"enable_lr_monitor": "yes"}, "enable_lr_monitor='yes' must be true or false"),
        ({"hook_classes": "a.B"}, "hook_classes='a.B' must be a list of class paths"),
        ({"hook_classes": [3]}, "hook_classes=3 must be a list of class paths as text"),
        (
            {"hook_classes": ["a.B"], "hook_configs": {"a.C": {}}},
            "'a.C' is not in hook_classes. Did you mean 'a.B'",
        ),
        ({"lr_monitor_config": 3}, "lr_monitor_config=3 must be a table"),
    ],
)
def test_switches_that_cannot_be_meant_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message.replace("(", r"\(")):
        HooksConfig(**given)
