"""Exit codes, and the results and errors of a command as text or JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from hookline.util.text import printable_lines

OK = 0
FAILED = 1
"""The run failed."""
USAGE = 2
"""A wrong command or configuration; nothing was run."""
DIFFERENT = 3
"""A run that ran again differs from its log, on the same machine and versions; or two runs diverge."""
INTERRUPTED = 130
"""Ctrl-C."""
BROKEN_PIPE = 141
"""The reader of the output was closed."""


def print_result(chosen: argparse.Namespace, data: Any, text: str) -> int:
    """Print the data with `--json`, else the text without control characters; return the code of success."""
    print(json.dumps(data) if chosen.json else printable_lines(text))
    return OK


def print_error(error: Exception, given: list[str]) -> int:
    """Print an error: messages of Hookline as text, others with a traceback; return the exit code."""
    from hookline.config.problems import ConfigError
    from hookline.util.errors import HooklineError, OptionError

    notes: list[str] = getattr(error, "__notes__", [])
    is_usage_error = isinstance(error, OptionError) and not _has_trained(error)

    def show() -> None:
        if "--json" in given:
            about = (
                error.data() if isinstance(error, ConfigError) else {"problem": str(error), "notes": notes}
            )
            print(json.dumps({"error": {"type": type(error).__name__, **about}}))
        if isinstance(error, HooklineError) and "--traceback" not in given:
            lines = [] if is_usage_error else [line for note in notes for line in note.splitlines()]
            print(
                printable_lines("\n".join([f"hookline: {error}", *(f"  {line}" for line in lines)])),
                file=sys.stderr,
            )
        else:
            traceback.print_exception(error)

    on_one_rank(error, show)
    return USAGE if is_usage_error else FAILED


def _has_trained(error: Exception) -> bool:
    """Return whether an error ended a fit after its first update."""
    if not hasattr(error, "__notes__"):
        return False
    from hookline.reliability.summary import end_summary

    return (ended := end_summary(error)) is not None and ended.trained


def on_one_rank(error: Exception | str, show: Callable[[], object]) -> None:
    """Call `show` for an error: on one of the ranks that have it, if there are several."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        show()
        return
    from hookline.distributed.error_output import print_once

    print_once(error, show)
