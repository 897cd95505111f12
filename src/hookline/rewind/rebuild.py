"""Make the trainer of a recorded run again: from its configuration, or from what a program passes."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hookline.config import load_config
from hookline.config.files import CONFIG_SUFFIXES, ConfigSource
from hookline.config.load import Config
from hookline.config.problems import ConfigError
from hookline.engine.registry import hook_class, offered_hooks
from hookline.loggers.base import Logger
from hookline.rewind.recorded import RecordedRun
from hookline.run.options import OPTION_NAMES, Options
from hookline.run.record import RECORD
from hookline.training.trainer import Trainer
from hookline.util.errors import HooklineError, OptionError
from hookline.util.text import HIDDEN_VALUE

log = logging.getLogger("hookline")
REPLACED: Mapping[str, Any] = {"control": False, "enable_progress_bar": False, "checkpoint": False}
"""Options that a run has when it runs again: it is not controlled from outside, shows and saves nothing."""
DROPPED = ("run_dir", "default_root_dir", "trace", "logger", *REPLACED)
"""Options of the recorded run that say where it wrote."""
SECTIONS_DROPPED = ("loggers", "checkpoint")
"""Sections of a configuration that say where it wrote, and what it continued."""
OBSERVES, ACTS_OUTSIDE = "it only observes", "it acts outside of the training"


@dataclass(slots=True)
class Rebuilt:
    """A trainer, and the arguments of its `fit`."""

    trainer: Trainer
    arguments: dict[str, Any]
    left_out: dict[str, str] = field(default_factory=dict)
    """Hooks that were not made, and why."""
    is_from_config: bool = False


def why_left_out(hook: Any) -> str:
    """Return why a hook, or a class of hooks, is not called when a run runs again; empty if it is called.

    A hook that only observes changes nothing in the training. It may write or send something, so it is left
    out, unless it logs metrics that other hooks need.
    """
    rewinds = getattr(hook, "rewinds", None)
    if rewinds is not None:
        return "" if rewinds else ACTS_OUTSIDE
    observes = getattr(hook, "observes", None) or getattr(getattr(hook, "function", None), "observes", None)
    return OBSERVES if observes and not getattr(hook, "logs_metrics", ()) else ""


# ---- from a configuration ----------------------------------------------------------------------------------


def from_config(
    recorded: RecordedRun,
    loggers: list[Logger],
    config: str | Path | None = None,
    allow: Iterable[str] = (),
    without: Iterable[str] = (),
) -> Rebuilt:
    """Make everything from the configuration in the record, or from a file.

    Class paths of the record may name modules in the current folder, or in that of the configuration file if
    it is below the current folder.
    """
    try:
        loaded = load_config(config, allow=allow) if config is not None else _recorded_config(recorded, allow)
        for section in SECTIONS_DROPPED:
            loaded.source.values.pop(section, None)
        left_out = _leave_hooks_out(loaded, set(without))
        _refuse_hidden(loaded, recorded)
        parts = loaded.build()
    except ConfigError as error:
        if config is not None:
            raise
        raise OptionError(
            f"{error}\nThe configuration is the one in {recorded.path / RECORD}. Call this in the folder "
            "with its modules, or name its file: --config CONFIG, in Python config='CONFIG'."
        ) from error
    for name in DROPPED:
        parts.trainer_arguments.pop(name, None)
    parts.trainer_arguments |= {**REPLACED, "logger": loggers}
    trainer = parts.make_trainer(Trainer)
    return Rebuilt(
        trainer,
        {"module": parts.module, "datamodule": parts.datamodule, **parts.fit_arguments},
        left_out,
        is_from_config=True,
    )


def _recorded_config(recorded: RecordedRun, allow: Iterable[str]) -> Config:
    assert recorded.config is not None
    values = {name: value for name, value in recorded.config.items() if value is not None}
    place = _config_folder(recorded.record) / RECORD  # class paths may name modules in the folder of a source
    return Config(ConfigSource(values, place, str(recorded.path / RECORD)), allow)


def _config_folder(record: Mapping[str, Any]) -> Path:
    """Return the folder of the configuration file, by the recorded command, if it is below this folder.

    Only there, because a record may come from elsewhere and must not choose which code runs.
    """
    here = Path.cwd()
    try:
        words = shlex.split(str(record.get("command", "")))
    except ValueError:
        return here
    for word in words:
        file = Path(str(record.get("directory", ""))) / word
        if (
            word.endswith(CONFIG_SUFFIXES)
            and file.is_file()
            and file.resolve().is_relative_to(here.resolve())
        ):
            return file.resolve().parent
    return here


def _leave_hooks_out(loaded: Config, without: set[str]) -> dict[str, str]:
    """Remove hooks that are not called from a configuration, before they are made; return them with why.

    Only Hookline's own classes are known here. Others are removed once they are made.
    """
    own = {path.replace(":", "."): name for name, path in offered_hooks().items()}
    left_out = {}
    for name, part in loaded.hooks:
        why = "it was excluded" if name in without else ""
        if not why and part.class_path.startswith("hookline.hooks.") and part.class_path in own:
            why = why_left_out(hook_class(own[part.class_path]))
        if why:
            left_out[name] = why
    loaded.hooks = [each for each in loaded.hooks if each[0] not in left_out]
    return left_out


def _refuse_hidden(loaded: Config, recorded: RecordedRun) -> None:
    """Raise if a value that is needed was hidden in the record, because it looked like a secret."""
    needed: dict[str, Any] = {name: each for name, each in loaded.source.values.items() if name != "hooks"}
    needed |= {f"hooks.{name}": part.init_args for name, part in loaded.hooks}
    hidden = [name for name, value in needed.items() if HIDDEN_VALUE in str(value)]
    if hidden:
        raise OptionError(
            f"{recorded.path / RECORD} does not show some values of {', '.join(hidden)}, which look like "
            "secrets. Name the configuration file: --config CONFIG, in Python config='CONFIG'."
        )


# ---- from a program ----------------------------------------------------------------------------------------


def from_program(
    recorded: RecordedRun,
    loggers: list[Logger],
    arguments: dict[str, Any],
    hooks: Iterable[Any],
    options: Mapping[str, Any],
) -> Rebuilt:
    """Make a trainer with the recorded options and the given hooks. options: replace recorded ones."""
    if arguments.get("module") is None:
        raise OptionError(python_form(recorded))
    defaults = {each.name: each.default for each in fields(Options)}
    known = {
        name: value
        for name, value in recorded.options.items()
        if name in OPTION_NAMES and name not in (*DROPPED, *options) and value != defaults[name]
    }
    machine = recorded.record.get("machine")
    if isinstance(machine, dict) and "strategy" not in options:
        named = str(machine.get("strategy", "")).lower()
        parts = {
            "strategy": named if named in ("ddp", "fsdp") else "auto",
            "device": str(machine.get("device", "auto")).partition(":")[0],
            "precision": machine.get("precision", 32),
        }
        known |= {name: value for name, value in parts.items() if name not in options}
    made: dict[str, Any] = {
        **known,
        **{name: value for name, value in options.items() if name not in DROPPED},
        **REPLACED,
        "logger": loggers,
        "hooks": hooks,
    }
    try:
        trainer = Trainer(**made)
    except OptionError as error:
        if error.option not in known:
            raise
        raise OptionError(
            f"{error}\n{RECORD} does not hold this option as it was: pass it, rewound(..., "
            f"{error.option}=...)."
        ) from None
    _refuse_missing_hooks(recorded, trainer)
    return Rebuilt(trainer, {name: each for name, each in arguments.items() if each is not None})


def _refuse_missing_hooks(recorded: RecordedRun, trainer: Trainer) -> None:
    """Raise if the program does not pass a built-in hook that the run had and that changes its training. Warn
    of any other: it is not known what it changes.
    """
    there, here = recorded.record.get("hooks"), {entry.name for entry in trainer.hooks.entries()}
    offered = {path.replace(":", "."): name for name, path in offered_hooks().items()}
    for name, about in there.items() if isinstance(there, dict) else ():
        path = str(about.get("class")) if isinstance(about, dict) else ""
        if name not in here and path not in offered:
            log.warning(
                "%s ran with the hook %r (%s), which hooks=[...] does not have. If it changes the training, "
                "this run is another one.",
                recorded.path,
                name,
                path,
            )
        elif name not in here and not why_left_out(hook_class(offered[path])):
            raise HooklineError(
                f"The recorded run had the hook {name!r} ({path}), which takes part in the training, and "
                f"hooks=[...] does not have it. Pass all hooks of the run; those that only observe are left "
                "out."
            )


def python_form(recorded: RecordedRun) -> str:
    """Return the error for a run that a program has started: how to rewind it in Python."""
    module = recorded.record.get("module")
    name = str(module.get("class", "")) if isinstance(module, dict) else ""
    own = "loss=..., optimizer=..., " if name.startswith("torch.nn.") else ""
    made = f"module={name.rpartition('.')[2] or 'Net'}(...), train=loader, {own}hooks=[...], probes=[Probe()]"
    return (
        f"{recorded.path} was started by a program and not from a configuration, as its {RECORD} says: only "
        "the program can make its module and its data again. In Python, pass what was passed to fit:\n\n"
        f"with hookline.rewound({str(recorded.path)!r}, to=..., {made}) as trainer:\n"
        "    print(trainer.model, trainer.state.batch, trainer.optimizers)"
    )
