"""Preflight checks of the ranks, before training: that all of them start the same run with the same hooks.

`start_ranks` uses the store and not collectives. A collective pairs the calls of all ranks by their order, so
ranks that start different runs, or of which one has a call left from a run that failed, would hang or read
wrong data. In the store every entry has a name.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any

from hookline.distributed.comm import STARTS, Ranks, describe_ended_ranks, format_ranks
from hookline.distributed.process_group import wait_until
from hookline.engine.hook import FunctionHook
from hookline.engine.source_text import function_name
from hookline.run.optimizers import bare
from hookline.run.provenance import hook_arguments
from hookline.run.run import Run
from hookline.run.state import State
from hookline.training.settings import collect_settings
from hookline.util.errors import HookError, HooklineError, OptionError
from hookline.util.text import mask
from hookline.util.urls import shown

log = logging.getLogger("hookline")

OF_ONE_RANK = ("run_dir", "default_root_dir", "enable_progress_bar", "control", "seed")
"""Options that may differ: paths, the progress bar, the control socket, and the seed (rank zero's counts)."""


KINDS = ("built-in", "own")
"""Hooks of the package, whose arguments must be the same on all ranks, and others."""


def check_equal(run: Run) -> None:
    """Compare the listeners, options and model of all ranks, by a hash first, and raise if they differ."""
    mine = {
        "listeners": listeners_of(run),
        "options": shared_options(run),
        "about": facts_of_run(run),
        "arguments": hook_arguments_of(run),
    }
    of_all = gather_different(run.strategy.ranks, mine)
    if not of_all:
        return
    found = [
        *differing([each["about"] for each in of_all], lambda name: name),
        *differing([each["options"] for each in of_all], lambda name: f"the option {name}"),
    ]
    if found:
        raise OptionError(
            f"The ranks were started differently: {'; '.join(found)}. Start all with the same program."
        )
    steering, own = (_other_arguments([each["arguments"][kind] for each in of_all]) for kind in KINDS)
    if own and run.state.rank == 0:
        log.warning(
            "Hooks have other arguments on other ranks: %s. If the hooks change the training, the weights of "
            "the ranks drift apart.",
            "; ".join(own),
        )
    found = [
        f"{label} ({cls}) listens to {event}{f' {filters}' if filters else ''} on {format_ranks(here)}, "
        f"not on {format_ranks(missing)}"
        for (event, label, cls, filters), here, missing in absent([each["listeners"] for each in of_all])
    ]
    if found:
        raise HookError(
            f"The ranks have different hooks: {'; '.join(found[:6])}{'; ...' if len(found) > 6 else ''}. "
            "All ranks need the same hooks. For a hook that only some ranks call, set ranks = 'zero' or a "
            "set of ranks."
        )
    if steering:
        raise HookError(
            f"The ranks have hooks with other arguments: {'; '.join(steering)}. Pass the same on all ranks."
        )
    if any(each["listeners"] != mine["listeners"] for each in of_all):
        raise HookError(
            "The ranks have the same hooks in another order; register them in the same order on all ranks."
        )


def check_equal_optimizers(run: Run) -> None:
    """Raise if the optimizers of the ranks have different classes or settings: their weights would drift."""
    settings = {
        name: repr(value) for name, value in collect_settings(run).items() if name.startswith("optimizers.")
    }
    classes = {
        f"optimizer {index}": type(bare(each)).__name__ for index, each in enumerate(run.state.optimizers)
    }
    of_all = gather_different(run.strategy.ranks, {"classes": classes, "settings": settings})

    def label(name: str) -> str:
        _, index, _, group, setting = name.split(".", 4)
        return f"{setting} of group {group} of optimizer {index} ({classes[f'optimizer {index}']})"

    # optimizers of different classes have different settings, which would hide the cause
    found = [*differing([each["classes"] for each in of_all], str)] or [
        *differing([each["settings"] for each in of_all], label)
    ]
    if found:
        raise OptionError(
            f"The ranks have different optimizers: {'; '.join(found[:6])}{'; ...' if len(found) > 6 else ''}."
            " Their weights would drift apart. Create the optimizers with the same settings on every rank."
        )


def refuse_on_some_ranks(s: State, method: str) -> None:
    """Raise if a hook that only some ranks call uses a method of the strategy that needs all ranks."""
    running = s.running
    while running is not None:
        listener, running = running
        # `ranks` of a strategy or of a module has another meaning
        is_hook = getattr(listener, "receiver", "") == "H"
        if is_hook and (ranks := getattr(listener.owner, "ranks", "all")) != "all":
            raise HookError(
                f"strategy.{method}() needs all ranks, and {listener.label} has ranks={ranks!r}, so the call "
                "would wait for the other ranks without end. Set ranks = 'all', call it on every rank, and "
                "use the result under `if rank == 0`. Arguments of events, such as loss and grad_norm, and "
                "logged metrics are reduced over ranks already."
            )


def gather_different(ranks: Ranks, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the values of all ranks if they differ, else an empty list. Compares hashes first."""
    hashes = ranks.gather(hashlib.sha256(json.dumps(mine).encode()).hexdigest())
    return ranks.gather(mine) if len(set(hashes)) > 1 else []


def listeners_of(run: Run) -> list[list[str]]:
    """Return event, name, class and filters of every listener, in order, without hooks of some ranks only."""
    limited = {
        entry.name for entry in run.state.hooks.entries() if getattr(entry.hook, "ranks", "all") != "all"
    }
    return [
        [
            event.name,
            each.label,
            type(each.owner).__name__ if each.owner is not None else function_name(each.function),
            " ".join(one.text for one in each.filters),
        ]
        for event in run.plan.table
        for each in run.plan.listeners(event.name)
        if not (each.receiver == "H" and each.name in limited)
    ]


def hook_arguments_of(run: Run) -> dict[str, dict[str, str]]:
    """Return the numbers and words that hooks of all ranks were made with, of built-in hooks and of others.

    Others may observe their own rank, and each rank may write to its own path.
    """
    found: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    for entry in run.state.hooks.entries():
        cls = type(entry.given)
        if getattr(entry.hook, "ranks", "all") != "all" or cls is FunctionHook:
            continue
        kind = KINDS[not cls.__module__.startswith("hookline.")]
        for name, value in hook_arguments(entry.given).items():
            is_path = isinstance(value, str) and ("/" in value or name.endswith(("path", "name", "dir")))
            if isinstance(value, bool | int | float | str | None) and not is_path and "rank" not in name:
                found[kind][f"{name} of {entry.name} ({cls.__name__})"] = repr(mask(value, name))
    return found


def _other_arguments(tables: list[dict[str, str]]) -> list[str]:
    """Return the arguments that differ, of those that are numbers or words on all ranks."""
    known = set.intersection(*map(set, tables))
    return [*differing([{name: each[name] for name in sorted(known)} for each in tables], str)]


def shared_options(run: Run) -> dict[str, str]:
    """Return every option that must be the same on all ranks, as text."""
    names = [each.name for each in dataclasses.fields(run.options) if each.name not in OF_ONE_RANK]
    return {name: _option_text(getattr(run.options, name)) for name in names}


def facts_of_run(run: Run) -> dict[str, str]:
    """Return the stage, module and strategy of a run, by the words of an error message."""
    parameters = sum(each.numel() for each in run.module.parameters())
    passed = [kind for kind, loaders in run.data.given.items() if loaders is not None]
    return {
        "the stage": run.stage,
        "the module": type(run.module).__name__,
        "the number of parameters of the module": str(parameters),
        "the strategy": type(run.strategy).__name__,
        "the precision": run.strategy.precision.name,
        "the number of ranks": str(run.strategy.world_size),
        "the kind of device": run.strategy.device.type,
        "the device mesh": run.strategy.mesh_text,
        "the data that is passed": " and ".join(passed) or "none",
    }


def differing(tables: list[dict[str, str]], named: Callable[[str], str]) -> Iterable[str]:
    """Yield each name whose value differs between ranks, with the values."""
    for name in dict.fromkeys(name for table in tables for name in table):
        values: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            values.setdefault(table.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            found = ", ".join(f"{value} on {format_ranks(where)}" for value, where in values.items())
            yield f"{named(name)} is {found}"


def absent(lists: list[list[list[str]]]) -> Iterable[tuple[tuple[str, ...], list[int], list[int]]]:
    """Yield each item that some ranks lack, with the ranks that have it and those that do not."""
    sets = [{tuple(item) for item in items} for items in lists]
    for item in dict.fromkeys(tuple(item) for items in lists for item in items):
        here = [rank for rank, items in enumerate(sets) if item in items]
        if len(here) < len(sets):
            yield item, here, [rank for rank in range(len(sets)) if rank not in here]


def _option_text(value: Any) -> str:
    """Return a value as text; a function by its name, because its address differs between processes."""
    if isinstance(value, dict):
        return str({key: _option_text(each) for key, each in value.items()})
    if isinstance(value, tuple | list):
        return str([_option_text(each) for each in value])
    return getattr(value, "__qualname__", None) or str(value)


def start_ranks(run: Run, **given: Any) -> None:
    """Wait until all ranks have begun this run; raise on all ranks if they differ.

    given: the arguments of the stage that must be the same on all ranks.
    """
    ranks = run.strategy.ranks
    store = ranks.store(STARTS)
    number = store.add(f"done/{ranks.rank}", 0) + 1
    store.delete_key(f"{number - 1}/{ranks.rank}")  # rank zero has read it before that run continued
    mine = {
        "about": {
            "the stage": run.stage,
            **{f"{name}=": _public_text(value) for name, value in given.items()},
        },
        "exchanges": ranks.exchanges,
        "logs": bool(run.state.logger),
    }
    store.set(f"{number}/{ranks.rank}", json.dumps(mine))
    wait = functools.partial(wait_for_keys, ranks, store, run.stage)
    verdict = f"{number}/verdict"
    if ranks.rank == 0:
        of_all = [
            json.loads(store.get(key))
            for key in wait([f"{number}/{rank}" for rank in range(ranks.world_size)])
        ]
        store.set(verdict, json.dumps([*compare_starts(of_all, store), of_all[0]["logs"]]))
    out_of_step, differs, run.traits.logs = json.loads(store.get(wait([verdict])[0]))
    store.add(f"done/{ranks.rank}", 1)
    if out_of_step:
        raise HooklineError(out_of_step)
    if differs:
        raise OptionError(differs)


def _public_text(value: Any) -> str:
    """Return a value as text to compare and show: a URL without its secrets, but with a hash of all of it."""
    text, public = str(value), shown(value)
    return public if public == text else f"{public} (sha256 {hashlib.sha256(text.encode()).hexdigest()[:8]})"


def wait_for_keys(ranks: Ranks, store: Any, stage: str, keys: list[str]) -> list[str]:
    """Wait until the store has all keys, and return them; raise if a process has ended."""

    def are_there() -> bool:
        if store.check(keys):
            return True
        if ended := describe_ended_ranks(ranks.world_size):
            raise HooklineError(f"{stage}() needs all ranks, and some processes have ended. {ended}")
        return False

    def missing() -> list[int]:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]

    wait_until(are_there, missing, f"Not all ranks have called {stage}()", ranks.timeout)
    return keys


def compare_starts(of_all: list[dict[str, Any]], store: Any) -> tuple[str, str]:
    """Return two error messages, empty if all is well: ranks out of step, and ranks started differently."""
    begun = [each["exchanges"] for each in of_all]
    if len(set(begun)) > 1:
        why = f" on {store.get('failure').decode()}" if store.check(["failure"]) else ""
        return (
            f"An earlier run failed{why}, during an exchange between the ranks: one rank has begun "
            f"{max(begun)} exchanges, another {min(begun)}. They cannot continue together: start the job "
            "again; resume='auto' resumes from its newest checkpoint."
        ), ""
    # only the first difference: another stage has other arguments
    found = next(iter(differing([each["about"] for each in of_all], lambda name: name)), "")
    return "", found and f"The ranks were started differently: {found}. Start all with the same program."
