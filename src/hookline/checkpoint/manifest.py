"""The manifest of a checkpoint: what it is, and what its files must be. It is written last and signs itself."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import safetensors
import torch

from hookline._version import __version__
from hookline.errors import CheckpointError
from hookline.urls import MANIFEST

NAME = MANIFEST
FORMAT = 2
KIND = "hookline checkpoint"
FILES = ("model.safetensors", "state.safetensors", "state.json")
OF_RANK = re.compile(r"rank-\d+\.(?:json|safetensors)")
"""What ranks have written for themselves: their pieces of tensors, and what differs from rank zero's."""
COUNTERS = ("step", "epoch", "epochs_seen", "batches_seen")
OWN = ("format", "kind", "saved_at", "versions", "shared", "files", "sha256")
"""What only the writer can know."""

Manifest: TypeAlias = dict[str, Any]


def is_file(name: str) -> bool:
    """Whether a checkpoint may have a file of this name, beside its manifest."""
    return name in FILES or OF_RANK.fullmatch(name) is not None


def make(about: Mapping[str, Any], counters: Mapping[str, Any], shared: dict[str, str], files: dict[str, Any]) -> Manifest:
    """A manifest for these files. `about` says why and when it was saved; what it leaves out is taken from the counters."""
    for name in OWN:
        if name in about:
            raise CheckpointError(f"{name!r} is worked out when a checkpoint is written; it cannot be given.")
    manifest = {
        "format": FORMAT, "kind": KIND, **{name: counters.get(name, 0) for name in COUNTERS}, "reason": "manual",
        "saved_at": datetime.now(UTC).isoformat(timespec="microseconds"), "world_size": 1, "metrics": {}, "monitor": None,
        "status": "training",
        **{name: _plain(value, name) for name, value in about.items()},
        "versions": {"hookline": __version__, "torch": str(torch.__version__), "safetensors": safetensors.__version__,
                     "python": platform.python_version()},
        "shared": shared, "files": files,
    }  # fmt: skip
    return {**manifest, "sha256": signature(manifest)}


def render(manifest: Manifest) -> str:
    """As it stands in the file."""
    return json.dumps(manifest, indent=1) + "\n"


def signature(manifest: Mapping[str, Any]) -> str:
    """The sha256 of everything in it but the signature."""
    signed = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load(path: Path) -> Manifest:
    """The manifest of the checkpoint at this path, if nobody has changed it."""
    file = path / NAME
    if path.is_file():
        raise CheckpointError(f"{path} is a file; a checkpoint of a run is a directory. The weights in another program's file "
                              f"are taken over by load_weights(module, hookline.import_checkpoint({str(path)!r})).")  # fmt: skip
    if not file.is_file():
        raise CheckpointError(f"{path} is no checkpoint: it has no {NAME}.{_beside(path)}")
    try:
        return parse(file.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {NAME}: {error.strerror or error}") from error


def parse(data: bytes, path: str) -> Manifest:
    """A manifest from its bytes. `path` is for errors."""
    damaged = f"The checkpoint {path} is damaged: {NAME}"
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{damaged} is no JSON ({error})." if data else f"{damaged} is empty.") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise CheckpointError(f"{damaged} does not say which format it has.")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {manifest['format']}; this version reads format {FORMAT} and no other.")
    if manifest.get("sha256") != signature(manifest) or render(manifest).encode() != data:
        raise CheckpointError(f"{damaged} is not as it was written: its sha256 does not fit its text.")
    if manifest.get("kind") != KIND or set(FILES) - set(manifest["files"]) or not all(map(is_file, manifest["files"])):
        raise CheckpointError(f"{path} is no checkpoint of a run: it is a {manifest.get('kind')!r}.")
    return manifest


def _plain(value: Any, where: str) -> Any:
    """What JSON can hold everywhere: numbers that are not finite as text, and tensors or numpy's numbers as plain ones."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if type(value) is int:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise CheckpointError(f"A manifest cannot hold {where}={value!r}: only numbers, text and None.") from None
    return number if math.isfinite(number) else repr(number)


def _beside(path: Path) -> str:
    near = sorted(each.name for each in path.parent.glob("step-*")) if path.parent.is_dir() else []
    return f" There are: {', '.join(near)}." if near else ""
