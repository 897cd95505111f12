"""Read a whole configuration, check every section and make the parts of a run."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hookline.config import files
from hookline.config.files import ConfigSource, lay_over, name_members
from hookline.config.hooks import make_hooks, read_hooks
from hookline.config.permissions import PATH, Permissions, why_not_own
from hookline.config.problems import ConfigError, Override, key_below, nearest, plain_values
from hookline.engine.foreign import is_module_class
from hookline.engine.hook import Hook
from hookline.engine.registry import offered_hooks
from hookline.util.errors import HooklineError, OptionError
from hookline.util.urls import check_url, is_url


class CheckMonitors(Hook):
    """A hook that refuses a misspelt `monitor` of a hook or schedule after the sanity check, when the metrics
    of validation are known.
    """

    name = "check_monitors"
    tier = "builtin"
    is_internal = True

    def __init__(self, source: ConfigSource, monitors: dict[str, str]) -> None:
        self.source = source
        self.monitors = monitors
        """Key in the configuration -> metric."""

    def on_validation_end(self, metrics: Any, sanity_checking: bool) -> None:
        """Check after the sanity check only. Hooks check later validations themselves."""
        if not sanity_checking:
            return
        known = sorted(metrics)
        for key, monitor in self.monitors.items():
            near = difflib.get_close_matches(monitor, known, n=1, cutoff=0.75)
            # the hook itself checks a metric of training, or one that is logged later, when it reads it
            if monitor not in known and near and monitor.startswith("val"):
                raise self.source.wrong(
                    key,
                    f"no metric of this name is logged. Did you mean {near[0]!r}? "
                    f"Validation logs: {', '.join(known)}.",
                    monitor,
                )


SECTIONS: dict[str, str] = {
    "module": "the model and its training: a hookline.Module, or any torch.nn.Module with `loss` and "
    "`optimizer`",
    "datamodule": "the data: a hookline.DataModule",
    "trainer": "options of the trainer: max_epochs, precision, device, strategy and so on",
    "hooks": "hooks by name, or a list of class paths",
    "loggers": "loggers by name, a list of class paths, or false",
    "optimizer": "the optimizer, in place of the module's own, with its parameter groups",
    "lr_scheduler": "its learning-rate schedule",
    "loss": "for a plain torch.nn.Module: a function of outputs and targets, or a loss class",
    "step": "for a plain torch.nn.Module: a function of model and batch, instead of `loss`",
    "mixture": "how several training loaders of the data module are mixed: order, weights, pattern, "
    "epoch_length and so on",
    "checkpoint": "a checkpoint to continue from (fit) or whose weights to use (validate, test, predict): a "
    "path, 'auto' (the newest), 'best', or false for none; without it, a fit whose run_dir is named "
    "continues by itself",
    "config": "a table of your own; hooks ask for it as `config`",
    "allow": "further packages of your own that class paths may name",
}

OF_LIGHTNING = {"model", "data", "seed_everything", "ckpt_path"}
"""Sections of LightningCLI, which has others in common with Hookline."""
PARTS = ("module", "datamodule", "optimizer", "lr_scheduler")
"""Sections that are a table with class_path, or only a class path."""
TYPED = {name: about for name, about in SECTIONS.items() if name != "allow"}
"""Sections that the command line can set as a whole. It has an option `--allow` of its own."""


@dataclass(slots=True)
class Parts:
    """The objects that a configuration describes, ready for a trainer.

    source: the configuration. module, datamodule: the objects, or None. hooks: the hooks by name. disabled:
    the names of those that are off. trainer_arguments, fit_arguments: arguments of `Trainer` and `fit`.
    checkpoint: the checkpoint to evaluate, or None.
    """

    source: ConfigSource
    module: Any
    datamodule: Any
    hooks: dict[str, Any]
    disabled: list[str]
    trainer_arguments: dict[str, Any]
    fit_arguments: dict[str, Any] = field(default_factory=dict)
    checkpoint: Path | str | None = None
    keys: dict[str, str] = field(default_factory=dict)
    """Name of a hook -> its key in the file."""
    make_groups: Callable[[], Any] | None = None
    """Returns the parameter groups that the section `optimizer` describes, or None if it describes none."""

    def make_trainer(self, trainer: Callable[..., Any]) -> Any:
        """Make a trainer with these options and add the hooks under their names. trainer: the class of the
        trainer.
        """
        asked = [getattr(each, "__hookline_trainer__", "") for each in (self.module, *self.hooks.values())]
        # parts may be written for a trainer with further names
        if dialect := next(filter(None, asked), ""):
            trainer = pkgutil.resolve_name(dialect)
        try:
            made = trainer(**self.trainer_arguments)
        except OptionError as error:
            raise self.source.refused(key_below("trainer", error), error) from error
        made.resolved_config = spelled_out(self.source.values)
        for name, hook in self.hooks.items():
            try:
                made.add_hook(hook, name)
                if name in self.disabled:
                    made.disable_hook(name)
            except HooklineError as error:
                raise self.source.refused(self.keys.get(name, f"hooks.{name}"), error) from error
        return made


class Config:
    """A configuration with known sections. `build` checks the rest and makes the parts.

    source: what `hookline.config` read from a file or a mapping. allow: further packages that class paths may
    name.
    """

    def __init__(self, source: ConfigSource, allow: Iterable[str] = ()) -> None:
        self.source, attempt = source, source.problems.attempt
        for key in source.values:
            if key not in SECTIONS:
                attempt(self._unknown, key)
        self.permissions = Permissions(
            source.folder, [*_allowed(allow), *(attempt(self._allowed_by_file) or [])]
        )
        self.hooks: list[tuple[str, Any]] = attempt(read_hooks, source, source.values.get("hooks")) or []
        if source.problems.found:
            self.build()  # raises them together with those of the other parts

    @property
    def values(self) -> dict[str, Any]:
        """Return all values as plain data, with the overrides of the command line."""
        return spelled_out(self.source.values)

    def _unknown(self, key: str) -> None:
        from hookline.config.sections import option_names

        value, source_keys = self.source.values[key], set(self.source.values)
        if len(OF_LIGHTNING & source_keys) > 1:
            raise ConfigError(
                f"this is a configuration of LightningCLI: `hookline convert {self.source.name}` writes one "
                "of Hookline.",
                where=self.source.name,
            )
        if key in option_names():
            raise self.source.wrong(key, f"this is an option of the trainer: write trainer.{key}.", value)
        if key in offered_hooks():
            raise self.source.wrong(key, f"this is a hook: write hooks.{key}.", value)
        raise self.source.wrong(key, f"there is no such section.{nearest(key, SECTIONS, 'Sections')}", value)

    def _allowed_by_file(self) -> list[str]:
        given = self.source.values.get("allow", [])
        if isinstance(given, dict) and list(given) == ["modules"]:
            given = given["modules"]
        given = plain_values(given)
        given = [given] if isinstance(given, str) else given
        if not isinstance(given, list) or not all(
            isinstance(each, str) and PATH.fullmatch(each) for each in given
        ):
            raise self.source.wrong(
                "allow", 'must be a list of packages or modules, such as ["mypackage"].', given
            )
        for package in given:
            if why := why_not_own(package):
                raise self.source.wrong(
                    "allow",
                    f"{package!r} {why}, so a file cannot allow it: it can allow packages of your own. If "
                    f"you trust it, add --allow {package} on the command line, or derive a class from it in "
                    "a module of your own and name that.",
                    given,
                )
        return given

    def build(self) -> Parts:
        """Check and make every part. One error names the keys of all problems, before anything is written."""
        import torch  # noqa: F401 - needed from here on, and not for reading a configuration

        from hookline.config import sections
        from hookline.config.optimizer import read_optimizer

        source, given, attempt = self.source, (self.source, self.permissions), self.source.problems.attempt
        arguments = attempt(sections.read_trainer, *given) or {}
        arguments["logger"] = attempt(sections.read_loggers, *given)
        arguments["config"] = attempt(self._own_table)
        optimizer = attempt(read_optimizer, *given)
        read = {name: attempt(sections.read_function, *given, name) for name in ("loss", "step")}
        functions = {name: each for name, each in read.items() if each is not None}
        hooks = attempt(make_hooks, source, self.hooks, self.permissions) or {}
        checkpoint = attempt(self._checkpoint)
        datamodule = attempt(sections.read_datamodule, *given)
        if "seed" in arguments:  # before the module is made, because it draws its initial weights
            from hookline.data.seeding import seed_everything

            seed_everything(arguments["seed"])
        module = attempt(sections.read_module, *given)
        source.problems.raise_found()
        self._connect(module, functions, optimizer)
        if "mixture" in source.values:
            functions["mixture"] = self._mixture()
        keys = dict(zip(hooks, (part.key for _, part in self.hooks), strict=True))
        disabled = [
            name
            for name, (_, part) in zip(hooks, self.hooks, strict=True)
            if part.settings.get("enabled") is False
        ]
        self._choose_progress_bar(arguments, hooks, keys)
        self._watch_monitors(hooks, keys)
        groups = optimizer.make_groups if optimizer is not None else None
        return Parts(
            source, module, datamodule, hooks, disabled, arguments, functions, checkpoint, keys, groups
        )

    def _own_table(self) -> dict[str, Any] | None:
        table = plain_values(self.source.values.get("config"))
        if not isinstance(table, dict | None):
            raise self.source.wrong("config", "must be a table.", self.source.values["config"])
        return table

    def _connect(self, module: Any, functions: dict[str, Any], optimizer: Any) -> None:
        """Give the optimizer to the module, or to `fit` if the module is a plain one."""
        from hookline.run.module import Module

        if isinstance(module, Module) or is_module_class(type(module)):
            for name in functions:
                raise self.source.wrong(
                    name,
                    f"this is for a plain torch.nn.Module; {type(module).__name__} has steps of its own.",
                    self.source.values[name],
                )
            if optimizer is not None:
                module.configure_optimizers = optimizer.configure_optimizers
        elif optimizer is not None:
            functions["optimizer"] = optimizer
        if optimizer is not None:
            optimizer.use_for(module, self.source)

    def _mixture(self) -> Any:
        from hookline.data.mixing import make_mixture

        given = plain_values(self.source.values["mixture"])
        try:
            return make_mixture(given)
        except OptionError as error:
            value = given.get(error.option, given) if isinstance(given, dict) else given
            raise self.source.refused(key_below("mixture", error), error, value) from error

    def _checkpoint(self) -> Path | str | None:
        """Return a path, 'auto', 'best', an empty text for `false`, or None if the key is not given."""
        given = self.source.values.get("checkpoint")
        if given is None:
            return None
        if given is False or str(given).lower() in ("false", "none"):
            return ""
        if not isinstance(given, str) or not given:
            raise self.source.wrong(
                "checkpoint", "must be 'auto', 'best', false or the path of a checkpoint.", given
            )
        if given in ("auto", "best"):
            return str(given)
        if is_url(given):
            try:
                return check_url(str(given))
            except OptionError as error:
                raise self.source.refused("checkpoint", error, given) from None
        path = Path(given)
        if not isinstance(given, Override) and self.source.folder is not None:
            path = self.source.folder / path  # a path in a file is relative to the file
        if not path.exists():
            raise self.source.wrong("checkpoint", f"there is no checkpoint at {path}.", given)
        return path

    def _choose_progress_bar(
        self, arguments: dict[str, Any], hooks: dict[str, Any], keys: dict[str, str]
    ) -> None:
        """Switch the trainer's own progress bar off if a hook is one."""
        for name, hook in hooks.items():
            if type(hook).__name__ == "ProgressBar":
                if arguments.get("enable_progress_bar"):
                    raise self.source.wrong(
                        keys[name], "there would be two progress bars: leave out enable_progress_bar."
                    )
                arguments["enable_progress_bar"] = False

    def _watch_monitors(self, hooks: dict[str, Any], keys: dict[str, str]) -> None:
        watched = {
            part.keys["monitor"]: str(part.init_args["monitor"])
            for _, part in self.hooks
            if isinstance(part.init_args.get("monitor"), str)
        }
        schedule = self.source.values.get("lr_scheduler")
        if isinstance(schedule, dict) and isinstance(schedule.get("monitor"), str):
            watched["lr_scheduler.monitor"] = str(schedule["monitor"])
        if watched:
            check = CheckMonitors(self.source, watched)
            hooks[check.name], keys[check.name] = check, "hooks"


def load_config(
    given: str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    allow: Iterable[str] = (),
    hooks: Iterable[str] = (),
) -> Config:
    """Read a configuration and apply the overrides.

    given: a TOML or YAML file, or a mapping. overrides: as on the command line: `["--trainer.max_epochs",
    "3", "--hooks.stop.patience=9"]`. allow: further packages that class paths may name. hooks: further hooks,
    by name or class path.
    """
    source = ConfigSource(_copy_table(given)) if isinstance(given, Mapping) else files.read_config(given)
    if isinstance(overrides, str | Mapping):
        raise ConfigError(
            'overrides takes a list of strings such as ["--trainer.max_epochs=2"], not a '
            f"{type(overrides).__name__}.",
            where="load_config",
        )
    settings, rest = files.split_overrides(list(overrides), TYPED)
    if rest:
        raise ConfigError(f"{rest[0]!r} is not an override; write --section.key value.", where="command line")
    for extra in hooks:
        present = name_members(source.values.get("hooks") or {})
        source.values["hooks"] = present if isinstance(present, dict) else {}
        name = files.unique_name(files.short_name(extra), source.values["hooks"])
        source.values["hooks"][name] = {"class_path": extra}
        source.typed[f"hooks.{name}"] = f"--hook {extra}"
    lay_over(source, settings)
    return Config(source, allow)


def spelled_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values as plain data, a part that is only a class path as a table, so that two spellings of
    one configuration are equal.
    """
    return {
        key: {"class_path": value} if key in PARTS and isinstance(value, str) else value
        for key, value in plain_values(dict(values)).items()
    }


def _copy_table(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(key): _copy_table(each)
        if isinstance(each, Mapping)
        else list(each)
        if isinstance(each, list | tuple)
        else each
        for key, each in values.items()
    }


def _allowed(given: Iterable[str]) -> list[str]:
    found = [part.strip() for each in given for part in each.split(",")]
    for package in found:
        if not PATH.fullmatch(package) or package.partition(".")[0] == "jsonargparse":
            raise ConfigError(
                f"--allow takes the name of a package or module, not {package!r}.", where="command line"
            )
    return found
