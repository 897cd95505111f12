"""Exit codes, and the results of a command as text or JSON."""

from __future__ import annotations

import argparse
import json
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
