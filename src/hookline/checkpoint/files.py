"""Write, read, verify and remove checkpoints by path or URL. A write is atomic; a read verifies the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from hookline.checkpoint import reader
from hookline.checkpoint.cleanup import clean_up, remove_checkpoint_folder
from hookline.checkpoint.contents import check_contents
from hookline.checkpoint.format import Packed
from hookline.checkpoint.manifest import Manifest, load_manifest
from hookline.checkpoint.reader import (
    check_shards,
    read_folder,
    read_for_rank,
    read_module_weights,
    verify_folder,
)
from hookline.checkpoint.writer import write_folder
from hookline.distributed.comm import Ranks
from hookline.engine.foreign import read_foreign_checkpoint
from hookline.util.errors import CheckpointError
from hookline.util.urls import as_url, is_checkpoint_file

__all__ = [
    "clean_up",
    "extra_names",
    "read",
    "read_manifest",
    "read_on_all_ranks",
    "read_weights",
    "remove",
    "verify",
    "write",
]


T = TypeVar("T")


def write(
    contents: dict[str, Any] | Packed,
    path: Path | str,
    about: Mapping[str, Any] | None = None,
    staging: Callable[[], Path] | None = None,
) -> Manifest:
    """Write a checkpoint atomically and return its manifest.

    contents: the state that a run needs to continue, or a snapshot of it. about: entries of the manifest,
    such as reason, metrics and monitor. staging: returns the folder for the files that are copied to a URL.
    """
    if url := as_url(path):
        from hookline.checkpoint import remote

        return remote.write_url(contents, url, about, staging)
    return write_folder(contents, Path(path), about)


def read(path: Path | str) -> dict[str, Any]:
    """Verify every file of a checkpoint against its manifest and return the contents."""
    if url := as_url(path):
        from hookline.checkpoint import remote

        return read_foreign_checkpoint(url, 0, 1) if remote.is_single_file(url) else remote.read_url(url)
    return read_foreign_checkpoint(path, 0, 1) if Path(path).is_file() else read_folder(Path(path))


def read_on_all_ranks(path: Path | str, ranks: Ranks) -> dict[str, Any]:
    """Return the contents of a run's checkpoint for this rank. An error on one rank is raised on all.

    Each rank verifies a part of the files. Large tensors are not read yet: `materialize` reads what a rank
    needs of them.
    """
    contents = read(path) if ranks.alone else _read_for_rank(path, ranks)
    _run_on_all_ranks(ranks, lambda: check_contents(contents, path))
    return contents


def _read_for_rank(path: Path | str, ranks: Ranks) -> dict[str, Any]:
    url, folder = as_url(path), Path(path)
    rank, world_size = ranks.rank, ranks.world_size
    if url:
        from hookline.checkpoint import remote

        read_one = _read_file_for_rank if remote.is_single_file(url) else remote.read_url_for_rank
        return _run_on_all_ranks(ranks, lambda: read_one(url, ranks))
    if folder.is_file():
        return _run_on_all_ranks(ranks, lambda: _read_file_for_rank(path, ranks))
    _run_on_all_ranks(ranks, lambda: verify_folder(folder, rank, world_size))
    contents, rank_files = _run_on_all_ranks(ranks, lambda: read_for_rank(folder, ranks))
    check_shards(folder, sum(ranks.gather(rank_files.counted)))
    return contents


def _read_file_for_rank(path: Path | str, ranks: Ranks) -> dict[str, Any]:
    return read_foreign_checkpoint(path, ranks.data_rank, ranks.data_size)


def _run_on_all_ranks(ranks: Ranks, act: Callable[[], T]) -> T:
    """Return the result of `act` on this rank, or raise the problems of all ranks on every rank."""
    result, problem = cast(T, None), ""
    try:
        result = act()
    except CheckpointError as error:
        problem = str(error)
    problems = ranks.gather(problem)
    if any(problems):
        ranks_of: dict[str, list[int]] = {}
        for rank, text in enumerate(problems):
            if text:
                ranks_of.setdefault(text, []).append(rank)
        raise CheckpointError(
            "; ".join(
                text
                if len(found_by) == len(problems)
                else f"{text} (found by rank {', '.join(map(str, found_by))})"
                for text, found_by in ranks_of.items()
            )
        )
    return result


def read_weights(path: Path | str, as_shards: bool = False) -> dict[str, Any]:
    """Verify a checkpoint and return only its weights; `as_shards`: return sharded ones unread."""
    if url := as_url(path):
        from hookline.checkpoint import remote

        return remote.read_url_module(url)
    return read(path) if Path(path).is_file() else read_module_weights(Path(path), as_shards)


def read_manifest(path: Path | str) -> Manifest:
    """Return the manifest of a checkpoint. This is fast, because the tensors are not verified."""
    if url := as_url(path):
        from hookline.checkpoint import remote

        return remote.read_url_manifest(url)
    return load_manifest(Path(path))


def verify(path: Path | str) -> None:
    """Raise a CheckpointError that names the file and the reason if the checkpoint is not complete."""
    if url := as_url(path):
        from hookline.checkpoint import remote

        remote.verify_url(url)
    else:
        verify_folder(Path(path))


def extra_names(path: Path | str) -> list[str]:
    """Return the names in a checkpoint's directory that Hookline did not write, without hidden ones."""
    if url := as_url(path):
        from hookline.checkpoint import remote

        names = remote.names_at(url)
    else:
        names = reader.names_in(Path(path))
    return sorted(name for name in names if not is_checkpoint_file(name) and not name.startswith("."))


def remove(path: Path | str) -> None:
    """Remove a checkpoint. An interrupted removal does not leave a partial checkpoint under its name."""
    if url := as_url(path):
        from hookline.checkpoint import remote

        remote.remove_url(url)
    else:
        remove_checkpoint_folder(Path(path))
