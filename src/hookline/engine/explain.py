"""The lifecycle tree of a run, from the plan that executes it: which listener is called at which event, and
why.
"""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hookline.engine.events import BRANCHES, EVENTS, EVERY_STAGE, RECEIVERS, Event
from hookline.engine.foreign import Adapter
from hookline.engine.listener import Listener
from hookline.engine.plan import Plan
from hookline.engine.source_text import function_name
from hookline.util.errors import HookError, closest

LONG_BRANCH = 20
"""Lines of a branch from which a notebook shows it folded."""
_READING = "how loaders are read"
_BATCH_OF = {"validate": "validation batch", "test": "test batch", "predict": "predict batch"}


@dataclass(slots=True)
class Node:
    """A branch of the tree: its events and smaller branches, in order."""

    title: str
    children: list[Node | ExplainedEvent] = field(default_factory=list)


@dataclass(slots=True)
class ExplainedEvent:
    """An event with its listeners."""

    event: Event
    listeners: list[dict[str, Any]]
    note: str = ""
    """A remark on the event, such as how often it came."""


class Explanation:
    """The events and listeners of a run. `print` it for the events with listeners; `text(everything=True)`
    has all; `data()` returns dictionaries.
    """

    def __init__(
        self,
        stage: str,
        root: Node,
        mixture: str = "",
        graphs: str = "",
        loaders: Mapping[str, str] | None = None,
    ) -> None:
        self.stage = stage
        self.root = root
        self.mixture = mixture
        """A description of the mixture of training loaders; empty if there is none or it is not known yet."""
        self.graphs = graphs
        """A description of a compiled training step and its graph breaks; empty if it is not compiled."""
        self.loaders = dict(loaders or {})
        """A description of how each loader is read, by its name, for the loaders that are known."""

    def data(self) -> list[dict[str, Any]]:
        """Return one dictionary per event, in order."""
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
        """Return the tree as plain text."""
        more = [line for title, text in self._sections() for line in ("", title, text)]
        return "\n".join([self.root.title, *_draw_tree(self.root, "", everything), *more])

    def _sections(self) -> list[tuple[str, str]]:
        """Return the titles and texts of the sections below the tree."""
        width = max(map(len, self.loaders), default=0)
        read = "\n".join(f"  {name.ljust(width)}  {how}" for name, how in self.loaders.items())
        sections = (
            ("mixture of the training loaders", self.mixture),
            (_READING, read),
            ("compiled training step", self.graphs),
        )
        return [(title, text) for title, text in sections if text]

    def __str__(self) -> str:
        return self.text(everything=not _has_listeners(self.root))

    __repr__ = __str__  # the last line of a notebook's cell shows the tree

    def _repr_html_(self) -> str:
        from hookline.util.notebook import NESTED, escape  # only a notebook calls this

        tree = _draw_html(self.root, everything=not _has_listeners(self.root))
        more = "".join(
            f'<i>{escape(title)}</i><pre style="{NESTED};background:transparent">'
            f"{chr(10).join(map(escape, text.splitlines()))}</pre>"
            for title, text in self._sections()
        )
        return f"<div>{tree}{more}</div>"

    def __rich__(self) -> Any:
        from rich.text import Text
        from rich.tree import Tree

        tree = Tree(Text(self.root.title, "bold"))
        _fill_rich_tree(tree, self.root, Text, everything=not _has_listeners(self.root))
        for title, text in self._sections():
            tree.add(Text(title, "italic")).add(Text(text))
        return tree


def explain(
    trainer: Any = None, module: Any = None, *loaders: Any, stage: str = "fit", **options: Any
) -> Explanation:
    """Return the lifecycle of a run of this trainer; without a trainer, of any run. `print` it.

    trainer: its hooks are shown. module, loaders, options: as for `Trainer.explain`. stage: 'fit',
    'validate', 'test' or 'predict'.
    """
    if trainer is None:
        return explain_plan(Plan(EVENTS), stage)
    explanation: Explanation = trainer.explain(module, *loaders, stage=stage, **options)
    return explanation


def explain_plan(
    plan: Plan,
    stage: str = "fit",
    mixture: str = "",
    graphs: str = "",
    loaders: Mapping[str, str] | None = None,
    title: str = "",
) -> Explanation:
    """Return the lifecycle tree of one stage. title: what runs it; empty: the trainer."""
    if stage not in EVERY_STAGE:
        raise HookError(
            f"{stage!r} is not a stage.{closest(stage, EVERY_STAGE)} Stages: {', '.join(EVERY_STAGE)}."
        )
    root = Node(title or f"trainer.{stage}()")
    for event in plan.table.in_order(stage):
        listeners = [
            each for each in plan.listeners(event.name) if not getattr(each.owner, "is_internal", False)
        ]
        positions = _registration_order(listeners)
        described = [_listener_row(each, positions.get(each, "")) for each in listeners]
        _branch(root, _branch_titles(event, stage)).children.append(ExplainedEvent(event, described))
    return Explanation(stage, root, mixture, graphs, loaders)


def explain_rows(rows: list[dict[str, Any]], stage: str) -> Explanation:
    """Return the tree of a recorded plan.

    rows: as `Explanation.data()` returns them; each may have a `note`.
    """
    root = Node(f"trainer.{stage}()")
    for row in rows:
        name = row["event"]
        event = (
            EVENTS[name] if name in EVENTS else Event(name, "HM", (), "declared by the user", inside="own")
        )
        branch = _branch(root, [each for each in row["branch"].split("/") if each])
        branch.children.append(ExplainedEvent(event, row["listeners"], row.get("note", "")))
    return Explanation(stage, root)


def _branch_titles(event: Event, stage: str) -> list[str]:
    inside = _BATCH_OF.get(stage, "batch") if event.inside == "batch" else event.inside
    path = BRANCHES[inside].split("/")[1:]
    if stage == "validate" and path[:1] == ["each epoch"]:
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


def _registration_order(listeners: Sequence[Listener]) -> dict[Listener, str]:
    """Return the position by registration of each hook that shares its `order` with other hooks."""
    peers: dict[int, list[Listener]] = {}
    for listener in listeners:
        if listener.receiver == "H":
            peers.setdefault(listener.order, []).append(listener)
    return {
        listener: f", number {number} of {len(group)} by registration"
        for group in peers.values()
        if len(group) > 1
        for number, listener in enumerate(group, 1)
    }


def _listener_row(listener: Listener, position: str) -> dict[str, Any]:
    # the steps of a plain nn.Module call a function that the user has passed to fit
    given = getattr(listener.owner, "given_functions", {}).get(listener.event.name)
    function = given or listener.function
    return {
        "receiver": RECEIVERS[listener.receiver],
        "name": listener.name,
        "function": function_name(function),
        "origin": (listener if given is None else replace(listener, function=given)).origin,
        **({"kind": listener.owner.kind} if isinstance(listener.owner, Adapter) else {}),
        "asks": list(listener.binding.facts),
        "when": ", ".join(each.text for each in listener.filters) or "always",
        "on_error": listener.on_error,
        "why": _order_reason(listener, position),
    }


def _order_reason(listener: Listener, position: str) -> str:
    event = listener.event
    if event.action:
        return "runs the action" if listener.receiver != "S" else "wraps the action"
    order = " → ".join(RECEIVERS[each] for each in event.receivers)
    if listener.receiver != "H":
        return f"order of receivers: {order}"
    if listener.after_module:
        is_monitor = getattr(listener.owner, "tier", "") == "monitor"
        return "a monitor: after the module" if is_monitor else "after_module is set"
    tier = getattr(listener.owner, "tier", "user")
    explicit = getattr(listener.owner, "order", None) is not None
    return f"order={listener.order}{position}" if explicit else f"{tier} hook{position}"


def _walk(node: Node, branch: str) -> Iterator[tuple[str, ExplainedEvent]]:
    for child in node.children:
        if isinstance(child, Node):
            yield from _walk(child, f"{branch}/{child.title}")
        else:
            yield branch.lstrip("/"), child


def _has_listeners(node: Node | ExplainedEvent) -> bool:
    return (
        bool(node.listeners)
        if isinstance(node, ExplainedEvent)
        else any(_has_listeners(child) for child in node.children)
    )


def _shown(node: Node, everything: bool) -> list[Node | ExplainedEvent]:
    return [child for child in node.children if everything or _has_listeners(child)]


def _short_origin(origin: str) -> str:
    """Return a place relative to this directory, or in an installed package relative to its folder; else the
    name of the file.
    """
    parts = re.split(r"[\\/](?:site|dist)-packages[\\/]", origin)
    if len(parts) > 1:  # an environment may be inside this directory
        return parts[-1]
    inside = os.path.commonpath([os.getcwd(), os.path.abspath(origin)]) == os.getcwd()
    return os.path.relpath(origin) if inside else os.path.basename(origin)


def _format_listener(listener: dict[str, Any]) -> str:
    origin = _short_origin(listener["origin"])
    receiver = listener["receiver"].removesuffix("s")
    function = listener["function"].rpartition("<locals>.")[2]
    if receiver == "hook":
        method = function if function != listener["name"] else ""
        parts = [f"hook {listener['name']}{': ' if method else ''}{method} ({origin})"]
    else:
        parts = [f"{receiver} {function} ({origin})"]
    if listener.get("kind"):
        parts.append(listener["kind"])
    if listener["asks"]:
        parts.append(f"requests {', '.join(listener['asks'])}")
    if listener["when"] != "always":
        parts.append(listener["when"])
    return " · ".join([*parts, listener["why"], *([listener["happened"]] if "happened" in listener else [])])


def _draw_tree(node: Node, indent: str, everything: bool) -> Iterator[str]:
    shown = _shown(node, everything)
    for index, child in enumerate(shown):
        last = index == len(shown) - 1
        deeper = indent + ("   " if last else "│  ")
        corner = indent + ("└─ " if last else "├─ ")
        if isinstance(child, Node):
            yield f"{corner}{child.title}"
            yield from _draw_tree(child, deeper, everything)
        else:
            yield f"{corner}{_title(child)}"
            yield from (f"{deeper}    {_format_listener(listener)}" for listener in child.listeners)


def _draw_html(node: Node, everything: bool, is_root: bool = True) -> str:
    """Return the tree as HTML. Long branches are folded."""
    from hookline.util.notebook import NESTED, escape, foldable

    parts = []
    for child in _shown(node, everything):
        if isinstance(child, Node):
            parts.append(_draw_html(child, everything, is_root=False))
        else:
            listeners = "".join(f"<div>{escape(_format_listener(each))}</div>" for each in child.listeners)
            parts.append(f'<div><b>{escape(_title(child))}</b><div style="{NESTED}">{listeners}</div></div>')
    events = [each for _, each in _walk(node, "") if everything or each.listeners]
    if is_root or sum(1 + len(each.listeners) for each in events) <= LONG_BRANCH:
        return foldable(node.title, "".join(parts))
    return foldable(f"{node.title} · {len(events)} events", "".join(parts), is_open=False)


def _title(moment: ExplainedEvent) -> str:
    return f"{moment.event.name}{f' · {moment.note}' if moment.note else ''}"


def _fill_rich_tree(tree: Any, node: Node, text: Any, everything: bool) -> None:
    for child in _shown(node, everything):
        if isinstance(child, Node):
            _fill_rich_tree(tree.add(text(child.title, "italic")), child, text, everything)
        else:
            branch = tree.add(text(_title(child), "bold cyan"))
            for listener in child.listeners:
                branch.add(text(_format_listener(listener)))


class _CallableModule(types.ModuleType):
    """Makes `hookline.explain` both this module and the function."""

    def __call__(self, trainer: Any = None, module: Any = None, *loaders: Any, **options: Any) -> Explanation:
        return explain(trainer, module, *loaders, **options)


sys.modules[__name__].__class__ = _CallableModule
