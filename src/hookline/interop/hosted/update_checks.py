"""Mistakes in the updates of a loop written by hand: an optimizer that the line does not have, an update
without gradients, clipping after the update, a loss that is none. Torch is silent about the first three.
"""

from __future__ import annotations

import logging
import os
import traceback
import weakref
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hookline.interop.hosted.batch import HostedBatch, Updates
from hookline.run.optimizers import bare
from hookline.run.state import State
from hookline.util.errors import LossError, described
from hookline.util.short_traceback import OWN
from hookline.util.terminal import place
from hookline.util.text import list_some

log = logging.getLogger("hookline")

ORDER = (
    "The order in a batch: optimizer.zero_grad(), line.backward(loss), line.clip_gradients(1.0), "
    "optimizer.step()."
)
SCALER = os.path.join("torch", "amp", "grad_scaler.py")
INSTALLED = f"{os.sep}site-packages{os.sep}"
"""Part of the file names of packages."""


class Checked(Protocol):
    """A loop as far as its updates are checked: `Line`."""

    state: State
    batch: HostedBatch
    updates: Updates


class UpdateChecks:
    """Warns once of each mistake."""

    def __init__(self, run: Checked) -> None:
        self.run = run
        self._made_of: dict[int, tuple[list[Any], int]] = {}
        """The losses that the first update of each optimizer was made of, and how many, by its number."""
        self._knows_clipping = self._has_warned = False
        self._others: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """Optimizers that the line does not have, with the batch and step of their first update; None: those
        that it need not have.
        """
        self.differentiates = False
        """Whether the line itself has differentiated a loss, which it does not scale."""
        self._handle: Any = None

    def begin(self) -> None:
        """Observe the updates of a loop, if it has passed an optimizer."""
        if self.run.state.optimizers:
            self._handle = register_optimizer_step_pre_hook(self._check)

    def end(self) -> None:
        """Stop to observe."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _check(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check an update that is about to be made. Called for every optimizer of this process."""
        optimizers = self.run.state.setup.optimizers
        if optimizer not in optimizers:
            self._check_owner(optimizer)
            return
        if len(self._made_of) == len(optimizers):
            return  # this was the first update of each
        index, losses = optimizers.index(optimizer), self.run.batch.losses
        if index not in self._made_of:
            self._made_of[index] = losses, len(losses)
            closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
            if closure is None and index not in self.run.updates.announced:  # else it has its gradients
                self._check_gradients(optimizer)
            if self.differentiates and not index:
                self._check_scaler()

    def _warn(self, text: str, *given: Any) -> None:
        if self.run.state.rank == 0:
            log.warning(text, *given)

    # ---- an optimizer that the line does not have ----------------------------------------------------------

    def _check_owner(self, optimizer: Any) -> None:
        """Warn of an optimizer that trains beside those of the line."""
        if self._has_warned:
            return
        s = self.run.state
        now = s.batches_seen, s.step
        if optimizer not in self._others:
            self._others[optimizer] = None if self._is_known(optimizer) else now
        first = self._others[optimizer]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if first is None or not any(isinstance(p, nn.Parameter) for p in parameters):
            return  # an attack changes its input, which is not a parameter
        names = {id(p): name for name, p in s.module.named_parameters()}
        own = [names[id(p)] for p in parameters if id(p) in names]
        if not own and first == now:
            return  # the inner loop of a batch has an optimizer and parameters for this batch only
        kind, model = type(optimizer).__name__, type(s.module).__name__
        if own:
            what, lost = f"updates {list_some(own)} of {model}", "its state"
            remedy = "Line(model, [optimizer, ...])"
        else:
            what = f"updates {len(parameters)} parameters that are not of {model}"
            lost = "its state or these parameters"
            remedy = "Line(torch.nn.ModuleList([model, ...]), [optimizer, ...])"
        self._has_warned = True
        self._warn(
            "%s at %s %s, and this Line was not given it: its steps fire no events, and checkpoints of the "
            "Line do not have %s, so a resume is not exact. Pass all that the loop trains: %s.",
            kind,
            place_in_loop(),
            what,
            lost,
            remedy,
        )

    def _is_known(self, optimizer: Any) -> bool:
        """Return whether it is around or inside an optimizer of the line, or observed for another model."""
        optimizers = self.run.state.optimizers
        if bare(optimizer) in optimizers:
            return True
        for each in optimizers:
            for part in vars(each).values():
                if part is optimizer or (isinstance(part, list | tuple) and optimizer in part):
                    return True
        module = getattr(optimizer, "hookline_module", None)
        return module is not None and module() not in (None, self.run.state.module)

    # ---- the order of the calls ----------------------------------------------------------------------------

    def _check_gradients(self, optimizer: Any) -> None:
        """Warn if the first update has no gradients."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if parameters and all(p.grad is None for p in parameters):
            self._warn(
                "%s.step() at %s updates nothing: none of its %d parameters has a gradient, so there was no "
                "backward pass before it. %s",
                type(optimizer).__name__,
                place_in_loop(),
                len(parameters),
                ORDER,
            )

    def _check_scaler(self) -> None:
        """Warn if a gradient scaler makes the first update of a loss that it has not scaled in time."""
        if any(each.filename.endswith(SCALER) for each in traceback.extract_stack()):
            self._warn(
                "A gradient scaler makes the update at %s, and the loss went through line.backward: either "
                "hooks see the scaled loss, or the gradients are divided by a scale that they do not have. "
                "Replace line.backward(loss) by: loss = line.before_backward(loss); "
                "scaler.scale(loss).backward(); line.after_backward().",
                place_in_loop(),
            )

    def check_clipping(self, indices: list[int]) -> None:
        """Warn if gradients are clipped that were used already: there was no backward pass since the update.

        indices: the optimizers that are clipped.
        """
        made_of, losses = self._made_of, self.run.batch.losses
        is_known = self._knows_clipping or not indices or not made_of.keys() >= {*indices}
        if is_known or not self.run.batch.has_losses:
            return
        self._knows_clipping = True
        if all(made_of[index][0] is losses and made_of[index][1] == len(losses) for index in indices):
            self._warn(
                "line.clip_gradients at %s comes after the update with these gradients, so it has no effect. "
                "%s",
                place_in_loop(),
                ORDER,
            )


def refuse_other_loss(loss: Any, error: Exception) -> None:
    """Raise a LossError if the argument of `line.backward` explains the error."""
    if not isinstance(loss, Tensor):
        raise LossError(
            f"line.backward takes the loss as a tensor with its graph, not {described(loss)}. Pass it "
            "without .item() and float()."
        ) from None
    if loss.numel() != 1:
        raise LossError(
            f"line.backward takes a loss of one number; this one has the shape {tuple(loss.shape)}. Pass its "
            "mean: line.backward(loss.mean())."
        ) from error


def place_in_loop() -> str:
    """Return the file and line of the loop that is running: `train.py:31`."""
    stack = traceback.extract_stack()
    own = next((each for each in reversed(stack) if not _is_of_package(each.filename)), stack[0])
    return place(own.filename, own.lineno or 0)


def _is_of_package(file: str) -> bool:
    return file.startswith(OWN) or INSTALLED in file
