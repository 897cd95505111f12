"""Set the learning rate as a function of the progress of the run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hookline.engine.checks import Count, Number, check_choice, checked_parameters, refused
from hookline.engine.hook import Hook
from hookline.hooks._run_length import RunLength
from hookline.hooks._settings import facts_asked
from hookline.run.optimizers import copy_rate
from hookline.util.errors import HookError, OptionError, closest, described

F = TypeVar("F", bound=Callable[..., float])

SCHEDULES: dict[str, Callable[..., float]] = {}
"""Schedules by name: functions of the time after the warm-up, from 0 to 1, that decay from 1 to 0."""
LR_FACTS = ("step", "epoch", "total")


def register_schedule(name: str) -> Callable[[F], F]:
    """Register a schedule: `@register_schedule("stairs")` on a function of `t`, from 0 to 1, with options as
    keywords.

    It returns the fraction of the learning rate above its minimum: 1 is the full rate, 0 the minimum.
    """
    if not isinstance(name, str) or not name:
        raise OptionError(f"register_schedule({name!r}): give it a name, such as 'stairs'.")

    def register(function: F) -> F:
        if name in SCHEDULES:
            raise OptionError(f"There is a schedule called {name!r} already; choose another name.")
        if next(iter(inspect.signature(function).parameters), "") != "t":
            raise OptionError(
                f"The schedule {name!r} must be a function whose first parameter is `t`, the time from 0 to "
                f"1."
            )
        SCHEDULES[name] = function
        return function

    return register


@register_schedule("constant")
def constant(t: float) -> float:
    """Keep the full rate."""
    return 1.0


@register_schedule("linear")
def linear(t: float) -> float:
    """Decay linearly."""
    return 1.0 - t


@register_schedule("cosine")
def cosine(t: float) -> float:
    """Decay along half a cosine."""
    return 0.5 * (1.0 + math.cos(math.pi * t))


@register_schedule("polynomial")
def polynomial(t: float, power: float = 2.0) -> float:
    """Decay as a power of the remaining time."""
    return float((1.0 - t) ** power)


@register_schedule("rex")
def rex(t: float) -> float:
    """Decay slowly at first, then faster: reflected exponential."""
    return (1.0 - t) / (1.0 - t / 2.0)


@register_schedule("wsd")
def wsd(t: float, decay_fraction: float = 0.1) -> float:
    """Warm-up, stable, decay: keep the full rate until the last part of the run, then decay linearly."""
    return 1.0 if t <= 1.0 - decay_fraction else (1.0 - t) / decay_fraction


class Warmup(Count):
    """A number of steps or epochs (a whole number), or a fraction of all of them (a float below 1)."""

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value, or raise."""
        if not isinstance(value, float):
            return super().__call__(name, value)
        if not 0.0 <= value < 1.0:
            raise refused(name, value, "a whole number from 0, or a fraction of the run: a float below 1.0")
        return value


class LRSchedule(Hook):
    """Sets the learning rate of every parameter group to its initial one times a factor, before each update.

    If a hook or ReduceLROnPlateau changes the learning rate, the schedule continues in proportion to the new
    rate. Other schedulers are refused, because they write a whole schedule.
    """

    tier = "builtin"

    @checked_parameters
    def __init__(
        self,
        schedule: Callable[..., float] | str = "cosine",
        total: Annotated[int, Count(1)] | None = None,
        warmup: Annotated[int | float, Warmup(0)] = 0,
        min_lr_ratio: Annotated[float, Number(0.0, 1.0)] = 0.0,
        interval: Literal["step", "epoch"] = "step",
        name: str | None = None,
        **options: Any,
    ) -> None:
        """Choose the schedule.

        schedule: a name ('constant', 'linear', 'cosine', 'wsd', 'rex', 'polynomial', or one that
        `register_schedule` added), or a function of `step`, `epoch`, `total` (any of them) that returns the
        factor itself. total: steps (or epochs) in all; None: as many as the run will make. warmup: of these,
        how many rise linearly; a float below 1 is a fraction of them: 0.1 is the first tenth. min_lr_ratio:
        the lowest factor. interval: 'step' or 'epoch', how often it changes and what total and warmup count.
        options: further ones of the schedule: `power` of 'polynomial', `decay_fraction` of 'wsd'.
        """
        super().__init__(name)
        if total is not None and warmup >= total:
            raise OptionError(
                f"LRSchedule: warmup={warmup} leaves nothing of total={total}.", option="warmup", value=warmup
            )
        self.schedule, self.total, self.warmup, self.min_lr_ratio, self.interval = (
            schedule,
            total,
            warmup,
            min_lr_ratio,
            interval,
        )
        self.options = options
        self._shape = self._find(schedule)
        self._asks = facts_asked(schedule, "LRSchedule: the function", LR_FACTS) if callable(schedule) else []
        self._length = RunLength("LRSchedule", interval)
        self._until = math.inf if total is None else total
        self._warmup = self._count_warmup()
        self._at = -1
        self._written: list[list[float]] = []
        """The rates set last, per optimizer and parameter group."""

    def _find(self, schedule: Any) -> Callable[..., Any]:
        takes: list[str] = []
        if isinstance(schedule, str):
            check_choice("LRSchedule: schedule", schedule, SCHEDULES, "A function is allowed, too.")
            takes = list(inspect.signature(SCHEDULES[schedule]).parameters)[1:]
        elif not callable(schedule):
            raise refused("LRSchedule: schedule", schedule, f"a name ({', '.join(SCHEDULES)}) or a function")
        elif self.warmup or self.min_lr_ratio:
            raise OptionError("LRSchedule: warmup and min_lr_ratio need a schedule by name, not a function.")
        for option in self.options:
            if option not in takes:
                raise OptionError(
                    f"LRSchedule: the schedule {schedule!r} has no option "
                    f"{option!r}.{closest(option, takes)} It has: {', '.join(takes) or 'none'}."
                )
        return SCHEDULES[schedule] if isinstance(schedule, str) else schedule

    def _count_warmup(self) -> int:
        """Return the steps (or epochs) of the warm-up; of a fraction, fewer than all."""
        if not isinstance(self.warmup, float):
            return self.warmup
        return 0 if self._until == math.inf else min(round(self.warmup * self._until), int(self._until) - 1)

    def factor(self, step: int, epoch: int) -> float:
        """Return the factor of the initial learning rate."""
        if callable(self.schedule):
            facts = {"step": step, "epoch": epoch, "total": self._until}
            came = self._shape(**{name: facts[name] for name in self._asks})
            try:
                return float(came)
            except (TypeError, ValueError):
                raise OptionError(
                    f"LRSchedule: the function must return the factor, a number; "
                    f"it returned {described(came)}."
                ) from None
        now = step if self.interval == "step" else epoch
        if now < self._warmup:
            return (now + 1) / (self._warmup + 1)
        t = min(1.0, (now - self._warmup) / (self._until - self._warmup)) if self._until < math.inf else 0.0
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * float(self._shape(t, **self.options))

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self._at, self._written = -1, []
            self._length.forget()

    def on_fit_start(self, trainer: Any, optimizers: list[Any], schedulers: list[Any]) -> None:
        others = sorted(
            {type(each).__name__ for each in schedulers if not isinstance(each, ReduceLROnPlateau)}
        )
        if others:
            raise HookError(
                f"LRSchedule and {', '.join(others)} would both write the learning rate, and the last one "
                "would win. Return no lr_scheduler from configure_optimizers, or leave LRSchedule out."
            )
        self._until = math.inf if self.total is None else self.total
        needs_total = self.schedule != "constant" and (not callable(self.schedule) or "total" in self._asks)
        if self.total is None and (needs_total or isinstance(self.warmup, float)):
            self._until = self._length.find(trainer)
        self._warmup = self._count_warmup()
        if self._warmup >= self._until:
            if not trainer.options.fast_dev_run:
                raise OptionError(
                    f"LRSchedule: warmup={self.warmup} leaves nothing of the run's {self._until:g} "
                    f"{self.interval}s. Pass a shorter warmup, or train for more than {self.warmup} "
                    f"{self.interval}s.",
                    option="warmup",
                    value=self.warmup,
                )
            self._warmup = int(self._until) - 1  # a trial run must start with the options of the long run
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                # the optimizer's own state keeps it over a resume
                group.setdefault("initial_lr", copy_rate(group["lr"]))

    def prepare_lr_change(self, state: Any) -> None:
        """Write the rates of the coming step, before `hookline control RUN lr` changes them."""
        self.on_train_batch_start(state.step, state.epoch, state.optimizers)
        self._at = -1  # the next batch computes them again, from the changed rates, as a resumed run does
        if any(not group["lr"] for optimizer in state.optimizers for group in optimizer.param_groups):
            raise HookError(
                f"lr: LRSchedule sets the learning rate of step {state.step} to 0, and continues in "
                "proportion to a changed rate only from a rate above 0. Change it at another step."
            )

    def on_train_batch_start(self, step: int, epoch: int, optimizers: list[Any]) -> None:
        now = step if self.interval == "step" or callable(self.schedule) else epoch
        if now == self._at:
            return
        self._at = now
        factor, written = self.factor(step, epoch), []
        for index, optimizer in enumerate(optimizers):
            before = self._written[index] if index < len(self._written) else []
            for place, group in enumerate(optimizer.param_groups):
                if "initial_lr" not in group:  # a group that was added during the run
                    group["initial_lr"] = copy_rate(group["lr"])
                elif place < len(before) and before[place] not in (0.0, group["lr"]):
                    group["initial_lr"] = group["initial_lr"] * (group["lr"] / before[place])
                if isinstance(group["lr"], Tensor):  # the same tensor, because graphs may have captured it
                    group["lr"].copy_(group["initial_lr"] * factor)
                else:
                    group["lr"] = group["initial_lr"] * factor
            written.append([copy_rate(group["lr"]) for group in optimizer.param_groups])
        self._written = written

    def state_dict(self) -> dict[str, Any]:
        return {"written": self._written, "length": self._length.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at, self._written = -1, [list(each) for each in state["written"]]
        self._length.load_state_dict(state.get("length", {}))  # checkpoints of earlier versions have none
