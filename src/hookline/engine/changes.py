"""What hooks changed during a run: one row per hook, event and kind of change, and the table of all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hookline.util.text import list_some

T = TypeVar("T", bound=Callable[..., Any])
MOST_NAMES = 20
"""Names that a row keeps of what changed."""


@dataclass(slots=True)
class HookChange:
    """What one hook changed at one event.

    hook, event: their names. rank: the rank that reports it.
    """

    hook: str
    event: str
    kind: str
    """One of the kinds of `hookline.audit.observation`, such as 'parameters' or 'random streams'."""
    first_step: int
    """The step of the first change."""
    count: int = 0
    """How many calls made such a change."""
    names: list[str] = field(default_factory=list)
    """What was changed: names of parameters, of random streams, of flags. At most 20."""
    rank: int = 0

    def data(self) -> dict[str, Any]:
        """Return the row for the run's log."""
        return {
            "hook": self.hook,
            "event": self.event,
            "kind": self.kind,
            "names": self.names,
            "count": self.count,
            "first_step": self.first_step,
            "rank": self.rank,
        }


class ChangeTable:
    """The changes of a run."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._rows: dict[tuple[str, str, str], HookChange] = {}
        self._elsewhere: list[HookChange] = []

    def add(self, hook: str, event: str, step: int, changes: Iterable[tuple[str, str]]) -> None:
        """Record what one call has changed: pairs of a kind and a name."""
        kinds: dict[str, list[str]] = {}
        for kind, name in changes:
            kinds.setdefault(kind, []).append(name)
        for kind, names in kinds.items():
            row = self._rows.setdefault(
                (hook, event, kind), HookChange(hook, event, kind, step, rank=self._rank)
            )
            row.count += 1
            row.names += [each for each in names if each not in row.names][: MOST_NAMES - len(row.names)]

    def rows(self) -> list[HookChange]:
        """Return the rows in the order of their first change, those of other ranks last."""
        return [*self._rows.values(), *self._elsewhere]

    def include(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add the rows of other ranks, as `HookChange.data` returns them."""
        self._elsewhere += [HookChange(**row) for row in rows if row["rank"] != self._rank]


def change_text(changes: Sequence[tuple[str, str]]) -> str:
    """Return changes in words: `parameters (layer.weight), random streams (torch)`."""
    kinds: dict[str, list[str]] = {}
    for kind, name in changes:
        kinds.setdefault(kind, []).append(name)
    return ", ".join(f"{kind} ({list_some(names)})" for kind, names in kinds.items())


def change_table(rows: Sequence[HookChange]) -> str:
    """Return the rows as text."""
    from hookline.util.text import align_columns  # not needed until the end of a run

    if not rows:
        return "Audit: no hook has changed anything."
    cells = [("hook", "event", "changed", "what", "calls", "first step")]
    cells += [
        (
            f"{row.hook}, rank {row.rank}" if row.rank else row.hook,
            row.event,
            row.kind,
            list_some(row.names, most=3),
            str(row.count),
            str(row.first_step),
        )
        for row in rows
    ]
    return "\n".join(
        ["Audit: what hooks have changed:", *(f"  {line}" for line in align_columns(cells, left=4))]
    )


def observer(target: T) -> T:
    """Declare that a hook class, or a function that is a hook, only observes. The audit checks it.

    >>> @observer
    ... @on("step_end")
    ... def report(step, loss): ...

    target: the class or the function.
    """
    target.observes = True  # type: ignore[attr-defined]
    return target
