"""Read the JSON of a checkpoint within limits, because a file from elsewhere may be built to exhaust memory
or the stack.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MANIFEST_BYTES = 2**24
"""16 MB; the manifest of a thousand ranks has 0.3 MB."""
STRUCTURE_BYTES = 2**28
"""256 MB of `state.json`. Large data belongs in tensors and arrays, which are stored as such."""
RECORD_BYTES = 2**20
STATE_LEVELS = 500
"""Nesting in `state.json`: a dictionary in the state takes up to four levels, and a state may have a
hundred.
"""
MANIFEST_LEVELS = 20


class TooLarge(ValueError):
    """A file is larger than any file that Hookline writes."""


def read_within(path: Path, most: int) -> bytes:
    """Return the bytes of a file; raise if there are more than `most`."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise TooLarge(f"it is larger than {most // 2**20} MB, the limit for such a file")
        return file.read()


def parse_json(data: bytes, levels: int = STATE_LEVELS) -> Any:
    """Parse JSON. Raise ValueError for NaN, a duplicate key, bytes that are not text, or deep nesting."""
    try:
        value = json.loads(data, parse_constant=_refuse_constant, object_pairs_hook=_table_of_unique_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(levels):
        inside = [
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, dict | list)
        ]
        level = [value for values in inside for value in values if isinstance(value, dict | list)]
        if not level:
            return value
    raise ValueError(f"it is nested more than {levels} levels deep")


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _table_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the key {next(name for name in names if names.count(name) > 1)[:80]!r} appears twice"
        )
    return table


def is_count(value: Any, least: int = 0, most: int = 2**63 - 1) -> bool:
    """Return whether a value is a plain integer within these limits."""
    return type(value) is int and least <= value <= most


def is_text(value: Any) -> bool:
    """Return whether a value is text."""
    return isinstance(value, str)


def is_table(value: Any) -> bool:
    """Return whether a value is a JSON object."""
    return isinstance(value, dict)
