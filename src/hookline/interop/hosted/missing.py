"""What hooks waited for in a loop that left out the calls which fire it."""

from __future__ import annotations

from typing import Protocol

from hookline.engine.hook_list import HookList
from hookline.engine.plan import Plan
from hookline.interop.hosted.batch import HostedBatch
from hookline.run.record import monitors_of
from hookline.run.state import State, count_noun

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


class Observed(Protocol):
    """A loop as far as its missing calls are concerned: `Line`."""

    plan: Plan
    state: State
    batch: HostedBatch

    @property
    def hooks(self) -> HookList:
        """Return the hooks of the loop."""
        ...


def missing_batches(run: Observed, updates: int, epochs: int, has_validated: bool) -> str:
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


def missing_losses(run: Observed, updates: int) -> str:
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


def missing_optimizer(run: Observed) -> str:
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
