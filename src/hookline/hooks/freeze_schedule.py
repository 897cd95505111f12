"""Freeze parameters until a moment of the run."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hookline.engine.checks import checked_parameters, refused
from hookline.engine.filters import UNITS
from hookline.engine.hook import Hook
from hookline.hooks._settings import parse_moment
from hookline.util.errors import HookError, LossError, OptionError, closest
from hookline.util.text import list_some

Moments = tuple[tuple[int, str], ...]


class FreezeSchedule(Hook):
    """Freezes parameters by name pattern until a moment of the run: `{'backbone.*': '3 epochs', 'embed.*':
    '1000 steps'}`.

    A frozen parameter has no gradient, so its optimizer skips it, weight decay included. It stays in its
    parameter group and trains from its moment on. A parameter that did not require gradients before stays
    frozen. Step and epoch decide what is frozen, so a resumed run is right. The end of the run restores
    `requires_grad`.
    """

    tier = "builtin"
    may_listen = ("on_train_batch_start",)

    @checked_parameters
    def __init__(
        self, schedule: Mapping[str, str], batchnorm_eval: bool = False, name: str | None = None
    ) -> None:
        """Map patterns of parameters to moments.

        schedule: patterns of parameter names (`*` and `?` as in file names) and the moment from which on they
        train, in 'steps' or 'epochs'. If several patterns match a parameter, the latest moment counts.
        batchnorm_eval: batch-norm layers whose parameters are frozen also keep their running statistics.
        """
        super().__init__(name)
        if not isinstance(schedule, Mapping) or not schedule:
            raise refused(
                "FreezeSchedule: schedule", schedule, "a mapping such as {'backbone.*': '3 epochs'}"
            )
        self.moments: dict[str, tuple[int, str]] = {}
        for pattern, moment in schedule.items():
            if str(moment).strip().isdecimal():
                raise OptionError(
                    f"FreezeSchedule: {pattern!r}: {moment!r} must say steps or epochs, such as '3 epochs'."
                )
            self.moments[pattern] = parse_moment(moment, f"FreezeSchedule: {pattern!r}")
        self.batchnorm_eval = batchnorm_eval
        self._frozen: dict[Moments, dict[str, nn.Parameter]] = {}
        """Frozen parameters by their moments, so that a batch checks each moment once."""
        self._in_eval_mode: dict[Moments, dict[str, nn.Module]] = {}
        """Batch-norm layers in eval mode."""
        self._is_running = False
        if any(unit == "step" for _, unit in self.moments.values()):
            self.__dict__["on_train_batch_start"] = self._thaw

    @property
    def frozen(self) -> list[str]:
        """Return the names of the parameters that are frozen now."""
        return [name for parameters in self._frozen.values() for name in parameters]

    def on_fit_start(self, state: Any, module: nn.Module) -> None:
        """Freeze after the optimizers are made, which may get only parameters that require gradients."""
        names = [name for name, _ in module.named_parameters()]
        for pattern in self.moments:
            if not fnmatch.filter(names, pattern):
                some = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
                raise HookError(
                    f"FreezeSchedule: {pattern!r} matches no parameter of {type(module).__name__}."
                    f"{closest(pattern, names)} Parameters: {some}."
                )
        self._is_running = True
        self._freeze(state, module)

    def on_checkpoint_load(self, state: Any, module: nn.Module) -> None:
        """Freeze again after a rollback. A run that resumes freezes in on_fit_start."""
        if self._is_running:
            self._release([*self._frozen, *self._in_eval_mode])
            self._freeze(state, module)

    def _freeze(self, state: Any, module: nn.Module) -> None:
        trained = {
            id(each)
            for optimizer in state.optimizers
            for group in optimizer.param_groups
            for each in group["params"]
        }
        for name, parameter in module.named_parameters():
            moments = self._moments_of(name)
            if parameter.requires_grad and _is_early(moments, state):
                if id(parameter) not in trained:
                    raise HookError(
                        f"FreezeSchedule: {name!r} is in no optimizer, so it would never train: give it to "
                        "one in configure_optimizers, which skips frozen parameters."
                    )
                parameter.requires_grad_(False)
                parameter.grad = None
                self._frozen.setdefault(moments, {})[name] = parameter
        if self._frozen and not any(each.requires_grad for each in module.parameters()):
            raise HookError(
                f"{self._describe_frozen()}. {type(module).__name__} has no other trainable parameter, so no "
                "loss could be differentiated: leave out of the schedule what is to train from the start."
            )
        if self.batchnorm_eval:
            for path, layer in module.named_modules():
                moments = self._moments_of(f"{path}.weight")
                if isinstance(layer, _BatchNorm) and layer.training and _is_early(moments, state):
                    layer.eval()
                    self._in_eval_mode.setdefault(moments, {})[path] = layer

    def _describe_frozen(self) -> str:
        """Return the frozen parameters and their patterns in words."""
        moments = {
            pattern: f"{number} {unit}{'s' if number != 1 else ''}"
            for pattern, (number, unit) in self.moments.items()
        }
        return f"FreezeSchedule({moments}) has frozen {list_some(self.frozen)}"

    def on_exception(self, exception: BaseException) -> None:
        """Add a note about frozen parameters to the error of a loss without trainable ones."""
        if isinstance(exception, LossError) and self._frozen:
            exception.add_note(f"{self._describe_frozen()}: does the loss depend on anything else?")

    def on_train_epoch_start(self, state: Any) -> None:
        self._thaw(state)

    def _thaw(self, state: Any) -> None:
        if self._frozen or self._in_eval_mode:
            held = {*self._frozen, *self._in_eval_mode}
            self._release([moments for moments in held if not _is_early(moments, state)])

    def _release(self, over: Iterable[Moments]) -> None:
        """Let the parameters of these moments train again, and their batch-norm layers with them."""
        for moments in over:
            for parameter in self._frozen.pop(moments, {}).values():
                parameter.requires_grad_(True)
            for layer in self._in_eval_mode.pop(moments, {}).values():
                layer.train()

    def _moments_of(self, name: str) -> Moments:
        return tuple(moment for pattern, moment in self.moments.items() if fnmatch.fnmatchcase(name, pattern))

    def teardown(self) -> None:
        self._is_running = False
        self._release([*self._frozen, *self._in_eval_mode])


def _is_early(moments: Moments, state: Any) -> bool:
    return any(getattr(state, UNITS[unit]) < number for number, unit in moments)
