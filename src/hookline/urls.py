"""Folders in another place, by their URL, through fsspec: what has a manifest there is whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def open_url(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """The file system of a URL and the path in it. An ImportError names the package that is missing."""
    try:
        import fsspec  # type: ignore[import-untyped]

        return fsspec.core.url_to_fs(url, **(options or {}))  # type: ignore[no-any-return]
    except ImportError as error:  # fsspec names the package that a protocol needs
        raise ImportError(f"{error}. fsspec itself comes with `pip install 'hookline[upload]'`.") from None


def put_folder(fs: Any, folder: Path, target: str) -> None:
    """Copy a folder, its manifest last: an object store cannot rename, so that is what makes it whole."""
    files = sorted((each for each in folder.rglob("*") if each.is_file()), key=lambda each: each.name == MANIFEST)
    if fs.exists(f"{target}/{MANIFEST}"):
        fs.rm_file(f"{target}/{MANIFEST}")  # from here on until the end it is no checkpoint
    for each in files:
        remote = f"{target}/{each.relative_to(folder).as_posix()}"
        fs.makedirs(remote.rpartition("/")[0], exist_ok=True)
        fs.put_file(str(each), remote)
        if fs.size(remote) != each.stat().st_size:
            raise OSError(f"{each.name} did not arrive whole")


def remove_folder(fs: Any, target: str) -> None:
    """Remove a folder that has a manifest, which goes first: half of it is no checkpoint."""
    if fs.exists(f"{target}/{MANIFEST}"):
        fs.rm_file(f"{target}/{MANIFEST}")
        fs.rm(target, recursive=True)


def without_secret(why: Any, url: str) -> str:
    """An error's text without the URL, which may hold a password."""
    text = f"{type(why).__name__}: {why}" if isinstance(why, BaseException) else str(why)
    protocol, _, rest = url.partition("://")
    secret = rest.rpartition("@")[0]
    text = text.replace(url, f"{protocol}://...")
    return text.replace(secret, "...") if secret else text
