"""Hooks by name: the built-in hooks and those of installed packages, looked up on request.

They are plug-ins: the trainer does not know them, and a hook that is not used is not imported. `lazy_names`
loads the names that a package exports in the same way.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hookline.util.errors import CLASSES, HookError, closest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "hookline.hooks"
"""The entry-point group under which a package offers hooks. Such hooks are listed and never added by
themselves.
"""

BUILTIN_HOOKS: dict[str, str] = {
    "progress_bar": "hookline.hooks.progress_bar:ProgressBar",
    "console_log": "hookline.hooks.console_log:ConsoleLog",
    "json_log": "hookline.hooks.json_log:JSONLog",
    "lr_monitor": "hookline.hooks.lr_monitor:LRMonitor",
    "throughput": "hookline.hooks.throughput:Throughput",
    "device_stats": "hookline.hooks.device_stats:DeviceStats",
    "memory_monitor": "hookline.hooks.memory_monitor:MemoryMonitor",
    "model_summary": "hookline.hooks.model_summary:ModelSummary",
    "timer": "hookline.hooks.timer:Timer",
    "heartbeat": "hookline.hooks.heartbeat:Heartbeat",
    "health_check": "hookline.hooks.health_check:HealthCheck",
    "webhook": "hookline.hooks.webhook:Webhook",
    "open_telemetry": "hookline.hooks.open_telemetry:OpenTelemetry",
    "gradient_monitor": "hookline.hooks.gradient_monitor:GradientMonitor",
    "nan_guard": "hookline.hooks.nan_guard:NaNGuard",
    "spike_guard": "hookline.hooks.spike_guard:SpikeGuard",
    "activation_monitor": "hookline.hooks.activation_monitor:ActivationMonitor",
    "profiler": "hookline.hooks.profiler:Profiler",
    "lr_finder": "hookline.hooks.lr_finder:LRFinder",
    "early_stopping": "hookline.hooks.early_stopping:EarlyStopping",
    "exclude_samples": "hookline.hooks.exclude_samples:ExcludeSamples",
    "model_checkpoint": "hookline.hooks.model_checkpoint:ModelCheckpoint",
    "export_pretrained": "hookline.hooks.export_pretrained:ExportPretrained",
    "upload_checkpoint": "hookline.hooks.upload_checkpoint:UploadCheckpoint",
    "mixture_schedule": "hookline.hooks.mixture_schedule:MixtureSchedule",
    "slurm_requeue": "hookline.hooks.slurm_requeue:SlurmRequeue",
    "hparams": "hookline.hooks.hparams:HParams",
    "weight_averaging": "hookline.hooks.weight_averaging:WeightAveraging",
    "freeze_schedule": "hookline.hooks.freeze_schedule:FreezeSchedule",
    "lr_schedule": "hookline.hooks.lr_schedule:LRSchedule",
    "loss_schedule": "hookline.hooks.loss_schedule:LossSchedule",
    "prediction_writer": "hookline.hooks.prediction_writer:PredictionWriter",
    "generate_samples": "hookline.hooks.generate_samples:GenerateSamples",
    "optuna_pruning": "hookline.hooks.optuna_pruning:OptunaPruning",
    "accumulation_schedule": "hookline.hooks.accumulation_schedule:AccumulationSchedule",
    "parameter_schedule": "hookline.hooks.parameter_schedule:ParameterSchedule",
    "batch_size_finder": "hookline.hooks.batch_size_finder:BatchSizeFinder",
    "garbage_collection": "hookline.hooks.garbage_collection:GarbageCollection",
}

LIGHTNING = "hookline.interop.lightning"
ONLY_LIGHTNINGS = ("cli", "demos", "plugins", "profilers", "strategies", "utilities")
"""Modules of Lightning that this package has no counterparts of."""
_CLI = "Convert its file with `hookline convert FILE` and run it with `hookline fit`"
LIGHTNINGS_PLACES = {
    "LightningCLI": f"{_CLI}, or run the program with `hookline run --as lightning`",
    "rank_zero_only": "Import it from Lightning: lightning.pytorch.utilities.rank_zero_only",
    "tuner": f"Use: from {LIGHTNING} import Tuner",
}
"""Names of Lightning that this package does not have in the same place, with what to do instead."""
OTHERS = {
    "LightningCLI": _CLI,
    "callbacks": "Callbacks are hooks here: from hookline.hooks import EarlyStopping",
    "rank_zero_only": "Set `ranks = 'zero'` in the hook, or test trainer.strategy.rank == 0",
}
"""Names of other systems that are no classes here, with what to do instead."""
PUBLIC = ("hookline", "hookline.hooks", "hookline.loggers")
"""The packages that classes are imported from."""


def offered_hooks() -> dict[str, str]:
    """Return every hook that has a name, with the path of its class. A package cannot replace a built-in
    name.
    """
    return {**{each.name: each.value for each in package_hooks()}, **BUILTIN_HOOKS}


def package_hooks() -> list[EntryPoint]:
    """Return the hooks that installed packages offer. Of two installations of a package, the first on the
    path counts.
    """
    found: dict[tuple[str, str], EntryPoint] = {}
    for folder in sys.path:
        for package, offer in _offers(folder, _modified(folder)):
            found.setdefault((package, offer.name), offer)
    return list(found.values())


@functools.lru_cache(maxsize=64)
def _offers(folder: str, modified: int) -> tuple[tuple[str, EntryPoint], ...]:
    """Read the packages of a folder once: with 170 of them it takes 50 ms, for each configuration."""
    import importlib.metadata

    return tuple(
        (package.name, each)
        for package in importlib.metadata.distributions(path=[folder])
        for each in package.entry_points.select(group=GROUP)
    )


def _modified(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


def hook_class(name: str) -> Any:
    """Return the class of a named hook."""
    known = BUILTIN_HOOKS if name in BUILTIN_HOOKS else offered_hooks()
    if name not in known:
        raise HookError(
            f"There is no hook called {name!r}.{closest(name, known)} There are: {', '.join(known)}."
        )
    module, _, attribute = known[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def not_a_hook(given: Any) -> str:
    """Return the error about an object that is not a hook; for a text, how to pass the hook of this name."""
    if not isinstance(given, str):
        return (
            f"{type(given).__name__} has no event method, so it would never be called. "
            "Derive it from hookline.Hook, or mark a function with @on('step_end')."
        )
    paths = {name.replace("_", ""): path for name, path in BUILTIN_HOOKS.items()}
    near = difflib.get_close_matches(given.replace("_", "").lower(), paths, n=1)
    meant = paths[near[0] if near else "earlystopping"].partition(":")[2]
    return (
        f"The text {given!r} is not a hook. Pass an object{'' if near else ', such as EarlyStopping'}: "
        f"from hookline.hooks import {meant}; hooks=[{meant}()]. Names work in configuration files only."
    )


def import_instead(package: str, name: str) -> str:
    """Return the import line of a name that a package does not have, for its error; empty if it is unknown.

    For a class of another system it is that of Hookline's equivalent.
    """
    if package == LIGHTNING and name in ONLY_LIGHTNINGS:
        return f". Import it from Lightning: lightning.pytorch.{name}"
    if package == LIGHTNING and name in LIGHTNINGS_PLACES:
        return f". {LIGHTNINGS_PLACES[name]}"
    if package in PUBLIC and name in OTHERS:
        return f". {OTHERS[name]}"
    if package not in PUBLIC or not name[:1].isupper():
        return ""
    places = (each for each in PUBLIC if name in importlib.import_module(each).__all__)
    home, _, ours = CLASSES.get(name, f"{next(places, '')}.{name}").rpartition(".")
    known = "" if ours == name else f" is {ours} in Hookline"
    place = (
        ". It writes into the run's directory: Trainer(run_dir=...)" if ours in ("CSV", "TensorBoard") else ""
    )
    return f". {name}{known}: from {home} import {ours}{place}" if home else ""


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports a name's module when the name is first
    used.

    homes: each name with the module below the package that defines it. A name must differ from every module
    below the package, because an imported module would replace it.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}{import_instead(package, name)}"
            )
        value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        module = sys.modules[package]
        return sorted({*vars(module), *module.__all__})

    return load, names
