"""Export the weights of a checkpoint as one plain file that other tools read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.checkpoint.averages import Chosen, check_weights, choose_weights, weights_of_hook
from hookline.checkpoint.tensors import NAMES, write_tensors
from hookline.checkpoint.weights import read_checkpoint
from hookline.checkpoint.writer import flush
from hookline.util.errors import CheckpointError, OptionError, closest

SUFFIXES = (".safetensors", ".pt")


@dataclass(frozen=True, slots=True)
class Exported:
    """Exported weights and their source."""

    where: str
    step: int
    weights: dict[str, Any]
    hook: str | None
    """The hook that averaged them; None: they are the trained weights."""


def export_weights(
    path: str | os.PathLike[str],
    out: Path,
    hook: str | None = None,
    force: bool = False,
    weights: str = "scored",
) -> Exported:
    """Write the weights of a checkpoint to a `.safetensors` file, or as a state_dict to a `.pt` file.

    hook: take the weights in the state of this hook, such as an average, where it has them. force: replace an
    existing file. weights: without `hook`: 'scored', 'raw' or 'averaged', as for `load_weights`.
    """
    if out.suffix not in SUFFIXES:
        raise OptionError(f"{out} must end with {' or '.join(SUFFIXES)}.{closest(out.suffix, SUFFIXES)}")
    if out.is_dir() or (out.exists() and not force):
        raise OptionError(
            f"{out} exists{' and is a directory' if out.is_dir() else '; --force replaces it'}."
        )
    if hook is not None and weights == "raw":
        raise OptionError(
            f"--hook {hook} selects the weights of a hook, and --weights raw selects the trained weights: "
            "pass only one of them."
        )
    check_weights(weights)
    read = read_checkpoint(path)
    if hook is None:
        chosen = choose_weights(read.contents, weights, read.where)
    else:
        chosen = Chosen(weights_of_hook(read.contents, hook, read.where), hook)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.new")
    try:
        _write(chosen.weights, temporary, out.suffix)
        os.replace(temporary, out)
        flush(out.parent)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return Exported(read.where, read.step, dict(chosen.weights), chosen.hook)


def _write(weights: Mapping[str, Any], temporary: Path, suffix: str) -> None:
    if suffix == ".safetensors":
        for name, value in weights.items():
            if not isinstance(value, Tensor) or value.dtype not in NAMES:
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise CheckpointError(
                    f"A .safetensors file cannot store {name} ({kind}). Export to a .pt file instead."
                )
        write_tensors(
            weights, temporary
        )  # tied weights under each name, because plain readers expect them all
        return
    with temporary.open("wb") as file:
        torch.save(dict(weights), file)
        file.flush()
        os.fsync(file.fileno())
    try:
        torch.load(temporary, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:
        raise CheckpointError(
            "These weights contain state that can be read only with pickled classes: "
            f"{str(error).partition('.')[0]}."
        ) from error
