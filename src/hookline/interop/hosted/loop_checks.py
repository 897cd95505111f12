"""Mistakes in a loop written by hand: an optimizer that the line does not have, an update without gradients,
clipping after the update, a loss that is none, and calls that were left out, for which hooks have waited.
Torch is silent about the first three.
"""

from __future__ import annotations

import logging
import os
import traceback
import weakref
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hookline.engine.plan import Plan
from hookline.interop.hosted.batch import LoopRun
from hookline.run.optimizers import bare
from hookline.run.record import monitors_of
from hookline.run.state import count_noun
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


class UpdateChecks:
    """Warns once of each mistake."""

    def __init__(self, run: LoopRun) -> None:
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
    own = next(
        (
            each
            for each in reversed(stack)
            if not each.filename.startswith(OWN) and INSTALLED not in each.filename
        ),
        stack[0],
    )
    return place(own.filename, own.lineno or 0)


# ---- what hooks waited for in a loop that left out the calls which fire it ---------------------------------


OF_BATCHES = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_step_end",
    "on_train_epoch_end",
)
"""Events that need the batches or epochs of the loop: `optimizer.step()` does not fire them."""

OF_UPDATES = ("on_before_zero_grad", "on_before_optimizer_step", "on_after_optimizer_step", "on_step_end")
"""Events that need an optimizer that the line observes."""

OF_BACKWARD, OF_LOSS = ("on_before_backward", "on_after_backward"), frozenset({"loss", "ctx"})
"""Events and facts that need `line.backward`, or `before_backward` and `after_backward`."""


def missing_calls(run: LoopRun, began: tuple[int, int], epochs: int, has_validated: bool) -> list[str]:
    """Return what hooks have waited for in vain, because the loop has left out a call.

    began: the updates and the batches before the run. epochs, has_validated: as of `missing_batches`.
    """
    updates, has_batches = run.state.step - began[0], run.state.batches_seen != began[1]
    batches = "" if has_batches else missing_batches(run, updates, epochs, has_validated)
    return [each for each in (batches, missing_losses(run, updates), missing_optimizer(run)) if each]


def missing_batches(run: LoopRun, updates: int, epochs: int, has_validated: bool) -> str:
    """Return which hooks waited for events of batches and epochs in a loop that had none.

    updates: how many were made. epochs: how many bodies of `line.epochs` read no batches. has_validated:
    whether there was a validation, after which monitors act.
    """
    validates = {each.name for each in run.plan.listeners("on_validation_end")} if has_validated else set()
    waiting = _waiting(run.plan, OF_BATCHES, validates)
    if not waiting or not (updates or epochs):
        return ""
    what = (
        f"{count_noun(updates, 'update was', 'updates were')} made"
        if updates
        else f"{count_noun(epochs, 'epoch', 'epochs')} of line.epochs ran"
    )
    return (
        f"{what} outside of line.epoch(loader) and line.start_batch(batch), so these events did not fire: "
        f"{waiting}. Use `for batch in line.epoch(loader)`; in a loop without a loader "
        "`for k in line.epoch(range(n))`, or line.start_epoch() first in the body of line.epochs."
    )


def missing_losses(run: LoopRun, updates: int) -> str:
    """Return which hooks wait for the loss or events of backward, if updates were made without them."""
    plan = run.plan
    if run.batch.has_losses or updates <= 0:
        return ""
    events = [each for each in OF_BACKWARD if plan.listeners(each)]
    readers = [each for each, facts in plan.wanted_at.items() if facts & OF_LOSS and each not in events]
    monitored = [each["metric"] for each in monitors_of(run.hooks.entries()).values()]
    parts = [f"these events did not fire: {', '.join(events)}"] if events else []
    parts += [f"the loss was None at {', '.join(readers)}"] if readers else []
    parts += ["there is no metric train/loss"] if "train/loss" in monitored else []
    if not parts:
        return ""
    return (
        f"{count_noun(updates, 'update was', 'updates were')} made without line.backward(loss), so "
        f"{', and '.join(parts)}. Replace loss.backward() by line.backward(loss)."
    )


def missing_optimizer(run: LoopRun) -> str:
    """Return which hooks wait for updates, if the loop has backward passes and the line no optimizer."""
    waiting = _waiting(run.plan, OF_UPDATES)
    if run.state.optimizers or not run.batch.has_losses or not waiting:
        return ""
    made = count_noun(len(run.batch.window_losses()), "backward pass was", "backward passes were")
    return (
        f"{made} made, and the line has no optimizer to observe, so no step was counted and these events did "
        f"not fire: {waiting}. Pass the optimizer: Line(model, optimizer, hooks=[...])."
    )


def _waiting(plan: Plan, events: tuple[str, ...], but: set[str] | None = None) -> str:
    """Return the events that have listeners, with the names of their hooks. but: names that do not count."""
    found = {
        event: [each.name for each in plan.listeners(event) if each.name not in (but or ())]
        for event in events
    }
    return "; ".join(f"{event} (hooks: {', '.join(names)})" for event, names in found.items() if names)
