"""Checkpoints at a URL, through fsspec: staged here, copied there with the manifest last; fetched and
verified when read.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint import manifest as manifests
from hookline.checkpoint.cleanup import clean_up
from hookline.checkpoint.format import Packed
from hookline.checkpoint.manifest import Manifest
from hookline.checkpoint.reader import read_folder, read_for_rank, read_module, refuse_unlisted, verify_folder
from hookline.checkpoint.writer import owner, protect_from_cleanup, write_folder
from hookline.util.errors import CheckpointError, HooklineError
from hookline.util.limited_json import MANIFEST_BYTES
from hookline.util.text import holds_secret, redact
from hookline.util.urls import below, is_ours, open_url, put_folder, remove_folder, split_query


def write_url(
    contents: dict[str, Any] | Packed,
    url: str,
    about: Mapping[str, Any] | None,
    staging: Callable[[], Path] | None,
) -> Manifest:
    """Write a checkpoint here and copy it there. staging: see `staged`."""
    with (
        _open_remote(url, "could not be written") as (fs, root),
        staged(staging) as folder,
        _show_url_in_errors(url, str(folder)),
    ):
        manifest = write_folder(contents, folder / "checkpoint", about)
        put_folder(fs, folder / "checkpoint", root)
    return manifest


@contextlib.contextmanager
def staged(staging: Callable[[], Path] | None) -> Iterator[Path]:
    """A folder to put a checkpoint together in, below the one that `staging` names or among the system's
    temporary files.
    """
    near = staging() if staging else None
    if near is not None:
        near.mkdir(parents=True, exist_ok=True)
        clean_up(near)  # a process that was killed leaves all it had put together
    with tempfile.TemporaryDirectory(prefix=".staging-", suffix=f".{owner()}.new", dir=near) as name:
        folder = Path(os.path.abspath(name))
        with protect_from_cleanup(folder):
            yield folder


def copy_to_url(folder: Path, url: str) -> None:
    """Copy a checkpoint that is whole, its manifest last."""
    with _open_remote(url, "could not be written") as (fs, root):
        put_folder(fs, folder, root)


def read_url(url: str) -> dict[str, Any]:
    """Fetch a checkpoint and read it."""
    with _fetched(url) as folder:
        return read_folder(folder)


def read_url_for_rank(url: str, rank: int, world_size: int) -> dict[str, Any]:
    """Fetch a checkpoint and read what one rank of several needs; what was fetched goes once nobody reads
    from it any more.
    """
    with contextlib.ExitStack() as until_read:
        folder = until_read.enter_context(_fetched(url))
        verify_folder(folder)
        contents, of_ranks = read_for_rank(folder, rank, world_size)
        weakref.finalize(of_ranks, until_read.pop_all().close)
    return contents


def read_url_module(url: str) -> dict[str, Any]:
    """Fetch a checkpoint and read its weights alone."""
    with _fetched(url) as folder:
        return read_module(folder)


def verify_url(url: str) -> None:
    """Fetch a checkpoint and verify it."""
    with _fetched(url) as folder:
        refuse_unlisted(_names_at(url), verify_folder(folder), redact(url))


def extra_names_at(url: str) -> list[str]:
    """The files and folders of others that lie beside a checkpoint's own."""
    return sorted(name for name in _names_at(url) if not is_ours(name) and not name.startswith("."))


def _names_at(url: str) -> list[str]:
    """What lies there, if the file system can list it: not every http server does."""
    fs, root = open_url(url)
    try:
        return [each.rstrip("/").rpartition("/")[2] for each in fs.ls(root, detail=False)]
    except Exception:  # every file system has errors of its own
        return []


def read_url_manifest(url: str) -> Manifest:
    """Fetch a manifest only."""
    with _open_remote(url, "cannot be read") as (fs, root):
        return manifests.parse(_manifest(fs, root, url), redact(url))


def remove_url(url: str) -> None:
    """Remove a checkpoint, its manifest first."""
    with _open_remote(url, "could not be removed") as (fs, root):
        remove_folder(fs, root)


def list_urls(url: str) -> list[str]:
    """The URLs of all checkpoints at one or below it: everything that has a manifest, but nothing inside of a
    checkpoint.
    """
    with _open_remote(url, "cannot be listed") as (fs, root):
        fs.invalidate_cache()
        if fs.exists(below(root, manifests.NAME)):
            return [url.rstrip("/")]
        there, at = split_query(root)[0].rstrip("/"), f"/{manifests.NAME}"
        found = sorted(each.removesuffix(at) for each in fs.find(root) if each.endswith(at))
        outermost = [each for each in found if not any(each.startswith(f"{other}/") for other in found)]
        base, mark, query = split_query(url)
        return [f"{base.rstrip('/')}{each[len(there) :]}{mark}{query}" for each in outermost]


def _manifest(fs: Any, root: str, url: str) -> bytes:
    fs.invalidate_cache()
    place = below(root, manifests.NAME)
    try:
        if fs.size(place) is None:  # the server does not say
            return fs.cat_file(place, 0, MANIFEST_BYTES + 1)  # type: ignore[no-any-return]
        if fs.size(place) > MANIFEST_BYTES:
            raise CheckpointError(
                f"The checkpoint {redact(url)} is damaged: {manifests.NAME} is larger than any that we write."
            )
        return fs.cat_file(place)  # type: ignore[no-any-return]
    except FileNotFoundError:
        raise CheckpointError(f"{redact(url)} is no checkpoint: it has no {manifests.NAME}.") from None


@contextlib.contextmanager
def _fetched(url: str) -> Iterator[Path]:
    with (
        _open_remote(url, "cannot be read") as (fs, root),
        tempfile.TemporaryDirectory() as name,
        _show_url_in_errors(url, name),
    ):
        folder = Path(name)
        data = _manifest(fs, root, url)
        for file, expected in manifests.parse(data, redact(url))["files"].items():
            with contextlib.suppress(FileNotFoundError):  # the reader says which one is missing
                size = fs.size(below(root, file))
                if (
                    size is not None and size != expected["bytes"]
                ):  # not fetched: it may be larger than the disk
                    raise CheckpointError(
                        f"The checkpoint {redact(url)} is damaged: {file} has {size} bytes instead of "
                        f"{expected['bytes']}."
                    )
                fs.get_file(below(root, file), str(folder / file))
        (folder / manifests.NAME).write_bytes(data)
        yield folder


@contextlib.contextmanager
def _open_remote(url: str, what: str) -> Iterator[tuple[Any, str]]:
    """The file system and the path; whatever fails names the URL, without its secrets."""
    try:
        fs, root = open_url(url)
        yield fs, root.rstrip("/")
    except HooklineError:
        raise
    except Exception as error:  # every file system has errors of its own
        why = redact(f"{type(error).__name__}: {error}", url)
        cause = None if holds_secret(error, url) else error
        raise CheckpointError(f"The checkpoint {redact(url)} {what}: {why}") from cause


@contextlib.contextmanager
def _show_url_in_errors(url: str, folder: str) -> Iterator[None]:
    """In errors, the URL rather than the temporary folder that stands for it."""
    try:
        yield
    except CheckpointError as error:
        text = str(error).replace(f"{Path(folder) / 'checkpoint'}", redact(url)).replace(folder, redact(url))
        raise CheckpointError(text) from error.__cause__
