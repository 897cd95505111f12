"""`explain`, `trace` and `replay`: the lifecycle of a run, planned or recorded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hookline.cli.output import print_result
from hookline.config import load_config
from hookline.config.classes import ConfigPart
from hookline.config.files import ConfigSource
from hookline.config.hooks import make_hooks
from hookline.config.load import Parts
from hookline.config.permissions import Permissions
from hookline.config.problems import ConfigError, Override, format_value, has_secret
from hookline.engine.cost import format_seconds
from hookline.engine.explain import Explanation
from hookline.tracing.reader import merge, of_first_rank, read_trace
from hookline.tracing.report import beside, compare, count, describe_trace
from hookline.util.text import flatten

MOST_REQUESTS = 20
"""The most requests of a replayed hook that are listed."""


def explain_run(chosen: argparse.Namespace, overrides: list[str]) -> int:
    """Print the plan of a configuration, compare it with a trace, or compare two plans."""
    if chosen.diff:
        if chosen.config or chosen.trace:
            raise ConfigError("explain --diff takes two configurations and nothing else.")
        return _compare_configurations(chosen, overrides)
    if chosen.trace:
        return _compare_with_trace(chosen, overrides)
    if not chosen.config:
        raise ConfigError("explain needs a configuration, --from TRACE, or --diff CONFIG CONFIG.")
    parts = load_config(chosen.config, overrides, allow=chosen.allow, hooks=chosen.hook).build()
    explanation = _plan_of_parts(parts, chosen)
    data, text = explanation.data(), explanation.text(everything=chosen.all)
    groups = parts.make_groups() if parts.make_groups is not None else None
    if groups is not None:
        text = f"{text}\n\nParameter groups:\n{groups}"
        for row in data:
            if row["event"] == "configure_optimizers":
                row["parameter_groups"] = [each.data() for each in groups.rows()]
    return print_result(chosen, data, text)


def _plan_of(config: str, chosen: argparse.Namespace, overrides: list[str], stage: str = "") -> Explanation:
    parts = load_config(config, overrides, allow=chosen.allow, hooks=chosen.hook).build()
    return _plan_of_parts(parts, chosen, stage)


def _plan_of_parts(parts: Parts, chosen: argparse.Namespace, stage: str = "") -> Explanation:
    from hookline.training.trainer import Trainer

    trainer = parts.make_trainer(Trainer)
    explanation: Explanation = trainer.explain(
        parts.module, datamodule=parts.datamodule, stage=stage or chosen.stage
    )
    return explanation


def _compare_with_trace(chosen: argparse.Namespace, overrides: list[str]) -> int:
    recorded = count(of_first_rank(read_trace(chosen.trace)))
    planned: list[dict[str, Any]] | None = None
    if chosen.config:
        rows = _plan_of(chosen.config, chosen, overrides, recorded.verb).data()
        planned = [row for row in rows if row["listeners"]]
    explanation, different = beside(recorded, planned)
    data = {"events": recorded.events, "listeners": explanation.data(), "differences": different}
    listed = _list_lines("Everything was as planned.", "Not as planned:", different)
    return print_result(chosen, data, f"{explanation.text(everything=chosen.all)}\n{listed}")


def _compare_configurations(chosen: argparse.Namespace, overrides: list[str]) -> int:
    first, second = (_plan_of(config, chosen, overrides) for config in chosen.diff)
    different = [
        *_different_settings(chosen, overrides),
        *compare(first, second, (chosen.diff[0], chosen.diff[1])),
    ]
    same = "The same settings; the same events reach the same listeners in the same order."
    data = {"configurations": chosen.diff, "differences": different}
    return print_result(chosen, data, _list_lines(same, "Different:", different))


def _different_settings(chosen: argparse.Namespace, overrides: list[str]) -> list[str]:
    """Return the settings that differ, key by key: a plan does not show intervals and budgets inside a
    hook.
    """
    loaded = (load_config(path, overrides, allow=chosen.allow, hooks=chosen.hook) for path in chosen.diff)
    first, second = (flatten(config.values) for config in loaded)
    return [
        f"{key}: {_setting(key, first)} in {chosen.diff[0]}, {_setting(key, second)} in {chosen.diff[1]}"
        for key in dict.fromkeys([*first, *second])
        if first.get(key, ...) != second.get(key, ...)
    ]


def _setting(key: str, values: dict[str, Any]) -> str:
    if key not in values:
        return "not set"
    return "(not shown)" if has_secret(key, values[key]) else format_value(values[key])


def _list_lines(none: str, title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)]) if lines else none


# ---- recorded runs -----------------------------------------------------------------------------------------


def describe_traces(chosen: argparse.Namespace) -> int:
    """Describe traces, or merge those of several ranks."""
    paths = [Path(each) for each in chosen.traces]
    if chosen.out:
        written = merge(paths, Path(chosen.out))
        text = f"wrote {chosen.out}: {written} records of {len(paths)} traces, for https://ui.perfetto.dev"
        return print_result(chosen, {"out": chosen.out, "records": written}, text)
    about = [describe_trace(path) for path in paths]
    lines = [
        f"{each['trace']}: {each['stage']}, rank {each['rank']} of {each['world_size']}, up to step "
        f"{each['step']}: {each['events']} events, {each['calls']} calls"
        for each in about
    ]
    return print_result(chosen, about, "\n".join(lines))


def replay_run(chosen: argparse.Namespace) -> int:
    """Replay a recorded run to a hook."""
    from hookline.tracing.replay import replay

    done = replay(chosen.trace, _named_hook(chosen), rank=chosen.rank)
    data = {
        "hook": done.hook,
        "events": done.events,
        "steps": done.steps,
        "asked": done.asked,
        "cost": [row.data() for row in done.cost],
    }
    lines = [f"hook {done.hook!r} replayed a run of {done.steps} steps, {done.events} events:"]
    lines += [
        f"  {row.event}: {row.calls} calls, {format_seconds(row.mean)} each, the longest "
        f"{format_seconds(row.worst)}"
        for row in done.cost
    ]
    if done.asked:
        lines += ["In a run it would have requested:", *(f"  {each}" for each in done.asked[:MOST_REQUESTS])]
    if len(done.asked) > MOST_REQUESTS:
        lines.append(f"  and {len(done.asked) - MOST_REQUESTS} more")
    return print_result(chosen, data, "\n".join(lines))


def _named_hook(chosen: argparse.Namespace) -> Any:
    """Return the hook by name or class path, with its arguments; modules in the current folder can be
    named.
    """
    source = ConfigSource({}, name="the command line")
    arguments: dict[str, Any] = {}
    for setting in chosen.set:
        key, equals, text = setting.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--set {setting!r}: write it as NAME=VALUE, an argument of the hook.")
        arguments[key] = Override(text)
    part = ConfigPart("hook", chosen.hook, arguments, {key: f"--set {key}" for key in arguments})
    return next(iter(make_hooks(source, [("hook", part)], Permissions(Path.cwd(), trusted=True)).values()))
