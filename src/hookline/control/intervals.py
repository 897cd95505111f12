"""How often a hook is heard: what it is now, and another interval while the run goes on."""

from __future__ import annotations

from typing import Any

from hookline.errors import HookError
from hookline.filters import SECONDS, Filter, When, parse_interval
from hookline.hooklist import Entry
from hookline.listener import Listener

OWN = ("every", "log_frequency")
"""Attributes by which built-in hooks count for themselves; a hook of the user's that has one is taken by its
word.
"""
REPEATED = ("batch", "window", "update")
"""Where in the lifecycle things happen so often that an interval makes sense."""


def interval_of(entry: Entry) -> str:
    """`every 200 steps`, or nothing if it hears every moment."""
    texts = [each.text for listener in entry.listeners for each in listener.filters if _is_interval(each)]
    if texts:
        return ", ".join(dict.fromkeys(texts))
    name = _own_interval(entry.hook)
    if not name:
        return ""
    value = getattr(entry.hook, name)
    return f"every {value:g} seconds" if isinstance(value, float) else f"every {value}"


def check_interval(entry: Entry, interval: int | str) -> None:
    """Refuse what `change_interval` could not do, before anybody is told to do it."""
    _, unit = parse_interval(interval, "every")
    if any(_is_interval(each) for listener in entry.listeners for each in listener.filters):
        return
    if own := _own_interval(entry.hook):
        in_seconds = isinstance(getattr(entry.hook, own), float)
        if in_seconds is not (unit in SECONDS) or (not in_seconds and unit not in ("call", "step", "batch")):
            right = "'30 seconds'" if in_seconds else "200, or '200 steps'"
            raise HookError(
                f"hook {entry.name!r} counts by itself ({own}={getattr(entry.hook, own)!r}): "
                f"every={interval!r} does not fit, use such as {right}."
            )
    elif not _repeated(entry):
        heard = ", ".join(each.event.name for each in entry.listeners) or "nothing"
        raise HookError(
            f"hook {entry.name!r} hears {heard}: nothing that comes with every batch, so every={interval!r} "
            "would change nothing. Use disable to switch it off."
        )


def change_interval(plan: Any, entry: Entry, interval: int | str, s: Any) -> None:
    """Let a hook be heard every so often, counted from now.

    Its own intervals are replaced (`@every`, or an attribute that it counts by). A hook that has none gets
    one at each event that comes with every batch; what it hears at starts and ends it goes on hearing.
    """
    check_interval(entry, interval)
    number, unit = parse_interval(interval, "every")
    filtered = [each for each in entry.listeners if any(_is_interval(one) for one in each.filters)]
    if not filtered and (own := _own_interval(entry.hook)):
        setattr(entry.hook, own, number * SECONDS[unit] if unit in SECONDS else int(number))
        return
    for listener in filtered or _repeated(entry):
        kept = [each for each in listener.filters if not _is_interval(each)]
        made = When(every=interval).filters()
        for each in made:
            each.begin(s)
        listener.filters = [*kept, *made]
        if listener in plan:  # one that is switched off is put together when it comes back
            plan.remove([listener])
            plan.add([listener])


def _is_interval(each: Filter) -> bool:
    return each.text.startswith("every ")


def _repeated(entry: Entry) -> list[Listener]:
    return [each for each in entry.listeners if each.event.inside in REPEATED]


def _own_interval(hook: Any) -> str:
    """The name of the attribute that says how often, if it has one."""
    numbers = (name for name in OWN if type(getattr(hook, name, None)) in (int, float))
    return next(numbers, "")
