"""Checkpoints at a URL, through fsspec. Writing stages the files locally and copies the manifest last;
reading downloads and verifies them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint.cleanup import clean_up
from hookline.checkpoint.format import Packed
from hookline.checkpoint.manifest import Manifest, parse_manifest
from hookline.checkpoint.reader import (
    read_folder,
    read_for_rank,
    read_module_weights,
    refuse_unlisted,
    verify_folder,
)
from hookline.checkpoint.writer import owner, protect_from_cleanup, write_folder
from hookline.distributed.comm import Ranks
from hookline.util.errors import CheckpointError, HooklineError
from hookline.util.limited_json import MANIFEST_BYTES
from hookline.util.text import holds_secret, redact
from hookline.util.urls import MANIFEST, open_url, put_folder, remove_remote_folder, split_query, url_below


def write_url(
    contents: dict[str, Any] | Packed,
    url: str,
    about: Mapping[str, Any] | None,
    staging: Callable[[], Path] | None,
) -> Manifest:
    """Write a checkpoint to a local folder and copy it to a URL. staging: see `staging_folder`."""
    with (
        open_remote(url, "could not be written") as (fs, root),
        staging_folder(staging) as folder,
        _show_url_in_errors(url, str(folder)),
    ):
        manifest = write_folder(contents, folder / "checkpoint", about)
        put_folder(fs, folder / "checkpoint", root)
    return manifest


@contextlib.contextmanager
def staging_folder(staging: Callable[[], Path] | None) -> Iterator[Path]:
    """Create a temporary folder below the one that `staging` returns, or in the system's default."""
    parent = staging() if staging else None
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
        clean_up(parent)  # a killed process leaves its folder behind
    with tempfile.TemporaryDirectory(prefix=".staging-", suffix=f".{owner()}.new", dir=parent) as name:
        folder = Path(os.path.abspath(name))
        with protect_from_cleanup(folder):
            yield folder


def copy_to_url(folder: Path, url: str) -> None:
    """Copy a complete checkpoint to a URL, its manifest last."""
    with open_remote(url, "could not be written") as (fs, root):
        put_folder(fs, folder, root)


def is_single_file(url: str) -> bool:
    """Return whether a URL is one file in another package's format, not a directory with a manifest."""
    with open_remote(url, "cannot be read") as (fs, root):
        return not fs.exists(url_below(root, MANIFEST)) and bool(fs.isfile(root))


def read_url(url: str) -> dict[str, Any]:
    """Download a checkpoint and read it."""
    with _download(url) as folder:
        return read_folder(folder)


def read_url_for_rank(url: str, ranks: Ranks) -> dict[str, Any]:
    """Download a checkpoint and read it for one rank; delete the download once its tensors are released."""
    with contextlib.ExitStack() as until_read:
        folder = until_read.enter_context(_download(url))
        verify_folder(folder)
        contents, rank_files = read_for_rank(folder, ranks)
        weakref.finalize(rank_files, until_read.pop_all().close)
    return contents


def read_url_module(url: str) -> dict[str, Any]:
    """Download a checkpoint and read only its weights."""
    with _download(url) as folder:
        return read_module_weights(folder)


def verify_url(url: str) -> None:
    """Download a checkpoint and verify it."""
    with _download(url) as folder:
        refuse_unlisted(names_at(url), verify_folder(folder), redact(url))


def names_at(url: str) -> list[str]:
    """Return the names at a URL; none if the file system cannot list them, as many http servers."""
    fs, root = open_url(url)
    try:
        return [each.rstrip("/").rpartition("/")[2] for each in fs.ls(root, detail=False)]
    except Exception:  # every file system raises its own exceptions
        return []


def read_url_manifest(url: str) -> Manifest:
    """Download and verify only the manifest."""
    with open_remote(url, "cannot be read") as (fs, root):
        return parse_manifest(_download_manifest(fs, root, url), redact(url))


def remove_url(url: str) -> None:
    """Remove a checkpoint, its manifest first."""
    with open_remote(url, "could not be removed") as (fs, root):
        remove_remote_folder(fs, root)


def list_urls(url: str) -> list[str]:
    """Return the URLs of all checkpoints at or below a URL, but not inside of another checkpoint."""
    with open_remote(url, "cannot be listed") as (fs, root):
        fs.invalidate_cache()
        if fs.exists(url_below(root, MANIFEST)):
            return [url.rstrip("/")]
        root_path, suffix = split_query(root)[0].rstrip("/"), f"/{MANIFEST}"
        found = sorted(each.removesuffix(suffix) for each in fs.find(root) if each.endswith(suffix))
        outermost = [each for each in found if not any(each.startswith(f"{other}/") for other in found)]
        base, mark, query = split_query(url)
        return [f"{base.rstrip('/')}{each[len(root_path) :]}{mark}{query}" for each in outermost]


def _download_manifest(fs: Any, root: str, url: str) -> bytes:
    fs.invalidate_cache()
    file = url_below(root, MANIFEST)
    try:
        if fs.size(file) is None:  # the server does not report sizes
            return fs.cat_file(file, 0, MANIFEST_BYTES + 1)  # type: ignore[no-any-return]
        if fs.size(file) > MANIFEST_BYTES:
            raise CheckpointError(
                f"The checkpoint {redact(url)} is damaged: {MANIFEST} is larger than "
                f"{MANIFEST_BYTES // 2**20} MB, the limit for a manifest."
            )
        return fs.cat_file(file)  # type: ignore[no-any-return]
    except FileNotFoundError:
        raise CheckpointError(f"{redact(url)} is not a checkpoint: it has no {MANIFEST}.") from None


@contextlib.contextmanager
def _download(url: str) -> Iterator[Path]:
    with (
        open_remote(url, "cannot be read") as (fs, root),
        tempfile.TemporaryDirectory() as name,
        _show_url_in_errors(url, name),
    ):
        folder = Path(name)
        data = _download_manifest(fs, root, url)
        for file, expected in parse_manifest(data, redact(url))["files"].items():
            with contextlib.suppress(FileNotFoundError):  # the reader reports which file is missing
                size = fs.size(url_below(root, file))
                # checked before the download, because the file may be larger than the disk
                if size is not None and size != expected["bytes"]:
                    raise CheckpointError(
                        f"The checkpoint {redact(url)} is damaged: {file} has {size} bytes instead of "
                        f"{expected['bytes']}."
                    )
                fs.get_file(url_below(root, file), str(folder / file))
        (folder / MANIFEST).write_bytes(data)
        yield folder


@contextlib.contextmanager
def open_remote(url: str, what: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system and the path. Turn exceptions into errors that name the URL without secrets."""
    try:
        fs, root = open_url(url)
        yield fs, root.rstrip("/")
    except HooklineError:
        raise
    except Exception as error:  # every file system raises its own exceptions
        why = redact(f"{type(error).__name__}: {error}", url)
        cause = None if holds_secret(error, url) else error
        raise CheckpointError(f"The checkpoint {redact(url)} {what}: {why}") from cause


@contextlib.contextmanager
def _show_url_in_errors(url: str, folder: str) -> Iterator[None]:
    """Replace the path of a temporary folder by the URL in errors."""
    try:
        yield
    except CheckpointError as error:
        text = str(error).replace(f"{Path(folder) / 'checkpoint'}", redact(url)).replace(folder, redact(url))
        raise CheckpointError(text) from error.__cause__
