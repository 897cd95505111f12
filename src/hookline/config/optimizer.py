"""Optimizer and learning-rate schedule of a configuration, in place of the module's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hookline.config.classes import ConfigKey, Part, check, make, read_part, resolve
from hookline.config.files import Source
from hookline.config.permissions import Permissions
from hookline.config.problems import plain

OPTIMIZER = ConfigKey("an optimizer", (Optimizer,), home="torch.optim", skip=frozenset({"params"}))


WHEN = ("interval", "frequency", "monitor", "strict", "name")


SCHEDULER = ConfigKey(
    "a learning-rate scheduler",
    (LRScheduler,),
    home="torch.optim.lr_scheduler",
    settings=WHEN,
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


def read_optimizer(source: Source, permissions: Permissions) -> OptimizerSettings | None:
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
    part = read_part(source, "optimizer", values["optimizer"], OPTIMIZER)
    cls = resolve(source, part, OPTIMIZER, permissions)
    settings = OptimizerSettings(cls, check(source, part, cls, OPTIMIZER, permissions))
    _try(source, part, lambda: settings([nn.Parameter(_zeros())]))
    if values.get("lr_scheduler") is None:
        return settings
    part = read_part(source, "lr_scheduler", values["lr_scheduler"], SCHEDULER)
    for name in WHEN:
        if name in part.init_args:
            settings.when[name] = plain(part.init_args.pop(name))
    settings.scheduler = resolve(source, part, SCHEDULER, permissions)
    settings.scheduler_arguments = check(source, part, settings.scheduler, SCHEDULER, permissions)
    from hookline.run.optimizers import parse_optimizers

    _try(source, part, lambda: parse_optimizers(settings([nn.Parameter(_zeros())]), "lr_scheduler"))
    return settings


def _zeros() -> Any:
    import torch

    return torch.zeros(2, 2)  # Muon requires two dimensions


def _try(source: Source, part: Part, call: Any) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a scheduler warns about an optimizer that has made no step yet
        make(source, part, lambda **_: call(), {})
