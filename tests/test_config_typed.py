"""Functions by their dotted names in a configuration, and whole parts as tables on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hookline import Trainer
from hookline.config import ConfigError, load_config
from hookline.config.problems import Override, has_secret

PARTS = """
import os
from collections.abc import Callable, Mapping
import torch
from torch import nn
from torch.nn import functional as F
from hookline import DataModule, Hook, Logger, Module

class Net(Module):
    def __init__(self, width: int = 4, act: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.width, self.act = nn.Linear(4, 2), width, act
    def training_step(self, batch, batch_idx): return F.mse_loss(self.layer(batch[0]), batch[1])
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)

class Other(Net): pass

class Data(DataModule):
    def __init__(self, batches: int = 3) -> None: self.batches = batches
    def train_dataloader(self): return [(torch.ones(2, 4), torch.ones(2, 2))] * self.batches

class Lines(Logger):
    def __init__(self, prefix: str = "", digits: int = 3) -> None: self.prefix, self.digits = prefix, digits

class Calls(Hook):
    def __init__(self, what: Callable[[int], float], more: Mapping[str, Callable[..., float]] | None = None) -> None:
        self.what, self.more = what, more

class Threshold(Hook):
    def __init__(self, threshold: float = 10.0, tags: list[str] | None = None, note: str = "") -> None:
        self.threshold, self.tags, self.note = threshold, tags, note

class Ramp:
    def __init__(self, by: float = 0.5) -> None: self.by = by
    def __call__(self, step): return self.by**step

class Outer:
    @staticmethod
    def inner(step): return 0.25

def halves(step): return 0.5**step
def asks_too_much(weather): return 1.0
number = 3
"""
HEAD = """
module = {class_path = "typed_here.Net", width = 5}
datamodule = "typed_here.Data"
loggers = false
[trainer]
max_epochs = 1
enable_progress_bar = false
"""
HOOK = '[hooks.one]\nclass_path = "typed_here.Threshold"\nthreshold = 3.0\ntags = ["a"]\non_error = "warn"\n'
SCHEDULE = '[hooks.lr]\nclass_path = "lr_schedule"\n'


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A folder with a module beside the configurations, which nothing but the configuration makes importable."""
    (tmp_path / "typed_here.py").write_text(PARTS)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("typed_here", None)


def build(project: Path, text: str, *typed: str) -> Any:
    (project / "run.toml").write_text(HEAD + text)
    return load_config(project / "run.toml", typed).build()


def refused(project: Path, text: str, *typed: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        build(project, text, *typed)
    assert caught.value.key and caught.value.key in str(caught.value)
    return caught.value


# ---- functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["typed_here.halves", "typed_here:halves"])
def test_a_learning_rate_schedule_is_a_function_of_ones_own_module(project: Path, path: str) -> None:
    parts = build(project, f'{SCHEDULE}schedule = "{path}"\n')
    trainer = parts.make_trainer(Trainer)
    trainer.fit(parts.module, datamodule=parts.datamodule)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)


@pytest.mark.parametrize("beside", ["by = 0.25", "init_args = {by = 0.25}"])
def test_an_object_that_can_be_called_will_do(project: Path, beside: str) -> None:
    parts = build(project, f'{SCHEDULE}schedule = {{class_path = "typed_here.Ramp", {beside}}}\n')
    assert parts.hooks["lr"].factor(2, 0) == 0.0625
    assert build(project, SCHEDULE, "--hooks.lr.schedule=typed_here.Ramp").hooks["lr"].factor(2, 0) == 0.25


def test_functions_deep_in_the_arguments_and_inside_a_class(project: Path) -> None:
    more = 'what = "typed_here.Outer.inner"\nmore = {a = "typed_here.halves", b = "typed_here.Outer.inner"}\n'
    hook = build(project, f'[hooks.c]\nclass_path = "typed_here.Calls"\n{more}').hooks["c"]
    assert hook.what(1) == hook.more["b"](1) == 0.25
    assert hook.more["a"](1) == 0.5


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("typed_here.number", "typed_here.number is 3 (int), which cannot be called"),
        (
            "typed_here.halvs",
            "typed_here has no 'halvs'. Did you mean 'halves'? It has: asks_too_much, halves.",
        ),
        ("typed_here.os", "is a module, which cannot be called"),
        ("typed_here.Threshold", "a class whose objects cannot be called"),
        ("typed_here.os.system", "may not be imported from here"),
        ("os.system", "'os.system' may not be imported from here"),
        ("hookline.nowhere.f", "there is no module 'hookline.nowhere'"),
    ],
)
def test_what_cannot_be_called_is_refused_with_the_reason(project: Path, path: str, said: str) -> None:
    for key, text in {
        "hooks.lr.schedule": f'{SCHEDULE}schedule = "{path}"\n',
        "hooks.c.what": f'[hooks.c]\nclass_path = "typed_here.Calls"\nwhat = "{path}"\n',
        "hooks.c.more.x": f'[hooks.c]\nclass_path = "typed_here.Calls"\nwhat = "typed_here.halves"\n'
        f'more = {{x = "{path}"}}\n',
    }.items():
        error = refused(project, text)
        assert error.key == key
        assert said in str(error), error


@pytest.mark.parametrize("key", ["loss", "step"])
def test_the_loss_and_the_step_are_no_way_round_that(project: Path, key: str) -> None:
    (project / f"{key}_leads_away.py").write_text("from os import system\n")
    error = refused(project, "", f"--{key}={key}_leads_away.system")
    assert "this leads to posix.system, and 'posix.system' may not be imported from here" in str(error), error


def test_a_module_that_may_not_be_imported_is_not(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "stranger_here.py").write_text("def f(step): return 1.0\n")
    monkeypatch.syspath_prepend(str(elsewhere))
    refused(project, f'{SCHEDULE}schedule = "stranger_here.f"\n')
    assert "stranger_here" not in sys.modules
    build(project, f'{SCHEDULE}schedule = "stranger_here.f"\n[allow]\nmodules = ["stranger_here"]\n')
    assert sys.modules.pop("stranger_here").f


def test_a_function_with_the_wrong_parameters_is_refused_before_the_first_step(project: Path) -> None:
    assert "has the parameter 'weather'. It may have step, epoch, total" in str(
        refused(project, f'{SCHEDULE}schedule = "typed_here.asks_too_much"\n')
    )


def test_a_name_stays_a_name_and_a_function_is_spelled_in_words(project: Path) -> None:
    assert build(project, f'{SCHEDULE}schedule = "linear"\n').hooks["lr"].schedule == "linear"
    error = refused(project, '[hooks.c]\nclass_path = "typed_here.Calls"\nwhat = 3\n')
    assert "what must be a function (its dotted name, such as 'module.function')" in str(error)


# ---- tables on the command line ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "typed",
    [
        '{"class_path": "typed_here.Net", "init_args": {"width": 9}}',
        '{"class_path": "typed_here.Net", "width": 9}',
        "{class_path: typed_here.Net, init_args: {width: 9}}",
        '{"width": 9}',
        '{"init_args": {"width": 9}}',
    ],
)
def test_the_module_as_a_table(project: Path, typed: str) -> None:
    assert build(project, "", f"--module={typed}").module.width == 9
    assert build(project, "", "--module", typed, "--module.width", "10").module.width == 10


def test_another_class_does_not_inherit_the_arguments_of_the_one_before(project: Path) -> None:
    module = build(project, "", '--module={"class_path": "typed_here.Other"}').module
    assert (type(module).__name__, module.width) == ("Other", 4)


@pytest.mark.parametrize(
    "typed",
    [
        '--hooks.one={"threshold": 7, "note": "3"}',
        '--hooks.one.init_args={"threshold": 7, "note": "3"}',
        "--hooks.one.init_args={threshold: 7e0, note: '3'}",
        '--hooks.one={"init_args": {"threshold": 7, "note": "3"}}',
    ],
)
@pytest.mark.parametrize(
    "written", [HOOK, HOOK.replace("threshold = 3.0\ntags", "init_args.threshold = 3.0\ninit_args.tags")]
)
def test_a_hook_as_a_table_keeps_what_the_table_does_not_name(
    project: Path, typed: str, written: str
) -> None:
    hook = build(project, written, typed).hooks["one"]
    assert (hook.threshold, hook.note, hook.tags, hook.on_error) == (7.0, "3", ["a"], "warn")


def test_a_hook_of_a_list_and_one_that_was_not_there(project: Path) -> None:
    (project / "list.yaml").write_text("module: typed_here.Net\nhooks: [typed_here.Threshold]\n")
    typed = [
        '--hooks.threshold={"threshold": 2}',
        '--hooks.new={"class_path": "early_stopping", "patience": 9}',
    ]
    hooks = load_config(project / "list.yaml", typed).build().hooks
    assert hooks["threshold"].threshold == 2.0
    assert hooks["new"].patience == 9


def test_other_parts_as_tables(project: Path) -> None:
    parts = build(
        project,
        "",
        '--datamodule={"class_path": "typed_here.Data", "batches": 1}',
        '--trainer={"max_epochs": 4}',
        "--optimizer={class_path: AdamW, lr: 1e-3}",
        '--lr_scheduler={"class_path": "StepLR", "step_size": 1, "interval": "step"}',
        '--loggers.mine={"class_path": "typed_here.Lines", "init_args": {"digits": 5}}',
        '--module.act={"class_path": "torch.nn.LeakyReLU", "negative_slope": 0.5}',
        '--config={"a": {"b": 1}}',
    )
    trainer = parts.make_trainer(Trainer)
    trainer.fit(parts.module, datamodule=parts.datamodule)
    assert trainer.global_step == 4 and trainer.options.enable_progress_bar is False
    assert type(trainer.optimizers[0]).__name__ == "AdamW"
    assert trainer.loggers.members[0].digits == 5
    assert parts.module.act.negative_slope == 0.5
    assert parts.trainer_arguments["config"] == {"a": {"b": 1}}


def test_a_section_is_taken_out_by_null(project: Path) -> None:
    assert build(project, "", "--datamodule=null").datamodule is None
    assert "this section is missing" in str(refused(project, "", "--module=null"))


@pytest.mark.parametrize(
    ("typed", "key", "said"),
    [
        ('--module={"class_path": "typed_here.Net", "widht": 3}', "module.widht", "Did you mean 'width'?"),
        ('--module={"width": "wide"}', "module.width", "width must be a whole number"),
        ('--module={"class_path": "os.system"}', "module.class_path", "may not be imported"),
        (
            '--hooks.one.init_args={"treshold": 3}',
            "hooks.one.init_args.treshold",
            "Did you mean 'threshold'?",
        ),
        ('--hooks.one={"threshold": 3, "threshold": 4}', "hooks.one.threshold", "this key is there 2 times"),
        ("--hooks.one={threshold: 3, threshold: 4}", "threshold", "this key is there 2 times"),
        ('--hooks.two={"threshold": 3}', "hooks.two", "class_path is missing"),
        ("--hooks.two={}", "hooks.two", "class_path is missing"),
        ("--hooks.one.init_args=[1]", "hooks.one.init_args", "must be a table of arguments"),
        ('--trainer={"max_epocs": 3}', "trainer.max_epocs", "Did you mean 'max_epochs'?"),
        ("--hooks.one={1: 2}", "", "put it in quotes"),
        ("--module={class_path: typed_here.Net", "", "no valid YAML"),
        ("--trainer.max_epochs.x=1", "trainer.max_epochs", "no key below it"),
    ],
)
def test_a_wrong_table_is_refused_by_its_key(project: Path, typed: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(project, HOOK, typed)
    assert caught.value.key == key
    assert said in str(caught.value)
    assert f"run.toml with {typed.partition('=')[0]}:" in str(caught.value)


def test_a_secret_inside_a_table_is_known_as_one(project: Path) -> None:
    typed = '{"class_path": "webhook", "url": "https://hooks.example/T0P-S3CRET", "timeout": -1}'
    error = refused(project, "", f"--hooks.w={typed}")
    assert "S3CRET" not in str(error) + json.dumps(error.data())
    assert has_secret("hooks.w", Override(typed)) and has_secret("hooks.w.url", Override("x"))
    assert not has_secret("hooks.w", Override('{"timeout": 1}')) and not has_secret(
        "trainer.max_epochs", Override("3")
    )


@pytest.mark.parametrize("text", ["[1e-3]", "{a: 1e-3}"])
def test_small_numbers_are_numbers_in_lists_and_tables(text: str) -> None:
    assert Override(text).guess in ([0.001], {"a": 0.001})


# ---- what scripts and tired people type --------------------------------------------------------------------------


@pytest.mark.parametrize("typed", ["--trainer.max_epochs=", "--hooks.one.threshold= ", "--module.width="])
def test_a_value_that_was_left_empty_is_not_the_default(project: Path, typed: str) -> None:
    assert "this is empty" in str(refused(project, HOOK, typed))
    assert build(project, HOOK, "--hooks.one.note=").hooks["one"].note == ""


def test_a_hook_that_is_added_takes_the_place_of_none(project: Path) -> None:
    (project / "run.toml").write_text(f"{HEAD}[hooks.early_stopping]\npatience = 8\n")
    hooks = load_config(project / "run.toml", hooks=["early_stopping", "early_stopping"]).build().hooks
    assert [hooks[name].patience for name in ("early_stopping", "early_stopping_2", "early_stopping_3")] == [
        8,
        3,
        3,
    ]


def test_names_that_differ_in_case_only_are_found(project: Path) -> None:
    assert "Did you mean 'SGD'?" in str(refused(project, "", "--optimizer=sgd"))


def test_null_for_a_hook_says_how_to_leave_it_out(project: Path) -> None:
    assert "or false to leave it out" in str(refused(project, HOOK, "--hooks.one=null"))
