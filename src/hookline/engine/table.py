"""What a row of the table is, and how rows are looked up: by name, by spelling, by who listens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hookline.util.errors import HookError, closest

RECEIVERS: Mapping[str, str] = MappingProxyType(
    {"D": "data module", "H": "hooks", "M": "module", "S": "strategy"}
)

NOTHING = "nothing"  # a returned value has no meaning here
SIGNAL = "signal"  # a returned Signal steers the loop
REPLACE = "replace"  # a returned value replaces the row's `replaces` fact
VALUE = "value"  # an action: its result is what the loop goes on with


@dataclass(frozen=True, slots=True)
class Fact:
    """Something a listener can ask for by naming a parameter after it."""

    name: str
    doc: str
    reads: str = ""
    """The expression that reads it from the live state `s`; by default the attribute of the same name."""
    spellings: tuple[str, ...] = ()
    everywhere: bool = False
    """Known at every event, not only at those whose row names it."""
    costly: bool = False
    """Costs a device read, a reduction or a pass over tensors: captured only if somebody asks."""
    needs: tuple[str, ...] = ()
    """Other facts that must be captured for this one."""

    @property
    def expression(self) -> str:
        """Python source that yields this fact, given the state `s`."""
        return self.reads or f"s.{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """One row: a moment, who hears it in which order, what it offers, what a returned value does."""

    name: str
    receivers: str
    facts: tuple[str, ...]
    doc: str
    inside: str = "run"
    """Where it stands in the lifecycle tree, see `events.BRANCHES`."""
    returns: str = NOTHING
    signals: tuple[str, ...] = ()
    replaces: str = ""
    action: bool = False
    """A step or an operation: one owner instead of an audience, bound by position."""
    live: Mapping[str, str] = field(default_factory=dict)
    """Facts that are read differently at this event (`loss` is a live tensor before backward)."""
    spellings: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ("fit",)
    either: bool = False
    """The data module hears it instead of the module, not besides it."""
    isolated: bool = False
    """Everyone is called whatever the others raise; the failures are collected."""
    nested_validate: bool = False
    """`trainer.validate()` may be called from a hook here."""


EVERY_VERB = ("fit", "validate", "test", "predict")


class EventTable:
    """The rows by name, with the spellings resolved, open to events that users declare."""

    def __init__(self, events: tuple[Event, ...], facts: tuple[Fact, ...]) -> None:
        self._own = frozenset(event.name for event in events)
        self._events: dict[str, Event] = {event.name: event for event in events}
        self._spellings: dict[str, list[Event]] = {}
        for event in events:
            for name in (event.name, *event.spellings):
                self._spellings.setdefault(name, []).append(event)
        self._facts: dict[str, Fact] = {}
        for fact in facts:
            for name in (fact.name, *fact.spellings):
                self._facts[name] = fact
        self._names: dict[str, tuple[str, ...]] = {}
        """Accepted method names by receiver, for those that were asked for."""

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events.values())

    def __contains__(self, name: str) -> bool:
        return name in self._events

    def __getitem__(self, name: str) -> Event:
        """The row of this exact name; `find` also takes other spellings."""
        return self._events[name]

    def in_order(self, verb: str) -> list[Event]:
        """The events of a verb in the order in which they happen.

        The rows are in the order of a fit. The batches of the other verbs are moved by the same events, in
        their own place.
        """
        events = [event for event in self if verb in event.verbs]
        if verb == "fit":
            return events
        moving = [event for event in events if event.inside == "batch"]
        others = [event for event in events if event.inside != "batch"]
        place = next((at for at, event in enumerate(others) if event.inside.endswith(" batch")), len(others))
        return [*others[:place], *moving, *others[place:]]

    def find(self, name: str, receiver: str = "H") -> Event | None:
        """The event that a method called `name` of this receiver listens to, whatever its spelling."""
        heard = [event for event in self._spellings.get(name, ()) if receiver in event.receivers]
        return heard[0] if heard else None

    def named(self, name: str, receiver: str = "H") -> Event:
        """Like `find`, with or without the leading `on_`; an unknown name is an error that teaches."""
        event = self.find(name, receiver) or self.find(f"on_{name}", receiver)
        if event is None:
            names = self.names(receiver)
            short = [each.removeprefix("on_") for each in names]
            hint = closest(name, names) or closest(name, short)
            raise HookError(
                f"{name!r} is no event that {RECEIVERS[receiver]} can hear.{hint} "
                f"`hookline.explain()` and docs/lifecycle.md list them all."
            )
        return event

    def names(self, receiver: str) -> tuple[str, ...]:
        """Every accepted method name for this receiver, spellings included."""
        if receiver not in self._names:
            self._names[receiver] = tuple(
                name
                for name, events in self._spellings.items()
                if any(receiver in each.receivers for each in events)
            )
        return self._names[receiver]

    def fact(self, name: str, event: Event) -> Fact | None:
        """The fact called `name`, under any spelling, if it can be asked for at this event."""
        fact = self._facts.get(name)
        if fact is None or not (fact.everywhere or fact.name in event.facts):
            return None
        return fact

    def with_needs(self, names: Iterable[str]) -> frozenset[str]:
        """These facts and those that must be captured for them."""
        wanted = set(names)
        for name in names:
            wanted.update(self._facts[name].needs if name in self._facts else ())
        return frozenset(wanted)

    def facts_at(self, event: Event) -> list[Fact]:
        """The facts of an event: its own in positional order, then those known everywhere."""
        own = [self._facts[name] for name in event.facts]
        return own + [f for f in dict.fromkeys(self._facts.values()) if f.everywhere and f not in own]

    def expression(self, fact: Fact, event: Event) -> str:
        """Python source that reads the fact at this event from the state `s`."""
        return event.live.get(fact.name, fact.expression)

    def declare(self, name: str, facts: tuple[str, ...] = (), doc: str = "", *, replaces: str = "") -> Event:
        """Add an event of your own; emit it with `trainer.emit(name, fact=value, ...)`."""
        if not name.startswith("on_") or not name.isidentifier():
            raise HookError(f"An event's name is an identifier that begins with 'on_', not {name!r}.")
        if name in self._spellings:
            raise HookError(f"There is an event {name!r} already: {self._spellings[name][0].doc}")
        if replaces and replaces not in facts:
            raise HookError(f"{name}: replaces={replaces!r} is none of its facts {facts}.")
        for fact in facts:
            known = self._facts.get(fact)
            if known is not None and known.everywhere:
                raise HookError(f"{name}: {fact!r} is known at every event already; it need not be declared.")
            self._facts.setdefault(fact, Fact(fact, f"given by whoever emits {name}"))
        event = Event(
            name,
            "HM",
            facts,
            doc,
            inside="own",
            returns=REPLACE if replaces else NOTHING,
            replaces=replaces,
            live={fact: f"s.own[{fact!r}]" for fact in facts},
            verbs=EVERY_VERB,
        )
        self._events[name] = event
        self._spellings[name] = [event]
        self._names.clear()
        return event

    def forget(self, name: str) -> None:
        """Take back an event that `declare` added."""
        if name in self._own:
            raise HookError(f"{name!r} is Hookline's own event and stays.")
        if name not in self._events:
            own = [each for each in self._events if each not in self._own]
            raise HookError(
                f"{name!r} was never declared.{closest(name, own)} Declared: {', '.join(own) or 'none'}."
            )
        del self._events[name], self._spellings[name]
        self._names.clear()
