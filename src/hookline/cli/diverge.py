"""`hookline diverge`: where two runs diverge, narrowed to a step by running both again."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from hookline.cli.output import DIFFERENT, OK, print_result
from hookline.digests.compare import CARRIED
from hookline.digests.diverge import DivergeReport, diverge, diverge_attempts, diverge_ranks
from hookline.digests.file import read_digests
from hookline.loggers.jsonl import jsonable
from hookline.run.record import RECORD
from hookline.util.errors import HooklineError, OptionError
from hookline.util.text import printable_lines

DETAILS = {"every": 1, "modules": True}
"""The digests of a run that runs again."""


def print_divergence(chosen: argparse.Namespace) -> int:
    """Compare two runs, a run with its resume, or its ranks; print the result and return the exit code."""
    if chosen.other is not None and (chosen.ranks or chosen.resume):
        option = "--ranks" if chosen.ranks else "--resume"
        raise OptionError(f"{option} compares a run with itself: name one run, not {chosen.other}, too.")
    if chosen.ranks and chosen.resume:
        raise OptionError("--ranks and --resume are two comparisons: leave one of them out.")
    if chosen.other is not None:
        report = diverge(chosen.run, chosen.other)
        if not chosen.no_rerun and needs_narrowing(report):
            report = narrow(report, chosen.config or [], chosen.allow)
    else:
        report = diverge_ranks(chosen.run) if chosen.ranks else diverge_attempts(chosen.run)
    print_result(chosen, jsonable(report.data()), printable_lines(report.text()))
    return OK if report.is_equal else DIFFERENT


# ---- narrowing ---------------------------------------------------------------------------------------------


def needs_narrowing(report: DivergeReport) -> bool:
    """Return whether the step, or the module in it, is not known yet."""
    found = report.divergence
    if found is None:
        return False
    details = all(read_digests(path).about.get("modules") for path in report.paths)
    return not found.is_exact or (not details and not found.first.names and found.first.kind != "hook")


def narrow(report: DivergeReport, configs: list[str], allow: list[str]) -> DivergeReport:
    """Run both runs again, from a checkpoint before they differ, with digests of every step and module.

    If that is not possible, the report says why, and how to do it in Python.
    """
    from hookline.rewind.recorded import RecordedRun

    found = report.divergence
    assert found is not None
    if len(configs) > 2:
        raise OptionError("--config is for both runs, or once for each of the two.")
    if loops := [str(path) for path in report.paths if not (path / RECORD).is_file()]:
        report.notes.append(
            f"the step cannot be narrowed: {' and '.join(loops)} cannot be run again, because there is no "
            f"{RECORD}. A loop with hookline.Line does not write one. Log more in both loops, every step: "
            "Line(..., logger=True, log_every_n_steps=1, hooks=[GradientMonitor(log_frequency=1)])"
        )
        return report
    try:
        for path in report.paths:
            RecordedRun(path).check_trainer()
    except OptionError as error:
        report.notes.append(f"the step cannot be narrowed: {error}")
        return report
    files = [*configs, *configs][:2] if configs else [None, None]
    try:
        again, repeated = _compare_again(report, files, allow, found.last_equal or 0)
        first = again.divergence
        if first is not None and first.first.kind in CARRIED and first.step == again.steps[0] > 1:
            # they have differed before: equal metrics do not mean equal weights
            again, repeated = _compare_again(report, files, allow, 0)
    except Exception as error:  # of the code of the runs, too: the interval is known nevertheless
        name = "" if isinstance(error, HooklineError) else f"{type(error).__name__}: "
        report.notes.append(f"the step cannot be narrowed: {name}" + str(error).partition("\n")[0])
        report.notes += python_form(report)
        return report
    return _merged(report, again, repeated)


def _compare_again(
    report: DivergeReport, files: list[Any], allow: list[str], begin: int
) -> tuple[DivergeReport, list[bool | None]]:
    """Run both runs again, and compare the copies; also return whether each is as recorded."""
    assert report.divergence is not None
    with tempfile.TemporaryDirectory(prefix="hookline-diverge-") as folder:
        places = (Path(folder) / "a", Path(folder) / "b")
        # output of hooks and modules must not mix with the result
        with contextlib.redirect_stdout(sys.stderr):
            for path, place, config in zip(report.paths, places, files, strict=True):
                run_again(path, report.divergence.step, begin, place, config, allow)
        again = diverge(*places, report.names)
        return again, [_is_as_recorded(path, place) for path, place in zip(report.paths, places, strict=True)]


def run_again(path: Path, to: int, begin: int, out: Path, config: str | None, allow: list[str]) -> None:
    """Run a recorded run again to a step, from a checkpoint of `begin` or before, with digests and audit."""
    from hookline.rewind.rebuild import from_config
    from hookline.rewind.recorded import RecordedRun
    from hookline.rewind.rerun import RunAgain

    recorded = RecordedRun(path)
    if config is None and recorded.config is None:
        raise OptionError(f"{path} was started by a program, which only the program can start again.")
    print(f"running {path} again, up to step {to} ...", file=sys.stderr)
    again = RunAgain(
        recorded, to, lambda loggers: from_config(recorded, loggers, config, allow), since=begin, out=out
    )
    again.trainer.options.digest = dict(DETAILS)
    again.trainer.audit = dataclasses.replace(again.trainer.audit, changes=True)
    with again.paused():
        pass


def _is_as_recorded(path: Path, again: Path) -> bool | None:
    """Return whether a repeated run has the digests of its record; None if they have no step in common."""
    recorded, repeated = read_digests(path).current, read_digests(again).current
    common = recorded.keys() & repeated.keys()
    if not common:
        return None
    fields = ("weights", "gradients", "updated")
    return all(recorded[key].get(name) == repeated[key].get(name) for key in common for name in fields)


def _merged(report: DivergeReport, again: DivergeReport, repeated: list[bool | None]) -> DivergeReport:
    """Return the result of the repeated runs, with what the records say about the recorded ones."""
    words = {True: "is as recorded", False: "differs from its record", None: "has no digest to compare with"}
    said = ", ".join(f"{name} {words[each]}" for name, each in zip(report.names, repeated, strict=True))
    found = again.divergence
    if found is None:
        report.notes.append(
            f"both runs were run again here up to step {again.steps[-1] if again.steps else '?'}, and are "
            f"equal ({said}): the difference comes from where or with what they ran, not from their "
            "configurations"
        )
        return report
    assert report.divergence is not None
    found.last_equal = found.last_equal if found.last_equal is not None else report.divergence.last_equal
    is_next = report.basis == "digests" and found.step == (report.divergence.last_equal or 0) + 1
    found.is_exact = found.is_exact or is_next
    steps = f"steps {again.steps[0]} to {again.steps[-1]}"
    notes = [*again.notes, f"found by running both again, {steps} ({said})"]
    return DivergeReport(
        report.names, report.paths, "digests", report.steps, found, again.rank, notes, report.causes
    )


def python_form(report: DivergeReport) -> list[str]:
    """Return how a program narrows the step."""
    found = report.divergence
    assert found is not None
    lines = [
        "in Python, run both again with what the program passed to fit and all of its hooks, then "
        "compare the copies:"
    ]
    for path, name in zip(report.paths, ("again-a", "again-b"), strict=True):
        lines.append(
            f"  with hookline.rewound({str(path)!r}, to={found.step}, since={found.last_equal or 0}, "
            f"module=..., train=..., hooks=..., out={name!r}, digest={DETAILS}): pass"
        )
    return [*lines, "  hookline diverge again-a again-b"]
