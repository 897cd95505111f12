"""`hookline runs`, `summary` and `report`: lists of runs, and their results as text or as a page."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from typing import Any

from hookline.cli.output import print_result
from hookline.loggers.jsonl import jsonable
from hookline.report import write_report
from hookline.report.cell import describe
from hookline.report.reader import check_run_dir
from hookline.report.run_events import format_duration, position, status_in_words, timestamp
from hookline.report.runs import list_runs, status_word
from hookline.report.settings import column_titles, format_column, format_setting
from hookline.report.summary import MOST_SKIPS, find_run_dir, summarize
from hookline.run.options import Options
from hookline.run.state import progress
from hookline.run.timings import PART_WORDS, SAMPLED, TIMED_PARTS, Timings
from hookline.util.errors import OptionError
from hookline.util.text import format_number, format_table, printable

MOST_METRICS = 60
MOST_COLUMNS = 8
"""The most settings beside each run; the others are named below the table."""
NO_SETTINGS = (
    "No settings are recorded for these runs. In a hookline.Line, the hook HParams({...}) records them."
)
MOST_WARNINGS_SHOWN = 5
LONGEST_WARNING = 400
MOST_HOOKS = 6
"""The most rows of hook costs."""


def print_summary(chosen: argparse.Namespace) -> int:
    """Print how a run ended, or compare several runs."""
    data = summarize(_runs_among(chosen.run_dirs))
    return print_result(chosen, jsonable(data), _summary_text(data))


def _runs_among(given: list[str]) -> list[str]:
    """Return the directories of runs; skip others with a note, because `runs/*` may match them.

    If none is one, or a name does not exist, all are returned, and reading them raises.
    """
    skipped = {}
    for each in given:
        path = find_run_dir(each)
        try:
            check_run_dir(path)
        except OptionError as error:
            if path.exists():
                skipped[each] = str(error)
    if len(skipped) == len(given):
        return given
    for problem in skipped.values():
        print(f"skipped: {printable(problem)}", file=sys.stderr)
    return [each for each in given if each not in skipped]


def print_report(chosen: argparse.Namespace) -> int:
    """Write the page about one run or several, and print its path."""
    path, runs = write_report(_runs_among(chosen.run_dirs), chosen.out, chosen.against)
    size, now = path.stat().st_size, time.time()
    positions = [position(run) for run in runs]
    about: list[dict[str, Any]] = [
        {
            "run_dir": str(run.path),
            "status": status_in_words(run, now)[0],
            "step": at.step,
            "epochs": at.epochs,
            "records": run.records,
            "superseded": run.superseded,
            "metrics": len(run.series),
            "checkpoints": len(run.checkpoints),
        }
        for run, at in zip(runs, positions, strict=True)
    ]
    lines = [describe(run, now) for run in runs]
    data = {"report": str(path), "bytes": size, "runs": about}
    return print_result(chosen, data, "\n".join([*lines, f"wrote {path} ({size / 1e6:.1f} MB)"]))


def print_runs(chosen: argparse.Namespace) -> int:
    """Print a list of the runs below a directory."""
    now = time.time()
    listing = list_runs(chosen.directory, now)
    # the data reads logs, which the text does not need
    return print_result(chosen, jsonable(listing.data(now)) if chosen.json else None, listing.text(now))


# ---- one run -----------------------------------------------------------------------------------------------


def _rollbacks_text(rollbacks: list[dict[str, Any]]) -> str:
    """Return how often a run went back to a checkpoint, and the newest time."""
    if not rollbacks:
        return ""
    newest = rollbacks[-1]
    reason = f" ({newest['reason']})" if newest.get("reason") else ""
    steps = f"from step {newest.get('from_step')} to step {newest.get('step')}"
    return f"{len(rollbacks)}{', the last' if len(rollbacks) > 1 else ','} {steps}{reason}"


def _skips_text(skips: list[dict[str, Any]]) -> str:
    """Return how many updates the run skipped, and the newest of them."""
    if not skips:
        return ""
    many = len(skips)
    count = f"{many} or more updates" if many >= MOST_SKIPS else f"{many} update{'s' * (many > 1)}"
    return f"{count}, the last after step {skips[-1]['step']} ({skips[-1]['reason']})"


def _warning_texts(warnings: list[dict[str, Any]]) -> list[str]:
    """Return the newest warning of each kind. Those of one kind differ in numbers only."""
    kinds: dict[str, list[str]] = {}
    for each in warnings:
        kinds.setdefault(re.sub(r"\d", "", each["message"]), []).append(each["message"])
    texts = []
    for similar in list(kinds.values())[-MOST_WARNINGS_SHOWN:]:
        text, many = _on_one_line(similar[-1]), len(similar)
        texts.append(f"{text} ({many} similar ones; --json has them)" if many > 1 else text)
    return texts


def _on_one_line(message: str) -> str:
    """Return the lines of a message as sentences; of a long one, those that fit."""
    lines = [" ".join(line.split()) for line in message.splitlines() if line.strip()]
    ended = [line if line.endswith((".", ":", ";", ",", "!", "?")) else f"{line}." for line in lines[:-1]]
    text = " ".join([*ended, *lines[-1:]])
    if len(text) <= LONGEST_WARNING:
        return text
    start = text[: LONGEST_WARNING + 1]
    end = max(start.rfind(". ") + 1, start.rfind("; ")) or start.rfind(" ")
    return f"{text[: end if end > 0 else LONGEST_WARNING]} … (--json has the rest)"


def _summary_text(data: dict[str, Any]) -> str:
    if len(data["runs"]) > 1:
        return _comparison_text(data)
    about = data["runs"][0]
    failure = about["error"] if isinstance(about["error"], dict) else {}
    error = f"{failure.get('type')}: {failure.get('message')}" if failure else ""
    why = about["reason"].removesuffix(error).rstrip(": ")  # the error has a line of its own
    reason = f" ({why})" if why else ""
    seconds = about["seconds"]
    took = (
        []
        if seconds is None
        else [f"{format_duration(seconds) if seconds >= 1 else 'under 1 s'} in all, set-up included"]
    )
    many = len(about["sessions"])
    git = about["git"] if isinstance(about["git"], dict) else {}
    machine = about["machine"] if isinstance(about["machine"], dict) else {}
    lines = [printable(about["path"])]
    for label, text in (
        (
            "status",
            f"{status_word(about['status'], about['is_certain'])}{reason}, "
            f"{progress(about['step'], about['epochs'])}",
        ),
        ("error", error),
        ("log", about["missing_log"]),
        ("time", ", ".join([*took, *([f"{many} sessions"] if many > 1 else []), *_span(about)])),
        ("rollbacks", _rollbacks_text(about["rollbacks"])),
        ("skipped", _skips_text(about["skips"])),
        *(("warning", text) for text in _warning_texts(about["warnings"])),
        ("best", _best_text(about["best"])),
        ("checkpoints", _newest_checkpoint_text(about)),
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


def _best_text(best: dict[str, Any] | None) -> str:
    if best is None:
        return ""
    at = "" if best["step"] is None else f" at step {best['step']:,}"
    return f"{best['metric']} {format_number(best['value'])}{at} ({best['direction']} is better)"


def _newest_checkpoint_text(about: dict[str, Any]) -> str:
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
    for metric in ordered[:MOST_METRICS]:
        best, lowest, highest = metric["best"], metric["lowest"], metric["highest"]
        if best is None and lowest is not None:
            shown, at = f"{format_number(lowest['value'])} to {format_number(highest['value'])}", ""
        else:
            shown, at = ("", "") if best is None else (format_number(best["value"]), f"{best['step']:,}")
        name = f"{metric['name']} ({metric['over']})" if metric["name"] in twice else metric["name"]
        rows.append(
            (name, format_number(metric["last"]["value"]), shown, at, metric["trend"], f"{metric['count']:,}")
        )
    more = len(ordered) - MOST_METRICS
    return format_table(rows) + (f"\n... and {more} more metrics; --json has them all" if more > 0 else "")


def _cost_text(cost: dict[str, Any]) -> str:
    parts = []
    timings = cost["time"]
    if isinstance(timings, dict):
        parts.append(f"training loop of the newest session: {printable(_timings_text(timings))}")
    rows = [("hook", "event", "calls", "seconds", "share")]
    for row in cost["hooks"][:MOST_HOOKS]:
        share = row.get("share")
        rows.append(
            (
                str(row.get("hook", "")),
                str(row.get("event", "")),
                str(row.get("calls", "")),
                format_number(row.get("total")),
                f"{share:.1%}" if isinstance(share, float) else "",
            )
        )
    return "\n".join([*parts, *([format_table(rows)] if len(rows) > 1 else [])])


def _timings_text(timings: dict[str, Any]) -> str:
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
            f"{PART_WORDS.get(key, key)} {format_number(known[key])} s"
            for key in TIMED_PARTS
            if known.get(key)
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
            longest_wait=known.get("longest_wait"),
            longest_wait_rank=int(known.get("longest_wait_rank", 0)),
        )
    )


def _settings_text(settings: dict[str, Any]) -> str:
    """Return the settings as a table, without options of the trainer that have their default."""
    default = Options()
    rows = [
        (key, format_setting(value))
        for key, value in settings.items()
        if value not in (None, "")
        and not key.startswith("versions.")
        and not (key.startswith("optimizers.") and isinstance(value, bool))  # such as capturable
        and not (key.startswith("trainer.") and value == getattr(default, key.removeprefix("trainer."), None))
    ]
    return format_table([("setting", "value"), *rows]) if rows else ""


# ---- several runs ------------------------------------------------------------------------------------------


def _comparison_text(data: dict[str, Any]) -> str:
    runs, differing = data["runs"], data["differences"]
    order = sorted(range(len(runs)), key=lambda index: _best_first_key(runs[index]["best"], data["metric"]))
    columns = differing[:MOST_COLUMNS]
    titles = column_titles([each["key"] for each in columns])
    rows = [("run", "status", "step", f"best {data['metric'] or ''}".strip(), *titles)]
    cells = [format_column(each["key"], each["values"]) for each in columns]
    for index in order:
        about, best = runs[index], runs[index]["best"]
        other = "" if best is None or best["metric"] == data["metric"] else f"{best['metric']} "
        shown = "" if best is None else f"{other}{format_number(best['value'])}"
        rows.append(
            (
                about["name"],
                status_word(about["status"], about["is_certain"]),
                f"{about['step']:,}",
                shown,
                *(column[index] for column in cells),
            )
        )
    lines = [format_table(rows)]
    if not differing:
        known = any(each["settings"] for each in runs)
        lines.append("All settings that are known are the same." if known else NO_SETTINGS)
    elif len(differing) > MOST_COLUMNS:
        left = ", ".join(each["key"] for each in differing[MOST_COLUMNS : MOST_COLUMNS + 30])
        lines.append(
            f"{len(differing) - MOST_COLUMNS} more settings differ (--json has their values): "
            f"{printable(left)}"
        )
    return "\n".join(lines)


def _best_first_key(best: dict[str, Any] | None, metric: str | None) -> tuple[bool, float]:
    if best is None or best["metric"] != metric:
        return True, 0.0
    return False, best["value"] if best["direction"] == "lower" else -best["value"]
