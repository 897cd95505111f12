"""Parse the result of `configure_optimizers` into a list of optimizers and a list of schedules."""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hookline.distributed.sharded_norms import norm_of
from hookline.util.errors import OptionError, closest

FORMS = (
    "an optimizer; a list of optimizers; ([optimizer, ...], [scheduler, ...]); "
    "{'optimizer': ..., 'lr_scheduler': ...}; a list of such dictionaries"
)
BOTH = "([optimizer], [scheduler]), or {'optimizer': optimizer, 'lr_scheduler': scheduler}"
"""How an optimizer and its scheduler are returned or passed."""
SCHEDULE_KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name")


@dataclass(slots=True)
class Schedule:
    """A scheduler and when it advances.

    scheduler: the scheduler. optimizer_idx: the number of its optimizer. interval, frequency: advance every
    so many 'step's or 'epoch's. monitor: the metric that it needs, or None. strict: a missing metric is an
    error. name: the name for LRMonitor.
    """

    scheduler: Any
    optimizer_idx: int = 0
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None

    def __post_init__(self) -> None:
        who = f"lr_scheduler {type(self.scheduler).__name__}"
        if inspect.isclass(self.scheduler):
            name = self.scheduler.__name__
            raise OptionError(
                f"lr_scheduler {name} is a class; pass an object of it, made for the optimizer: "
                f"{name}(optimizer)."
            )
        if not hasattr(self.scheduler, "step"):
            raise OptionError(f"{who} has no step(); pass an object of torch.optim.lr_scheduler.")
        if self.interval not in ("step", "epoch"):
            raise OptionError(f"{who}: interval={self.interval!r}, allowed: 'step', 'epoch'.")
        if not isinstance(self.frequency, int) or self.frequency < 1:
            raise OptionError(f"{who}: frequency={self.frequency!r} must be a whole number from 1.")
        if self.needs_metric and self.monitor is None:
            raise OptionError(f"{who} needs a metric to watch: {{'scheduler': ..., 'monitor': 'val/loss'}}.")

    @property
    def needs_metric(self) -> bool:
        """Whether the scheduler needs a metric to advance (ReduceLROnPlateau)."""
        return isinstance(self.scheduler, ReduceLROnPlateau)


def parse_optimizers(returned: Any, module: str) -> tuple[list[Optimizer], list[Schedule]]:
    """Return optimizers and schedules from the user's result. Raise for any other form and list the forms.

    module: its class, for messages; empty if the user passed `optimizer` to fit.
    """
    if returned is None:
        return [], []
    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, dict):
        return _parse_dictionary(returned, 0, module)
    if isinstance(returned, list | tuple):
        if len(returned) == 2 and all(isinstance(part, list | tuple) for part in returned):
            optimizers = [_check_optimizer(each, module) for each in returned[0]]
            return optimizers, [
                _make_schedule(each, _index_of_optimizer(each, optimizers, module), module)
                for each in returned[1]
            ]
        if returned and all(isinstance(each, dict) for each in returned):
            parts = [_parse_dictionary(each, index, module) for index, each in enumerate(returned)]
            return [o for part in parts for o in part[0]], [s for part in parts for s in part[1]]
        return [_check_optimizer(each, module) for each in returned], []
    raise OptionError(
        f"{module}.configure_optimizers returned {type(returned).__name__}. It may return: {FORMS}."
    )


def bare(optimizer: Any) -> Any:
    """Return the optimizer without the wrappers of Accelerate, Lightning or manual optimization."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether `step` requires a closure that recomputes the loss (LBFGS)."""
    closures = [
        inspect.signature(type(each).step).parameters.get("closure") for each in (optimizer, bare(optimizer))
    ]
    return any(each is not None and each.default is each.empty for each in closures)


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients of an optimizer's parameters."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def total_norm(optimizers: list[Optimizer]) -> Tensor | None:
    """Return the norm over all gradients, on its device."""
    grads = [each.grad for each in in_module_order(optimizers) if each.grad is not None]
    return norm_of(grads) if grads else None


# ---- the order of parameters, in which a norm is summed ----------------------------------------------------


def settle_order(optimizers: list[Any], module: nn.Module) -> None:
    """Let each optimizer know the places of its parameters in the module.

    A norm has the bits of `clip_grad_norm_(module.parameters())` only if it is summed in this order, which is
    not that of several parameter groups.
    """
    places = {id(each): place for place, each in enumerate(module.parameters())}
    for optimizer in map(bare, optimizers):
        # parameters that are not of the module come last; a copy or a pickled optimizer has no such attribute
        own = [places.get(id(p), len(places)) for group in optimizer.param_groups for p in group["params"]]
        optimizer.hookline_places = own
        optimizer.hookline_order = sorted(range(len(own)), key=own.__getitem__)
        optimizer.hookline_module = weakref.ref(module)


def in_module_order(optimizers: list[Any]) -> list[Any]:
    """Return the parameters of these optimizers in the order of the module, as far as it is known."""
    parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    if len(optimizers) == 1 and len(optimizers[0].param_groups) == 1:
        return parameters
    places: list[int] = []
    order: list[int] = []
    for optimizer in map(bare, optimizers):
        known = vars(optimizer).get("hookline_places")
        if known is None:
            return parameters
        if len(known) != sum(len(group["params"]) for group in optimizer.param_groups):  # a group was added
            if (module := optimizer.hookline_module()) is None:
                return parameters
            settle_order([optimizer], module)
        places += optimizer.hookline_places
        order = optimizer.hookline_order
    if len(optimizers) > 1:
        order = sorted(range(len(places)), key=places.__getitem__)
    return [parameters[index] for index in order]


def follow_parameters(optimizers: list[Optimizer], before: dict[int, str], module: nn.Module) -> None:
    """Replace the parameters of optimizers that were made before the module was sharded.

    before: the names of the old parameters by their id.
    """
    now = dict(module.named_parameters(remove_duplicate=False))
    # a parameter of the module is not an old one: it may have the id of an old one that is gone
    current = {id(each) for each in now.values()}
    before = {number: name for number, name in before.items() if number not in current}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for index, old in enumerate(group["params"]):
                new = now[before[id(old)]] if id(old) in before else old
                if new is not old:
                    group["params"][index] = new
        if any(id(each) in before and each is not now[before[id(each)]] for each in optimizer.state):
            raise OptionError(
                f"{type(optimizer).__name__} has state from before the model was sharded, which does not fit "
                "the shards. Make a new optimizer, or resume from a checkpoint."
            )


def _parse_dictionary(
    given: dict[str, Any], index: int, module: str
) -> tuple[list[Optimizer], list[Schedule]]:
    for key in given:
        if key not in ("optimizer", "lr_scheduler"):
            raise OptionError(
                f"{_source(module)}: a dictionary with {key!r}; "
                f"allowed: 'optimizer', 'lr_scheduler'.{closest(key, ['optimizer', 'lr_scheduler'])}"
            )
    optimizer = _check_optimizer(given.get("optimizer"), module)
    scheduler = given.get("lr_scheduler")
    if scheduler is not None:
        _index_of_optimizer(scheduler, [optimizer], module)
    return [optimizer], [] if scheduler is None else [_make_schedule(scheduler, index, module)]


def _check_optimizer(given: Any, module: str) -> Optimizer:
    if isinstance(given, Optimizer):
        return given
    if isinstance(given, LRScheduler | ReduceLROnPlateau):
        raise OptionError(
            f"{_source(module)}: {type(given).__name__} is a scheduler, in the place of an optimizer. An "
            f"optimizer with its scheduler is {BOTH}."
        )
    raise OptionError(
        f"{_source(module)}: {type(given).__name__} is not a torch.optim.Optimizer. Allowed: {FORMS}."
    )


def _source(module: str) -> str:
    return f"{module}.configure_optimizers" if module else "fit(optimizer=...)"


def _make_schedule(given: Any, index: int, module: str) -> Schedule:
    if not isinstance(given, dict):
        return replace(given, optimizer_idx=index) if isinstance(given, Schedule) else Schedule(given, index)
    for key in given:
        if key not in SCHEDULE_KEYS:
            raise OptionError(
                f"{_source(module)}: unknown key {key!r} of "
                f"lr_scheduler.{closest(key, SCHEDULE_KEYS)} Keys: {', '.join(SCHEDULE_KEYS)}."
            )
    if "scheduler" not in given:
        raise OptionError(f"{_source(module)}: the lr_scheduler dictionary needs the key 'scheduler'.")
    return Schedule(optimizer_idx=index, **given)


def _index_of_optimizer(given: Any, optimizers: list[Optimizer], module: str) -> int:
    """Return the index of the scheduler's optimizer. One that was not returned would never be called."""
    scheduler = given.get("scheduler") if isinstance(given, dict) else getattr(given, "scheduler", given)
    owner = getattr(scheduler, "optimizer", None) if isinstance(scheduler, LRScheduler) else None
    if owner is None:
        return 0
    for index, optimizer in enumerate(optimizers):
        if optimizer is owner or bare(optimizer) is bare(owner):
            return index
    raise OptionError(
        f"{_source(module)}: {type(scheduler).__name__} is attached with an optimizer that "
        f"wasn't returned ({type(owner).__name__}), so its learning rates have no effect. Return that "
        "optimizer, or make the scheduler from the returned one."
    )


def copy_rate(rate: Any) -> Any:
    """Return a learning rate; copy a tensor, because schedulers change it in place."""
    return rate.detach().clone() if isinstance(rate, Tensor) else rate
