"""`hookline control`: send a request to a running job."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from hookline.cli.codes import OK
from hookline.control.client import ask
from hookline.util.errors import OptionError, closest

LONGEST_WAIT = 3600.0
LONGEST_NAME = 60
"""The most characters of a hook's name in the table."""
ACTIONS: dict[str, tuple[str, ...]] = {
    "status": (),
    "enable": ("hook",),
    "disable": ("hook",),
    "every": ("hook", "interval"),
    "checkpoint": (),
    "stop": (),
    "attach": ("file",),
    "detach": ("hook",),
}
"""The actions, and the arguments of each."""


def run(chosen: argparse.Namespace) -> int:
    """Send the request and print the answer."""
    if not 0 <= chosen.wait <= LONGEST_WAIT:
        raise OptionError(f"--wait {chosen.wait:g} must be a number of seconds from 0 to {LONGEST_WAIT:g}.")
    answer = ask(chosen.run_dir, chosen.action, patience=chosen.wait, **_given(chosen))
    if chosen.json:
        print(json.dumps(answer))
    elif chosen.action == "status":
        print("\n".join(_table(answer)))
    elif answer.get("waiting"):
        what = {"stop": "the run has not ended", "checkpoint": "it is not on disk"}.get(
            chosen.action, "it has not been done"
        )
        print(
            f"{chosen.action}: requested; {what} within {chosen.wait:g} s, and will be after the next step."
        )
    elif "said" in answer:
        print(f"{chosen.action}: {answer['said']}")
    else:
        what = " ".join(str(answer[key]) for key in ("hook", "interval") if answer.get(key) is not None)
        print(f"{chosen.action}{f' {what}' if what else ''}: done at step {answer['step']}")
    return OK


def _given(chosen: argparse.Namespace) -> dict[str, Any]:
    action, words = chosen.action, list(chosen.words)
    if action not in ACTIONS:
        raise OptionError(
            f"{action!r} is not an action.{closest(action, ACTIONS)} Actions: {', '.join(ACTIONS)}."
        )
    names = ACTIONS[action]
    if "interval" in names:  # `every NAME 200 steps` needs no quotes
        words = [*words[:1], *([" ".join(words[1:])] if words[1:] else [])]
    if len(words) != len(names):
        needed = " ".join(each.upper() for each in names) or "nothing more"
        raise OptionError(f"{action} takes {needed}; got {' '.join(chosen.words) or 'nothing'}.")
    if chosen.name is not None and action != "attach":
        raise OptionError(f"--name is the name of an attached hook; {action} does not take it.")
    given: dict[str, Any] = dict(zip(names, words, strict=True))
    if action == "attach":
        given |= {
            "file": os.path.abspath(given["file"]),
            "name": chosen.name,
        }  # the job may be in another directory
    return given


def _in_a_cell(name: str) -> str:
    """Return a hook's name without line breaks, shortened to fit a table cell."""
    shown = name if name.isprintable() else repr(name)
    return shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 1]}…"


def _table(answer: dict[str, Any]) -> list[str]:
    rows = [("hook", "", "how often", "calls", "total", "share")]
    for each in answer["hooks"]:
        rows.append(
            (
                _in_a_cell(each["name"]),
                "on" if each["enabled"] else "off",
                each["every"],
                f"{each['calls']:,}",
                f"{each['total']:.3f} s",
                f"{each['share']:.2%}",
            )
        )
    wide = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = [
        "  ".join(
            cell.rjust(width) if column > 2 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, wide, strict=True))
        ).rstrip()
        for row in rows
    ]
    stopping = ", stopping" if answer["stopping"] else ""
    at = answer.get("progress", answer["position"])  # a job of an older version has only the latter
    return [f"{answer['status']}{stopping}: {at} (process {answer['pid']})", *lines]
