"""Settings and command lines without their secrets, as plain values that JSON can hold, for files that people
pass on.

A value is hidden by the name it has (`api_key`, `db.password`), and text also by its form: credentials and
queries of URLs, paths of web addresses (a webhook's path is its password), and the tokens of well-known
services.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hookline.text import credentials, redact

HIDDEN = "(not shown)"
LONGEST_TEXT = 1000
"""Characters of one value."""
LONGEST_COMMAND = 4000
MOST_ITEMS = 500
"""Entries of one table or list."""
DEEPEST = 20
STRONG = ("passw", "passphrase", "secret", "credential", "apikey", "authorization", "dsn", "cookie")
"""A name with one of these in a word of it is a secret's, whatever the value is."""
WEAK = ("auth", "bearer", "signature", "sig", "pwd", "pat")
"""So is one with such a word, or a word that ends in key or token, unless its value is a number: `key_dim`,
`max_tokens`.
"""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_WEB = re.compile(r"""(?i)(https?://)([^\s'"<>\\]+)""")
_PAIR = re.compile(r"""(?ix) (?<![\w.-]) ([\w.-]++) (["'\])]{0,3} \s*+ [:=] \s*+)
                   ("[^"]*" | '[^']*' | (?:bearer|basic|token) \s+ [^\s'",;}]+ | [^\s'",;}\])]+)""")
_TOKENS = re.compile(
    r"\b(?:sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|hf_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|xox[abeprs]-[\w-]{10,}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)


def is_secret(name: str, value: object = "") -> bool:
    """Return whether what has this name must not be shown. A number, true, false or None hides under a strong
    name only.
    """
    words = [each.lower() for each in _WORDS.findall(name)]
    joined = "".join(words[-2:])
    if any(mark in each for each in (*words, joined) for mark in STRONG):
        return value is not None and not isinstance(value, bool)
    if value is None or isinstance(value, bool | int | float):
        return False
    return any(each in WEAK or each.removesuffix("s").endswith(("key", "token")) for each in words)


def mask_text(text: str, most: int = LONGEST_TEXT) -> str:
    """Return text without secrets: those of URLs, `name=value` and `"name": value` with a secret's name, and
    known tokens.
    """
    said = text
    if len(text) > 4 * most:  # not in the middle of a word, which may be half of a secret
        said = text[: 4 * most].rpartition(" ")[0] or text[:1]
    said = _TOKENS.sub("...", _PAIR.sub(_hide_pair, _WEB.sub(_host_only, redact(said))))
    return (
        said if len(said) <= most and len(text) <= 4 * most else f"{said[:most]}… ({len(text):,} characters)"
    )


def _host_only(found: re.Match[str]) -> str:
    rest = found[2][len(credentials(found[2])) :]
    host = re.split("[/?#,;)}\\]]", rest, maxsplit=1)[0]
    after = rest[len(host) :]
    return f"{found[1]}{host}{'/...' if after[:1] in ('/', '?', '#') and after != '/' else after}"


def _hide_pair(found: re.Match[str]) -> str:
    name, between, value = found.groups()
    bare = value.strip("'\"")
    return f"{name}{between}..." if bare and value != "..." and is_secret(name, _typed(bare)) else found[0]


def _typed(text: str) -> str | float:
    return float(text) if re.fullmatch(r"[-+]?\d{1,20}(?:\.\d{1,20})?", text) else text


def mask(value: Any, name: str = "", depth: int = 0) -> Any:
    """Return a value as JSON can hold it, without secrets: numbers and text, tables and lists of them, of
    others what they are.

    Long text, large tables and deep nesting are cut, with a note in place of what is missing.
    """
    if is_secret(name, value):
        return HIDDEN
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(2**64) < value < 2**64 else f"a number of {value.bit_length()} bits"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str | os.PathLike):
        return mask_text(str(value))
    if depth >= DEEPEST:
        return f"(nested more than {DEEPEST} levels deep)"
    if isinstance(value, Mapping):
        pairs = [
            (mask_text(str(key), 200), mask(each, str(key), depth + 1)) for key, each in _first(value.items())
        ]
        return dict(pairs) | _missing(len(value))
    if isinstance(value, list | tuple | set | frozenset):
        if value and all(isinstance(each, str) for each in value):
            return mask_words(list(_first(value)), most=LONGEST_TEXT) + list(_missing(len(value)).values())
        return [mask(each, "", depth + 1) for each in _first(value)] + list(_missing(len(value)).values())
    return kind_of(value)


def kind_of(value: Any) -> str:
    """Return the dotted name of a class or function; of another object, that of its class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '?')}.{named.__qualname__}"


def _first(items: Iterable[Any]) -> Iterable[Any]:
    return (each for _, each in zip(range(MOST_ITEMS), items, strict=False))


def _missing(count: int) -> dict[str, str]:
    return {"...": f"{count - MOST_ITEMS:,} more"} if count > MOST_ITEMS else {}


def mask_words(words: Sequence[str], most: int = LONGEST_COMMAND) -> list[str]:
    """Return the words of a command line without secrets: `--api_key X`, `--api_key=X`, and what `mask_text`
    finds.
    """
    shown: list[str] = []
    option = ""
    for word in words:
        name, is_pair, value = word.partition("=")
        if option and not word.startswith("--") and is_secret(option, _typed(word)):
            word, is_pair = "...", ""
        option = word if word.startswith("-") and not is_pair and " " not in word else ""
        hides = is_pair and value and " " not in name and is_secret(name, _typed(value))
        shown.append(f"{name}=..." if hides else mask_text(word, most))
    return shown


def command_line(words: Sequence[str], most: int = LONGEST_COMMAND) -> str:
    """Return a command line as one text without secrets."""
    text = shlex.join(mask_words(words, most))
    return text if len(text) <= most else f"{text[:most]}…"
