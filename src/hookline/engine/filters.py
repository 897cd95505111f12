"""Filters decide whether a listener is called: every n steps, once, after, before, or by a predicate."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar, overload

from hookline.util.errors import HookError, closest

F = TypeVar("F", bound=Callable[..., Any])

UNITS: Mapping[str, str] = MappingProxyType(
    {
        "step": "step",
        "batch": "batches_seen",
        "epoch": "epochs_seen",
        "sample": "samples_seen",
        "token": "tokens_seen",
    }
)
SECONDS: Mapping[str, float] = MappingProxyType(
    {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}
)
_ABBREVIATIONS = {
    "s": "second",
    "sec": "second",
    "min": "minute",
    "h": "hour",
    "batches": "batch",
    "calls": "call",
}
_FACTORS = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}


class Filter:
    """Decides whether a listener is called at an event. One instance belongs to one listener."""

    text: str
    facts: tuple[str, ...] = ()
    counts: bool = False
    """Whether it must be evaluated at every event to keep its count."""
    saved: tuple[str, ...] = ()
    """The attributes that a checkpoint keeps."""

    def ready(self, s: Any) -> bool:
        """Return whether to call the listener now."""
        raise NotImplementedError

    def begin(self, s: Any) -> None:
        """Start a run, or continue one after a resume."""

    def state_dict(self) -> dict[str, Any]:
        """Return the count so far."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the count."""
        for name in self.saved:
            setattr(self, name, state[name])


def parse_interval(interval: int | str, what: str, from_zero: bool = False) -> tuple[float, str]:
    """Parse an interval: `"500 steps"` -> (500, "step"), `"1M tokens"` -> (1000000, "token"), `100` -> (100,
    "call").
    """
    if callable(interval):
        raise HookError(
            f"@{what} is missing its interval: write it in parentheses, as in @{what}('500 steps')."
        )
    if isinstance(interval, bool) or not isinstance(interval, int | str):
        raise HookError(
            f"{what}={interval!r}: use a number of calls, or text such as '500 steps' or '10 minutes'."
        )
    if isinstance(interval, int):
        number, unit = float(interval), "call"
    else:
        match = re.fullmatch(r"\s*([\d_.]+)(?:([kKmMbB])\s+|\s*)([a-zA-Z]+)\s*", interval)
        if match is None or not re.fullmatch(r"[\d_]*\.?\d+|\d[\d_]*", match[1]):
            raise HookError(
                f"{what}={interval!r} is not a number and a unit, such as '500 steps' or '1M tokens'."
            )
        word = match[3].lower()
        unit = _ABBREVIATIONS.get(word, word.removesuffix("s"))
        number = float(match[1].replace("_", "")) * _FACTORS[(match[2] or "").lower()]
        allowed = [*UNITS, *SECONDS, "call"]
        if unit not in allowed:
            raise HookError(
                f"{what}={interval!r}: unknown unit {match[3]!r}.{closest(unit, allowed)} "
                f"Units: {', '.join(each + 's' if each != 'batch' else 'batches' for each in allowed)}."
            )
    if (number <= 0 and not from_zero) or (unit not in SECONDS and number != int(number)):
        raise HookError(
            f"{what}={interval!r}: the number must be positive"
            + ("." if unit in SECONDS else f", and whole for {unit}s.")
        )
    return number, unit


class _CountFilter(Filter):
    """Fires once when the count reaches a multiple of n, and not again while the count stays there."""

    counts = True
    saved = ("passed",)

    def __init__(self, interval: int | str) -> None:
        number, unit = parse_interval(interval, "every")
        self.n = int(number)
        self.facts = (UNITS[unit],) if unit in UNITS else ()
        self.count = attrgetter(UNITS[unit]) if unit in UNITS else None
        calls = "" if isinstance(interval, str) else " call" if interval == 1 else " calls"
        self.text = f"every {interval}{calls}"
        self.passed: int | None = None if self.count else 0

    def ready(self, s: Any) -> bool:
        if self.count is None:
            self.passed = (self.passed or 0) + 1
            return self.passed % self.n == 0
        reached: int = self.count(s) // self.n
        if self.passed is None:  # the hook was added during a run
            self.passed = reached
        if reached > self.passed:
            self.passed = reached
            return True
        return False

    def begin(self, s: Any) -> None:
        self.passed = self.count(s) // self.n if self.count else 0


class _TimeFilter(Filter):
    """Fires when the time since the run began, or since it last fired, exceeds the interval.

    All ranks share the run's clock. A resume cannot repeat the times exactly.
    """

    def __init__(self, interval: str) -> None:
        number, unit = parse_interval(interval, "every")
        self.seconds = number * SECONDS[unit]
        self.text = f"every {interval}"
        self.last: float | None = None

    def begin(self, s: Any) -> None:
        self.last = s.clock()

    def ready(self, s: Any) -> bool:
        now = s.clock()
        if self.last is None:
            self.last = now
        if now - self.last < self.seconds:
            return False
        self.last = now
        return True


class _OnceFilter(Filter):
    """Fires the first time only, also across resumes."""

    text = "once"
    saved = ("done",)

    def __init__(self) -> None:
        self.done = False

    def ready(self, s: Any) -> bool:
        if self.done:
            return False
        self.done = True
        return True

    def begin(self, s: Any) -> None:
        self.done = False


class _BoundFilter(Filter):
    """Fires only after, or only before, a count or a time since the run began."""

    counts = True
    saved = ("calls",)

    def __init__(self, limit: int | str, after: bool) -> None:
        word = "after" if after else "before"
        number, self.unit = parse_interval(limit, word)
        self.limit = number * SECONDS.get(self.unit, 1.0)
        self.count = attrgetter(UNITS[self.unit]) if self.unit in UNITS else None
        self.after = after
        self.text = f"{word} {limit}" if isinstance(limit, str) else f"{word} {limit} calls"
        self.facts = (UNITS[self.unit],) if self.unit in UNITS else ()
        self.calls = 0
        self.started: float | None = None

    def ready(self, s: Any) -> bool:
        if self.count is not None:
            return (self.count(s) >= self.limit) is self.after
        if self.unit == "call":
            self.calls += 1
            return (self.calls > self.limit) is self.after
        if self.started is None:  # the hook was added during a run
            self.started = s.clock()
        return (s.clock() - self.started >= self.limit) is self.after

    def begin(self, s: Any) -> None:
        self.calls = 0
        self.started = s.clock()


class PredicateFilter(Filter):
    """Fires if a predicate returns true. Its parameters are facts, bound together with the listener."""

    def __init__(self, predicate: Callable[..., Any]) -> None:
        self.predicate = predicate
        self.text = f"when {getattr(predicate, '__name__', 'predicate')}"
        self.bound: Callable[[Any], Any] = predicate

    def ready(self, s: Any) -> bool:
        """Return what the predicate returns."""
        outer = s.running
        s.running = (self, outer)  # if it hangs, the watchdog names the predicate
        try:
            return bool(self.bound(s))
        finally:
            s.running = outer


class FilterSettings:
    """The settings of a listener's filters. Each listener gets filters of its own."""

    __slots__ = ("after", "before", "every", "once", "when")

    def __init__(
        self,
        every: int | str | None = None,
        once: bool = False,
        after: int | str | None = None,
        before: int | str | None = None,
        when: Callable[..., Any] | None = None,
    ) -> None:
        self.every, self.once, self.after, self.before, self.when = every, once, after, before, when
        self.filters()  # raise for a wrong interval here, where the user wrote it
        if when is not None and not callable(when):
            raise HookError(
                f"when={when!r} must be a function of facts, such as `when=lambda step: step > 5`."
            )

    def filters(self) -> list[Filter]:
        """Return new filters, the cheap and most selective ones first."""
        made: list[Filter] = []
        if self.after is not None:
            made.append(_BoundFilter(self.after, after=True))
        if self.before is not None:
            made.append(_BoundFilter(self.before, after=False))
        if self.when is not None:
            made.append(PredicateFilter(self.when))
        if self.every is not None:
            _, unit = parse_interval(self.every, "every")
            made.append(_TimeFilter(str(self.every)) if unit in SECONDS else _CountFilter(self.every))
        if self.once:
            made.append(_OnceFilter())
        return made

    def __str__(self) -> str:
        return ", ".join(each.text for each in self.filters())

    def __call__(self, function: F) -> F:
        """Mark a hook method or a function with these filters, as a decorator."""
        recipes = [*getattr(function, "__hookline_when__", ()), self]
        try:
            function.__hookline_when__ = recipes  # type: ignore[attr-defined]
        except AttributeError:
            raise HookError(
                f"Only a function can be marked, not a {type(function).__name__}: put the decorator below "
                "@trainer.on, or pass it there: @trainer.on('step_end', every='500 steps')."
            ) from None
        return function


def every(interval: int | str) -> FilterSettings:
    """Call a hook method at intervals: `@every("500 steps")`, `@every("10 minutes")`, `@every("1M tokens")`,
    `@every(100)` (calls).

    interval: calls as a number, or steps, batches, epochs, samples, tokens or a time as text.
    """
    return FilterSettings(every=interval)


@overload
def once(function: F) -> F: ...


@overload
def once() -> FilterSettings: ...


def once(function: Any = None) -> Any:
    """Call a hook method the first time only: `@once`. function: the method, if there are no parentheses."""
    return FilterSettings(once=True) if function is None else FilterSettings(once=True)(function)


def after(limit: int | str) -> FilterSettings:
    """Call a hook method only from a limit on: `@after("1000 steps")`. limit: the first moment, in the units
    of `every`.
    """
    return FilterSettings(after=limit)


def before(limit: int | str) -> FilterSettings:
    """Call a hook method only up to a limit: `@before("1000 steps")`.

    limit: the first moment at which it is not called, in the units of `every`.
    """
    return FilterSettings(before=limit)


def when(predicate: Callable[..., Any]) -> FilterSettings:
    """Call a hook method if a predicate returns true: `@when(lambda step: step % 7 == 3)`.

    predicate: a function; its parameters are facts.
    """
    return FilterSettings(when=predicate)


def filters_of(function: Callable[..., Any]) -> list[Filter]:
    """Return new filters from every decorator on a function."""
    recipes: list[FilterSettings] = getattr(function, "__hookline_when__", [])
    return [made for recipe in recipes for made in recipe.filters()]
