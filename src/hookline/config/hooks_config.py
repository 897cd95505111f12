"""`HooksConfig`: hooks by switches, for configurations that name the common ones that way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from hookline.checks import refused
from hookline.config.files import Source, short_name
from hookline.config.making import make_hooks
from hookline.config.parts import Part
from hookline.config.permissions import Permissions
from hookline.errors import OptionError, closest

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
    """Which hooks a run has. `build()` makes them: those of `hook_classes` in order, then the built-in ones.

    >>> HooksConfig(enable_early_stopping_hook=True, early_stopping_config={"monitor": "val/loss", "patience":
    10})
    """

    enable_logging_hook: bool | None = None
    """Say on the console how the run gets on (ConsoleLog)."""
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
    """Arguments for them, by the full dotted path; the bare class name is accepted where it is clear."""
    continue_on_hook_error: bool | None = None
    """True: a failing hook is reported and passed over. False: it ends the run. None: as each hook says
    itself.
    """
    log_hook_errors: bool | None = None
    """False, with continue_on_hook_error: report a failing hook once and switch it off, not at every failure.
    """

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            wanted, word = (
                (list, "a list of class paths")
                if each.name == "hook_classes"
                else (
                    (dict, "a table of arguments")
                    if each.name.endswith(("_config", "_configs"))
                    else (bool | None, "true or false")
                )
            )
            if not isinstance(value, wanted):
                raise refused(each.name, value, word)
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
            if not self._meant(key):
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
                    f"hook_configs={key!r} is none of hook_classes.{closest(key, paths)} "
                    f"hook_classes: {', '.join(paths) or 'none'}.",
                    option="hook_configs",
                    value=key,
                )

    def _meant(self, key: str) -> str | None:
        if key in self.hook_classes:
            return key
        ends = [path for path in self.hook_classes if path.rpartition(".")[2] == key]
        return ends[0] if len(ends) == 1 else None

    @property
    def on_error(self) -> str | None:
        """The policy of its hooks; None leaves each hook its own."""
        if self.continue_on_hook_error is None:
            return None
        return (
            "raise"
            if not self.continue_on_hook_error
            else "disable"
            if self.log_hook_errors is False
            else "warn"
        )

    def parts(self, key: str = "hooks") -> list[tuple[str, Part]]:
        """The hooks by name, in order, not yet made."""
        given = {self._meant(name) or name: (name, values) for name, values in self.hook_configs.items()}
        found: list[tuple[str, Part]] = []
        for path in self.hook_classes:
            name, values = given.get(path, (path, {}))
            found.append(
                (short_name(path), _part(f"{key}.hook_classes", path, values, f"{key}.hook_configs.{name}"))
            )
        for switch, (options, path) in SWITCHES.items():
            if getattr(self, switch):
                values = getattr(self, options) if options else {}
                found.append((short_name(path), _part(f"{key}.{switch}", path, values, f"{key}.{options}")))
        if self.on_error is not None:
            for _, part in found:
                part.settings["on_error"] = self.on_error
        return found

    def build(self) -> list[Any]:
        """The hooks, ready for `Trainer(hooks=...)`."""
        return list(
            make_hooks(Source({}, name="HooksConfig"), self.parts(), Permissions(trusted=True)).values()
        )


def _part(key: str, path: str, values: dict[str, Any], above: str) -> Part:
    return Part(key, path, dict(values), {name: f"{above}.{name}" for name in values})


def switch_names() -> Iterable[str]:
    """Every key of `HooksConfig`."""
    return [each.name for each in fields(HooksConfig)]
