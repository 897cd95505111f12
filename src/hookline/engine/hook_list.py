"""The hooks of a trainer by name: add, remove, switch on and off, also during a run."""

from __future__ import annotations

import heapq
import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from hookline.engine.cost import Cost, Costs, Stopwatch, budget_of
from hookline.engine.events import SIGNAL, Event, EventTable
from hookline.engine.filters import FilterSettings
from hookline.engine.foreign import Adapter, adopt
from hookline.engine.hook import TIERS, FunctionHook, Hook, check_names, definition, redefines, snake_case
from hookline.engine.listener import ON_ERROR, Listener, find_listeners, make_listener
from hookline.engine.plan import Plan
from hookline.engine.registry import not_a_hook
from hookline.util.errors import HookError, closest, described

if TYPE_CHECKING:
    from hookline.engine.changes import ChangeTable, HookChange

log = logging.getLogger("hookline")


@dataclass(slots=True, eq=False)
class Entry:
    """A hook in the list: its name, its listeners, and whether it is switched on."""

    name: str
    hook: Any
    listeners: list[Listener]
    enabled: bool = True

    def begin_budget(self) -> None:
        """Start the hook's budget; earlier costs do not count."""
        for listener in self.listeners:
            if listener.allowance is not None:
                listener.allowance.begin()

    @property
    def spent(self) -> int:
        """Return the nanoseconds of all its calls so far."""
        return sum(each.account.total for each in self.listeners)

    @property
    def given(self) -> Any:
        """Return the hook that the user added, where an adapter represents it."""
        return _unwrap_adapter(self.hook)


class Handle:
    """Returned by every registration. `remove()` undoes it; a `with` block removes the hook at its end."""

    # slots: a filter above `@trainer.on` would be lost; without a `__dict__` to set it in, it raises
    __slots__ = ("_below", "_hooks", "entry")

    def __init__(self, hooks: HookList, entry: Entry, below: Handle | None = None) -> None:
        self._hooks = hooks
        self.entry = entry
        self._below = below

    @property
    def name(self) -> str:
        """Return the hook's name."""
        return self.entry.name

    @property
    def hook(self) -> Any:
        """Return the hook itself."""
        return self.entry.given

    def remove(self) -> None:
        """Remove the hook; a second call does nothing. For stacked decorators, remove what all of them
        registered.
        """
        self._hooks.discard(self.entry)
        if self._below is not None:
            self._below.remove()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that a decorator registered."""
        return getattr(self.hook, "function", self.hook)(*args, **kwargs)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<Handle of hook {self.name!r}>"


class HookObserver(Protocol):
    """The current run, which sets up hooks that are added during it and tears down hooks that are removed."""

    def on_hook_added(self, entry: Entry) -> None:
        """Set up a hook that was added."""

    def on_hook_removed(self, entry: Entry) -> None:
        """Tear down a hook that was removed."""


class NumberedNames:
    """Numbered names such as `probe`, `probe_2`, `probe_3`: finds the lowest free one without counting from
    the beginning.
    """

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        """By base name: the first number that was never used."""
        self._freed: dict[str, list[int]] = {}
        """By base name: a heap of lower numbers that are free again."""

    def give(self, base: str, taken: Container[str]) -> str:
        """Return the lowest free name."""
        if base not in taken:
            return base
        freed = self._freed.get(base, [])
        while freed:
            if (name := f"{base}_{heapq.heappop(freed)}") not in taken:
                return name
        number = self._next.get(base, 2)
        while f"{base}_{number}" in taken:
            number += 1
        self._next[base] = number + 1
        return f"{base}_{number}"

    def free(self, name: str) -> None:
        """Make a name available again."""
        base, _, number = name.rpartition("_")
        if number.isdecimal() and int(number) < self._next.get(base, 2):
            heapq.heappush(self._freed.setdefault(base, []), int(number))


class HookList:
    """All hooks of a trainer, in the order of their registration."""

    def __init__(self, plan: Plan, table: EventTable, rank: int = 0) -> None:
        self._plan = plan
        self._table = table
        self._rank = rank
        self._entries: dict[str, Entry] = {}
        self._ids: Counter[int] = Counter()
        """How often each hook is registered, by the identity of the given object; only a function can be
        registered twice.
        """
        self._names = NumberedNames()
        self._serial = itertools.count()
        self.observer: HookObserver | None = None
        self.stopwatch = Stopwatch()
        """The training time of the run."""
        self._spent_by_removed = 0
        """Nanoseconds of hooks that were removed since training began."""
        self.dismiss: Callable[[str], None] = self.disable
        """Switches off a hook that exceeds its budget; in distributed training, on all ranks at the same
        boundary.
        """
        self.recorded_changes: ChangeTable | None = None
        """What the hooks of the current or last run have changed, if the run is audited."""
        plan.disable = self._give_up

    def __repr__(self) -> str:
        count = len(self._entries)
        head = "no hooks" if not count else "1 hook:" if count == 1 else f"{count} hooks:"
        return "\n".join([head, *map(_describe_entry, self._entries.values())])

    def _repr_html_(self) -> str:
        from hookline.util.notebook import table  # only a notebook calls this

        rows = (_describe_entry(each).strip().partition(": ") for each in self._entries.values())
        return table(("hook", "events"), ((hook, events) for hook, _, events in rows))

    # ---- lookup --------------------------------------------------------------------------------------------

    def list_hooks(self) -> list[str]:
        """Return the names of the hooks that are switched on."""
        return [entry.name for entry in self._entries.values() if entry.enabled]

    def entries(self) -> list[Entry]:
        """Return every entry, switched on or not, in the order of registration."""
        return list(self._entries.values())

    def in_order(self) -> list[Entry]:
        """Return every entry in the order in which events call the hooks."""
        return sorted(self._entries.values(), key=lambda entry: _order_of(entry.hook))

    def begin_training(self) -> None:
        """Start the stopwatch and the budgets. Set-up is not part of the training time."""
        self._spent_by_removed = 0
        self.stopwatch.start()
        for entry in self._entries.values():
            entry.begin_budget()

    def seconds_spent(self) -> float:
        """Return the seconds of all calls so far, including nested calls and hooks that were removed."""
        return (self._spent_by_removed + sum(entry.spent for entry in self._entries.values())) / 1e9

    def cost(self) -> Costs:
        """Return calls and time per hook and event so far, with the share of the training time, the most
        expensive first. `print` shows them as a table.
        """
        trained = self.stopwatch.seconds * 1e9
        rows = [
            Cost(
                entry.name,
                each.event.name,
                each.account.calls,
                each.account.total / 1e9,
                each.account.worst / 1e9,
                each.account.total / trained if trained else 0.0,
            )
            for entry in self._entries.values()
            for each in entry.listeners
            if each.account.calls and not getattr(entry.hook, "is_internal", False)
        ]
        rows.sort(key=lambda row: -row.seconds)
        watch, is_audited = self.stopwatch, self.recorded_changes is not None
        return Costs(rows, watch.seconds, watch.counted_twice, is_audited, watch.stage)

    def changes(self) -> list[HookChange]:
        """Return what each hook has changed in this run so far, by event and kind, in the order of the first
        changes.
        """
        if self.recorded_changes is None:
            raise HookError("hooks.changes() needs an audited run: pass Trainer(audit=True).")
        return self.recorded_changes.rows()

    def __iter__(self) -> Iterator[Any]:
        return iter([entry.given for entry in self._entries.values()])

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, hook: Any) -> bool:
        if isinstance(hook, str):
            return hook in self._entries
        return self._ids[id(_unwrap_adapter(hook))] > 0

    def __getitem__(self, name: str) -> Any:
        return self.entry(name).given

    def entry(self, name: str) -> Entry:
        """Return the entry of this name; raise with the known names if there is none."""
        if name not in self._entries:
            known = ", ".join(self._entries) or "none"
            raise HookError(
                f"There is no hook named {name!r}.{closest(name, self._entries)} Hooks: {known}."
                if isinstance(name, str)
                else f"hooks[{name!r}]: a hook is found by its name. Hooks: {known}. In a list, "
                "list(trainer.hooks), they have numbers."
            )
        return self._entries[name]

    def check_event(self, name: str) -> None:
        """Raise if the name is not an event of hooks."""
        self._table.named(name)

    # ---- changes -------------------------------------------------------------------------------------------

    def add(self, hook: Any, name: str | None = None) -> Handle:
        """Register a hook: an instance, a class, or a function marked with `@on`."""
        if inspect.isclass(hook):
            hook = _instance_of(hook)
        if not isinstance(hook, FunctionHook | Hook) and hasattr(hook, "__hookline_on__"):
            hook = FunctionHook(hook, hook.__hookline_on__)
        hook = adopt(hook)
        if earlier := self._earlier(hook):
            return self._replace(earlier, hook, name)
        if not isinstance(hook, FunctionHook) and hook in self:
            raise HookError(
                f"This {type(hook).__name__} is already registered; an instance can be added only once."
            )
        self._refuse_second(hook)
        entry = Entry(self._name(hook, name), hook, [])
        entry.listeners = self._listeners(entry)
        self._entries[entry.name] = entry
        self._ids[id(entry.given)] += 1
        self._join(entry)
        return Handle(self, entry)

    def _refuse_second(self, hook: Any) -> None:
        """Refuse a second hook of a kind that a trainer can have once: two progress bars would draw over each
        other.
        """
        word = getattr(hook, "only_one", "")
        for entry in self._entries.values() if word else ():
            if getattr(entry.hook, "only_one", "") == word:
                raise HookError(
                    f"A trainer can have one {word}, and the hook {entry.name!r} is one. Remove it with "
                    f"remove_hook({entry.name!r}), or do not add this {type(hook).__name__}. The trainer "
                    "adds a progress bar unless it is created with enable_progress_bar=False or with a "
                    "progress bar among its hooks."
                )

    def _earlier(self, hook: Any) -> list[Entry]:
        """Return the entries that a hook replaces, because a notebook cell was run again and defined it once
        more.
        """
        if definition(hook) is None:
            return []
        return [entry for entry in self._entries.values() if redefines(hook, entry.hook)]

    def _replace(self, earlier: list[Entry], hook: Any, name: str | None) -> Handle:
        log.debug("%s was defined again and replaces: %s", hook, ", ".join(each.name for each in earlier))
        put_back = self.set_aside(earlier)
        try:
            return self.add(hook, name)
        except BaseException:
            put_back()
            raise

    def _join(self, entry: Entry) -> None:
        """Add an entry's listeners to the plan; during a run, set the hook up first."""
        here = self._here(entry)
        if here and self.observer is not None:
            try:
                self.observer.on_hook_added(entry)
            except BaseException:
                self._forget(entry)
                self.observer.on_hook_removed(entry)
                raise
        if entry.enabled and self._entries.get(entry.name) is entry:  # its own `setup` may have removed it
            self._plan.add(here)
            if not self.is_here(entry):
                self._plan.count_elsewhere(entry.listeners)

    def _dismiss(self, entry: Entry) -> None:
        """Switch off a hook that exceeds its budget, unless it was removed."""
        if self._entries.get(entry.name) is entry:
            self.dismiss(entry.name)

    def remove(self, hook: Any) -> Any:
        """Remove a hook and return it. hook: its name, the object that was added, or its class if it has one
        hook only.
        """
        entry = self.entry(hook) if isinstance(hook, str) else self._entry_of(hook)
        self.discard(entry)
        return entry.given

    def _entry_of(self, hook: Any) -> Entry:
        """Return the entry of an object or of the only hook of a class; raise if there is none."""
        entries = self._entries.values()
        found = [
            each for each in entries if hook is each.given or hook is getattr(each.hook, "function", self)
        ]
        if not found and inspect.isclass(hook):
            found = [each for each in entries if type(each.given) is hook]
        if len(found) == 1:
            return found[0]
        which = hook.__name__ if inspect.isclass(hook) else described(hook)
        names = ", ".join(each.name for each in found or entries) or "none"
        raise HookError(
            f"{which} is not one of the hooks. Hooks: {names}."
            if not found
            else f"{len(found)} hooks are {which}: pass the object or the name of one: {names}."
        )

    def discard(self, entry: Entry) -> None:
        """Remove an entry, if it is still in the list."""
        if self._entries.get(entry.name) is not entry:
            return
        self._forget(entry)
        self._plan.remove(entry.listeners)
        if self.observer is not None:
            self.observer.on_hook_removed(entry)

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.name]
        self._spent_by_removed += entry.spent
        self._ids[id(entry.given)] -= 1
        if not self._ids[id(entry.given)]:  # another object may get the same identity later
            del self._ids[id(entry.given)]
        self._names.free(entry.name)

    def set_aside(self, entries: list[Entry]) -> Callable[[], None]:
        """Remove these entries for a while.

        The returned function puts them back in their positions, unless their names are in use by then.
        """
        before = self.entries()
        for entry in entries:
            self.discard(entry)

        def put_back() -> None:
            known = self._entries
            back = {each.name: each for each in entries if each.name not in known}
            here = known | back
            self._entries = {each.name: each for each in before if here.get(each.name) is each} | known
            for entry in back.values():
                self._ids[id(entry.given)] += 1
                self._spent_by_removed -= entry.spent
                self._join(entry)

        return put_back

    def enable(self, name: str) -> None:
        """Switch a hook on again, from the next event on."""
        entry = self.entry(name)
        if not entry.enabled:
            entry.enabled = True
            self._join(entry)
            _report_enabled(entry)

    def disable(self, name: str) -> None:
        """Switch a hook off, from the next event on. It keeps its position, name, state and teardown."""
        entry = self.entry(name)
        if entry.enabled:
            entry.enabled = False
            is_up = ("H", entry.name) in self._plan.up
            self._plan.remove(
                [each for each in entry.listeners if each.event.name != "teardown" or not is_up]
            )
            _report_enabled(entry)

    def _give_up(self, listener: Listener) -> None:
        """Switch off a hook that has failed: on this rank at once, and in distributed training on all
        ranks.
        """
        if listener.name in self._entries:
            self.disable(listener.name)
            self.dismiss(listener.name)

    # ---- creation of listeners -----------------------------------------------------------------------------

    def is_here(self, entry: Entry) -> bool:
        """Return whether the hook runs on this process's rank."""
        ranks: Any = getattr(entry.hook, "ranks", "all")
        return ranks == "all" or self._rank in ((0,) if ranks == "zero" else ranks)

    def _here(self, entry: Entry) -> list[Listener]:
        """Return the listeners that this rank calls and that are not in the plan yet."""
        return [each for each in entry.listeners if each not in self._plan] if self.is_here(entry) else []

    def _listeners(self, entry: Entry) -> list[Listener]:
        hook, serial = entry.hook, next(self._serial)
        is_ours = isinstance(hook, Hook | Adapter)
        if isinstance(hook, FunctionHook):
            events = list(dict.fromkeys(self._table.named(event) for event in hook.events))
            listeners = [self._function_listener(hook, event, entry.name) for event in events]
        else:
            _check_settings(hook, entry.name, self._table)
            listeners = (
                hook.listeners(entry.name, self._table)
                if isinstance(hook, Adapter)
                else find_listeners(hook, "H", entry.name, self._table)
            )
            if not listeners and not is_ours:
                raise HookError(not_a_hook(hook))
        # another object's `budget` is its own
        budget = budget_of(hook, entry.name, lambda: self._dismiss(entry)) if is_ours else None
        for listener in listeners:
            listener.allowance = (
                budget.allow(listener.event, listener.account) if budget is not None else None
            )
            listener.serial = serial
            listener.order = _order_of(hook)
            listener.on_error = getattr(hook, "on_error", "raise")
            listener.after_module = _is_after_module(hook, listener.event.name, self._table)
        return listeners

    def _function_listener(self, hook: FunctionHook, event: Event, owner: str) -> Listener:
        filters = hook.when.filters() if hook.when else []
        return make_listener(
            hook.function, event, self._table, receiver="H", name=owner, owner=None, filters=filters
        )

    def _name(self, hook: Any, asked: str | None) -> str:
        explicit = asked or (getattr(hook, "name", "") if not isinstance(hook, FunctionHook) else "")
        # the `name` of another package's callback may mean anything
        is_theirs = isinstance(hook, Adapter) and not asked and explicit in self._entries
        if is_theirs or (explicit and not isinstance(explicit, str)):
            explicit = ""
        if explicit and explicit in self._entries:
            raise HookError(
                f"A hook named {explicit!r} exists ({type(self[explicit]).__name__}). "
                "Give this hook another name, or remove the other one first."
            )
        if explicit:
            return explicit
        base = (
            hook.name
            if isinstance(hook, FunctionHook)
            else snake_case(type(getattr(hook, "original", hook)).__name__)
        )
        return self._names.give(base, self._entries)


class FunctionRegistration:
    """Returned by `trainer.on(...)`: call it with a function to register the function and get a handle."""

    def __init__(self, hooks: HookList, events: list[str], when: FilterSettings, name: str) -> None:
        if not events:
            raise HookError("trainer.on() needs an event: trainer.on('train_batch_end').")
        check_names("trainer.on", events)
        for event in events:
            hooks.check_event(event)
        self._hooks, self._events, self._when, self._name = hooks, events, when, name

    def __call__(self, function: Callable[..., Any]) -> Handle:
        """Register the function. For a handle, which a second `@trainer.on` receives, register the handle's
        function.
        """
        below = function if isinstance(function, Handle) else None
        function = getattr(below.hook, "function", function) if below is not None else function
        added = self._hooks.add(FunctionHook(function, self._events, self._when), self._name or None)
        return Handle(self._hooks, added.entry, below)

    def __repr__(self) -> str:
        return f"<registration for {', '.join(self._events)}: call it with a function>"


def _report_enabled(entry: Entry) -> None:
    """Call the hook's `enabled_changed`, which only hooks derived from Hook have."""
    if isinstance(entry.hook, Hook):
        entry.hook.enabled_changed(entry.enabled)


def _describe_entry(entry: Entry) -> str:
    """Return one line on a hook: its name, its type, and its events with their filters."""
    kind = "function" if isinstance(entry.hook, FunctionHook) else type(entry.given).__name__
    events = [" ".join([each.event.name, *(x.text for x in each.filters)]) for each in entry.listeners]
    return (
        f"  {entry.name} ({kind}{'' if entry.enabled else ', switched off'}): "
        f"{', '.join(events) or 'no events'}"
    )


def _instance_of(cls: type) -> Any:
    try:
        return cls()
    except TypeError as error:
        raise HookError(
            f"{cls.__name__} was passed as a class and cannot be created without arguments ({error}). "
            f"Pass an instance: {cls.__name__}(...)."
        ) from None


def _unwrap_adapter(hook: Any) -> Any:
    """Return the hook itself; for an adapter, the object that it represents."""
    return hook.original if isinstance(hook, Adapter) else hook


def _order_of(hook: Any) -> int:
    order = getattr(hook, "order", None)
    return TIERS[getattr(hook, "tier", "user")] if order is None else order


def _is_after_module(hook: Any, event: str, table: EventTable) -> bool:
    asked = getattr(hook, "after_module", None)
    if asked is None:
        return getattr(hook, "tier", "user") == "monitor" and event == "on_train_epoch_end"
    if isinstance(asked, bool):
        return asked
    return event in {table.named(each).name for each in asked}


def _check_settings(hook: Any, name: str, table: EventTable) -> None:
    def refuse(attribute: str, value: Any, allowed: str) -> None:
        raise HookError(f"hook {name!r} ({type(hook).__name__}): {attribute}={value!r}, allowed: {allowed}.")

    tier, order = getattr(hook, "tier", "user"), getattr(hook, "order", None)
    on_error, ranks = getattr(hook, "on_error", "raise"), getattr(hook, "ranks", "all")
    after_module = getattr(hook, "after_module", None)
    if tier not in TIERS:
        refuse("tier", tier, ", ".join(map(repr, TIERS)))
    if order is not None and (not isinstance(order, int) or isinstance(order, bool)):
        refuse("order", order, "a whole number, or None")
    if on_error not in ON_ERROR:
        refuse("on_error", on_error, ", ".join(map(repr, ON_ERROR)))
    if ranks not in ("all", "zero") if isinstance(ranks, str) else not isinstance(ranks, Iterable):
        refuse("ranks", ranks, "'all', 'zero' or a set of ranks")
    if isinstance(after_module, str):
        refuse("after_module", after_module, "True, False or a set of event names")
    for event in after_module if after_module is not None and not isinstance(after_module, bool) else ():
        table.named(event)
    _check_steering_setting(hook, table, refuse)


def _check_steering_setting(hook: Any, table: EventTable, refuse: Callable[[str, Any, str], None]) -> None:
    steers, takes = getattr(hook, "steers", False), [event.name for event in table if event.returns == SIGNAL]
    if not isinstance(hook, Hook) or isinstance(steers, bool):  # another object's `steers` is its own
        return
    if (
        isinstance(steers, str)
        or not isinstance(steers, Iterable)
        or {table.named(each).name for each in steers} - set(takes)
    ):
        refuse("steers", steers, f"True, False or a set of {', '.join(takes)}")
