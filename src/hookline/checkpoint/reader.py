"""A checkpoint read from disk, if every file of it is what its manifest says."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from hookline.checkpoint import manifest as manifests
from hookline.checkpoint.averages import SCORED_WEIGHTS, averaging_hooks
from hookline.checkpoint.format import Stored, tensor_keys, unpack_contents
from hookline.checkpoint.manifest import Manifest
from hookline.checkpoint.rank_state import Find, RankFiles, elements_wanted, read_structure
from hookline.checkpoint.tensors import map_tensors, read_some, read_tensors
from hookline.util.errors import CheckpointError
from hookline.util.urls import is_ours

HASH_THREADS = 4
"""Files that are summed up at a time; more would not keep a disk busier."""


def read_folder(path: Path) -> dict[str, Any]:
    """Everything that was written, verified; what several ranks have written is put together."""
    verify_folder(path)
    with _explain_read_errors(path):
        of_ranks = RankFiles(path)
        return _read(of_ranks, of_ranks.whole, read_tensors, 0, 1)


def read_module(path: Path, as_shards: bool = False) -> dict[str, Any]:
    """The weights alone, of a checkpoint that is verified as a whole; as `read_for_rank` reads them, if asked
    to.

    Averaged weights that hooks keep, and the note that says which weights were scored, are read as well.
    """
    verify_folder(path)
    with _explain_read_errors(path):
        of_ranks = RankFiles(path)
        find = of_ranks.pieces if as_shards else of_ranks.whole
        structure = _structure(path)
        wanted = {"module": structure["module"]}
        if names := averaging_hooks(structure):
            wanted["hooks"] = {name: structure["hooks"][name] for name in names}
            wanted |= {SCORED_WEIGHTS: structure[SCORED_WEIGHTS]} if SCORED_WEIGHTS in structure else {}
        read = map_tensors if as_shards else read_tensors
        rest = read_some(path / "state.safetensors", tensor_keys(wanted["hooks"])) if names else {}
        return unpack_contents(wanted, Stored(read(path / "model.safetensors"), find), Stored(rest, find))


def read_for_rank(path: Path, rank: int, world_size: int) -> tuple[dict[str, Any], RankFiles]:
    """Everything for one rank of several, of a checkpoint that they have verified: large tensors are not read
    yet.

    Tensors sharded over ranks are `ShardedTensor`, others lie in the file's own memory until they are
    copied.
    """
    with _explain_read_errors(path):
        of_ranks = RankFiles(path, rank)
        of_ranks.count(rank, world_size)
        return _read(of_ranks, of_ranks.pieces, map_tensors, rank, world_size), of_ranks


def _read(
    of_ranks: RankFiles, find: Find, read: Callable[[Path], dict[str, Tensor]], rank: int, world_size: int
) -> dict[str, Any]:
    path = of_ranks.path
    model, rest = (Stored(read(path / name), find) for name in ("model.safetensors", "state.safetensors"))
    contents = unpack_contents(_structure(path), model, rest)
    of_ranks.adapt(contents, rank, world_size, find)
    return contents


def _structure(path: Path) -> dict[str, Any]:
    return read_structure(path / "state.json")


@contextlib.contextmanager
def _explain_read_errors(path: Path) -> Iterator[None]:
    """What is in the files makes no sense, although they are what the manifest says."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {error}") from error
    except Exception as error:  # whoever has signed it may have written anything at all
        raise CheckpointError(
            f"The checkpoint {path} cannot be read: {type(error).__name__}: {error}"
        ) from error


def check_shards(path: Path, counted: int | None = None) -> None:
    """Whether the pieces of all ranks make whole tensors; `counted`: how many numbers they have, if that is
    known.
    """
    with _explain_read_errors(path):
        wanted = elements_wanted(_structure(path))
        found = RankFiles(path).count() if counted is None else counted
        if found != wanted:
            raise CheckpointError(
                f"its tensors that are spread over ranks have {wanted} numbers, but their pieces {found}."
            )


def verify_folder(path: Path, rank: int = 0, ranks: int = 1) -> Manifest:
    """Its manifest, if every file is there, has its size and its sha256, and no further file of ours lies
    beside them.

    Files of others are left alone.

    rank, ranks: several may share the work; then neither the sums of the others' files nor the pieces are
    looked at.
    """
    manifest = manifests.load(path)
    refuse_unlisted(_names(path), manifest, str(path))
    for name, expected in manifest["files"].items():  # what is cheap to see first
        _check_kind(path, name, expected["bytes"])
    wrong: list[str] = []
    mine = itertools.islice(manifest["files"].items(), rank, None, ranks)
    with concurrent.futures.ThreadPoolExecutor(HASH_THREADS) as threads:
        for each in [
            threads.submit(_check_sum, path / name, expected["sha256"], wrong) for name, expected in mine
        ]:
            each.result()
    if wrong:
        raise CheckpointError(f"The checkpoint {path} is damaged: {'; '.join(sorted(wrong))}.")
    if ranks == 1:
        check_shards(path)
    return manifest


def refuse_unlisted(names: Iterable[str], manifest: Manifest, path: str) -> None:
    """Refuse a checkpoint with one more file of ours than it was written with, such as a rank's."""
    unlisted = sorted({name for name in names if manifests.is_file(name)} - set(manifest["files"]))
    if unlisted:
        raise CheckpointError(
            f"The checkpoint {path} is damaged: {', '.join(unlisted)} is a file of a checkpoint that is not "
            "in its manifest."
        )


def extra_names(path: Path) -> list[str]:
    """The files and folders of others in a checkpoint's directory; hidden ones are of file systems and
    browsers.
    """
    return sorted(name for name in _names(path) if not is_ours(name) and not name.startswith("."))


def _names(path: Path) -> list[str]:
    try:
        return [each.name for each in path.iterdir()]
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {error.strerror or error}") from error


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
