"""A checkpoint on disk: a directory written aside and renamed into place."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from hookline.checkpoint.format import pack, unpack
from hookline.errors import CheckpointError

FORMAT = 1


def write(contents: dict[str, Any], path: Path) -> None:
    """Write a checkpoint; what exists under its name is whole."""
    model: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    structure = {key: pack(value, model if key == "module" else rest, key) for key, value in contents.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        save_file({key: value.contiguous().cpu() for key, value in model.items()}, aside / "model.safetensors")
        save_file({key: value.contiguous().cpu() for key, value in rest.items()}, aside / "state.safetensors")
        (aside / "state.json").write_text(json.dumps({"format": FORMAT, "contents": structure}))
        for each in aside.iterdir():
            _flush(each)
        if path.exists():
            shutil.rmtree(path)
        aside.rename(path)
        _flush(path.parent)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"The checkpoint {path} could not be written: {error}") from error


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint."""
    if not (path / "state.json").is_file():
        near = sorted(each.name for each in path.parent.glob("step-*")) if path.parent.is_dir() else []
        raise CheckpointError(f"{path} is no checkpoint." + (f" There are: {', '.join(near)}." if near else ""))
    try:
        state = json.loads((path / "state.json").read_text())
        tensors = {**load_file(path / "state.safetensors"), **load_file(path / "model.safetensors")}
        if state["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {state['format']}; this version reads format {FORMAT}.")
        contents: dict[str, Any] = unpack(state["contents"], tensors)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {error}") from error
    return contents


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
