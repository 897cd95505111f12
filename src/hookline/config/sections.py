"""Read the sections of a configuration: trainer options, module, data module, loggers, strategy, loss,
optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hookline.config.classes import ConfigKey, Part, check, make, read_part, resolve
from hookline.config.files import Source, named
from hookline.config.permissions import Permissions
from hookline.config.problems import ConfigError, Override, below, nearest, plain
from hookline.engine.foreign import is_data_class
from hookline.run.options import OLD_NAMES, InFile, Options, Parts, read_arguments, with_new_names
from hookline.util.errors import OptionError


def _settings() -> dict[str, tuple[Any, Any]]:
    """Return every key of the trainer's section with its type and default."""
    found = {each.name: (each.type, each.default) for each in fields(Options)}
    for each in fields(Parts):
        for note in getattr(each.type, "__metadata__", ()):
            if isinstance(note, InFile):
                found[each.name] = (note.kind, each.default)
    return found


TrainerSettings = make_dataclass("TrainerSettings", [(name, *each) for name, each in _settings().items()])
"""The trainer's arguments that a file can hold, as a class, so that `check` can check them."""


def option_names() -> list[str]:
    """Return every key of the trainer's section."""
    return [each.name for each in fields(TrainerSettings)]


def read(source: Source, permissions: Permissions) -> dict[str, Any]:
    """Return the trainer's keyword arguments."""
    given = source.values.get("trainer", {})
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise source.wrong("trainer", "must be a table of options, such as max_epochs.", given)
    for name in given:
        if name not in option_names() and name not in OLD_NAMES:
            raise source.wrong(
                f"trainer.{name}",
                f"the trainer has no such option.{nearest(name, option_names(), 'Options')}",
                given[name],
            )
    place = ConfigKey("trainer options", (TrainerSettings,))
    given = dict(given)
    strategy = given.pop("strategy", None)
    # its keys have types of their own, which a parser of `dict` does not know
    if isinstance(given.get("checkpoint"), dict):
        given["checkpoint"] = plain(given["checkpoint"])
    try:
        options = with_new_names(
            {name: str(each) if name in OLD_NAMES else each for name, each in given.items()}
        )
        part = Part("trainer", "", options, {name: f"trainer.{name}" for name in options})
        arguments = check(source, part, TrainerSettings, place, permissions)
        read_arguments(arguments)
    except ConfigError:
        raise
    except OptionError as error:
        raise source.refused(below("trainer", error), error) from None
    if strategy is not None:
        arguments["strategy"] = _strategy(source, strategy, permissions)
    return arguments


def _strategy(source: Source, given: Any, permissions: Permissions) -> Any:
    if isinstance(given, str) and "." not in given and ":" not in given:
        return str(given)
    from hookline.distributed.base import Strategy

    return _object(source, "trainer.strategy", given, ConfigKey("a strategy", (Strategy,)), permissions)


def read_module(source: Source, permissions: Permissions) -> Any:
    """Make the module."""
    from torch import nn

    if source.values.get("module") is None:
        raise source.wrong(
            "module",
            "this section is missing: the class path of a hookline.Module or torch.nn.Module, such as "
            'module = "model.Net".',
        )
    return _object(
        source, "module", source.values["module"], ConfigKey("a module", (nn.Module,)), permissions
    )


def read_datamodule(source: Source, permissions: Permissions) -> Any:
    """Make the data module, or return None if there is none."""
    from hookline.run.module import DataModule

    given = source.values.get("datamodule")
    place = ConfigKey("a data module", (DataModule,), adopts=is_data_class)
    return None if given is None else _object(source, "datamodule", given, place, permissions)


def read_loggers(source: Source, permissions: Permissions) -> Any:
    """Return the value for `Trainer(logger=...)`: a list of loggers, True for the default one, or False."""
    from hookline.loggers.base import Logger

    given = source.values.get("loggers", True)
    given = given.guess if isinstance(given, Override) else given
    if isinstance(given, bool) or given is None:
        return bool(given)
    place = ConfigKey("a logger", (Logger,), home="hookline.loggers")
    if isinstance(given, str):
        return [_object(source, "loggers", given, place, permissions)]
    given = named(given)
    if not isinstance(given, dict):
        raise source.wrong(
            "loggers", "must be a table of named loggers, a list of class paths, true or false.", given
        )
    wanted = {name: each for name, each in given.items() if plain(each) is not False}
    return [_object(source, f"loggers.{name}", each, place, permissions) for name, each in wanted.items()]


def read_function(source: Source, key: str, permissions: Permissions) -> Any:
    """Return a function by its dotted name, or an instance of a loss class."""
    given = source.values.get(key)
    if given is None:
        return None
    from torch import nn

    place = ConfigKey(f"a {key} function", (nn.Module,), home="torch.nn.functional")
    part = read_part(source, key, given, place)
    function = resolve_function(source, part, place, permissions)
    if function is not None:
        return function
    return _object(source, key, given, place, permissions)


def resolve_function(source: Source, part: Part, place: ConfigKey, permissions: Permissions) -> Any:
    """Return the function that a path names, or None if it names a class."""
    import pkgutil

    dotted = (
        part.class_path.replace(":", ".") if "." in part.class_path else f"{place.home}.{part.class_path}"
    )
    if permissions.refusal(dotted) or part.init_args:
        return None  # `resolve` raises the error
    permissions.open_folder()
    try:
        found = pkgutil.resolve_name(":".join(dotted.rpartition(".")[::2]))
    except (ImportError, AttributeError, ValueError):
        return None
    if not callable(found) or inspect.isclass(found):
        return None
    if refusal := permissions.refusal_of(dotted, found, function=True):
        raise source.wrong(part.key, refusal, part.class_path)
    return found


def _object(source: Source, key: str, given: Any, place: ConfigKey, permissions: Permissions) -> Any:
    part = read_part(source, key, given, place)
    cls = resolve(source, part, place, permissions)
    return make(source, part, cls, check(source, part, cls, place, permissions))


# ---- optimizer and learning-rate schedule ------------------------------------------------------------------


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
    from hookline.run.optimizers import parse

    _try(source, part, lambda: parse(settings([nn.Parameter(_zeros())]), "lr_scheduler"))
    return settings


def _zeros() -> Any:
    import torch

    return torch.zeros(2, 2)  # Muon requires two dimensions


def _try(source: Source, part: Part, call: Any) -> None:
    import warnings

    from hookline.config.classes import make

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a scheduler warns about an optimizer that has made no step yet
        make(source, part, lambda **_: call(), {})
