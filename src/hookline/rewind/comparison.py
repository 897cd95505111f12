"""Compare a run with its log while it runs again, and this machine with the one that it ran on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hookline.loggers.base import Logger, number
from hookline.loggers.jsonl import jsonable
from hookline.run.provenance import code_state, describe_machine, versions
from hookline.run.run import Run

MACHINE = ("cpu", "capability", "threads", "device", "device_name", "world_size", "strategy", "precision")
"""The facts about a machine that decide the bits of a computation."""
RowKey = tuple[int, str]
"""The step of a row, and what its values are of: 'step', 'epoch' or 'evaluation'."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A logged value that is not as recorded."""

    step: int
    over: str
    name: str
    recorded: Any
    now: Any

    def __str__(self) -> str:
        return (
            f"step {self.step}{'' if self.over in ('', 'step') else f' ({self.over})'}: {self.name} was "
            f"{self.recorded!r}, and is now {self.now!r}"
        )

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


class RowCollector(Logger):
    """Keeps in memory what a run logs, in place of its own loggers."""

    queued = False
    tells_rows_apart = True

    def __init__(self) -> None:
        self.rows: dict[RowKey, dict[str, Any]] = {}
        self.texts: list[tuple[int | None, str, str]] = []
        """Step, tag and text."""
        self.detached: dict[str, str] = {}
        """Probes that were detached, and why."""

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int, over: str = "") -> None:
        """Keep a row."""
        self.rows.setdefault((step, over), {}).update(jsonable(metrics))

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        """Keep a number."""
        if global_step is not None:
            self.log_metrics({tag: number(tag, scalar_value)}, global_step, 0)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        """Keep a text."""
        self.texts.append((global_step, tag, str(text_string)))

    def log_event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Keep why a probe was detached."""
        if kind == "control" and data.get("command") == "detach":
            self.detached[str(data["hook"])] = str(data.get("reason", ""))

    def resume(self, position: Any, step: int, epoch: int, path: Path | str) -> None:
        """Drop the rows after a step that the run goes back to."""
        self.rows = {key: row for key, row in self.rows.items() if key[0] <= step}


def recorded_rows(records: Iterable[Mapping[str, Any]]) -> dict[RowKey, dict[str, Any]]:
    """Return the rows of a log by step and scope."""
    rows: dict[RowKey, dict[str, Any]] = {}
    for each in records:
        if isinstance(each.get("metrics"), dict):
            rows.setdefault((each["step"], str(each.get("over", ""))), {}).update(each["metrics"])
    return rows


@dataclass(slots=True)
class Comparison:
    """The values of a run that runs again, beside those of its log."""

    values: int
    """The number of values that are in both."""
    steps: list[int]
    """The steps of these values."""
    differences: list[Difference]
    new: dict[RowKey, dict[str, Any]]
    """Values that the log does not have at that step: those of probes."""


def compare(
    recorded: Mapping[RowKey, Mapping[str, Any]],
    now: Mapping[RowKey, Mapping[str, Any]],
    ignore: Iterable[str] = (),
) -> Comparison:
    """Compare the rows of a run with those of its log, to the bit. ignore: patterns of names to leave out."""
    found = Comparison(0, [], [], {})
    patterns = tuple(ignore)
    for (step, over), row in sorted(now.items(), key=lambda each: each[0][0]):
        known = recorded.get((step, over), {})
        for name, value in row.items():
            if name not in known:
                found.new.setdefault((step, over), {})[name] = value
            elif not any(fnmatchcase(name, each) for each in patterns):
                found.values += 1
                found.steps += [step] if step not in found.steps[-1:] else []
                # the text of a float in JSON holds all its bits, also of -0.0
                if json.dumps(known[name]) != json.dumps(value):
                    found.differences.append(Difference(step, over, name, known[name], value))
    return found


# ---- where it runs -----------------------------------------------------------------------------------------


def environment_differences(record: Mapping[str, Any], run: Run) -> list[str]:
    """Return what differs between the recorded run and this one that may change bits: versions, processor,
    threads, device, ranks, code.
    """
    was, here = _table(record, "versions"), versions()
    found = [
        f"{package} {was[package]} there, {here[package]} here"
        for package in was
        if package in here and was[package] != here[package]
    ]
    machine, mine = _table(record, "machine"), describe_machine(run)
    names = MACHINE if "cpu" in machine else ("host", *MACHINE)  # older records do not have the processor
    found += [
        f"{name.replace('_', ' ')} {machine[name]} there, {mine[name]} here"
        for name in names
        if name in machine and machine[name] != mine[name]
    ]
    commit, now = _table(record, "git").get("commit"), code_state().get("commit")
    if commit and now and commit != now:
        found.append(f"code of commit {str(commit)[:12]} there, {str(now)[:12]} here")
    return found


def _table(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}
