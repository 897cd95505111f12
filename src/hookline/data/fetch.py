"""Fetch and collate batches of a DataLoader without workers.

This avoids its iterator, which costs 11 µs a batch.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd import profiler
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, dataloader, default_collate
from torch.utils.data._utils import collate

# ---- datasets whose samples are rows of tensors in memory --------------------------------------------------


DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)
INDICES = ({int}, {np.int64})
"""The types of indices that select one row. A bool, a slice or a tensor selects something else, or is slower
to check.
"""

Columns = tuple[tuple[torch.dtype, torch.Size], ...]
"""The dtype of each tensor and the shape of its rows."""


class RowReader(Protocol):
    """A dataset whose samples are rows of tensors."""

    def read(self, index: Sequence[int]) -> list[Tensor] | None:
        """Return the rows as one tensor per column; None if torch's DataLoader may return others."""

    def columns(self) -> Columns | None:
        """Return its columns; None if they cannot be read here."""


class BatchReader(Protocol):
    """A dataset that can be read by batches."""

    def read(self, index: Sequence[int]) -> Any:
        """Return the batch of these indices; None if torch's DataLoader may return another one."""


def rows_of(loader: Any) -> BatchReader | None:
    """Return the rows of a loader that reads and collates as torch does; None for any other loader."""
    functions: dict[Any, Any] = collate.default_collate_fn_map  # other packages may change it
    is_default = functions.get(torch.Tensor) is collate.collate_tensor_fn and not any(
        isinstance((), each) for each in functions
    )
    if not is_default or loader.collate_fn is not default_collate:
        return None
    if ArrowRows.reads(loader.dataset):
        return ArrowRows(loader.dataset)
    rows = _rows_of_dataset(loader.dataset)
    return None if rows is None or rows.columns() is None else rows


def _rows_of_dataset(dataset: Any) -> RowReader | None:
    """Return the rows of a dataset of exactly torch's classes, because a subclass may read differently."""
    if "__getitems__" in getattr(dataset, "__dict__", ()):  # the loader would call it instead
        return None
    if type(dataset) is TensorDataset:
        return TensorRows(dataset) if _is_original(TensorDataset) else None
    if type(dataset) is Subset:
        inner = _rows_of_dataset(dataset.dataset) if _is_original(Subset) else None
        return None if inner is None else SubsetRows(dataset, inner)
    if type(dataset) is ConcatDataset and _is_original(ConcatDataset):
        parts = [_rows_of_dataset(each) for each in dataset.datasets]
        known = [each for each in parts if each is not None]
        return ConcatRows(dataset, known) if len(known) == len(parts) else None
    return None


def _is_original(kind: type[Any]) -> bool:
    """Return whether torch defines the methods of a class."""
    methods = [getattr(kind, name) for name in ("__getitem__", "__getitems__") if hasattr(kind, name)]
    return all(getattr(getattr(each, "__code__", None), "co_filename", "") == _SOURCE for each in methods)


_SOURCE = TensorDataset.__init__.__code__.co_filename


class TensorRows:
    """The rows of a TensorDataset."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset
        self._tensors: Any = None
        self._columns: Columns | None = None

    def columns(self) -> Columns | None:
        """Return the columns; check the tensors again if the dataset has new ones."""
        tensors: Any = self.dataset.tensors
        if tensors is not self._tensors:
            is_known = type(tensors) is tuple and all(is_plain(each) for each in tensors)
            self._columns = tuple((each.dtype, each.shape[1:]) for each in tensors) if is_known else None
            self._tensors = tensors
        return self._columns

    def read(self, index: Sequence[int]) -> list[Tensor] | None:
        """Index each tensor once. Raise for an index that is negative or too large."""
        if self.columns() is None or set(map(type, index)) not in INDICES:
            return None
        at = torch.from_numpy(np.fromiter(index, np.int64, len(index)))
        batch = []
        for tensor in self.dataset.tensors:
            if tensor.requires_grad:
                return None
            batch.append(tensor.index_select(0, at))
        return batch


class SubsetRows:
    """The rows of a Subset, as from `random_split`. Its indices may change between batches."""

    def __init__(self, dataset: Subset[Any], rows: RowReader) -> None:
        self.dataset, self.rows, self._inner = dataset, rows, dataset.dataset

    def columns(self) -> Columns | None:
        """Return the columns of the whole dataset."""
        return self.rows.columns() if self.dataset.dataset is self._inner else None

    def read(self, index: Sequence[int]) -> list[Tensor] | None:
        """Read the rows by the subset's indices."""
        indices: Any = self.dataset.indices
        if self.dataset.dataset is not self._inner or type(indices) not in (list, tuple, range, np.ndarray):
            return None
        return self.rows.read([indices[each] for each in index])


class ConcatRows:
    """The rows of a ConcatDataset of datasets with the same columns."""

    def __init__(self, dataset: ConcatDataset[Any], parts: list[RowReader]) -> None:
        self.dataset, self.parts, self._inner = dataset, parts, list(dataset.datasets)

    def columns(self) -> Columns | None:
        """Return the columns if all parts have the same."""
        datasets = self.dataset.datasets
        if len(datasets) != len(self._inner) or any(
            now is not then for now, then in zip(datasets, self._inner, strict=True)
        ):
            return None
        first, *others = (each.columns() for each in self.parts)
        return first if all(each == first for each in others) else None

    def read(self, index: Sequence[int]) -> list[Tensor] | None:
        """Read the rows of each part, concatenate them, and sort them into the order of the indices."""
        if self.columns() is None or set(map(type, index)) not in INDICES or min(index) < 0:
            return None
        ends = self.dataset.cumulative_sizes
        positions: dict[int, list[int]] = {}
        rows: dict[int, list[int]] = {}
        for position, row in enumerate(index):
            part = bisect.bisect_right(ends, row)
            positions.setdefault(part, []).append(position)
            rows.setdefault(part, []).append(row - ends[part - 1] if part else row)
        read = [self.parts[part].read(wanted) for part, wanted in rows.items()]
        if len(read) == 1:
            return read[0]
        known = [each for each in read if each is not None]
        if len(known) < len(read):
            return None
        order = np.argsort([position for part in positions.values() for position in part])
        at = torch.from_numpy(order)
        return [torch.cat(columns).index_select(0, at) for columns in zip(*known, strict=True)]


class ArrowRows:
    """A `datasets.Dataset` in torch format, which reads whole batches."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    @staticmethod
    def reads(dataset: Any) -> bool:
        """Return whether this is exactly that class, with its own methods."""
        kind = getattr(sys.modules.get("datasets"), "Dataset", None)
        if kind is None or type(dataset) is not kind:
            return False
        return not {"__getitem__", "__getitems__", "_getitem"} & vars(dataset).keys()

    def read(self, index: Sequence[int]) -> dict[str, Tensor] | None:
        """Return the dataset's batch if its columns are tensors; None for text and lists."""
        about = self.dataset.format
        if (
            about["type"] != "torch"
            or about["format_kwargs"]
            or set(map(type, index)) not in INDICES
            or min(index) < 0
        ):
            return None
        batch = self.dataset[index]
        is_known = type(batch) is dict and all(
            is_plain(each) and len(each) == len(index) for each in batch.values()
        )
        return batch if is_known and batch else None


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor is a plain, dense and contiguous CPU tensor without gradients."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    if (
        tensor.dtype not in DTYPES
        or tensor.requires_grad
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_inference()
    ):
        return False
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(size, 1)
    has_names = any(getattr(tensor, "names", ()))  # removed in newer versions of torch
    return (
        tensor.ndim > 0
        and tensor.numel() > 0
        and not has_names
        and tensor.stride() == tuple(reversed(strides))
    )


class InMemoryFetch:
    """A fetcher that reads a batch in memory if the result is exact, else with torch's fetcher."""

    def __init__(self, rows: BatchReader, fetch: Any) -> None:
        self._read, self._fetch = rows.read, fetch

    def fetch(self, index: Any) -> Any:
        """Return the batch of these indices. Errors come from torch's fetcher, whose messages users know."""
        batch = None
        if type(index) is list and index:
            try:
                batch = self._read(index)
            except Exception:
                batch = None
        return self._fetch(index) if batch is None else batch


PROFILE_NAME = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
"""The name of torch's iterator in a profile."""


def reads_directly(loader: Any) -> bool:
    """Return whether a loader's own iterator only fetches and collates one batch after the other."""
    if type(loader) is not DataLoader or loader.num_workers or loader.timeout or loader.pin_memory:
        return False
    return loader.batch_sampler is not None and "_get_iterator" not in vars(loader) and _loader_is_original()


def direct_batches(loader: Any) -> Iterator[Any]:
    """Iterate over a loader with the same draws and the same fetcher as its own iterator."""
    kind: Any = dataloader._DatasetKind
    indices = iter(loader.batch_sampler)
    # torch's iterator draws the seed of the workers even if there are none
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item()
    fetch = kind.create_fetcher(
        loader._dataset_kind, loader.dataset, True, loader.collate_fn, loader.drop_last
    ).fetch
    rows = rows_of(loader)
    # map, not a generator: a dataset that raises StopIteration ends the pass, as it does in torch's iterator
    return map(_profiled(fetch if rows is None else InMemoryFetch(rows, fetch).fetch), indices)


def _profiled(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Record a fetch in a profile as torch's iterator does; the profiler may start at any batch."""

    def fetch_batch(index: Any) -> Any:
        if not profiler._is_profiler_enabled:
            return fetch(index)
        with profiler.record_function(PROFILE_NAME):
            return fetch(index)

    return fetch_batch


def _loader_is_original() -> bool:
    """Return whether torch defines the bypassed methods, because another package may have replaced one."""
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
