"""Samples what forward, backward and the optimizer take: one accumulation window out of many, marked at its
events.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from hookline.binding import Caller
from hookline.plan import Plan

DONE = "done"
"""The mark after a batch: it counts the batches of a sample."""
MOST_UNREAD = 64
"""Samples that wait to be read."""
Mark = tuple[Any, str]
"""A moment, and what begins there."""


class Clock(Protocol):
    """Takes moments, and says how far they lie apart."""

    def now(self) -> Any:
        """Return this moment."""
        ...

    def is_known(self, moment: Any) -> bool:
        """Return whether the moment can be read without waiting."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """Return the seconds between two moments."""
        ...


class HostClock:
    """The clock of the CPU, for models that run there."""

    now = staticmethod(time.perf_counter)

    def is_known(self, moment: float) -> bool:
        """Return True: the clock was read at once."""
        return True

    def seconds(self, first: float, second: float) -> float:
        """Return the difference."""
        return second - first


class DeviceClock:
    """Events in the stream of an accelerator. They are read once the device has passed them, never waited
    for.
    """

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device, self._event = device, module.Event
        self._stream = getattr(module, "current_stream", None)

    def now(self) -> Any:
        """Record an event after what was launched so far."""
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
        """Return the device's own time between two events that it has passed."""
        return float(first.elapsed_time(second)) / 1e3


def clock_for(device: torch.device) -> Clock | None:
    """Return the clock that tells what a device computes; None if it has none, because launch times would be
    misleading.
    """
    if device.type in ("cpu", "meta"):
        return HostClock()
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        return None
    return DeviceClock(device, module) if hasattr(module, "Event") else None


class StepSampler:
    """Puts marks around the events of one window, and takes them away again.

    A mark ends whatever came before it, so hooks at these events are in no part. The step runs the same calls
    in the same order. What stands in for a slot is made once, and again when the slot has changed.
    """

    def __init__(self, plan: Plan, clock: Clock | None) -> None:
        self.seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self.batches = 0
        """Training batches that the seconds are of."""
        self.is_open = False
        """Whether a sample is being taken."""
        self._plan = plan
        self._clock = clock
        self._labels: dict[str, str] = {}
        """What begins after each event."""
        self._marked: dict[str, tuple[Caller, Caller]] = {}
        """By event: its slot, and what stands in for it."""
        self._marks: list[Mark] = []
        self._unread: list[list[Mark]] = []

    def begin(self, is_manual: bool, recomputes: bool) -> None:
        """Mark the events of the next window. is_manual: the training step calls backward and the optimizers
        itself.
        """
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
        """The window is complete. Return whether the sample counts: it has a batch, and no change of hooks
        took marks away.
        """
        marks = self._marks.copy()
        counts = self.abandon() and DONE in [label for _, label in marks]
        if counts:
            self._unread.append(marks)
            if len(self._unread) > MOST_UNREAD:
                self.read()
                del self._unread[:-MOST_UNREAD]  # a device that is so far behind
        return counts

    def abandon(self) -> bool:
        """Take the marks away and forget this sample. Return whether all of them were still there."""
        plan, found = self._plan, 0
        if self.is_open:
            slots = vars(plan)
            for event, (slot, marking) in self._marked.items():
                if (
                    slots.get(event) is marking
                ):  # else the hooks have changed, and the slot was composed again
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
    """Return what begins after each event of a step; nothing that is timed for an empty text."""
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
    """Return the slot with a mark before and after it. A signal (skip this batch, this step) means that
    nothing follows.
    """

    def marking(s: Any) -> Any:
        add((now(), ""))
        signal = slot(s)
        add((now(), label if signal is None else ""))
        return signal

    return marking
