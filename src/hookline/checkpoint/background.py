"""Checkpoints written while the training goes on: it waits for a copy of the tensors only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.checkpoint.files import write
from hookline.checkpoint.finding import ALONE
from hookline.checkpoint.format import Packed, TensorStore, pack_contents
from hookline.checkpoint.together import write_together
from hookline.errors import CheckpointError
from hookline.ranks import Ranks
from hookline.text import holds_secret, redact
from hookline.urls import is_url, shown

ALIGNED = 64
"""Bytes: where each copy begins. Wide enough for every type and for the processor's fastest copies."""


class Buffer:
    """Memory for copies of tensors, kept from one checkpoint to the next: the system hands out fresh pages slowly."""

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

    def start(
        self,
        contents: dict[str, Any] | Packed,
        path: Path | str,
        about: Mapping[str, Any],
        on_done: Callable[[CheckpointError | None], None],
        staging: Callable[[], Path] | None = None,
    ) -> None:
        """Copy the contents and come back; they are written meanwhile. One that is still being written is waited for first.

        on_done: told by the thread what went wrong, or None once it is durable. Contents that cannot be stored are told at once.
        """
        self.wait()
        try:
            snapshot = self._buffer.snapshot(contents)
        except CheckpointError as error:
            on_done(error)
            return

        def work() -> None:
            on_done(_written(snapshot, path, about, staging, self._ranks))

        # a daemon: a disk that hangs must not keep the process from ending, and whoever ends a run waits for it
        self._thread = threading.Thread(target=work, name="hookline save", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being written, but at most so many seconds; whether it is so."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                return False
        self._thread = None
        return True

    def close(self) -> None:
        """Wait for what is being written, and give the memory back."""
        self.wait()
        self._buffer = Buffer()


def _written(
    snapshot: Packed, path: Path | str, about: Mapping[str, Any], staging: Callable[[], Path] | None, ranks: Ranks
) -> CheckpointError | None:
    try:
        if ranks.alone:
            write(snapshot, path, about, staging)
        else:
            write_together(snapshot, path, about, ranks, staging)
    except CheckpointError as error:
        return error
    except BaseException as error:  # nobody else would hear of it
        url = str(path) if is_url(path) else ""
        why = redact(f"{type(error).__name__}: {error}", url)
        made = CheckpointError(f"The checkpoint {shown(path)} could not be written: {why}")
        made.__cause__ = None if holds_secret(error, url) else error
        return made
    return None
