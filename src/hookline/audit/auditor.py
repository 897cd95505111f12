"""The auditor: wraps every call of a hook and records what the call has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hookline.audit.observation import RETURNED, Change, Observation, storage
from hookline.engine.binding import Caller
from hookline.engine.changes import ChangeTable, change_text
from hookline.engine.events import REPLACE, SIGNAL, Event
from hookline.engine.listener import Listener
from hookline.engine.plan import noop
from hookline.util.errors import ObserverError, Signal

UNDECLARED = frozenset(f"aten::{name}_batch_norm" for name in ("native", "cudnn", "miopen"))
"""Operators that write to the running statistics in training mode, and do not say so in their schema."""


class InPlaceWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types some of it
    """Collects the memory that in-place operators write to, also through `.data` and `detach()`, whose
    writes no version counter of the original shows.

    It is below all other modes: a hook may enter a mode in one event and leave it in another.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code runs as it is, and the version counters show its writes."""
        return True

    def __enter__(self) -> Any:
        with lifted(_get_current_dispatch_mode_stack()):
            return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        with lifted([each for each in _get_current_dispatch_mode_stack() if each is not self]):
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for number, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._add(args[number] if number < len(args) else kwargs.get(argument.name))
        elif schema is not None and schema.name in UNDECLARED:
            named = {**dict(zip((each.name for each in schema.arguments), args, strict=False)), **kwargs}
            if named.get("training"):
                self._add([named.get("running_mean"), named.get("running_var")])
        return func(*args, **kwargs)

    def _add(self, value: Any) -> None:
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, Tensor) and (memory := storage(each)) is not None:
                self.written.add(memory)


class Frame:
    """A call of a hook that has not returned yet."""

    __slots__ = ("before", "excluded", "writes")

    def __init__(self, s: Any) -> None:
        self.writes = InPlaceWrites()
        self.excluded: set[Change] = set()
        """What events inside this call have changed: a hook may validate, and the loop calls others then."""
        self.before = Observation(s)

    def changes(self, s: Any) -> list[Change]:
        """Return what the call has changed itself."""
        found = self.before.changes(Observation(s), self.writes.written)
        return [each for each in found if each not in self.excluded]


class Auditor:
    """Wraps the calls of hooks, as a tracer of the plan.

    It observes the run before and after each call. A hook that promises to observe, and changes something,
    raises an `ObserverError`.
    """

    def __init__(
        self,
        table: ChangeTable,
        audits: Callable[[Listener], bool] = lambda listener: True,
        follows_events: bool = True,
        on_broken: Callable[[Listener, list[Change]], bool] = lambda listener, changes: False,
    ) -> None:
        """Audit the hooks for which `audits` returns True.

        on_broken: called with every change; it returns True if it has handled a broken promise.

        follows_events: attribute changes of events inside a call (a hook that validates) to their own hooks.
        """
        self.table = table
        self._audits = audits
        self._follows_events = follows_events
        self._on_broken = on_broken
        self._frames: list[Frame] = []

    def call(self, listener: Listener, call: Caller) -> Caller:
        """Wrap the call of a hook."""
        if listener.receiver != "H" or not self._audits(listener):
            return call
        frames, add, on_broken = self._frames, self.table.add, self._on_broken
        hook, event = listener.name, listener.event
        promises = is_observer(listener)
        steers = event.returns in (REPLACE, SIGNAL)

        def audited(s: Any) -> Any:
            frame = Frame(s)
            frames.append(frame)
            value = None
            try:
                with frame.writes:
                    value = call(s)
            finally:
                frames.pop()
                changes = frame.changes(s)
                if steers and value is not None:
                    changes.append((RETURNED, described_return(value)))
                if changes:
                    add(hook, event.name, s.step, changes)
                    if frames:
                        frames[-1].excluded.update(changes)
                is_handled = not changes or on_broken(listener, changes)  # also if the call has raised
            if promises and not is_handled:
                raise broken_promise(listener, changes)
            return value

        return audited

    def slot(self, event: Event, slot: Caller) -> Caller:
        """Wrap an event, because it may be emitted inside the call of a hook."""
        if slot is noop or not self._follows_events:
            return slot
        frames = self._frames

        def followed(s: Any) -> Any:
            if not frames:
                return slot(s)
            frame, before = frames[-1], Observation(s)
            try:
                with suspended(frame.writes):
                    return slot(s)
            finally:
                frame.excluded.update(before.changes(Observation(s), set()))

        return followed


@contextmanager
def lifted(modes: list[TorchDispatchMode]) -> Iterator[None]:
    """Take the modes of operators off their stack for a while; the last one is the first to see an operator.

    It calls the methods of torch's class, because those of a mode may begin and end more than the mode.
    """
    for each in reversed(modes):
        TorchDispatchMode.__exit__(each, None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for each in modes:
            TorchDispatchMode.__enter__(each)  # type: ignore[no-untyped-call]


@contextmanager
def suspended(mode: InPlaceWrites) -> Iterator[None]:
    """Stop observing operators for a while."""
    if mode not in _get_current_dispatch_mode_stack():
        yield
        return
    mode.__exit__()
    try:
        yield
    finally:
        mode.__enter__()


def is_observer(listener: Listener) -> bool:
    """Return whether a hook promises to change nothing: by its class, its function or the object."""
    owner: Any = getattr(listener.owner, "original", listener.owner)
    return bool(getattr(owner, "observes", False) or getattr(listener.function, "observes", False))


def broken_promise(listener: Listener, changes: list[Change]) -> ObserverError:
    """Return the error of a hook that promised to observe and has changed something."""
    return ObserverError(
        f"{listener.label} declares that it only observes, and has changed in {listener.event.name}: "
        f"{change_text(changes)}. Undo the change before the method returns, or remove `observes = True`."
    )


def described_return(value: Any) -> str:
    """Return a returned value in words: the name of a signal, or the type of a replacement."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return str(value) if isinstance(value, Signal) else f"a {type(value).__name__}"
