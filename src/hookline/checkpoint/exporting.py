"""The weights of a checkpoint as one plain file that other tools read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.checkpoint.tensors import NAMES, write_tensors
from hookline.checkpoint.weights import read_checkpoint, weights_in
from hookline.checkpoint.writing import flush
from hookline.errors import CheckpointError, OptionError, closest

SUFFIXES = (".safetensors", ".pt")


def export_weights(
    path: str | os.PathLike[str], out: Path, hook: str | None = None, force: bool = False
) -> tuple[str, dict[str, Any]]:
    """Write the weights of a checkpoint to a `.safetensors` file, or as a state_dict to a `.pt` file; where from, and what.

    hook: the weights that this hook keeps, such as an average, where it has them. force: replace a file that exists.
    """
    if out.suffix not in SUFFIXES:
        raise OptionError(f"{out} must end with {' or '.join(SUFFIXES)}.{closest(out.suffix, SUFFIXES)}")
    if out.is_dir() or (out.exists() and not force):
        raise OptionError(f"{out} exists{' and is a directory' if out.is_dir() else '; --force replaces it'}.")
    where, contents = read_checkpoint(path)
    weights = weights_in(contents, where) if hook is None else _weights_of_hook(contents, hook, where)
    aside = out.with_name(f".{out.name}.{os.getpid()}.new")
    try:
        _write(weights, aside, out.suffix)
        os.replace(aside, out)
        flush(out.parent)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
    return where, dict(weights)


def _write(weights: Mapping[str, Any], aside: Path, suffix: str) -> None:
    if suffix == ".safetensors":
        for name, value in weights.items():
            if not isinstance(value, Tensor) or value.dtype not in NAMES:
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise CheckpointError(f"A .safetensors file has no place for {name} ({kind}). Export to a .pt file instead.")
        write_tensors(weights, aside)  # tied weights under each of their names: plain readers want them all
        return
    with aside.open("wb") as file:
        torch.save(dict(weights), file)
        file.flush()
        os.fsync(file.fileno())
    try:
        torch.load(aside, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:
        raise CheckpointError("These weights hold state of another kind, which no reader without pickled classes takes: "
                              f"{str(error).partition('.')[0]}.") from error  # fmt: skip


def _weights_of_hook(contents: dict[str, Any], hook: str, where: str) -> dict[str, Any]:
    """The module's weights, with those in their place that the hook has; of tied ones it has one name only."""
    states: dict[str, Any] = contents["hooks"] if isinstance(contents.get("hooks"), dict) else {}
    if hook not in states:
        raise OptionError(f"{where} holds no state of a hook {hook!r}.{closest(hook, states)} "
                          f"It has: {', '.join(states) or 'none'}.")  # fmt: skip
    weights: dict[str, Any] = dict(weights_in(contents, where))
    for kept in (states[hook], *states[hook].values()) if isinstance(states[hook], Mapping) else ():
        if isinstance(kept, Mapping) and any(_stands_for(value, weights.get(name)) for name, value in kept.items()):
            break
    else:
        raise OptionError(f"{hook} in {where} keeps no weights: nothing in its state is called and shaped like one of the "
                          "module's. An average that has not begun is empty.")  # fmt: skip
    kept_by_memory = {weights[name].data_ptr(): value for name, value in kept.items() if _stands_for(value, weights.get(name))}
    return {name: kept_by_memory[value.data_ptr()].to(value.dtype)
            if isinstance(value, Tensor) and value.numel() and value.data_ptr() in kept_by_memory else value
            for name, value in weights.items()}  # fmt: skip


def _stands_for(value: Any, weight: Any) -> bool:
    return isinstance(value, Tensor) and isinstance(weight, Tensor) and weight.numel() > 0 and value.shape == weight.shape
