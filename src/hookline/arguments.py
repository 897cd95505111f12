"""All keyword arguments of `Trainer`: the options, and the parts that it works with."""

import ast
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from hookline.checks import check_fields
from hookline.errors import OptionError
from hookline.options import GROUPS, OPTIONS, Options, refuse_unknown_options, with_new_names

if TYPE_CHECKING:
    import torch

    from hookline.loggers.base import Logger
    from hookline.strategies.base import Strategy

F = TypeVar("F", bound=Callable[..., Any])


class InFile:
    """An argument that the `trainer` section of a configuration can hold, and the type that it has there."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


def _hook_list(name: str, hooks: Any) -> list[Any]:
    if isinstance(hooks, Mapping | str) or not hasattr(hooks, "__iter__"):
        raise OptionError(
            f"{name}= takes a list of hooks, not {type(hooks).__name__}.",
            option=name,
            value=hooks,
            allowed="a list of hooks",
        )
    return list(hooks)


@dataclass(kw_only=True, repr=False, eq=False)
class Parts:
    """Hooks, loggers and devices."""

    hooks: Annotated[Iterable[Any], _hook_list] = ()
    """Hooks: instances, classes, or functions marked with `@on`."""
    callbacks: Annotated[Iterable[Any], _hook_list] = ()
    """Another name for `hooks`; both lists are used."""
    logger: "bool | Logger | Iterable[Logger]" = True
    """A Logger or several, which receive the metrics. True: log.jsonl in the run's directory. False: none."""
    strategy: Annotated["str | Strategy", InFile(str)] = "auto"
    """How the model runs on devices and ranks (multi-GPU, distributed training): 'auto' (DDP if several
    processes were started), 'single', 'ddp', 'fsdp', or a Strategy.
    """
    device: Annotated["str | torch.device", InFile(str)] = "auto"
    """Device of this process: 'cpu', 'cuda', 'cuda:1', 'mps'. 'auto': an accelerator if there is one."""
    precision: Annotated[str | int, InFile(str | int)] = 32
    """32, or mixed precision: 'bf16-mixed' or '16-mixed'."""
    config: Any = None
    """Settings of your own. Hooks receive them as the fact `config`."""
    accounting: Annotated[bool, InFile(bool)] = True
    """Count the calls of every hook and measure their time."""

    def __post_init__(self) -> None:
        check_fields(self)


PARTS = tuple(each.name for each in fields(Parts))
ARGUMENTS = (*OPTIONS, *PARTS)
"""The names of all keyword arguments."""
DECLARATIONS = (*GROUPS, Parts)
"""The classes that declare them, by what they are about."""


def read_arguments(given: Mapping[str, Any]) -> tuple[Options, Parts]:
    """Check the keyword arguments of a trainer; an unknown one is an error with the closest right name."""
    given = with_new_names(given)
    refuse_unknown_options("Trainer", given, ARGUMENTS)
    parts = {name: given.pop(name) for name in PARTS if name in given}
    return Options(**given), Parts(**parts)


def with_signature(init: F) -> F:
    """Give `Trainer.__init__` its keyword arguments as a signature, for consoles and notebooks that complete
    calls.
    """
    parameter = inspect.Parameter
    named = [
        parameter(each.name, parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in (*fields(Options), *fields(Parts))
    ]
    signature = inspect.Signature(
        [parameter("self", parameter.POSITIONAL_OR_KEYWORD), *named], return_annotation=None
    )
    init.__signature__ = signature  # type: ignore[attr-defined]
    return init


def documentation() -> dict[str, str]:
    """Return what each argument does: the texts below the declarations, from the source because Python does
    not keep them.
    """
    found: dict[str, str] = {}
    for cls in DECLARATIONS:
        body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found
