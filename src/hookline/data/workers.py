"""What runs in a DataLoader's worker processes: randomness that does not depend on which worker, and a deaf
ear to signals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.utils.data._utils.worker as torch_worker

from hookline.data.seeding import seed_torch

log = logging.getLogger("hookline")
KILL_TIMEOUT = 5.0
"""Seconds in which the system ends a process that was killed."""


class Keyed:
    """The indices of a batch with the seed that its random numbers come from, on their way to a worker."""

    __slots__ = ("index", "seed")

    def __init__(self, seed: int, index: Any) -> None:
        self.seed = seed
        self.index = index

    def __iter__(self) -> Iterator[Any]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)


class KeyedDataset:
    """The user's dataset, read with the random streams of each batch's own. For everything else it is the
    user's dataset.

    Torch's stream is seeded for every sample (1.3 µs). Python's and numpy's take 5.6 and 1.9 µs to seed, so
    they are seeded once a batch. Either way what is drawn follows from the seed, the epoch and the place in
    it, whichever worker reads.
    """

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "_dataset", dataset)

    def __getitems__(self, keyed: Any) -> Any:
        """A batch, as torch's fetcher asks for it."""
        dataset = object.__getattribute__(self, "_dataset")
        if type(keyed) is not Keyed:
            return [dataset[each] for each in keyed]
        seed_all(keyed.seed)
        whole = getattr(dataset, "__getitems__", None)
        if whole:
            return whole(keyed.index)
        items, seed = [], keyed.seed
        for each in keyed.index:
            seed_torch(seed)
            seed += 1
            items.append(dataset[each])
        return items

    def __getitem__(self, index: Any) -> Any:
        if type(index) is Keyed:  # without automatic batches
            seed_all(index.seed)
            index = index.index
        return object.__getattribute__(self, "_dataset")[index]

    def __len__(self) -> int:
        return len(object.__getattribute__(self, "_dataset"))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_dataset"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_dataset"), name, value)

    def __reduce__(self) -> Any:
        return KeyedDataset, (object.__getattribute__(self, "_dataset"),)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """So that `isinstance` sees the user's class."""
        return type(object.__getattribute__(self, "_dataset"))


def seed_all(seed: int) -> None:
    """The three streams of a worker."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


class WorkerStart:
    """A `worker_init_fn`: what a worker does first, and then the user's own."""

    def __init__(self, users: Any) -> None:
        self.users = users

    def __call__(self, worker_id: int) -> None:
        """In the worker. `get_worker_info()` shows the user's own object: whatever is done to it is done to
        the right one.
        """
        info: Any = torch_worker._worker_info
        if info is not None and type(info.dataset) is KeyedDataset:
            own = object.__getattribute__(info.dataset, "_dataset")
            torch_worker._worker_info = dataclasses.replace(info, dataset=own)
        block_signals()
        if self.users is not None:
            self.users(worker_id)


def block_signals() -> None:
    """A signal sent to the whole process group must not end a worker before the main process has finished its
    step.

    Torch's own handler tells the parent's SIGTERM, which ends a worker, from anybody else's, which kills it
    and with it the main process. So SIGTERM is blocked and read by a thread, which can see the sender. The
    others get a handler that does nothing, and not SIG_IGN, which programs started by the dataset would
    inherit; these do inherit the blocked SIGTERM.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, _do_nothing)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGUSR1})  # see signals_held
    threading.Thread(target=_wait_for_parent_sigterm, name="hookline-signals", daemon=True).start()


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Around the start of workers: they inherit that signals are blocked, until they can shard_plan with them
    themselves.
    """
    if not hasattr(signal, "sigwaitinfo"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_workers(batches: Any) -> None:
    """End the workers behind a DataLoader's iterator; return when they are gone.

    Torch sends SIGTERM to those that do not come to their end by themselves. That is blocked in ours, and
    read by a thread, which code that holds the interpreter's lock keeps from its turn. Such a worker would
    keep the program from ending.
    """
    shut_down = getattr(batches, "_shutdown_workers", None)
    if shut_down is None:
        return
    shut_down()
    for each in getattr(batches, "_workers", ()):
        if each.is_alive():
            log.warning("The worker process %s (%s) did not end and is killed.", each.pid, each.name)
            each.kill()
            each.join(KILL_TIMEOUT)


def _do_nothing(number: int, frame: Any) -> None:
    pass


def _wait_for_parent_sigterm() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
