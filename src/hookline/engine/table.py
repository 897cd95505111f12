"""The rows of the event table, and how they are looked up: by name, by spelling and by receiver."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hookline.util.errors import HookError, closest, misspelling_of

RECEIVERS: Mapping[str, str] = MappingProxyType(
    {"D": "data module", "H": "hooks", "M": "module", "S": "strategy"}
)

MOMENTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("begin", "begins", "beginning", "started", "starts"), "start"),
        **dict.fromkeys(
            ("done", "ended", "ends", "finish", "finished", "finishes", "stop", "stopped"), "end"
        ),
    }
)
"""Other words for the moments in the names of events."""
_EVENT_LIKE = re.compile(r"(?:before|after)_\w+|\w+_(?:start|begin|end)")
"""Names that say when: `train_batch_end`. One that says what, such as `save_checkpoint`, may be a helper."""
_ENDING = re.compile(r"(?<=\w\w)(?:e|es|s|ed|ing|ion)$")

LISTED = "`hookline events` in a shell and `print(hookline.explain())` list all events."

NOTHING = "nothing"  # a returned value has no meaning here
SIGNAL = "signal"  # a returned Signal steers the loop
REPLACE = "replace"  # a returned value replaces the row's `replaces` fact
VALUE = "value"  # an action: the loop continues with its result


@dataclass(frozen=True, slots=True)
class Fact:
    """A value that a listener requests by naming a parameter after it."""

    name: str
    doc: str
    reads: str = ""
    """The expression that reads it from the live state `s`; by default the attribute of the same name."""
    spellings: tuple[str, ...] = ()
    everywhere: bool = False
    """Whether every event has it, not only the events whose row names it."""
    costly: bool = False
    """Whether it takes a device read, a reduction or a pass over tensors; it is captured only on request."""
    needs: tuple[str, ...] = ()
    """Other facts that must be captured for this one."""
    only_named: bool = False
    """Whether only a listener that names it gets it, not one with `*args`."""

    @property
    def expression(self) -> str:
        """Return the Python expression that reads this fact from the state `s`."""
        return self.reads or f"s.{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """One row: an event, its receivers in order, its facts, and the effect of a returned value."""

    name: str
    receivers: str
    facts: tuple[str, ...]
    doc: str
    inside: str = "run"
    """Its branch in the lifecycle tree, see `events.BRANCHES`."""
    returns: str = NOTHING
    signals: tuple[str, ...] = ()
    replaces: str = ""
    action: bool = False
    """Whether it is a step or an operation, which has one owner and is bound by position."""
    live: Mapping[str, str] = field(default_factory=dict)
    """Facts that are read differently at this event (`loss` is a live tensor before backward)."""
    spellings: tuple[str, ...] = ()
    stages: tuple[str, ...] = ("fit",)
    either: bool = False
    """Whether the data module's method replaces the module's method of the same name."""
    isolated: bool = False
    """Whether every listener is called even if another one raises; the failures are collected."""
    nested_validate: bool = False
    """Whether a hook may call `trainer.validate()` here."""
    ends: str = ""
    """The event that began what this one ends, if their names do not say so; see `EventTable.pairs`."""


@dataclass(frozen=True, slots=True)
class EventPair:
    """An event that begins something, and the events that end it: `on_test_start` and `on_test_end`."""

    name: str
    """What lies between them: `test`."""
    begin: Event
    ends: tuple[Event, ...]


_BEGINNINGS = (("on_{}_start", "on_{}_end"), ("on_before_{}", "on_after_{}"))
"""The names of two events of which the first begins what the second ends."""


EVERY_STAGE = ("fit", "validate", "test", "predict")


class EventTable:
    """The rows by name and spelling, with the events that users declare."""

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
        """Accepted method names by receiver; a cache."""

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events.values())

    def __contains__(self, name: str) -> bool:
        return name in self._events

    def __getitem__(self, name: str) -> Event:
        """Return the row of this exact name; `find` also accepts other spellings."""
        return self._events[name]

    def in_order(self, stage: str) -> list[Event]:
        """Return the events of a stage in the order in which they happen.

        The rows are in the order of a fit. The other stages share a fit's batch-transfer events, and have
        them before their own batch events.
        """
        events = [event for event in self if stage in event.stages]
        if stage == "fit":
            return events
        shared = [event for event in events if event.inside == "batch"]
        others = [event for event in events if event.inside != "batch"]
        first = next((at for at, event in enumerate(others) if event.inside.endswith(" batch")), len(others))
        return [*others[:first], *shared, *others[first:]]

    def pairs(self) -> list[EventPair]:
        """Return the events that begin and end something, by their names and by `Event.ends`.

        Declared events are included. The end may be missing in a run: a pass that fails does not end.
        """
        found: list[EventPair] = []
        for event in self:
            name, ends = event.name.removeprefix("on_"), [each for each in self if each.ends == event.name]
            for begin, end in _BEGINNINGS:
                prefix, _, suffix = begin.partition("{}")
                inner = event.name.removeprefix(prefix).removesuffix(suffix)
                if event.name == begin.format(inner) and end.format(inner) in self:
                    name, ends = inner, [self[end.format(inner)], *ends]
            if ends:
                found.append(EventPair(name, event, tuple(ends)))
        return found

    def find(self, name: str, receiver: str = "H") -> Event | None:
        """Return the event that a method of this receiver listens to, under any spelling; None if there is
        none.
        """
        found = [event for event in self._spellings.get(name, ()) if receiver in event.receivers]
        return found[0] if found else None

    def named(self, name: str, receiver: str = "H") -> Event:
        """Return the event of this name, with or without the leading `on_`; raise for an unknown name."""
        event = self.find(name, receiver) or self.find(f"on_{name}", receiver)
        if event is None:
            names = self.names(receiver)
            short = [each.removeprefix("on_") for each in names]
            # in our words for the same moment: by letters alone, `finish` is nearer to `begin` than to `end`
            words = [MOMENTS.get(word, word) for word in name.split("_")]
            said = "_".join(sorted(words, key=lambda word: word in ("start", "end")))
            hint = closest(said, names) or closest(said, short)
            raise HookError(f"{name!r} is not an event of {RECEIVERS[receiver]}.{hint} {LISTED}")
        return event

    def names(self, receiver: str) -> tuple[str, ...]:
        """Return every accepted method name of this receiver, including spellings."""
        if receiver not in self._names:
            self._names[receiver] = tuple(
                name
                for name, events in self._spellings.items()
                if any(receiver in each.receivers for each in events)
            )
        return self._names[receiver]

    def fact(self, name: str, event: Event) -> Fact | None:
        """Return the fact of this name, under any spelling, if a listener can request it at this event."""
        fact = self._facts.get(name)
        if fact is None or not (fact.everywhere or fact.name in event.facts):
            return None
        return fact

    def events_with(self, name: str) -> list[str]:
        """Return the events of hooks at which a listener can request the fact of this name."""
        return [each.name for each in self if "H" in each.receivers and self.fact(name, each) is not None]

    def with_needs(self, names: Iterable[str]) -> frozenset[str]:
        """Return these facts and the facts that must be captured for them."""
        wanted = set(names)
        for name in names:
            wanted.update(self._facts[name].needs if name in self._facts else ())
        return frozenset(wanted)

    def facts_at(self, event: Event) -> list[Fact]:
        """Return the facts of an event: its own in positional order, then those of every event."""
        own = [self._facts[name] for name in event.facts]
        return own + [f for f in dict.fromkeys(self._facts.values()) if f.everywhere and f not in own]

    def expression(self, fact: Fact, event: Event) -> str:
        """Return the Python expression that reads the fact at this event from the state `s`."""
        return event.live.get(fact.name, fact.expression)

    def declare(self, name: str, facts: tuple[str, ...] = (), doc: str = "", *, replaces: str = "") -> Event:
        """Add an event of your own; emit it with `trainer.emit(name, fact=value, ...)`."""
        if not name.startswith("on_") or not name.isidentifier():
            raise HookError(f"An event's name is an identifier that begins with 'on_', not {name!r}.")
        if name in self._spellings:
            raise HookError(f"There is an event {name!r} already: {self._spellings[name][0].doc}")
        if isinstance(facts, str):
            raise HookError(
                f"{name}: facts={facts!r} is a str. Pass the names as a tuple: facts=({facts!r},)."
            )
        if replaces and replaces not in facts:
            raise HookError(f"{name}: replaces={replaces!r} is not one of its facts {facts}.")
        for fact in facts:
            known = self._facts.get(fact)
            if known is not None and known.everywhere:
                raise HookError(f"{name}: every event has the fact {fact!r}; do not declare it.")
            self._facts.setdefault(fact, Fact(fact, f"passed to `trainer.emit({name!r})`"))
        event = Event(
            name,
            "HM",
            facts,
            doc,
            inside="own",
            returns=REPLACE if replaces else NOTHING,
            replaces=replaces,
            live={fact: f"s.own[{fact!r}]" for fact in facts},
            stages=EVERY_STAGE,
        )
        self._events[name] = event
        self._spellings[name] = [event]
        self._names.clear()
        return event

    def forget(self, name: str) -> None:
        """Remove an event that `declare` added."""
        if name in self._own:
            raise HookError(f"{name!r} is one of Hookline's own events and cannot be removed.")
        if name not in self._events:
            own = [each for each in self._events if each not in self._own]
            raise HookError(
                f"{name!r} was never declared.{closest(name, own)} Declared: {', '.join(own) or 'none'}."
            )
        del self._events[name], self._spellings[name]
        self._names.clear()


def meant_name(method: str, known: tuple[str, ...], is_hook: bool) -> str:
    """Return the known name that a method is a misspelling of, or an empty string.

    An event may have other endings, or another word for its moment: `on_training_epochs_ended`. In a hook its
    `on_` may be missing; a module may have such methods for other callers.
    """

    def stems(name: str) -> list[str]:
        return [_ENDING.sub("", MOMENTS.get(word, word)) for word in name.split("_")]

    meant = f"on_{method.removeprefix('on_')}" if is_hook and _EVENT_LIKE.fullmatch(method) else method
    events = (each for each in known if each.startswith("on_") and meant.startswith("on_"))
    near = next((each for each in events if stems(each) == stems(meant)), "")
    return misspelling_of(method, known) or (meant if meant in known else near)
