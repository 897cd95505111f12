"""Change the learning rates of a running fit so that the change lasts, whatever schedule follows.

A scheduler writes the rate at each of its steps, from its own numbers: base rates, a maximum, a minimum. They
are multiplied by the same factor as the rate, so each later rate is that factor times what it would have
been. Recursive schedulers (StepLR, ReduceLROnPlateau) continue from the new rate in any case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from hookline.run.run import Run
from hookline.util.errors import HookError, closest

PREPARE = "prepare_lr_change"
"""The method of a hook that sets learning rates: it takes the state, and writes the rates of the coming step.
It raises a HookError if the hook would overwrite a change.
"""
OF_GROUPS = ("base_lrs", "max_lrs", "min_lrs")
"""Attributes of schedulers with a number for each parameter group."""
OF_ALL = ("eta_min",)
"""Attributes of schedulers with one number for all parameter groups."""
TORCH = ("torch.optim.lr_scheduler", "torch.optim.swa_utils")
COMPUTING = ("get_lr", "step", "_get_closed_form_lr", "_update_lr")
"""The methods of a scheduler that decide the rates."""
EXAMPLES = "such as 1e-4, or a factor above 0, such as x0.5"


@dataclass(slots=True)
class GroupChange:
    """The change of one parameter group; a factor of 1 leaves it as it is."""

    number: int
    """Its number, counted over all optimizers."""
    optimizer_idx: int
    place: int
    """Its place in its optimizer."""
    values: dict[str, Any]
    """The group itself."""
    before: float = math.nan
    rate: float = math.nan
    factor: float = 1.0

    def data(self) -> dict[str, Any]:
        """Return the change for JSON."""
        name = self.values.get("name")
        return {
            "group": self.number,
            "name": None if name is None else str(name),
            "before": self.before,
            "lr": self.rate,
        }


@dataclass(frozen=True, slots=True)
class RateChange:
    """A requested change: a learning rate or a factor, for all parameter groups or for one."""

    text: str
    number: float
    is_factor: bool
    group: int | str | None

    @classmethod
    def parse(cls, value: Any, group: Any) -> RateChange:
        """Return the change for `1e-4` or `x0.5`, and the number or name of a parameter group or None."""
        text = str(value).strip() if isinstance(value, str | int | float) and value is not True else ""
        try:
            number = float(text.removeprefix("x"))
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise HookError(f"lr {value!r}: give a learning rate above 0, {EXAMPLES}.")
        if isinstance(group, str) and group.strip().isdecimal():
            group = int(group)
        if not isinstance(group, int | str | None) or isinstance(group, bool):
            raise HookError(f"lr: group={group!r} must be the number of a parameter group, or its name.")
        return cls(text, number, text.startswith("x"), group)

    def check(self, run: Run) -> list[GroupChange]:
        """Return the change of every parameter group; raise a HookError if it could not be made to last."""
        groups = [
            GroupChange(0, index, place, values)
            for index, optimizer in enumerate(run.state.optimizers)
            for place, values in enumerate(optimizer.param_groups)
        ]
        for number, group in enumerate(groups):
            group.number = number
        for group in self._chosen(groups):
            self._set_rate(group, _schedulers(run, group.optimizer_idx))
        for index in range(len(run.state.optimizers)):
            self._check_shared(
                _schedulers(run, index), [each for each in groups if each.optimizer_idx == index]
            )
        return groups

    def apply(self, run: Run) -> list[dict[str, Any]]:
        """Change the rates and their schedules; return the number, the name and the rates of each group."""
        for entry in run.state.hooks.entries():
            if entry.enabled and hasattr(type(entry.hook), PREPARE):
                getattr(entry.hook, PREPARE)(run.state)
        groups = self.check(run)
        changed = [each for each in groups if not math.isnan(each.rate)]
        for group in changed:
            _scale_group(_schedulers(run, group.optimizer_idx), group)
            _write(group.values, "lr", group.rate)
        for index, optimizer in enumerate(run.state.optimizers):
            factor = next((each.factor for each in changed if each.optimizer_idx == index), 1.0)
            for scheduler in _schedulers(run, index):
                _scale_shared(scheduler, factor)
                if hasattr(scheduler, "_last_lr"):  # which it reports
                    scheduler._last_lr = [_copied(each["lr"]) for each in optimizer.param_groups]
        return [each.data() for each in changed]

    def _chosen(self, groups: list[GroupChange]) -> list[GroupChange]:
        if self.group is None:
            return groups
        key = "name" if isinstance(self.group, str) else "number"
        names = [str(each.values["name"]) for each in groups if each.values.get("name") is not None]
        found = [
            each
            for each in groups
            if self.group == (each.number if key == "number" else each.values.get("name"))
        ]
        if not found:
            hint = closest(self.group, names) if isinstance(self.group, str) else ""
            named = f", or by name: {', '.join(dict.fromkeys(names))}" if names else ""
            known = (f"0 to {len(groups) - 1}" if len(groups) > 1 else "only 0") + named
            raise HookError(f"lr: there is no parameter group {self.group!r}.{hint} Groups: {known}.")
        return found

    def _set_rate(self, group: GroupChange, schedulers: list[Any]) -> None:
        """Set the new rate of a group, and the factor of its schedule."""
        for scheduler in schedulers:
            _check_known(scheduler)
        lr = group.values.get("lr")
        if not isinstance(lr, int | float | Tensor):
            raise HookError(f"lr: parameter group {group.number} has no learning rate: lr={lr!r}.")
        group.before = float(lr)
        group.rate = group.before * self.number if self.is_factor else self.number
        if self.is_factor:
            group.factor = self.number
        elif group.before:
            group.factor = group.rate / group.before
        elif schedulers:
            raise HookError(
                f"lr {self.text}: the learning rate of parameter group {group.number} is 0 at this step of "
                f"{type(schedulers[0]).__name__}, so no factor of the schedule makes it {self.text}. Use a "
                "factor, such as x0.5, or another step."
            )

    def _check_shared(self, schedulers: list[Any], groups: list[GroupChange]) -> None:
        """Refuse factors that differ between groups whose scheduler has one minimum for all of them."""
        if len({each.factor for each in groups}) == 1:
            return
        for scheduler in schedulers:
            for name in OF_ALL:
                if getattr(scheduler, name, 0):
                    raise HookError(
                        f"lr {self.text}: {type(scheduler).__name__} has one {name}="
                        f"{getattr(scheduler, name):g} for all {len(groups)} parameter groups, which would "
                        "get different factors. Use one factor for all groups, such as x0.5."
                    )


def _schedulers(run: Run, index: int) -> list[Any]:
    """Return all schedulers of an optimizer, with those inside SequentialLR and ChainedScheduler."""
    own = [each.scheduler for each in run.schedules if each.optimizer_idx == index]
    return list({id(each): each for scheduler in own for each in _with_inner(scheduler)}.values())


def _with_inner(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for each in getattr(scheduler, "_schedulers", ()):
        yield from _with_inner(each)


def _check_known(scheduler: Any) -> None:
    """Refuse a scheduler with its own rule: it may compute its rates from anything."""
    kind = type(scheduler)
    own = [
        each.__name__
        for each in kind.__mro__
        if each.__module__ not in TORCH and any(name in vars(each) for name in COMPUTING)
    ]
    if own or not isinstance(scheduler, LRScheduler):
        raise HookError(
            f"lr: {kind.__name__} would overwrite the learning rate at its next step, and by which rule it "
            "computes it is not known. Known are the schedulers of torch.optim.lr_scheduler and the hook "
            "LRSchedule."
        )


def _scale_group(schedulers: list[Any], group: GroupChange) -> None:
    """Multiply the numbers from which schedulers compute the later rates of a parameter group."""
    for scheduler in schedulers:
        for name in OF_GROUPS:
            numbers: list[Any] = getattr(scheduler, name, [])
            if group.place < len(numbers):
                numbers[group.place] = numbers[group.place] * group.factor
    is_one_cycle = any(isinstance(each, OneCycleLR) for each in schedulers)
    keys = {
        # without other schedulers it belongs to LRSchedule, which sees the new rate and scales it itself
        "initial_lr": any(not isinstance(each, ReduceLROnPlateau) for each in schedulers),
        "max_lr": is_one_cycle,
        "min_lr": is_one_cycle,
        "swa_lr": any(isinstance(each, SWALR) for each in schedulers),
    }
    for key, is_used in keys.items():
        if is_used and key in group.values:
            _write(group.values, key, group.values[key] * group.factor)


def _scale_shared(scheduler: Any, factor: float) -> None:
    """Multiply the numbers that a scheduler has once for all parameter groups."""
    for name in OF_ALL:
        if hasattr(scheduler, name):
            setattr(scheduler, name, getattr(scheduler, name) * factor)


def _write(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a number of a parameter group; a tensor keeps its identity, because graphs may have captured it."""
    if isinstance(group[key], Tensor):
        group[key].fill_(float(value))
    else:
        group[key] = float(value)


def _copied(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, Tensor) else rate
