"""`trace` and `replay`: describe traces, merge those of several ranks, and replay a run to a hook."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hookline.cli.codes import OK
from hookline.config.classes import Part
from hookline.config.files import Source
from hookline.config.hooks import make_hooks
from hookline.config.permissions import Permissions
from hookline.config.problems import ConfigError, Override
from hookline.engine.cost import format_seconds
from hookline.tracing.reader import merge, read_trace
from hookline.tracing.report import count
from hookline.util.text import printable


def run(chosen: argparse.Namespace) -> int:
    """Run one of the two commands."""
    return _replay(chosen) if chosen.command == "replay" else _trace(chosen)


def _trace(chosen: argparse.Namespace) -> int:
    paths = [Path(each) for each in chosen.traces]
    if chosen.out:
        written = merge(paths, Path(chosen.out))
        print(
            json.dumps({"out": chosen.out, "records": written})
            if chosen.json
            else f"wrote {chosen.out}: {written} records of {len(paths)} traces, for https://ui.perfetto.dev"
        )
        return OK
    about = [_about(path) for path in paths]
    if chosen.json:
        print(json.dumps(about))
        return OK
    for each in about:
        print(
            printable(
                f"{each['trace']}: {each['stage']}, rank {each['rank']} of {each['world_size']}, up to step "
                f"{each['step']}: {each['events']} events, {each['calls']} calls"
            )
        )
    return OK


def _about(path: Path) -> dict[str, Any]:
    header = next(read_trace(path))["args"]
    counts = count(read_trace(path))
    return {
        "trace": str(path),
        "stage": header["stage"],
        "rank": header["rank"],
        "world_size": header["world_size"],
        "step": max(counts.last_step.values(), default=0),
        "events": sum(counts.events.values()),
        "calls": sum(each.calls for each in counts.calls.values()),
    }


def _replay(chosen: argparse.Namespace) -> int:
    from hookline.tracing.replay import replay

    done = replay(chosen.trace, _hook(chosen), rank=chosen.rank)
    if chosen.json:
        rows = [row.data() for row in done.cost]
        print(
            json.dumps(
                {
                    "hook": done.hook,
                    "events": done.events,
                    "steps": done.steps,
                    "asked": done.asked,
                    "cost": rows,
                }
            )
        )
        return OK
    print(f"hook {done.hook!r} replayed a run of {done.steps} steps, {done.events} events:")
    for row in done.cost:
        print(
            f"  {row.event}: {row.calls} calls, {format_seconds(row.mean)} each, the longest "
            f"{format_seconds(row.worst)}"
        )
    if done.asked:
        print(
            "\n".join(
                ["In a run it would have requested:", *(f"  {printable(each)}" for each in done.asked[:20])]
            )
        )
        if len(done.asked) > 20:
            print(f"  and {len(done.asked) - 20} more")
    return OK


def _hook(chosen: argparse.Namespace) -> Any:
    """Return the hook by name or class path, with its arguments; modules in the current folder can be
    named.
    """
    source = Source({}, name="the command line")
    arguments: dict[str, Any] = {}
    for each in chosen.set:
        key, equals, text = each.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--set {each!r}: write it as NAME=VALUE, an argument of the hook.")
        arguments[key] = Override(text)
    part = Part("hook", chosen.hook, arguments, {key: f"--set {key}" for key in arguments})
    return next(iter(make_hooks(source, [("hook", part)], Permissions(Path.cwd(), trusted=True)).values()))
