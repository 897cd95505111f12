"""Read the sections of a configuration: trainer options, module, data module, loggers, strategy, loss,
optimizer.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, make_dataclass
from typing import Any

from hookline.config.classes import (
    ConfigKey,
    ConfigPart,
    check_arguments,
    is_made_to_check,
    make_part,
    read_part,
    resolve,
)
from hookline.config.files import ConfigSource, name_members
from hookline.config.permissions import Permissions
from hookline.config.problems import ConfigError, Override, Problems, key_below, nearest, plain_values
from hookline.engine.checks import apply_rule, rule_of
from hookline.engine.foreign import is_data_class, is_logger_class
from hookline.run.option_tables import OLD_NAMES, Evaluation, with_new_names
from hookline.run.options import InFile, Options, TrainerParts, read_arguments
from hookline.util.errors import OptionError, closest


def _trainer_fields() -> dict[str, tuple[Any, Any]]:
    """Return every key of the trainer's section with its type and default."""
    found = {each.name: (each.type, each.default) for each in fields(Options)}
    for option in (*fields(Options), *fields(TrainerParts)):
        for note in getattr(option.type, "__metadata__", ()):
            if isinstance(note, InFile):
                found[option.name] = (note.kind, option.default)
    return found


TrainerSection = make_dataclass("TrainerSection", [(name, *each) for name, each in _trainer_fields().items()])
"""The trainer's arguments that a file can hold, as a class, so that `check_arguments` can check them."""


def option_names() -> list[str]:
    """Return every key of the trainer's section."""
    return [each.name for each in fields(TrainerSection)]


def read_trainer(source: ConfigSource, permissions: Permissions) -> dict[str, Any]:
    """Return the trainer's keyword arguments."""
    given = source.values.get("trainer", {})
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise source.wrong("trainer", "must be a table of options, such as max_epochs.", given)
    problems = Problems()
    for name in given:
        if name not in option_names() and name not in OLD_NAMES:
            hint = (  # the list of all options is long: once is enough
                closest(name, option_names()) if problems.found else nearest(name, option_names(), "Options")
            )
            with problems.collect():
                raise source.wrong(f"trainer.{name}", f"the trainer has no such option.{hint}", given[name])
    given = {name: each for name, each in given.items() if name in option_names() or name in OLD_NAMES}
    arguments: dict[str, Any] = {}
    with problems.collect():
        arguments = _read_options(source, given, permissions)
    problems.raise_found()
    return arguments


def _read_options(source: ConfigSource, given: dict[str, Any], permissions: Permissions) -> dict[str, Any]:
    """Return the arguments for options that the trainer has."""
    place = ConfigKey("trainer options", (TrainerSection,))
    strategy = given.pop("strategy", None)
    # keys of a table have types of their own, which a parser of `dict` does not know
    for name in ("checkpoint", "hang_after", "audit", "digest"):
        if isinstance(given.get(name), dict) or (name == "audit" and name in given):
            given[name] = plain_values(given[name])
    if isinstance(given.get("audit"), dict) and "trace" in given:  # `hookline fit --trace` beside a table
        given["audit"] = {**given["audit"], "trace": plain_values(given.pop("trace"))}
    try:
        evaluation = _evaluation(source, given, permissions)
        options = with_new_names(
            {name: plain_values(each) if name in OLD_NAMES else each for name, each in given.items()}
        )
        part = ConfigPart("trainer", "", options, {name: f"trainer.{name}" for name in options})
        arguments = check_arguments(source, part, TrainerSection, place, permissions) | evaluation
        _check_each(source, arguments)
        read_arguments(arguments)
    except ConfigError:
        raise
    except OptionError as error:
        raise source.refused(key_below("trainer", error), error) from None
    if strategy is not None:
        arguments["strategy"] = _strategy(source, strategy, permissions)
    return arguments


def _check_each(source: ConfigSource, arguments: dict[str, Any]) -> None:
    """Check each option by itself. Raise one error for all wrong ones."""
    problems = Problems()
    for option in (*fields(Options), *fields(TrainerParts)):
        if option.name in arguments and (rule := rule_of(option.type)) is not None:
            with problems.collect():
                try:
                    apply_rule(option.name, rule, arguments[option.name])
                except OptionError as error:
                    raise source.refused(key_below("trainer", error), error) from None
    problems.raise_found()


def _evaluation(source: ConfigSource, given: dict[str, Any], permissions: Permissions) -> dict[str, Any]:
    """Take `evaluation`, or its older name, out of the options; its aggregation may name a function."""
    if "evaluation" in given and "val_aggregation" in given:
        return {}  # `with_new_names` refuses both
    is_old = "val_aggregation" in given
    table = {"aggregation": given.pop("val_aggregation")} if is_old else given.pop("evaluation", None)
    if not isinstance(table, dict):
        return {} if table is None else {"evaluation": plain_values(table)}
    keys = {name: "trainer.val_aggregation" if is_old else f"trainer.evaluation.{name}" for name in table}
    part = ConfigPart("trainer.evaluation", "", dict(table), keys)
    found = check_arguments(
        source, part, Evaluation, ConfigKey("how evaluations run", (Evaluation,)), permissions
    )
    return with_new_names({"val_aggregation": found["aggregation"]}) if is_old else {"evaluation": found}


def _strategy(source: ConfigSource, given: Any, permissions: Permissions) -> Any:
    if isinstance(given, str) and "." not in given and ":" not in given:
        return str(given)
    from hookline.distributed.base import Strategy

    return _make_object(source, "trainer.strategy", given, ConfigKey("a strategy", (Strategy,)), permissions)


def read_module(source: ConfigSource, permissions: Permissions) -> Any:
    """Make the module."""
    from torch import nn

    if source.values.get("module") is None:
        raise source.wrong(
            "module",
            "this section is missing: the class path of a hookline.Module or torch.nn.Module, such as "
            'module = "model.Net".',
        )
    return _make_object(
        source, "module", source.values["module"], ConfigKey("a module", (nn.Module,)), permissions
    )


def read_datamodule(source: ConfigSource, permissions: Permissions) -> Any:
    """Make the data module, or return None if there is none."""
    from hookline.run.module import DataModule

    given = source.values.get("datamodule")
    place = ConfigKey("a data module", (DataModule,), adopts=is_data_class)
    return None if given is None else _make_object(source, "datamodule", given, place, permissions)


def read_loggers(source: ConfigSource, permissions: Permissions) -> Any:
    """Return the value for `Trainer(logger=...)`: a list of loggers, True for the default one, or False."""
    from hookline.loggers.base import Logger

    given = source.values.get("loggers", True)
    given = given.guess if isinstance(given, Override) else given
    if isinstance(given, bool) or given is None:
        return bool(given)
    place = ConfigKey("a logger", (Logger,), home="hookline.loggers", adopts=is_logger_class)
    if isinstance(given, str):
        return [_make_object(source, "loggers", given, place, permissions)]
    given = name_members(given)
    if not isinstance(given, dict):
        raise source.wrong(
            "loggers", "must be a table of named loggers, a list of class paths, true or false.", given
        )
    wanted = {name: each for name, each in given.items() if plain_values(each) is not False}
    attempt = source.problems.attempt
    return [
        attempt(_make_object, source, f"loggers.{name}", each, place, permissions)
        for name, each in wanted.items()
    ]


def read_function(source: ConfigSource, permissions: Permissions, key: str) -> Any:
    """Return a function by its dotted name, or an instance of a loss class."""
    from torch import nn

    given = source.values.get(key)
    if given is None:
        return None

    place = ConfigKey(f"a {key} function", (nn.Module,), home="torch.nn.functional")
    function = resolve_function(source, read_part(source, key, given, place), place, permissions)
    return _make_object(source, key, given, place, permissions) if function is None else function


def resolve_function(
    source: ConfigSource, part: ConfigPart, place: ConfigKey, permissions: Permissions
) -> Any:
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


def _make_object(
    source: ConfigSource, key: str, given: Any, place: ConfigKey, permissions: Permissions
) -> Any:
    """Make an object, or only check its arguments, if the configuration has problems already."""
    part = read_part(source, key, given, place)
    cls = resolve(source, part, place, permissions)
    arguments = check_arguments(source, part, cls, place, permissions)
    return (
        make_part(source, part, cls, arguments)
        if not source.problems.found or is_made_to_check(cls)
        else None
    )
