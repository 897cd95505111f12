"""Optimizer and learning-rate schedule of a configuration, in place of the module's own."""

from __future__ import annotations

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

OPTIMIZER_KEY = ConfigKey("an optimizer", (Optimizer,), home="torch.optim", skip=frozenset({"params"}))


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

    def __call__(self, params: Iterable[nn.Parameter]) -> Any:
        """Return the optimizer and its schedule in the form of `configure_optimizers`."""
        optimizer = self.optimizer(params, **self.arguments)
        if self.scheduler is None:
            return optimizer
        schedule = {"scheduler": self.scheduler(optimizer, **self.scheduler_arguments), **self.when}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

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
    settings = OptimizerSettings(cls, check_arguments(source, part, cls, OPTIMIZER_KEY, permissions))
    _try_out(source, part, lambda: settings([nn.Parameter(_zeros())]))
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


def _zeros() -> Any:
    import torch

    return torch.zeros(2, 2)  # Muon requires two dimensions


def _try_out(source: ConfigSource, part: ConfigPart, call: Any) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a scheduler warns about an optimizer that has made no step yet
        make_part(source, part, lambda **_: call(), {})
