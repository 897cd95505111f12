"""The cost of hooks: calls and time per hook and event, as rows and as a short table, and budgets."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hookline.engine.binding import Caller
from hookline.engine.events import Event
from hookline.util.errors import HookError, closest

SLOW_SHARE = 0.05
"""The share of the training time from which a hook is reported as slow."""
SHORT_SECONDS = 0.1
"""Seconds: a hook that took less is not reported as slow, even in a short run."""
SHOWN_COSTS = 6
"""Rows of the table at the end of a run; the others are summed up."""
LEAST_SHARE = 0.0005
"""The share of the training time from which `print(cost)` shows a row: others would show 0.0%."""
HEADLINE_HOOKS = 3
"""Hooks that the line above a folded table names."""
COLUMNS = ("hook", "event", "calls", "total", "mean", "worst", "share")


@dataclass(slots=True)
class Account:
    """The cost of one listener so far, in nanoseconds."""

    calls: int = 0
    total: int = 0
    worst: int = 0

    def clear(self) -> None:
        """Reset the account when a run begins."""
        self.calls = self.total = self.worst = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """What the calls of one hook at one event have cost, in seconds of the host's clock.

    Work that a hook starts on an accelerator and does not wait for is not included.
    """

    hook: str
    """The name of the hook."""
    event: str
    """The event at which it was called."""
    calls: int
    """How often it was called."""
    seconds: float
    """The seconds of all calls."""
    worst: float
    """The seconds of the longest call."""
    share: float = 0.0
    """The share of the training time, which begins after `setup`, from 0 to 1."""

    @property
    def mean(self) -> float:
        """Return the mean seconds of a call."""
        return self.seconds / self.calls if self.calls else 0.0

    def data(self) -> dict[str, str | int | float]:
        """Return the row for the run's log."""
        return {
            "hook": self.hook,
            "event": self.event,
            "calls": self.calls,
            "total": self.seconds,
            "mean": self.mean,
            "worst": self.worst,
            "share": self.share,
        }


class Stopwatch:
    """Measures how long a run has been training or evaluating; it stops when the run is over."""

    def __init__(self) -> None:
        self._began = self._ended = 0
        self.stage = "fit"
        self.counted_twice = 0.0
        """Seconds of hooks inside another hook's call, such as a hook that validates during training."""

    def start(self, stage: str = "fit") -> None:
        """Start at zero."""
        self._began, self._ended, self.counted_twice = time.perf_counter_ns(), 0, 0.0
        self.stage = stage

    def stop(self) -> None:
        """Stop; a second call does nothing."""
        self._ended = self._ended or time.perf_counter_ns()

    @property
    def seconds(self) -> float:
        """Return the seconds so far, or in total."""
        return ((self._ended or time.perf_counter_ns()) - self._began) / 1e9 if self._began else 0.0


class Costs(list[Cost]):
    """The rows of `cost()`, the most expensive first; `print` shows them as a table."""

    def __init__(
        self,
        rows: Iterable[Cost] = (),
        seconds: float = 0.0,
        counted_twice: float = 0.0,
        is_audited: bool = False,
        stage: str = "fit",
    ) -> None:
        super().__init__(rows)
        self.seconds, self.counted_twice, self.is_audited = seconds, counted_twice, is_audited
        self.stage = stage
        self.times = ""
        """A line about where the time of the run went, below the table; empty: none."""

    def __str__(self) -> str:
        most = max(sum(row.share >= LEAST_SHARE for row in self), SHOWN_COSTS)
        return "\n".join(filter(None, (self.table(most), self.times)))

    def _repr_html_(self) -> str:
        return self.html(most=len(self))

    def table(self, most: int = SHOWN_COSTS) -> str:
        """Return the most expensive rows as text, and the slow hooks by name. most: the number of rows.

        The time of a row includes hooks that ran inside its calls, and the audit if there is one.
        """
        from hookline.util.text import align_columns  # not needed until the end of a run

        cells = [COLUMNS, *map(_cost_cells, self[:most])]
        lines = [*align_columns(cells, left=2), *self._lines_below(most)]
        return "\n".join([self._head(), *(f"  {line}" for line in lines)])

    def html(self, most: int = SHOWN_COSTS) -> str:
        """Return the most expensive rows as a table for a notebook. most: the number of rows."""
        from hookline.util.notebook import escape, table  # only a notebook calls this

        below = [*self._lines_below(most), *filter(None, [self.times])]
        lines = "".join(f"<div>{escape(line)}</div>" for line in below)
        return f"<div>{escape(self._head())}</div>{table(COLUMNS, map(_cost_cells, self[:most]))}{lines}"

    def headline(self) -> str:
        """Return the cost in one line, with the most expensive hooks, and the progress bar if it is one."""
        shares = dict[str, float]()
        for row in self:
            shares[row.hook] = shares.get(row.hook, 0.0) + row.share
        first = sorted(shares, key=lambda name: -shares[name])[:HEADLINE_HOOKS]
        named = ", ".join(f"{name} {shares[name]:.1%}" for name in first)
        share = self._total() / self.seconds if self.seconds else 0.0
        return f"Hooks took {share:.1%} of the training time{': ' if named else ''}{named}"

    def _total(self) -> float:
        return sum(row.seconds for row in self) - self.counted_twice

    def _head(self) -> str:
        """Return the line above the rows."""
        total, is_fit = self._total(), self.stage == "fit"
        of, included = ("training", ", validation and saving included") if is_fit else (f"{self.stage}()", "")
        took, time_of_run = f"Hooks took {format_seconds(total)}", format_seconds(self.seconds)
        if total > self.seconds:  # such as the search of a LearningRateFinder
            return f"{took}, what they do before it included; {'the ' * is_fit}{of} took {time_of_run}:"
        share = f", {total / self.seconds:.1%}" if self.seconds else ""
        return f"{took} of {time_of_run} of {of}{share}{included}:"

    def _lines_below(self, most: int) -> list[str]:
        """Return the lines below so many rows: what the others took, and the slow hooks."""
        rest, of = self[most:], "training time" if self.stage == "fit" else f"time of {self.stage}()"
        total = format_seconds(sum(row.seconds for row in rest))
        how = "list(trainer.hooks.cost()), or list(line.cost()) of a Line"
        lines = [f"and {len(rest)} more, {total} in total: {how}"] if rest else []
        if self.is_audited:
            return [*lines, "The times include the audit; without audit=True the hooks are faster."]
        return [
            *lines,
            *(f"slow: {name}, {min(share, 1):.0%} of the {of}" for name, share in slow_hooks(self).items()),
        ]


def _cost_cells(row: Cost) -> tuple[str, ...]:
    times = map(format_seconds, (row.seconds, row.mean, row.worst))
    return (row.hook, row.event, str(row.calls), *times, f"{row.share:.1%}")


def slow_hooks(rows: Sequence[Cost]) -> dict[str, float]:
    """Return the hooks that take more than a few percent of the training time over all events, with their
    share.

    The worst call of each event is not counted, because a one-time cost, such as an import, does not grow
    with the run.
    """
    shares, seconds, total = dict[str, float](), dict[str, float](), dict[str, float]()
    for row in rows:
        again = row.seconds - row.worst
        total[row.hook] = total.get(row.hook, 0.0) + row.share
        shares[row.hook] = shares.get(row.hook, 0.0) + (
            row.share * again / row.seconds if row.seconds else 0.0
        )
        seconds[row.hook] = seconds.get(row.hook, 0.0) + again
    return {
        name: total[name]
        for name, share in shares.items()
        if share >= SLOW_SHARE and seconds[name] >= SHORT_SECONDS
    }


def format_seconds(seconds: float) -> str:
    """Format seconds with at most three digits before the point: `1.25 s`, `3.1 ms`, `850 µs`."""
    if seconds >= 1:
        return f"{seconds:.1f} s" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


# ---- budgets -----------------------------------------------------------------------------------------------


OVER_BUDGET = ("warn", "throttle", "disable")
OFTEN = ("batch", "window", "update", "validation batch", "test batch", "predict batch")
"""Branches of the lifecycle whose events come with every batch; only their calls can be skipped."""
COUNTED = (*OFTEN, "epoch", "validation", "test", "predict", "save", "own")
"""Branches whose events count towards a budget. Work at the beginning and end of a run is not a running
cost.
"""
WARM_UP = 1_000_000_000
"""Nanoseconds of training before a share of it is checked."""
FIRST_CALLS = 3
"""Calls before their mean is checked, because the first calls load and compile."""
_UNITS = {"s": 1e9, "ms": 1e6, "us": 1e3, "µs": 1e3, "μs": 1e3}
log = logging.getLogger("hookline")


class Budget:
    """The budget of one hook, shared by its listeners: `1%` of the training time, or `5 ms` per call on
    average.
    """

    def __init__(
        self,
        text: str,
        over: str,
        name: str,
        dismiss: Callable[[], None],
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.text, self.over, self.name, self.dismiss = text, over, name, dismiss
        self.share, self.each = parse_budget(text, name)
        self.clock = clock
        self.began = 0
        self.has_logged = False
        self.allowances: list[Allowance] = []

    def allow(self, event: Event, account: Account) -> Allowance | None:
        """Return the part of the budget for a listener of this event; None for events that do not count."""
        if event.inside not in COUNTED:
            return None
        made = Allowance(self, event, account)
        self.allowances.append(made)
        return made

    def begin(self) -> None:
        """Start when a run begins, or when the hook joins one."""
        self.began, self.has_logged = self.clock(), False

    @property
    def spent(self) -> int:
        """Return the nanoseconds of all its listeners."""
        return sum(each.spent for each in self.allowances)

    def room(self, allowance: Allowance) -> float:
        """Return the nanoseconds that are left in the budget; negative if it is exceeded."""
        if self.share is not None:
            return self.share * (self.clock() - self.began) - self.spent
        return self.each * (allowance.calls + allowance.left_out) - allowance.spent

    def is_early(self, allowance: Allowance) -> bool:
        """Return whether it is too early to check the budget."""
        return (
            self.clock() - self.began < WARM_UP if self.share is not None else allowance.calls < FIRST_CALLS
        )

    def log_once(self, allowance: Allowance) -> None:
        """Log once what the hook costs, its budget, and the consequence."""
        if self.has_logged:
            return
        self.has_logged = True
        done = {
            "warn": "over_budget='throttle' would call it less often, 'disable' switch it off",
            "throttle": "some of its calls are skipped from now on",
            "disable": "it is switched off",
        }[self.over]
        log.warning(
            "hook %r is over its budget of %s: %.2g%% of the training time; in %s %s calls, %s each; %s.",
            self.name,
            self.text,
            100 * self.spent / max(1, self.clock() - self.began),
            allowance.event.name,
            allowance.calls,
            format_seconds(allowance.spent / 1e9 / max(1, allowance.calls)),
            done,
        )


class Allowance:
    """The part of a budget that belongs to one listener."""

    __slots__ = (
        "_calls_before",
        "_spent_before",
        "account",
        "budget",
        "event",
        "is_resting",
        "left_out",
        "limit",
    )

    def __init__(self, budget: Budget, event: Event, account: Account) -> None:
        self.budget, self.event, self.account = budget, event, account
        self.limit = 0.0
        """The account's total at which to check the budget again."""
        self.is_resting = False
        self.left_out = 0
        """Calls that were skipped to stay within the budget."""
        self._calls_before = self._spent_before = 0

    def begin(self) -> None:
        """Start when training begins, or the hook joins or is switched on again. Earlier costs do not
        count.
        """
        self.limit, self.is_resting, self.left_out = 0.0, False, 0
        self._calls_before, self._spent_before = self.account.calls, self.account.total
        self.budget.begin()

    @property
    def calls(self) -> int:
        """Return the calls since `begin`."""
        return self.account.calls - self._calls_before

    @property
    def spent(self) -> int:
        """Return the nanoseconds since `begin`."""
        return self.account.total - self._spent_before

    def around(self, call: Caller) -> Caller:
        """Return the counted call with a check of the budget around it."""
        account = self.account

        def watched(s: Any) -> Any:
            try:
                return call(s)
            finally:  # a call that fails has taken its time too
                if account.total >= self.limit:
                    self.check()

        if self.budget.over != "throttle" or self.event.inside not in OFTEN:
            return watched

        def throttled(s: Any) -> Any:
            if self.is_resting and self.must_rest():
                return None
            return watched(s)

        return throttled

    def check(self) -> None:
        """Check the budget, and act if it is exceeded."""
        room = self.budget.room(self)
        if room >= 0 or self.budget.is_early(self):
            shared = len(self.budget.allowances) if self.budget.share is not None else 1
            self.limit = self.account.total + max(room / shared, 1.0)
            return
        self.budget.log_once(self)
        if self.budget.over == "throttle":
            self.is_resting = True
            return
        self.limit = math.inf
        if self.budget.over == "disable":
            self.budget.dismiss()

    def must_rest(self) -> bool:
        """Return whether to skip this call. Skipped calls, or time, bring the hook back into its budget."""
        self.left_out += 1
        if self.budget.room(self) < 0:
            return True
        self.is_resting = False
        self.left_out -= 1
        return False


def budget_of(hook: Any, name: str, dismiss: Callable[[], None]) -> Budget | None:
    """Return the budget that a hook declares, or None; raise for an invalid one.

    dismiss: switches the hook off.
    """
    text, over = getattr(hook, "budget", None), getattr(hook, "over_budget", "warn")
    if over not in OVER_BUDGET:
        raise HookError(
            f"hook {name!r} ({type(hook).__name__}): over_budget={over!r}, allowed: "
            f"{', '.join(map(repr, OVER_BUDGET))}.{closest(str(over), OVER_BUDGET)}"
        )
    return None if text is None else Budget(text, over, name, dismiss)


def parse_budget(text: Any, name: str) -> tuple[float | None, float]:
    """Parse a budget: `"1%"` -> (0.01, 0), a share of the training time; `"5 ms"` -> (None, 5e6), nanoseconds
    per call.
    """
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%|s|ms|us|µs|μs)\s*", text)
        if isinstance(text, str)
        else None
    )
    number = float(match[1]) if match is not None else 0.0
    if match is None or number <= 0 or (match[2] == "%" and number > 100):
        raise HookError(
            f"hook {name!r}: budget={text!r}, allowed: a share of the training time such as '1%', or a time "
            "for one call such as '5 ms', '200 us' or '0.1 s', above 0."
        )
    return (number / 100, 0.0) if match[2] == "%" else (None, number * _UNITS[match[2]])
