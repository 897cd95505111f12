"""The data of a page, as plain values for its script."""

from __future__ import annotations

import base64
import json
import os
import time
from pathlib import Path
from typing import Any

from hookline._version import __version__
from hookline.report.curves import heat_maps, newest, sections, summary
from hookline.report.reader import RunData
from hookline.report.run_events import (
    all_events,
    duration,
    how_it_ended,
    level,
    position,
    score,
    status,
    time_spent,
    timestamp,
)
from hookline.report.timeline import timelines
from hookline.run.timings import PARTS, SAMPLED, WORDS
from hookline.util.text import flatten

PICTURE_BYTES = 900_000
"""Bytes of all pictures together, before they are encoded as text."""
TEXT_CHARACTERS = 200_000
LONGEST_TEXT = 4000
LONGEST_VALUE = 500
MOST_EVENTS = 600
MOST_CHECKPOINTS = 300
MOST_KEYS = 800
PNG = b"\x89PNG\r\n\x1a\n"


def page_data(runs: list[RunData]) -> dict[str, Any]:
    """Return the data of a page about these runs."""
    now = time.time()
    charts, left_out = sections(runs)
    notes = [
        f"{run_name}: {count} {what} are not shown."
        for run_name, run in zip(names(runs), runs, strict=True)
        for what, count in run.unshown.items()
    ]
    notes += [
        f"{run_name}: {run.trace.left_out} calls of further hooks are not on the timeline."
        for run_name, run in zip(names(runs), runs, strict=True)
        if run.trace and run.trace.left_out
    ]
    notes += [
        f"{run_name}: the traces of {run.trace.unread} further ranks are not read."
        for run_name, run in zip(names(runs), runs, strict=True)
        if run.trace and run.trace.unread
    ]
    if left_out:
        notes.append(
            f"{len(left_out)} metrics beyond the first few hundred are not drawn: {_listed(left_out)}"
        )
    rows, left_out = summary(runs)
    if left_out:
        notes.append(f"{len(left_out)} metrics are not in the table of values: {_listed(left_out)}")
    pictures, without = _pictures(runs)
    if without:
        notes.append(
            f"{without} pictures are not in this page because of its size; they are in the media folder of "
            f"the run."
        )
    return {
        "made": now,
        "version": __version__,
        "runs": [_about(run, name, now) for run, name in zip(runs, names(runs), strict=True)],
        "sections": charts,
        "summary": rows,
        "heat": heat_maps(runs),
        "events": _events(runs, notes),
        "timeline": timelines(runs),
        "checkpoints": _checkpoints(runs, notes),
        "config": _config(runs, notes),
        "versions": _versions(runs),
        "cost": [_cost(number, run) for number, run in enumerate(runs) if run.costs.rows],
        "timings": [_timings(number, run) for number, run in enumerate(runs) if run.costs.timings],
        "texts": _texts(runs, notes),
        "pictures": pictures,
        "notes": notes,
    }


def names(runs: list[RunData]) -> list[str]:
    """Return the names of the directories, with as much of their paths as makes them distinct."""
    paths = [run.path.resolve() for run in runs]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        short = [os.path.join(*path.parts[-parts:]) for path in paths]
        if len(set(short)) == len(set(paths)):
            return short
    return [str(path) for path in paths]


def cut(text: str, most: int) -> str:
    """Return the beginning of a long text, and how much of it is missing."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def _listed(found: list[str]) -> str:
    return cut(", ".join(found), LONGEST_VALUE)


def _about(run: RunData, name: str, now: float) -> dict[str, Any]:
    said, mood = status(run, now)
    took, pauses = "", 0.0
    began, spent = time_spent(run)
    if began is not None and spent is not None and run.times.ended is not None:
        took, pauses = duration(spent) if spent >= 1 else "under 1 s", run.times.ended - began - spent
    end, at = how_it_ended(run), position(run)
    return {
        "name": name,
        "path": str(run.path),
        "status": said,
        "mood": mood,
        "step": at.step,
        "epochs": at.epochs,
        "is_inside": at.is_inside,
        "newest": newest(run),
        "reason": cut(end["reason"], LONGEST_VALUE),
        "took": took,
        "is_over": bool(end["status"]),
        "pauses": duration(pauses) if pauses >= 1 else "",
        "began": began,
        "ended": run.times.ended,
        "records": run.records,
        "superseded": run.superseded,
        "checkpoints": len(run.checkpoints),
    }


def _events(runs: list[RunData], notes: list[str]) -> list[dict[str, Any]]:
    found = [
        {
            "run": number,
            "kind": each.kind,
            "level": level(each.kind),
            "text": cut(each.text, LONGEST_VALUE),
            "time": each.time,
            "step": each.step,
        }
        for number, run in enumerate(runs)
        for each in all_events(run)
    ]
    if len(found) <= MOST_EVENTS:
        return found
    # keep failures first, then the newest of the others
    levels = ("bad", "warn", "info")
    keep = sorted(range(len(found)), key=lambda index: (levels.index(str(found[index]["level"])), -index))
    notes.append(f"{len(found) - MOST_EVENTS} events of {len(found)} are not shown.")
    return [found[index] for index in sorted(keep[:MOST_EVENTS])]


def _checkpoints(runs: list[RunData], notes: list[str]) -> list[dict[str, Any]]:
    without = [_below(each.path, run.path) for run in runs for each in run.checkpoints[MOST_CHECKPOINTS:]]
    if without:
        notes.append(f"{len(without)} older checkpoints are not in the table: {_listed(without)}")
    return [
        {
            "run": number,
            "name": _below(each.path, run.path),
            "step": each.manifest["step"],
            "epoch": each.manifest["epoch"],
            "reason": each.manifest["reason"],
            "score": score(each.manifest),
            "saved": timestamp(each.manifest["saved_at"]),
            "bytes": sum(file["bytes"] for file in each.manifest["files"].values()),
        }
        for number, run in enumerate(runs)
        for each in run.checkpoints[:MOST_CHECKPOINTS]
    ]


def _below(path: Path, parent: Path) -> str:
    return str(path.relative_to(parent)) if path.is_relative_to(parent) else str(path)


def _cost(number: int, run: RunData) -> dict[str, Any]:
    """Return the cost of the job that ended last; `since` is the step at which it resumed, if it did."""
    return {"run": number, "since": run.costs.rows_since, "rows": [_cost_row(row) for row in run.costs.rows]}


def _timings(number: int, run: RunData) -> dict[str, Any]:
    """Return the parts of the job that ended last, in the order of the chart, with the parts of the training
    step first.
    """
    found = run.costs.timings
    sampled = {name: found[name] for name in SAMPLED if name in found}
    rest = max(0.0, found.get("training", 0.0) - sum(sampled.values()))
    parts = {
        **sampled,
        ("other training" if sampled else "training"): rest,
        **{WORDS.get(name, name): found[name] for name in PARTS[1:] if name in found},
    }
    return {
        "run": number,
        "since": run.costs.timings_since,
        "total": found["total"],
        "parts": [[name, seconds] for name, seconds in parts.items()],
    }


def _cost_row(row: dict[str, Any]) -> dict[str, Any]:
    numbers = {
        key: row[key]
        for key in ("calls", "total", "mean", "worst", "share")
        if isinstance(row.get(key), int | float)
    }
    return {"hook": str(row.get("hook", "")), "event": str(row.get("event", "")), **numbers}


# ---- configuration -----------------------------------------------------------------------------------------


def _config(runs: list[RunData], notes: list[str]) -> list[dict[str, Any]]:
    """Return every key with its value in each run, None where a run does not have it. Values stay as logged,
    with their masks.
    """
    flat = [
        {key: cut(_spell_setting(value), LONGEST_VALUE) for key, value in flatten(run.params).items()}
        for run in runs
    ]
    keys = list(dict.fromkeys(key for each in flat for key in each if key not in ("torch", "hookline")))
    if len(keys) > MOST_KEYS:
        notes.append(
            f"{len(keys) - MOST_KEYS} keys of the configuration are not shown: {_listed(keys[MOST_KEYS:])}"
        )
    return [{"key": cut(key, 200), "values": [each.get(key) for each in flat]} for key in keys[:MOST_KEYS]]


def _spell_setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _versions(runs: list[RunData]) -> list[dict[str, Any]]:
    """Return the versions of Hookline, torch and Python, from the log and the newest checkpoint."""
    found = [
        {
            **{key: str(run.params[key]) for key in ("hookline", "torch") if key in run.params},
            **{
                key: str(text)
                for each in run.checkpoints[:1]
                for key, text in each.manifest["versions"].items()
            },
        }
        for run in runs
    ]
    keys = dict.fromkeys(key for each in found for key in each)
    return [{"key": key, "values": [each.get(key) for each in found]} for key in keys]


# ---- text and pictures -------------------------------------------------------------------------------------


def _texts(runs: list[RunData], notes: list[str]) -> list[dict[str, Any]]:
    room, made = TEXT_CHARACTERS, []
    without: list[str] = []
    for number, run in enumerate(runs):
        for tag, texts in run.texts.items():
            items = []
            for step, text in reversed(texts.kept):
                short = cut(text, LONGEST_TEXT)
                room -= len(short)
                if room >= 0:
                    items.append({"step": step, "text": short})
            if items:
                made.append({"run": number, "tag": cut(tag, 200), "items": items, "count": texts.count})
            else:
                without.append(tag)
    if without:
        notes.append(
            f"The texts of {len(without)} tags are not in this page because of its size: {_listed(without)}"
        )
    return made


def _pictures(runs: list[RunData]) -> tuple[list[dict[str, Any]], int]:
    """Return the newest picture of every tag, then older ones, as far as they fit; and how many did not
    fit.
    """
    queue = []
    for number, run in enumerate(runs):
        by_tag: dict[str, int] = {}
        for tag, step, path in reversed(run.images):
            by_tag[tag] = by_tag.get(tag, 0) + 1
            queue.append((by_tag[tag], number, tag, step, path))
    made: list[dict[str, Any]] = []
    room, without = PICTURE_BYTES, 0
    for _, number, tag, step, path in sorted(queue, key=lambda each: each[:2]):
        data = _png(runs[number].path, path, room)
        without += not data
        if data:
            room -= len(data)
            made.append(
                {"run": number, "tag": cut(tag, 200), "step": step, "src": base64.b64encode(data).decode()}
            )
    order: dict[str, int] = {}
    for each in made:
        order.setdefault(each["tag"], len(order))
    return sorted(made, key=lambda each: (order[each["tag"]], each["run"], each["step"] or 0)), without


def _png(run_dir: Path, name: str, most: int) -> bytes:
    """Return a picture in the run's directory; nothing if it is elsewhere, missing, too large or not a
    PNG.
    """
    try:
        path = (run_dir / name).resolve()
        if not path.is_relative_to(run_dir.resolve()) or not path.is_file() or path.stat().st_size > most:
            return b""
        data = path.read_bytes()
    except (OSError, ValueError):
        return b""
    return data if data.startswith(PNG) else b""
