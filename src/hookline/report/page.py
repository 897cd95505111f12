"""The report page: its data as plain values, and one file with styles, scripts and data inside. It loads
nothing from the network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hookline._version import __version__
from hookline.digests.diverge import HOW, find_run
from hookline.digests.file import read_digests
from hookline.loggers.jsonl import jsonable
from hookline.report.charts import headline_losses, heat_maps, metric_rows, sections, timelines
from hookline.report.digest_strip import digest_strips
from hookline.report.reader import RecordedRun, read_run
from hookline.report.run_events import (
    all_events,
    ending_of,
    format_duration,
    format_score,
    level,
    missing_log,
    position,
    status_in_words,
    time_spent,
    timestamp,
)
from hookline.run.timings import PART_WORDS, SAMPLED, TIMED_PARTS
from hookline.util.errors import OptionError
from hookline.util.text import flatten

ASSETS = Path(__file__).parent / "parts"
STYLES = ("uplot.min.css", "page.css")
SCRIPTS = (
    "uplot.min.js",
    "building.js",
    "updating.js",
    "charts.js",
    "heat.js",
    "tables.js",
    "digests.js",
    "page.js",
)
"""In this order, as one script; uPlot is third-party code, see uplot.LICENSE."""
LIVE_SCRIPTS = (*SCRIPTS[:-1], "live.js", SCRIPTS[-1])
"""The scripts of a served page, which receives updates from its server."""


def write_report(
    run_dirs: Sequence[Path | str], out: Path | str | None = None, against: Path | str | None = None
) -> tuple[Path, list[RecordedRun]]:
    """Write the page about these runs; return its path, and the runs.

    run_dirs: the directories of the runs. out: the file, by default `report.html` in the run's directory, or
    here for several runs. against: a run whose digests the others are compared with.
    """
    paths = [Path(each) for each in run_dirs]
    if not paths:
        raise OptionError("A report needs the directory of a run.")
    if len({path.resolve() for path in paths}) < len(paths):
        raise OptionError(f"A run is named twice: {', '.join(str(path) for path in paths)}.")
    target = Path(out) if out is not None else (paths[0] if len(paths) == 1 else Path()) / "report.html"
    if target.suffix.lower() not in (".html", ".htm"):  # a typing error must not overwrite a log
        raise OptionError(f"--out {target} must end with .html.")
    runs = [read_run(path) for path in paths]
    _write_page(target, render_page(runs, None if against is None else _digested(against)))
    return target, runs


def _digested(run: Path | str) -> Path:
    """Return the directory of a run that has digests, or raise."""
    path = find_run(run)
    if not read_digests(path).current:
        raise OptionError(f"--against {path}: this run has no digests. {HOW} writes them.")
    return path


def render_page(runs: list[RecordedRun], against: Path | None = None) -> str:
    """Return the text of a self-contained page."""
    return fill(embed(page_data(runs, against)), short_names(runs), SCRIPTS)


def fill(data: str, titles: list[str], scripts: tuple[str, ...], more_policy: str = "") -> str:
    """Return a page that shows this data, which comes from `embed`."""
    style, script = _read_assets(STYLES), _read_assets(scripts)
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        f"base-uri 'none'; form-action 'none'{more_policy}"
    )
    title = " · ".join(titles[:3]) + (" …" if len(titles) > 3 else "")
    filled = {"policy": policy, "title": html.escape(title), "style": style, "script": script, "data": data}
    text = (ASSETS / "page.html").read_text(encoding="utf-8")
    # the pieces at odd indices are names of fields; they are filled in once, so data cannot name a field
    pieces = text.split("%%")
    return "".join(filled[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def embed(data: Any) -> str:
    """Return JSON for a script element: nothing in it can end the element or start markup."""
    try:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError:  # NaN, in a log that another program wrote
        text = json.dumps(jsonable(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _read_assets(parts: tuple[str, ...]) -> str:
    return "\n".join((ASSETS / name).read_text(encoding="utf-8").strip() for name in parts)


def _hash(text: str) -> str:
    """Return the hash by which a browser recognises the one script or style that may run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _write_page(target: Path, text: str) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        # "replace", because file names may not be valid Unicode
        temporary.write_text(text, encoding="utf-8", errors="replace", newline="\n")
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OptionError(f"{target} could not be written: {error.strerror or error}") from error


# ---- the data of a page ------------------------------------------------------------------------------------


PICTURE_BYTES = 900_000
"""Bytes of all pictures together, before they are encoded as text."""
TEXT_CHARACTERS = 200_000
TEXT_LIMIT = 4000
LONGEST_VALUE = 500
MOST_EVENTS_SHOWN = 600
MOST_CHECKPOINTS_SHOWN = 300
MOST_KEYS = 800
PNG = b"\x89PNG\r\n\x1a\n"


def page_data(runs: list[RecordedRun], against: Path | None = None) -> dict[str, Any]:
    """Return the data of a page about these runs. against: compare their digests with those of this run."""
    now = time.time()
    charts, left_out = sections(runs)
    named = list(zip(short_names(runs), runs, strict=True))
    notes: list[str] = []
    for name, run in named:
        notes += [f"{name}: {count} {what} are not shown." for what, count in run.unshown.items()]
        if run.trace and run.trace.left_out:
            notes.append(f"{name}: {run.trace.left_out} calls of further hooks are not on the timeline.")
        if run.trace and run.trace.unread:
            notes.append(f"{name}: the traces of {run.trace.unread} further ranks are not read.")
    if left_out:
        notes.append(
            f"{len(left_out)} metrics beyond the first few hundred are not drawn: {_list_names(left_out)}"
        )
    rows, left_out = metric_rows(runs)
    if left_out:
        notes.append(f"{len(left_out)} metrics are not in the table of values: {_list_names(left_out)}")
    pictures, without = _pictures(runs)
    if without:
        notes.append(
            f"{without} pictures are not in this page because of its size; they are in the media folder of "
            f"the run."
        )
    return {
        "made": now,
        "version": __version__,
        "runs": [_run_card(run, name, now) for name, run in named],
        "sections": charts,
        "summary": rows,
        "heat": heat_maps(runs),
        "events": _event_rows(runs, notes),
        "timeline": timelines(runs),
        "checkpoints": _checkpoint_rows(runs, notes),
        "config": _config(runs, notes),
        "versions": _versions(runs),
        "cost": [_cost(number, run) for number, run in enumerate(runs) if run.costs.rows],
        "changes": [
            _changes(number, run) for number, run in enumerate(runs) if run.costs.changes is not None
        ],
        "digests": digest_strips([run.path for run in runs], short_names(runs), against),
        "timings": [_timing_parts(number, run) for number, run in enumerate(runs) if run.costs.timings],
        "texts": _texts(runs, notes),
        "pictures": pictures,
        "notes": notes,
    }


def short_names(runs: list[RecordedRun]) -> list[str]:
    """Return the names of the directories, with as much of their paths as makes them distinct."""
    paths = [run.path.resolve() for run in runs]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        short = [os.path.join(*path.parts[-parts:]) for path in paths]
        if len(set(short)) == len(set(paths)):
            return short
    return [str(path) for path in paths]


def shorten(text: str, most: int) -> str:
    """Return the beginning of a long text, and how much of it is missing."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def _list_names(found: list[str]) -> str:
    return shorten(", ".join(found), LONGEST_VALUE)


def _run_card(run: RecordedRun, name: str, now: float) -> dict[str, Any]:
    said, mood = status_in_words(run, now)
    took, pauses = "", 0.0
    began, spent = time_spent(run)
    if began is not None and spent is not None and run.times.ended is not None:
        took, pauses = format_duration(spent) if spent >= 1 else "under 1 s", run.times.ended - began - spent
    end, at = ending_of(run), position(run)
    return {
        "name": name,
        "path": str(run.path),
        "status": said,
        "mood": mood,
        "step": at.step,
        "epochs": at.epochs,
        "is_inside": at.is_inside,
        "newest": headline_losses(run),
        "reason": shorten(end["reason"], LONGEST_VALUE),
        "took": took,
        "is_over": bool(end["status"]),
        "pauses": format_duration(pauses) if pauses >= 1 else "",
        "began": began,
        "ended": run.times.ended,
        "records": run.records,
        "missing_log": missing_log(run),
        "superseded": run.superseded,
        "checkpoints": len(run.checkpoints),
    }


def _event_rows(runs: list[RecordedRun], notes: list[str]) -> list[dict[str, Any]]:
    found = [
        {
            "run": number,
            "kind": each.kind,
            "level": level(each.kind),
            "text": shorten(each.text, LONGEST_VALUE),
            "time": each.time,
            "step": each.step,
        }
        for number, run in enumerate(runs)
        for each in all_events(run)
    ]
    if len(found) <= MOST_EVENTS_SHOWN:
        return found
    # keep failures first, then the newest of the others
    levels = ("bad", "warn", "info")
    keep = sorted(range(len(found)), key=lambda index: (levels.index(str(found[index]["level"])), -index))
    notes.append(f"{len(found) - MOST_EVENTS_SHOWN} events of {len(found)} are not shown.")
    return [found[index] for index in sorted(keep[:MOST_EVENTS_SHOWN])]


def _checkpoint_rows(runs: list[RecordedRun], notes: list[str]) -> list[dict[str, Any]]:
    without = [
        _below(each.path, run.path) for run in runs for each in run.checkpoints[MOST_CHECKPOINTS_SHOWN:]
    ]
    if without:
        notes.append(f"{len(without)} older checkpoints are not in the table: {_list_names(without)}")
    return [
        {
            "run": number,
            "name": _below(each.path, run.path),
            "step": each.manifest["step"],
            "epoch": each.manifest["epoch"],
            "reason": each.manifest["reason"],
            "score": format_score(each.manifest),
            "saved": timestamp(each.manifest["saved_at"]),
            "bytes": sum(file["bytes"] for file in each.manifest["files"].values()),
        }
        for number, run in enumerate(runs)
        for each in run.checkpoints[:MOST_CHECKPOINTS_SHOWN]
    ]


def _below(path: Path, parent: Path) -> str:
    return str(path.relative_to(parent)) if path.is_relative_to(parent) else str(path)


def _cost(number: int, run: RecordedRun) -> dict[str, Any]:
    """Return the cost of the job that ended last; `since` is the step at which it resumed, if it did."""
    return {"run": number, "since": run.costs.rows_since, "rows": [_cost_row(row) for row in run.costs.rows]}


def _changes(number: int, run: RecordedRun) -> dict[str, Any]:
    """Return what the hooks of the job that ended last have changed."""
    return {"run": number, "rows": [_change_row(row) for row in run.costs.changes or ()]}


def _change_row(row: dict[str, Any]) -> dict[str, Any]:
    names = row.get("names")
    texts = {key: str(row.get(key, "")) for key in ("hook", "event", "kind")}
    numbers = {key: row[key] for key in ("count", "first_step", "rank") if isinstance(row.get(key), int)}
    return {
        **texts,
        **numbers,
        "names": _list_names([str(each) for each in names or ()]) if isinstance(names, list) else "",
    }


def _timing_parts(number: int, run: RecordedRun) -> dict[str, Any]:
    """Return the parts of the job that ended last, in the order of the chart, with the parts of the training
    step first.
    """
    found = run.costs.timings
    sampled = {name: found[name] for name in SAMPLED if name in found}
    rest = max(0.0, found.get("training", 0.0) - sum(sampled.values()))
    parts = {
        **sampled,
        ("other training" if sampled else "training"): rest,
        **{PART_WORDS.get(name, name): found[name] for name in TIMED_PARTS[1:] if name in found},
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


def _config(runs: list[RecordedRun], notes: list[str]) -> list[dict[str, Any]]:
    """Return every key with its value in each run, None where a run does not have it. Values stay as logged,
    with their masks.
    """
    flat = [
        {key: shorten(_spell_setting(value), LONGEST_VALUE) for key, value in flatten(run.params).items()}
        for run in runs
    ]
    keys = list(dict.fromkeys(key for each in flat for key in each if key not in ("torch", "hookline")))
    if len(keys) > MOST_KEYS:
        notes.append(
            f"{len(keys) - MOST_KEYS} keys of the configuration are not shown: "
            f"{_list_names(keys[MOST_KEYS:])}"
        )
    return [
        {"key": shorten(key, 200), "values": [each.get(key) for each in flat]} for key in keys[:MOST_KEYS]
    ]


def _spell_setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _versions(runs: list[RecordedRun]) -> list[dict[str, Any]]:
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


def _texts(runs: list[RecordedRun], notes: list[str]) -> list[dict[str, Any]]:
    room, made = TEXT_CHARACTERS, []
    without: list[str] = []
    for number, run in enumerate(runs):
        for tag, texts in run.texts.items():
            items = []
            for step, text in reversed(texts.kept):
                short = shorten(text, TEXT_LIMIT)
                room -= len(short)
                if room >= 0:
                    items.append({"step": step, "text": short})
            if items:
                made.append({"run": number, "tag": shorten(tag, 200), "items": items, "count": texts.count})
            else:
                without.append(tag)
    if without:
        notes.append(
            f"The texts of {len(without)} tags are not in this page because of its size: "
            f"{_list_names(without)}"
        )
    return made


def _pictures(runs: list[RecordedRun]) -> tuple[list[dict[str, Any]], int]:
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
                {
                    "run": number,
                    "tag": shorten(tag, 200),
                    "step": step,
                    "src": base64.b64encode(data).decode(),
                }
            )
    order = list(dict.fromkeys(each["tag"] for each in made))
    return sorted(made, key=lambda each: (order.index(each["tag"]), each["run"], each["step"] or 0)), without


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
