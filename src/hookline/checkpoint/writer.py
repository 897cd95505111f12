"""A checkpoint written to disk: temporary, flushed, then renamed into target. What exists under
its name is whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import json
import os
import shutil
import socket
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint import manifest as manifests
from hookline.checkpoint.format import Packed, pack_contents
from hookline.checkpoint.manifest import Manifest
from hookline.checkpoint.tensors import name_file_in_errors, write_tensors
from hookline.util.errors import CheckpointError
from hookline.util.limited_json import STRUCTURE_BYTES
from hookline.util.processes import ends
from hookline.util.urls import FILES, is_ours

WRITE_TIMEOUT = 10.0
"""Seconds until a folder that rank zero has made must be seen everywhere: network file systems tell of it
late.
"""
MIN_BYTES_PER_SECOND = 1e6
"""Bytes per second of the slowest disk, or network, that a checkpoint is waited for."""
FLUSH_TIMEOUT = 600.0
"""Seconds besides: a disk may have to write what others have left in the system's memory."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux: relative paths are relative to the current directory; both names stay, with each other's
contents.
"""
writing: set[str] = set()
"""The directories that this process writes just now, so that nobody tidies them away."""


def owner() -> str:
    """This process among all that may write to a shared disk: its machine, and its number there."""
    return f"{machine()}-{os.getpid()}"


@functools.cache
def machine() -> str:
    """This machine, in eight letters."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def write_folder(
    contents: dict[str, Any] | Packed, path: Path, about: Mapping[str, Any] | None = None
) -> Manifest:
    """Write a checkpoint and flush it to the disk. An older one of this name is replaced once the new one is
    whole.
    """
    packed = contents if isinstance(contents, Packed) else pack_contents(contents)
    with explain_write_errors(packed, path), open_temporary(path) as (temporary, target):
        files = write_parts(temporary, packed, 0)
        return commit(temporary, target, packed, about or {}, files)


@contextlib.contextmanager
def open_temporary(path: Path) -> Iterator[tuple[Path, Path]]:
    """A hidden folder beside the target of a checkpoint, and that target; what fails meanwhile leaves nothing
    behind.
    """
    target = _target_directory(path)
    temporary = target.with_name(f".{target.name}.{owner()}.new")
    with protect_from_cleanup(temporary):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            _make_folder(temporary)
            yield temporary, target
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextlib.contextmanager
def explain_write_errors(packed: Packed, path: Path) -> Iterator[None]:
    """A disk that fails, as an error that says what could not be written and why."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {_describe_cause(error, packed, path)}"
        ) from error


def flush(folder: Path) -> None:
    """Have the disk, not only the system's memory, hold the names in a directory."""
    if os.name == "nt":  # which cannot open one
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _target_directory(path: Path) -> Path:
    """The directory to write; never one that holds something else, which would be lost."""
    target = Path(os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path))
    if target.is_dir():
        if not (target / manifests.NAME).exists() and any(
            not manifests.is_file(each.name) for each in target.iterdir()
        ):
            raise FileExistsError(
                errno.EEXIST,
                "a directory of that name exists, and what is in it is no checkpoint. Files that "
                "belong to a checkpoint are added in on_checkpoint_save, when it is complete",
            )
    elif target.exists():
        raise FileExistsError(errno.EEXIST, "a file of that name exists")
    return target


def write_parts(folder: Path, packed: Packed, rank: int) -> dict[str, Any]:
    """The files that this rank writes, each flushed; their sizes and sums."""
    tensors: dict[str, Mapping[str, Any]] = {}
    texts: dict[str, Any] = {}
    if rank == 0:
        tensors |= {"model.safetensors": packed.model, "state.safetensors": packed.rest}
        texts["state.json"] = packed.structure
    if packed.part.tensors or packed.part.structure["own"]:
        tensors[f"rank-{rank}.safetensors"] = packed.part.tensors
        texts[f"rank-{rank}.json"] = packed.part.structure
    files = _write_in_parallel(folder, tensors)
    for name, structure in texts.items():
        files[name] = _write_text(_as_json(structure, name), folder / name)
    return files


def _as_json(structure: dict[str, Any], name: str) -> str:
    """In a line. What would be too long to be read again is refused while the run can still do something
    about it.
    """
    text = json.dumps(structure, allow_nan=False)
    if len(text) > STRUCTURE_BYTES:
        largest = max(structure, key=lambda key: len(json.dumps(structure[key])))
        raise CheckpointError(
            f"{name} would have {len(text) / 1e6:.0f} MB, most of them of {largest!r}, and at most "
            f"{STRUCTURE_BYTES / 1e6:.0f} are read again. Keep large data in tensors or arrays."
        )
    return text


def _write_in_parallel(folder: Path, tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Several files at a time: hashing keeps two cores busy, and the disk has always something to do."""
    files: dict[str, Any] = {}
    failed: list[BaseException] = []

    def keep(name: str) -> None:
        try:
            files[name] = write_tensors(tensors[name], folder / name)
        except BaseException as error:  # raised again where somebody can catch it
            failed.append(error)

    seconds = (
        FLUSH_TIMEOUT
        + sum(each.nbytes for store in tensors.values() for each in store.values()) / MIN_BYTES_PER_SECOND
    )
    threads = [
        threading.Thread(target=keep, args=(name,), name=f"hookline {name}", daemon=True) for name in tensors
    ]
    for each in threads[:-1]:
        each.start()
    try:
        for each in threads[-1:]:
            each.run()
    finally:
        late = [name for name, each in zip(tensors, threads[:-1], strict=False) if not ends(each, seconds)]
    if late:
        raise OSError(errno.ETIMEDOUT, f"still not on the disk after {seconds:.0f} s", str(folder / late[0]))
    if failed:
        raise failed[0]
    return files


def max_write_seconds(packed: Packed) -> float:
    """Seconds after which a checkpoint that is being written counts as lost: its disk does not answer any
    more.
    """
    return FLUSH_TIMEOUT + _bytes(packed) / MIN_BYTES_PER_SECOND


def _bytes(packed: Packed) -> int:
    return sum(
        each.nbytes for store in (packed.model, packed.rest, packed.part.tensors) for each in store.values()
    )


def commit(
    temporary: Path, target: Path, packed: Packed, about: Mapping[str, Any], files: dict[str, Any]
) -> Manifest:
    """All files are durable: the manifest comes last, then the name."""
    ordered = {name: files[name] for name in (*FILES, *sorted(set(files) - set(FILES)))}
    manifest = manifests.make(about, packed.structure.get("counters") or {}, packed.model.shared, ordered)
    _write_text(manifests.render(manifest), temporary / manifests.NAME)
    flush(temporary)
    _move_into_place(temporary, target)
    return manifest


def _write_text(text: str, path: Path) -> dict[str, Any]:
    data = text.encode()
    with name_file_in_errors(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _make_folder(path: Path) -> None:
    """With all folders above it that are missing; their names must outlive a power cut as well."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        if each != path:
            flush(each.parent)


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two directories in one call, so that both exist at every moment; False where the
    system cannot.
    """
    rename = _renameat2()
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (
        errno.ENOSYS,
        errno.EINVAL,
        errno.ENOTSUP,
        errno.EXDEV,
        errno.EPERM,
    ):  # network and layered file systems
        return False
    raise OSError(number, os.strerror(number), str(second))


@functools.cache
def _renameat2() -> Any:
    """Return Linux's call, which Python does not offer; None on other systems."""
    if sys.platform != "linux":
        return None
    try:
        found = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # a C library without it
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return found


def _move_into_place(temporary: Path, path: Path) -> None:
    """Give a new checkpoint its name. One that has the name is replaced in one call, or moved away until the
    new one has it.
    """
    if path.exists() and exchange(temporary, path):
        flush(path.parent)
        shutil.rmtree(temporary, ignore_errors=True)  # it holds the old one now
        return
    old = path.with_name(f".{path.name}.{owner()}.old")
    with protect_from_cleanup(old):
        shutil.rmtree(old, ignore_errors=True)
        replacing = path.exists()
        if replacing:
            os.rename(path, old)
        try:
            os.rename(temporary, path)
        except BaseException:
            if replacing:
                os.rename(old, path)
            raise
        flush(path.parent)
        with contextlib.suppress(OSError):
            delete(old)


def delete(folder: Path) -> None:
    """Remove the directory of a checkpoint, files of others first: as long as they are there its manifest
    says what it is.
    """
    for each in folder.iterdir():
        if not is_ours(each.name):
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink()
    shutil.rmtree(folder)


@contextlib.contextmanager
def protect_from_cleanup(path: Path) -> Iterator[None]:
    """Meanwhile this path is one that a living process writes."""
    writing.add(str(path))
    try:
        yield
    finally:
        writing.discard(str(path))


def _describe_cause(error: OSError, packed: Packed, path: Path) -> str:
    """What went wrong, and with which file."""
    file = Path(os.fsdecode(error.filename or ""))
    name = (
        file.name if file.parent.suffix == ".new" else str(file)
    )  # what lies temporary is named as it would be in its target
    text = (f"{name}: " if error.filename else "") + (error.strerror or str(error))
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        text += f"; its tensors need {_bytes(packed) / 1e6:.1f} MB"
        with contextlib.suppress(OSError):
            text += f", {shutil.disk_usage(path.parent).free / 1e6:.1f} MB are free"
    return text
