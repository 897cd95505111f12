"""Write the files that are derived from the table of events and from the declared arguments of the trainer.

From the events: the typed base classes, docs/lifecycle.md, docs/conformance.md, the tables of
docs/opentelemetry.md. From the arguments: their types, docs/options.md, the table in docs/training.md.
From the docstrings and the command line: docs/reference/.
`python tools/generate.py` writes, `python tools/generate.py --check` fails if a file is out of date.
"""

from __future__ import annotations

import itertools
import sys
import textwrap
from pathlib import Path

import architecture
import arguments
import reference
import results
from conformance import page as conformance
from markdown_links import sentence

from hookline.engine.cost import OFTEN
from hookline.engine.events import BRANCHES, EVENTS, EVENTS_OF_THE_TABLE, FACT_ROWS, RECEIVERS, Event
from hookline.hooks._instruments import COUNTERS, LOGGED, PREFIX, SKIPPED

ROOT = Path(__file__).resolve().parent.parent
BASES = {
    "CommonMethods": ("", "HMS", "Every event that hooks, modules and strategies can listen to."),
    "EventMethods": ("CommonMethods", "HM", "Every event that hooks and modules can listen to."),
    "HookMethods": (
        "EventMethods",
        "H",
        "Every event that a hook can listen to. Override with any subset of an event's facts as parameters.",
    ),
    "ModuleMethods": ("EventMethods", "M", "Every event that a module can listen to."),
    "DataMethods": ("", "D", "Every event that a data module can listen to."),
    "StrategyMethods": ("CommonMethods", "S", "Every event that a strategy can listen to."),
}
"""The classes with a method for each event: their base, and the receivers that all listen to the event."""


def returned(event: Event) -> str:
    """Return the effect of a returned value, in a few words."""
    if event.signals:
        return f"may return {' or '.join(event.signals)}"
    if event.replaces:
        return "a returned value replaces the " + {"live_loss": "loss", "row": "metrics"}.get(
            event.replaces, event.replaces
        )
    return "the returned value is used" if event.returns == "value" else ""


def rows() -> list[Event]:
    """Return the rows of the table, without events that a user has declared."""
    return [event for event in EVENTS if event.name in EVENTS_OF_THE_TABLE]


def methods() -> str:
    """Return the source of `hookline/engine/_methods.py`."""
    out = [
        '"""Generated from the table in engine/events.py by tools/generate.py; edit the rows there, not this '
        'file."""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import Any, ClassVar",
    ]
    written: dict[str, dict[str, list[str]]] = {"": {}}
    for name, (base, receivers, doc) in BASES.items():
        first, *others = map(event_methods, receivers)
        shared = {each: lines for each, lines in first.items() if all(o.get(each) == lines for o in others)}
        written[name] = written[base] | shared
        out += [
            "",
            "",
            f"class {name}({base}):" if base else f"class {name}:",
            f'    """{doc}"""',
            "",
            "    __hookline_base__: ClassVar[bool] = True",
        ]
        for each, lines in shared.items():
            if written[base].get(each) != lines:
                out += ["", *lines]
    return "\n".join(out) + "\n"


def event_methods(receiver: str) -> dict[str, list[str]]:
    """Return the methods of a receiver as lines of source, by name."""
    found: dict[str, list[str]] = {}
    for event in rows():
        if receiver in event.receivers and not event.action:
            name = event.name
            if (
                not name.startswith("on_") and event.spellings
            ):  # one receiver's share of a method they all have
                name = event.spellings[0]
            facts = f"Facts: {', '.join(event.facts)}." if event.facts else ""
            value = returned(event)
            text = " ".join(filter(None, [event.doc, facts, value and f"{value[0].upper()}{value[1:]}."]))
            lines = textwrap.wrap(text, 108)
            more = [f"        {line}" for line in [*lines[1:], '"""']] if len(lines) > 1 else []
            found[name] = [
                f"    def {name}(self, *args: Any, **kwargs: Any) -> Any:",
                f'        """{lines[0]}' + ("" if more else '"""'),
                *more,
            ]
    return found


def lifecycle() -> str:
    """Return the text of docs/lifecycle.md."""
    out = [
        "# The lifecycle: every event and its facts",
        "",
        "<!-- Generated from src/hookline/engine/events.py by tools/generate.py. -->",
        "",
        "All events of a run that a hook (callback) can listen to, in the order in which `fit` fires them. "
        "`hookline.explain()`",
        "shows this tree for your run, with its listeners.",
        "",
        "- An event calls its receivers from left to right. Hooks are called in the order of registration, "
        "then built-in hooks,",
        "  then monitors.",
        "- A listener requests facts by naming its parameters after them. Some facts can be requested "
        "[at every event](#facts-of-every-event).",
        "- An *action* is done by one receiver, which gets the facts by position. A method of the module "
        "replaces the default.",
        "- The sanity check runs a validation between its two events.",
        "- Validation, test and prediction fetch and move their batches with the same events as training.",
        "- Test and prediction are runs of their own, with the same set-up and end.",
        "",
        "Receivers: " + " · ".join(f"**{letter}** {name}" for letter, name in RECEIVERS.items()),
    ]
    seen: set[str] = set()
    for branch, events in itertools.groupby(rows(), lambda event: event.inside):
        title = " → ".join(BRANCHES[branch].split("/")[1:]) or "the run"
        title += ", continued" if branch in seen else ""
        seen.add(branch)
        out += [
            "",
            f"## {title[0].upper()}{title[1:]}",
            "",
            "| event | what happens | facts | receivers |",
            "|---|---|---|---|",
        ]
        for event in events:
            names = f"`{event.name}`" + "".join(f", `{each}`" for each in event.spellings)
            kind = " (action)" if event.action else ""
            facts = ", ".join(event.facts) or "–"
            value = "" if event.signals else returned(event)
            text = event.doc + (f" *{sentence(value)}*" if value else "")
            out.append(f"| {names}{kind} | {text} | {facts} | {' '.join(event.receivers)} |")
    out += ["", "## Facts"]
    for title, everywhere in (("Facts of every event", True), ("Facts of the events that list them", False)):
        out += ["", f"### {title}", "", "| fact | what it is |", "|---|---|"]
        for fact in FACT_ROWS:
            names = ", ".join(f"`{each}`" for each in (fact.name, *fact.spellings))
            doc = fact.doc + (" (computed only on request)" if fact.costly else "")
            out += [f"| {names} | {doc} |"] if fact.everywhere == everywhere else []
    return "\n".join(out) + "\n"


def spans() -> list[str]:
    """Return the table of the spans that the hook OpenTelemetry makes."""
    pairs = [pair for pair in EVENTS.pairs() if pair.begin.name in EVENTS_OF_THE_TABLE]
    own = {pair.name for pair in pairs}
    out = ["| span | begins at | ends at | in |", "|---|---|---|---|"]
    out.append("| `run fit`, `run validate`, `run test`, `run predict` | `setup` | `teardown` | every run |")
    out.append("| `step` | a batch is fetched | `on_step_end` | sampled steps |")
    for pair in pairs:
        ends = ", ".join(f"`{each.name}`" for each in pair.ends)
        out.append(f"| `{pair.name}` | `{pair.begin.name}` | {ends} | {sampled(pair.begin)} |")
    for event in rows():
        if event.action and event.name not in own:
            out.append(f"| `{event.name}` | the action | | {sampled(event)} |")
    out.append(
        "| `NAME.EVENT`, such as `report.on_train_end` | the call of a hook or module | | as its event |"
    )
    return out


def sampled(event: Event) -> str:
    """Return when the spans of an event are made."""
    if event.inside.endswith(" batch"):
        return "the first batch of a pass"
    return "sampled steps" if event.inside in OFTEN else "always"


def metrics() -> list[str]:
    """Return the table of the metrics that the hook OpenTelemetry makes."""
    out = ["| metric | kind | unit | what it is |", "|---|---|---|---|"]
    out.append(
        f"| `{LOGGED}NAME` | gauge | | the newest value that the run logged under NAME, with `/` as a dot: "
        f"`{LOGGED}val.loss`. `hookline.metric` has the exact name; `hookline.over` is step, epoch or "
        "evaluation |"
    )
    for name, counter in COUNTERS.items():
        kind = "gauge" if counter.is_gauge else "counter"
        out.append(f"| `{PREFIX}{name}` | {kind} | `{counter.unit}` | {counter.doc.rstrip('.')} |")
    out.append(
        f"| `{PREFIX}{SKIPPED}` | counter | `{{step}}` | Steps without an update, by `hookline.reason` |"
    )
    out.append(f"| `{PREFIX}SPAN.duration` | histogram | `s` | Seconds of each span of the table above |")
    out.append(f"| `{PREFIX}hook.duration` | histogram | `s` | Seconds of hook calls, by hook and event |")
    return out


def telemetry() -> str:
    """Return the text of docs/opentelemetry.md with current tables."""
    text = (ROOT / "docs/opentelemetry.md").read_text()
    for name, table in (("spans", spans()), ("metrics", metrics())):
        begin, end = f"<!-- {name}: generated by tools/generate.py -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        text = before + begin + "\n" + "\n".join(table) + "\n\n" + end + rest.partition(end)[2]
    return text


def main() -> int:
    """Write or check the files."""
    targets = {
        ROOT / "src/hookline/engine/_methods.py": methods(),
        ROOT / "docs/lifecycle.md": lifecycle(),
        ROOT / "docs/conformance.md": conformance(),
        ROOT / "docs/opentelemetry.md": telemetry(),
        ROOT / "src/hookline/run/_arguments.py": arguments.typed(),
        ROOT / "docs/options.md": arguments.page(),
        ROOT / "docs/training.md": arguments.overview(),
        architecture.GUIDE: architecture.page(),
        ROOT / "docs/images/architecture.svg": architecture.picture(),
        **reference.pages(),
        ROOT / "docs/reference/results.md": results.page(),
    }
    stale = [path for path, text in targets.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run `python3 dev.py generate`")
        return bool(stale)
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(targets[path])
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
