"""Text for logs, errors and terminals: URLs without their secrets, and no control characters from files of
others.
"""

from __future__ import annotations

import re
import urllib.parse

_WORD = re.compile(r"""[^\s'"<>]+""")
_PORT = re.compile(r"[^:]*:\d{1,5}(?:[/?#,;)]|$)")
_SHORTEST = 4
"""Characters. What is shorter is not searched for by itself: it would be found in every other word."""


def redact(text: object, url: str = "") -> str:
    """Return the text without the credentials and queries of URLs: a query may be a signature (`?sig=...`).

    url: one whose secrets are removed also where they stand by themselves.
    """
    said = str(text)
    for secret in sorted(_secrets(url), key=len, reverse=True):
        said = said.replace(secret, "...")
    return _WORD.sub(lambda found: _shown(found[0]), said) if "://" in said or "?" in said else said


def _shown(word: str) -> str:
    protocol, found, rest = word.partition("://")
    if not found:  # `requests` puts a path without its host into its errors
        path, _, query = word.partition("?")
        return f"{path}?..." if "=" in query else word
    rest = rest[len(credentials(rest)) :]
    ends = [rest.find("?"), rest.find("#") if "=" in rest.partition("#")[2] else -1]
    end = min((each for each in ends if 0 <= each < len(rest) - 1), default=None)
    return f"{protocol}://{rest}" if end is None else f"{protocol}://{rest[: end + 1]}..."


def credentials(rest: str) -> str:
    """A name and a password before the host, with the '@' after them; `rest` is what follows '://'."""
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    if ":" in host and not _PORT.match(rest):
        return rest[: rest.rfind("@") + 1]  # a password may hold '/', '?' and '@'
    return host[: host.rfind("@") + 1]


def _secrets(url: str) -> set[str]:
    """The secrets of a URL, as it spells them and as a library may spell them again."""
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


def holds_secret(error: BaseException, url: str = "") -> bool:
    """Whether an error, or one that led to it, says what `redact` would remove: then it must not be shown as
    a cause.
    """
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and not any(each is known for known in seen):
            seen.append(each)
            waiting += [each.__cause__, each.__context__]
    said = [
        text for each in seen for text in (str(each), repr(each), *map(str, getattr(each, "__notes__", ())))
    ]
    return any(redact(text, url) != text for text in said)


def printable(text: object) -> str:
    """Return the text with control characters spelled out, line ends included: what a file says cannot move
    the cursor.
    """
    said = str(text)
    return (
        said
        if said.isprintable()
        else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in said)
    )


def printable_lines(text: object) -> str:
    """Return the text with control characters spelled out, but in its own lines and with its tabs."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in str(text).split("\n"))
