"""Replay a trace to a hook, without a model: call the hook for each recorded event with its plain facts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

from hookline.engine.cost import Cost
from hookline.engine.events import EVENTS, Event
from hookline.engine.hook_list import HookList
from hookline.engine.listener import Listener
from hookline.engine.plan import Plan
from hookline.metrics.metric_log import MetricLog, Metrics
from hookline.run.context import StepContext
from hookline.tracing.reader import read_trace
from hookline.tracing.writer import COUNTER_SOURCES, own_facts, parse_number
from hookline.util.errors import HookError, HooklineError, OptionError, Signal

RUN_FACTS = ("stage", "rank", "local_rank", "world_size", "resumed")
"""Facts that a trace holds once, in its first line."""
_SPELLINGS = {"current_epoch": "epoch", "current_batch_idx": "batch_idx", "latest_loss": "loss"}
_CONTEXT = {"loss": "window_loss", "grad_norm": "grad_norm", "lr": "used_lr", "tokens_seen": "tokens_seen"}


class NotRecorded(HookError, AttributeError):
    """A hook requested a fact that the trace does not have."""


@dataclass(slots=True)
class Replayed:
    """The result of a replay.

    hook: its name. events, steps: how many were replayed. cost: calls and time per event.
    """

    hook: str
    events: int = 0
    steps: int = 0
    asked: list[str] = field(default_factory=list)
    """Changes that the hook requested and that a replay does not make: stops, skips, replaced values."""
    cost: list[Cost] = field(default_factory=list)


class RecordedState:
    """The recorded state of a run. Recorded facts are attributes; any other attribute raises NotRecorded."""

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked
        self.step = self.epoch = self.batch_idx = self.batches_seen = self.samples_seen = self.epochs_seen = 0
        self.sanity_checking = False
        self.running: tuple[Any, Any] | None = None
        self.status = "training"
        self.own: dict[str, Any] = {}
        self.log = MetricLog()

    def __getattr__(self, name: str) -> Never:
        raise NotRecorded(
            f"{name!r} was not recorded at {self.position}: a trace has plain data only, not tensors or "
            f"objects."
        )

    def __getitem__(self, key: str) -> Any:
        return getattr(self, _SPELLINGS.get(key, key))

    @property
    def position(self) -> str:
        """The epoch, batch and step, for messages."""
        return f"epoch {self.epoch}, batch {self.batch_idx}, step {self.step}"

    @property
    def ctx(self) -> StepContext:
        """The update as one object; model and optimizer are None in it."""
        known = {
            name: vars(self).get(attribute, _UnknownNumber(name, self.position))
            for name, attribute in _CONTEXT.items()
        }
        return StepContext(self.step, **known, epoch=self.epoch, metrics=vars(self).get("batch_metrics"))

    def request_stop(self, reason: str) -> None:
        """Record the request; the replay continues."""
        self._asked.append(f"stop at {self.position}: {reason}")

    def replace(self, name: str, value: Any) -> None:
        """Record the request; nothing is replaced."""
        self._asked.append(f"replace {name.removeprefix('live_')} at {self.position}")


class _UnknownNumber:
    """A number that was not recorded; reading it raises NotRecorded."""

    def __init__(self, name: str, position: str) -> None:
        self._text = f"{name!r} was not recorded at {position}: no hook requested it in that run."

    def __float__(self) -> float:
        raise NotRecorded(self._text)


def replay(path: str | Path, hook: Any, *, rank: int | None = None, name: str | None = None) -> Replayed:
    """Call a hook for every recorded event of a trace, and return what it did and cost.

    Raise NotRecorded before the first event if the hook requests facts that the trace does not have. path:
    the trace. hook: the hook. rank: of a merged trace; by default the lowest. name: the name of the hook;
    None: its own.
    """
    plan = Plan(EVENTS)
    rank, seen = recorded_facts(path, rank)
    hooks = HookList(plan, EVENTS, rank)
    entry = hooks.add(hook, name).entry
    check_recorded(path, entry.listeners, seen)
    done = Replayed(entry.name)
    state = RecordedState(done.asked)
    hooks.stopwatch.start()
    begun = False
    for event in _play_events(path, rank, state):
        if not begun:
            begun = True
            for listener in entry.listeners:
                listener.begin(state)
                # a replay has no other ranks, so a returned signal needs no declaration
                listener.declares_steering = True
        done.events += 1
        value = getattr(plan, event.name)(state)
        if isinstance(value, Signal):
            done.asked.append(f"{value!r} from {event.name} at {state.position}")
        elif event.isolated and value:
            raise value[0]
    hooks.stopwatch.stop()
    done.steps, done.cost = state.step, hooks.cost()
    return done


def _play_events(path: str | Path, rank: int, state: RecordedState) -> Iterator[Event]:
    """Yield the events in order, after setting the state to what was recorded."""
    for record in read_trace(path):
        args = record["args"]
        if record.get("pid", 0) != rank:
            continue
        if record["name"] == "hookline" and record.get("ph") == "M":
            for fact in RUN_FACTS:
                setattr(state, fact, args.get(fact))
        elif record.get("cat") in ("event", "action"):
            for key in args.keys() & COUNTER_SOURCES.keys():
                setattr(state, key, parse_number(args[key]))
            if record["cat"] == "event" and record["name"] in EVENTS:
                event = EVENTS[record["name"]]
                _set_own(state, event, args)
                yield event


def _set_own(state: RecordedState, event: Event, args: dict[str, Any]) -> None:
    for key, expression in own_facts(event, EVENTS).items():
        value = _revive(key, args[key]) if key in args else None
        if event.inside == "own":
            state.own[key] = value
        elif key in args:
            setattr(state, expression.removeprefix("s."), value)
        else:
            vars(state).pop(expression.removeprefix("s."), None)  # not what it was at an earlier event


def _revive(key: str, value: Any) -> Any:
    if isinstance(value, dict) and key in ("metrics",):
        return Metrics({name: parse_number(each) for name, each in value.items()})
    if key == "path" and isinstance(value, str) and "://" not in value:
        return Path(value)
    return parse_number(value) if isinstance(value, str) and key != "reason" else value


# ---- check that the trace has the requested facts ----------------------------------------------------------


def recorded_facts(path: str | Path, rank: int | None) -> tuple[int, dict[str, set[str]]]:
    """Return the rank to replay, and the facts that the trace has of it, by event."""
    seen: dict[int, dict[str, set[str]]] = {}
    for record in read_trace(path):
        if record.get("cat") in ("event", "action"):
            seen.setdefault(record.get("pid", 0), {}).setdefault(record["name"], set()).update(record["args"])
    if not seen:
        raise OptionError(f"{path} has no events yet.")
    if rank is not None and rank not in seen:
        raise OptionError(
            f"{path} has no events of rank {rank}. Recorded ranks: {', '.join(map(str, sorted(seen)))}."
        )
    played = min(seen) if rank is None else rank
    return played, seen[played]


def check_recorded(path: str | Path, listeners: list[Listener], seen: dict[str, set[str]]) -> None:
    """Raise if a hook requests facts that were not recorded, or none of its events was."""
    everywhere = {*set().union(*seen.values()) & COUNTER_SOURCES.keys(), *RUN_FACTS, "state"}
    missing: list[str] = []
    for listener in listeners:
        event = listener.event
        if event.name in seen:
            own = own_facts(event, EVENTS)
            here = {expression for key, expression in own.items() if key in seen[event.name]}
            missing += [
                f"{fact!r} in {event.name}"
                for fact in listener.facts
                if fact not in everywhere and not _is_recorded(fact, event, here)
            ]
    if missing:
        raise NotRecorded(
            f"This hook requests facts that were not recorded: {', '.join(dict.fromkeys(missing))}. A trace "
            "has plain data only: no tensors, models, optimizers or trainers. Expensive facts (grad_norm, "
            "tokens_seen) are recorded only if a hook of that run requested them."
        )
    if not any(listener.event.name in seen for listener in listeners):
        raise HooklineError(
            f"{path} has none of the events of this hook ("
            f"{', '.join(each.event.name for each in listeners) or 'it has none'})."
        )


def _is_recorded(name: str, event: Event, here: set[str]) -> bool:
    if name == "ctx":
        return "s.window_loss" in here
    fact = EVENTS.fact(name, event)
    return fact is not None and EVENTS.expression(fact, event) in here
