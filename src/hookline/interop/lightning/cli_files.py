"""Convert configuration files of LightningCLI: every section, and every option of the trainer.

A class path is imported only if a configuration of Hookline may name it; then its arguments are checked too.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hookline.config.classes import ConfigKey, check_arguments, read_part, resolve
from hookline.config.files import ConfigSource, name_members
from hookline.config.hooks import HOOK_KEY, find_by_name
from hookline.config.optimizer import read_optimizer
from hookline.config.permissions import Permissions
from hookline.config.problems import ConfigError, Problems
from hookline.config.sections import read_trainer
from hookline.engine.checks import PRECISION_SPELLINGS
from hookline.engine.foreign import is_data_class
from hookline.run.module import DataModule
from hookline.util.errors import closest

COMMANDS = ("fit", "validate", "test", "predict")
SECTIONS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path")
OF_A_COMMAND = ("weights_only", "verbose", "return_predictions")
"""Arguments of a command that do not describe a run."""
DEVICES = {"auto": "auto", "cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps"}
STRATEGIES = {
    "auto": "auto",
    "single_device": "single",
    "ddp": "ddp",
    "ddp_find_unused_parameters_true": "ddp",
    "ddp_find_unused_parameters_false": "ddp",
    "fsdp": "fsdp",
}
NO_EFFECT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "enable_model_summary": ((None, True, False), ""),
    "enable_autolog_hparams": ((None, True, False), ""),
    "min_steps": ((None, 0), "set min_epochs"),
    "benchmark": ((None, False), "set torch.backends.cudnn.benchmark in the module"),
    "inference_mode": ((None, True, False), ""),  # both give the same numbers
    "use_distributed_sampler": ((None, True), "return a loader with a sampler of your own"),
    "profiler": ((None,), "add the hook 'profiler'"),
    "detect_anomaly": ((None, False), "call torch.autograd.set_detect_anomaly in the module"),
    "barebones": ((None, False), "leave it out"),
    "plugins": ((None, []), "use strategy or precision"),
    "sync_batchnorm": ((None, False), "convert the module in its configure_model"),
    "reload_dataloaders_every_n_epochs": ((None, 0), "return a loader whose dataset changes"),
    "model_registry": ((None,), "load the checkpoint and name its path"),
}
"""Options of Lightning's trainer that a file cannot set here: values that request nothing, and what to do."""
LOGGERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "TensorBoardLogger": ("TensorBoard", {}),
    "CSVLogger": ("CSV", {}),
    "WandbLogger": ("WandB", {name: name for name in ("project", "name", "id", "tags", "entity", "notes")}),
    "MLFlowLogger": (
        "MLflow",
        {"experiment_name": "experiment", "run_name": "run_name", "tracking_uri": "tracking_uri"}
        | {name: name for name in ("run_id", "tags")},
    ),
    "CometLogger": (
        "Comet",
        {"experiment_key": "key"} | {name: name for name in ("project", "workspace", "name")},
    ),
}
"""Lightning's loggers, Hookline's, and the arguments of both. A logger writes into the run's directory."""
BARS = ("TQDMProgressBar", "RichProgressBar", "ProgressBar")
PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"


@dataclass(slots=True)
class Conversion:
    """A file of LightningCLI on its way to Hookline's format."""

    source: ConfigSource
    module: str = ""
    """The module's class, if the file only has its arguments."""
    datamodule: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    """The configuration of Hookline."""
    problems: Problems = field(default_factory=Problems)
    keys: dict[str, str] = field(default_factory=dict)
    """Name of a hook -> its key in the file."""
    devices: int = 1
    nodes: int = 1

    def wrong(self, key: str, problem: str, *value: Any) -> None:
        """Note a problem. All of them are reported together."""
        self.problems.found.append(self.source.wrong(key, problem, *value))

    @property
    def packages(self) -> list[str]:
        """Return the packages of Lightning that class paths name, which the command line has to allow."""
        text = repr(self.values)
        return [name for name in ("lightning", "pytorch_lightning") if f"'{name}." in text]


def convert(
    source: ConfigSource, module: str = "", datamodule: str = "", allow: tuple[str, ...] = ()
) -> Conversion:
    """Return the configuration of Hookline for a file of LightningCLI, or raise one error with all problems.

    module, datamodule: class paths, for a program that passes its classes to LightningCLI.
    """
    made = Conversion(source, module, datamodule)
    given = _of_one_command(made)
    for key in given:
        if key not in (*SECTIONS, *OF_A_COMMAND):
            made.wrong(
                key,
                f"LightningCLI has no such section.{closest(key, SECTIONS)} Move a value that your program "
                "added to the table `config`.",
                given[key],
            )
    _parts(made, given)
    _trainer(made, given.get("trainer") or {})
    seed = given.get("seed_everything")
    if not isinstance(seed, int | None):
        made.wrong("seed_everything", "must be a whole number, true or false.", seed)
    elif seed is not None and seed is not False:
        made.values["trainer"]["seed"] = 0 if seed is True else seed  # Lightning's seed without a number
    _optimizer(made, given)
    _checkpoint(made, given.get("ckpt_path"))
    _check_conversion(made, allow)
    if found := made.problems.found:
        lines = [str(each).removeprefix(f"{source.name}: ") for each in found]
        count = "a problem" if len(lines) == 1 else f"{len(lines)} problems"
        raise ConfigError(
            f"{count}, and nothing was written:\n" + "\n".join(f"  {line}" for line in lines),
            where=source.name,
        )
    return made


def _of_one_command(made: Conversion) -> dict[str, Any]:
    """Return the sections, which may be below the name of a command."""
    values = made.source.values
    commands = [name for name in COMMANDS if isinstance(values.get(name), dict)]
    if not commands:
        return dict(values)
    chosen = commands[0]
    for other in commands[1:]:
        if values[other] != values[chosen]:
            made.wrong(other, f"this differs from {chosen}: write a file for each command.")
    rest = {name: value for name, value in values.items() if name not in commands and name != "subcommand"}
    return {**rest, **values[chosen]}


def _parts(made: Conversion, given: Mapping[str, Any]) -> None:
    for key, section, default in (("model", "module", made.module), ("data", "datamodule", made.datamodule)):
        part = given.get(key)
        if part is None and not default:
            if key == "model":
                made.wrong(
                    key, f"this section is missing. If your program passes its class: --{section} PATH."
                )
            continue
        table = {"class_path": part} if isinstance(part, str) else dict(part or {})
        if "class_path" not in table:
            if not default:
                made.wrong(
                    key,
                    f"class_path is missing, because your program passes its class: --{section} PATH.",
                    part,
                )
                continue
            table = {"class_path": default, "init_args": table}
        made.values[section] = _part(table)


def _part(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part with its arguments, also those that LightningCLI keeps apart."""
    arguments = {**(table.get("init_args") or {}), **(table.get("dict_kwargs") or {})}
    arguments |= {
        name: each for name, each in table.items() if name not in ("class_path", "init_args", "dict_kwargs")
    }
    return {"class_path": table["class_path"], **({"init_args": arguments} if arguments else {})}


# ---- the trainer -------------------------------------------------------------------------------------------


def _trainer(made: Conversion, given: Any) -> None:
    options = made.values["trainer"] = {}
    if not isinstance(given, dict):
        made.wrong("trainer", "must be a table of options.", given)
        return
    for name, value in given.items():
        key = f"trainer.{name}"
        if name in CONVERTED:
            CONVERTED[name](made, key, value)
        elif name in NO_EFFECT:
            neutral, instead = NO_EFFECT[name]
            if value not in neutral:
                made.wrong(key, f"Hookline has no such option; {instead}.", value)
        elif name not in SAME:
            made.wrong(
                key,
                f"Lightning's trainer has no such option.{closest(name, [*SAME, *CONVERTED, *NO_EFFECT])}",
                value,
            )
        elif value is not None:
            options[name] = value


def _renamed(option: str, names: Mapping[str, str]) -> Callable[[Conversion, str, Any], None]:
    """Return the conversion of an option whose values have other names."""

    def convert_value(made: Conversion, key: str, value: Any) -> None:
        if value is None:
            return
        if str(value) not in names:
            made.wrong(key, f"must be one of {', '.join(names)}.{closest(str(value), names)}", value)
        elif names[str(value)] != "auto":
            made.values["trainer"][option] = names[str(value)]

    return convert_value


def _callbacks(made: Conversion, key: str, value: Any) -> None:
    found: list[Any] = []
    keys: list[str] = []
    for index, item in enumerate(value if isinstance(value, list) else [value] if value is not None else []):
        table = {"class_path": item} if isinstance(item, str) else item
        if not isinstance(table, dict) or not isinstance(table.get("class_path"), str):
            made.wrong(
                f"{key}[{index}]", "must be a class path, or a table with class_path and init_args.", item
            )
            continue
        part = _part(table)
        package, _, name = part["class_path"].rpartition(".")
        if name in BARS:
            part = {"class_path": "progress_bar"}
        elif not package:  # LightningCLI looks such a name up among the classes that are imported
            part["class_path"] = f"lightning.pytorch.callbacks.{name}"
        found.append(part)
        keys.append(f"{key}[{index}]")
    if found:
        made.values["hooks"] = name_members(found)
        made.keys.update(zip(made.values["hooks"], keys, strict=True))


def _logger(made: Conversion, key: str, value: Any) -> None:
    if value is None or isinstance(value, bool):
        if value is False:
            made.values["loggers"] = False
        return
    found: list[Any] = []
    for item in value if isinstance(value, list) else [value]:
        path = item.get("class_path") if isinstance(item, dict) else item
        name = str(path).rpartition(".")[2]
        if name not in LOGGERS:
            made.wrong(key, f"Hookline has loggers for {', '.join(LOGGERS)}.{closest(name, LOGGERS)}", path)
            continue
        ours, arguments = LOGGERS[name]
        given = _part(item).get("init_args", {}) if isinstance(item, dict) else {}
        kept = {arguments[name]: given[name] for name in arguments if given.get(name) is not None}
        found.append({"class_path": f"hookline.loggers.{ours}", **({"init_args": kept} if kept else {})})
    made.values["loggers"] = name_members(found)


def _devices(made: Conversion, key: str, value: Any) -> None:
    count = len(value) if isinstance(value, list) else 1 if value in ("auto", None) else value
    if isinstance(count, str) and count.isdigit():
        count = int(count)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        made.wrong(
            key,
            "must be 'auto', a number from 1 or a list of devices; torchrun starts a process each.",
            value,
        )
    elif key.endswith("num_nodes"):
        made.nodes = count
    else:
        made.devices = count


def _checkpointing(made: Conversion, key: str, value: Any) -> None:
    if value is False:
        made.values["trainer"]["checkpoint"] = False


def _max_time(made: Conversion, key: str, value: Any) -> None:
    if isinstance(value, dict):
        try:
            value = datetime.timedelta(**value).total_seconds()
        except TypeError:
            made.wrong(key, "must be a table of days, hours, minutes and seconds.", value)
            return
    if value is not None:
        made.values["trainer"]["max_time"] = value


def _validation(made: Conversion, key: str, value: Any) -> None:
    if value is None:
        made.wrong(key, "Hookline counts the batches of each epoch: name a number of epochs.", value)
    else:
        made.values["trainer"]["check_val_every_n_epoch"] = value


CONVERTED: Mapping[str, Callable[[Conversion, str, Any], None]] = {
    "accelerator": _renamed("device", DEVICES),
    "strategy": _renamed("strategy", STRATEGIES),
    "precision": _renamed("precision", PRECISION_SPELLINGS),
    "devices": _devices,
    "num_nodes": _devices,
    "logger": _logger,
    "callbacks": _callbacks,
    "enable_checkpointing": _checkpointing,
    "max_time": _max_time,
    "check_val_every_n_epoch": _validation,
}
SAME = (
    "fast_dev_run",
    "max_epochs",
    "min_epochs",
    "max_steps",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "val_check_interval",
    "num_sanity_val_steps",
    "log_every_n_steps",
    "enable_progress_bar",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "deterministic",
    "default_root_dir",
)
"""Options with the same name and meaning in both."""


# ---- optimizer and checkpoint ------------------------------------------------------------------------------


def _optimizer(made: Conversion, given: Mapping[str, Any]) -> None:
    for key in ("optimizer", "lr_scheduler"):
        value = given.get(key)
        if not value:
            continue
        if isinstance(value, dict) and "class_path" not in value:
            made.wrong(key, "class_path is missing, because your program passes the class; add it.", value)
            continue
        part = _part({"class_path": value} if isinstance(value, str) else value)
        if key == "lr_scheduler" and part["class_path"].rpartition(".")[2] == "ReduceLROnPlateau":
            part["class_path"] = PLATEAU
            arguments = part.get("init_args", {})
            part |= {"monitor": arguments.pop("monitor")} if "monitor" in arguments else {}
        made.values[key] = part


def _checkpoint(made: Conversion, path: Any) -> None:
    if path is None:
        return
    if path in ("last", "best"):
        made.values["checkpoint"] = {"last": "auto", "best": "best"}[path]
    elif path == "hpc" or str(path).startswith("registry"):
        made.wrong("ckpt_path", "name the checkpoint by its path, 'last' or 'best', or leave it out.", path)
    else:
        made.values["checkpoint"] = path


# ---- checks ------------------------------------------------------------------------------------------------


def _check_conversion(made: Conversion, allow: tuple[str, ...]) -> None:
    """Check every option and every part that may be imported, each for itself. Make none of them."""
    permissions = Permissions(made.source.folder, allow)
    checks: list[Callable[[], Any]] = [
        functools.partial(read_trainer, _alone(made, trainer={name: value}), permissions)
        for name, value in made.values["trainer"].items()
    ]
    parts = [
        ("model", made.values.get("module"), ConfigKey("a module", (nn.Module,))),
        (
            "data",
            made.values.get("datamodule"),
            ConfigKey("a data module", (DataModule,), adopts=is_data_class),
        ),
        *((made.keys[name], part, HOOK_KEY) for name, part in made.values.get("hooks", {}).items()),
    ]
    checks += [
        functools.partial(_check_part, made, key, part, place, permissions)
        for key, part, place in parts
        if part is not None
    ]
    schedule = {key: made.values[key] for key in ("optimizer", "lr_scheduler") if key in made.values}
    checks.append(functools.partial(read_optimizer, _alone(made, **schedule), permissions))
    for attempt in checks:
        with made.problems.collect():
            attempt()


def _alone(made: Conversion, **values: Any) -> ConfigSource:
    return ConfigSource(values, made.source.path, made.source.name)


def _check_part(made: Conversion, key: str, given: Any, place: ConfigKey, permissions: Permissions) -> None:
    """Check the class and the arguments. One of Lightning's is left to `hookline fit --allow lightning`,
    unless Lightning is allowed here too.
    """
    part = read_part(made.source, key, given, place)
    if place is HOOK_KEY:
        find_by_name(made.source, part)
    is_lightnings = part.class_path.startswith(("lightning.", "pytorch_lightning."))
    if not is_lightnings or not permissions.refusal(part.class_path):
        check_arguments(made.source, part, resolve(made.source, part, place, permissions), place, permissions)
