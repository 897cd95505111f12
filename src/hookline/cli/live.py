"""`hookline watch` and `hookline control`: a live page about a run, and requests to a running job."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any

from hookline.cli.output import OK, print_result
from hookline.control.client import COMMAND_ARGUMENTS, OPTIONAL_ARGUMENTS, ask
from hookline.util.errors import OptionError, closest
from hookline.util.text import align_columns

LONGEST_WAIT = 3600.0
WIDEST_HOOK = 60
"""The most characters of a hook's name in the table."""


def serve_page(chosen: argparse.Namespace) -> int:
    """Serve the page about a run until Ctrl-C."""
    from hookline.watch import Watch

    server = Watch(Path(chosen.run_dir), chosen.port)
    about = (
        json.dumps({"url": server.url, "run_dir": str(chosen.run_dir)})
        if chosen.json
        else f"{chosen.run_dir} is at\n\n  {server.url}\n\n"
        "The address works once, for one browser. Ctrl-C ends it."
    )
    print(about, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve()
    return OK


def send_command(chosen: argparse.Namespace) -> int:
    """Send a request to a running job and print the answer."""
    if not 0 <= chosen.wait <= LONGEST_WAIT:
        raise OptionError(f"--wait {chosen.wait:g} must be a number of seconds from 0 to {LONGEST_WAIT:g}.")
    answer = ask(chosen.run_dir, chosen.action, patience=chosen.wait, **_request_arguments(chosen))
    return print_result(chosen, answer, _answer_text(chosen, answer))


def _answer_text(chosen: argparse.Namespace, answer: dict[str, Any]) -> str:
    if chosen.action == "status":
        return _status_text(answer)
    if answer.get("waiting"):
        missing = {
            "stop": "the run has not ended",
            "checkpoint": "it is not on disk",
            "validate": "the validation is not over",
        }.get(chosen.action, "it has not been done")
        return (
            f"{chosen.action}: requested; {missing} within {chosen.wait:g} s; the job still carries it out."
        )
    if "said" in answer:
        return f"{chosen.action}: {answer['said']}"
    words = [
        chosen.action,
        *(str(answer[key]) for key in ("hook", "interval") if answer.get(key) is not None),
    ]
    return f"{' '.join(words)}: done at step {answer['step']}"


def _request_arguments(chosen: argparse.Namespace) -> dict[str, Any]:
    action, words = chosen.action, list(chosen.words)
    known = COMMAND_ARGUMENTS
    if action not in known:
        raise OptionError(
            f"{action!r} is not an action.{closest(action, known)} Actions: {', '.join(known)}."
        )
    names = [name for name in known[action] if name not in OPTIONAL_ARGUMENTS]
    if "interval" in names:  # `every NAME 200 steps` needs no quotes
        words = [*words[:1], *([" ".join(words[1:])] if words[1:] else [])]
    if len(words) != len(names):
        needed = " ".join(name.upper() for name in names) or "nothing more"
        raise OptionError(f"{action} takes {needed}; got {' '.join(chosen.words) or 'nothing'}.")
    for option in OPTIONAL_ARGUMENTS:
        if getattr(chosen, option) is not None and option not in known[action]:
            takes = next(each for each, given in known.items() if option in given)
            raise OptionError(f"--{option} is an option of {takes}; {action} does not take it.")
    given: dict[str, Any] = dict(zip(names, words, strict=True))
    if action == "attach":  # the job may be in another directory
        given |= {"file": os.path.abspath(given["file"]), "name": chosen.name}
    if action == "lr":
        given["group"] = chosen.group
    return given


def _status_text(answer: dict[str, Any]) -> str:
    rows = [("hook", "", "how often", "calls", "total", "share")]
    rows += [
        (_fit_cell(hook["name"]), "on" if hook["enabled"] else "off", hook["every"], *_cost_cells(hook))
        for hook in answer["hooks"]
    ]
    stopping = ", stopping" if answer["stopping"] else ""
    at = answer.get("progress", answer["position"])  # a job of an older version has only the latter
    head = f"{answer['status']}{stopping}: {at} (process {answer['pid']})"
    return "\n".join([head, *align_columns(rows, left=3)])


def _cost_cells(hook: dict[str, Any]) -> tuple[str, str, str]:
    """Return calls, time and share of a hook; dashes if the job does not measure them."""
    if hook["calls"] is None:
        return ("-", "-", "-")
    return (f"{hook['calls']:,}", f"{hook['total']:.3f} s", f"{hook['share']:.2%}")


def _fit_cell(name: str) -> str:
    """Return a hook's name without line breaks, shortened to fit a table cell."""
    text = name if name.isprintable() else repr(name)
    return text if len(text) <= WIDEST_HOOK else f"{text[: WIDEST_HOOK - 1]}…"
