"""Counts reads of the device."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

READS = {"item", "tolist", "__float__", "__int__", "__bool__", "numpy"}


class CountReads(TorchFunctionMode):
    """Counts every call by which a tensor's value comes to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ in READS:
            self.reads.append(function.__name__)
        return function(*args, **(kwargs or {}))
