"""The module in a coat whose forward is whatever step is to be run."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn


class Shell(nn.Module):
    """What a wrapper wraps, so that it sees all that a step does.

    A training step may call the module, parts of it, or the same part often, and wrappers look at `forward` only.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the step; with anything else, as hooks may call what they get as `wrapped_model`, the module itself."""
        if len(inputs) == 1 and type(inputs[0]) is functools.partial and not named:
            return inputs[0]()
        return self.module(*inputs, **named)


class Worn:
    """Where a module keeps its shell from run to run. Copies and pickles of the module do not take it along."""

    __slots__ = ("shell",)

    def __init__(self, shell: Any = None) -> None:
        self.shell = shell

    def __deepcopy__(self, memo: Any) -> Worn:
        return Worn()

    def __reduce__(self) -> tuple[type[Worn], tuple[()]]:
        return Worn, ()


def worn_by(module: nn.Module) -> Any:
    """The shell that the module got in an earlier run, or None."""
    return module.__dict__.get("_hookline_worn", Worn()).shell


def put_on(module: nn.Module, shell: Any) -> None:
    """Remember it."""
    module.__dict__["_hookline_worn"] = Worn(shell)
