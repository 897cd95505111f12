"""Checkpoints written while the training goes on: it waits for a copy of the tensors only."""

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
from hookline.checkpoint.writer import longest_wait
from hookline.distributed.comm import Ranks
from hookline.util.errors import CheckpointError
from hookline.util.processes import ends
from hookline.util.text import holds_secret, redact
from hookline.util.urls import is_url, shown

log = logging.getLogger("hookline")
ALIGNED = 64
"""Bytes: where each copy begins. Wide enough for every type and for the processor's fastest copies."""


class Buffer:
    """Memory for copies of tensors, kept from one checkpoint to the next: the system hands out fresh pages
    slowly.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def snapshot(self, contents: dict[str, Any] | Packed) -> Packed:
        """The contents as they are now. They last until the next snapshot."""
        packed = contents if isinstance(contents, Packed) else pack_contents(contents)
        stores = (packed.model, packed.rest, packed.part.tensors)
        tensors = [each for store in stores for each in store.values()]
        devices = {each.device for each in tensors if each.device.type == "cuda"}
        needed = sum(-(-each.nbytes // ALIGNED) * ALIGNED for each in tensors)
        if self._memory.numel() < needed:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one first: never both at once
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=bool(devices))
        start = 0
        copies: list[TensorStore] = []
        for store in stores:
            copied = TensorStore(store.prefix)
            copied.shared = store.shared
            for name, tensor in store.items():
                copied[name] = self._copy(tensor, start)
                start += -(-tensor.nbytes // ALIGNED) * ALIGNED
            copies.append(copied)
        for device in devices:  # copies to pinned memory are under way all at once until here
            torch.cuda.synchronize(device)
        model, rest, own = copies
        return Packed(packed.structure, model, rest, replace(packed.part, tensors=own))

    def _copy(self, tensor: Tensor, start: int) -> Tensor:
        place = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor, non_blocking=tensor.device.type == "cuda")


class BackgroundSaver:
    """Writes one checkpoint at a time in a thread of its own."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        """`ranks`: those who write it together. All of them make their saver at the same time."""
        self._ranks = ranks.beside()
        self._buffer = Buffer()
        self._thread: threading.Thread | None = None
        self._longest = 0.0
        """Seconds that the present one is waited for at most; none at all once it was given up."""
        self._path: Path | str = ""
        self._report: Callable[[CheckpointError | None], None] = _nothing

    def start(
        self,
        contents: dict[str, Any] | Packed,
        path: Path | str,
        about: Mapping[str, Any],
        on_done: Callable[[CheckpointError | None], None],
        staging: Callable[[], Path] | None = None,
    ) -> None:
        """Copy the contents and come back; they are written meanwhile. One that is still being written is
        waited for first.

        on_done: told by the thread what went wrong, or None once it is durable. Contents that cannot be
        stored are told at once.
        """
        if not self.wait():  # its copies of the tensors are still in the buffer
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
            error = _written(snapshot, path, about, staging, self._ranks)
            if not self._longest and error is None:
                log.warning("The checkpoint %s, which was given up, is written after all.", shown(path))
            on_done(error)

        self._path, self._report, self._longest = path, on_done, longest_wait(snapshot)
        # a daemon: a disk that hangs must not keep the process from ending, and whoever ends a run waits for
        # it
        self._thread = threading.Thread(target=work, name="hookline save", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being written; return whether it is so.

        timeout: seconds. None: as long as a slow disk may take; then the checkpoint is given up, and
        `on_done` gets the error.
        """
        if self._thread is None or ends(self._thread, self._longest if timeout is None else timeout):
            self._thread = None
            return True
        if timeout is None and self._longest:
            waited, self._longest = self._longest, 0.0
            self._report(
                CheckpointError(
                    f"The checkpoint {shown(self._path)} could not be written: it was still not on the disk "
                    f"after {waited:.0f} s. Does the disk answer?"
                )
            )
        return False

    def close(self) -> None:
        """Wait for what is being written, and give the memory back."""
        if self.wait():
            self._buffer = Buffer()


def _nothing(error: CheckpointError | None) -> None:
    """Before the first checkpoint there is nothing to report."""


def _written(
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
    except BaseException as error:  # nobody else would hear of it
        url = str(path) if is_url(path) else ""
        why = redact(f"{type(error).__name__}: {error}", url)
        made = CheckpointError(f"The checkpoint {shown(path)} could not be written: {why}")
        made.__cause__ = None if holds_secret(error, url) else error
        return made
    return None
