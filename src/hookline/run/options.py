"""The trainer's options. Each is declared once: its name, type, check, default and doc.

`rule_of` reads the checks from the annotations. `tools/generate.py` writes the keyword arguments for type
checkers (`run/_arguments.py`) and the tables of the docs, and `hookline.config` derives the keys of a
configuration and their JSON schema.
"""

import ast
import datetime
import inspect
import itertools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from hookline.engine.checks import (
    Above,
    AtLeast,
    Duration,
    Function,
    OnDisk,
    Portion,
    Rule,
    Table,
    check_fields,
    check_layers,
    check_precision,
    check_seed,
    refused,
)
from hookline.engine.events import EVENTS
from hookline.engine.foreign import is_hook_class
from hookline.engine.hook import Hook
from hookline.engine.registry import not_a_hook
from hookline.run.option_tables import (
    Audit,
    Digests,
    Evaluation,
    Hangs,
    Saving,
    parse_audit,
    parse_checkpoint,
    parse_digest,
    parse_table,
    table_rules,
    with_new_names,
)
from hookline.util.errors import ELSEWHERE, OptionError, closest

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hookline.distributed.base import Strategy
    from hookline.engine.foreign import LoggerLike
    from hookline.loggers.base import Logger

COMPILE = (
    "True, False, 'step' (the whole training step) or a dictionary of arguments for torch.compile, with "
    "step=True for the whole training step or blocks= for some layers"
)


class InFile:
    """An argument that the `trainer` section of a configuration can hold, and the type that it has there."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


Time = Annotated[str | float | datetime.timedelta, Duration()]
BatchLimit = Annotated[int | float, Portion()]


# ---- checks of single options ------------------------------------------------------------------------------


def _parsed_by(parse: Callable[[Any, str], Any]) -> Rule:
    """Return the check of an option that keeps what was given, if it can be parsed."""

    def check(name: str, value: Any) -> Any:
        parse(value, name)
        return value

    return check


def _hangs(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        parse_table(name, value)
        return dict(value)
    return None if value is None else Duration(f" Or a table of {', '.join(table_rules(name))}.")(name, value)


def _evaluates(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise refused(name, value, f"a table of {', '.join(table_rules(name))}")
    parse_table(name, value)
    return dict(value)


def _recomputes(name: str, value: Any) -> Any:
    return value if isinstance(value, bool) else check_layers(name, value)


def _compiles(name: str, value: Any) -> Any:
    import torch

    Table(COMPILE)(name, value)
    arguments = list(inspect.signature(torch.compile).parameters)[1:]  # the first one is the model
    refuse_unknown_options(name, value, (*arguments, "step", "blocks"))
    if "blocks" not in value:
        return value
    if value.get("step"):
        raise OptionError(
            f"{name}={value!r}: blocks compiles some layers, and step=True the whole training step: leave "
            "one of them out.",
            option=name,
            value=value,
        )
    blocks = value["blocks"]
    blocks = blocks if blocks is True else check_layers(f"{name}: blocks", blocks)
    if not blocks:  # it would compile the whole model
        raise refused(f"{name}: blocks", value["blocks"], "True or at least one choice of layers")
    return {**value, "blocks": blocks}


# ---- the options, by what they are about -------------------------------------------------------------------
# The groups are bases of `Options`, which has their fields in its slots: their own are empty, or the layouts
# would conflict. Only fields: methods are made for `Options` alone, because making them takes most of the
# time of a start.


@dataclass(init=False, repr=False, eq=False)
class HowLong:
    """How long to train."""

    __slots__ = ()

    max_epochs: Annotated[int, AtLeast(-1)] | None = None
    """Number of epochs. None: 1000, or no limit if max_steps or max_time is given. -1: no limit."""
    min_epochs: Annotated[int, AtLeast(0)] = 0
    """Ignore requests to stop before this many epochs are complete."""
    max_steps: Annotated[int, AtLeast(-1)] = -1
    """Number of optimizer updates. -1: no limit."""
    min_steps: Annotated[int, AtLeast(0)] = 0
    """Ignore requests to stop before this many optimizer updates."""
    max_time: Time | None = None
    """Limit of the training time: seconds, '2 hours', 'DD:HH:MM:SS' or a timedelta."""


@dataclass(init=False, repr=False, eq=False)
class UpdateOptions:
    """Gradient accumulation and gradient clipping."""

    __slots__ = ()

    accumulate_grad_batches: Annotated[int, AtLeast(1)] = 1
    """Gradient accumulation: number of batches whose gradients make one optimizer update."""
    accumulate_by: Literal["batches", "samples", "tokens"] = "batches"
    """Weight of a batch in the update: 'batches' (all batches count the same), 'samples' or 'tokens' (the
    update is that of one large batch, over all ranks, if the loss is a mean over samples or tokens).
    """
    count_tokens: (
        Annotated[Callable[[Any], int], Function("a function from a batch to its number of tokens")] | None
    ) = None
    """Function that returns the number of tokens of a batch. None: count the elements of `input_ids`, or of
    the first tensor.
    """
    gradient_clip_val: Annotated[float, Above(0, ", or None for no clipping")] | None = None
    """Gradient clipping: the largest norm or value of the gradients of an update. None: no clipping."""
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    """'norm' clips the norm of all gradients together, 'value' clips each element."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """When the loss is NaN or infinite: 'stop' ends the run, one step late and without a device sync; 'skip'
    skips the update and reads from the device once per update.
    """


@dataclass(init=False, repr=False, eq=False)
class Validation:
    """Validation."""

    __slots__ = ()

    val_check_interval: Annotated[int | float, Portion(zero=False)] = 1.0
    """Validate after this many batches, or after this fraction of an epoch."""
    check_val_every_n_epoch: Annotated[int, AtLeast(1)] = 1
    """Validate in every n-th epoch only."""
    num_sanity_val_steps: Annotated[int, AtLeast(-1)] = 2
    """Number of validation batches to run before training, as a sanity check. -1: all."""
    evaluation: Annotated[dict[str, Any], _evaluates] | None = None
    """How validation, test and prediction run. A dictionary of `inference_mode` (False; True: run the steps
    under torch.inference_mode instead of torch.no_grad) and `aggregation`, how results of several loaders are
    combined: 'micro' (mean over samples), 'macro' (mean over loaders), 'primary' (the first loader),
    'primary:NAME' (that loader), or a function from {loader: {metric: value}} to {metric: value}.
    """


@dataclass(init=False, repr=False, eq=False)
class Limits:
    """Limits and trial runs."""

    __slots__ = ()

    limit_train_batches: BatchLimit = 1.0
    """Limit of the batches of a training epoch: a number, or a fraction of the epoch. 0: none."""
    limit_val_batches: BatchLimit = 1.0
    """The same for each validation loader."""
    limit_test_batches: BatchLimit = 1.0
    """The same for each test loader."""
    limit_predict_batches: BatchLimit = 1.0
    """The same for each prediction loader."""
    overfit_batches: BatchLimit = 0.0
    """Train on the same few batches (a number or a fraction) in every epoch, without shuffling. Validation is
    limited to as many batches.
    """
    fast_dev_run: bool | Annotated[int, AtLeast(0, "True, False or a number of batches")] = False
    """Trial run: run n batches of each loader once, without logging and without checkpoints."""
    prefetch_batches: Annotated[int, AtLeast(0)] = 0
    """Number of batches that a thread fetches and moves to the device in advance. For loaders with workers,
    and lists.
    """


@dataclass(init=False, repr=False, eq=False)
class Around:
    """Output, seeds and files."""

    __slots__ = ()

    log_every_n_steps: Annotated[int, AtLeast(1)] = 50
    """Number of updates between two logged rows of metrics."""
    enable_progress_bar: bool = True
    """Show a progress bar, and a table of the cost of hooks at the end of a fit."""
    digest: Annotated[bool | int | str | dict[str, Any], _parsed_by(parse_digest)] = False
    """Write digests of the batch, loss, gradients, weights and random streams of steps, for `hookline
    diverge`: 'every 10 steps', a number of steps, or True: every step. Or a dictionary of `every` (1; such an
    interval) and `modules` (False; True: also of every module and parameter).
    """
    control: bool = True
    """Listen on a socket in the run's directory, for this user to watch and control the fit."""
    seed: Annotated[int, check_seed] | None = None
    """Seed of the random generators of Python, numpy and torch, set when a run begins. None: do not seed."""
    deterministic: bool = False
    """Use only deterministic kernels during runs."""
    compile: bool | Literal["step"] | Annotated[dict[str, Any], _compiles] = False
    """Compile the model with torch.compile. A dictionary: its arguments. 'step', or a dictionary with
    step=True: compile the whole training step. A dictionary with `blocks`: compile only the layers of these
    names or classes.
    """
    activation_checkpointing: Annotated[
        bool | str | type | Callable[[str, Any], bool] | Sequence[Any],
        InFile(bool | str | list[str]),
        _recomputes,
    ] = False
    """Activation checkpointing: layers that recompute their activations in the backward pass, to save memory.
    True: the items of every ModuleList (with FSDP, the layers of `wrap`). Or a name pattern, a class name, a
    class, a function of name and module, or a list of them.
    """
    default_root_dir: Annotated[str | Path, OnDisk()] = "."
    """Directory in which the directories of runs are created."""
    run_dir: Annotated[str | Path, OnDisk()] | None = None
    """Directory of the run: log, checkpoints, reports. None: default_root_dir/runs/NAME."""


@dataclass(init=False, repr=False, eq=False)
class Failures:
    """Checkpoints and failures."""

    __slots__ = ()

    checkpoint: Annotated[bool | str | dict[str, Any], _parsed_by(parse_checkpoint)] = True
    """True: keep the newest state of a fit as `checkpoints/last`. False: only hooks save. 'async': write
    checkpoints in the background. Or a dictionary of `last` (True), `every` ("5 minutes"), `write` ('sync',
    'async'), `on_error` ('raise', 'warn') and `weights` ('all'; 'trainable' leaves out frozen weights, as of
    the base model of a LoRA adapter).
    """
    grace_period: Time | None = "5 minutes"
    """Time limit for the current step and the save after SIGTERM, SIGUSR1 or Ctrl-C. None: no limit."""
    hang_after: Annotated[str | float | datetime.timedelta | dict[str, Any] | None, _hangs] = "10 minutes"
    """Watchdog for hangs: report a hook, step, loader, logger or save that takes longer, with its stack.
    None: no watchdog. Or a dictionary of `after` (such a time) and `action`: 'warn' reports the hang, 'abort'
    also ends the run.
    """


GROUPS: tuple[type, ...] = (HowLong, UpdateOptions, Validation, Limits, Around, Failures)


@dataclass(slots=True, kw_only=True)
class Options(
    Failures, Around, Limits, Validation, UpdateOptions, HowLong
):  # a dataclass has the fields of its last base first
    """How long to train, when to validate, what to limit, where to write."""

    def __post_init__(self) -> None:
        if self.check_val_every_n_epoch is None:  # as in Lightning: count batches through the run
            raise OptionError(
                "check_val_every_n_epoch=None must be a whole number from 1, because val_check_interval "
                "counts the batches of an epoch. To validate every 500 updates of a run, add a hook: "
                "`@every('500 steps') def on_step_end(self, trainer): trainer.validate()`.",
                option="check_val_every_n_epoch",
                allowed="a whole number from 1",
            )
        check_fields(self)
        if self.fast_dev_run:
            batches = int(self.fast_dev_run)
            self.max_epochs, self.max_steps, self.num_sanity_val_steps = 1, batches, 0
            self.limit_train_batches = self.limit_val_batches = batches
            self.limit_test_batches = self.limit_predict_batches = batches
            self.accumulate_grad_batches, self.val_check_interval, self.check_val_every_n_epoch = 1, 1.0, 1
        if self.overfit_batches:
            self.limit_train_batches = self.overfit_batches
        if self.max_epochs is None:
            self.max_epochs = -1 if self.max_steps >= 0 or self.max_time is not None else 1000
        for what in ("epochs", "steps"):
            least, most = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if 0 <= most < least:
                raise OptionError(
                    f"min_{what}={least} is more than max_{what}={most}.",
                    option=f"min_{what}",
                    value=least,
                    allowed=f"at most max_{what}={most}",
                )

    @property
    def saving(self) -> Saving:
        """`checkpoint` as settings."""
        return parse_checkpoint(self.checkpoint)

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds."""
        return _as_seconds(self.max_time)

    @property
    def grace_seconds(self) -> float | None:
        """`grace_period` in seconds."""
        return _as_seconds(self.grace_period)

    @property
    def hangs(self) -> Hangs:
        """`hang_after` as settings."""
        if isinstance(self.hang_after, dict):
            return parse_table("hang_after", self.hang_after)  # type: ignore[no-any-return]
        return Hangs(_as_seconds(self.hang_after))

    @property
    def digests(self) -> Digests:
        """`digest` as settings."""
        return parse_digest(self.digest)

    @property
    def evaluating(self) -> Evaluation:
        """`evaluation` as settings."""
        return parse_table("evaluation", self.evaluation or {})  # type: ignore[no-any-return]


def _as_seconds(parsed: Any) -> float | None:
    assert parsed is None or isinstance(parsed, float)
    return parsed


ACCUMULATE_BY: tuple[str, ...] = typing.get_args(UpdateOptions.__annotations__["accumulate_by"])
OPTION_NAMES = tuple(each.name for each in fields(Options))
"""The names, in the order of the groups."""


def make_options(given: Mapping[str, Any]) -> Options:
    """Return the options from keyword arguments. Raise for an unknown one, with the closest right name."""
    given = with_new_names(given)
    refuse_unknown_options("Trainer", given, OPTION_NAMES)
    return Options(**given)


def refuse_unknown_options(
    owner: str,
    given: Iterable[str],
    known: Iterable[str],
    listed: str = "",
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise for names that are not options, each with the closest right one; without one, with all options.

    listed: where all options are listed. elsewhere: where names belong that are not options.
    """
    names = tuple(known)
    unknown = {
        name: f" {elsewhere[name]}" if name in elsewhere else closest(name, names)
        for name in given
        if name not in names
    }
    if unknown:
        problems = "\n".join(f"{owner} has no option {name!r}.{near}" for name, near in unknown.items())
        rest = listed if all(unknown.values()) else f" Options: {', '.join(names)}."
        raise OptionError(problems + rest, option=next(iter(unknown)), allowed=names)


OF_FIT = ("module", "train", "val", "datamodule", "loss", "step", "optimizer", "mixture", "resume")
_HOOK = "It is an argument of a hook: hooks=["
OF_OTHERS = {
    **{name: f"It is an argument of fit: trainer.fit(..., {name}=...)." for name in OF_FIT},
    **dict.fromkeys(("lr", "learning_rate"), "It belongs to the optimizer: torch.optim.Adam(..., lr=...)."),
    **{
        name: f"It belongs to the loader: DataLoader(dataset, {name}=...)."
        for name in ("batch_size", "num_workers", "shuffle")
    },
    "model": "It is the first argument of fit: trainer.fit(model, ...).",
    "patience": f"{_HOOK}EarlyStopping(patience=...)].",
    "save_top_k": f"{_HOOK}ModelCheckpoint(save_top_k=...)].",
}
"""What is taken for an option of the trainer, or an argument of its methods, and where it belongs."""
SCHEDULERS = ("scheduler", "schedulers", "lr_scheduler", "lr_schedulers")
WITH_OPTIMIZER = (
    "Pass a scheduler together with its optimizer: optimizer={'optimizer': optimizer, 'lr_scheduler': "
    "scheduler}. Or use the hook LRSchedule."
)


def refuse_unknown(call: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise for arguments that a call does not have, with the closest right name."""
    for name, value in given.items():
        known = [
            each.name
            for each in inspect.signature(call).parameters.values()
            if each.kind is not each.VAR_KEYWORD
        ][1:]
        meant = (name, *ELSEWHERE.get(name, ()))
        options = [each for each in meant if each in ARGUMENT_NAMES]
        hint = closest(name, known)
        if name in SCHEDULERS and "optimizer" in known:
            hint = f" {WITH_OPTIMIZER}"
        elif options and not any(each in known for each in meant):
            hint = f" It is an option of Trainer: Trainer({options[0]}=...)."
        elif name in OF_OTHERS and name not in OF_FIT:
            hint = f" {OF_OTHERS[name]}"
        for other in given:
            hint += f" Nor {other!r}.{closest(other, known)}" if other != name else ""
        raise OptionError(
            f"{call.__name__}() has no argument {name!r}.{hint} Arguments: {', '.join(known)}.",
            option=name,
            value=value,
            allowed=tuple(known),
        )


def check_module(call: str, module: Any) -> "nn.Module":
    """Return the module that a call is for, or raise; None: it has none."""
    from torch import nn

    if module is None:
        raise OptionError(f"{call}() needs a module: nothing was run before.")
    if inspect.isclass(module) and issubclass(module, nn.Module):
        raise OptionError(f"{call}(): {module.__name__} is a class; pass an object: {module.__name__}()")
    if not isinstance(module, nn.Module):
        raise OptionError(f"{call}() takes a hookline.Module or any nn.Module, not {type(module).__name__}.")
    return module


# ---- All keyword arguments of `Trainer`


F = TypeVar("F", bound=Callable[..., Any])


def hook_list(name: str, hooks: Any) -> list[Any]:
    """Return the hooks as a list: one hook, a class or a marked function stands for a list of it."""
    if hooks is None:
        return []
    if isinstance(hooks, type | Hook) or is_hook_class(type(hooks)) or hasattr(hooks, "__hookline_on__"):
        return [hooks]
    is_list = hasattr(hooks, "__iter__") and not isinstance(hooks, Mapping | str)
    if not is_list and not any(EVENTS.find(each, "H") for each in dir(hooks)):
        hint = f" {not_a_hook(hooks)}" if isinstance(hooks, str) else ""
        raise OptionError(
            f"{name}= takes a hook or a list of hooks, not {type(hooks).__name__}.{hint}",
            option=name,
            value=hooks,
            allowed="a hook or a list of hooks",
        )
    return list(hooks) if is_list else [hooks]


@dataclass(kw_only=True, repr=False, eq=False)
class TrainerParts:
    """Hooks, loggers and devices."""

    hooks: Annotated[Iterable[Any], hook_list] = ()
    """One hook or a list: instances, classes (created without arguments), or functions marked with `@on`.
    None: no hooks.
    """
    callbacks: Annotated[Iterable[Any], hook_list] = ()
    """Another name for `hooks`; both are used."""
    logger: "bool | Logger | LoggerLike | Iterable[Logger | LoggerLike] | None" = True
    """A Logger or several, also Lightning's, which receive the metrics. True: log.jsonl in the run's
    directory. False or None: none.
    """
    strategy: Annotated["str | Strategy", InFile(str)] = "auto"
    """How the model runs on devices and ranks (multi-GPU, distributed training): 'auto' (DDP if several
    processes were started), 'single', 'ddp', 'fsdp', or a Strategy.
    """
    device: Annotated["str | torch.device", InFile(str)] = "auto"
    """Device of this process: 'cpu', 'cuda', 'cuda:1', 'mps'. 'auto': an accelerator if there is one."""
    precision: Annotated[str | int, check_precision, InFile(str | int)] = 32
    """32; mixed precision: 'bf16-mixed' or '16-mixed'; or one type for parameters, batches and new tensors:
    64, 'bf16-true' or '16-true'.
    """
    config: Any = None
    """Settings of your own. Hooks receive them as the fact `config`."""
    audit: Annotated[bool | dict[str, Any], InFile(bool | dict[str, Any]), _parsed_by(parse_audit)] = False
    """True: report what each hook changed: weights, gradients, modes, the batch, random streams and more. Or
    a dictionary of `changes` (False; this report), `costs` (True; count the calls of every hook and measure
    their time) and `trace` (False; True: write every event and call as a timeline for Perfetto to trace.json
    in the run's directory; or the path of a file).
    """

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def auditing(self) -> Audit:
        """`audit` as settings."""
        return parse_audit(self.audit)


PART_NAMES = tuple(each.name for each in fields(TrainerParts))
ARGUMENT_NAMES = (*OPTION_NAMES, *PART_NAMES)
"""The names of all keyword arguments."""
DECLARATIONS = (*GROUPS, TrainerParts)
"""The classes that declare them, by what they are about."""


def read_arguments(given: Mapping[str, Any]) -> tuple[Options, TrainerParts]:
    """Check the keyword arguments of a trainer; an unknown one is an error with the closest right name."""
    given = with_new_names(given)
    listed = " help(hookline.Trainer) lists all options."
    refuse_unknown_options("Trainer", given, ARGUMENT_NAMES, listed, OF_OTHERS)
    parts = {name: given.pop(name) for name in PART_NAMES if name in given}
    return Options(**given), TrainerParts(**parts)


def with_signature(init: F) -> F:
    """Give `Trainer.__init__` its keyword arguments as a signature, for consoles and notebooks that complete
    calls.
    """
    parameter = inspect.Parameter
    named = [
        parameter(each.name, parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in (*fields(Options), *fields(TrainerParts))
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
