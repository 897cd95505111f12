"""Switch oneDNN off in a process that a test starts, as soon as torch is imported there. conftest.py puts this on PYTHONPATH."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class SwitchOff(MetaPathFinder):
    """Torch has no variable for this, and importing it here would slow down every process that does not need it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "torch.backends.mkldnn":
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_switch_off(module: Any) -> None:
            load(module)
            sys.modules["torch"]._C._set_mkldnn_enabled(False)

        spec.loader.exec_module = load_and_switch_off  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, SwitchOff())
