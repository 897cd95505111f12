"""The tools of the MCP server: each returns the data of a command line's `--json`, with limits on its size.

The docstring of a tool is its description, and `PARAMETERS` describes its parameters; clients show both.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hookline.cli.mcp_folder import ServedFolder
from hookline.control.client import NotRunning, ask
from hookline.report.reader import EPOCH, RecordedRun, Series, read_run
from hookline.report.run_events import all_events, ending_of
from hookline.report.runs import list_runs, utc
from hookline.report.summary import summarize
from hookline.tracing.report import describe_trace
from hookline.util.errors import HooklineError, OptionError, closest

MOST_RUNS = 200
MOST_COMPARED = 10
MOST_POINTS = 1000
MOST_EVENTS = 500
MOST_ROWS = 100
"""The most settings, hooks or rows of a trace in an answer."""
MOST_METRICS = 50
MOST_CHECKPOINTS = 20
LONGEST_TEXT = 1000
"""Characters of a text in an answer."""
LONGEST_SETTING = 200
LONGEST_WAIT = 600.0
STATUS_WAIT = 5.0
"""Seconds for the status of a job, which its own thread answers at once."""
EXPLAIN_SECONDS = 300.0
PARAMETERS = {
    "run": "The run's name, as list_runs returns it: its path below the server's folder.",
    "runs": f"2 to {MOST_COMPARED} names of runs, as list_runs returns them.",
    "status": "Only runs of this status: running, completed, stopped, failed, killed, interrupted, ...",
    "limit": "The most rows to return.",
    "metric": "The name of a metric, as run_summary returns it.",
    "over": "'step' for values of single steps, 'epoch' for means of epochs and for validations.",
    "first_step": "Only values from this step on.",
    "last_step": "Only values up to this step.",
    "kind": "Only events of this kind, such as failure, control, checkpoint, hang, skip.",
    "trace": "The trace's file name in the run's directory; trace.rank1.json is that of rank 1.",
    "config": "The path of a .toml or .yaml configuration below the folder of --code.",
    "stage": "The stage to plan.",
    "hook": "The name of a hook, as hook_costs returns it.",
    "interval": "An interval: '200 steps', '10 minutes', or a number of steps.",
    "value": "A learning rate above 0, such as '1e-4', or a factor, such as 'x0.5'.",
    "group": "The number of a parameter group from 0, or its name; none: all groups.",
    "file": "The path of a .py file below the folder of --code.",
    "class_name": "The class in the file; not needed if the file has one hook.",
    "name": "Another name for the hook.",
    "wait": f"Seconds to wait for the answer, at most {LONGEST_WAIT:g}. Later, the job still carries it out.",
}


class ReadTools:
    """Tools that change nothing: recorded runs, and the status of running jobs."""

    def __init__(self, runs: ServedFolder) -> None:
        self._runs = runs

    def list_runs(self, limit: int = 50, status: str | None = None) -> dict[str, Any]:
        """List the runs, newest first: status, step, epochs, best metric, age in seconds, size in bytes."""
        _check_count("limit", limit, MOST_RUNS)
        now = time.time()
        listing = list_runs(self._runs.root, now)
        rows, problems = [], list(listing.problems)
        for each in listing.runs:
            try:
                self._runs.check_links(each.path)
            except OptionError as error:
                problems.append(str(error))
            else:
                if status is None or each.status == status:
                    rows.append(each)
        return {
            "runs": [{"run": self._runs.name(each.path), **each.data(now)} for each in rows[:limit]],
            "count": len(rows),
            "problems": problems[:MOST_ROWS],
        }

    def run_summary(self, run: str) -> dict[str, Any]:
        """Summarize a run: how it ended, its error, times in seconds, metrics with last and best value and
        trend, cost of hooks, checkpoints, settings. At most 50 metrics and 100 settings.
        """
        path = self._runs.run(run)
        about = summarize([path])["runs"][0]
        metrics = sorted(
            about["metrics"], key=lambda each: (each["direction"] is None, each["over"] == "step")
        )
        settings = dict(list(about["settings"].items())[:MOST_ROWS])
        return {
            "run": self._runs.name(path),
            **about,
            "metrics": metrics[:MOST_METRICS],
            "metric_count": len(metrics),
            "checkpoints": about["checkpoints"][:MOST_CHECKPOINTS],
            "sessions": about["sessions"][-MOST_CHECKPOINTS:],
            "cost": {**about["cost"], "hooks": about["cost"]["hooks"][:MOST_ROWS]},
            "settings": shorten(settings, LONGEST_SETTING),
            "setting_count": len(about["settings"]),
        }

    def compare_runs(self, runs: list[str]) -> dict[str, Any]:
        """Compare 2 to 10 runs: status, best value of their common metric, and the settings that differ."""
        if not 2 <= len(runs) <= MOST_COMPARED:
            raise OptionError(f"compare_runs takes 2 to {MOST_COMPARED} runs; got {len(runs)}.")
        paths = [self._runs.run(each) for each in runs]
        data = summarize([*paths])
        kept = ("status", "reason", "step", "epochs", "seconds", "best", "started_at")
        rows = zip(paths, data["runs"], strict=True)
        return {
            "metric": data["metric"],
            "runs": [
                {"run": self._runs.name(path), **{key: about[key] for key in kept}} for path, about in rows
            ],
            "differences": shorten(data["differences"][:MOST_ROWS], LONGEST_SETTING),
            "difference_count": len(data["differences"]),
        }

    def metric_series(
        self,
        run: str,
        metric: str,
        over: Literal["step", "epoch"] | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
        limit: int = 100,
    ) -> dict[str, Any]:
        """Return the values of a metric by step, at most 1000 points. If there are more than limit, evenly
        spaced ones with the first and the last; NaN and infinity are text.
        """
        _check_count("limit", limit, MOST_POINTS)
        path = self._runs.run(run)
        series, found = _find_series(read_run(path), metric, over)
        steps, values = series.arrays()
        inside = (steps >= (-np.inf if first_step is None else first_step)) & (
            steps <= (np.inf if last_step is None else last_step)
        )
        steps, values = steps[inside], values[inside]
        chosen = np.unique(np.linspace(0, len(steps) - 1, min(limit, len(steps))).round().astype(int))
        return {
            "run": self._runs.name(path),
            "metric": metric,
            "over": found,
            "count": len(steps),
            "steps": [int(each) for each in steps[chosen]],
            "values": [float(each) for each in values[chosen]],
        }

    def run_events(self, run: str, kind: str | None = None, limit: int = 50) -> dict[str, Any]:
        """Return how a run ended, its error, and its newest events in order: failures, hangs, skips, control
        commands, checkpoints, resumes. Times are in UTC; at most 500 events.
        """
        _check_count("limit", limit, MOST_EVENTS)
        path = self._runs.run(run)
        recorded = read_run(path)
        end = ending_of(recorded)
        events = [each for each in all_events(recorded) if kind is None or each.kind == kind]
        return {
            "run": self._runs.name(path),
            "status": end["status"] or None,
            "reason": end["reason"],
            "step": end["step"],
            "error": recorded.record.get("error"),
            "failure": recorded.failed.get("text"),
            "count": len(events),
            "events": [
                {"kind": each.kind, "text": each.text, "step": each.step, "time": utc(each.time)}
                for each in events[-limit:]
            ],
        }

    def hook_costs(self, run: str) -> dict[str, Any]:
        """Return the hooks of a run and their cost, the most expensive first: calls, total and longest time
        in seconds, share of the training time from 0 to 1. Live from a running job, else from the log.
        """
        path = self._runs.run(run)
        try:
            status = ask(path, "status", patience=STATUS_WAIT)
        except NotRunning:
            hooks, is_live = _recorded_costs(read_run(path)), False
        else:
            hooks, is_live = status["hooks"], True
        hooks = sorted(hooks, key=lambda each: -(each["total"] or 0.0))
        return {
            "run": self._runs.name(path),
            "live": is_live,
            "hooks": hooks[:MOST_ROWS],
            "count": len(hooks),
        }

    def job_status(self, run: str) -> dict[str, Any]:
        """Return where a running job is: step, epoch, limits, ranks, seconds since its start, hooks."""
        path = self._runs.run(run)
        status = ask(path, "status", patience=STATUS_WAIT)
        return {"run": self._runs.name(path), **status, "hooks": status["hooks"][:MOST_ROWS]}

    def describe_trace(self, run: str, trace: str = "trace.json", limit: int = 20) -> dict[str, Any]:
        """Describe a trace of a run: counts, and the events and calls that took longest in all, in seconds.
        At most 100 of each.
        """
        _check_count("limit", limit, MOST_ROWS)
        path = self._runs.run(run)
        about = describe_trace(self._runs.resolve(str(path / trace)))
        return {
            "run": self._runs.name(path),
            **about,
            "slowest_events": about["slowest_events"][:limit],
            "slowest_calls": about["slowest_calls"][:limit],
        }


class ControlTools:
    """Tools that change a running job, at its next step on all ranks. Each change is written to the log."""

    def __init__(self, runs: ServedFolder) -> None:
        self._runs = runs

    def enable_hook(self, run: str, hook: str) -> dict[str, Any]:
        """Switch a hook of a running job on again."""
        return self._ask(run, "enable", hook=hook)

    def disable_hook(self, run: str, hook: str) -> dict[str, Any]:
        """Switch a hook of a running job off; it keeps its place and its state."""
        return self._ask(run, "disable", hook=hook)

    def set_hook_interval(self, run: str, hook: str, interval: int | str) -> dict[str, Any]:
        """Set how often a hook of a running job is called."""
        return self._ask(run, "every", hook=hook, interval=interval)

    def detach_hook(self, run: str, hook: str) -> dict[str, Any]:
        """Remove a hook that was attached to a running job."""
        return self._ask(run, "detach", hook=hook)

    def validate_now(self, run: str, wait: float = 60.0) -> dict[str, Any]:
        """Validate a running job now, and return the metrics. The training itself is not changed by it."""
        return self._ask(run, "validate", wait)

    def set_learning_rate(
        self, run: str, value: float | str, group: int | str | None = None
    ) -> dict[str, Any]:
        """Set or multiply the learning rate of a running job; a schedule continues in proportion."""
        return self._ask(run, "lr", value=value, group=group)

    def save_checkpoint(self, run: str, wait: float = 60.0) -> dict[str, Any]:
        """Save a checkpoint of a running job, and return its path when it is on disk."""
        return self._ask(run, "checkpoint", wait)

    def stop_run(self, run: str, wait: float = 60.0) -> dict[str, Any]:
        """End a running job after this step, as at its regular end, and return what is saved."""
        return self._ask(run, "stop", wait)

    def _ask(self, run: str, command: str, wait: float = 60.0, **given: Any) -> dict[str, Any]:
        return ask_job(self._runs, run, command, wait, **given)


class CodeTools:
    """Tools that run code of the user in a process of their own: from files below one folder."""

    def __init__(self, code: ServedFolder) -> None:
        self._code = code

    def explain_configuration(
        self, config: str, stage: Literal["fit", "validate", "test", "predict"] = "fit"
    ) -> dict[str, Any]:
        """Show the lifecycle of a configuration without running it: every event with its listeners in order.
        It imports the classes that the configuration names, in a process of its own. Up to 5 minutes.
        """
        path = self._code.file(config, (".toml", ".yaml", ".yml"))
        # in another process: it imports the user's newest code, and may print and fail
        command = [sys.executable, "-m", "hookline", "explain", str(path), "--stage", stage, "--json"]
        try:
            done = subprocess.run(
                command,
                cwd=self._code.root,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=EXPLAIN_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise HooklineError(
                f"{config} was not explained within {EXPLAIN_SECONDS:g} s, and its process was ended."
            ) from None
        rows = _last_json(done.stdout)
        if done.returncode or not isinstance(rows, list):
            raise HooklineError(_error_text(rows) or done.stderr.strip()[-LONGEST_TEXT:] or "explain failed.")
        listened = [each for each in rows if each.get("listeners")]
        return {
            "config": config,
            "stage": stage,
            "events": listened,
            "silent_events": len(rows) - len(listened),
        }


class ProbeTools:
    """Tools that run code of the user in a running job: from files below one folder."""

    def __init__(self, runs: ServedFolder, code: ServedFolder) -> None:
        self._runs, self._code = runs, code

    def attach_probe(
        self, run: str, file: str, class_name: str = "", name: str | None = None
    ) -> dict[str, Any]:
        """Add a hook from a file to a running job: its code runs in the job. Again, it replaces the hook."""
        path = self._code.file(file, (".py",))
        return ask_job(self._runs, run, "attach", 60.0, file=f"{path}:{class_name}", name=name)


@dataclass(frozen=True, slots=True)
class ToolKind:
    """How a client may treat a tool: hints of the protocol."""

    reads: bool = False
    destroys: bool = False
    repeats: bool = False
    """Whether a second call with the same arguments changes nothing more."""


READS = ToolKind(reads=True, repeats=True)
SETS = ToolKind(repeats=True)
ADDS = ToolKind()
DESTROYS = ToolKind(destroys=True)
KINDS: dict[str, ToolKind] = {
    "list_runs": READS,
    "run_summary": READS,
    "compare_runs": READS,
    "metric_series": READS,
    "run_events": READS,
    "hook_costs": READS,
    "job_status": READS,
    "describe_trace": READS,
    "enable_hook": SETS,
    "disable_hook": SETS,
    "set_hook_interval": SETS,
    "validate_now": ADDS,
    "set_learning_rate": DESTROYS,  # a factor adds up
    "save_checkpoint": ADDS,
    "detach_hook": DESTROYS,
    "stop_run": DESTROYS,
    "explain_configuration": SETS,  # it runs code
    "attach_probe": DESTROYS,  # it runs any code in the job
}
"""All tools, in the order in which a client sees them."""


def make_tools(
    runs: ServedFolder, *, control: bool = False, code: ServedFolder | None = None
) -> dict[str, Callable[..., dict[str, Any]]]:
    """Return the tools that these permissions allow, by name.

    Without `control` nothing changes a job. Without `code` nothing runs code.
    """
    owners: list[Any] = [ReadTools(runs)]
    if control:
        owners.append(ControlTools(runs))
    if code is not None:
        owners.append(CodeTools(code))
    if control and code is not None:
        owners.append(ProbeTools(runs, code))
    return {name: getattr(owner, name) for name in KINDS for owner in owners if hasattr(owner, name)}


def ask_job(runs: ServedFolder, run: str, command: str, wait: float, **given: Any) -> dict[str, Any]:
    """Send a command to a running job. `done` is false if the job has not answered in time."""
    if not 0 <= wait <= LONGEST_WAIT:
        raise OptionError(f"wait={wait:g} must be a number of seconds from 0 to {LONGEST_WAIT:g}.")
    path = runs.run(run)
    answer = ask(path, command, patience=wait, **given)
    return {"run": runs.name(path), "done": not answer.pop("waiting", False), **answer}


def shorten(value: Any, longest: int = LONGEST_TEXT) -> Any:
    """Return a value with its long texts cut."""
    if isinstance(value, str):
        return value if len(value) <= longest else f"{value[: longest - 1]}…"
    if isinstance(value, dict):
        return {key: shorten(each, longest) for key, each in value.items()}
    return [shorten(each, longest) for each in value] if isinstance(value, list) else value


def _check_count(name: str, given: int, most: int) -> None:
    if not 1 <= given <= most:
        raise OptionError(f"{name}={given} must be from 1 to {most}.")


def _find_series(run: RecordedRun, metric: str, over: str | None) -> tuple[Series, str]:
    """Return the values of a metric and what they are over; without `over`, those of steps come first."""
    plain = metric.removesuffix(EPOCH)
    if plain != metric and metric not in run.own and over is None:
        metric, over = plain, "epoch"
    kept = {"step": run.own, "epoch": run.between}
    for kind, series in kept.items():
        if metric in series and over in (None, kind):
            return series[metric], kind
    known = dict.fromkeys(name for kind, series in kept.items() if over in (None, kind) for name in series)
    text = ", ".join(list(known)[:MOST_ROWS]) or "none"
    of_kind = f" over {over}s" if over else ""
    raise OptionError(f"There is no metric {metric!r}{of_kind}.{closest(metric, known)} Metrics: {text}.")


def _recorded_costs(run: RecordedRun) -> list[dict[str, Any]]:
    """Return the cost of each hook of a run that has ended, with its events."""
    hooks: dict[str, dict[str, Any]] = {}
    for row in run.costs.rows:
        name = str(row.get("hook", ""))
        about = hooks.setdefault(
            name, {"name": name, "events": [], "calls": 0, "total": 0.0, "worst": 0.0, "share": 0.0}
        )
        about["events"].append(str(row.get("event", "")))
        for key, add in (("calls", sum), ("total", sum), ("worst", max), ("share", sum)):
            value = row.get(key)
            if isinstance(value, int | float):
                about[key] = add((about[key], value))
    return list(hooks.values())


def _error_text(printed: Any) -> str:
    """Return the error that a command has printed as JSON; empty if it has not."""
    error = printed.get("error") if isinstance(printed, dict) else None
    parts = [error.get(key) for key in ("where", "key", "problem")] if isinstance(error, dict) else []
    return ": ".join(str(each) for each in parts if each)


def _last_json(text: str) -> Any:
    """Return the JSON document of a command. Output of the user's modules may come before it."""
    for line in reversed(text.splitlines()):
        try:
            return json.loads(line)
        except ValueError:
            continue
    return None


def first_paragraph(tool: Callable[..., Any]) -> str:
    """Return the description of a tool: its docstring in one line."""
    return " ".join((tool.__doc__ or "").split())


def default_folder(given: str | None) -> Path:
    """Return the folder of the runs: by default `runs/`, or this one if there is none, as `hookline runs`."""
    return Path(given) if given is not None else Path("runs") if Path("runs").is_dir() else Path()
