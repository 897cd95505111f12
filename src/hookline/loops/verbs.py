"""All that the trainer's verbs are made of, in one place: the trainer imports it with the first verb that is
called.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from hookline.checkpoint.saves import COUNTERS, asked_for
from hookline.loops.compiling import explain_graphs
from hookline.loops.evaluate import evaluate
from hookline.loops.fit import fit
from hookline.loops.guests import see_off
from hookline.loops.lifecycle import Determinism, Guests, carry_out
from hookline.loops.loading import is_off, limit_of, load
from hookline.loops.locking import locked
from hookline.loops.model_location import load_best
from hookline.loops.noting import Recorded
from hookline.loops.parts import RunData
from hookline.loops.pass_events import TEST, VALIDATION
from hookline.loops.restoring import keep_findings
from hookline.loops.resuming import choose_start, look_up
from hookline.loops.run import Run
from hookline.loops.saving import save
from hookline.loops.signals import Signals
from hookline.loops.watchdog import Watchdog

__all__ = [
    "COUNTERS",
    "TEST",
    "VALIDATION",
    "Determinism",
    "Guests",
    "Recorded",
    "Run",
    "RunData",
    "Signals",
    "Watchdog",
    "asked_for",
    "begin",
    "carry_out",
    "choose_start",
    "controlled",
    "evaluate",
    "explain_graphs",
    "fit",
    "is_off",
    "keep_findings",
    "limit_of",
    "load",
    "load_best",
    "locked",
    "look_up",
    "save",
    "watching_peers",
]


def begin(run: Run, **given: Any) -> None:
    """Wait until all ranks have begun this run, if there are several. given: as of `begin_together`."""
    if not run.strategy.ranks.alone:
        from hookline.loops.begin import begin_together

        begin_together(run, **given)


def controlled(run: Run) -> contextlib.AbstractContextManager[object]:
    """For `with`: answers those who ask the run for something from outside, unless that is switched off."""
    if run.strategy.ranks.alone and not run.options.control:
        return contextlib.nullcontext()
    from hookline.control.server import Control

    run.participants.teardown_removed = functools.partial(see_off, run)
    return Control(run)


def watching_peers(run: Run) -> contextlib.AbstractContextManager[object]:
    """For `with`: watches the other ranks, if there are any."""
    if run.strategy.ranks.alone:
        return contextlib.nullcontext()
    from hookline.loops.peers import Peers

    return Peers(run)
