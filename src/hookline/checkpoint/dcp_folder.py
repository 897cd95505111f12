"""Folders of torch.distributed.checkpoint: written by torch, read without unpickling their metadata.

`.metadata` is a pickle that torch's own reader runs. Here `inert_pickle` reads it, and each tensor is read
with `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hookline.checkpoint.inert_pickle import Name, Record, RefusedName, read_records
from hookline.checkpoint.reader import check_regular_file
from hookline.checkpoint.sharded import join_blocks
from hookline.util.errors import CheckpointError
from hookline.util.limited_json import STRUCTURE_BYTES, is_count, read_within

T = TypeVar("T")
METADATA = ".metadata"
OWN_FILE = re.compile(r"\.metadata|__\d+_\d+\.distcp")
"""The files that an export writes."""
PLAIN_NAME = re.compile(r"[\w.-]+\.distcp", re.ASCII)
MOST_DIMENSIONS = 64
EXPECTED = re.compile(
    r"torch\.distributed\.(checkpoint\.(metadata|filesystem)|_shard\.sharded_tensor\.metadata)\.\w+"
    r"|torch\.(Size|bool|u?int\d+|float\w+|bfloat16|complex\d+|q\w+|serialization\._get_layout)"
    r"|pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path|collections\.OrderedDict"
)
"""The names of classes and constants in a `.metadata` file. None of them is imported."""


# ---- writing -----------------------------------------------------------------------------------------------


def write_dcp_folder(weights: Mapping[str, Any], folder: Path) -> None:
    """Write weights under their plain names, as `dcp.save(module.state_dict())` does in one process.

    weights: tensors, unread ones, of which one is read at a time, and the extra state of modules.
    """
    # slow to import
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    unread = {name: value for name, value in weights.items() if hasattr(value, "read_whole")}

    class ReadOnDemand(DefaultSavePlanner):
        """Plans with the shapes of unread tensors and reads each of them when its turn comes."""

        def lookup_object(self, index: Any) -> Any:
            """Return the value of an item."""
            if index.fqn in unread:
                return unread[index.fqn].read_whole()
            return super().lookup_object(index)

    planned = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") if name in unread else value
        for name, value in weights.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        save(planned, storage_writer=FileSystemWriter(folder), planner=ReadOnDemand(), no_dist=True)


# ---- reading -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredItem:
    """The bytes of an item: its file, where they start, and how many there are."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpEntry:
    """A tensor of a folder, or another value, which has no dtype."""

    name: str
    path: tuple[Any, ...]
    """The keys that lead to it in the dictionary that was saved."""
    items: tuple[tuple[tuple[int, ...], tuple[int, ...], StoredItem], ...]
    """The blocks: offset, size and bytes of each. A value that is not a tensor has one block."""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """The entries of a folder, by name. Nothing but the metadata is read yet."""

    path: Path
    entries: dict[str, DcpEntry] = field(default_factory=dict)

    def read(self, entry: DcpEntry) -> Any:
        """Read a tensor or another plain value."""
        values = [(offset, self._load(entry, size, item)) for offset, size, item in entry.items]
        if entry.dtype is None:
            return values[0][1]
        try:
            return join_blocks(entry.name, entry.shape, entry.dtype, values)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}.") from None

    def _load(self, entry: DcpEntry, size: tuple[int, ...], item: StoredItem) -> Any:
        file = self.path / item.file
        found = check_regular_file(file, f"{self.path} is damaged: {item.file}", self.path)
        if item.start + item.length > found.st_size:
            raise CheckpointError(
                f"{self.path} is damaged: {item.file} has {found.st_size} bytes, and {entry.name} ends at "
                f"{item.start + item.length}."
            )
        if entry.dtype is not None and math.prod(size) * entry.dtype.itemsize > item.length:
            raise CheckpointError(
                f"{self.path} is damaged: {entry.name} has {list(size)} elements, and only {item.length} "
                "bytes are stored."
            )
        with file.open("rb") as opened:
            opened.seek(item.start)
            data = io.BytesIO(opened.read(item.length))
        try:
            value = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:  # arbitrary bytes can raise any exception
            raise CheckpointError(
                f"{entry.name} in {file} was not read, and no code from it was run: "
                f"{_first_reason(error)}. Only tensors and plain values are read."
            ) from error
        if entry.dtype is not None and (
            type(value) not in (Tensor, torch.nn.Parameter)
            or (value.dtype, tuple(value.shape)) != (entry.dtype, size)
        ):
            raise CheckpointError(
                f"{self.path} is damaged: {entry.name} in {item.file} is not a tensor of {entry.dtype} with "
                f"shape {list(size)}, as {METADATA} says."
            )
        return value


def _first_reason(error: Exception) -> str:
    text = str(error)
    requested = re.search(r"GLOBAL ([\w.]+)", text)
    if requested:
        return f"it requests {requested[1].rstrip('.')}"
    return (text.partition("WeightsUnpickler error:")[2] or text).strip().partition("\n")[0].rstrip(".")


def is_dcp_folder(path: Path) -> bool:
    """Return whether a directory was written by torch.distributed.checkpoint with its default storage."""
    return path.is_dir() and (path / METADATA).is_file()


def open_dcp_folder(folder: Path) -> DcpFolder:
    """Read the metadata of a folder. Raise a CheckpointError for anything that torch does not write."""
    check_regular_file(folder / METADATA, f"{folder} is damaged: {METADATA}", folder)
    refused = f"{folder / METADATA} was not read, and no code from it was run"
    try:
        metadata = read_records(read_within(folder / METADATA, STRUCTURE_BYTES), _is_expected)
        return DcpFolder(folder, {each.name: each for each in _entries(metadata)})
    except RefusedName as error:
        raise CheckpointError(
            f"{refused}: it requests {error.name}, which the metadata of torch.distributed.checkpoint does "
            "not need: do not trust this folder."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{folder / METADATA} cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{refused}: {error}.") from error


def _is_expected(name: str) -> bool:
    return EXPECTED.fullmatch(name) is not None


def _entries(metadata: Any) -> Iterator[DcpEntry]:
    about = _state_of(metadata, "Metadata")
    stored: dict[tuple[str, tuple[int, ...] | None], StoredItem] = {}
    for index, info in _entry(about, "storage_data", dict).items():
        place = _state_of(index, "MetadataIndex")
        offset = place.get("offset")
        key = (_entry(place, "fqn", str), None if offset is None else _size(offset))
        if key in stored:
            raise ValueError(f"{key[0]!r} is stored twice")
        stored[key] = _item(info)
    paths = about.get("planner_data")
    for name, kind in _entry(about, "state_dict_metadata", dict).items():
        path = paths.get(name) if isinstance(paths, dict) else None
        path = path if isinstance(path, tuple) and path else (name,)
        if isinstance(kind, Record) and kind.name.endswith(".BytesStorageMetadata"):
            yield DcpEntry(name, path, (((), (), stored[name, None]),))
            continue
        tensor = _state_of(kind, "TensorStorageMetadata")
        blocks = [_state_of(each, "ChunkStorageMetadata") for each in _entry(tensor, "chunks", list)]
        places = [(_size(block["offsets"]), _size(block["sizes"])) for block in blocks]
        items = tuple((offset, size, stored[name, offset]) for offset, size in places)
        yield DcpEntry(name, path, items, _size(tensor["size"]), _dtype(tensor["properties"]))


def _state_of(value: Any, kind: str) -> dict[str, Any]:
    if (
        not isinstance(value, Record)
        or not value.name.endswith(f".{kind}")
        or not isinstance(value.state, dict)
    ):
        raise ValueError(f"it has something else where torch writes a {kind}")
    return value.state


def _entry(state: dict[str, Any], key: str, kind: type[T]) -> T:
    value = state.get(key)
    if not isinstance(value, kind):
        raise ValueError(f"its {key} is not a {kind.__name__}")
    return value


def _size(value: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size."""
    numbers = value.arguments[0] if isinstance(value, Record) and value.name == "torch.Size" else None
    if (
        not isinstance(numbers, tuple)
        or len(numbers) > MOST_DIMENSIONS
        or not all(is_count(each, most=2**48) for each in numbers)
    ):
        raise ValueError("it has a size or offset that is not a torch.Size of whole numbers")
    return numbers


def _dtype(properties: Any) -> torch.dtype:
    """Return the dtype: the first value of the state of TensorProperties, or its entry of this name."""
    state = properties.state if isinstance(properties, Record) else None
    found = (
        state[0]
        if isinstance(state, tuple) and state
        else state.get("dtype")
        if isinstance(state, dict)
        else None
    )
    dtype = getattr(torch, found.text.removeprefix("torch."), None) if isinstance(found, Name) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError("it has a tensor without a dtype")
    return dtype


def _item(info: Any) -> StoredItem:
    state = _state_of(info, "_StorageInfo")
    file = _entry(state, "relative_path", str)
    if file != os.path.basename(file) or not PLAIN_NAME.fullmatch(file):
        raise ValueError(
            f"it names the file {file[:200]!r}, which is not the plain name of a .distcp file in the folder"
        )
    if not is_count(state.get("offset")) or not is_count(state.get("length")):
        raise ValueError(f"it has an invalid offset or length in {file}")
    if state.get("transform_descriptors"):
        raise ValueError(
            f"{file} is compressed or encrypted by an extension of torch.distributed.checkpoint. Load it "
            "with that extension and save it without"
        )
    return StoredItem(file, state["offset"], state["length"])
