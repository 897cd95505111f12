"""Text for logs, errors and terminals: without the secrets of URLs and without control characters."""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import textwrap
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

_WORD = re.compile(r"""[^\s'"<>]+""")
_PORT = re.compile(r"[^:]*:\d{1,5}(?:[/?#,;)]|$)")
_WORKER = re.compile(r"Caught \w+ in (DataLoader worker|pin memory thread)[^\n]*\nOriginal ")
"""The beginning of an error that torch raises for one in a process or thread of a loader."""
_LAST_TRACE = re.compile(
    r".*^(?:Original )?Traceback \(most recent call last\):\n(?: [^\n]*\n)*", re.M | re.S
)
"""Everything before the error itself, in a text that ends with its traceback."""
WIDEST = 48
"""The most characters of a value in a table."""
_SHORTEST = 4
"""Characters. A shorter secret is not searched for by itself, because it would match in other words."""


def redact(text: object, url: str = "") -> str:
    """Return the text without the credentials and queries of URLs: a query may be a signature (`?sig=...`).

    url: a URL whose secrets are also removed where they stand alone.
    """
    said = str(text)
    for secret in sorted(_secrets(url), key=len, reverse=True) if url else ():
        said = said.replace(secret, "...")
    return _WORD.sub(lambda found: _redact_word(found[0]), said) if "://" in said or "?" in said else said


def _redact_word(word: str) -> str:
    protocol, found, rest = word.partition("://")
    if not found:  # errors of `requests` have a path without its host
        path, _, query = word.partition("?")
        return f"{path}?..." if "=" in query else word
    rest = rest[len(credentials(rest)) :]
    ends = [rest.find("?"), rest.find("#") if "=" in rest.partition("#")[2] else -1]
    end = min((each for each in ends if 0 <= each < len(rest) - 1), default=None)
    return f"{protocol}://{rest}" if end is None else f"{protocol}://{rest[: end + 1]}..."


def credentials(rest: str) -> str:
    """Return the name and password before the host, with the '@' after them; `rest` is the text after
    '://'.
    """
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    if ":" in host and not _PORT.match(rest):
        return rest[: rest.rfind("@") + 1]  # a password may hold '/', '?' and '@'
    return host[: host.rfind("@") + 1]


def _secrets(url: str) -> set[str]:
    """Return the secrets of a URL, as it spells them and as a library may encode them."""
    rest = url.partition("://")[2]
    secret = credentials(rest)
    query = rest[len(secret) :].partition("?")[2]
    secret = secret.removesuffix("@")
    parts = [secret, secret.partition(":")[2], query, *(value for _, value in urllib.parse.parse_qsl(query))]
    forms = [
        form
        for each in parts
        for form in (
            each,
            urllib.parse.quote(each, safe=""),
            urllib.parse.quote(each),
            urllib.parse.quote_plus(each),
            urllib.parse.unquote(each),
        )
    ]
    return {form for form in forms if len(form) >= _SHORTEST}


def linked_errors(error: BaseException | None, *links: str) -> Iterator[BaseException]:
    """Yield an error and those that it refers to, each once. links: attributes with an error or several."""
    seen, waiting = set[int](), [error]
    while waiting:
        each = waiting.pop()
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            for link in links:
                found = getattr(each, link, None)
                waiting += found if isinstance(found, tuple | list) else [found]


def holds_secret(error: BaseException, url: str = "") -> bool:
    """Return whether an error or one of its causes has text that `redact` would change. Such an error must
    not be shown as a cause.
    """
    texts = [
        text
        for each in linked_errors(error, "__cause__", "__context__")
        for text in (str(each), repr(each), *map(str, getattr(each, "__notes__", ())))
    ]
    return any(redact(text, url) != text for text in texts)


def error_text(error: BaseException) -> tuple[str, str]:
    """Return the type and the message of an error.

    The message of an error in a worker of a loader begins with the worker's traceback: return its last part.
    """
    kind = type(error).__name__
    try:
        message = str(error)
    except Exception as broken:  # a broken __str__ must not hide the error of the run
        return kind, f"(its message cannot be read: {type(broken).__name__})"
    if (caught := _WORKER.match(message)) is None:
        return kind, message
    original, _, text = _LAST_TRACE.sub("", message, count=1).strip().partition(": ")
    name = original.rpartition(".")[2]
    if not name.isidentifier():
        return kind, message
    where = "a worker" if caught[1] == "DataLoader worker" else "the pin memory thread"
    return name, f"{text} (in {where} of the loader)".lstrip()


def printable(text: object) -> str:
    """Return the text with control characters and line ends escaped, so that text from a file cannot move the
    cursor.
    """
    said = str(text)
    return (
        said
        if said.isprintable()
        else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in said)
    )


def encodable(text: str) -> str:
    """Return text that can be encoded, with unpaired surrogates escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def printable_lines(text: object) -> str:
    """Return the text with control characters escaped, but with its lines and tabs."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in str(text).split("\n"))


def align_columns(rows: Sequence[Sequence[str]], left: int | None = None) -> list[str]:
    """Return a table as lines with columns of equal width.

    left: the number of columns that are flush left; those after them are flush right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if left is None or index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text: long values are cut, control characters are escaped."""
    return "\n".join(align_columns([[cut(printable(text)) for text in row] for row in rows]))


def cut(text: str) -> str:
    """Return the text of a cell, with its middle left out if it is long."""
    return text if len(text) <= WIDEST else f"{text[: WIDEST // 2]}…{text[-WIDEST // 2 + 1 :]}"


def format_number(value: Any) -> str:
    """Return a number with four digits, nothing for None, and any other value as text."""
    if isinstance(value, int | float) and math.isfinite(value):
        return f"{value + 0:.4g}"  # without the sign of -0.0
    return "" if value is None else str(value)


def format_size(count: int) -> str:
    """Return a number of bytes in a suitable unit."""
    units = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
    unit, factor = next((each for each in units if count >= each[1]), ("B", 1))
    return f"{count} B" if factor == 1 else f"{count / factor:.1f} {unit}"


def list_some(names: Iterable[str], most: int = 5) -> str:
    """Return `a, b and 3 more`."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def wrapped_list(words: Sequence[str], width: int) -> list[str]:
    """Return the words, separated by commas, in lines that are hardly longer than the width."""
    text = f"{', '.join(words)},"
    *lines, last = textwrap.wrap(text, width + 1, break_long_words=False, break_on_hyphens=False)
    return [*lines, last.removesuffix(",")]


def map_texts(value: Any, convert: Callable[[str], str]) -> Any:
    """Return a value with every text in its tables and lists converted, keys included."""
    if isinstance(value, dict):
        return {map_texts(key, convert): map_texts(inner, convert) for key, inner in value.items()}
    if isinstance(value, list):
        return [map_texts(inner, convert) for inner in value]
    return convert(value) if isinstance(value, str) else value


def flatten(
    values: Mapping[str, Any], separator: str = ".", prefix: str = "", depth: int = 1
) -> dict[str, Any]:
    """Return nested tables as one, with names such as `trainer.max_epochs`.

    An empty table stays a value, and so does one that is nested too deeply.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value and depth < DEEPEST_VALUE:
            flat |= flatten(value, separator, f"{prefix}{key}{separator}", depth + 1)
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# ---- settings and command lines without secrets ------------------------------------------------------------


HIDDEN_VALUE = "(not shown)"
LONGEST_VALUE = 1000
"""Characters of one value."""
LONGEST_COMMAND = 4000
MOST_ITEMS = 500
"""Entries of one table or list."""
DEEPEST_VALUE = 20
STRONG = ("passw", "passphrase", "secret", "credential", "apikey", "authorization", "dsn", "cookie")
"""A name with a word that contains one of these belongs to a secret, whatever the value is."""
WEAK = ("auth", "bearer", "headers", "signature", "sig", "pwd", "pat")
"""So does a name with one of these words, or a word that ends in key or token, unless the value is a number:
`key_dim`, `max_tokens`.
"""
_NAME_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_WEB = re.compile(r"""(?i)(https?://)([^\s'"<>\\]+)""")
_PAIR = re.compile(r"""(?ix) (?<![\w.-]) ([\w.-]++) (["'\])]{0,3} \s*+ [:=] \s*+)
                   ("[^"]*" | '[^']*' | (?:bearer|basic|token) \s+ [^\s'",;}]+ | [^\s'",;}\])]+)""")
_TOKENS = re.compile(
    r"\b(?:sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|hf_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|xox[abeprs]-[\w-]{10,}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)


def is_secret(name: str, value: object = "") -> bool:
    """Return whether the value of this name must not be shown.

    A number, true, false or None is hidden only under a strong name.
    """
    words = [each.lower() for each in _NAME_WORDS.findall(name)]
    joined = "".join(words[-2:])
    if any(mark in each for each in (*words, joined) for mark in STRONG):
        return value is not None and not isinstance(value, bool)
    if value is None or isinstance(value, bool | int | float):
        return False
    return any(each in WEAK or each.removesuffix("s").endswith(("key", "token")) for each in words)


def mask_text(text: str, most: int = LONGEST_VALUE) -> str:
    """Return text without secrets: those of URLs, `name=value` and `"name": value` with a secret's name, and
    known tokens.
    """
    said = text
    if len(text) > 4 * most:  # cut between words, because half of a secret would not be recognised
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
    return (
        f"{name}{between}..." if bare and value != "..." and is_secret(name, _as_number(bare)) else found[0]
    )


def _as_number(text: str) -> str | float:
    return float(text) if re.fullmatch(r"[-+]?\d{1,20}(?:\.\d{1,20})?", text) else text


def mask(value: Any, name: str = "", depth: int = 0) -> Any:
    """Return a value as JSON can hold it, without secrets: numbers, text, tables and lists; other values as
    their type.

    Long text, large tables and deep nesting are cut, with a note instead of the missing part.
    """
    if is_secret(name, value):
        return HIDDEN_VALUE
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(2**64) < value < 2**64 else f"a number of {value.bit_length()} bits"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str | os.PathLike):
        return mask_text(str(value))
    if depth >= DEEPEST_VALUE:
        return f"(nested more than {DEEPEST_VALUE} levels deep)"
    if isinstance(value, Mapping):
        pairs = [
            (mask_text(str(key), 200), mask(each, str(key), depth + 1))
            for key, each in itertools.islice(value.items(), MOST_ITEMS)
        ]
        return dict(pairs) | _note_of_missing(len(value))
    if isinstance(value, list | tuple | set | frozenset):
        are_words = bool(value) and all(isinstance(each, str) for each in value)
        items, note = list(itertools.islice(value, MOST_ITEMS)), _note_of_missing(len(value))
        masked = mask_words(items, LONGEST_VALUE) if are_words else [mask(x, "", depth + 1) for x in items]
        return [*masked, *note.values()]
    return kind_of(value)


def kind_of(value: Any) -> str:
    """Return the dotted name of a class or function; for another object, the name of its class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '?')}.{named.__qualname__}"


def _note_of_missing(count: int) -> dict[str, str]:
    return {"...": f"{count - MOST_ITEMS:,} more"} if count > MOST_ITEMS else {}


def mask_words(words: Sequence[str], most: int = LONGEST_COMMAND) -> list[str]:
    """Return the words of a command line without secrets: `--api_key X`, `--api_key=X`, and those that
    `mask_text` finds.
    """
    shown: list[str] = []
    option = ""
    for word in words:
        name, is_pair, value = word.partition("=")
        if option and not word.startswith("--") and is_secret(option, _as_number(word)):
            word, is_pair = "...", ""
        option = word if word.startswith("-") and not is_pair and " " not in word else ""
        hides = is_pair and value and " " not in name and is_secret(name, _as_number(value))
        shown.append(f"{name}=..." if hides else mask_text(word, most))
    return shown


def command_line(words: Sequence[str], most: int = LONGEST_COMMAND) -> str:
    """Return a command line as one text without secrets."""
    text = shlex.join(mask_words(words, most))
    return text if len(text) <= most else f"{text[:most]}…"
