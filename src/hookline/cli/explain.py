"""`explain`: the lifecycle of a run before it runs, compared with a trace, or two of them compared."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from hookline.cli.codes import OK
from hookline.config.problems import ConfigError, has_secret, shown
from hookline.engine.explain import Explanation
from hookline.util.text import printable_lines


def run(chosen: argparse.Namespace, overrides: list[str]) -> int:
    """Print the requested explanation."""
    if chosen.diff:
        if chosen.config or chosen.trace:
            raise ConfigError("explain --diff takes two configurations and nothing else.")
        return _diff(chosen, overrides)
    if chosen.trace:
        return _compare_with_trace(chosen, overrides)
    if not chosen.config:
        raise ConfigError("explain needs a configuration, --from TRACE, or --diff CONFIG CONFIG.")
    explanation = _planned(chosen.config, chosen, overrides)
    print(json.dumps(explanation.data()) if chosen.json else explanation.text(everything=chosen.all))
    return OK


def _planned(config: str, chosen: argparse.Namespace, overrides: list[str], stage: str = "") -> Explanation:
    from hookline.config import load_config
    from hookline.training.trainer import Trainer

    parts = load_config(config, overrides, allow=chosen.allow, hooks=chosen.hook).build()
    trainer = parts.make_trainer(Trainer)
    explanation: Explanation = trainer.explain(
        parts.module, datamodule=parts.datamodule, stage=stage or chosen.stage
    )
    return explanation


def _compare_with_trace(chosen: argparse.Namespace, overrides: list[str]) -> int:
    from hookline.tracing.reader import of_first_rank, read_trace
    from hookline.tracing.report import beside, count

    recorded = count(of_first_rank(read_trace(chosen.trace)))
    planned: list[dict[str, Any]] | None = None
    if chosen.config:
        rows = _planned(chosen.config, chosen, overrides, recorded.verb).data()
        planned = [row for row in rows if row["listeners"]]
    explanation, different = beside(recorded, planned)
    if chosen.json:
        print(
            json.dumps({"events": recorded.events, "listeners": explanation.data(), "differences": different})
        )
        return OK
    print(printable_lines(explanation.text(everything=chosen.all)))
    _list("Everything was as planned.", "Not as planned:", different)
    return OK


def _diff(chosen: argparse.Namespace, overrides: list[str]) -> int:
    from hookline.tracing.report import compare

    first, second = (_planned(config, chosen, overrides) for config in chosen.diff)
    different = [*_settings(chosen, overrides), *compare(first, second, (chosen.diff[0], chosen.diff[1]))]
    if chosen.json:
        print(json.dumps({"configurations": chosen.diff, "differences": different}))
        return OK
    _list(
        "The same settings; the same events reach the same listeners in the same order.",
        "Different:",
        different,
    )
    return OK


def _settings(chosen: argparse.Namespace, overrides: list[str]) -> list[str]:
    """Return the settings that differ, key by key: a plan does not show intervals and budgets inside a
    hook.
    """
    from hookline.config import load_config

    loaded = (load_config(each, overrides, allow=chosen.allow, hooks=chosen.hook) for each in chosen.diff)
    first, second = (dict(_flat(each.values)) for each in loaded)
    names = dict.fromkeys([*first, *second])
    return [
        f"{key}: {_setting(key, first)} in {chosen.diff[0]}, {_setting(key, second)} in {chosen.diff[1]}"
        for key in names
        if first.get(key, ...) != second.get(key, ...)
    ]


def _flat(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _setting(key: str, values: dict[str, Any]) -> str:
    if key not in values:
        return "not set"
    return "(not shown)" if has_secret(key, values[key]) else shown(values[key])


def _list(none: str, title: str, lines: list[str]) -> None:
    print(printable_lines("\n".join([title, *(f"  {line}" for line in lines)])) if lines else none)
