"""How large a configuration may be, and how deep: a short file with aliases can stand for more than any
memory holds.
"""

from __future__ import annotations

import re
from typing import Any

BYTES = 2**20
LEVELS = 50
ALIASES = 1000
NODES = 100_000
"""Keys and values, with every alias counted as what it stands for."""
TOO_DEEP = f"it is nested more than {LEVELS} levels deep."
DIGITS = 1000
"""Of a number: reading longer ones takes time that grows with the square of their length, and Python does not
show them.
"""
TOO_LONG = f"it has a number of more than {DIGITS} digits."
_NUMBER = re.compile(r"[-+]?[0-9.][0-9a-fA-FxXoO_:.+-]*")
"""Also hexadecimal ones, and YAML's `59:59:59`, which is a number in base 60."""
_ENDS = re.compile(r"([=,{}\[\]\n])")
_DOT = re.compile(r"""[\w"'-][ \t]*\.[ \t]*(?=[\w"'-])""")


class TooMuch(ValueError):
    """A configuration beyond what anybody writes by hand."""


def check_size(text: str | bytes) -> None:
    """Refuse a text that is longer than any configuration."""
    if len(text) > BYTES:
        raise TooMuch(f"it has more than {BYTES // 2**20} MB, which no configuration has.")


def check_depth(values: Any) -> None:
    """Refuse values that are nested too deeply, and numbers with too many digits."""
    level = [values]
    for _ in range(LEVELS + 1):
        if any(isinstance(each, int) and abs(each) >= 10**DIGITS for each in level):
            raise TooMuch(TOO_LONG)
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise TooMuch(TOO_DEEP)


def check_toml(text: str) -> None:
    """Refuse keys of very many parts, which would be read for minutes: `a.a.a = 1`, `[a.a.a]`."""
    parts = _ENDS.split(text)
    if any(
        end in "=]" and len(_DOT.findall(key)) > LEVELS
        for key, end in zip(parts[::2], parts[1::2], strict=False)
    ):
        raise TooMuch(TOO_DEEP)


def check_yaml(text: str) -> None:
    """Refuse YAML that is too large once its aliases are followed, before they are. Raises yaml.YAMLError if
    it is no YAML.
    """
    import yaml  # type: ignore[import-untyped]

    check_size(text)
    aliases, sizes = 0, dict[str, int]()
    stack = [("", 0)]  # of every container that is open its anchor, and how many nodes it has so far
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        added = 0
        if isinstance(event, yaml.AliasEvent):
            aliases += 1
            if event.anchor in [anchor for anchor, _ in stack]:
                raise TooMuch(f"the alias *{event.anchor} stands for something that it is part of.")
            added = sizes.get(event.anchor, 1)  # one that is not defined is an error of its own
        elif isinstance(event, yaml.ScalarEvent):
            is_text = event.style in ("'", '"', "|", ">") and event.tag is None  # a plain one has None or ''
            if len(event.value) > DIGITS and not is_text and _NUMBER.fullmatch(event.value):
                raise TooMuch(TOO_LONG)
            added = sizes[event.anchor or ""] = 1
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            stack.append((event.anchor or "", 1))
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            anchor, added = stack.pop()
            sizes[anchor] = added
        stack[-1] = (stack[-1][0], stack[-1][1] + added)
        if aliases > ALIASES:
            raise TooMuch(f"it has more than {ALIASES} aliases: write the values out.")
        if stack[-1][1] > NODES:
            raise TooMuch(
                f"it has more than {NODES} values, with its {aliases} aliases counted as what they stand for."
            )
        if len(stack) > LEVELS + 1:
            raise TooMuch(TOO_DEEP)
