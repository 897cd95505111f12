"""What `hookline.hooks` offers: every built-in hook by its class, each loaded when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import hookline.hooks
from hookline import Hook
from hookline.engine.registry import BUILTIN_HOOKS


def test_a_star_import_gives_every_built_in_hook() -> None:
    found: dict[str, type[Hook]] = {}
    exec("from hookline.hooks import *", found)
    found.pop("__builtins__")
    assert (
        set(found)
        == set(hookline.hooks.__all__)
        == {path.partition(":")[2] for path in BUILTIN_HOOKS.values()}
    )
    assert all(issubclass(each, Hook) for each in found.values())


def test_importing_the_package_loads_no_hook_and_nothing_heavy() -> None:
    code = "import sys, hookline.hooks; hookline.hooks.__all__; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"torch", "rich", "numpy"}.isdisjoint(loaded)
    assert [each for each in loaded if each.startswith("hookline.hooks.")] == []
