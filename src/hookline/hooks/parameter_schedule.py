"""Change a hyper-parameter, an attribute or a buffer by a schedule."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from torch import Tensor

from hookline.engine.checks import Count, Number, check_choice, checked_parameters, refused
from hookline.engine.hook import Hook
from hookline.hooks._run_length import RunLength
from hookline.hooks._settings import as_patterns, current_value, facts_asked, read_moments
from hookline.hooks._targets import Target, Value, find_targets, kind_of, parse_path
from hookline.hooks.lr_schedule import LR_FACTS, SCHEDULES, LRSchedule
from hookline.run.optimizers import bare
from hookline.util.errors import HookError, OptionError, closest

WHO = "ParameterSchedule"
LARGEST = 1e18
"""The largest value that a named schedule leads to; updates with more overflow in float32."""


class ParameterSchedule(Hook):
    """Sets a value by a schedule: a hyper-parameter of an optimizer, an attribute or buffer of the module, an
    attribute of a hook.

    >>> ParameterSchedule("optimizer.weight_decay", "cosine", end=0.0)
    >>> ParameterSchedule("module.temperature", {0: 5.0, "2 epochs": 1.0})

    The path names the value: `optimizer.momentum` (in all parameter groups), `optimizer.betas[0]`,
    `optimizer[1].param_groups[0].eps`, `module.encoder.dropout.p`, `module.layers.*.dropout.p` (in every
    submodule that matches), `hooks.NAME.attribute`. It is checked before the first step. The value of a step
    is a function of step and epoch, so a resumed run is right. It is written only when it changes, and stays
    when the run is over. For the learning rate use LRSchedule.
    """

    tier = "builtin"
    may_listen = ("on_step_end", "on_train_metrics")

    @checked_parameters
    def __init__(
        self,
        target: str,
        schedule: str | Callable[..., Any] | Mapping[int | str, Any] = "linear",
        start: Annotated[float, Number(-LARGEST, LARGEST)] | None = None,
        end: Annotated[float, Number(-LARGEST, LARGEST)] | None = None,
        total: Annotated[int, Count(1)] | None = None,
        every: Literal["step", "epoch"] = "step",
        between: Literal["hold", "linear"] = "hold",
        groups: str | Sequence[str] | None = None,
        log: bool | str = False,
        name: str | None = None,
        **options: Any,
    ) -> None:
        """Choose what changes, and how.

        target: the path of the value. schedule: a name of LRSchedule ('linear', 'cosine', 'wsd', ...), which
        leads from `start` to `end`; a mapping from moments (a step, '500 steps', '2 epochs') to values; or a
        function of `step`, `epoch`, `total` (any of them) that returns the value. start: the first value of a
        named schedule; None: the value before the run. end: its last value. total: steps (or epochs) until
        `end`; None: those of the run. every: how often a named schedule or a function changes the value.
        between: a mapping holds a value until the next moment, or changes it linearly. groups: patterns of
        names of parameter groups; None: all. log: log the value, as the path or under this name. options:
        further ones of a named schedule, such as `power` of 'polynomial'.
        """
        super().__init__(name)
        parse_path(target, f"{WHO}: target")
        if groups is not None:
            as_patterns(f"{WHO}: groups", groups)
        if not isinstance(log, bool | str) or log == "":
            raise refused(f"{WHO}: log", log, "True, False or the name of a metric")
        self.target, self.schedule, self.groups, self.log = target, schedule, groups, log
        self.start, self.end, self.total, self.every, self.between = start, end, total, every, between
        self.options = options
        self.length = RunLength(WHO, every)
        self._curve = self._read_schedule()
        self._targets: list[Target] = []
        self._written: list[Value] = []
        """The value of each target that was written last."""
        self._before: tuple[int, list[Value]] = (-1, [])
        """The step at which these were written, and the values before."""
        self._start: list[Value] = []
        """The value of each target before the run, if the schedule uses it."""
        self._due: float = 0
        """The next step at which the value may change."""
        if self._curve.changes_with_steps:
            self.__dict__["on_step_end"] = self._after_update
        if log:
            self.__dict__["on_train_metrics"] = self._add_to_row

    def _read_schedule(self) -> _Shape | _Function | _Moments:
        schedule = self.schedule
        if isinstance(schedule, str):
            check_choice(f"{WHO}: schedule", schedule, SCHEDULES, "A mapping or a function is allowed, too.")
            self._refuse_idle("named", between=self.between != "hold")
            if self.end is None:
                raise OptionError(f"{WHO}: the schedule {schedule!r} needs end=, the value that it leads to.")
            return _Shape(self, SCHEDULES[schedule])
        own = dict.fromkeys(self.options, True)
        idle = {"start": self.start is not None, "end": self.end is not None, **own}
        if isinstance(schedule, Mapping) and schedule:
            self._refuse_idle("a mapping", **idle, total=self.total is not None, every=self.every == "epoch")
            return _Moments(schedule, self.between)
        if callable(schedule):
            self._refuse_idle("a function", **idle, between=self.between != "hold")
            return _Function(self, schedule)
        raise refused(
            f"{WHO}: schedule", schedule, f"a name ({', '.join(SCHEDULES)}), a mapping or a function"
        )

    def _refuse_idle(self, kind: str, **given: bool) -> None:
        """Refuse an argument that this kind of schedule does not use."""
        for argument, is_given in given.items():
            if is_given:
                raise OptionError(
                    f"{WHO}: {argument}= has no effect with a schedule that is {kind}: leave it out.",
                    option=argument,
                )

    # ---- the run -------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self._start = []
            self.length.forget()
            self.on_checkpoint_load()

    def on_checkpoint_load(self) -> None:
        """Find the places again after a rollback: an optimizer that loads a state has new groups."""
        self._targets, self._written, self._due = [], [], 0
        self._before = (-1, [])

    def on_fit_start(self, state: Any) -> None:
        """Find the places and write the first values, before the sanity check."""
        self._set(state)

    def _begin(self, state: Any) -> None:
        self._targets = find_targets(
            self.target, state.module, state.optimizers, state.hooks, self.groups, f"{WHO}: target"
        )
        self._refuse_second_writer(state)
        if len(self._start) != len(self._targets):  # not restored from a checkpoint
            self._start = [each.read() for each in self._targets] if self._curve.needs_start else []
        self._curve.begin(state.trainer)
        for place, target in enumerate(self._targets):
            for value in self._curve.examples(self._start[place] if self._start else None):
                target.check(value, WHO)
            is_own = not isinstance(target.owner, dict)  # torch writes some hyper-parameters as 0
            if isinstance(self._curve, _Shape) and is_own and type(target.held()) is int:
                raise HookError(
                    f"{WHO}: {target.label} is the whole number {target.held()}, and the schedule "
                    f"{self.schedule!r} gives fractions: write {target.held()}.0, or pass a function."
                )

    def _refuse_second_writer(self, state: Any) -> None:
        """Raise if a scheduler or another hook writes the same value, because the last one would win."""
        for optimizer in state.optimizers:
            for target in self._targets:
                if any(target.owner is group for group in optimizer.param_groups):
                    self._refuse_schedulers(target, optimizer, state)
        for other in state.hooks:
            if isinstance(other, ParameterSchedule) and other is not self:
                for target in self._targets:
                    if any(target.overlaps(each) for each in other._targets):
                        raise HookError(
                            f"Two hooks {WHO} would both write {target.label}: leave one of them out."
                        )

    def _refuse_schedulers(self, target: Target, optimizer: Any, state: Any) -> None:
        of_cycles = target.name in ("momentum", "betas")  # which some schedulers of torch write, too
        others = [
            type(each).__name__
            for each in state.schedulers
            if bare(getattr(each, "optimizer", optimizer)) is bare(optimizer)
            and (target.name == "lr" or (of_cycles and getattr(each, "cycle_momentum", False)))
        ]
        if target.name == "lr":
            others += [type(each).__name__ for each in state.hooks if isinstance(each, LRSchedule)]
        if others:
            raise HookError(
                f"{WHO} and {', '.join(others)} would both write {target.label}, and the last one would "
                "win: leave one of them out."
            )

    def prepare_lr_change(self, state: Any) -> None:
        """Refuse `hookline control RUN lr` for a learning rate that this schedule writes."""
        for target in self._targets:
            if target.name == "lr" and isinstance(target.owner, dict):
                raise HookError(
                    f"lr: {WHO} sets {target.label} by its schedule and would overwrite the change: "
                    "disable the hook first."
                )

    def on_train_epoch_start(self, state: Any) -> None:
        self._set(state)

    def _after_update(self, step: int, state: Any) -> None:
        if step >= self._due:
            self._set(state)

    def _set(self, state: Any) -> None:
        """Write the values of this step, where they have changed."""
        if not self._targets:  # the fit begins, or the hook was added during the run
            self._begin(state)
        self._due = self._curve.next_change(state.step)
        start: list[Any] = self._start or [None] * len(self._targets)
        before: list[Any] = self._written or [None] * len(self._targets)
        values = [self._curve.value(state, each) for each in start]
        for place, (target, value) in enumerate(zip(self._targets, values, strict=True)):
            if type(value) is not type(before[place]) or value != before[place]:
                values[place] = target.check(value, WHO)
                target.write(values[place])
        self._before, self._written = (state.step, self._written), values

    def _add_to_row(self, metrics: dict[str, Any], step: int) -> None:
        """Add the value of the newest update to the row of metrics that is about to be logged."""
        written_at, before = self._before
        used = before if step == written_at else self._written  # else those of the next update
        name = self.log if isinstance(self.log, str) else self.target
        if len(set(used)) == 1:
            metrics[name] = used[0]
            return
        for target, value in zip(self._targets, used, strict=False):
            metrics[f"{name}/{target.label}" if isinstance(self.log, str) else target.label] = value

    def state_dict(self) -> dict[str, Any]:
        return {"start": self._start, "length": self.length.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = list(state["start"])
        self.length.load_state_dict(state.get("length", {}))  # checkpoints of earlier versions have none


# ---- schedules ---------------------------------------------------------------------------------------------


class _Shape:
    """A named schedule that leads from a start to an end."""

    def __init__(self, hook: ParameterSchedule, shape: Callable[..., float]) -> None:
        self.hook, self.shape = hook, shape
        takes = list(inspect.signature(shape).parameters)[1:]
        for option in hook.options:
            if option not in takes:
                raise OptionError(
                    f"{WHO}: the schedule {hook.schedule!r} has no option {option!r}."
                    f"{closest(option, takes)} It has: {', '.join(takes) or 'none'}."
                )
        self.needs_start = hook.start is None
        self.changes_with_steps = hook.every == "step"
        self.total: float = math.inf

    def begin(self, trainer: Any) -> None:
        """Find the length of the schedule."""
        self.total = self.hook.total or self.hook.length.find(trainer)

    def examples(self, start: Any) -> list[Any]:
        """Return values that the schedule takes, to check them."""
        return [self.hook.end, self.hook.start if start is None else start]

    def next_change(self, step: int) -> float:
        return step if step < self.total or not self.changes_with_steps else math.inf

    def value(self, state: Any, start: Any) -> Any:
        """Return the value at this state of the run."""
        now = state.step if self.changes_with_steps else state.epochs_seen
        first, end = start if self.hook.start is None else self.hook.start, self.hook.end
        assert end is not None
        share = float(self.shape(min(1.0, now / self.total), **self.hook.options))
        return end + (first - end) * share


class _Function:
    """A function of facts that returns the value."""

    needs_start = False

    def __init__(self, hook: ParameterSchedule, function: Callable[..., Any]) -> None:
        self.hook, self.function = hook, function
        self.asks = facts_asked(function, f"{WHO}: the function", LR_FACTS)
        self.changes_with_steps = hook.every == "step"
        self.total: float = math.inf

    def begin(self, trainer: Any) -> None:
        """Find the length of the run, if the function uses it."""
        if "total" in self.asks:
            self.total = self.hook.total or self.hook.length.find(trainer)

    def examples(self, start: Any) -> list[Any]:
        """Return no values: the first one is checked when it is written."""
        return []

    def next_change(self, step: int) -> float:
        return step

    def value(self, state: Any, start: Any) -> Any:
        """Return what the function returns."""
        facts = {"step": state.step, "epoch": state.epochs_seen, "total": self.total}
        value = self.function(**{name: facts[name] for name in self.asks})
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


class _Moments:
    """Values from moments on; before the first one, the value before the run."""

    def __init__(self, given: Mapping[int | str, Any], between: str) -> None:
        self.moments = read_moments(given, f"{WHO}: schedule")
        self.steps = sorted({number for count, number, _ in self.moments if count == "step" and number})
        self.is_linear = between == "linear"
        self.needs_start = all(number for _, number, _ in self.moments)
        self.changes_with_steps = bool(self.steps)
        for _, _, value in self.moments:
            if not kind_of(value) or (self.is_linear and kind_of(value) != "number"):
                allowed = "a number" if self.is_linear else "a number, True, False or text"
                raise refused(f"{WHO}: a value of the schedule", value, allowed)
        self.points = sorted((number, value) for _, number, value in self.moments) if self.is_linear else []
        if self.is_linear:
            units = {count for count, number, _ in self.moments if number}
            if len(units) > 1 or len({number for number, _ in self.points}) < len(self.points):
                raise OptionError(
                    f"{WHO}: between='linear' needs moments in steps only or in epochs only, each once.",
                    option="schedule",
                    value=dict(given),
                )

    def begin(self, trainer: Any) -> None:
        """Do nothing: the moments say when."""

    def examples(self, start: Any) -> list[Any]:
        """Return all values."""
        return [value for _, _, value in self.moments]

    def next_change(self, step: int) -> float:
        if self.is_linear and self.steps:
            return step if step < self.steps[-1] else math.inf
        return next((each for each in self.steps if each > step), math.inf)

    def value(self, state: Any, start: Any) -> Any:
        """Return the value at this state of the run."""
        if not self.is_linear:
            value = current_value(self.moments, state)
            return start if value is None else value
        now = state.step if self.steps else state.epochs_seen
        points = self.points if start is None else [(0, start), *self.points]
        for (at, low), (then, high) in itertools.pairwise(points):
            if now < then:
                return low + (high - low) * (now - at) / (then - at)
        return points[-1][1]
