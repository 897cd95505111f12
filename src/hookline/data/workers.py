"""Code that runs in a DataLoader's worker processes: seeding that does not depend on the worker, and signal
handling.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import inspect
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import torch.utils.data._utils.worker as torch_worker

from hookline.data.seeding import seed_torch
from hookline.util.errors import OptionError

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
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGUSR1})  # see starting_workers
    threading.Thread(target=_wait_for_parent_sigterm, name="hookline-signals", daemon=True).start()


# ---- what a new process cannot import ----------------------------------------------------------------------

MOST_NESTED = 4
"""How deep datasets are searched: a Subset of a dataset with a transform has three levels."""
MOST_MEMBERS = 100
"""Members of a list that are searched."""


def refuse_unimportable(loader: Any, name: str) -> None:
    """Raise if a notebook defines what the workers of a DataLoader need and cannot import.

    Workers that are not forked import the objects by name. In one that cannot, torch reports only that it has
    exited, or the loader hangs. loader: the DataLoader. name: its name in the run.
    """
    main = sys.modules["__main__"]
    has_source = getattr(main, "__spec__", None) is not None or getattr(main, "__file__", None) is not None
    if not loader.num_workers or has_source or (method := _start_method(loader)) == "fork":
        return
    for role in ("dataset", "collate_fn", "worker_init_fn"):
        found = next(filter(_is_of_main, _pickled_parts(getattr(loader, role))), None)
        if found is not None:
            what = getattr(found, "__name__", type(found).__name__)
            raise OptionError(
                f"The loader {name!r} has num_workers={loader.num_workers}, and {method!r} starts its "
                f"workers as new Python processes. They cannot import {what} (in its {role}), because a cell "
                f"of a notebook, or an interactive session, defines it. Put {what} into a file, such as "
                f"data.py, and import it: `from data import {what}`. Or pass num_workers=0."
            )


def _start_method(loader: Any) -> str:
    if loader.multiprocessing_context is not None:
        return str(loader.multiprocessing_context.get_start_method())
    # without allow_none, the default would be set, and a program could not choose another one later
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _is_of_main(value: Any) -> bool:
    """Return whether a worker would look this function, or the class of this object, up in `__main__`."""
    if inspect.isfunction(value) or inspect.isclass(value):
        return bool(value.__module__ == "__main__")
    return type(value).__module__ == "__main__" and not _has_own_pickling(type(value))


def _pickled_parts(value: Any, levels: int = MOST_NESTED) -> Iterator[Any]:
    """Yield an object and those that are pickled with it: the dataset of a Subset, and its transform."""
    yield value
    inner: Any = ()
    if isinstance(value, list | tuple):
        inner = value[:MOST_MEMBERS]
    elif not inspect.isclass(value) and not _has_own_pickling(type(value)):
        inner = list(getattr(value, "__dict__", {}).values())
    for each in inner if levels else ():
        yield from _pickled_parts(each, levels - 1)


def _has_own_pickling(cls: type) -> bool:
    """Return whether a class says itself what is pickled, so that it may not need to be imported."""
    names = ("__reduce__", "__reduce_ex__", "__getstate__")
    return cls in copyreg.dispatch_table or any(
        getattr(cls, name, None) is not getattr(object, name, None) for name in names
    )


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


def _wait_for_parent_sigterm() -> None:
    main = multiprocessing.parent_process()  # not os.getppid(), which may be Python's fork server
    assert main is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main.pid:
        pass
    os._exit(0)
