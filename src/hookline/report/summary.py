"""A run in numbers: how it ended, its metrics, its cost and its settings; and the settings in which several
runs differ.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hookline.report.page import short_names
from hookline.report.progress import RULES, Best, best_of, progress_of
from hookline.report.reader import LOG, RecordedRun, read_run
from hookline.report.run_events import ending_of, format_score, missing_log, position, time_spent, timestamp
from hookline.report.runs import disk_usage, last_records, run_status, utc
from hookline.run.lock import is_running
from hookline.run.record import recorded_rollbacks
from hookline.util.errors import OptionError
from hookline.util.text import flatten, mask

SUMMARY_VERSION = 1
"""The version of the data of `hookline summary --json`: it changes if a field changes its meaning or is
removed.
"""
MOST_CHECKPOINTS = 100
MOST_SKIPS = 100
"""The newest skipped updates. A log has the first 100 of a session, and then every hundredth."""
PLACES = ("run_dir", "default_root_dir", "trace", "digest")
"""Options that usually differ between runs and do not affect training."""
LOGGED = ("options", "module", "device", "precision", "strategy", "hooks", "torch", "hookline")
"""Hyper-parameters that every log has; the others are the module's."""


def summarize(run_dirs: list[Path | str]) -> dict[str, Any]:
    """Return a summary of each run, and for several runs the settings that differ. Nothing is written."""
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
    return below if not path.exists() and not path.is_absolute() and below.is_dir() else path


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


# ---- settings ----------------------------------------------------------------------------------------------


def recorded_settings(run: RecordedRun) -> dict[str, Any]:
    """Return every setting by its name, the ones that users set first: configuration, module, trainer, hooks,
    optimizers.
    """
    record, logged = run.record, run.params
    options = record.get("options") or logged.get("options") or {}
    module, machine = record.get("module"), record.get("machine")
    hparams = module.get("hparams") if isinstance(module, dict) else None
    rest = record.get("settings")
    known: dict[str, Any] = {
        "config": record.get("config"),
        "module": hparams,
        "data": record.get("data"),
        "trainer": options,
        "hooks": _hooks(record.get("hooks")),
        "": {key: each for key, each in rest.items() if key not in options}
        if isinstance(rest, dict)
        else None,
        "module.class": module.get("class") if isinstance(module, dict) else logged.get("module"),
        "git": _commit(record.get("git")),
        "versions": record.get("versions"),
        "machine": {key: machine.get(key) for key in ("world_size", "device", "device_name")}
        if isinstance(machine, dict)
        else None,
    }
    own = {key: each for key, each in logged.items() if key not in LOGGED}
    known["logged"] = None if hparams else own  # what HParams has logged
    # A log of an older version may have secrets. The data section has only numbers, and a loader may be
    # called "tokens".
    flat = flatten(
        {name: value if name == "data" else mask(value) for name, value in known.items() if value is not None}
    )
    flat = {key.removeprefix("."): value for key, value in flat.items() if value != {}}
    twice = {f"config.{key}" for key in flat if key.startswith("trainer.")}
    return {
        key: value for key, value in flat.items() if key.rpartition(".")[2] not in PLACES and key not in twice
    }


def _hooks(hooks: Any) -> dict[str, Any] | None:
    if not isinstance(hooks, dict):
        return None
    about = {
        name: each
        for name, each in hooks.items()
        if isinstance(each, dict) and not str(each.get("class")).startswith("hookline.cli.")
    }
    off = {name: {"enabled": False} for name, each in about.items() if each.get("enabled") is False}
    params = {name: each["params"] for name, each in about.items() if isinstance(each.get("params"), dict)}
    return {
        name: {"class": each.get("class"), **off.get(name, {}), **params.get(name, {})}
        for name, each in about.items()
    }


def _commit(git: Any) -> str | None:
    if not isinstance(git, dict) or not isinstance(git.get("commit"), str):
        return None
    return f"{git['commit'][:12]}{' with changes' if git.get('dirty') else ''}"


def differences(settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings that differ between runs, with the value in each; None where a run does not have
    it.

    A setting that appears under several names (in the configuration and in the optimizer) is listed under the
    first. The number of batches of a loader is left out if another setting of that loader differs, because it
    follows from that.
    """
    keys = dict.fromkeys(key for each in settings for key in each)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for key in keys:
        values = [each.get(key) for each in settings]
        spelled = [json.dumps(value, sort_keys=True) for value in values]
        if len(set(spelled)) > 1 and not _belongs_to_missing_hook(key, settings):
            found.setdefault((key.rpartition(".")[2], "\n".join(spelled)), {"key": key, "values": values})
    listed = [each["key"] for each in found.values()]
    differing = {
        key.rpartition(".")[0]
        for key in keys
        if key.startswith("data.")
        and not key.endswith(".batches")
        and len({json.dumps(each.get(key)) for each in settings}) > 1
    }
    derived = {key for key in listed if key.endswith(".batches") and key.rpartition(".")[0] in differing}
    return [each for each in found.values() if each["key"] not in derived]


def _belongs_to_missing_hook(key: str, settings: list[dict[str, Any]]) -> bool:
    """Return whether this is a parameter of a hook that some of the runs do not have. The missing hook is
    listed instead.
    """
    first, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    return (
        first == "hooks"
        and rest != f"{name}.class"
        and not all(f"hooks.{name}.class" in each for each in settings)
    )
