"""The lifecycle tree of a run, from the very plan that executes it: who listens where, to what, and why
there.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hookline.engine.events import BRANCHES, EVENTS, EVERY_VERB, RECEIVERS, Event
from hookline.engine.foreign import Adapter
from hookline.engine.listener import Listener, plain_function
from hookline.engine.plan import Plan
from hookline.util.errors import HookError, closest

READING = "how loaders are read"
_BATCH_OF = {"validate": "validation batch", "test": "test batch", "predict": "predict batch"}


@dataclass(slots=True)
class Node:
    """A branch of the tree: its events and smaller branches, in order."""

    title: str
    children: list[Node | Moment] = field(default_factory=list)


@dataclass(slots=True)
class Moment:
    """An event with its listeners."""

    event: Event
    listeners: list[dict[str, Any]]
    note: str = ""
    """What is to be said about it besides: how often it came."""


class Explanation:
    """What a run will do. `print(it)` shows the events somebody listens to; `text(everything=True)` all;
    `data()` as data.
    """

    def __init__(
        self,
        verb: str,
        root: Node,
        mixture: str = "",
        graphs: str = "",
        loaders: Mapping[str, str] | None = None,
    ) -> None:
        self.verb = verb
        self.root = root
        self.mixture = mixture
        """How several training loaders are mixed, in words; empty if they are not, or not known yet."""
        self.graphs = graphs
        """What a compiled training step consists of, and what splits it; empty if it is not compiled."""
        self.loaders = dict(loaders or {})
        """How each loader is read, in words, by its name; those that are known."""

    def data(self) -> list[dict[str, Any]]:
        """One dictionary per event, in order."""
        return [
            {
                "branch": branch,
                "event": moment.event.name,
                "doc": moment.event.doc,
                "action": moment.event.action,
                "listeners": moment.listeners,
            }
            for branch, moment in _walk(self.root, "")
        ]

    def text(self, everything: bool = False) -> str:
        """The tree as plain text."""
        more = [line for title, text in self._sections() for line in ("", title, text)]
        return "\n".join([self.root.title, *_draw(self.root, "", everything), *more])

    def _sections(self) -> list[tuple[str, str]]:
        """What is said below the tree."""
        width = max(map(len, self.loaders), default=0)
        read = "\n".join(f"  {name.ljust(width)}  {how}" for name, how in self.loaders.items())
        sections = (
            ("mixture of the training loaders", self.mixture),
            (READING, read),
            ("compiled training step", self.graphs),
        )
        return [(title, text) for title, text in sections if text]

    def __str__(self) -> str:
        return self.text(everything=not _heard(self.root))

    __repr__ = __str__  # the last line of a notebook's cell shows the tree

    def __rich__(self) -> Any:
        from rich.text import Text
        from rich.tree import Tree

        tree = Tree(Text(self.root.title, "bold"))
        _grow(tree, self.root, Text, everything=not _heard(self.root))
        for title, text in self._sections():
            tree.add(Text(title, "italic")).add(Text(text))
        return tree


def explain(trainer: Any = None, module: Any = None, *, verb: str = "fit", **options: Any) -> Explanation:
    """The lifecycle of a run of this trainer; without one, the lifecycle as such. `print` it."""
    if trainer is None:
        return explain_plan(Plan(EVENTS), verb)
    explanation: Explanation = trainer.explain(module, verb=verb, **options)
    return explanation


def explain_plan(
    plan: Plan,
    verb: str = "fit",
    mixture: str = "",
    graphs: str = "",
    loaders: Mapping[str, str] | None = None,
) -> Explanation:
    """The tree of one verb."""
    if verb not in EVERY_VERB:
        raise HookError(
            f"{verb!r} is no verb of a trainer.{closest(verb, EVERY_VERB)} Verbs: {', '.join(EVERY_VERB)}."
        )
    root = Node(f"trainer.{verb}()")
    for event in plan.table.in_order(verb):
        heard = plan.listeners(event.name)
        places = _places(heard)
        listeners = [_describe(each, places.get(each, "")) for each in heard]
        _branch(root, _path(event, verb)).children.append(Moment(event, listeners))
    return Explanation(verb, root, mixture, graphs, loaders)


def explain_rows(rows: list[dict[str, Any]], verb: str) -> Explanation:
    """The tree of a plan that was written down: rows as `Explanation.data()` gives them, each perhaps with a
    `note`.
    """
    root = Node(f"trainer.{verb}()")
    for row in rows:
        name = row["event"]
        event = (
            EVENTS[name] if name in EVENTS else Event(name, "HM", (), "declared by the user", inside="own")
        )
        branch = _branch(root, [each for each in row["branch"].split("/") if each])
        branch.children.append(Moment(event, row["listeners"], row.get("note", "")))
    return Explanation(verb, root)


def _path(event: Event, verb: str) -> list[str]:
    inside = _BATCH_OF.get(verb, "batch") if event.inside == "batch" else event.inside
    path = BRANCHES[inside].split("/")[1:]
    if verb == "validate" and path[:1] == ["each epoch"]:
        path = ["validation", *path[2:]]
    return [] if inside == "end" else path


def _branch(root: Node, path: list[str]) -> Node:
    node = root
    for title in path:
        found = next((each for each in node.children if isinstance(each, Node) and each.title == title), None)
        if found is None:
            found = Node(title)
            node.children.append(found)
        node = found
    return node


def _places(listeners: Sequence[Listener]) -> dict[Listener, str]:
    """What decides between hooks of the same order: who was registered first."""
    peers: dict[int, list[Listener]] = {}
    for each in listeners:
        if each.receiver == "H":
            peers.setdefault(each.order, []).append(each)
    return {
        listener: f", number {number} of {len(group)} by registration"
        for group in peers.values()
        if len(group) > 1
        for number, listener in enumerate(group, 1)
    }


def _describe(listener: Listener, place: str) -> dict[str, Any]:
    function = plain_function(listener.function)
    return {
        "receiver": RECEIVERS[listener.receiver],
        "name": listener.name,
        "function": getattr(function, "__qualname__", type(function).__qualname__),
        "origin": listener.origin,
        **({"kind": listener.owner.kind} if isinstance(listener.owner, Adapter) else {}),
        "asks": list(listener.binding.facts),
        "when": ", ".join(each.text for each in listener.filters) or "always",
        "on_error": listener.on_error,
        "why": _why(listener, place),
    }


def _why(listener: Listener, place: str) -> str:
    event = listener.event
    if event.action:
        return "does it" if listener.receiver != "S" else "stands around it"
    order = " → ".join(RECEIVERS[each] for each in event.receivers)
    if listener.receiver != "H":
        return f"order of receivers: {order}"
    if listener.after_module:
        is_monitor = getattr(listener.owner, "tier", "") == "monitor"
        return "a monitor: after the module" if is_monitor else "asked to run after the module"
    tier = getattr(listener.owner, "tier", "user")
    explicit = getattr(listener.owner, "order", None) is not None
    return f"order={listener.order}{place}" if explicit else f"{tier} hook{place}"


def _walk(node: Node, branch: str) -> Iterator[tuple[str, Moment]]:
    for child in node.children:
        if isinstance(child, Node):
            yield from _walk(child, f"{branch}/{child.title}")
        else:
            yield branch.lstrip("/"), child


def _heard(node: Node | Moment) -> bool:
    return bool(node.listeners) if isinstance(node, Moment) else any(_heard(child) for child in node.children)


def _line(listener: dict[str, Any]) -> str:
    inside = os.path.commonpath([os.getcwd(), os.path.abspath(listener["origin"])]) == os.getcwd()
    origin = os.path.relpath(listener["origin"]) if inside else os.path.basename(listener["origin"])
    who = listener["receiver"].removesuffix("s")
    function = listener["function"].rpartition("<locals>.")[2]
    if who == "hook":
        method = function if function != listener["name"] else ""
        parts = [f"hook {listener['name']}{': ' if method else ''}{method} ({origin})"]
    else:
        parts = [f"{who} {function} ({origin})"]
    if listener.get("kind"):
        parts.append(listener["kind"])
    if listener["asks"]:
        parts.append(f"asks {', '.join(listener['asks'])}")
    if listener["when"] != "always":
        parts.append(listener["when"])
    return " · ".join([*parts, listener["why"], *([listener["happened"]] if "happened" in listener else [])])


def _draw(node: Node, indent: str, everything: bool) -> Iterator[str]:
    shown = [child for child in node.children if everything or _heard(child)]
    for index, child in enumerate(shown):
        last = index == len(shown) - 1
        deeper = indent + ("   " if last else "│  ")
        corner = indent + ("└─ " if last else "├─ ")
        if isinstance(child, Node):
            yield f"{corner}{child.title}"
            yield from _draw(child, deeper, everything)
        else:
            yield f"{corner}{_title(child)}"
            yield from (f"{deeper}    {_line(listener)}" for listener in child.listeners)


def _title(moment: Moment) -> str:
    return f"{moment.event.name}{f' · {moment.note}' if moment.note else ''}"


def _grow(tree: Any, node: Node, text: Any, everything: bool) -> None:
    for child in node.children:
        if not (everything or _heard(child)):
            continue
        if isinstance(child, Node):
            _grow(tree.add(text(child.title, "italic")), child, text, everything)
        else:
            branch = tree.add(text(_title(child), "bold cyan"))
            for listener in child.listeners:
                branch.add(text(_line(listener)))


class _CallableModule(types.ModuleType):
    """`hookline.explain` is this module and the function in one."""

    def __call__(self, trainer: Any = None, module: Any = None, **options: Any) -> Explanation:
        return explain(trainer, module, **options)


sys.modules[__name__].__class__ = _CallableModule
