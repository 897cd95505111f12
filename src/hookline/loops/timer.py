"""Measures where the time of a fit goes: waiting for data, validation, saving, hooks, and samples of the
training step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from hookline.listener import Listener
from hookline.loops.step_sampler import StepSampler, clock_for
from hookline.plan import Plan
from hookline.state import State
from hookline.timings import SAMPLED, Timings

EVERY = 50
"""Steps from one sampled step to the next."""
P = ParamSpec("P")
T = TypeVar("T")


class Timed(Protocol):
    """A run whose state may have a timer."""

    @property
    def state(self) -> State:
        """The live facts."""
        ...


R = TypeVar("R", bound=Timed)


def timed(part: str) -> Callable[[Callable[Concatenate[R, P], T]], Callable[Concatenate[R, P], T]]:
    """Count the seconds of a function as this part of the fit. Its first argument is the run."""

    def decorate(function: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
        @functools.wraps(function)
        def call(run: R, *args: P.args, **kwargs: P.kwargs) -> T:
            timer: RunTimer | None = run.state.timer
            if timer is None or not timer.open(part):
                return function(run, *args, **kwargs)
            try:
                return function(run, *args, **kwargs)
            finally:
                timer.close()

        return call  # type: ignore[return-value]  # its first parameter has a name, which callers do not use

    return decorate


class RunTimer:
    """The clocks of one fit, in nanoseconds.

    Parts do not overlap. A part that begins inside another one belongs to the outer one. What hooks spend
    inside a part belongs to that part. A part that runs inside a hook (`trainer.validate()`) is no time of
    that hook.
    """

    def __init__(self, plan: Plan, state: State, device: torch.device) -> None:
        self.state = state
        self.sampler = StepSampler(plan, clock_for(device))
        self._measures_hooks = plan.accounting
        self.spent = {"data": 0, "validation": 0, "saving": 0}
        self.first_waits = 0
        """Of the waiting for data: until the first batch of each epoch."""
        self.epochs = 0
        """Epochs that have opened their loader."""
        self.due = 0
        """The step from which on the next step is sampled."""
        self.warned = False
        """Whether the warning about waiting for the loader is out."""
        self.batches_before = 0
        """Training batches of earlier processes of this run."""
        self._in_parts = 0.0
        """Seconds of hooks that are counted as validation or saving, and of parts that are counted in hooks
        as well.
        """
        self._open = ""
        self._opened = (0, 0.0, False)
        self._hooks_before: float | None = None
        """Seconds that hooks have spent in set-up; None until the training begins."""
        self._final: Timings | None = None

    def begin(self) -> None:
        """Start: set-up is complete."""
        s = self.state
        self._hooks_before, self.batches_before = s.hooks.seconds_spent(), s.batches_seen
        self.due = s.step + 1  # the first step of a process warms up

    def stop(self) -> None:
        """The run is over: keep the figures, because the clocks of the hooks are reset by the next run."""
        self.sampler.abandon()
        if self._hooks_before is not None and self._final is None:
            self._final = self._measure()

    # ---- parts ---------------------------------------------------------------------------------------------

    def open(self, part: str) -> bool:
        """Begin a part; False if the timer does not run, or another part is open, which then includes this
        one.
        """
        if self._open or self._hooks_before is None or self._final is not None:
            return False
        self._open = part
        self._opened = (time.perf_counter_ns(), self.state.hooks.seconds_spent(), self._is_inside_hook())
        return True

    def close(self) -> None:
        """End the part that is open."""
        began, in_hooks, nested = self._opened
        spent = time.perf_counter_ns() - began
        self.spent[self._open] += spent
        if self._open == "data":  # the loader was opened, which starts its workers
            self.first_waits += spent
        self._in_parts += self.state.hooks.seconds_spent() - in_hooks + (spent / 1e9 if nested else 0.0)
        self._open = ""

    def _is_inside_hook(self) -> bool:
        """Return whether a hook is running, as the state says."""
        running = self.state.running
        while running is not None:
            what, running = running
            if isinstance(what, Listener) and what.receiver == "H":
                return True
        return False

    # ---- the figures ---------------------------------------------------------------------------------------

    @property
    def data_seconds(self) -> float:
        """Seconds of waiting for training data so far."""
        return self.spent["data"] / 1e9

    @property
    def training_seconds(self) -> float:
        """Seconds so far without validation and saving."""
        return (
            float(self.state.hooks.stopwatch.seconds)
            - (self.spent["validation"] + self.spent["saving"]) / 1e9
        )

    def timings(self) -> Timings | None:
        """Return the figures so far, or those at the end; None before the training begins."""
        if self._hooks_before is None:
            return None
        return self._final or self._measure()

    def _measure(self) -> Timings:
        s = self.state
        spent = {part: ns / 1e9 for part, ns in self.spent.items()}
        if self._open:
            spent[self._open] += (time.perf_counter_ns() - self._opened[0]) / 1e9
        total = s.hooks.stopwatch.seconds
        rest = max(0.0, total - sum(spent.values()))
        hooks = self._hooks(rest) if self._measures_hooks else None
        count = s.batches_seen - self.batches_before
        return Timings(
            total,
            spent["data"],
            spent["validation"],
            spent["saving"],
            hooks,
            count,
            **self._estimates(count, rest - (hooks or 0.0)),
        )

    def _hooks(self, most: float) -> float:
        """Seconds of hooks outside the parts; an event that a hook emits itself counts for both, so there is
        a limit.
        """
        spent: float = self.state.hooks.seconds_spent()
        inside = self._in_parts + (spent - self._opened[1] if self._open else 0.0)
        return min(max(0.0, spent - (self._hooks_before or 0.0) - inside), most)

    def _estimates(self, batches: int, most: float) -> dict[str, Any]:
        """Return what forward, backward and the optimizer took in all, by the samples; together at most the
        training time.
        """
        self.sampler.read()
        sampled = self.sampler.batches
        if not sampled:
            return {}
        seconds = {part: self.sampler.seconds[part] / sampled * batches for part in SAMPLED}
        scale = min(1.0, most / (sum(seconds.values()) or 1.0))
        return {**{part: each * scale for part, each in seconds.items()}, "sampled_batches": sampled}
