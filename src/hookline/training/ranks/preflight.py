"""The first thing that ranks say to each other in a run: are all about to do the same, and can they hear each
other at all?

It goes over the store and not over the control group. There, what one rank says is paired with whatever
another says at that moment, so ranks that begin different things, or of which one has left something
unanswered in a run that failed, would wait for ever or misunderstand each other. In the store everything has
a name.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

from hookline.distributed.comm import STARTS, Ranks, describe_ended_ranks, listed
from hookline.distributed.launch import wait_until
from hookline.run.run import Run
from hookline.util.errors import HookError, HooklineError, OptionError
from hookline.util.urls import shown

# ---- Before anything is trained


OF_ONE_RANK = ("run_dir", "default_root_dir", "enable_progress_bar", "control", "seed")
"""Options that may differ: paths, what is shown, who listens for commands, and a seed for each rank (rank
zero's counts).
"""


def check_equal(run: Run) -> None:
    """Compare the plan, the options and the model over ranks, by a hash first: ten words a rank if all is
    well.
    """
    ranks = run.strategy.ranks
    mine = {"listeners": listeners_of(run), "options": options_of(run), "about": about(run)}
    hashes = ranks.gather(hashlib.sha256(json.dumps(mine).encode()).hexdigest())
    if len(set(hashes)) == 1:
        return
    everyone = ranks.gather(mine)
    found = [
        *differing([each["about"] for each in everyone], lambda name: name),
        *differing([each["options"] for each in everyone], lambda name: f"the option {name}"),
    ]
    if found:
        raise OptionError(
            f"The ranks were started differently: {'; '.join(found)}. Start all with the same program."
        )
    found = [
        f"{label} ({cls}) hears {event}{f' {filters}' if filters else ''} on {listed(here)}, not on "
        f"{listed(missing)}"
        for (event, label, cls, filters), here, missing in absent([each["listeners"] for each in everyone])
    ]
    if found:
        raise HookError(
            f"The ranks have different hooks: {'; '.join(found[:6])}{'; ...' if len(found) > 6 else ''}. "
            "All ranks need the same ones; a hook for some ranks only says so: ranks = 'zero', or a set of "
            "them."
        )
    raise HookError(
        "The ranks have the same hooks in another order; register them in the same order everywhere."
    )


def listeners_of(run: Run) -> list[list[str]]:
    """Who hears what, in order, less the hooks that are for some ranks only."""
    limited = {
        entry.name for entry in run.state.hooks.entries() if getattr(entry.hook, "ranks", "all") != "all"
    }
    return [
        [
            event.name,
            each.label,
            type(each.owner).__name__ if each.owner is not None else each.function.__qualname__,
            " ".join(one.text for one in each.filters),
        ]
        for event in run.plan.table
        for each in run.plan.listeners(event.name)
        if not (each.receiver == "H" and each.name in limited)
    ]


def options_of(run: Run) -> dict[str, str]:
    """Every option that steers the loop, as text."""
    given = {each.name: getattr(run.options, each.name) for each in dataclasses.fields(run.options)}
    return {name: _shown(value) for name, value in given.items() if name not in OF_ONE_RANK}


def about(run: Run) -> dict[str, str]:
    """What is run, and how."""
    parameters = sum(each.numel() for each in run.module.parameters())
    return {
        "the verb": run.stage,
        "the module": type(run.module).__name__,
        "its number of parameters": str(parameters),
        "the strategy": type(run.strategy).__name__,
        "the precision": run.strategy.precision.name,
        "the number of ranks": str(run.strategy.world_size),
        "the kind of device": run.strategy.device.type,
    }


def differing(tables: list[dict[str, str]], named: Callable[[str], str]) -> Iterable[str]:
    """Each name with the values that ranks have for it, if they are not the same."""
    for name in tables[0]:
        values: dict[str, list[int]] = {}
        for rank, each in enumerate(tables):
            values.setdefault(each.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            found = ", ".join(f"{value} on {listed(where)}" for value, where in values.items())
            yield f"{named(name)} is {found}"


def absent(lists: list[list[list[str]]]) -> Iterable[tuple[tuple[str, ...], list[int], list[int]]]:
    """What is in the lists of some ranks only: with those that have it, and those that do not."""
    sets = [{tuple(each) for each in one} for one in lists]
    everything = dict.fromkeys(tuple(each) for one in lists for each in one)
    for each in everything:
        here = [rank for rank, one in enumerate(sets) if each in one]
        if len(here) < len(sets):
            yield each, here, [rank for rank in range(len(sets)) if rank not in here]


def _shown(value: Any) -> str:
    """Functions by their name: their address differs from process to process."""
    return getattr(value, "__qualname__", None) or str(value)


def start_ranks(run: Run, **given: Any) -> None:
    """Wait until all ranks have begun this run; what differs is an error on all of them.

    given: what the verb was called with and must be the same everywhere, because what follows depends on it.
    """
    ranks = run.strategy.ranks
    store = ranks.store(STARTS)
    number = store.add(f"done/{ranks.rank}", 0) + 1
    store.delete_key(f"{number - 1}/{ranks.rank}")  # it was read before that run went on
    mine = {
        "about": {"the verb": run.stage, **{f"{name}=": _as_text(value) for name, value in given.items()}},
        "exchanges": ranks.exchanges,
        "logs": bool(run.state.logger),
    }
    store.set(f"{number}/{ranks.rank}", json.dumps(mine))
    come = functools.partial(wait_for, ranks, store, run.stage)
    verdict = f"{number}/verdict"
    if ranks.rank == 0:
        keys = come([f"{number}/{rank}" for rank in range(ranks.world_size)])
        everyone = [json.loads(store.get(key)) for key in keys]
        store.set(verdict, json.dumps([*judge(everyone, store), everyone[0]["logs"]]))
    out_of_step, differs, run.traits.logs = json.loads(store.get(come([verdict])[0]))
    store.add(f"done/{ranks.rank}", 1)
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


def wait_for(ranks: Ranks, store: Any, stage: str, keys: list[str]) -> list[str]:
    """Until they are there, or a process is known to be gone."""

    def are_there() -> bool:
        if store.check(keys):
            return True
        if ended := describe_ended_ranks(ranks.world_size):
            raise HooklineError(f"{stage}() takes all ranks, and some cannot come any more. {ended}")
        return False

    def missing() -> list[int]:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]

    wait_until(are_there, missing, f"Not all ranks have called {stage}()", ranks.timeout)
    return keys


def judge(everyone: list[dict[str, Any]], store: Any) -> tuple[str, str]:
    """Why the ranks cannot run together: what an earlier run has left behind, and what they were started
    with.
    """
    begun = [each["exchanges"] for each in everyone]
    if len(set(begun)) > 1:
        why = f" on {store.get('failure').decode()}" if store.check(["failure"]) else ""
        return (
            f"An earlier run fell apart{why}, in the middle of what the ranks say to each other: one of "
            f"them has begun {max(begun)} exchanges, another {min(begun)}. They cannot go on together: "
            "start the job again; resume='auto' goes on from its newest checkpoint."
        ), ""
    found = next(
        iter(differing([each["about"] for each in everyone], lambda name: name)), ""
    )  # another verb takes other things
    return "", found and f"The ranks were started differently: {found}. Start all with the same program."
