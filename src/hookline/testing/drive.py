"""Drive a hook without writing a trainer: one event, or a whole tiny run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from hookline.errors import HookError, closest
from hookline.events import EVENTS, Event
from hookline.hooklist import HookList
from hookline.options import OptionArguments
from hookline.plan import Plan
from hookline.state import State
from hookline.testing.tiny import TinyModule, tiny_batches, tiny_trainer
from hookline.trace import Call, Recorder
from hookline.trainer import Trainer


def fire(hook: Any, event: str, **facts: Any) -> Any:
    """Deliver one event to one hook with the facts given; what it did not get is what it is before a run begins.

    >>> fire(MyHook(), "step_end", step=3, loss=0.5)

    Names, spellings and filters are checked as in a run; filters do not hold the call back. Returns what the hook returned.
    """
    row = EVENTS.named(event)
    table = EVENTS
    given: dict[str, Any] = {}
    for name, value in facts.items():
        fact = table.fact(name, row)
        if fact is None:
            known = [each.name for each in table.facts_at(row)]
            raise HookError(f"{row.name} has no fact {name!r}.{closest(name, known)} Facts: {', '.join(known)}.")
        given[fact.name] = value
    hooks = HookList(Plan(table), table)
    entry = hooks.add(hook).entry
    listeners = [each for each in entry.listeners if each.event is row]
    if not listeners:
        raise HookError(f"{type(hook).__name__} does not listen to {row.name}.")
    return _call(listeners[0].function, row, given)


def _call(function: Callable[..., Any], event: Event, given: dict[str, Any]) -> Any:
    state = State(module=given.get("module"), device=torch.device("cpu"))
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        fact = EVENTS.fact(parameter.name, event)
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += [given.get(name) for name in event.facts]
        elif parameter.kind is parameter.VAR_KEYWORD:
            named.update({name: value for name, value in given.items() if name not in named})
        elif fact is not None:
            value = given[fact.name] if fact.name in given else state if fact.name == "state" else getattr(state, fact.name, None)
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                named[parameter.name] = value
    return function(*positional, **named)


@dataclass(frozen=True, slots=True)
class Played:
    """A tiny run that is over: its trainer, and everything that was called in it."""

    trainer: Trainer
    calls: list[Call]

    def events(self, hook: str | None = None) -> list[str]:
        """The names of the events that were heard, by everyone or by one hook."""
        return [call.event for call in self.calls if hook is None or (call.receiver == "H" and call.name == hook)]


def play(*hooks: Any, module: Any = None, train: Any = None, val: Any = None, **options: Unpack[OptionArguments]) -> Played:
    """A real run of a tiny model with these hooks, recorded. Options are the trainer's; `val` is off unless given."""
    torch.manual_seed(options.get("seed") or 0)
    trainer = tiny_trainer(*hooks, **options)
    with Recorder(trainer) as recorder:
        trainer.fit(module or TinyModule(), tiny_batches() if train is None else train, val)
    return Played(trainer, recorder.calls)
