"""Write and read safetensors files. Writing hashes the bytes on the way; reading uses the library.

The library writes as fast but does not expose the bytes, so that the file would have to be read again for
its checksum. The format is small: the length of a header, a header of JSON, then the values.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hookline.util.errors import CheckpointError
from hookline.util.processes import TURN, join

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
CHUNK_BYTES = 16 * 2**20
HASH_TURNS = 120
"""Turns after which hashing one chunk counts as failed, even on a busy machine."""
JOIN_TIMEOUT = 5.0
"""Seconds to wait until a thread that has nothing left to hash ends."""
LONGEST_HEADER = 100_000_000
"""The library refuses to read a longer header."""


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """Write and flush a file; return its size and sha256."""
    digest = Digest()
    size = 0
    try:
        with name_file_in_errors(path), path.open("wb") as file:
            for chunk, borrowed in _chunks(tensors):
                digest.add(chunk)
                size += file.write(chunk)
                if not borrowed:
                    digest.catch_up()  # otherwise copies would accumulate in memory
            file.flush()
            os.fsync(file.fileno())
    finally:
        sha256 = digest.finish()
    return {"bytes": size, "sha256": sha256}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return copies of all tensors of a file, because the file may be removed during the run."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping


def read_some(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return copies of these tensors of a file."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in names}


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file, memory-mapped: they are read from the disk when they are used."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


@contextlib.contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the path to an OSError, because a failed write does not name its file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


class Digest:
    """A sha256 that a thread computes while the file is written."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._hashed = threading.Semaphore(0)
        self._behind = 0
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="hookline sha256", daemon=True)
        self._thread.start()

    def add(self, chunk: Any) -> None:
        """Queue a chunk; its memory must not change until it is hashed."""
        self._behind += 1
        self._waiting.put(chunk)

    def catch_up(self) -> None:
        """Wait until all queued chunks are hashed."""
        while self._behind:
            if not any(self._hashed.acquire(timeout=TURN) for _ in range(HASH_TURNS)):
                raise CheckpointError(f"{CHUNK_BYTES} bytes were not hashed within {HASH_TURNS * TURN:g} s.")
            self._behind -= 1

    def finish(self) -> str:
        """Return the sha256 of all chunks as hexadecimal digits."""
        self._waiting.put(None)
        self.catch_up()
        join(self._thread, JOIN_TIMEOUT)
        if self._failed is not None:
            raise self._failed
        return self._hash.hexdigest()

    def _work(self) -> None:
        while (chunk := self._waiting.get()) is not None:
            try:
                self._hash.update(chunk)  # releases the GIL
            except BaseException as error:  # `finish` raises it; the semaphore must still be released
                self._failed = error
            del chunk
            self._hashed.release()


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[tuple[Any, bool]]:
    """Yield the file's bytes in chunks, and whether a chunk is the tensor's own memory, not a copy."""
    # wide dtypes first, so that every tensor starts at a multiple of its element size
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    yield _header(tensors, order), True
    for name in order:
        tensor = tensors[name]
        if not tensor.numel():
            continue
        plain = tensor.cpu().contiguous()
        flat: Any = plain.reshape(-1).view(torch.uint8).numpy()
        borrowed = plain.data_ptr() == tensor.data_ptr()
        for start in range(0, flat.nbytes, CHUNK_BYTES):
            yield memoryview(flat[start : start + CHUNK_BYTES]), borrowed


def _header(tensors: Mapping[str, Tensor], order: list[str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(
            f"{len(tensors)} tensors are too many for one file: their names take {len(text)} bytes, "
            f"at most {LONGEST_HEADER} can be read."
        )
    return len(text).to_bytes(8, "little") + text
