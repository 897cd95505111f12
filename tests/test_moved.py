"""Import lines that were documented before modules moved: they still work, and give the same module objects."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from hookline._moved import MOVED, new_name


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
