"""Remote folders by URL, through fsspec: which URLs are allowed. A remote checkpoint is complete if it has a
manifest.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hookline.util.errors import CheckpointError, OptionError, closest, install_command
from hookline.util.text import redact

MANIFEST = "manifest.json"
CHECKPOINT_FILES = ("model.safetensors", "state.safetensors", "state.json")
"""The files of every checkpoint, beside its manifest."""
OF_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,6})\.(?:json|safetensors)")
"""Files of single ranks: their shards of tensors, and the state that differs from rank zero's."""
PROTOCOLS = ("file", "s3", "gs", "gcs", "az", "abfs", "hf", "http", "https", "sftp")
"""The allowed protocols. fsspec knows dozens more; some of them run code or read other files, so the list is
closed.
"""
BROKEN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_testing: list[str] = []


def is_checkpoint_file(name: str) -> bool:
    """Return whether Hookline writes files of this name into a checkpoint's directory. All others are left
    alone.
    """
    return name == MANIFEST or name in CHECKPOINT_FILES or OF_RANK.fullmatch(name) is not None


def is_url(path: object) -> bool:
    """Return whether this is a URL and not a path."""
    return "://" in str(path)


def shown(path: object) -> str:
    """Return a path, or a URL without its secrets, as text for logs and errors."""
    return redact(path) if is_url(path) else str(path)


def check_url(url: str, what: str = "") -> str:
    """Return the URL if it is allowed. what: the option that it was given for."""
    protocol, named = url.partition("://")[0], f"{what}: " if what else ""
    if "::" in url:
        raise OptionError(
            f"{named}{redact(url)!r} chains file systems with '::', which is refused: a chained file system "
            "can run code that the file behind it holds. Pass the URL of the folder itself, such as "
            "s3://bucket/run."
        )
    if protocol not in (*PROTOCOLS, *_testing):
        raise OptionError(
            f"{named}the protocol of {redact(url)!r} is not allowed.{closest(protocol.lower(), PROTOCOLS)} "
            f"Allowed are {', '.join(PROTOCOLS)}. For any other protocol, copy the folder to a disk first."
        )
    return url


def as_url(path: Path | str) -> str | None:
    """Return the URL, or None for a path; raise if the URL is not allowed."""
    if isinstance(path, str):
        return check_url(path) if "://" in path else None
    if BROKEN_URL.match(path.as_posix()):
        text = redact(path.as_posix().replace(":/", "://", 1)).replace("://", ":/")
        raise CheckpointError(f"{text} is a URL that was converted to a Path; pass it as text.")
    return None


@contextlib.contextmanager
def memory_urls() -> Iterator[None]:
    """Allow `memory://` URLs within a `with` block, for tests."""
    _testing.append("memory")
    try:
        yield
    finally:
        _testing.remove("memory")


def open_url(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it. An ImportError names the missing package."""
    check_url(url)
    try:
        import fsspec  # type: ignore[import-untyped]

        # fsspec.core.url_to_fs would follow chains, and let an option "protocol" replace the checked one
        kind = fsspec.get_filesystem_class(url.partition("://")[0])
    except ImportError as error:  # fsspec names the package that a protocol needs
        raise ImportError(f"{error}. fsspec itself comes with `{install_command('upload')}`.") from None
    return kind(**{**kind._get_kwargs_from_urls(url), **(options or {})}), kind._strip_protocol(url)


def url_below(folder: str, name: str) -> str:
    """Return the URL of a file in a folder. The query of an http URL, such as a signature, stays at its
    end.
    """
    path, mark, query = split_query(folder)
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def url_beside(url: str, name: str) -> str:
    """Return the URL of a file next to another one. The query, which may contain slashes, stays at its
    end.
    """
    path, mark, query = split_query(url)
    return url_below(f"{path.rstrip('/').rpartition('/')[0]}{mark}{query}", name)


def split_query(folder: str) -> tuple[str, str, str]:
    """Return the URL, '?' and the query of an http URL. Other file systems may have '?' in their names."""
    return folder.partition("?") if folder.startswith(("http://", "https://")) else (folder, "", "")


def put_folder(fs: Any, folder: Path, target: str) -> None:
    """Copy a folder with its manifest last. An object store cannot rename, so the manifest is what makes it
    complete.

    An existing checkpoint of this name is replaced, including other files in its folder.
    """
    fs.invalidate_cache()
    manifest = folder / MANIFEST
    files = sorted((each for each in folder.rglob("*") if each.is_file()), key=lambda each: each == manifest)
    targets = {each: url_below(target, each.relative_to(folder).as_posix()) for each in files}
    if fs.exists(url_below(target, MANIFEST)):
        for old in set(fs.find(target)) - {fs._strip_protocol(each) for each in targets.values()}:
            if not is_checkpoint_file(old[len(target.rstrip("/")) + 1 :]):
                fs.rm_file(old)  # before the manifest goes, so that a second attempt gets here again
        fs.rm_file(url_below(target, MANIFEST))  # from here to the end, the folder is not a checkpoint
    for file, remote in targets.items():
        if file == manifest:
            # files that the new checkpoint does not have, such as those of ranks that no longer exist
            names = {each.rpartition("/")[2]: each for each in fs.find(target, maxdepth=1)}
            for name in names.keys() - {each.name for each in files}:
                if is_checkpoint_file(name):
                    fs.rm_file(names[name])
        fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
        fs.put_file(str(file), remote)
        if fs.size(remote) != file.stat().st_size:
            raise OSError(f"{file.name} was not copied completely")


def remove_remote_folder(fs: Any, target: str) -> None:
    """Remove a folder that has a manifest. The manifest goes first, so that an incomplete folder is not a
    checkpoint.
    """
    if fs.exists(url_below(target, MANIFEST)):
        fs.rm_file(url_below(target, MANIFEST))
        fs.rm(target, recursive=True)
