"""Test a hook without writing a trainer: with one event, or with a whole run of a tiny model."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from hookline.engine.events import EVENTS, Event
from hookline.engine.foreign import Adapter
from hookline.engine.hook_list import HookList
from hookline.engine.listener import Listener, with_filters
from hookline.engine.plan import Plan
from hookline.engine.recorder import Call, Recorder
from hookline.run._arguments import OptionArguments
from hookline.run.module import Module
from hookline.run.state import WRITTEN, State
from hookline.training.trainer import Trainer
from hookline.util.errors import HookError, closest

COUNTER_FACTS = ("step", "epoch", "batch_idx", "batches_seen", "samples_seen", "tokens_seen")
_COUNTED: dict[int, dict[str, list[dict[str, Any]]]] = {}
"""The counters of each hook's filters, by the identity of the hook and the event, as long as the hook
exists.
"""


def fire(hook: Any, event: str, *, filters: bool = True, **facts: Any) -> Any:
    """Deliver one event to one hook as a run would, with the facts given, and return what the hook returned.

    >>> fire(MyHook(), "step_end", step=3, loss=0.5)

    hook: the hook. event: its name, with or without `on_`. facts: by name. A fact that is not given has its
    value before a run: `step` is 0, `rank` 0, `optimizers` empty. Facts without such a value, as `loss`,
    `metrics` or `trainer`, must be given if the hook requests them.

    Filters suppress the call as in a run that reached this step one by one; calls of `fire` for one hook
    count like events of one run. filters: False: the hook is called in any case.
    """
    row = EVENTS.named(event)
    given = _check_facts(row, facts)
    hooks = HookList(Plan(EVENTS), EVENTS)
    entry = hooks.add(hook).entry
    listener = next((each for each in entry.listeners if each.event is row), None)
    if listener is None:
        others = ", ".join(each.event.name for each in entry.listeners) or "nothing"
        raise HookError(
            f"{type(entry.given).__name__} does not listen to {row.name}. It listens to {others}."
        )
    state = _make_state({"hooks": hooks, **given}, row)
    if isinstance(
        entry.hook, Adapter
    ):  # a callback of another package: pass its parameters by name, not the views of a run
        return _call_by_name(listener, state, given)
    _refuse_missing(listener, state, given, filters)
    if not filters or not listener.filters:
        return listener.binding.call(state)
    counted = _filter_counters(entry.given).setdefault(row.name, [])
    before = _make_state(
        {**given, **{name: max(0, given[name] - 1) for name in COUNTER_FACTS if name in given}}, row
    )
    for index, condition in enumerate(listener.filters):
        condition.begin(before)
        if counted:
            condition.load_state_dict(counted[index])
    try:
        return with_filters(listener.binding.call, listener.filters)(state)
    finally:
        counted[:] = [each.state_dict() for each in listener.filters]


def _check_facts(row: Event, facts: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in facts.items():
        fact = EVENTS.fact(name, row)
        if fact is None:
            known = [each.name for each in EVENTS.facts_at(row)]
            raise HookError(
                f"{row.name} has no fact {name!r}.{closest(name, known)} Facts: {', '.join(known)}."
            )
        given[fact.name] = value
    return given


def _make_state(given: dict[str, Any], row: Event) -> Any:
    """Return a state with the given facts, at the attributes that a listener of this event reads."""
    epochs_seen = given.get("epoch", 0) + (row.name == "on_train_epoch_end")
    values: dict[str, Any] = {"device": torch.device("cpu"), "epochs_seen": epochs_seen, "own": {}}
    for name, value in given.items():
        fact = EVENTS.fact(name, row)
        assert fact is not None
        if row.inside == "own" and not fact.everywhere:
            values["own"][name] = value
        else:
            values |= {name: value, EVENTS.expression(fact, row).removeprefix("s."): value}
    if "module" in given:
        values.setdefault("wrapped_model", given["module"])
    if (state := values.pop("state", None)) is not None:
        values.pop("s", None)
        for name, value in values.items():
            if name in given and isinstance(state, State):
                state.fill(**{name: value})
            elif name in given:
                setattr(state, name, value)
        return state
    # computed facts are properties of the state: replace them with the given values
    computed = {
        name: staticmethod(value) if callable(value) else value
        for name, value in values.items()
        if name not in WRITTEN
    }
    made = type("State", (State,), computed)
    return made(**{name: value for name, value in values.items() if name in WRITTEN})


def _refuse_missing(listener: Listener, state: Any, given: dict[str, Any], filters: bool) -> None:
    where = (
        f"{type(listener.owner).__name__}.{listener.event.name}"
        if listener.owner is not None
        else listener.label
    )
    missing = [
        name
        for name in dict.fromkeys(listener.binding.facts)
        if name not in given and not _has_default(name, listener.event, state)
    ]
    if missing:
        raise HookError(
            f"{where} requests {', '.join(missing)}, without a value outside a run: pass "
            f"{'it' if len(missing) == 1 else 'them'} to fire({_example(listener, missing)})."
        )
    for condition in listener.filters if filters else ():
        asked = ["epoch" if name == "epochs_seen" else name for name in condition.facts]
        if counts := [name for name in asked if name in COUNTER_FACTS and name not in given]:
            raise HookError(
                f"{where} is called {condition.text}: pass {' and '.join(counts)} to "
                f"fire({_example(listener, counts)}), or filters=False to call it in any case."
            )


def _example(listener: Listener, names: list[str]) -> str:
    return f"hook, {listener.event.name.removeprefix('on_')!r}, {', '.join(f'{name}=...' for name in names)}"


def _has_default(name: str, row: Event, state: Any) -> bool:
    """Return whether a fact has a meaningful value before a run."""
    fact = EVENTS.fact(name, row)
    if fact is None or name == "config":
        return True
    if not fact.everywhere:
        return name in ("dataloader_idx", "optimizer_idx")
    return name == "state" or getattr(state, "logger" if name == "experiment" else name) is not None


def _filter_counters(hook: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the filter counters of a hook; they are dropped with the hook."""
    if id(hook) not in _COUNTED:
        with contextlib.suppress(TypeError):  # a hook without weak references starts at zero each time
            weakref.finalize(hook, _COUNTED.pop, id(hook), None)
            _COUNTED[id(hook)] = {}
    return _COUNTED.get(id(hook), {})


def _call_by_name(listener: Listener, state: Any, given: dict[str, Any]) -> Any:
    named: dict[str, Any] = {}
    for parameter in inspect.signature(listener.function).parameters.values():
        fact = EVENTS.fact(parameter.name, listener.event)
        if fact is None:
            continue
        if fact.name in given:
            named[parameter.name] = given[fact.name]
        elif parameter.default is parameter.empty:
            if not _has_default(fact.name, listener.event, state):
                raise HookError(
                    f"{listener.function.__qualname__} takes {parameter.name}, without a value "
                    f"outside a run: pass it to fire({_example(listener, [parameter.name])})."
                )
            named[parameter.name] = state if fact.name == "state" else getattr(state, fact.name)
    return listener.function(**named)


@dataclass(frozen=True, slots=True)
class Played:
    """A finished tiny run: its trainer, and all recorded calls.

    trainer: the trainer of the run. calls: the calls of listeners, in order.
    """

    trainer: Trainer
    calls: list[Call]

    def events(self, hook: str | None = None) -> list[str]:
        """Return the names of the emitted events. hook: the name of one hook; None: of all listeners."""
        return [
            call.event for call in self.calls if hook is None or (call.receiver == "H" and call.name == hook)
        ]


def play(
    *hooks: Any, module: Any = None, train: Any = None, val: Any = None, **options: Unpack[OptionArguments]
) -> Played:
    """Run a tiny model with hooks and record the calls.

    It lasts one epoch of four batches, or as long as max_epochs, max_steps or max_time say. hooks: the hooks.
    module: the model; None: a TinyModule. train: a loader; None: `tiny_batches()`. val: a loader; None: no
    validation. options: those of the trainer.
    """
    torch.manual_seed(options.get("seed") or 0)
    trainer = tiny_trainer(*hooks, **options)
    with Recorder(trainer) as recorder:
        trainer.fit(module or TinyModule(), tiny_batches() if train is None else train, val)
    return Played(trainer, recorder.calls)


# ---- the smallest model, data and trainer ------------------------------------------------------------------


class TinyModule(Module):
    """A linear regression of four numbers onto two.

    lr: the learning rate of SGD.
    """

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.lr = lr

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs for a batch's inputs."""
        outputs: Tensor = self.layer(inputs)
        return outputs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean squared error."""
        return mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean squared error."""
        return mse_loss(self(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean squared error."""
        return mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def tiny_batches(n: int = 4, size: int = 3, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return batches of inputs and targets, the same every time. n: the number of batches. size: samples of
    each. seed: of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator))
        for _ in range(n)
    ]


def tiny_trainer(*hooks: Any, **options: Unpack[OptionArguments]) -> Trainer:
    """Return a trainer on the CPU without output; for one epoch, or as long as max_epochs, max_steps or
    max_time say.

    hooks: the hooks. options: those of the trainer.
    """
    quiet: OptionArguments = {"enable_progress_bar": False, "num_sanity_val_steps": 0, "checkpoint": False}
    if options.get("max_steps", -1) < 0 and options.get("max_time") is None:
        quiet["max_epochs"] = 1
    quiet.update(options)
    return Trainer(hooks=hooks, logger=False, device="cpu", **quiet)
