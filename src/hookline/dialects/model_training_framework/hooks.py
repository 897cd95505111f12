"""`TrainerHooks`: hooks whose methods get the trainer first and the rest by position, under whatever names people gave them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from hookline.errors import HookError
from hookline.events import EVENTS, Event
from hookline.filters import when
from hookline.hook import Hook

_BATCH = ("trainer", "batch", "batch_idx", "dataloader_idx", "dataloader_name")
_BATCH_OF_LOADER = ("trainer", "batch", "dataloader_idx", "dataloader_name")
_PATH = ("trainer", "checkpoint_path")

METHODS: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType({
    "on_train_start": (("trainer",),),
    "on_train_end": (("trainer",),),
    "on_training_end": (("trainer",),),
    "on_epoch_start": (("trainer", "epoch"),),
    "on_epoch_end": (("trainer", "epoch"), ("trainer", "epoch", "metrics")),
    "on_train_batch_start": (_BATCH, _BATCH_OF_LOADER),
    "on_train_batch_end": ((*_BATCH, "metrics"), (*_BATCH_OF_LOADER, "metrics")),
    "on_validation_start": (("trainer", "epoch"),),
    "on_validation_end": (("trainer", "epoch", "metrics"),),
    "on_validation_batch_start": (_BATCH, _BATCH_OF_LOADER),
    "on_validation_batch_end": ((*_BATCH, "metrics"), (*_BATCH_OF_LOADER, "metrics")),
    "on_before_forward": (("trainer",),),
    "on_after_forward": (("trainer", "duration_ms"),),
    "on_before_backward": (("trainer", "loss"),),
    "on_after_backward": (("trainer",),),
    "on_before_optimizer_step": (("trainer", "optimizer_idx"),),
    "on_after_optimizer_step": (("trainer", "optimizer_idx"),),
    "on_gradient_clip": (("trainer", "grad_norm"),),
    "on_checkpoint_save": (_PATH,),
    "on_checkpoint_load": (_PATH,),
    "on_exception": (("trainer", "exception"),),
})  # fmt: skip
"""Every method with its documented parameters, then other forms in which people have written and called it."""

for _name, _facts, _doc in (
    ("on_before_forward", (), "A training or validation step function is about to be called."),
    ("on_after_forward", ("duration_ms",), "The step function has returned, after so many milliseconds."),
):
    if _name not in EVENTS:
        EVENTS.declare(_name, _facts, _doc)


class TrainerHooks(Hook):
    """Base of hooks of the Model Training Framework: override what you need, as you did there.

    Parameters go by their names if all of them are names of facts, otherwise by their place. A method that takes fewer
    arguments than its documented form can be called directly with all of them, which is how such hooks are tested.
    """

    __hookline_base__: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for method, forms in METHODS.items():
            function = inspect.getattr_static(cls, method)
            if inspect.isfunction(function) and function is not vars(TrainerHooks)[method] and not _is_settled(function):
                setattr(cls, method, _adapted(function, method, forms, f"{cls.__name__}.{method}"))


def _stub(method: str, form: tuple[str, ...]) -> Callable[..., None]:
    """Takes what any form passes, so that `super().on_...()` works from each, and shows the documented one."""

    def stub(self: Any, *args: Any, **kwargs: Any) -> None: ...

    stub.__name__, stub.__qualname__, stub.__doc__ = method, f"TrainerHooks.{method}", _event(method).doc
    stub.__signature__ = _signature(form)  # type: ignore[attr-defined]
    return stub


def _event(method: str) -> Event:
    event = EVENTS.find(method)
    assert event is not None
    return event


def _signature(names: tuple[str, ...]) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in ("self", *names)])


def _is_settled(function: Any) -> bool:
    """Adapted already, in a class further up, or marked as something else by the user."""
    return any(hasattr(function, mark) for mark in ("__hookline_forms__", "__hookline_no_event__", "__hookline_on__"))


# ---- from a method as somebody wrote it to one that can be bound by name --------------------------------------------


def _adapted(function: Any, method: str, forms: tuple[tuple[str, ...], ...], where: str) -> Any:
    """The function itself, which then costs what any hook costs, unless it can be called with other arguments."""
    event = _event(method)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    names = tuple(_documented(each, event, forms) for each in parameters if _is_listed(each))
    free = [each for each in parameters if _is_listed(each) and EVENTS.fact(each.name, event) is None]
    takes_rest = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    needs_places = takes_rest or any(each.default is each.empty for each in free)
    if needs_places:
        names = _by_position([each for each in parameters if each.kind is not each.VAR_KEYWORD], event, forms, where)
    picks = {len(form): tuple(form.index(name) for name in names) for form in forms
             if len(form) > len(names) and set(names) <= set(form)}  # fmt: skip
    if "checkpoint_path" in names:
        function = _with_text(function, names.index("checkpoint_path"))
    if picks:
        function = _taking_all(function, picks)
    if needs_places:
        function.__signature__ = _signature(names)
    if method.startswith("on_validation"):  # the framework has no sanity check that could be taken for a result
        when(lambda sanity_checking: not sanity_checking)(function)
    function.__hookline_forms__ = names
    return function


def _taking_all(function: Any, picks: dict[int, tuple[int, ...]]) -> Any:
    @functools.wraps(function)
    def taking_all(self: Any, *args: Any, **kwargs: Any) -> Any:
        pick = picks.get(len(args))
        if pick is None:
            return function(self, *args, **kwargs)
        return function(self, *[args[place] for place in pick], **kwargs)  # the documented arguments, of which it takes some

    return taking_all


def _with_text(function: Any, place: int) -> Any:
    """A path is text to hooks of the framework."""

    @functools.wraps(function)
    def with_text(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *[str(each) if at == place else each for at, each in enumerate(args)], **kwargs)

    return with_text


def _is_listed(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def _documented(parameter: inspect.Parameter, event: Event, forms: tuple[tuple[str, ...], ...]) -> str:
    """`loader_idx` -> `dataloader_idx`: the name that the forms have for it, if they have one."""
    fact = EVENTS.fact(parameter.name, event)
    same = [name for form in forms for name in form if fact is not None and EVENTS.fact(name, event) is fact]
    return same[0] if same else parameter.name


def _by_position(
    parameters: list[inspect.Parameter], event: Event, forms: tuple[tuple[str, ...], ...], where: str
) -> tuple[str, ...]:  # fmt: skip
    """The form that a method with names of its own is written in."""
    takes_rest = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    listed = [each for each in parameters if _is_listed(each)]
    fitting = [form for form in forms if len(form) == len(listed) or (takes_rest and len(form) >= len(listed))]
    if not fitting:
        shown = " or ".join(f"(self, {', '.join(form)})" for form in forms)
        raise HookError(f"{where} takes {', '.join(each.name for each in listed)}. Its parameters may have names of their own if "
                        f"there are as many as documented: {shown}; otherwise each must be the name of a fact.")  # fmt: skip
    for parameter, name in zip(listed, fitting[0], strict=False):
        fact = EVENTS.fact(parameter.name, event)
        if fact is not None and fact is not EVENTS.fact(name, event):
            raise HookError(f"{where} has a parameter that is no name of a fact, so it gets its arguments by position: "
                            f"{', '.join(fitting[0])}. {parameter.name!r} would be the {name}: put it in its place.")  # fmt: skip
    return fitting[0]


for _name, _forms in METHODS.items():
    setattr(TrainerHooks, _name, _stub(_name, _forms[0]))
