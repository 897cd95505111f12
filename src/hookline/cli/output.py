"""Exit codes, and the results of a command as text or JSON."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from hookline.util.text import align_columns, printable, printable_lines

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
WIDEST = 48
"""The most characters of a value in a table."""


def print_result(chosen: argparse.Namespace, data: Any, text: str) -> int:
    """Print the data with `--json`, else the text without control characters; return the code of success."""
    print(json.dumps(data) if chosen.json else printable_lines(text))
    return OK


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text: long values are cut, control characters are escaped."""
    return "\n".join(align_columns([[_cut(printable(text)) for text in row] for row in rows]))


def _cut(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST // 2]}…{text[-WIDEST // 2 + 1 :]}"


def format_number(value: Any) -> str:
    """Return a number with four digits, nothing for None, and any other value as text."""
    if isinstance(value, int | float) and math.isfinite(value):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def format_size(count: int) -> str:
    """Return a number of bytes in a suitable unit."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
