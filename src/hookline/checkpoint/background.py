"""Checkpoints written in a background thread: training waits only until the tensors are copied."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.checkpoint.catalog import ALONE
from hookline.checkpoint.files import write
from hookline.checkpoint.format import Packed, TensorStore, pack_contents
from hookline.checkpoint.writer import max_write_seconds
from hookline.distributed.comm import Ranks
from hookline.util.errors import CheckpointError
from hookline.util.processes import wait_for_end
from hookline.util.text import holds_secret, redact
from hookline.util.urls import is_url, shown

log = logging.getLogger("hookline")
ALIGNMENT = 64
"""Bytes to which the start of each copy is aligned: enough for every dtype and for fast copies."""


class Buffer:
    """Memory for copies of tensors, reused by the next checkpoint because allocation is slow."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def snapshot(self, contents: dict[str, Any] | Packed) -> Packed:
        """Return a copy of the contents, valid until the next snapshot."""
        packed = contents if isinstance(contents, Packed) else pack_contents(contents)
        stores = (packed.model, packed.rest, packed.part.tensors)
        tensors = [each for store in stores for each in store.values()]
        devices = {each.device for each in tensors if each.device.type == "cuda"}
        needed = sum(-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in tensors)
        if self._memory.numel() < needed:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before allocating the new
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=bool(devices))
        start = 0
        copies: list[TensorStore] = []
        for store in stores:
            copied = TensorStore(store.prefix)
            copied.shared = store.shared
            for name, tensor in store.items():
                copied[name] = self._copy(tensor, start)
                start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            copies.append(copied)
        for device in devices:  # copies to pinned memory are asynchronous until here
            torch.cuda.synchronize(device)
        model, rest, own = copies
        return Packed(packed.structure, model, rest, replace(packed.part, tensors=own))

    def _copy(self, tensor: Tensor, start: int) -> Tensor:
        copy = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor, non_blocking=tensor.device.type == "cuda")


class BackgroundSaver:
    """A thread that writes one checkpoint at a time."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        """Create a saver; all `ranks` that write checkpoints together must create theirs at the same time."""
        self._ranks = ranks.beside()
        self._buffer = Buffer()
        self._thread: threading.Thread | None = None
        self._timeout = 0.0
        """Seconds to wait for the current checkpoint; 0 once the saver has given up on it."""
        self._path: Path | str = ""
        self._on_done: Callable[[CheckpointError | None], None] = _ignore

    def start(
        self,
        contents: dict[str, Any] | Packed,
        path: Path | str,
        about: Mapping[str, Any],
        on_done: Callable[[CheckpointError | None], None],
        staging: Callable[[], Path] | None = None,
    ) -> None:
        """Copy the contents, return, and write the copy in the background.

        Wait first for a checkpoint that is still being written. on_done: the thread calls it with the error,
        or with None once the checkpoint is durable; for contents that cannot be stored, `start` calls it.
        """
        if not self.wait():  # the buffer still contains the tensors of the previous checkpoint
            on_done(
                CheckpointError(
                    f"The checkpoint {shown(path)} was not written: {shown(self._path)} is still being "
                    f"written."
                )
            )
            return
        try:
            snapshot = self._buffer.snapshot(contents)
        except CheckpointError as error:
            on_done(error)
            return

        def work() -> None:
            error = _try_to_write(snapshot, path, about, staging, self._ranks)
            if not self._timeout and error is None:
                log.warning("The checkpoint %s was written after its time limit.", shown(path))
            on_done(error)

        self._path, self._on_done, self._timeout = path, on_done, max_write_seconds(snapshot)
        # a daemon, because a disk that hangs must not keep the process alive; the end of a run calls `wait`
        self._thread = threading.Thread(target=work, name="hookline save", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no checkpoint is being written; return False after the timeout.

        timeout: seconds. None: as long as a slow disk may take; after that, `on_done` receives an error.
        """
        if self._thread is None or wait_for_end(self._thread, self._timeout if timeout is None else timeout):
            self._thread = None
            return True
        if timeout is None and self._timeout:
            waited, self._timeout = self._timeout, 0.0
            self._on_done(
                CheckpointError(
                    f"The checkpoint {shown(self._path)} could not be written: it was still not on the disk "
                    f"after {waited:.0f} s. Check that the disk responds."
                )
            )
        return False

    def close(self) -> None:
        """Wait for the current checkpoint and free the memory."""
        if self.wait():
            self._buffer = Buffer()


def _ignore(error: CheckpointError | None) -> None:
    """Do nothing: there is no checkpoint to report on yet."""


def _try_to_write(
    snapshot: Packed,
    path: Path | str,
    about: Mapping[str, Any],
    staging: Callable[[], Path] | None,
    ranks: Ranks,
) -> CheckpointError | None:
    try:
        if ranks.alone:
            write(snapshot, path, about, staging)
        else:
            from hookline.checkpoint.rank_writer import write_on_all_ranks

            write_on_all_ranks(snapshot, path, about, ranks, staging)
    except CheckpointError as error:
        return error
    except BaseException as error:  # an exception that ends a thread would not reach the run
        url = str(path) if is_url(path) else ""
        why = redact(f"{type(error).__name__}: {error}", url)
        problem = CheckpointError(f"The checkpoint {shown(path)} could not be written: {why}")
        problem.__cause__ = None if holds_secret(error, url) else error
        return problem
    return None
