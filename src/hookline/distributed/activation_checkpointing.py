"""Activation checkpointing: layers that keep only their inputs, and run again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class RecomputedForward:
    """The `forward` of a layer, whose activations are computed again when the backward pass needs them.

    It is an attribute of the layer, so that names of parameters stay and module hooks run once. It is an
    object, not a function, so that a deep copy of the layer calls the copy's own forward.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the layer. Random numbers are drawn again as in the first run."""
        if not torch.is_grad_enabled():
            return self.forward(*inputs, **named)
        return checkpoint(self.forward, *inputs, use_reentrant=False, **named)


def checkpoint_activations(layers: Iterable[nn.Module]) -> Callable[[], None]:
    """Recompute the activations of these layers from now on. Return a function that ends it."""
    changed = [(each, vars(each).get("forward")) for each in layers]
    for layer, _ in changed:
        vars(layer)["forward"] = RecomputedForward(layer.forward)

    def restore() -> None:
        for layer, own in changed:
            if isinstance(vars(layer).get("forward"), RecomputedForward):  # else replaced during the run
                del vars(layer)["forward"]
                if own is not None:
                    vars(layer)["forward"] = own

    return restore
