"""`TrainerHooks`, whose methods get the trainer first and the rest by position, under any parameter names;
the framework's hook manager and its built-in hooks.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, ClassVar

from hookline.engine.events import EVENTS, Event
from hookline.engine.hook import Hook
from hookline.engine.hook_list import Handle, HookList
from hookline.hooks.console_log import ConsoleLog
from hookline.hooks.early_stopping import EarlyStopping
from hookline.hooks.gradient_monitor import GradientMonitor
from hookline.hooks.lr_monitor import LRMonitor
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.interop.adapter import Row, RowArguments
from hookline.util.errors import HookError, OptionError, closest

_BATCH_FORM = ("trainer", "batch", "batch_idx", "dataloader_idx", "dataloader_name")
_LOADER_BATCH_FORM = ("trainer", "batch", "dataloader_idx", "dataloader_name")
_PATH_FORM = ("trainer", "checkpoint_path")

FRAMEWORK_METHODS: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {
        "on_train_start": (("trainer",),),
        "on_train_end": (("trainer",),),
        "on_training_end": (("trainer",),),
        "on_epoch_start": (("trainer", "epoch"),),
        "on_epoch_end": (("trainer", "epoch"), ("trainer", "epoch", "metrics")),
        "on_train_batch_start": (_BATCH_FORM, _LOADER_BATCH_FORM),
        "on_train_batch_end": ((*_BATCH_FORM, "metrics"), (*_LOADER_BATCH_FORM, "metrics")),
        "on_validation_start": (("trainer", "epoch"),),
        "on_validation_end": (("trainer", "epoch", "metrics"),),
        "on_validation_batch_start": (_BATCH_FORM, _LOADER_BATCH_FORM),
        "on_validation_batch_end": ((*_BATCH_FORM, "metrics"), (*_LOADER_BATCH_FORM, "metrics")),
        "on_before_forward": (("trainer",),),
        "on_after_forward": (("trainer", "duration_ms"),),
        "on_before_backward": (("trainer", "loss"),),
        "on_after_backward": (("trainer",),),
        "on_before_optimizer_step": (("trainer", "optimizer_idx"),),
        "on_after_optimizer_step": (("trainer", "optimizer_idx"),),
        "on_gradient_clip": (("trainer", "grad_norm"),),
        "on_checkpoint_save": (_PATH_FORM,),
        "on_checkpoint_load": (_PATH_FORM,),
        "on_exception": (("trainer", "exception"),),
    }
)
"""Every method with its documented parameters, then other forms in which it is written and called."""

for _name, _facts, _doc in (
    ("on_before_forward", (), "A training or validation step function is about to be called."),
    ("on_after_forward", ("duration_ms",), "The step function has returned, after so many milliseconds."),
):
    if _name not in EVENTS:
        EVENTS.declare(_name, _facts, _doc)


def _row(method: str, forms: tuple[tuple[str, ...], ...]) -> Row:
    event = EVENTS.named(method)
    documented, *others = [tuple(_fact(name, event) for name in form) for form in forms]
    # the framework has no sanity check, and its hooks receive paths as text
    return Row(event.name, documented, {"path": str}, not method.startswith("on_validation"), tuple(others))


def _fact(name: str, event: Event) -> str:
    fact = EVENTS.fact(name, event)
    assert fact is not None
    return fact.name


class TrainerHooks(Hook):
    """The base of hooks of the Model Training Framework: override what you need, as you did there.

    Parameters whose names are facts get these facts, others get the argument at their position. A method that
    takes fewer arguments than its documented form can be called directly with all of them, as tests do.
    """

    __hookline_base__: ClassVar[bool] = True
    __hookline_rows__: ClassVar[Mapping[str, Row]] = {
        method: _row(method, forms) for method, forms in FRAMEWORK_METHODS.items()
    }

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for method, row in ((name, row) for name, row in cls.__hookline_rows__.items() if row.other_forms):
            written_in = next(base for base in cls.__mro__ if method in vars(base))
            function = vars(written_in)[method]
            is_new = written_in is cls or not issubclass(written_in, TrainerHooks)
            if is_new and isinstance(function, FunctionType) and (taken := _taken_positions(function, row)):
                setattr(cls, method, _accepting_longer_forms(function, taken))


def _taken_positions(function: FunctionType, row: Row) -> dict[int, tuple[int, ...]]:
    """Return, by number of arguments, which of them a method takes of a call with a longer form."""
    arguments = RowArguments(row, EVENTS[row.event], EVENTS, function.__qualname__)
    try:
        arguments.fit(MethodType(function, object()))
    except HookError:
        return {}  # it is refused when the hook is added
    taken = arguments.names
    return {
        len(form): tuple(form.index(name) for name in taken)
        for form in row.forms
        if len(form) > len(taken) and not arguments.takes_rest and set(taken) <= set(form)
    }


def _accepting_longer_forms(function: FunctionType, taken: dict[int, tuple[int, ...]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def accept_longer_forms(self: Any, *given: Any, **named: Any) -> Any:
        positions = taken.get(len(given))
        return (
            function(self, *given, **named)
            if positions is None
            else function(self, *[given[position] for position in positions], **named)
        )

    return accept_longer_forms


def _stub(method: str, form: tuple[str, ...]) -> Callable[..., None]:
    """Return a method that accepts the arguments of any form, so that `super().on_...()` works, and shows the
    documented one.
    """

    def stub(self: Any, *args: Any, **kwargs: Any) -> None: ...

    stub.__name__, stub.__qualname__ = method, f"TrainerHooks.{method}"
    stub.__doc__ = EVENTS.named(method).doc
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [inspect.Parameter(name, kind) for name in ("self", *form)]
    stub.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    return stub


for _name, _forms in FRAMEWORK_METHODS.items():
    setattr(TrainerHooks, _name, _stub(_name, _forms[0]))


# ---- `trainer.hook_manager`


class HookManager:
    """A view of the trainer's hooks: the user's run in the order of registration, before the built-in
    ones.

    hooks: the hooks of the trainer. on_error: the error policy of the configuration; None: that of each hook.
    """

    def __init__(self, hooks: HookList, on_error: str | None = None) -> None:
        self._hooks = hooks
        self._on_error = on_error
        """The error policy of the configuration; None keeps that of each hook."""

    @property
    def hooks(self) -> list[Any]:
        """Return all hooks, in the order of registration."""
        return list(self._hooks)

    def register_hook(self, hook: Any) -> Handle:
        """Add an instance, or a class without required arguments; Hookline's own hooks work as well."""
        if isinstance(hook, str):
            raise HookError(
                f"register_hook({hook!r}) takes a hook. For a class path: "
                f"HooksConfig(hook_classes=[{hook!r}])."
            )
        if self._on_error is not None:
            hook = hook() if inspect.isclass(hook) else hook
            hook.on_error = self._on_error
        return self._hooks.add(hook)

    def register_hooks(self, hooks: Iterable[Any]) -> list[Handle]:
        """Add several hooks."""
        return [self.register_hook(each) for each in hooks]

    def unregister_hook(self, hook: Any) -> None:
        """Remove a hook: the instance itself, or its name."""
        for entry in self._hooks.entries():
            if entry.given is hook or entry.name == hook:
                self._hooks.discard(entry)
                return
        known = ", ".join(each.name for each in self._hooks.entries()) or "none"
        raise HookError(f"unregister_hook({hook!r}): it is not registered. Registered: {known}.")

    def clear_hooks(self) -> None:
        """Remove all hooks."""
        for entry in self._hooks.entries():
            self._hooks.discard(entry)


# ---- the built-in hooks under the framework's names, parameters and defaults -------------------------------


LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class LoggingHook(ConsoleLog):
    """Logs when the training and its epochs start and end, and the loss of each epoch."""

    def __init__(self, log_level: str = "INFO") -> None:
        """log_level: from 'WARNING' on it logs nothing, because its lines have level INFO."""
        super().__init__(log_every_n_batches=None)
        self.log_level = log_level
        self.check()

    def check(self) -> None:
        """Reject a level that Python's logging does not have."""
        if self.log_level not in LOG_LEVELS:
            raise OptionError(
                f"LoggingHook: log_level={self.log_level!r}, allowed: {', '.join(LOG_LEVELS)}."
                f"{closest(str(self.log_level).upper(), LOG_LEVELS)}",
                option="log_level",
                value=self.log_level,
                allowed=tuple(LOG_LEVELS),
            )

    def _say(self, text: str) -> None:
        if logging.getLevelNamesMapping()[self.log_level] <= logging.INFO:
            super()._say(text)


class GradientMonitorHook(GradientMonitor):
    """Logs norms, percentiles and histograms of the gradients every n updates."""

    def __init__(
        self,
        log_frequency: int = 100,
        log_histogram: bool = False,
        log_norm: bool = True,
        param_filter: Sequence[str] | None = None,
        percentiles: Sequence[float] | None = None,
    ) -> None:
        """As in `GradientMonitor`, which has more parameters."""
        super().__init__(log_frequency, log_histogram, log_norm, param_filter, percentiles)


class ModelCheckpointHook(ModelCheckpoint):
    """Keeps the best checkpoints by a metric."""

    def __init__(
        self,
        save_top_k: int = 3,
        monitor: str = "val/loss",
        mode: str = "min",
        save_last: bool = False,
        save_on_train_epoch_end: bool | None = None,
        filename: str | None = None,
        auto_insert_metric_name: bool = True,
    ) -> None:
        """As in `ModelCheckpoint`, which has more parameters; writes to the folder `best` of the run's
        directory.
        """
        super().__init__(
            monitor,
            mode,
            save_top_k,
            save_last,
            filename,
            auto_insert_metric_name,
            save_on_train_epoch_end=save_on_train_epoch_end,
            dirpath="best",
        )


class EarlyStoppingHook(EarlyStopping):
    """Stops the run when a metric stops improving."""

    def __init__(
        self,
        monitor: str = "val/loss",
        patience: int = 10,
        mode: str = "min",
        min_delta: float = 0.0001,
        check_on_train_epoch_end: bool | None = None,
        strict: bool = True,
        verbose: bool = False,
    ) -> None:
        """As in `EarlyStopping`, which has more parameters; patience counts checks, one per epoch."""
        super().__init__(monitor, patience, mode, min_delta, check_on_train_epoch_end, strict, verbose)


class LRMonitorHook(LRMonitor):
    """Logs learning rates, and on request momentum and weight decay."""
