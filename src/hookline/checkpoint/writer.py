"""Write a checkpoint to disk: into a temporary directory, which is flushed and then renamed.

A directory with the checkpoint's name is therefore always complete.
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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint.format import Packed, TensorStore, pack_contents
from hookline.checkpoint.manifest import Manifest, is_listed_file, make_manifest, render_manifest
from hookline.checkpoint.tensors import name_file_in_errors, write_tensors
from hookline.util.errors import CheckpointError
from hookline.util.limited_json import STRUCTURE_BYTES
from hookline.util.processes import wait_for_end
from hookline.util.urls import CHECKPOINT_FILES, MANIFEST, is_checkpoint_file

WRITE_TIMEOUT = 10.0
"""Seconds until all ranks must see a folder that rank zero has created; network file systems show it late."""
MIN_BYTES_PER_SECOND = 1e6
"""The slowest disk or network for which the time limit of a write is enough."""
FLUSH_TIMEOUT = 600.0
"""Seconds added to the time limit, because a disk may first have to flush the data of other processes."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Linux constants: paths relative to the current directory; exchange two names."""
writing: set[str] = set()
"""The directories that this process is writing, which the cleanup leaves alone."""


def owner() -> str:
    """Return an id of this process that is unique on a shared disk: the machine and the process id."""
    return f"{machine_id()}-{os.getpid()}"


@functools.cache
def machine_id() -> str:
    """Return an id of this machine, eight hexadecimal digits."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def write_folder(
    contents: dict[str, Any] | Packed, path: Path, about: Mapping[str, Any] | None = None
) -> Manifest:
    """Write a checkpoint and flush it to the disk. Replace an older one once the new one is complete."""
    packed = contents if isinstance(contents, Packed) else pack_contents(contents)
    with explain_write_errors(packed, path), open_temporary(path) as (temporary, target):
        files = write_parts(temporary, packed, 0)
        return commit(temporary, target, packed, about or {}, files)


@contextlib.contextmanager
def open_temporary(path: Path) -> Iterator[tuple[Path, Path]]:
    """Create a temporary directory beside a checkpoint's path; yield both. Remove it after an exception."""
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
    """Turn an OSError into a CheckpointError that names the file and the reason."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {_describe_cause(error, packed, path)}"
        ) from error


def flush(folder: Path) -> None:
    """Flush the entries of a directory to the disk."""
    if os.name == "nt":  # Windows cannot open a directory
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _target_directory(path: Path) -> Path:
    """Return the directory to write. Raise if it exists and is not a checkpoint, because it would be lost."""
    target = Path(os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path))
    if target.is_dir():
        if not (target / MANIFEST).exists() and any(
            not is_listed_file(each.name) for each in target.iterdir()
        ):
            raise FileExistsError(
                errno.EEXIST,
                "a directory of that name exists and is not a checkpoint. To add files to a checkpoint, "
                "write them in on_checkpoint_save, when it is complete",
            )
    elif target.exists():
        raise FileExistsError(errno.EEXIST, "a file of that name exists")
    return target


def write_parts(folder: Path, packed: Packed, rank: int) -> dict[str, Any]:
    """Write and flush the files of this rank; return their sizes and checksums."""
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
    """Return a structure as one line of JSON. Raise if it would be too long to be read again."""
    text = json.dumps(structure, allow_nan=False)
    if len(text) > STRUCTURE_BYTES:
        largest = max(structure, key=lambda key: len(json.dumps(structure[key])))
        raise CheckpointError(
            f"{name} would have {len(text) / 1e6:.0f} MB, most of it in {largest!r}, and at most "
            f"{STRUCTURE_BYTES / 1e6:.0f} MB can be read. Store large data in tensors or arrays."
        )
    return text


def _write_in_parallel(folder: Path, tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Write several files in threads, so that hashing uses two cores and the disk is never idle."""
    files: dict[str, Any] = {}
    errors: list[BaseException] = []

    def write(name: str) -> None:
        try:
            files[name] = write_tensors(tensors[name], folder / name)
        except BaseException as error:  # raised below, in the calling thread
            errors.append(error)

    seconds = _write_seconds(tensors.values())
    threads = [
        threading.Thread(target=write, args=(name,), name=f"hookline {name}", daemon=True) for name in tensors
    ]
    for thread in threads[:-1]:
        thread.start()
    try:
        for thread in threads[-1:]:
            thread.run()
    finally:
        late = [
            name for name, each in zip(tensors, threads[:-1], strict=False) if not wait_for_end(each, seconds)
        ]
    if late:
        raise OSError(errno.ETIMEDOUT, f"still not on the disk after {seconds:.0f} s", str(folder / late[0]))
    if errors:
        raise errors[0]
    return files


def max_write_seconds(packed: Packed) -> float:
    """Return the seconds after which a write counts as failed because the disk does not respond."""
    return _write_seconds(_stores(packed))


def _write_seconds(stores: Iterable[Mapping[str, Any]]) -> float:
    return FLUSH_TIMEOUT + _tensor_bytes(stores) / MIN_BYTES_PER_SECOND


def _tensor_bytes(stores: Iterable[Mapping[str, Any]]) -> int:
    return sum(tensor.nbytes for store in stores for tensor in store.values())


def _stores(packed: Packed) -> tuple[TensorStore, ...]:
    return packed.model, packed.rest, packed.part.tensors


def commit(
    temporary: Path, target: Path, packed: Packed, about: Mapping[str, Any], files: dict[str, Any]
) -> Manifest:
    """Write the manifest after all files are durable, then rename the directory; return the manifest."""
    ordered = {name: files[name] for name in (*CHECKPOINT_FILES, *sorted(set(files) - set(CHECKPOINT_FILES)))}
    manifest = make_manifest(about, packed.structure.get("counters") or {}, packed.model.shared, ordered)
    _write_text(render_manifest(manifest), temporary / MANIFEST)
    flush(temporary)
    move_into_place(temporary, target)
    return manifest


def _write_text(text: str, path: Path) -> dict[str, Any]:
    data = text.encode()
    with name_file_in_errors(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _make_folder(path: Path) -> None:
    """Create a folder and its missing parents; flush the parents so that they survive a power failure."""
    for folder in reversed([each for each in (path, *path.parents) if not each.exists()]):
        folder.mkdir(exist_ok=True)
        if folder != path:
            flush(folder.parent)


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two directories atomically; return False if the system does not support it."""
    rename = _renameat2()
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    # network and layered file systems do not support it
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EXDEV, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(second))


@functools.cache
def _renameat2() -> Any:
    """Return Linux's system call, which Python does not offer; None on other systems."""
    if sys.platform != "linux":
        return None
    try:
        found = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # a C library without it
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return found


def move_into_place(temporary: Path, path: Path) -> None:
    """Rename a new directory to its path. Exchange it with an existing one, or rename that one first."""
    if path.exists() and exchange(temporary, path):
        flush(path.parent)
        shutil.rmtree(temporary, ignore_errors=True)  # after the exchange, this is the old checkpoint
        return
    old = path.with_name(f".{path.name}.{owner()}.old")
    with protect_from_cleanup(old):
        shutil.rmtree(old, ignore_errors=True)
        is_replacing = path.exists()
        if is_replacing:
            os.rename(path, old)
        try:
            os.rename(temporary, path)
        except BaseException:
            if is_replacing:
                os.rename(old, path)
            raise
        flush(path.parent)
        with contextlib.suppress(OSError):
            delete(old)


def delete(folder: Path) -> None:
    """Remove the directory of a checkpoint, its manifest and files last.

    After an interruption, the manifest still identifies the directory as a checkpoint.
    """
    for path in folder.iterdir():
        if not is_checkpoint_file(path.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    shutil.rmtree(folder)


@contextlib.contextmanager
def protect_from_cleanup(path: Path) -> Iterator[None]:
    """Mark a path as in use by this process for the duration of the block."""
    writing.add(str(path))
    try:
        yield
    finally:
        writing.discard(str(path))


def _describe_cause(error: OSError, packed: Packed, path: Path) -> str:
    """Return the reason of an OSError with the name of the file."""
    file = Path(os.fsdecode(error.filename or ""))
    name = file.name if file.parent.suffix == ".new" else str(file)  # without the temporary directory
    text = (f"{name}: " if error.filename else "") + (error.strerror or str(error))
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        text += f"; its tensors need {_tensor_bytes(_stores(packed)) / 1e6:.1f} MB"
        with contextlib.suppress(OSError):
            text += f", {shutil.disk_usage(path.parent).free / 1e6:.1f} MB are free"
    return text
