"""Checkpoints by their path or URL: written whole or not at all, verified when read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint import manifest as manifests
from hookline.checkpoint import remote
from hookline.checkpoint.format import Packed
from hookline.checkpoint.manifest import Manifest
from hookline.checkpoint.reading import read_folder, read_for_rank, verify_folder
from hookline.checkpoint.tidying import remove_folder, tidy
from hookline.checkpoint.writing import write_folder
from hookline.errors import CheckpointError
from hookline.ranks import Ranks

__all__ = ["read", "read_manifest", "read_together", "remove", "tidy", "verify", "write"]


def write(
    contents: dict[str, Any] | Packed,
    path: Path | str,
    about: Mapping[str, Any] | None = None,
    staging: Callable[[], Path] | None = None,
) -> Manifest:
    """Write a checkpoint; what exists under its name is whole. The manifest that was written.

    contents: what a run needs to go on, or a snapshot of it. about: why and when, for the manifest: reason, metrics, monitor, ...
    staging: says where files are put together before they are copied to a URL.
    """
    url = remote.as_url(path)
    return remote.write_url(contents, url, about, staging) if url else write_folder(contents, Path(path), about)


def read(path: Path | str) -> dict[str, Any]:
    """Read a checkpoint, if every file is what its manifest says."""
    url = remote.as_url(path)
    return remote.read_url(url) if url else read_folder(Path(path))


def read_together(path: Path | str, ranks: Ranks) -> dict[str, Any]:
    """What one of several ranks needs of a checkpoint that all of them read; what is wrong for one is an error for all.

    Each verifies a share of the files. Large tensors are not read yet: `pieces.lay_out` reads what a rank needs of them.
    """
    if ranks.alone:
        return read(path)
    url = remote.as_url(path)
    contents, problem = {}, ""
    try:
        if url:
            contents = remote.read_url(url, ranks.rank, ranks.world_size)
        else:
            verify_folder(Path(path), ranks.rank, ranks.world_size)
    except CheckpointError as error:
        problem = str(error)
    if problems := dict.fromkeys(filter(None, ranks.gather(problem))):
        raise CheckpointError("; ".join(problems))
    return contents if url else read_for_rank(Path(path), ranks.rank, ranks.world_size)


def read_manifest(path: Path | str) -> Manifest:
    """Its manifest only, which is quick: the tensors are not looked at."""
    url = remote.as_url(path)
    return remote.read_url_manifest(url) if url else manifests.load(Path(path))


def verify(path: Path | str) -> None:
    """An error that names the file and the reason, if the checkpoint is not whole."""
    url = remote.as_url(path)
    if url:
        remote.verify_url(url)
    else:
        verify_folder(Path(path))


def remove(path: Path | str) -> None:
    """Remove a checkpoint, so that no half of it can be taken for one at any moment."""
    url = remote.as_url(path)
    if url:
        remote.remove_url(url)
    else:
        remove_folder(Path(path))
