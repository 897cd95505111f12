"""A checkpoint read from disk, if every file of it is what its manifest says."""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from hookline.checkpoint import manifest as manifests
from hookline.checkpoint.format import Stored, unpack_contents
from hookline.checkpoint.manifest import Manifest
from hookline.checkpoint.pieces import Pieces
from hookline.checkpoint.rankfiles import RankFiles
from hookline.checkpoint.tensors import map_tensors, read_tensors
from hookline.errors import CheckpointError

AT_ONCE = 4
"""Files that are summed up at a time; more would not keep a disk busier."""


def read_folder(path: Path, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Everything that was written, verified; what several ranks have written is put together."""
    verify_folder(path)
    return _read(path, Pieces.whole, read_tensors, rank, world_size)


def read_for_rank(path: Path, rank: int, world_size: int) -> dict[str, Any]:
    """The same for one rank of several, of a checkpoint that they have verified: large tensors are not read yet.

    Tensors that were spread over ranks are `Pieces`, the others lie in the file's own memory until they are copied.
    """
    return _read(path, lambda pieces: pieces, map_tensors, rank, world_size)


def _read(
    path: Path, take: Callable[[Pieces], Any], read: Callable[[Path], dict[str, Tensor]], rank: int, world_size: int
) -> dict[str, Any]:
    try:
        of_ranks = RankFiles(path, rank)
        structure = json.loads((path / "state.json").read_bytes())

        def find(entry: dict[str, Any]) -> Any:
            return take(of_ranks.pieces(entry))

        model, rest = (Stored(read(path / name), find) for name in ("model.safetensors", "state.safetensors"))
        contents = unpack_contents(structure, model, rest)
        of_ranks.adapt(contents, rank, world_size, find)
        return contents
    except CheckpointError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error


def verify_folder(path: Path, rank: int = 0, ranks: int = 1) -> Manifest:
    """Its manifest, if every file is there, has its size and its sha256, and nothing else lies beside them.

    rank, ranks: several may share the work; then the sums of the others' files are not looked at.
    """
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
    mine = itertools.islice(manifest["files"].items(), rank, None, ranks)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as threads:
        for each in [threads.submit(_check_sum, path / name, expected["sha256"], wrong) for name, expected in mine]:
            each.result()
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
