"""The first thing that ranks say to each other in a run: are all about to do the same, and can they hear each
other at all?

It goes over the store and not over the control group. There, what one rank says is paired with whatever
another says at that moment, so ranks that begin different things, or of which one has left something
unanswered in a run that failed, would wait for ever or misunderstand each other. In the store everything has
a name.
"""

from __future__ import annotations

import functools
import hashlib
import json
from typing import Any

from hookline.errors import HooklineError, OptionError
from hookline.loops.run import Run
from hookline.loops.same import differing
from hookline.ranks import STARTS, Ranks, who_has_ended
from hookline.strategies.meeting import wait_until
from hookline.urls import shown


def begin_together(run: Run, **given: Any) -> None:
    """Wait until all ranks have begun this run; what differs is an error on all of them.

    given: what the verb was called with and must be the same everywhere, because what follows depends on it.
    """
    ranks = run.strategy.ranks
    board = ranks.board(STARTS)
    number = board.add(f"done/{ranks.rank}", 0) + 1
    board.delete_key(f"{number - 1}/{ranks.rank}")  # it was read before that run went on
    mine = {
        "about": {"the verb": run.stage, **{f"{name}=": _as_text(value) for name, value in given.items()}},
        "exchanges": ranks.exchanges,
        "logs": bool(run.state.logger),
    }
    board.set(f"{number}/{ranks.rank}", json.dumps(mine))
    come = functools.partial(wait_for, ranks, board, run.stage)
    verdict = f"{number}/verdict"
    if ranks.rank == 0:
        keys = come([f"{number}/{rank}" for rank in range(ranks.world_size)])
        everyone = [json.loads(board.get(key)) for key in keys]
        board.set(verdict, json.dumps([*judge(everyone, board), everyone[0]["logs"]]))
    out_of_step, differs, run.traits.logs = json.loads(board.get(come([verdict])[0]))
    board.add(f"done/{ranks.rank}", 1)
    if out_of_step:
        raise HooklineError(out_of_step)
    if differs:
        raise OptionError(differs)


def _as_text(value: Any) -> str:
    """What ranks compare, and an error shows: a URL without its secrets, and with a sum that tells two of
    them apart.
    """
    text, said = str(value), shown(value)
    return said if said == text else f"{said} (sha256 {hashlib.sha256(text.encode()).hexdigest()[:8]})"


def wait_for(ranks: Ranks, board: Any, stage: str, keys: list[str]) -> list[str]:
    """Until they are there, or a process is known to be gone."""

    def are_there() -> bool:
        if board.check(keys):
            return True
        if ended := who_has_ended(ranks.world_size):
            raise HooklineError(f"{stage}() takes all ranks, and some cannot come any more. {ended}")
        return False

    def missing() -> list[int]:
        return [rank for rank, key in enumerate(keys) if not board.check([key])]

    wait_until(are_there, missing, f"Not all ranks have called {stage}()", ranks.timeout)
    return keys


def judge(everyone: list[dict[str, Any]], board: Any) -> tuple[str, str]:
    """Why the ranks cannot run together: what an earlier run has left behind, and what they were started
    with.
    """
    begun = [each["exchanges"] for each in everyone]
    if len(set(begun)) > 1:
        why = f" on {board.get('failure').decode()}" if board.check(["failure"]) else ""
        return (
            f"An earlier run fell apart{why}, in the middle of what the ranks say to each other: one of "
            f"them has begun {max(begun)} exchanges, another {min(begun)}. They cannot go on together: "
            "start the job again; resume='auto' goes on from its newest checkpoint."
        ), ""
    found = next(
        iter(differing([each["about"] for each in everyone], lambda name: name)), ""
    )  # another verb takes other things
    return "", found and f"The ranks were started differently: {found}. Start all with the same program."
