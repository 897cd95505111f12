"""A run in numbers: how it ended, its metrics, its cost and its settings; and the settings in which several
runs differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hookline.report.page import short_names
from hookline.report.progress import RULES, Best, best_of, progress_of
from hookline.report.reader import LOG, RecordedRun, read_run
from hookline.report.run_events import ending_of, format_score, missing_log, position, time_spent, timestamp
from hookline.report.runs import disk_usage, last_records, run_status, utc
from hookline.report.settings import differences, recorded_settings
from hookline.run.lock import is_running
from hookline.run.record import RECORD, recorded_rollbacks
from hookline.util.errors import OptionError

SUMMARY_VERSION = 1
"""The version of the data of `hookline summary --json`: it changes if a field changes its meaning or is
removed.
"""
MOST_CHECKPOINTS = 100
MOST_WARNINGS = 100
MOST_SKIPS = 100
"""The newest skipped updates. A log has the first 100 of a session, and then every hundredth."""


def summarize(run_dirs: Sequence[Path | str]) -> dict[str, Any]:
    """Return a summary of each run, and for several runs the settings that differ. Nothing is written.

    run_dirs: directories, or names in `runs/`.
    """
    if not run_dirs:
        raise OptionError("A summary needs the directory of a run.")
    runs = [read_run(find_run_dir(each)) for each in run_dirs]
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise OptionError(f"A run is named twice: {', '.join(map(str, run_dirs))}.")
    metric = _common_metric(runs)
    about = [_summarize_run(run, name, metric) for run, name in zip(runs, short_names(runs), strict=True)]
    differing = differences([each["settings"] for each in about]) if len(runs) > 1 else []
    return {
        "version": SUMMARY_VERSION,
        "rules": RULES,
        "runs": about,
        "metric": metric,
        "differences": differing,
    }


def find_run_dir(given: Path | str) -> Path:
    """Return the directory of a run; a bare name may be a run in `runs/`."""
    path = Path(given)
    below = Path("runs") / path
    is_below = not _is_run_dir(path) and not path.is_absolute() and (not path.exists() or _is_run_dir(below))
    return below if is_below and below.is_dir() else path


def _is_run_dir(path: Path) -> bool:
    return (path / LOG).is_file() or (path / RECORD).is_file()


def _common_metric(runs: list[RecordedRun]) -> str | None:
    """Return the main metric of most of the runs; of several, the first one's."""
    found = [best.metric for run in runs if (best := best_of(run)) is not None]
    return max(found, key=found.count) if found else None


def _summarize_run(run: RecordedRun, name: str, metric: str | None) -> dict[str, Any]:
    record, end, at = run.record, ending_of(run), position(run)
    status, is_certain = run_status(run, time.time(), is_running(run.path))
    best: Best | None = best_of(run, metric) or best_of(run)
    started, (began, spent) = timestamp(record.get("started_at")), time_spent(run)
    sessions = record.get("sessions")
    return {
        "name": name,
        "path": str(run.path),
        "id": record.get("id"),
        "status": status,
        "is_certain": is_certain,
        "reason": end["reason"],
        "missing_log": missing_log(run),
        "error": record.get("error") if status in ("failed", "pruned") else None,
        "step": at.step,
        "epochs": at.epochs,
        "started_at": utc(began if started is None else started),
        "ended_at": None
        if status == "running"
        else utc(end["time"] if end["time"] is not None else run.times.ended),
        "seconds": None if spent is None else round(spent, 3),
        "sessions": sessions if isinstance(sessions, list) else [],
        "rollbacks": recorded_rollbacks(record),
        "skips": [{"step": each.step, "reason": each.text} for each in run.events if each.kind == "skip"][
            -MOST_SKIPS:
        ],
        "warnings": [
            {"step": each.step, "message": each.text} for each in run.events if each.kind == "warning"
        ][-MOST_WARNINGS:],
        "best": None if best is None else best.data(),
        "metrics": [each.data() for each in progress_of(run)],
        "cost": {"hooks": run.costs.rows, "time": _newest_record(run)},
        "checkpoints": [
            {
                "path": str(each.path),
                "step": each.manifest["step"],
                "reason": each.manifest["reason"],
                "score": format_score(each.manifest),
            }
            for each in run.checkpoints[:MOST_CHECKPOINTS]
        ],
        "checkpoint_count": len(run.checkpoints),
        "bytes": disk_usage(run.path),
        **{key: record.get(key) for key in ("command", "directory", "git", "versions", "machine")},
        "settings": recorded_settings(run),
    }


def _newest_record(run: RecordedRun) -> dict[str, Any] | None:
    """Return the time of each part of the newest session, if the record or the end of the log has it."""
    known = run.record.get("time")
    if isinstance(known, dict):
        return known
    log = run.path / LOG
    found = [each for each in last_records(log) if each.get("type") == "timings"] if log.is_file() else []
    return {key: value for key, value in found[-1].items() if key not in ("type", "time")} if found else None
