"""Optimizer and learning-rate schedule of a configuration, in place of the module's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hookline.config.classes import ConfigKey, ConfigPart, check_arguments, make_part, read_part, resolve
from hookline.config.files import ConfigSource
from hookline.config.permissions import Permissions
from hookline.config.problems import plain_values
from hookline.engine.listener import overrides
from hookline.run.parameter_groups import (
    NO_DECAY,
    ParameterGroups,
    check_rules,
    check_settings,
    parameter_groups,
)
from hookline.util.errors import OptionError

GROUP_SETTINGS = ("groups", "layer_decay", "layers")
"""Keys of `optimizer` that describe its parameter groups; see `hookline.parameter_groups`."""


OPTIMIZER_KEY = ConfigKey(
    "an optimizer", (Optimizer,), home="torch.optim", settings=GROUP_SETTINGS, skip=frozenset({"params"})
)


SCHEDULE_SETTINGS = ("interval", "frequency", "monitor", "strict", "name")


SCHEDULER_KEY = ConfigKey(
    "a learning-rate scheduler",
    (LRScheduler,),
    home="torch.optim.lr_scheduler",
    settings=SCHEDULE_SETTINGS,
    skip=frozenset({"optimizer"}),
)


@dataclass(slots=True)
class OptimizerSettings:
    """Makes the optimizer and its schedule when the parameters are known."""

    optimizer: type[Optimizer]
    arguments: dict[str, Any]
    scheduler: Any = None
    scheduler_arguments: dict[str, Any] = field(default_factory=dict)
    when: dict[str, Any] = field(default_factory=dict)
    module: nn.Module | None = None
    groups: dict[str, Any] = field(default_factory=dict)
    """The entries of `GROUP_SETTINGS` that the configuration has."""

    def __call__(self, params: Iterable[nn.Parameter]) -> Any:
        """Return the optimizer and its schedule in the form of `configure_optimizers`."""
        grouped = self.make_groups() if self.groups and self.module is not None else None
        optimizer = self.optimizer(params if grouped is None else grouped, **self.arguments)
        if self.scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.scheduler(optimizer, **self.scheduler_arguments), **self.when},
        }

    def make_groups(self) -> ParameterGroups | None:
        """Return the parameter groups of the module; None if the configuration has none."""
        if not self.groups or self.module is None:
            return None
        default = inspect.signature(self.optimizer).parameters.get("lr")
        rate = self.arguments.get("lr", None if default is None else default.default)
        return parameter_groups(
            self.module,
            self.groups.get("groups"),
            lr=rate if isinstance(rate, int | float) else None,
            layer_decay=self.groups.get("layer_decay"),
            layers=self.groups.get("layers"),
        )

    def use_for(self, module: nn.Module, source: ConfigSource) -> None:
        """Optimize this module. Refuse groups that do not fit it, if it has its layers already."""
        self.module = module
        is_complete = next(module.parameters(), None) is not None and not overrides(module, "configure_model")
        try:
            if is_complete:
                self.make_groups()
        except OptionError as error:
            raise _at_key(source, error) from error

    def configure_optimizers(self) -> Any:
        """Replace the method of a `hookline.Module`."""
        assert self.module is not None
        return self(p for p in self.module.parameters() if p.requires_grad)


def read_optimizer(source: ConfigSource, permissions: Permissions) -> OptimizerSettings | None:
    """Read `optimizer` and `lr_scheduler`, and try both on a small parameter."""
    values = source.values
    if values.get("optimizer") is None:
        if values.get("lr_scheduler") is not None:
            raise source.wrong(
                "lr_scheduler",
                "this needs an optimizer beside it; without one the module's own "
                "configure_optimizers decides.",
                values["lr_scheduler"],
            )
        return None
    part = read_part(source, "optimizer", values["optimizer"], OPTIMIZER_KEY)
    cls = resolve(source, part, OPTIMIZER_KEY, permissions)
    groups = {
        name: plain_values(part.init_args.pop(name)) for name in GROUP_SETTINGS if name in part.init_args
    }
    settings = OptimizerSettings(cls, check_arguments(source, part, cls, OPTIMIZER_KEY, permissions))
    settings.groups = groups
    _try_out(source, part, lambda: settings([nn.Parameter(_zeros())]))
    _check_groups(source, settings)
    if values.get("lr_scheduler") is None:
        return settings
    part = read_part(source, "lr_scheduler", values["lr_scheduler"], SCHEDULER_KEY)
    for name in SCHEDULE_SETTINGS:
        if name in part.init_args:
            settings.when[name] = plain_values(part.init_args.pop(name))
    settings.scheduler = resolve(source, part, SCHEDULER_KEY, permissions)
    settings.scheduler_arguments = check_arguments(
        source, part, settings.scheduler, SCHEDULER_KEY, permissions
    )
    from hookline.run.optimizers import parse_optimizers

    _try_out(source, part, lambda: parse_optimizers(settings([nn.Parameter(_zeros())]), "lr_scheduler"))
    return settings


def _check_groups(source: ConfigSource, settings: OptimizerSettings) -> None:
    """Check the rules of parameter groups before the module is made, and their settings by the optimizer."""
    try:
        rules = check_rules(settings.groups.get("groups", NO_DECAY))
    except OptionError as error:
        raise _at_key(source, error) from error
    known = settings.optimizer([nn.Parameter(_zeros())], **settings.arguments).defaults
    for pattern, values in rules.items() if "groups" in settings.groups else ():
        try:
            check_settings(values, settings.optimizer.__name__, known, repr(pattern))
        except OptionError as error:
            raise source.refused(f"optimizer.groups.{pattern}", error) from error


def _at_key(source: ConfigSource, error: OptionError) -> Exception:
    """Return the error for the key that names the rule or the option."""
    option = error.option.replace("rules", "groups", 1) if error.option.startswith("rules") else error.option
    return source.refused(f"optimizer.{option}" if option else "optimizer", error)


def _zeros() -> Any:
    import torch

    return torch.zeros(2, 2)  # Muon requires two dimensions


def _try_out(source: ConfigSource, part: ConfigPart, call: Any) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a scheduler warns about an optimizer that has made no step yet
        make_part(source, part, lambda **_: call(), {})
