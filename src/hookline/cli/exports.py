"""`checkpoint export | import`: write a checkpoint for other tools, or make one of another tool's weights."""

from __future__ import annotations

import argparse
import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint import files
from hookline.checkpoint.averages import FoundWeights
from hookline.checkpoint.export import export_checkpoint
from hookline.checkpoint.export_formats import check_target, choose_format
from hookline.checkpoint.foreign_files import import_checkpoint
from hookline.checkpoint.weights import rename_weights
from hookline.cli.output import print_result
from hookline.config import load_config
from hookline.config.problems import ConfigError
from hookline.config.sections import read_datamodule, read_module
from hookline.run.record import RECORD, read_record
from hookline.util.errors import CheckpointError, OptionError
from hookline.util.limited_json import is_count
from hookline.util.text import HIDDEN_VALUE, format_size, redact
from hookline.util.urls import MANIFEST, is_url

SECTIONS = ("module", "datamodule", "allow")
"""The sections of a configuration that an export needs."""
LOADERS = (
    ("predict", "predict_dataloader"),
    ("fit", "val_dataloader"),
    ("fit", "train_dataloader"),
    ("test", "test_dataloader"),
)
"""Where an example batch is taken from: the stage that the data module is set up for, and the loader."""


def export_run(chosen: argparse.Namespace) -> int:
    """Write the weights of a checkpoint, or its module as a program."""
    out = Path(chosen.out)
    format = choose_format(out, chosen.format)
    program: dict[str, Any] = {}
    if format.is_program:
        check_target(out, format, chosen.force)  # before user code runs
        module, batch = _rebuild(chosen, format.name)
        program = {
            "module": module,
            "example": _example(module, batch, chosen.method),
            "method": chosen.method,
            "dynamic_batch": chosen.dynamic_batch,
        }
    elif chosen.config or chosen.allow or chosen.dynamic_batch or chosen.method != "forward":
        raise OptionError(
            "--config, --allow, --method and --dynamic-batch are for the formats onnx and torch-export, and "
            f"{format.name} has weights only."
        )
    done = export_checkpoint(
        chosen.path,
        out,
        format.name,
        weights=chosen.weights,
        hook=chosen.hook,
        rename=_below(chosen.prefix),
        shard_size=chosen.shard_size,
        force=chosen.force,
        checkpoint=chosen.checkpoint or "auto",
        **program,
    )
    kind = "raw" if done.hook is None else "averaged" if chosen.hook is None else "hook"
    data = {
        "path": done.source,
        "out": str(out),
        "format": done.format,
        "step": done.step,
        "weights": kind,
        "hook": done.hook,
        "tensors": done.tensors,
        "numbers": done.numbers,
        "bytes": done.bytes,
    }
    of_hook = {
        "raw": "",
        "averaged": f", the averaged weights of hook {done.hook!r}; --weights raw exports the trained ones",
        "hook": f", those of {done.hook} where it has them",
    }[kind]
    text = (
        f"wrote {out} ({format_size(done.bytes)}): {done.tensors} tensors, {done.numbers:,} numbers, from "
        f"{done.source} (step {done.step}){of_hook}"
    )
    return print_result(chosen, data, text)


def _below(prefix: str | None) -> Callable[[str], str | None] | None:
    """Return a function that keeps the names below a prefix, without it."""
    if prefix is None:
        return None
    return lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None


# ---- the module and an example of its data -----------------------------------------------------------------


def _rebuild(chosen: argparse.Namespace, format: str) -> tuple[Any, Any]:
    """Make the module of a configuration, and a batch of its data, as a run of it would."""
    config = load_config(chosen.config or _recorded_config(chosen.path, format), allow=chosen.allow)
    try:
        datamodule = read_datamodule(config.source, config.permissions)
        module = read_module(config.source, config.permissions)
    except ConfigError as error:
        if chosen.config is not None:
            raise
        raise OptionError(
            f"{error}\nThe configuration is the one in {RECORD}. Name its file instead, --config CONFIG, and "
            "modules in its folder are allowed."
        ) from error
    if hasattr(module, "configure_model"):
        module.configure_model()
    return module, _first_batch(module if datamodule is None else datamodule)


def _recorded_config(path: str, format: str) -> dict[str, Any]:
    """Return the configuration in the record of the run that a checkpoint belongs to."""
    needed = (
        f"The format {format} needs the module: name the configuration of the run with --config CONFIG, or "
        "call hookline.export_checkpoint(source, out, module=..., example=...) in Python."
    )
    if is_url(path):
        raise OptionError(f"{redact(path)} is a URL. {needed}")
    place = Path(os.path.abspath(path))
    run_dir = next((each for each in (place, *place.parents) if (each / RECORD).is_file()), None)
    if run_dir is None:
        raise OptionError(f"There is no {RECORD} in {path} or above it. {needed}")
    config = read_record(run_dir).get("config")
    if not isinstance(config, dict):
        raise OptionError(
            f"The run in {run_dir} was not started from a configuration, as its {RECORD} says. {needed}"
        )
    found = {name: config[name] for name in SECTIONS if config.get(name) is not None}
    if HIDDEN_VALUE in str(found):
        raise OptionError(f"The configuration in {run_dir / RECORD} has values that are not shown. {needed}")
    return found


def _first_batch(data: Any) -> Any:
    """Return the first batch of the first loader that a data module, or a module, has."""
    getattr(data, "prepare_data", lambda: None)()
    for stage, name in LOADERS:
        setup, loader = getattr(data, "setup", None), getattr(data, name, None)
        if loader is None:
            continue
        if setup is not None:
            setup(stage)
        made = loader()
        while isinstance(made, dict) and made:  # several loaders, by name
            made = next(iter(made.values()))
        batch = None if made is None else next(iter(made), None)
        if batch is not None:
            return batch
    raise OptionError(
        f"{type(data).__name__} has no batch to trace the module with: none of its loaders "
        f"({', '.join(name for _, name in LOADERS)}) returns one."
    )


def _example(module: Any, batch: Any, method: str) -> Any:
    """Return the inputs of a method in a batch, as `hookline predict` takes them."""
    if method != "forward":
        return batch
    if isinstance(batch, Mapping):
        taken = inspect.signature(module.forward).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        named = {name: value for name, value in batch.items() if name in taken}
        return named or (dict(batch) if takes_all else (batch,))
    return (batch[0] if isinstance(batch, list | tuple) else batch,)


# ---- import ------------------------------------------------------------------------------------------------


def import_weights(chosen: argparse.Namespace) -> int:
    """Write a checkpoint with the weights of another tool's file or folder."""
    for place in (chosen.source, chosen.out):
        if is_url(place):
            raise OptionError(f"{redact(place)} is a URL: weights are imported from and to paths here.")
    out = Path(chosen.out)
    is_checkpoint = (out / MANIFEST).is_file()
    if os.path.lexists(out) and not (chosen.force and is_checkpoint):
        raise OptionError(
            f"{out} exists{'; --force replaces it' if is_checkpoint else ' and is not a checkpoint'}."
        )
    if (Path(chosen.source) / MANIFEST).is_file():
        raise CheckpointError(f"{chosen.source} is a checkpoint of Hookline already.")
    found = import_checkpoint(chosen.source, chosen.key)
    weights = rename_weights(FoundWeights(str(found.path), found.weights), _below(chosen.prefix))
    counters = {
        name: value for name, value in (("step", found.step), ("epoch", found.epoch)) if is_count(value)
    }
    contents = {"module": OrderedDict(weights), "counters": counters, "imported_from": str(found.path)}
    files.write(contents, out, {"reason": "import", "status": "imported"})
    sizes = [each.numel() for each in weights.values() if hasattr(each, "numel")]
    data = {
        "source": str(found.path),
        "out": str(out),
        "step": counters.get("step", 0),
        "tensors": len(sizes),
        "numbers": sum(sizes),
    }
    text = (
        f"wrote {out}: {len(sizes)} tensors, {sum(sizes):,} numbers, from {found.path}. Load them: "
        f"hookline.load_weights(module, {str(out)!r})"
    )
    return print_result(chosen, data, text)
