"""`hookline runs` and `hookline summary`: lists of runs and their results."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from hookline.cli.codes import OK
from hookline.loggers.jsonl import jsonable
from hookline.report.run_events import duration, timestamp
from hookline.report.runs import Listed, in_words, list_runs
from hookline.report.summary import summarize
from hookline.run.options import Options
from hookline.run.state import progress
from hookline.run.timings import PART_WORDS, SAMPLED, TIMED_PARTS, Timings
from hookline.util.text import printable

MOST_METRICS = 60
MOST_COLUMNS = 8
"""The most settings beside each run; the others are named below the table."""
MOST_ROWS = 6
"""The most rows of hook costs."""
WIDEST = 48
"""The most characters of a value in a table."""


def run(chosen: argparse.Namespace) -> int:
    """Run one of the two commands."""
    if chosen.command == "runs":
        return _list(chosen)
    data = summarize(chosen.run_dirs)
    print(json.dumps(jsonable(data), allow_nan=False) if chosen.json else _summary_text(data))
    return OK


def _list(chosen: argparse.Namespace) -> int:
    now = time.time()
    listing = list_runs(chosen.directory, now)
    if chosen.json:
        print(json.dumps(jsonable(listing.data(now)), allow_nan=False))
        return OK
    rows = [("run", "status", "step", "epochs", "best", "age", "size")]
    for each in listing.runs:
        path = each.path.relative_to(listing.folder) if each.path != listing.folder else each.path
        epochs = "" if each.epochs is None else f"{each.epochs:,}"
        age = "" if each.started is None else duration(max(0.0, now - each.started))
        status = in_words(each.status, each.is_certain)
        rows.append((str(path), status, f"{each.step:,}", epochs, _best_of_list(each), age, size(each.bytes)))
    print(aligned(rows) if listing.runs else f"There are no runs in {printable(listing.folder)} or below it.")
    for problem in listing.problems[:20]:
        print(f"not read: {printable(problem)}")
    return OK


def _best_of_list(each: Listed) -> str:
    if each.best is None:
        return ""
    return f"{each.best.metric} {number(each.best.value)}{' (end of the log)' if each.is_partial else ''}"


# ---- one run -----------------------------------------------------------------------------------------------


def _summary_text(data: dict[str, Any]) -> str:
    if len(data["runs"]) > 1:
        return _comparison_text(data)
    about = data["runs"][0]
    reason = f" ({about['reason']})" if about["reason"] else ""
    error = about["error"] if isinstance(about["error"], dict) else {}
    seconds = about["seconds"]
    took = (
        []
        if seconds is None
        else [f"{duration(seconds) if seconds >= 1 else 'under 1 s'} in all, set-up included"]
    )
    many = len(about["sessions"])
    git = about["git"] if isinstance(about["git"], dict) else {}
    machine = about["machine"] if isinstance(about["machine"], dict) else {}
    lines = [printable(about["path"])]
    for label, text in (
        (
            "status",
            f"{in_words(about['status'], about['is_certain'])}{reason}, "
            f"{progress(about['step'], about['epochs'])}",
        ),
        ("error", f"{error.get('type')}: {error.get('message')}" if error else ""),
        ("time", ", ".join([*took, *([f"{many} sessions"] if many > 1 else []), *_span(about)])),
        ("best", _best(about["best"])),
        ("checkpoints", _checkpoints(about)),
        ("code", _code(git)),
        (
            "machine",
            ", ".join(str(machine[key]) for key in ("host", "device", "device_name") if machine.get(key))
            + (f", {machine['world_size']} ranks" if machine.get("world_size", 1) != 1 else ""),
        ),
        ("command", str(about["command"] or "")),
    ):
        if text:
            lines.append(f"  {label:<13}{printable(text)}")
    return "\n\n".join(
        filter(
            None,
            [
                "\n".join(lines),
                _metrics_text(about["metrics"]),
                _cost_text(about["cost"]),
                _settings_text(about["settings"]),
            ],
        )
    )


def _span(about: dict[str, Any]) -> list[str]:
    began, ended = timestamp(about["started_at"]), timestamp(about["ended_at"])
    at = [] if began is None else [f"started {time.strftime('%Y-%m-%d %H:%M', time.localtime(began))}"]
    return at + ([] if ended is None else [f"ended {time.strftime('%Y-%m-%d %H:%M', time.localtime(ended))}"])


def _best(best: dict[str, Any] | None) -> str:
    if best is None:
        return ""
    at = "" if best["step"] is None else f" at step {best['step']:,}"
    return f"{best['metric']} {number(best['value'])}{at} ({best['direction']} is better)"


def _checkpoints(about: dict[str, Any]) -> str:
    if not about["checkpoints"]:
        return "none"
    newest = about["checkpoints"][0]
    more = about["checkpoint_count"] - 1
    return f"{newest['path']} (step {newest['step']}{', and ' + str(more) + ' more' if more else ''})"


def _code(git: dict[str, Any]) -> str:
    if not git.get("commit"):
        return ""
    dirty = git.get("dirty")
    state = (
        ", with changes that are not committed"
        if dirty is True
        else ""
        if dirty is False
        else ", perhaps with changes"
    )
    return f"commit {git['commit']}{state}"


def _metrics_text(metrics: list[dict[str, Any]]) -> str:
    if not metrics:
        return "No metrics are logged."
    rows = [("metric", "last", "best", "at step", "trend", "values")]
    of_steps, of_epochs = (
        {each["name"] for each in metrics if each["over"] == over} for over in ("step", "epoch")
    )
    twice = of_steps & of_epochs
    ordered = sorted(metrics, key=lambda each: (each["direction"] is None, each["over"] == "step"))
    for each in ordered[:MOST_METRICS]:
        best, lowest, highest = each["best"], each["lowest"], each["highest"]
        if best is None and lowest is not None:
            shown, at = f"{number(lowest['value'])} to {number(highest['value'])}", ""
        else:
            shown, at = ("", "") if best is None else (number(best["value"]), f"{best['step']:,}")
        name = f"{each['name']} ({each['over']})" if each["name"] in twice else each["name"]
        rows.append((name, number(each["last"]["value"]), shown, at, each["trend"], f"{each['count']:,}"))
    more = len(ordered) - MOST_METRICS
    return aligned(rows) + (f"\n... and {more} more metrics; --json has them all" if more > 0 else "")


def _cost_text(cost: dict[str, Any]) -> str:
    parts = []
    timings = cost["time"]
    if isinstance(timings, dict):
        parts.append(f"training loop of the newest session: {printable(_timings(timings))}")
    rows = [("hook", "event", "calls", "seconds", "share")]
    for each in cost["hooks"][:MOST_ROWS]:
        share = each.get("share")
        rows.append(
            (
                str(each.get("hook", "")),
                str(each.get("event", "")),
                str(each.get("calls", "")),
                number(each.get("total")),
                f"{share:.1%}" if isinstance(share, float) else "",
            )
        )
    return "\n".join([*parts, *([aligned(rows)] if len(rows) > 1 else [])])


def _timings(timings: dict[str, Any]) -> str:
    """Return `2.5 s = 71% training (forward 22%, ...), 18% waiting for data`; without a total, the known
    seconds.
    """
    known = {
        key: float(each)
        for key, each in timings.items()
        if isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each)
    }
    if not known.get("total"):
        return ", ".join(
            f"{PART_WORDS.get(key, key)} {number(known[key])} s" for key in TIMED_PARTS if known.get(key)
        )
    total, (data, validation, saving) = (
        known["total"],
        (known.get(key, 0.0) for key in ("data", "validation", "saving")),
    )
    forward, backward, optimizer = (
        known.get(key) if known.keys() >= set(SAMPLED) else None for key in SAMPLED
    )
    return str(
        Timings(
            total,
            data,
            validation,
            saving,
            known.get("hooks"),
            0,
            forward,
            backward,
            optimizer,
            sampled_batches=int(known.get("sampled_batches", 0)),
        )
    )


def _settings_text(settings: dict[str, Any]) -> str:
    """Return the settings as a table, without options of the trainer that have their default."""
    default = Options()
    rows = [
        (key, _value(value))
        for key, value in settings.items()
        if value not in (None, "")
        and not key.startswith("versions.")
        and not (key.startswith("trainer.") and value == getattr(default, key.removeprefix("trainer."), None))
    ]
    return aligned([("setting", "value"), *rows]) if rows else ""


# ---- several runs ------------------------------------------------------------------------------------------


def _comparison_text(data: dict[str, Any]) -> str:
    runs, differing = data["runs"], data["differences"]
    order = sorted(range(len(runs)), key=lambda index: _rank(runs[index]["best"], data["metric"]))
    columns = differing[:MOST_COLUMNS]
    titles = _titles([_hook_of(each["key"]) for each in columns])
    rows = [("run", "status", "step", f"best {data['metric'] or ''}".strip(), *titles)]
    for index in order:
        about, best = runs[index], runs[index]["best"]
        other = "" if best is None or best["metric"] == data["metric"] else f"{best['metric']} "
        shown = "" if best is None else f"{other}{number(best['value'])}"
        values = [_value(each["values"][index], is_class=each["key"].endswith(".class")) for each in columns]
        rows.append(
            (
                about["name"],
                in_words(about["status"], about["is_certain"]),
                f"{about['step']:,}",
                shown,
                *values,
            )
        )
    lines = [aligned(rows)]
    if not differing:
        lines.append("All settings that are known are the same.")
    elif len(differing) > MOST_COLUMNS:
        left = ", ".join(each["key"] for each in differing[MOST_COLUMNS : MOST_COLUMNS + 30])
        lines.append(
            f"{len(differing) - MOST_COLUMNS} more settings differ (--json has their values): "
            f"{printable(left)}"
        )
    return "\n".join(lines)


def _rank(best: dict[str, Any] | None, metric: str | None) -> tuple[bool, float]:
    if best is None or best["metric"] != metric:
        return True, 0.0
    return False, best["value"] if best["direction"] == "lower" else -best["value"]


def _hook_of(key: str) -> str:
    """Return the title of a column; for a hook's class it is the hook's name."""
    return key.removesuffix(".class") if key.startswith("hooks.") else key


def _titles(keys: list[str]) -> list[str]:
    """Return the last part of every key, or as many parts as make it unique."""
    found = []
    for key in keys:
        parts = key.split(".")
        lengths = range(1, len(parts) + 1)
        alone = (
            n
            for n in lengths
            if sum(each == key or each.endswith("." + ".".join(parts[-n:])) for each in keys) == 1
        )
        found.append(".".join(parts[-next(alone, len(parts)) :]))
    return found


# ---- in words ----------------------------------------------------------------------------------------------


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in columns, as plain text without control characters."""
    shown = [[_cut(printable(text)) for text in row] for row in rows]
    wide = [max(len(row[column]) for row in shown) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, wide, strict=True)).rstrip() for row in shown
    )


def _cut(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST // 2]}…{text[-WIDEST // 2 + 1 :]}"


def _value(value: Any, is_class: bool = False) -> str:
    if value is None:
        return "-"
    if is_class:
        return str(value).rpartition(".")[2]
    if isinstance(value, str):
        return value
    return number(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def number(value: Any) -> str:
    """Return a number with four digits."""
    return (
        f"{value:.4g}"
        if isinstance(value, int | float) and math.isfinite(value)
        else ""
        if value is None
        else str(value)
    )


def size(count: int) -> str:
    """Return a number of bytes in a suitable unit."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
