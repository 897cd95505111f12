"""Checkpoints by their path or URL: written whole or not at all, verified when read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from hookline.checkpoint import manifest as manifests
from hookline.checkpoint import reader
from hookline.checkpoint.cleanup import clean_up, remove_folder
from hookline.checkpoint.contents import check_contents
from hookline.checkpoint.format import Packed
from hookline.checkpoint.manifest import Manifest
from hookline.checkpoint.reader import check_shards, read_folder, read_for_rank, read_module, verify_folder
from hookline.checkpoint.writer import write_folder
from hookline.distributed.comm import Ranks
from hookline.util.errors import CheckpointError
from hookline.util.urls import as_url

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
    """Write a checkpoint; what exists under its name is whole. The manifest that was written.

    contents: what a run needs to go on, or a snapshot of it. about: why and when, for the manifest: reason,
    metrics, monitor, ... staging: says where files are put together before they are copied to a URL.
    """
    if url := as_url(path):
        from hookline.checkpoint import remote

        return remote.write_url(contents, url, about, staging)
    return write_folder(contents, Path(path), about)


def read(path: Path | str) -> dict[str, Any]:
    """Read a checkpoint, if every file is what its manifest says."""
    if url := as_url(path):
        from hookline.checkpoint import remote

        return remote.read_url(url)
    return read_folder(Path(path))


def read_on_all_ranks(path: Path | str, ranks: Ranks) -> dict[str, Any]:
    """What one of several ranks needs of a run's checkpoint that all of them read; what is wrong for one is
    an error for all.

    Each verifies a share of the files. Large tensors are not read yet: `materialize` reads what a rank
    needs of them.
    """
    contents = read(path) if ranks.alone else _read_share(path, ranks)
    _agreed(ranks, lambda: check_contents(contents, path))
    return contents


def _read_share(path: Path | str, ranks: Ranks) -> dict[str, Any]:
    url, folder = as_url(path), Path(path)
    rank, world_size = ranks.rank, ranks.world_size
    if url:
        from hookline.checkpoint import remote

        return _agreed(ranks, lambda: remote.read_url_for_rank(url, rank, world_size))
    _agreed(ranks, lambda: verify_folder(folder, rank, world_size))
    contents, of_ranks = _agreed(ranks, lambda: read_for_rank(folder, rank, world_size))
    check_shards(folder, sum(ranks.gather(of_ranks.counted)))
    return contents


def _agreed(ranks: Ranks, act: Callable[[], T]) -> T:
    """What comes of it on this rank, if nothing was wrong on any."""
    result, problem = cast(T, None), ""
    try:
        result = act()
    except CheckpointError as error:
        problem = str(error)
    told = ranks.gather(problem)
    if any(told):
        said = {each: [rank for rank, text in enumerate(told) if text == each] for each in filter(None, told)}
        raise CheckpointError(
            "; ".join(
                text if len(who) == len(told) else f"{text} (found by rank {', '.join(map(str, who))})"
                for text, who in said.items()
            )
        )
    return result


def read_weights(path: Path | str, as_pieces: bool = False) -> dict[str, Any]:
    """The weights of a checkpoint and nothing else, verified; `as_pieces`: for a module that needs only a
    part of each.
    """
    if url := as_url(path):
        from hookline.checkpoint import remote

        return remote.read_url_module(url)
    return read_module(Path(path), as_pieces)


def read_manifest(path: Path | str) -> Manifest:
    """Its manifest only, which is quick: the tensors are not looked at."""
    if url := as_url(path):
        from hookline.checkpoint import remote

        return remote.read_url_manifest(url)
    return manifests.load(Path(path))


def verify(path: Path | str) -> None:
    """An error that names the file and the reason, if the checkpoint is not whole."""
    if url := as_url(path):
        from hookline.checkpoint import remote

        remote.verify_url(url)
    else:
        verify_folder(Path(path))


def extra_names(path: Path | str) -> list[str]:
    """The files and folders that others have put beside the checkpoint's own; they are left alone."""
    if url := as_url(path):
        from hookline.checkpoint import remote

        return remote.extra_names_at(url)
    return reader.extra_names(Path(path))


def remove(path: Path | str) -> None:
    """Remove a checkpoint, so that no half of it can be taken for one at any moment."""
    if url := as_url(path):
        from hookline.checkpoint import remote

        remote.remove_url(url)
    else:
        remove_folder(Path(path))
