"""Tensors in a safetensors file: written straight from their own memory and hashed on the way, read by the
library.

The library would write as fast, but tells nothing of the bytes, so they would have to be read again to be
hashed. The format is small: the length of a header, a header of JSON, then the numbers.
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

NAMES = {
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
CHUNK = 16 * 2**20
HASH_TURNS = 120
"""Turns in which a chunk is hashed, however busy the machine is."""
JOIN_TIMEOUT = 5.0
"""Seconds in which a thread that has nothing left to hash ends."""
MAX_HEADER_BYTES = 100_000_000
"""Bytes; the library refuses to read a longer one."""


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """Write and flush a file; its size and sha256."""
    digest = Digest()
    size = 0
    try:
        with name_file_in_errors(path), path.open("wb") as file:
            for chunk, borrowed in _chunks(tensors):
                digest.add(chunk)
                size += file.write(chunk)
                if not borrowed:
                    digest.catch_up()  # otherwise copies would pile up
            file.flush()
            os.fsync(file.fileno())
    finally:
        found = digest.finish()
    return {"bytes": size, "sha256": found}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, in memory of its own: not tied to a file that may be removed while the run goes
    on.
    """
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no mapping


def read_some(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """These tensors of a file, in memory of their own."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in names}


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, in the memory of the file itself: read from the disk as far as somebody looks
    at it.
    """
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


@contextlib.contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """A write that fails does not say by itself which file it was."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


class Digest:
    """A sha256 worked out by a thread of its own, beside the writing."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._hashed = threading.Semaphore(0)
        self._behind = 0
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="hookline sha256", daemon=True)
        self._thread.start()

    def add(self, chunk: Any) -> None:
        """Hash this next; its memory must not change until then."""
        self._behind += 1
        self._waiting.put(chunk)

    def catch_up(self) -> None:
        """Wait until everything added so far is hashed."""
        while self._behind:
            if not any(self._hashed.acquire(timeout=TURN) for _ in range(HASH_TURNS)):
                raise CheckpointError(f"{CHUNK} bytes were not hashed within {HASH_TURNS * TURN:g} s.")
            self._behind -= 1

    def finish(self) -> str:
        """The sum of it all, as hexadecimal digits."""
        self._waiting.put(None)
        self.catch_up()
        join(self._thread, JOIN_TIMEOUT)
        if self._failed is not None:
            raise self._failed
        return self._hash.hexdigest()

    def _work(self) -> None:
        while (chunk := self._waiting.get()) is not None:
            try:
                self._hash.update(chunk)  # lets other threads run meanwhile
            except (
                BaseException
            ) as error:  # raised again by `finish`; what waits for the rest must not wait in vain
                self._failed = error
            del chunk
            self._hashed.release()


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[tuple[Any, bool]]:
    """The file's bytes piece by piece, and whether a piece is the tensor's own memory rather than a copy."""
    # wide types first: then every tensor begins at a multiple of its own width
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    yield _header(tensors, order), True
    for name in order:
        tensor = tensors[name]
        if not tensor.numel():
            continue
        plain = tensor.cpu().contiguous()
        flat: Any = plain.reshape(-1).view(torch.uint8).numpy()
        borrowed = plain.data_ptr() == tensor.data_ptr()
        for start in range(0, flat.nbytes, CHUNK):
            yield memoryview(flat[start : start + CHUNK]), borrowed


def _header(tensors: Mapping[str, Tensor], order: list[str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{len(tensors)} tensors are too many for one file: their names take {len(text)} bytes, "
            f"at most {MAX_HEADER_BYTES} can be read."
        )
    return len(text).to_bytes(8, "little") + text
