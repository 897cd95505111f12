"""What is put around one hook call: accounting, a budget, a trace. Measured within one process, in turns, on
the real plan.

A trace is written to a file as in a run, so its chunks are in the numbers. What a whole event costs in a
trace, with its facts, is shown by itself: it is paid once, however many hooks hear it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hookline import Hook
from hookline.engine.events import EVENTS
from hookline.engine.hook_list import HookList
from hookline.engine.plan import Plan
from hookline.run.state import State
from hookline.tracing.tracer import Tracer
from hookline.tracing.writer import TraceFile

HOOKS = 10
BLOCK = 3000
AIMS = {"accounting": 0.3, "trace": 1.0}
"""Microseconds per hook call."""


class Listening(Hook):
    """Listens to the end of every batch."""

    last = -1

    def on_train_batch_end(self, batch_idx: int) -> None:
        """Store the position."""
        self.last = batch_idx


class Budgeted(Listening):
    """The same, with a budget that it keeps."""

    budget = "50%"


def slot(
    hooks: int, folder: Path, accounting: bool = False, kind: type[Hook] = Listening, trace: str = ""
) -> Callable[[Any], Any]:
    """Return the plan's callable for one event."""
    plan = Plan(EVENTS, accounting=accounting)
    hook_list = HookList(plan, EVENTS)
    for index in range(hooks):
        for listener in hook_list.add(kind(f"hook_{index}")).entry.listeners:
            listener.begin(None)
    if trace:
        about = {"stage": "fit", "rank": 0, "local_rank": 0, "world_size": 1, "resumed": False}
        plan.attach(Tracer(plan, TraceFile(folder / trace, about, goes_on=False), "fit"))
    called: Callable[[Any], Any] = plan.on_train_batch_end
    return called


def make_state() -> State:
    """Return a state as in the middle of a training."""
    model = torch.nn.Linear(4, 2)
    state = State(
        module=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)], stage="fit", status="training"
    )
    state.fill(last_loss=0.5, step=12345, batch_idx=345, dataloader_name="train")
    return state


def measure(rounds: int) -> dict[str, float]:
    """Return microseconds: the lower quartile of differences between neighbours, because every disturbance
    increases them.
    """
    state = make_state()
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        slots = {
            "plain": slot(HOOKS, here),
            "accounting": slot(HOOKS, here, accounting=True),
            "budget": slot(HOOKS, here, kind=Budgeted),
            "trace": slot(HOOKS, here, trace="ten.json"),
            "event": slot(0, here, trace="none.json"),
            "no listener": slot(0, here),
        }
        found: dict[str, list[float]] = {name: [] for name in ("accounting", "budget", "trace", "event")}
        for turn in range(rounds + 1):
            times = {name: _time(called, state) for name, called in slots.items()}
            if turn == 0:
                continue  # it warms up
            event = times["event"] - times["no listener"]
            found["event"].append(event)
            found["accounting"].append((times["accounting"] - times["plain"]) / HOOKS)
            found["budget"].append((times["budget"] - times["accounting"]) / HOOKS)
            found["trace"].append((times["trace"] - times["plain"] - event) / HOOKS)
    return {name: statistics.quantiles(values, n=4)[0] for name, values in found.items()}


def _time(called: Callable[[Any], Any], state: State) -> float:
    start = time.thread_time_ns()
    for _ in range(BLOCK):
        called(state)
    return (time.thread_time_ns() - start) / BLOCK / 1e3


def calls(rounds: int) -> int:
    """Measure and show; 1 if an aim is missed."""
    found = measure(rounds)
    print(f"One hook call, {HOOKS} hooks at on_train_batch_end, lower quartile of {rounds} rounds:")
    for name, word in (
        ("accounting", "accounting"),
        ("budget", "a budget, besides"),
        ("trace", "a trace, written out"),
    ):
        aim = f"   aim: at most {AIMS[name]:.1f}" if name in AIMS else ""
        print(f"  {word:<22}{found[name]:6.2f} µs{aim}")
    print(
        f"  and {found['event']:.2f} µs for the event itself in a trace, with its facts, however many hooks "
        f"hear it"
    )
    missed = [name for name, aim in AIMS.items() if found[name] > aim]
    print(f"Missed: {', '.join(missed)}" if missed else "Both aims are met.")
    return 1 if missed else 0
