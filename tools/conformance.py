"""Write docs/conformance.md from the tables of the dialects, of the adopted packages and of the hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hookline.engine.events import EVENTS, EVENTS_OF_THE_TABLE
from hookline.interop import kempnerforge, keras
from hookline.interop.hosted.host import HOSTS
from hookline.interop.lightning import table as lightning
from hookline.interop.model_training_framework import hooks as framework
from hookline.interop.trainers import hooks as trainers
from hookline.interop.transformers import callbacks

NATIVE, NOT_OFFERED, REFUSED = "native", "–", "refused"
Names = Mapping[str, Iterable[str]]
"""An event, and a system's names for it."""


def turned(methods: Iterable[tuple[str, Iterable[str]]]) -> dict[str, list[str]]:
    """Return the methods by event, from the events by method."""
    names: dict[str, list[str]] = {}
    for method, events in methods:
        for event in events:
            names.setdefault(event, []).append(method)
    return names


def systems() -> dict[str, Names]:
    """Return every system whose hooks run in Hookline."""
    found = {name: EVENTS.find(name) for name in framework.FRAMEWORK_METHODS}
    return {
        "Lightning": {event: [method] for event, method in lightning.MAPPING.items()},
        "model_training_framework": turned(
            (name, [event.name]) for name, event in found.items() if event is not None
        ),
        "KempnerForge": turned((name, [row.event]) for name, row in kempnerforge.ROWS.items()),
        "trainers": turned((name, [row.event]) for name, row in trainers.DOCUMENTED.items()),
        "transformers": turned(callbacks.TRANSFORMERS_METHODS.items()),
        "Keras": turned((name, [row.event for row in found]) for name, found in keras.KERAS_METHODS.items()),
    }


def cell(event: str, names: Iterable[str]) -> str:
    """Return `native`, the names of the methods, or a dash."""
    known = list(names)
    if not known:
        return NOT_OFFERED
    return NATIVE if known == [event] else ", ".join(f"`{name}`" for name in known)


def rows(columns: Mapping[str, Names]) -> list[str]:
    """Return a Markdown table of all events that at least one column has."""
    out = ["| event | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for event in EVENTS:
        if event.name in EVENTS_OF_THE_TABLE and any(event.name in names for names in columns.values()):
            cells = [cell(event.name, names.get(event.name, ())) for names in columns.values()]
            out.append(f"| `{event.name}` | " + " | ".join(cells) + " |")
    return out


def hosted() -> list[str]:
    """Return a Markdown table of the events that each host emits, and when."""
    out = [
        "| event | " + " | ".join(host.name for host in HOSTS.values()) + " |",
        "|---" * (len(HOSTS) + 1) + "|",
    ]
    for event in EVENTS:
        said = [
            host.offers.get(event.name, REFUSED if host.why_lacking(event) else NOT_OFFERED)
            for host in HOSTS.values()
        ]
        is_ours = event.name in EVENTS_OF_THE_TABLE and "H" in event.receivers
        if is_ours and set(said) != {NOT_OFFERED}:
            cells = [NATIVE if each == event.name else each for each in said]
            out.append(f"| `{event.name}` | " + " | ".join(cells) + " |")
    return out


def page() -> str:
    """Return the text of docs/conformance.md."""
    columns = systems()
    known = {event for names in columns.values() for event in names}
    own = [f"`{each.name}`" for each in EVENTS if each.name in EVENTS_OF_THE_TABLE and each.name not in known]
    return "\n".join(
        [
            "# Which system has which event",
            "",
            "<!-- Generated from the tables of the dialects and hosts by tools/generate.py. -->",
            "",
            "## Hooks of other systems in Hookline",
            "",
            "This table lists the events that callbacks of Lightning, transformers, Keras and other systems "
            "receive in Hookline.",
            "",
            "- *native*: the system has this event under the same name.",
            "- A name in code: the system's own name for the event. Hookline calls the method of that name.",
            f"- {NOT_OFFERED}: the system does not have this event. A hook can still listen to it in "
            f"Hookline if its base class is",
            "  one of the `hookline.interop`.",
            "",
            *rows(columns),
            "",
            f"Only Hookline has: {', '.join(own)}.",
            "",
            "## Hookline's hooks in other trainers",
            "",
            "This table lists the events that Hookline's hooks receive inside other trainers "
            "([hosts](hosts.md)). A cell names what",
            "fires the event there.",
            "",
            f"- {NOT_OFFERED}: the event is not part of this trainer. A hook may listen to it and is not "
            f"called.",
            f"- *{REFUSED}*: the event happens, but the trainer does not report it. A hook that listens to "
            f"it, or requests a fact that",
            "  the trainer cannot provide, is refused when it is added, with the reason.",
            "",
            *hosted(),
            "",
        ]
    )
