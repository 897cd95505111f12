"""Read and make the hooks of a configuration. They have names, so that an override can set one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from hookline.config.classes import (
    ConfigKey,
    ConfigPart,
    check_arguments,
    is_made_to_check,
    make_part,
    parameters,
    read_part,
    resolve,
)
from hookline.config.files import ConfigSource, name_members, short_name, unique_name
from hookline.config.permissions import Permissions
from hookline.config.problems import ConfigError, Override, key_below, nearest, plain_values
from hookline.engine.checks import refused
from hookline.engine.foreign import adopt, is_hook_class
from hookline.engine.hook import FunctionHook, Hook
from hookline.engine.registry import offered_hooks
from hookline.util.errors import OptionError, closest

HOOK_SETTINGS = ("enabled", "on_error", "order", "ranks", "after_module", "budget", "over_budget")
"""Settings of every hook, beside its own parameters."""
HOOK_KEY = ConfigKey("a hook", (Hook,), home="hookline.hooks", settings=HOOK_SETTINGS, adopts=is_hook_class)


def find_by_name(source: ConfigSource, part: ConfigPart) -> None:
    """Replace the name of an offered hook by its class path."""
    if "." in (name := part.class_path) or ":" in name:
        return
    offered = offered_hooks()
    # the class name, such as `EarlyStopping`, is accepted as well
    paths = {**{path.partition(":")[2]: path for path in offered.values()}, **offered}
    if name not in paths:
        raise source.wrong(
            f"{part.key}.class_path",
            f"there is no hook called {name!r}.{nearest(name, offered, 'There are')} "
            "Or write a class path: 'package.module.Class'.",
            name,
        )
    part.class_path = paths[name].replace(":", ".")


def make_hooks(
    source: ConfigSource, parts: list[tuple[str, ConfigPart]], permissions: Permissions
) -> dict[str, Any]:
    """Look up, check and make every hook. Number names that occur twice."""
    made = dict[str, Any]()
    for wanted, part in parts:
        with source.problems.collect():
            find_by_name(source, part)
            hook = _make_hook(source, part, resolve(source, part, HOOK_KEY, permissions), permissions)
            if "name" in part.init_args and isinstance(vars(hook).get("name"), str):
                wanted = hook.name  # given as an argument
            made[unique_name(wanted, made)] = hook
    source.problems.raise_found()
    return made


def _make_hook(source: ConfigSource, part: ConfigPart, cls: Any, permissions: Permissions) -> Any:
    if not isinstance(cls, type):
        return FunctionHook(cls, cls.__hookline_on__)
    own = parameters(cls)
    for setting in HOOK_SETTINGS:
        if setting in part.init_args and setting not in own:
            del part.init_args[setting]
    arguments = check_arguments(source, part, cls, HOOK_KEY, permissions)
    if source.problems.found and not is_made_to_check(cls):
        return Hook()
    # adopt within make, because it may refuse a hook of another package
    hook = make_part(source, part, lambda **given: adopt(cls(**given)), arguments)
    for setting, value in part.settings.items():
        if setting not in own and setting != "enabled":
            setattr(hook, setting, value)
    if not isinstance(part.settings.get("enabled", True), bool):
        raise source.wrong(f"{part.key}.enabled", "must be true or false.", part.settings["enabled"])
    return hook


SWITCHES: dict[str, tuple[str, str]] = {
    "enable_logging_hook": ("", "hookline.hooks.console_log.ConsoleLog"),
    "enable_gradient_monitor": ("gradient_monitor_config", "hookline.hooks.gradient_monitor.GradientMonitor"),
    "enable_model_checkpoint_hook": (
        "model_checkpoint_config",
        "hookline.hooks.model_checkpoint.ModelCheckpoint",
    ),
    "enable_early_stopping_hook": ("early_stopping_config", "hookline.hooks.early_stopping.EarlyStopping"),
    "enable_lr_monitor": ("lr_monitor_config", "hookline.hooks.lr_monitor.LRMonitor"),
}


@dataclass(slots=True, kw_only=True)
class HooksConfig:
    """The hooks of a run. `build()` makes those of `hook_classes` in order, then the built-in ones.

    >>> HooksConfig(enable_early_stopping_hook=True, early_stopping_config={"monitor": "val/loss", "patience":
    10})

    enable_gradient_monitor, enable_model_checkpoint_hook, enable_early_stopping_hook, enable_lr_monitor: add
    this built-in hook. gradient_monitor_config, model_checkpoint_config, early_stopping_config,
    lr_monitor_config: its arguments.
    """

    enable_logging_hook: bool | None = None
    """Log the progress of the run to the console (ConsoleLog)."""
    enable_gradient_monitor: bool | None = None
    gradient_monitor_config: dict[str, Any] = field(default_factory=dict)
    enable_model_checkpoint_hook: bool | None = None
    model_checkpoint_config: dict[str, Any] = field(default_factory=dict)
    enable_early_stopping_hook: bool | None = None
    early_stopping_config: dict[str, Any] = field(default_factory=dict)
    enable_lr_monitor: bool | None = None
    lr_monitor_config: dict[str, Any] = field(default_factory=dict)
    hook_classes: list[str] = field(default_factory=list)
    """Dotted class paths, in order; they run before the built-in hooks."""
    hook_configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments by full dotted path; the class name is accepted if only one path ends in it."""
    continue_on_hook_error: bool | None = None
    """True: log the error of a hook and continue. False: raise it. None: use the `on_error` of each hook."""
    log_hook_errors: bool | None = None
    """False, with continue_on_hook_error: log the first error of a hook and disable the hook."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            wanted, word = (
                (list, "a list of class paths")
                if option.name == "hook_classes"
                else (
                    (dict, "a table of arguments")
                    if option.name.endswith(("_config", "_configs"))
                    else (bool | None, "true or false")
                )
            )
            if not isinstance(value, wanted):
                raise refused(option.name, value, word)
        for switch, (options, _) in SWITCHES.items():
            if options and getattr(self, options) and getattr(self, switch) is None:
                raise OptionError(
                    f"{options}={getattr(self, options)!r} would do nothing: set {switch} to true, "
                    "or to false if it is meant to be off.",
                    option=options,
                    value=getattr(self, options),
                )
        if self.log_hook_errors is False and not self.continue_on_hook_error:
            raise OptionError(
                "log_hook_errors=False would do nothing: it needs continue_on_hook_error=True, because an "
                "error that ends the run is always shown.",
                option="log_hook_errors",
                value=False,
            )
        for path in self.hook_classes:
            if not isinstance(path, str):
                raise refused("hook_classes", path, "a list of class paths as text")
        for key in self.hook_configs:
            if not self._full_path(key):
                paths = self.hook_classes
                several = [path for path in paths if path.rpartition(".")[2] == key]
                if several:
                    raise OptionError(
                        f"hook_configs={key!r} fits several of hook_classes ({', '.join(several)}): "
                        "write the full path.",
                        option="hook_configs",
                        value=key,
                    )
                raise OptionError(
                    f"hook_configs={key!r} is not in hook_classes.{closest(key, paths)} "
                    f"hook_classes: {', '.join(paths) or 'none'}.",
                    option="hook_configs",
                    value=key,
                )

    def _full_path(self, key: str) -> str | None:
        if key in self.hook_classes:
            return key
        ends = [path for path in self.hook_classes if path.rpartition(".")[2] == key]
        return ends[0] if len(ends) == 1 else None

    @property
    def on_error(self) -> str | None:
        """Return the `on_error` for all hooks, or None to keep each hook's own."""
        if self.continue_on_hook_error is None:
            return None
        return (
            "raise"
            if not self.continue_on_hook_error
            else "disable"
            if self.log_hook_errors is False
            else "warn"
        )

    def parts(self, key: str = "hooks") -> list[tuple[str, ConfigPart]]:
        """Return names and parts of the hooks in order, without making them. key: the section in the file,
        for errors.
        """
        given = {self._full_path(name) or name: (name, values) for name, values in self.hook_configs.items()}
        found: list[tuple[str, ConfigPart]] = []
        for path in self.hook_classes:
            name, values = given.get(path, (path, {}))
            found.append(
                (
                    short_name(path),
                    _make_part(f"{key}.hook_classes", path, values, f"{key}.hook_configs.{name}"),
                )
            )
        for switch, (options, path) in SWITCHES.items():
            if getattr(self, switch):
                values = getattr(self, options) if options else {}
                found.append(
                    (short_name(path), _make_part(f"{key}.{switch}", path, values, f"{key}.{options}"))
                )
        if self.on_error is not None:
            for _, part in found:
                part.settings["on_error"] = self.on_error
        return found

    def build(self) -> list[Any]:
        """Return the hooks for `Trainer(hooks=...)`."""
        return list(
            make_hooks(ConfigSource({}, name="HooksConfig"), self.parts(), Permissions(trusted=True)).values()
        )


def _make_part(key: str, path: str, values: dict[str, Any], above: str) -> ConfigPart:
    return ConfigPart(key, path, dict(values), {name: f"{above}.{name}" for name in values})


def switch_names() -> Iterable[str]:
    """Return every key of `HooksConfig`."""
    return [each.name for each in fields(HooksConfig)]


def read_hooks(source: ConfigSource, given: Any) -> list[tuple[str, ConfigPart]]:
    """Read hooks from a mapping of names, a list of class paths, the switches of `HooksConfig`, or a mixture.
    Import nothing. A hook that is wrong is a problem of the source, and the others are returned.
    """
    given = name_members(given.guess if isinstance(given, Override) else given)
    if given is None or given is False:
        return []
    if not isinstance(given, dict):
        raise source.wrong("hooks", "must be a table of named hooks, or a list of class paths.", given)
    found: list[tuple[str, ConfigPart]] = []
    switches: dict[str, Any] = {}
    for name, value in given.items():
        if name in switch_names():
            switches[name] = plain_values(value)
        elif (value.guess if isinstance(value, Override) else value) is not False:
            with source.problems.collect():
                found.append((name, _read_hook(source, name, value)))
    with source.problems.collect():
        found += _read_switches(source, switches)
    return found


def _read_hook(source: ConfigSource, name: str, value: Any) -> ConfigPart:
    key, offered = f"hooks.{name}", offered_hooks()
    guess = value.guess if isinstance(value, Override) else value
    if guess is True and name in offered:
        value = {}
    elif not isinstance(guess, str | dict):
        known = [*switch_names(), *offered]
        raise source.wrong(
            key,
            "must be a class path, a hook's name, a table with class_path, or false to leave it out."
            f"{closest(name, known)}",
            value,
        )
    only_typed = isinstance(value, dict) and all(
        each in source.typed for each in (f"{key}.{inner}" for inner in value)
    )
    if only_typed and value and "class_path" not in value:
        there = [each for each in source.values.get("hooks", {}) if each != name]
        raise source.wrong(
            key,
            f"there is no hook of this name in {source.name}.{nearest(name, there, 'Hooks')} "
            f"To add one: --hook NAME, or --{key}.class_path PATH.",
        )
    part = read_part(source, key, value, HOOK_KEY, default_path=name if name in offered else "")
    find_by_name(source, part)
    for setting in HOOK_SETTINGS:
        if setting in part.init_args:
            part.settings[setting] = plain_values(part.init_args[setting])
    return part


def _read_switches(source: ConfigSource, switches: dict[str, Any]) -> list[tuple[str, ConfigPart]]:
    if not switches:
        return []
    try:
        return HooksConfig(**switches).parts()
    except ConfigError:
        raise
    except OptionError as error:
        raise source.refused(key_below("hooks", error), error) from None
