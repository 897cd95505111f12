"""What is measured: sections of trainings that alternate, each on one model and one source of batches."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

from drivers import Case
from lockstep import Clock
from sources import Source, listed, loaded, shuffled, streamed
from torch import nn
from work import GPT, MLP, Digits, Tiny, classes, numbers, text

AGAIN = Case("the same loop again", drivers=("bare",))
CONTROLS = {
    "training": (AGAIN, Case("gradients cleared by hand", drivers=("by hand",))),
    "validation": (AGAIN,),
    "compiled": (AGAIN, Case("the same parts compiled by hand", drivers=("by hand",))),
    "startup": (AGAIN,),
}
"""Other loops by hand: how far apart equal loops come out, and what `Optimizer.zero_grad` costs, which
Hookline does without.
"""


@dataclass(frozen=True)
class Section:
    """Trainings that are compared with one bare loop."""

    name: str
    title: str
    model: type[nn.Module]
    source: Source
    untimed: int
    timed: int
    cases: tuple[Case, ...] = (Case(),)
    stage: str = "training"
    clock: Clock = time.thread_time_ns
    rounds: float = 1
    """How many rounds, relative to other sections."""
    untimed_rounds: int = 1
    """Rounds at the start of a set-up that do not count, because they warm up."""
    setups: int = 4
    """Times everything is set up anew: two equal trainings come out up to 2 % apart, round after round."""
    peers: bool = False
    """Whether trainers other than Lightning take part with `--peers`."""

    weight: float = 1
    """How long a contender takes, relative to other sections."""

    @property
    def controls(self) -> tuple[Case, ...]:
        """Return the loops by hand that take part besides the bare one."""
        return CONTROLS[self.stage]

    def row(self, case: Case) -> str:
        """Return the title of a row."""
        return f"{self.title}, {case.name}" if case.name else self.title


def _linear(name: str, title: str, source: Source, aim: float | None = None, **more: object) -> Section:
    return Section(name, title, Tiny, source, 10, 40, (Case(aim=aim),), peers=True, **more)  # type: ignore[arg-type]


LISTED, DIGITS = listed(partial(numbers, 1)), partial(classes, inputs=784)
WALL = time.perf_counter_ns
TEN = Case("10 listening hooks", 10, listening=True)

SECTIONS = (
    Section(
        "list",
        "Linear, list",
        Tiny,
        LISTED,
        10,
        40,
        peers=True,
        weight=2,
        cases=(
            Case(aim=1.00),
            Case("10 silent hooks", 10),
            replace(TEN, aim=1.08),
            replace(
                TEN, name=f"{TEN.name}, accounting off", accounting=False, drivers=("hookline",), aim=1.04
            ),
            Case("50 listening hooks", 50, listening=True),
            Case("a metric per step, a row per 50", row_every=50),
            Case("a metric and a row per step", row_every=1),
        ),
    ),
    _linear("loader-1", "Linear, DataLoader(batch 1)", loaded(numbers, 1), aim=1.02),
    _linear("loader-64", "Linear, DataLoader(batch 64)", loaded(numbers, 64), rounds=0.6),
    _linear("workers-1", "Linear, DataLoader(batch 1, 2 workers)", loaded(numbers, 1, 2), clock=WALL),
    _linear(
        "workers-64",
        "Linear, DataLoader(batch 64, 2 workers)",
        loaded(numbers, 64, 2),
        clock=WALL,
        rounds=0.6,
    ),
    _linear("iterable", "Linear, iterable", streamed(partial(numbers, 1)), aim=1.06),
    Section(
        "memory-64",
        "MLP, 20,000 x 784 shuffled, batch 64",
        Digits,
        shuffled(DIGITS, 20_000, 64),
        4,
        16,
        (Case(aim=0.85),),
        rounds=0.6,
    ),
    Section(
        "memory-256",
        "MLP, 20,000 x 784 shuffled, batch 256",
        Digits,
        shuffled(DIGITS, 20_000, 256),
        1,
        6,
        (Case(aim=0.80),),
        rounds=0.6,
    ),
    Section("mlp", "MLP, list", MLP, listed(classes), 4, 16, (Case(), TEN), rounds=0.6, peers=True),
    Section("gpt", "GPT, list", GPT, listed(text), 1, 4, (Case(), TEN), rounds=0.6, peers=True),
    Section("validation", "Linear, validation pass, list", Tiny, LISTED, 20, 80, stage="validation"),
    Section(
        "startup",
        "start-up, fit of one batch",
        Tiny,
        LISTED,
        0,
        1,
        stage="startup",
        untimed_rounds=0,
        rounds=0.1,
        setups=6,
        weight=10,
    ),
    Section(
        "compiled-linear",
        "Linear, compiled step, list",
        Tiny,
        listed(numbers),
        10,
        40,
        (Case(aim=1.05),),
        stage="compiled",
        rounds=0.6,
        setups=1,
        weight=6,
    ),
    Section(
        "compiled-mlp",
        "MLP, compiled step, list",
        MLP,
        listed(classes),
        4,
        16,
        (Case(aim=1.05),),
        stage="compiled",
        rounds=0.6,
        setups=1,
        weight=6,
    ),
)
