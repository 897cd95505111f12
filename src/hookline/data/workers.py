"""Code that runs in a DataLoader's worker processes: seeding that does not depend on the worker, and signal
handling.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import torch.utils.data._utils.worker as torch_worker

from hookline.data.seeding import seed_torch

log = logging.getLogger("hookline")
KILL_TIMEOUT = 5.0
"""Seconds to wait for the end of a killed process."""


class Keyed:
    """The indices of a batch for a worker, with the seed of its random numbers."""

    __slots__ = ("index", "seed")

    def __init__(self, seed: int, index: Any) -> None:
        self.seed = seed
        self.index = index

    def __iter__(self) -> Iterator[Any]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)


class KeyedDataset:
    """A wrapper of the user's dataset that seeds the random streams for each batch.

    Torch's stream is seeded for every sample (1.3 µs). Python's and NumPy's take 5.6 and 1.9 µs to seed, so
    they are seeded once a batch. The random numbers depend only on the seed, the epoch and the position, not
    on the worker.
    """

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "_dataset", dataset)

    def __getitems__(self, keyed: Any) -> Any:
        """Return a batch for torch's fetcher."""
        dataset = object.__getattribute__(self, "_dataset")
        if type(keyed) is not Keyed:
            return [dataset[each] for each in keyed]
        seed_all(keyed.seed)
        get_batch = getattr(dataset, "__getitems__", None)
        if get_batch:
            return get_batch(keyed.index)
        items, seed = [], keyed.seed
        for index in keyed.index:
            seed_torch(seed)
            seed += 1
            items.append(dataset[index])
        return items

    def __getitem__(self, index: Any) -> Any:
        if type(index) is Keyed:  # without automatic batching
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
        """Return the user's class, for `isinstance`."""
        return type(object.__getattribute__(self, "_dataset"))


def seed_all(seed: int) -> None:
    """Seed the three random streams of a worker."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


class WorkerStart:
    """A `worker_init_fn` that sets up a worker and then calls the user's function."""

    def __init__(self, users: Any) -> None:
        self.users = users

    def __call__(self, worker_id: int) -> None:
        """Set up a worker. Make `get_worker_info().dataset` the user's dataset, not the wrapper."""
        info: Any = torch_worker._worker_info
        if info is not None and type(info.dataset) is KeyedDataset:
            own = object.__getattribute__(info.dataset, "_dataset")
            # not dataclasses.replace, because it is a dataclass only in newer versions of torch
            replaced = copy.copy(info)
            object.__setattr__(replaced, "dataset", own)
            torch_worker._worker_info = replaced
        block_signals()
        if self.users is not None:
            self.users(worker_id)


def block_signals() -> None:
    """Protect a worker from signals to the process group, so that the main process can finish its step.

    In torch's handler, a SIGTERM of another process kills the worker and with it the main process. Therefore
    SIGTERM is blocked, and a thread reads it and checks the sender. The other signals get an empty handler,
    not SIG_IGN, which programs started by the dataset would inherit; they do inherit the blocked SIGTERM.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, _ignore_signal)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGUSR1})  # see starting_workers
    threading.Thread(target=_wait_for_parent_sigterm, name="hookline-signals", daemon=True).start()


@contextlib.contextmanager
def starting_workers(loader: Any) -> Iterator[None]:
    """Block signals while the workers of a DataLoader start. They inherit the mask until `block_signals` runs
    in them, and so do Python's processes that help to start them, as long as they live.
    """
    if not hasattr(signal, "sigwaitinfo"):
        yield
        return
    held = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        if (loader.multiprocessing_context or multiprocessing).get_start_method() != "fork":
            # up to Python 3.13 its start unblocks signals
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, held)
        yield
    except (ConnectionError, EOFError) as error:  # the fork server has ended
        error.add_note("A process that starts the workers of the loader has ended; its own error is above.")
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_workers(batches: Any) -> None:
    """End the workers of a DataLoader's iterator and wait for them.

    Torch sends SIGTERM to workers that do not end. In ours, a thread reads it, and code that holds the GIL
    can block this thread. Such a worker is killed, because it would keep the program from ending.
    """
    shut_down = getattr(batches, "_shutdown_workers", None)
    if shut_down is None:
        return
    shut_down()
    for worker in getattr(batches, "_workers", ()):
        if worker.is_alive():
            log.warning("The worker process %s (%s) did not end and is killed.", worker.pid, worker.name)
            worker.kill()
            worker.join(KILL_TIMEOUT)


def _ignore_signal(number: int, frame: Any) -> None:
    pass


def _wait_for_parent_sigterm() -> None:
    main = multiprocessing.parent_process()  # not os.getppid(), which may be Python's fork server
    assert main is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main.pid:
        pass
    os._exit(0)
