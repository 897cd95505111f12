"""Functions by their dotted names in a configuration."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from config.typed import PARTS, SCHEDULE, build, refused

from hookline import Trainer


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A folder with a module beside the configurations, which nothing but the configuration makes importable."""
    (tmp_path / "typed_here.py").write_text(PARTS)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("typed_here", None)


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
