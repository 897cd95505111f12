"""Read a checkpoint from disk and verify every file against its manifest."""

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

from hookline.checkpoint.averages import SCORED_WEIGHTS, averaging_hooks
from hookline.checkpoint.format import Stored, tensor_keys, unpack_contents
from hookline.checkpoint.manifest import Manifest, is_listed_file, load_manifest
from hookline.checkpoint.rank_state import Find, RankFiles, elements_wanted, read_structure
from hookline.checkpoint.tensors import map_tensors, read_some, read_tensors
from hookline.distributed.comm import Ranks
from hookline.util.errors import CheckpointError

HASH_THREADS = 4
"""Files hashed in parallel; more threads do not read faster from one disk."""


def read_folder(path: Path) -> dict[str, Any]:
    """Verify a checkpoint and return all of its contents; combine the files of several ranks."""
    verify_folder(path)
    with _explain_read_errors(path):
        rank_files = RankFiles(path)
        return _read_contents(rank_files, rank_files.whole, read_tensors, Ranks())


def read_module_weights(path: Path, as_shards: bool = False) -> dict[str, Any]:
    """Verify a checkpoint and return its weights. as_shards: leave large tensors unread.

    Include averaged weights in the states of hooks, and the entry that names the scored weights.
    """
    verify_folder(path)
    with _explain_read_errors(path):
        rank_files = RankFiles(path)
        find = rank_files.sharded if as_shards else rank_files.whole
        structure = _structure(path)
        wanted = {"module": structure["module"]}
        if names := averaging_hooks(structure):
            wanted["hooks"] = {name: structure["hooks"][name] for name in names}
            wanted |= {SCORED_WEIGHTS: structure[SCORED_WEIGHTS]} if SCORED_WEIGHTS in structure else {}
        read = map_tensors if as_shards else read_tensors
        rest = read_some(path / "state.safetensors", tensor_keys(wanted["hooks"])) if names else {}
        return unpack_contents(wanted, Stored(read(path / "model.safetensors"), find), Stored(rest, find))


def read_for_rank(path: Path, ranks: Ranks) -> tuple[dict[str, Any], RankFiles]:
    """Return the contents for one rank of a checkpoint that is already verified; leave large tensors unread.

    Sharded tensors become `ShardedTensor`; other tensors are memory-mapped.
    """
    with _explain_read_errors(path):
        rank_files = RankFiles(path, ranks.rank)
        rank_files.count(ranks.rank, ranks.world_size)
        return _read_contents(rank_files, rank_files.sharded, map_tensors, ranks), rank_files


def _read_contents(
    rank_files: RankFiles, find: Find, read: Callable[[Path], dict[str, Tensor]], ranks: Ranks
) -> dict[str, Any]:
    path = rank_files.path
    model, rest = (Stored(read(path / name), find) for name in ("model.safetensors", "state.safetensors"))
    contents = unpack_contents(_structure(path), model, rest)
    rank_files.adapt(contents, ranks.rank, ranks.data_ranks, find)
    return contents


def _structure(path: Path) -> dict[str, Any]:
    return read_structure(path / "state.json")


@contextlib.contextmanager
def _explain_read_errors(path: Path) -> Iterator[None]:
    """Turn every exception into a CheckpointError that names the checkpoint."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {error}") from error
    except Exception as error:  # files with valid checksums can still contain anything
        raise CheckpointError(
            f"The checkpoint {path} cannot be read: {type(error).__name__}: {error}"
        ) from error


def check_shards(path: Path, counted: int | None = None) -> None:
    """Raise a CheckpointError if shards are missing. counted: the number of their elements, if known."""
    with _explain_read_errors(path):
        wanted = elements_wanted(_structure(path))
        found = RankFiles(path).count() if counted is None else counted
        if found != wanted:
            raise CheckpointError(
                f"its sharded tensors have {wanted} elements, but their shards have {found}."
            )


def verify_folder(path: Path, rank: int = 0, ranks: int = 1) -> Manifest:
    """Verify the files of a checkpoint and return its manifest.

    Every file must have its size and sha256, and a file of a checkpoint must be in the manifest. Other files
    are ignored. rank, ranks: with several ranks, each verifies the checksums of a part of the files, and the
    shards are not counted.
    """
    manifest = load_manifest(path)
    refuse_unlisted(names_in(path), manifest, str(path))
    for name, expected in manifest["files"].items():  # the cheap checks come first
        _check_kind(path, name, expected["bytes"])
    wrong: list[str] = []
    mine = itertools.islice(manifest["files"].items(), rank, None, ranks)
    with concurrent.futures.ThreadPoolExecutor(HASH_THREADS) as threads:
        for check in [
            threads.submit(_check_sum, path / name, expected["sha256"], wrong) for name, expected in mine
        ]:
            check.result()
    if wrong:
        raise CheckpointError(f"The checkpoint {path} is damaged: {'; '.join(sorted(wrong))}.")
    if ranks == 1:
        check_shards(path)
    return manifest


def refuse_unlisted(names: Iterable[str], manifest: Manifest, path: str) -> None:
    """Raise a CheckpointError if a file of a checkpoint, such as a rank's, is not in the manifest."""
    unlisted = sorted({name for name in names if is_listed_file(name)} - set(manifest["files"]))
    if unlisted:
        raise CheckpointError(
            f"The checkpoint {path} is damaged: {', '.join(unlisted)} is a file of a checkpoint, but is not "
            "in its manifest."
        )


def names_in(path: Path) -> list[str]:
    """Return the names in a checkpoint's directory."""
    try:
        return [each.name for each in path.iterdir()]
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {error.strerror or error}") from error


def _check_kind(path: Path, name: str, size: int) -> None:
    damaged = f"The checkpoint {path} is damaged: {name}"
    found = check_regular_file(path / name, damaged, path)
    if found.st_size != size:
        raise CheckpointError(f"{damaged} has {found.st_size} bytes instead of {size}.")


def check_regular_file(file: Path, damaged: str, *folders: Path) -> os.stat_result:
    """Raise a CheckpointError if a file is missing, is not a regular file, or is a link out of these folders.

    damaged: the beginning of the message.
    """
    try:
        target = file.resolve()
        if file.is_symlink() and not any(target.is_relative_to(each.resolve()) for each in folders):
            raise CheckpointError(f"{damaged} is a link to {target}, outside of the checkpoint.")
        found = file.stat()
    except FileNotFoundError:
        raise CheckpointError(f"{damaged} is missing.") from None
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError
        raise CheckpointError(f"{damaged} cannot be checked: {error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{damaged} is not a regular file.")
    return found


def _check_sum(file: Path, expected: str, wrong: list[str]) -> None:
    try:
        with file.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != expected:
                wrong.append(f"{file.name} does not match the manifest (its sha256 differs)")
    except OSError as error:
        wrong.append(f"{file.name} cannot be read: {error.strerror or os.fspath(file)}")
