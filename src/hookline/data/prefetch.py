"""Batches fetched ahead by a thread, in their order: the next ones are ready, and on their device, while the
model trains.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from queue import SimpleQueue
from typing import Any

from hookline.util.processes import join

THREAD_TIMEOUT = 1.0
"""Seconds that closing waits for a batch which is just being fetched; a source that blocks for longer is left
to itself.
"""
_END: Any = object()


def ahead(
    batches: Iterator[Any], depth: int, move: Callable[[Any], Any] | None = None
) -> Generator[Any, None, None]:
    """The same batches, of which a thread keeps up to `depth` ready, moved by `move`.

    Never more than `depth` are fetched and not handed out. An error comes out where its batch would have. The
    random streams belong to the whole process: do not use it for a source that draws from them as it is read.
    """
    if depth < 1:
        yield from batches if move is None else map(move, batches)
        return
    fetching = _Fetching(batches, depth, move)
    fetching.thread.start()
    try:
        while True:
            batch, error = fetching.ready.get()
            if error is not None:
                raise error
            if batch is _END:
                return
            fetching.free.release()
            yield batch
            del batch  # not kept alive while the next one is waited for
    finally:
        fetching.stop()


class _Fetching:
    """The thread, and what it shares with whoever takes the batches."""

    def __init__(self, batches: Iterator[Any], depth: int, move: Callable[[Any], Any] | None) -> None:
        self.batches, self.move = batches, move
        self.ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.free = threading.Semaphore(depth)
        self.is_over = False
        self.thread = threading.Thread(target=self.fetch, name="hookline-prefetch", daemon=True)

    def fetch(self) -> None:
        """Until the source ends or fails, or nobody wants more."""
        try:
            while True:
                self.free.acquire()
                if self.is_over:
                    return
                batch = next(self.batches, _END)
                if batch is not _END and self.move is not None:
                    batch = self.move(batch)
                self.ready.put((batch, None))
                if batch is _END:
                    return
                del batch  # one that is waiting for its turn belongs to the queue alone
        except (
            BaseException
        ) as error:  # also what a source raises to end the run: it is the other thread's to handle
            self.ready.put((_END, error))

    def stop(self) -> None:
        """Nothing more is fetched."""
        self.is_over = True
        self.free.release()
        join(self.thread, THREAD_TIMEOUT, "it still waits for the next batch of its loader")
