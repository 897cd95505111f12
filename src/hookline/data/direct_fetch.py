"""Batches of torch's DataLoader without workers, fetched and collated without its iterator, which costs 11 µs
for a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import profiler
from torch.utils.data import DataLoader, dataloader

from hookline.data.in_memory import InMemoryFetch, rows_of

PROFILE_NAME = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
"""What torch's iterator is called in a profile."""


def reads_directly(loader: Any) -> bool:
    """Return whether a loader's own iterator does nothing but fetch and collate, one batch
    after the other.
    """
    if type(loader) is not DataLoader or loader.num_workers or loader.timeout or loader.pin_memory:
        return False
    return loader.batch_sampler is not None and "_get_iterator" not in vars(loader) and _is_original()


def direct_batches(loader: Any) -> Iterator[Any]:
    """Iterate over a loader as its own iterator does, with the same draws from its generator and the same
    fetcher of torch.
    """
    kind: Any = dataloader._DatasetKind
    indices = iter(loader.batch_sampler)
    torch.empty((), dtype=torch.int64).random_(
        generator=loader.generator
    ).item()  # the seed for workers, which are not there
    fetch = kind.create_fetcher(
        loader._dataset_kind, loader.dataset, True, loader.collate_fn, loader.drop_last
    ).fetch
    rows = rows_of(loader)
    # map, not a generator: a dataset that raises StopIteration ends the pass, as it does in torch's iterator
    return map(_profiled(fetch if rows is None else InMemoryFetch(rows, fetch).fetch), indices)


def _profiled(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Show a fetch in a profile as torch's iterator does; the profiler may be started and stopped at any
    batch.
    """

    def fetch_batch(index: Any) -> Any:
        if not profiler._is_profiler_enabled:
            return fetch(index)
        with profiler.record_function(PROFILE_NAME):
            return fetch(index)

    return fetch_batch


def _is_original() -> bool:
    """Whether the methods that are left out are those that torch has defined: another package may have
    replaced one.
    """
    methods: tuple[Any, ...] = (
        DataLoader.__iter__,
        DataLoader._get_iterator,
        dataloader._BaseDataLoaderIter.__init__,
        dataloader._BaseDataLoaderIter.__next__,
        dataloader._BaseDataLoaderIter._next_index,
        dataloader._SingleProcessDataLoaderIter.__init__,
        dataloader._SingleProcessDataLoaderIter._next_data,
    )
    files = {getattr(getattr(each, "__code__", None), "co_filename", "") for each in methods}
    return files == {DataLoader.__init__.__code__.co_filename} and "__next__" not in vars(
        dataloader._SingleProcessDataLoaderIter
    )
