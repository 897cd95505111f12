"""Measure the time of a fit: data, validation, saving, hooks, and samples of the training step."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from hookline.engine.binding import Caller
from hookline.engine.listener import Listener
from hookline.engine.plan import Plan
from hookline.run.state import State
from hookline.run.timings import SAMPLED, Timings

# ---- Samples of forward, backward and the optimizer


DONE = "done"
"""The label after a batch, which counts the batches of a sample."""
MOST_UNREAD = 64
"""The largest number of samples that wait to be read."""
Mark = tuple[Any, str]
"""A moment, and the label of the part that begins there."""


class Clock(Protocol):
    """Records moments, and measures the time between them."""

    def now(self) -> Any:
        """Return this moment."""

    def is_known(self, moment: Any) -> bool:
        """Return whether the moment can be read without waiting."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """Return the seconds between two moments."""
        ...


class HostClock:
    """The clock of the host, for models on the CPU."""

    now = staticmethod(time.perf_counter)

    def is_known(self, moment: float) -> bool:
        """Return True, because the clock is read at once."""
        return True

    def seconds(self, first: float, second: float) -> float:
        """Return the difference."""
        return second - first


class DeviceClock:
    """Records events in the stream of an accelerator, and reads them without waiting for the device."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device, self._event = device, module.Event
        self._stream = getattr(module, "current_stream", None)

    def now(self) -> Any:
        """Record an event after the kernels that were launched so far."""
        event = self._event(enable_timing=True)
        if self._stream is None:
            event.record()
        else:
            event.record(self._stream(self._device))
        return event

    def is_known(self, moment: Any) -> bool:
        """Return whether the device has passed the event."""
        return bool(moment.query())

    def seconds(self, first: Any, second: Any) -> float:
        """Return the device time between two completed events."""
        return float(first.elapsed_time(second)) / 1e3


def clock_for(device: torch.device) -> Clock | None:
    """Return the clock for a device; None if it has no events, because launch times would be misleading."""
    if device.type in ("cpu", "meta"):
        return HostClock()
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        return None
    return DeviceClock(device, module) if hasattr(module, "Event") else None


class StepSampler:
    """Marks the events of one accumulation window, and removes the marks again.

    A mark ends the part before it, so hooks at these events belong to no part. The step runs the same calls
    in the same order. The wrapper of a slot is made once, and again when the slot has changed.
    """

    def __init__(self, plan: Plan, clock: Clock | None) -> None:
        self.seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self.batches = 0
        """The number of sampled training batches."""
        self.is_open = False
        """Whether a sample is being taken."""
        self._plan = plan
        self._clock = clock
        self._labels: dict[str, str] = {}
        """The part that begins after each event."""
        self._marked: dict[str, tuple[Caller, Caller]] = {}
        """For each event: its slot, and the wrapper."""
        self._marks: list[Mark] = []
        self._unread: list[list[Mark]] = []

    def begin(self, is_manual: bool, recomputes: bool) -> None:
        """Mark the events of the next window. is_manual: the training step updates the weights itself."""
        if self._clock is None:
            return
        plan, marked = self._plan, self._marked
        self._labels = self._labels or labels(is_manual, recomputes)
        for event, label in self._labels.items():
            slot: Caller = getattr(plan, event)
            if event not in marked or marked[event][0] is not slot:
                marked[event] = (slot, _marking(slot, label, self._clock.now, self._marks.append))
            setattr(plan, event, marked[event][1])
        self.is_open = True

    def end(self) -> bool:
        """End the sample, and return whether it counts: it has a batch, and the hooks did not change."""
        marks = self._marks.copy()
        counts = self.abandon() and DONE in [label for _, label in marks]
        if counts:
            self._unread.append(marks)
            if len(self._unread) > MOST_UNREAD:
                self.read()
                del self._unread[:-MOST_UNREAD]  # the device is too far behind
        return counts

    def abandon(self) -> bool:
        """Remove the marks and drop this sample. Return whether all marks were still there."""
        plan, found = self._plan, 0
        if self.is_open:
            slots = vars(plan)
            for event, (slot, marking) in self._marked.items():
                if slots.get(event) is marking:  # else the hooks have changed, and the slot was recomposed
                    setattr(plan, event, slot)
                    found += 1
        was_open, self.is_open = self.is_open, False
        self._marks.clear()
        return was_open and found == len(self._marked)

    def read(self) -> None:
        """Add up the samples that can be read without waiting for the device."""
        while self._unread and self._clock is not None and self._clock.is_known(self._unread[0][-1][0]):
            marks = self._unread.pop(0)
            for (moment, label), (following, _) in itertools.pairwise(marks):
                if label in self.seconds:
                    self.seconds[label] += self._clock.seconds(moment, following)
            self.batches += sum(label == DONE for _, label in marks)


def labels(is_manual: bool, recomputes: bool) -> dict[str, str]:
    """Return the part that begins after each event of a step; empty for a part that is not timed."""
    inside = "forward" if is_manual else ""
    return {
        "on_train_batch_start": "forward",
        "on_before_zero_grad": inside,
        "on_before_backward": "backward",
        "on_after_backward": "optimizer" if recomputes else inside,
        "on_before_optimizer_step": "optimizer",
        "on_gradient_clip": "optimizer",
        "on_after_optimizer_step": inside,
        "on_step_skipped": inside,
        "on_train_batch_end": DONE,
    }


def _marking(slot: Caller, label: str, now: Callable[[], Any], add: Callable[[Mark], None]) -> Caller:
    """Return the slot with a mark before and after it. After a signal (skip this batch) no part begins."""

    def marking(s: Any) -> Any:
        add((now(), ""))
        signal = slot(s)
        add((now(), label if signal is None else ""))
        return signal

    return marking


SAMPLE_EVERY = 50
"""Steps from one sampled step to the next."""


class StepObserver(Protocol):
    """Observes single accumulation windows of a fit, and costs nothing in the others."""

    due: float
    """The step from which on it observes the next window."""
    is_open: bool
    """Whether it observes this window."""

    def begin(self) -> None:
        """Begin, before the first batch of a window is fetched."""

    def end(self) -> None:
        """End, before the next window, and set `due`."""


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

    Parts do not overlap. A part inside another one belongs to the outer one. Hooks inside a part belong to
    that part. A part that runs inside a hook (`trainer.validate()`) does not count as time of that hook.
    """

    def __init__(self, plan: Plan, state: State, device: torch.device | None) -> None:
        """Take the device whose steps are sampled. None: those of a hand-written loop are not."""
        self.state = state
        self.takes_samples = device is not None
        self.sampler = StepSampler(plan, None if device is None else clock_for(device))
        self._measures_hooks = plan.accounting
        self.spent = {"data": 0, "validation": 0, "saving": 0}
        self.first_waits = 0
        """The part of the waiting for data until the first batch of each epoch."""
        self.epochs = 0
        """The number of epochs that have opened their loader."""
        self.due = 0
        """The step at which the next sample of the timer's own begins or ends."""
        self.observers: list[StepObserver] = []
        """Observers of single steps, such as those of a hook; one at a time."""
        self.recorders: list[StepObserver] = []
        """Observers of the very steps that they are due at, whatever else observes these."""
        self.warned = False
        """Whether the warning about waiting for the loader was logged."""
        self.is_second_check = False
        """Whether this rank has found before that it mostly waits for its loader."""
        self.longest_wait: tuple[float | None, int | None] = (None, None)
        """The seconds and the rank that waited longest for its loader, once the ranks have compared them."""
        self.batches_before = 0
        """Training batches of earlier processes of this run."""
        self._in_parts = 0.0
        """Seconds of hooks that count as validation or saving, and of parts that also count as hooks."""
        self._open = ""
        self._opened = (0, 0.0, False)
        self._hooks_before: float | None = None
        """Seconds of hooks during set-up; None until training begins."""
        self._final: Timings | None = None

    def begin(self) -> None:
        """Start the clocks, after set-up is complete."""
        s = self.state
        self._hooks_before, self.batches_before = s.hooks.seconds_spent(), s.batches_seen
        self.due = s.step + 1  # the first step of a process warms up

    def stop(self) -> None:
        """Keep the figures at the end of the run, because the next run resets the clocks of the hooks."""
        self.sampler.abandon()
        if self._hooks_before is not None and self._final is None:
            self._final = self._measure()

    @property
    def next_due(self) -> float:
        """The step at which a sample or an observer begins or ends next."""
        return min([self.due, *[each.due for each in (*self.observers, *self.recorders)]])

    # ---- parts ---------------------------------------------------------------------------------------------

    def open(self, part: str) -> bool:
        """Begin a part. Return False if the timer does not run, or this part is inside another one."""
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
        """Return whether a hook is running, by `State.running`."""
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
        """Return the figures so far, or the final ones; None before training begins."""
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
        longest_wait, longest_wait_rank = self.longest_wait
        return Timings(
            total,
            spent["data"],
            spent["validation"],
            spent["saving"],
            hooks,
            count,
            longest_wait=longest_wait,
            longest_wait_rank=longest_wait_rank,
            **self._estimates(count, rest - (hooks or 0.0)),
        )

    def _hooks(self, most: float) -> float:
        """Return the seconds of hooks outside the parts, at most `most`: nested events count twice."""
        spent: float = self.state.hooks.seconds_spent()
        inside = self._in_parts + (spent - self._opened[1] if self._open else 0.0)
        return min(max(0.0, spent - (self._hooks_before or 0.0) - inside), most)

    def _estimates(self, batches: int, most: float) -> dict[str, Any]:
        """Estimate the total time of forward, backward and the optimizer from the samples, at most `most`."""
        self.sampler.read()
        sampled = self.sampler.batches
        if not sampled:
            return {}
        seconds = {part: self.sampler.seconds[part] / sampled * batches for part in SAMPLED}
        scale = min(1.0, most / (sum(seconds.values()) or 1.0))
        return {**{part: each * scale for part, each in seconds.items()}, "sampled_batches": sampled}
