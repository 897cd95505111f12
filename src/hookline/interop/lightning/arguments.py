"""The arguments of Lightning's trainer, as options of Hookline's."""

from __future__ import annotations

import ast
import datetime
import functools
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec

import torch

from hookline.engine.checks import PRECISION_SPELLINGS
from hookline.interop.lightning.package import find, is_a, refusal

P = ParamSpec("P")
log = logging.getLogger("hookline")

ACCELERATORS = {"auto": "auto", "cpu": "cpu", "gpu": "auto", "cuda": "cuda", "mps": "mps"}
"""Lightning's accelerators, and Hookline's devices."""
STRATEGIES = {"auto": "auto", "single_device": "single", "ddp": "ddp", "fsdp": "fsdp"}
"""Lightning's strategies, and Hookline's."""
VARIANT = re.compile(r"(?<=^ddp)(_spawn|_fork|_notebook)?(_find_unused_parameters_(true|false))?$")
"""Endings of Lightning's names for DDP that say how it starts processes and finds unused parameters."""
STRATEGY_CLASSES = {"SingleDeviceStrategy": "single", "DDPStrategy": "ddp", "FSDPStrategy": "fsdp"}
"""Classes of Lightning's strategy objects whose defaults Hookline's strategies have."""
PRECISION_PLUGINS = ("Precision", "MixedPrecision", "DoublePrecision", "HalfPrecision")
"""Lightning's classes for the precisions that Hookline has."""
NO_ROWS = 2**31 - 1
"""An interval between two rows of metrics that no run reaches."""
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "model_registry": ((None,), "load the checkpoint and pass its path as ckpt_path=")
}
"""Options of Lightning that Hookline does not have: values that request nothing, and what to do instead."""
PLUGIN_KINDS = ("Precision", "CheckpointIO", "ClusterEnvironment", "LayerSync")
"""Lightning's base classes of plugins, of which a trainer takes one each."""
BAREBONES = {
    "enable_checkpointing": False,
    "logger": False,
    "enable_progress_bar": False,
    "log_every_n_steps": 0,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "fast_dev_run": False,
    "detect_anomaly": False,
    "profiler": None,
}
"""What `barebones=True` switches off; it cannot be combined with another value."""


def from_environment(init: Callable[P, None]) -> Callable[P, None]:
    """Let `PL_TRAINER_MAX_EPOCHS=3` and so on set the arguments that the caller leaves out.

    The variables of a subclass begin with its own name.
    """
    parameters = inspect.signature(init).parameters.values()
    names = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]

    @functools.wraps(init)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        prefix = f"PL_{type(args[0]).__name__}_"
        for name in names:
            if text := os.environ.get(f"{prefix}{name}".upper()):
                kwargs.setdefault(name, literal(text))
        init(*args, **kwargs)

    return wrapped


def literal(text: str) -> Any:
    """Return the value of a Python literal, such as a number, a list or None; any other text unchanged."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def native_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of Hookline's trainer for Lightning's arguments; raise for what it cannot do."""
    for name in ("max_epochs", "max_steps"):
        if isinstance(given[name], int) and given[name] < -1:
            raise refusal(
                f"`{name}` must be a non-negative integer or -1, not {given[name]!r}; -1 is no limit.",
                name,
                given[name],
            )
    for name, (nothing, instead) in REFUSED.items():
        if given[name] not in nothing:
            raise refusal(
                f"{name}={given[name]!r}: Hookline has no such option; {instead}.", name, given[name]
            )
    options = {name: given[name] for name in SAME if given[name] is not None}
    fast = given["fast_dev_run"]
    if isinstance(fast, int) and fast < 0:
        raise refusal(f"fast_dev_run={fast}: it should be >= 0.", "fast_dev_run", fast)
    if not fast:
        options |= {name: checked_limit(given[name], name) for name in LIMITS if given[name] is not None}
    if given["min_steps"] is not None and given["min_epochs"] is None:
        options["min_epochs"] = 1
    options |= _processes(given)
    options["precision"] = _precision(given["precision"])
    options |= _validation_options(given)
    if given["default_root_dir"] is not None:
        options["default_root_dir"] = str(given["default_root_dir"])
    if (clip := given["gradient_clip_val"]) is not None:
        if isinstance(clip, bool) or not isinstance(clip, int | float):
            raise TypeError(f"`gradient_clip_val` should be an int or a float, or None, not {clip!r}.")
        options["gradient_clip_val"] = clip if clip > 0 else None
    if given["gradient_clip_algorithm"] is not None:
        options["gradient_clip_algorithm"] = _clip_algorithm(given["gradient_clip_algorithm"])
    if given["log_every_n_steps"] == 0:  # Lightning's way to write no rows
        options["log_every_n_steps"] = NO_ROWS
    return options


def refuse_manual(module: Any, given: Mapping[str, Any]) -> None:
    """Raise for options of the automatic update if the module updates by itself."""
    if getattr(module, "automatic_optimization", True):
        return
    for name, what, off in (
        ("gradient_clip_val", "clipping", 0),
        ("accumulate_grad_batches", "accumulation", 1),
    ):
        if (given[name] or 0) > off:
            raise refusal(
                f"Automatic gradient {what} is not supported for manual optimization, which does it in "
                f"training_step: leave out {name}={given[name]!r}.",
                name,
                given[name],
            )


def _clip_algorithm(given: Any) -> str:
    name = str(getattr(given, "value", given)).lower()
    if name not in ("norm", "value"):
        raise refusal(
            f"`gradient_clip_algorithm` {given} is invalid. It is 'norm' or 'value'.",
            "gradient_clip_algorithm",
            given,
        )
    return name


LIMITS = (*(f"limit_{kind}_batches" for kind in ("train", "val", "test", "predict")), "overfit_batches")
"""Arguments that are a number of batches or a fraction of them."""
SAME = (
    "fast_dev_run",
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    *LIMITS,
    "num_sanity_val_steps",
    "log_every_n_steps",
    "accumulate_grad_batches",
)
"""Arguments with the same name and meaning in both."""


def checked_limit(batches: Any, name: str) -> Any:
    """Return a number of batches or a fraction of them, checked by Lightning if it is imported."""
    determine = find("trainer.setup", "_determine_batch_limits")
    return batches if determine is None else determine(batches, name)


def _processes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the device and the strategy. Several devices are several processes, which torchrun starts."""
    accelerator, strategy = given["accelerator"], given["strategy"]
    if not isinstance(accelerator, str):
        kind = type(accelerator).__name__.removesuffix("Accelerator").lower()
        accelerator = kind if kind in ACCELERATORS else accelerator
    if accelerator not in ACCELERATORS:
        raise refusal(
            f"You selected an invalid accelerator name: `accelerator={accelerator!r}`. Hookline runs on "
            f"{', '.join(ACCELERATORS)}.",
            "accelerator",
            accelerator,
        )
    if accelerator == "gpu" and not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        raise refusal(
            "accelerator='gpu': No supported gpu backend found! accelerator='auto' also runs on a CPU.",
            "accelerator",
            accelerator,
        )
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise refusal(
            "accelerator='cuda': `CUDAAccelerator` can not run on your system since the accelerator is not "
            "available. accelerator='auto' also runs on a CPU.",
            "accelerator",
            accelerator,
        )
    name = (
        STRATEGIES.get(VARIANT.sub("", strategy.lower()))
        if isinstance(strategy, str)
        else STRATEGY_CLASSES.get(type(strategy).__name__)
    )
    is_ours = any(cls.__module__.startswith("hookline.") for cls in type(strategy).__mro__)
    if name is None and not is_ours:
        raise refusal(
            f"You selected an invalid strategy name: `strategy={strategy!r}`. Hookline has "
            f"{', '.join(STRATEGIES)}, and "
            "its own Strategy objects.",
            "strategy",
            strategy,
        )
    _check_processes(given)
    return {"device": ACCELERATORS[accelerator], "strategy": name if name is not None else strategy}


def _check_processes(given: Mapping[str, Any]) -> None:
    """Compare the requested devices with the processes that torchrun has started."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    nodes = given["num_nodes"]
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise refusal(f"num_nodes={nodes!r}: it must be a positive integer.", "num_nodes", nodes)
    on_cpu = given["accelerator"] == "cpu" or not torch.cuda.is_available()
    devices = _count(given["devices"], local, "cpu" if on_cpu else "gpu")
    if devices != local or nodes != max(1, world // local):
        command = f"torchrun --nproc-per-node={devices}" + (f" --nnodes={nodes}" if nodes > 1 else "")
        raise refusal(
            f"devices={given['devices']!r}, num_nodes={nodes}: a process of Hookline has one device, and "
            f"this job has {world}; start several processes with torchrun: {command} SCRIPT.py",
            "devices",
            given["devices"],
        )
    if world > 1 and not given["use_distributed_sampler"]:
        raise refusal(
            f"use_distributed_sampler=False: Hookline gives each of the {world} processes its share of every "
            "loader, unless the loader has a sampler for several processes. Leave the option out.",
            "use_distributed_sampler",
            False,
        )


def _count(devices: Any, local: int, accelerator: str) -> int:
    """Return the number of devices. A CPU has no indices, so there it must be a number."""
    if devices == "auto":
        return local
    if isinstance(devices, str):
        indices = [int(each) for each in devices.split(",") if each.strip().removeprefix("-").isdigit()]
        devices = indices if "," in devices else indices[0] if indices else devices
    if devices in ([], 0):
        raise refusal(
            f"devices={devices!r}: this value is not a valid input using {accelerator} accelerator; pass a "
            "number from 1.",
            "devices",
            devices,
        )
    if accelerator != "cpu" and devices == -1:
        return local
    if accelerator != "cpu" and isinstance(devices, list | tuple):
        return len(devices)
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise TypeError(f"devices={devices!r} with the {accelerator} accelerator should be an int > 0.")
    return devices


def log_meaning(given: Mapping[str, Any]) -> None:
    """Log what arguments mean that are easily mistaken: 1 is one batch, 1.0 is all."""
    for name in LIMITS:
        if (value := given[name]) == 1:
            is_one = isinstance(value, int)
            meaning = "1 batch is read; 1.0 would be all" if is_one else "100% is read; 1 would be one batch"
            log.info("`Trainer(%s=%s)` was configured so %s.", name, value, meaning)
    if (value := given["val_check_interval"]) == 1:
        meaning = "after every batch; 1.0: after every epoch"
        if not isinstance(value, int):
            meaning = "after every epoch; 1: after every batch"
        log.info("`Trainer(val_check_interval=%s)` was configured so validation will run %s.", value, meaning)
    if given["barebones"]:
        log.info("Now running in `Trainer(barebones=True)` mode: without %s.", ", ".join(BAREBONES))


def set_torch_flags(deterministic: Any, benchmark: bool | None) -> None:
    """Set torch's switches for the whole program, as Lightning does when a trainer is made."""
    if deterministic and benchmark is None:
        benchmark = False
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    if deterministic == "warn":
        torch.use_deterministic_algorithms(True, warn_only=True)
    elif isinstance(deterministic, bool):
        torch.use_deterministic_algorithms(deterministic)
    if deterministic:  # https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


def with_plugins(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with those that the plugins stand for: precision, synchronized batch norm, and
    the object that writes and reads checkpoints (`checkpoint_io`).
    """
    result = {**given, "checkpoint_io": getattr(given["strategy"], "_checkpoint_io", None)}
    writer = find("plugins", "CheckpointIO")
    plugins = as_list(given["plugins"])
    repeated = [kind for kind in PLUGIN_KINDS if sum(is_a(each, kind) for each in plugins) > 1]
    if repeated:
        raise refusal(
            f"Received multiple values for {', '.join(repeated)} in `plugins`: pass one of each.",
            "plugins",
            plugins,
        )
    for plugin in plugins:
        kind = type(plugin).__name__
        if kind in PRECISION_PLUGINS:
            if given["precision"] is not None:
                raise refusal(
                    f"Received both `precision={given['precision']}` and `plugins=` with a {kind}: choose "
                    "one.",
                    "plugins",
                    plugin,
                )
            result["precision"] = plugin.precision
        elif is_a(plugin, "LayerSync"):
            if given["sync_batchnorm"] and kind != "TorchSyncBatchNorm":
                raise refusal(
                    f"You set `Trainer(sync_batchnorm=True)` and provided a `LayerSync` plugin, a {kind}: "
                    "choose one.",
                    "plugins",
                    plugin,
                )
            result["sync_batchnorm"] = True
        elif writer is not None and isinstance(plugin, writer):
            if result["checkpoint_io"] is not None:
                raise refusal(
                    "checkpoint_io is set through both strategy= and plugins=, or twice: choose one.",
                    "plugins",
                    plugin,
                )
            result["checkpoint_io"] = plugin
        elif kind not in ("LightningEnvironment", "TorchElasticEnvironment"):  # what torchrun provides
            raise refusal(
                f"plugins= has a {kind}, which Hookline does not support; pass strategy= or precision=.",
                "plugins",
                plugin,
            )
    return result


def _precision(given: Any) -> str:
    name = "32" if given is None else PRECISION_SPELLINGS.get(str(given))
    if name is None:
        raise refusal(
            f"Precision {given!r} is invalid. Hookline has {', '.join(PRECISION_SPELLINGS)}.",
            "precision",
            given,
        )
    return name


def _validation_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return when to validate. Without a number of epochs, Lightning counts batches through the whole run."""
    interval, epochs = given["val_check_interval"], given["check_val_every_n_epoch"]
    if epochs is not None and not isinstance(epochs, int):
        raise refusal(
            f"`check_val_every_n_epoch` should be an integer. It is {epochs!r}; None counts batches only.",
            "check_val_every_n_epoch",
            epochs,
        )
    reload = given["reload_dataloaders_every_n_epochs"]
    if not isinstance(reload, int) or reload < 0:
        raise refusal(
            f"reload_dataloaders_every_n_epochs={reload!r}: it should be an int >= 0.",
            "reload_dataloaders_every_n_epochs",
            reload,
        )
    if epochs is None and isinstance(interval, float):
        raise refusal(
            "`val_check_interval` should be an integer or a time-based duration (str 'DD:HH:MM:SS', "
            f"timedelta, dict) when `check_val_every_n_epoch=None`, not {interval!r}: batches are then "
            "counted through the run.",
            "val_check_interval",
            interval,
        )
    options: dict[str, Any] = {}
    if epochs is not None:
        options["check_val_every_n_epoch"] = epochs
    if isinstance(interval, int | float):
        options["val_check_interval"] = checked_limit(interval, "val_check_interval")
    return options


def seconds_between_validations(interval: Any) -> float | None:
    """Return a `val_check_interval` that is a time, in seconds; None if it is a number of batches."""
    if isinstance(interval, dict):
        interval = datetime.timedelta(**interval)
    if isinstance(interval, datetime.timedelta):
        return interval.total_seconds()
    if not isinstance(interval, str):
        return None
    parts = interval.split(":")
    if len(parts) != 4 or not all(each.isdigit() for each in parts):
        raise refusal(
            f"val_check_interval={interval!r}: a time is written 'DD:HH:MM:SS'.",
            "val_check_interval",
            interval,
        )
    days, hours, minutes, seconds = map(int, parts)
    return datetime.timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()


def as_list(given: Any) -> list[Any]:
    """Return several objects as a list; None is none, and one object is a list of it."""
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else [given]


def root_directory(given: str | Path | None) -> str:
    """Return `default_root_dir` as Lightning does: absolute, without `~`; a URL unchanged."""
    text = str(given) if given is not None else os.getcwd()
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))
