"""A checkpoint on disk: a directory written aside and renamed into place, verified when read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hookline.checkpoint.format import TensorStore, pack, unpack
from hookline.errors import CheckpointError

FORMAT = 1
FILES = ("model.safetensors", "state.safetensors", "state.json")


def write(contents: dict[str, Any], path: Path) -> None:
    """Write a checkpoint; what exists under its name is whole."""
    model, rest = TensorStore(), TensorStore()
    structure = {key: pack(value, model if key == "module" else rest, key) for key, value in contents.items()}
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_file(_separate(model), aside / "model.safetensors")
        save_file(_separate(rest), aside / "state.safetensors")
        (aside / "state.json").write_text(json.dumps(structure))
        manifest = {"format": FORMAT, "files": {name: _fingerprint(aside / name) for name in FILES}}
        (aside / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for each in (*aside.iterdir(), aside):
            _flush(each)
        _put_in_place(aside, path)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"The checkpoint {path} could not be written: {error}") from error


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint, if every file is what its manifest says."""
    if not (path / "manifest.json").is_file():
        near = sorted(each.name for each in path.parent.glob("step-*")) if path.parent.is_dir() else []
        raise CheckpointError(f"{path} is no checkpoint." + (f" There are: {', '.join(near)}." if near else ""))
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {manifest['format']}; this version reads format {FORMAT}.")
        for name, expected in manifest["files"].items():
            if _fingerprint(path / name) != expected:
                raise CheckpointError(f"The checkpoint {path} is damaged: {name} is not what its manifest says.")
        structure = json.loads((path / "state.json").read_text())
        model, rest = load_file(path / "model.safetensors"), load_file(path / "state.safetensors")
        return {key: unpack(value, model if key == "module" else rest) for key, value in structure.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error


def _put_in_place(aside: Path, path: Path) -> None:
    """One that stands there already is moved away, not deleted, until the new one has its name."""
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    shutil.rmtree(old, ignore_errors=True)
    replacing = path.exists()
    if replacing:
        os.rename(path, old)
    try:
        os.rename(aside, path)
    except BaseException:
        if replacing:
            os.rename(old, path)
        raise
    _flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share memory (views of one buffer) get memory of their own, which safetensors insists on."""
    made: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():
        tensor = tensor.cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        made[key] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return made


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
