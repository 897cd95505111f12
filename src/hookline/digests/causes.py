"""Possible causes of a divergence: hooks that the audit has recorded, and differences between run records."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hookline.audit import observation as audited
from hookline.digests import compare as kinds
from hookline.digests.compare import Difference, Divergence
from hookline.loggers.log_reader import is_after_fit, read_log
from hookline.run.record import read_record
from hookline.util.text import flatten, list_some

AUDITED: dict[str, tuple[str, ...]] = {
    kinds.RANDOM: (audited.RANDOM,),
    kinds.CHANGED_BATCH: (audited.BATCH, audited.RETURNED),
    kinds.WEIGHTS: (audited.PARAMETERS,),
    kinds.BUFFERS: (audited.BUFFERS,),
    kinds.STATE: (audited.OPTIMIZER_STATE,),
    kinds.MODE: (audited.MODES, audited.REQUIRES_GRAD),
    kinds.FLAG: (audited.GRAD_MODE, audited.DEFAULT_DTYPE, audited.DETERMINISM),
    kinds.FORWARD: (audited.MODULE_HOOKS,),
    kinds.LOSS: (audited.RETURNED, audited.MODULE_HOOKS),
    kinds.GRADIENT: (audited.MODULE_HOOKS,),
    kinds.CLIPPING: (audited.GRADIENTS,),
    kinds.RATE: (audited.LEARNING_RATES,),
    kinds.SETTING: (audited.OPTIMIZER_SETTINGS,),
    kinds.SKIPPED: (audited.RETURNED,),
}
"""What the audit calls a change that shows as a difference of this kind."""
FIELDS = ("git", "versions", "machine", "config", "options", "module", "hooks", "data", "settings")
"""Fields of run.json that describe how a run was started."""
PLACES = re.compile(r"(^|\.)(run_dir|default_root_dir|trace|digest|host|resumed_from|problem)(\.|$)")
"""Settings that do not affect training."""
MEASURED = re.compile(
    r"(?<![a-z])(time|times|timer|seconds?|secs?|ms|per_s|throughput|memory|gpu|cpu|gc|disk|network|fetch|"
    r"fetching|eta|elapsed|duration|allocated|reserved)(?![a-z])|/s\b",
    re.IGNORECASE,
)
"""Names of metrics that differ between any two runs. Whole words: a `sentiment` is not a time."""
MOST_CAUSES = 12
LONGEST = 120


# ---- hooks -------------------------------------------------------------------------------------------------


def blame_hook(found: Divergence, runs: tuple[Path, Path], names: tuple[str, str]) -> Difference | None:
    """Return the hook that made the first change of a step, if the audit of a run has recorded it."""
    rows = [recorded_changes(run) for run in runs]
    for difference in (found.first, *found.later[:1]):
        for row, which in _suspects(rows, found.step, AUDITED.get(difference.kind, ())):
            who = " and ".join(names[number] for number in which)
            what = f"{row['kind']} ({list_some(row.get('names') or [])})"
            return Difference(
                kinds.HOOK,
                f"hook {row['hook']!r} changed {what} in {row['event']} of {who}",
                (str(row["hook"]),),
            )
    return None


def _suspects(
    rows: list[list[dict[str, Any]]], step: int, wanted: tuple[str, ...]
) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield the hooks that changed something of these kinds in one run and not, or later, in the other."""
    tables = [
        {(row["hook"], row["event"], row["kind"], row.get("rank")): row for row in each} for each in rows
    ]
    for key in dict.fromkeys(key for table in tables for key in table):
        present = [table.get(key) for table in tables]
        firsts = [row.get("first_step") if row is not None else None for row in present]
        began = min((each for each in firsts if isinstance(each, int)), default=None)
        if key[2] not in wanted or firsts[0] == firsts[1] or began != step - 1:
            continue
        which = [number for number, first in enumerate(firsts) if first == began]
        yield next(row for row in present if row is not None and row.get("first_step") == began), which


def recorded_changes(run: Path) -> list[dict[str, Any]]:
    """Return what the hooks of a run have changed, from its log; nothing if it was not audited."""
    found: list[dict[str, Any]] = []
    if (run / "log.jsonl").is_file():
        for record in read_log(run):
            if record.get("type") == "changes" and isinstance(record.get("rows"), list):
                found = [
                    row
                    for row in record["rows"]
                    if isinstance(row, dict) and {"hook", "event", "kind"} <= set(row)
                ]
    return found


# ---- run records -------------------------------------------------------------------------------------------


def different_records(one: Path, other: Path) -> list[dict[str, Any]]:
    """Return what differs between the records of two runs: code, packages, machine, configuration, hooks."""
    records = [read_record(each) for each in (one, other)]
    if not all(records):
        return []
    found = []
    for field in FIELDS:
        flat = [
            flatten({field: each[field]})
            if isinstance(each.get(field), Mapping)
            else {field: each.get(field)}
            for each in records
        ]
        for key in dict.fromkeys(key for each in flat for key in each):
            values = [each.get(key) for each in flat]
            is_place = PLACES.search(key) or _is_of_missing_hook(key, records)
            if _spelled(values[0]) != _spelled(values[1]) and not is_place:
                found.append({"key": key, "values": values})
    return _without_repeats(found)


def _is_of_missing_hook(key: str, records: list[dict[str, Any]]) -> bool:
    """Return whether a setting belongs to a hook that one run does not have; its class is listed alone."""
    field, _, rest = key.partition(".")
    if field != "hooks" or rest.endswith(".class"):
        return False
    name = rest.partition(".")[0]
    return any(name not in (each.get("hooks") or {}) for each in records)


def _without_repeats(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings without those that appear a second time under another name."""
    known: dict[tuple[str, str], dict[str, Any]] = {}
    for each in found:
        known.setdefault((each["key"].rpartition(".")[2], _spelled(each["values"])), each)
    return list(known.values())


def _spelled(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def cause_text(cause: dict[str, Any], names: tuple[str, str]) -> str:
    """Return a difference between two records in words."""
    shown = [_short(each) for each in cause["values"]]
    return f"{cause['key']}: {shown[0]} in {names[0]}, {shown[1]} in {names[1]}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else _spelled(value)
    text = "nothing" if value is None or text == "" else text
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


# ---- logs --------------------------------------------------------------------------------------------------


def logged_values(run: Path, after_fit: bool = False) -> dict[int, dict[str, Any]]:
    """Return the metrics of a run's log by step, without those that measure time and memory.

    after_fit: those of evaluations after the fit, not those of the training.
    """
    found: dict[int, dict[str, Any]] = {}
    is_over = False
    for record in read_log(run) if (run / "log.jsonl").is_file() else ():
        is_over = is_after_fit(record, is_over)
        step, metrics = record.get("step"), record.get("metrics")
        if record.get("type") != "metrics" or is_over != after_fit:
            continue
        if isinstance(step, int) and isinstance(metrics, dict):
            over = "" if record.get("over") == "step" else " (epoch)"
            found.setdefault(step, {}).update(
                {f"{name}{over}": value for name, value in metrics.items() if not MEASURED.search(name)}
            )
    return found


def compare_logs(
    one: Path, other: Path, names: tuple[str, str], equal_until: int = 0, after_fit: bool = False
) -> tuple[list[int], Divergence | None]:
    """Return the steps at which both logs have a value of the same name, and the first one at which it
    differs.

    equal_until: the runs are known to be equal up to this step. A metric that differs nevertheless does not
    depend on the training alone, and is left out. after_fit: as in `logged_values`.
    """
    first, second = logged_values(one, after_fit), logged_values(other, after_fit)
    common: list[int] = []
    ignored: set[str] = set()
    for step in sorted(first.keys() & second.keys()):
        mine, theirs = first[step], second[step]
        if not mine.keys() & theirs.keys():
            continue
        differing = [name for name in mine if name in theirs and mine[name] != theirs[name]]
        ignored.update(differing if step <= equal_until else ())
        differing = [name for name in differing if name not in ignored]
        if differing:
            shown = ", ".join(
                f"{name} is {mine[name]} in {names[0]} and {theirs[name]} in {names[1]}"
                for name in differing[:3]
            )
            difference = Difference(kinds.METRIC, shown, tuple(differing))
            return common, Divergence(
                step, None, None, difference, last_equal=common[-1] if common else None, is_exact=False
            )
        common.append(step)
    return common, None
