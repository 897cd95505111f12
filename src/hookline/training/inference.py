"""torch.inference_mode for the steps of an evaluation. No inference tensor outlives it.

Autograd refuses inference tensors, and outside inference mode they cannot be changed in place. So only the
step itself runs in this mode. What it returns and what the module keeps become ordinary tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hookline.data.batch import map_tensors
from hookline.engine.binding import Caller
from hookline.run.run import Run
from hookline.util.errors import OptionError


def check_inference_mode(run: Run) -> None:
    """Refuse inference mode where it would break the training that follows."""
    if run.strategy.shards and run.options.evaluating.inference_mode:
        raise OptionError(
            "evaluation={'inference_mode': True} cannot be combined with "
            f"{type(run.strategy).__name__}: the parameters that it gathers in an evaluation would be "
            "inference tensors, which a later training step cannot use. Leave it out: evaluations then run "
            "under torch.no_grad.",
            option="evaluation",
            value=run.options.evaluation,
        )


def in_inference_mode(call: Caller) -> Caller:
    """Return the step under torch.inference_mode. It returns ordinary tensors."""

    def infer(s: Any) -> Any:
        with torch.inference_mode():
            returned = call(s)
        return map_tensors(returned, ordinary)

    return infer


def ordinary(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of an inference tensor that autograd accepts."""
    return tensor.clone() if tensor.is_inference() else tensor


def evaluation_mode(run: Run) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a pass: no gradients, and with inference mode a clean module at its end."""
    return leaving_ordinary(run.module) if run.traits.rules.uses_inference_mode(run) else torch.no_grad()


@contextlib.contextmanager
def leaving_ordinary(module: nn.Module) -> Iterator[None]:
    """Compute no gradients; then copy the inference tensors that the module keeps, such as cached tables."""
    with torch.no_grad():
        try:
            yield
        finally:
            for part in module.modules():
                for store in (part._buffers, vars(part)):
                    for name, value in list(store.items()):
                        if isinstance(value, Tensor):
                            store[name] = ordinary(value)
