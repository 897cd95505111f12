"""A checkpoint read from disk, if every file of it is what its manifest says."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hookline.checkpoint import manifest as manifests
from hookline.checkpoint.format import unpack_contents
from hookline.checkpoint.manifest import Manifest
from hookline.checkpoint.tensors import read_tensors
from hookline.errors import CheckpointError


def read_folder(path: Path) -> dict[str, Any]:
    """Everything that was written."""
    verify_folder(path)
    try:
        structure = json.loads((path / "state.json").read_bytes())
        model, rest = read_tensors(path / "model.safetensors"), read_tensors(path / "state.safetensors")
        return unpack_contents(structure, model, rest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error


def verify_folder(path: Path) -> Manifest:
    """Its manifest, if every file is there, has its size and its sha256, and nothing else lies beside them."""
    manifest = manifests.load(path)
    try:
        found = {each.name for each in path.iterdir() if not each.name.startswith(".")}  # those are of file systems and browsers
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {error.strerror or error}") from error
    unknown = found - {*manifest["files"], manifests.NAME}
    if unknown:
        raise CheckpointError(f"The checkpoint {path} is damaged: {', '.join(sorted(unknown))} does not belong to it.")
    for name, expected in manifest["files"].items():  # what is cheap to see first
        _check_kind(path, name, expected["bytes"])
    wrong: list[str] = []
    threads = [threading.Thread(target=_check_sum, args=(path / name, expected["sha256"], wrong), daemon=True)
               for name, expected in manifest["files"].items()]  # fmt: skip
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if wrong:
        raise CheckpointError(f"The checkpoint {path} is damaged: {'; '.join(sorted(wrong))}.")
    return manifest


def _check_kind(path: Path, name: str, size: int) -> None:
    file = path / name
    damaged = f"The checkpoint {path} is damaged: {name}"
    try:
        if file.is_symlink() and not file.resolve().is_relative_to(path.resolve()):
            raise CheckpointError(f"{damaged} is a link that leads out of it, to {file.resolve()}.")
        found = file.stat()
    except FileNotFoundError:
        raise CheckpointError(f"{damaged} is missing.") from None
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError
        raise CheckpointError(f"{damaged} cannot be looked at: {error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{damaged} is no regular file.")
    if found.st_size != size:
        raise CheckpointError(f"{damaged} has {found.st_size} bytes instead of {size}.")


def _check_sum(file: Path, expected: str, wrong: list[str]) -> None:
    try:
        with file.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != expected:
                wrong.append(f"{file.name} is not what its manifest says (its sha256 differs)")
    except OSError as error:
        wrong.append(f"{file.name} cannot be read: {error.strerror or os.fspath(file)}")
