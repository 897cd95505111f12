"""Which facts a trace keeps, and how they are read: numbers and text, as they are, nothing waited for on a
device.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from hookline.events import Event, EventTable
from hookline.text import redact

COUNTERS: dict[str, str] = {
    "step": "s.step",
    "epoch": "s.epoch",
    "batch_idx": "s.batch_idx",
    "batches_seen": "s.batches_seen",
    "samples_seen": "s.samples_seen",
    "epochs_seen": "s.epochs_seen",
    "lr": "s.lr",
    "sanity_checking": "s.sanity_checking",
    "status": "s.status",
    "tokens_seen": "s.tokens_seen if 'tokens_seen' in p.wanted else None",
}
"""Known at every event; written when they change."""
RAW: dict[str, str] = {
    "s.loss": "s.last_loss",
    "s.path": "plain(s.path)",
    "s.window_loss": "s.mean_of_window()",
    "s.used_lr": "s.used_lr",
    "s.grad_norm": "s.norm_on_device() if 'grad_norm' in p.wanted else s.norm_tensor",
    "s.metrics": "dict(s.metrics.raw())",
    "s.batch_metrics": "s._batch_values(s.returned)",
    "s.row": "dict(s.row.raw())",
    **{
        f"s.{name}": f"s.{name}"
        for name in (
            "dataloader_idx",
            "dataloader_name",
            "optimizer_idx",
            "reason",
            "stage",
            "saved_step",
            "metric",
            "gradient_clip_val",
            "gradient_clip_algorithm",
        )
    },
}
"""How an event's own facts are taken without reading a device: numbers still on it are read when the trace is
written.
"""

Reader = Callable[[Any], tuple[tuple[Any, ...], tuple[Any, ...]]]
ABSENT = object()
DEEPEST = 20
"""Containers inside each other; what is deeper, or holds itself, is not kept."""


def own_facts(event: Event, table: EventTable) -> dict[str, str]:
    """The facts of an event, besides those known everywhere, that a trace keeps: its key -> what a listener
    reads.

    A key is the fact's name. What is read otherwise at this event, such as the learning rate that an update
    has used, has a key of its own: `used_lr`.
    """
    kept = {}
    for name in event.facts:
        fact = table.fact(name, event)
        expression = table.expression(fact, event) if fact is not None else ""
        if expression in RAW or event.inside == "own":
            kept[expression.removeprefix("s.") if name in COUNTERS else name] = expression
    return kept


def make_reader(event: Event, table: EventTable, plan: Any) -> Reader:
    """`lambda s: ((counters), (own facts))`, compiled from expressions of the table and of
    this module only.
    """
    own = [RAW.get(expression, f"plain({expression})") for expression in own_facts(event, table).values()]
    source = f"lambda s: (({', '.join(COUNTERS.values())},), ({', '.join(own)}{',' if own else ''}))"
    made: Reader = eval(compile(source, "<hookline trace>", "eval"), {"p": plan, "plain": plain})
    return made


def plain(value: Any, depth: int = 0) -> Any:
    """Numbers, text and what is made of them; ABSENT for anything else. NaN and infinity become text, which
    JSON can hold.
    """
    if isinstance(value, str):
        return redact(value)  # the path of a checkpoint may be a URL
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if depth > DEEPEST:
        return ABSENT
    if isinstance(value, Mapping):
        pairs = {str(key): plain(each, depth + 1) for key, each in value.items()}
        return {key: each for key, each in pairs.items() if each is not ABSENT}
    if isinstance(value, list | tuple):
        parts = [plain(each, depth + 1) for each in value]
        return ABSENT if any(each is ABSENT for each in parts) else parts
    if getattr(value, "ndim", None) == 0 or getattr(value, "shape", None) == (
        1,
    ):  # a tensor or array of one number
        try:
            return plain(value.item())
        except (
            RuntimeError,
            TypeError,
            ValueError,
            NotImplementedError,
        ):  # on the meta device there is no number
            return ABSENT
    return ABSENT


def number(value: Any) -> Any:
    """Back from the text that NaN and infinity are written as."""
    return float(value) if value in ("nan", "inf", "-inf") else value
