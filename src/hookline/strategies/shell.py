"""The module in a coat whose forward is whatever step is to be run."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from hookline.errors import OptionError
from hookline.uncopied import Uncopied


class Shell(nn.Module):
    """What a wrapper wraps, so that it sees all that a step does.

    A training step may call the module, parts of it, or the same part often, and wrappers look at `forward`
    only.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the step; with anything else, as hooks may call what they get as `wrapped_model`, the module
        itself.
        """
        if len(inputs) == 1 and type(inputs[0]) is functools.partial and not named:
            return inputs[0]()
        return self.module(*inputs, **named)


def worn_by(module: nn.Module) -> Any:
    """The shell that the module got in an earlier run, or None."""
    return module.__dict__.get("_hookline_worn", Uncopied()).value


def refuse_sharded(module: nn.Module, strategy: Any) -> None:
    """What an earlier run has cut in pieces can be run by what knows of pieces only."""
    if worn_by(module) is not None:
        raise OptionError(
            f"{type(module).__name__} was sharded by FSDP in an earlier run and stays so; "
            f"{type(strategy).__name__} needs it whole. Go on with strategy='fsdp', or load the weights of a "
            "checkpoint into a new one (hookline.load_weights)."
        )


def put_on(module: nn.Module, shell: Any) -> None:
    """Remember it."""
    module.__dict__["_hookline_worn"] = Uncopied(shell)
