"""Prefetch batches in a thread, in order, so that the next ones are on the device while the model trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from queue import SimpleQueue
from typing import Any

from hookline.util.processes import join

PREFETCH_TIMEOUT = 1.0
"""Seconds that closing waits for a batch that is being fetched; after that, the thread is abandoned."""
_END: Any = object()


def prefetch_batches(
    batches: Iterator[Any], depth: int, move: Callable[[Any], Any] | None = None
) -> Generator[Any, None, None]:
    """Yield the batches; a thread prefetches up to `depth` of them and applies `move`.

    An error is raised at the position of its batch. Do not use it for a source that draws from the process's
    random streams while it is read.
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
            del batch  # frees its memory while the next one is awaited
    finally:
        fetching.stop()


class _Fetching:
    """The thread and its queue."""

    def __init__(self, batches: Iterator[Any], depth: int, move: Callable[[Any], Any] | None) -> None:
        self.batches, self.move = batches, move
        self.ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.free = threading.Semaphore(depth)
        self.is_over = False
        self.thread = threading.Thread(target=self.fetch, name="hookline-prefetch", daemon=True)

    def fetch(self) -> None:
        """Fetch batches until the source ends or fails, or `stop` is called."""
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
                del batch  # only the queue may keep it alive
        except BaseException as error:  # the reading thread raises it
            self.ready.put((_END, error))

    def stop(self) -> None:
        """Stop fetching and wait for the thread."""
        self.is_over = True
        self.free.release()
        join(self.thread, PREFETCH_TIMEOUT, "it is still waiting for the next batch of its loader")
