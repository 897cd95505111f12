"""Import lines that were documented before modules moved: they still work, and give the same module objects."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import hookline
from hookline._moved import MOVED, new_name
from hookline.engine.registry import PUBLIC
from hookline.util.errors import CLASSES


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_gives_the_module_itself(old: str, new: str) -> None:
    module = importlib.import_module(old)
    assert module is importlib.import_module(new)
    assert module.__name__ == new and module.__spec__ is not None and module.__spec__.name == new


def test_modules_below_a_package_have_moved_with_it() -> None:
    assert new_name("hookline.dialects.trainers.hooks") == "hookline.interop.trainers.hooks"
    assert new_name("hookline.hooks") == new_name("hookline") == ""


def test_an_old_line_works_first_in_a_new_process() -> None:
    code = (
        "from hookline.dialects.trainers.hooks import TrainingHook\n"
        "import hookline.interop.trainers.hooks as now\n"
        "assert now.TrainingHook is TrainingHook"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_never_was_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        importlib.import_module("hookline.dialects.nowhere")


@pytest.mark.parametrize("package", PUBLIC)
@pytest.mark.parametrize(("name", "path"), CLASSES.items())
def test_a_class_of_another_system_is_refused_with_the_import_line_of_ours(
    package: str, name: str, path: str
) -> None:
    home, _, ours = path.rpartition(".")
    line = f"from {home} import {ours}"
    exec(line, {})
    with pytest.raises(ImportError) as refused:
        exec(f"from {package} import {name}", {})
    told = f"cannot import name {name!r} from {package!r}. {name} is {ours} in Hookline: {line}"
    assert str(refused.value).startswith(told)
    module = importlib.import_module(package)
    with pytest.raises(
        AttributeError, match=f"has no attribute {name!r}. {name} is {ours} in Hookline: {line}"
    ):
        getattr(module, name)
    assert not hasattr(module, name) and getattr(module, name, None) is None and name not in dir(module)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("from hookline import EarlyStopping", "EarlyStopping: from hookline.hooks import EarlyStopping"),
        ("from hookline import CSV", "CSV: from hookline.loggers import CSV"),
        ("from hookline.hooks import Hook", "Hook: from hookline import Hook"),
        ("from hookline.loggers import Trainer", "Trainer: from hookline import Trainer"),
        ("import hookline.hooks.LRMonitor", "LRMonitor: from hookline.hooks import LRMonitor"),
        ("from hookline.callbacks import Timer", "Callbacks are hooks here: from hookline.hooks import"),
        ("from hookline import callbacks", "Callbacks are hooks here: from hookline.hooks import"),
    ],
)
def test_a_name_of_another_package_of_hookline_comes_with_its_import_line(wrong: str, right: str) -> None:
    with pytest.raises(ImportError) as refused:
        exec(wrong, {})
    assert f". {right}" in str(refused.value)


def test_a_name_that_is_nowhere_has_pythons_own_errors() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Nowhere' from 'hookline' "):
        exec("from hookline import Nowhere", {})
    with pytest.raises(AttributeError, match="^module 'hookline' has no attribute 'Nowhere'$"):
        hookline.Nowhere  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="No module named 'hookline.nowhere'"):
        importlib.import_module("hookline.nowhere")
