"""Predictions on disk: shards that every rank writes, and a reader that restores the order of the dataset.

A shard is a file of JSON lines, one for each batch, and a safetensors file with the tensors that the lines
name. Both are renamed into place, the lines last. When a rank has written everything, it writes
`rank-N.json`: the folder is complete once all ranks have done so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from hookline.util.errors import HooklineError, OptionError, closest
from hookline.util.limited_json import MANIFEST_BYTES, is_count, is_table, is_text, parse_json, read_within

VERSION = 1
COMPLETE = "complete"
LEVELS = 100
"""The deepest nesting of a prediction."""
LINE_LEVELS = 500
SHARD = "rank-{}-{:05d}"
OF_RUN = re.compile(r"predictions(?:-(\d{1,9}))?", re.ASCII)
"""The folders of the predictions in the directory of a run: `predictions`, `predictions-2`, ..."""
OPEN_FILES = 64
RECENT = 64
"""Lines that the reader keeps parsed: one for each rank suffices if the ranks predict in order."""
TAG = "$"
"""Begins the key of a value that JSON does not have: `{"$tensor": "0"}`."""


# ---- values as JSON and tensors ----------------------------------------------------------------------------


def encode(value: Any, keep: Callable[[Tensor], str], where: str = "outputs", level: int = 0) -> Any:
    """Return a value as JSON. Raise for a value that cannot be written, with its path.

    keep: takes a tensor and returns the name for it. Dataclasses and named tuples become dictionaries.
    """
    if level > LEVELS:
        raise refusal(where, value, f"is nested more than {LEVELS} levels deep")
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {f"{TAG}float": repr(float(value))}
    if isinstance(value, Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        return {f"{TAG}{kind}": keep(_own_copy(value, where))}
    if (table := _as_table(value)) is not None:
        return _encode_table(table, keep, where, level)
    if isinstance(value, list | tuple):
        items = [encode(each, keep, f"{where}[{at}]", level + 1) for at, each in enumerate(value)]
        return items if isinstance(value, list) else {f"{TAG}tuple": items}
    raise refusal(where, value, "cannot be written")


def _encode_table(table: Mapping[Any, Any], keep: Callable[[Tensor], str], where: str, level: int) -> Any:
    items = {key: encode(each, keep, f"{where}[{key!r}]", level + 1) for key, each in table.items()}
    if all(type(key) is str and not key.startswith(TAG) for key in items):
        return items
    if wrong := [key for key in items if not isinstance(key, str | int | float | bool | None)]:
        raise refusal(where, table, f"has the key {wrong[0]!r}, which cannot be written")
    return {f"{TAG}dict": [[encode(key, keep, where), each] for key, each in items.items()]}


def _as_table(value: Any) -> Mapping[Any, Any] | None:
    """Return a dictionary, a dataclass or a named tuple as a mapping."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    names = getattr(value, "_fields", None)
    return dict(zip(names, value, strict=True)) if isinstance(value, tuple) and names is not None else None


def _own_copy(value: Tensor | np.ndarray[Any, Any], where: str) -> Tensor:
    """Return a contiguous copy on the CPU, which shares no memory with the value."""
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(np.array(value, order="C"))
        except (TypeError, ValueError):  # such as text, or another byte order
            raise refusal(where, value, f"has dtype {value.dtype}, which cannot be written") from None
    if hasattr(value, "full_tensor"):
        raise refusal(where, value, "is sharded over the ranks; return its full_tensor()")
    if value.layout is not torch.strided or value.is_meta or not _is_storable(value.dtype):
        what = f"{str(value.layout).removeprefix('torch.')} {str(value.dtype).removeprefix('torch.')}"
        raise refusal(where, value, f"({what} on {value.device}) cannot be written by safetensors")
    return value.detach().resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()


@functools.cache
def _is_storable(dtype: torch.dtype) -> bool:
    try:
        safetensors.torch.save({"": torch.empty(0, dtype=dtype)})
    except (KeyError, RuntimeError, safetensors.SafetensorError):
        return False
    return True


def refusal(where: str, value: Any, why: str) -> HooklineError:
    """Return the error about a part of a prediction that cannot be written."""
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return HooklineError(
        f"PredictionWriter: {where} is a {type(value).__name__}{shape} and {why}. It writes tensors, arrays, "
        "numbers, strings, None, and dictionaries, lists, tuples and dataclasses of them."
    )


def count_samples(value: Any, where: str = "outputs") -> int | None:
    """Return the number of samples in a batch's output; None if it is None everywhere.

    Dictionaries, tuples and dataclasses are structure; tensors, arrays and lists have an entry for each
    sample.
    """
    if value is None:
        return None
    if (table := _as_table(value)) is None and isinstance(value, tuple):
        table = dict(enumerate(value))
    if table is not None:
        found = {
            f"{where}[{key!r}]": count
            for key, each in table.items()
            if (count := count_samples(each, f"{where}[{key!r}]")) is not None
        }
        if len(set(found.values())) > 1:
            counts = ", ".join(f"{name} has {count}" for name, count in found.items())
            raise _not_by_sample(where, f"has entries for different numbers of samples: {counts}")
        return next(iter(found.values()), None)
    if isinstance(value, list):
        return len(value)
    if isinstance(value, Tensor | np.ndarray) and value.ndim:
        return int(value.shape[0])
    raise _not_by_sample(where, f"is a {type(value).__name__} without an entry for each sample")


def _not_by_sample(where: str, why: str) -> HooklineError:
    return HooklineError(
        f"PredictionWriter writes one prediction for each sample, but {where} {why}. Tensors, arrays and "
        "lists need an entry for each sample; dictionaries and tuples hold several of them. To write what "
        "predict_step returns for a batch as it is, pass per='batch'."
    )


def decode(tree: Any, tensor: Callable[[str, int | None], Tensor], row: int | None = None) -> Any:
    """Return the value that `encode` made JSON of. row: only the entry of this sample."""
    if isinstance(tree, list):
        if row is not None:
            return decode(tree[row], tensor)
        return [decode(each, tensor) for each in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree)) if len(tree) == 1 else ""
    if not tag.startswith(TAG):
        return {key: decode(each, tensor, row) for key, each in tree.items()}
    inner = tree[tag]
    if tag == f"{TAG}tuple":
        return tuple(decode(each, tensor, row) for each in inner)
    if tag == f"{TAG}dict":
        return {decode(key, tensor): decode(each, tensor, row) for key, each in inner}
    if tag == f"{TAG}float":
        return float(inner)
    if tag == f"{TAG}tensor":
        return tensor(inner, row)
    if tag == f"{TAG}array":
        return tensor(inner, row).numpy()
    raise ValueError(f"{tag!r} is not a kind of value that this version reads")


# ---- writing -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PredictionShards:
    """The shards of one rank. It keeps at most one shard in memory."""

    folder: Path
    rank: int
    ranks: list[int]
    """The ranks that write predictions."""
    per: str
    """'sample' or 'batch': what one prediction is."""
    shard_bytes: float
    shard_batches: float
    loaders: dict[str, dict[str, int]] = field(default_factory=dict)
    """The batches and predictions of each loader so far."""
    files: dict[str, int] = field(default_factory=dict)
    """The files of finished shards, with their bytes."""
    _lines: list[str] = field(default_factory=list)
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _bytes: int = 0
    _number: int = 0

    def add(self, loader: str, batch: int, indices: list[int] | None, outputs: Any) -> None:
        """Add the output of a batch, and write a shard if it is full. indices: of its samples, if known."""
        count = None if self.per == "batch" else _samples_in(outputs, indices)
        made: dict[str, Tensor] = {}

        def keep(tensor: Tensor) -> str:
            name = str(len(self._tensors) + len(made))
            made[name] = tensor
            return name

        record = {
            "loader": loader,
            "batch": batch,
            "count": count,
            "indices": None if count is None else indices,
            "outputs": encode(outputs, keep),
        }
        line = json.dumps(record, allow_nan=False, separators=(",", ":"))
        self._tensors.update(made)
        self._lines.append(line)
        self._bytes += len(line) + sum(each.nbytes for each in made.values())
        seen = self.loaders.setdefault(loader, {"batches": 0, "predictions": 0})
        seen["batches"] += 1
        seen["predictions"] += 1 if count is None else count
        if self._bytes >= self.shard_bytes or len(self._lines) >= self.shard_batches:
            self.flush()

    def flush(self) -> None:
        """Write the shard in memory, if there is one."""
        if not self._lines:
            return
        name = SHARD.format(self.rank, self._number)
        sizes: dict[str, int] = {}
        if self._tensors:
            tensors = self._tensors
            sizes |= self._write(
                f"{name}.safetensors", lambda path: safetensors.torch.save_file(tensors, path)
            )
        text = "\n".join([*self._lines, ""])
        sizes |= self._write(f"{name}.jsonl", lambda path: path.write_text(text, encoding="ascii"))
        self.files |= sizes
        self._number += 1
        self._lines, self._tensors, self._bytes = [], {}, 0

    def finish(self, status: str, reason: str = "") -> None:
        """Write the last shard, then the manifest of this rank. status: 'complete', 'stopped' or 'failed'."""
        self.flush()
        about = {
            "version": VERSION,
            "status": status,
            "reason": reason,
            "rank": self.rank,
            "ranks": self.ranks,
            "per": self.per,
            "loaders": self.loaders,
            "files": self.files,
        }
        text = json.dumps(about, indent=1)
        self._write(f"rank-{self.rank}.json", lambda path: path.write_text(text, encoding="ascii"))

    def _write(self, name: str, write: Callable[[Path], object]) -> dict[str, int]:
        """Write a file beside its place, then rename it. Return its name and size."""
        path, temporary = self.folder / name, self.folder / f".{name}.new"
        try:
            write(temporary)
            size = temporary.stat().st_size
            temporary.replace(path)
        except (OSError, safetensors.SafetensorError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise HooklineError(f"PredictionWriter: {path} could not be written: {error}") from error
        return {name: size}


def _samples_in(outputs: Any, indices: list[int] | None) -> int:
    """Return the number of samples in an output; raise if it is not that of the batch."""
    found = count_samples(outputs)
    if found is None:
        raise _not_by_sample("outputs", "is None")
    if indices is not None and found != len(indices):
        raise _not_by_sample("outputs", f"has {found} entries for a batch of {len(indices)} samples")
    return found


# ---- reading -----------------------------------------------------------------------------------------------


def read_predictions(
    folder: str | os.PathLike[str], loader: str | None = None, *, partial: bool = False
) -> Predictions:
    """Return the predictions that the hook PredictionWriter has written, in the order of the dataset.

    folder: `folder` of the hook, or the directory of a run, which stands for its newest predictions. loader:
    the name of one of several loaders. partial: also read the folder of a run that has not finished, or was
    stopped, failed or killed.
    """
    path = _newest_below(Path(folder).expanduser())
    shards = sorted(path.glob("rank-*-*.jsonl"), key=_numbers_of)
    manifests = [_read_manifest(each) for each in sorted(path.glob("rank-*.json"))]
    if not shards and not manifests:
        raise OptionError(f"{path} has no predictions: it is not a folder that PredictionWriter has written.")
    problem = _why_incomplete(path, manifests, {_numbers_of(each)[0] for each in shards})
    if problem and not partial:
        raise HooklineError(
            f"The predictions in {path} are not complete: {problem}. To read those that there are, pass "
            "partial=True."
        )
    records = [each for shard in shards for each in _records_of(shard)]
    names = list(dict.fromkeys([*(each.loader for each in records), *_loaders_of(manifests)]))
    chosen = _choose_loader(path, names, loader)
    return Predictions(path, chosen, [each for each in records if each.loader == chosen], problem)


def _newest_below(path: Path) -> Path:
    """Return the newest folder of predictions in the directory of a run; another path unchanged."""
    found = {
        int(name[1] or 1): each
        for each in path.glob("predictions*")
        if each.is_dir() and (name := OF_RUN.fullmatch(each.name))
    }
    return found[max(found)] if found else path


@dataclass(frozen=True, slots=True)
class Record:
    """A line of a shard: the output of one batch, and where it is."""

    path: Path
    offset: int
    rank: int
    loader: str
    batch: int
    count: int | None
    """The predictions in it: its samples; None if the whole output is one prediction."""
    indices: Any
    """The indices of its samples in the dataset, an array; None if they are not known."""


class Predictions(Sequence[Any]):
    """Predictions on disk, in the order of the dataset. Each is read when it is requested.

    With indices of the dataset, each sample occurs once, also if the ranks predicted it twice. Without them
    the order is that of the batches, the ranks in turn.
    """

    def __init__(self, folder: Path, loader: str, records: list[Record], problem: str) -> None:
        self.folder, self.loader = folder, loader
        self.problem = problem
        """Why the predictions are not complete; empty if they are."""
        self._records = records
        self._of, self._rows, self.indices = _order(records)
        """The index in the dataset of each prediction; None if they are not known."""
        self._line = functools.lru_cache(RECENT)(self._read_line)
        self._file = functools.lru_cache(OPEN_FILES)(_open_tensors)

    @property
    def complete(self) -> bool:
        """Whether all ranks have written all of their predictions."""
        return not self.problem

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))

    def __getitem__(self, at: Any) -> Any:
        """Return the prediction at a position, or a list of those of a slice."""
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        number, row = int(self._of[at]), int(self._rows[at])
        record = self._records[number]
        try:
            tensor = functools.partial(self._tensor, record.path.with_suffix(".safetensors"))
            return decode(self._line(number), tensor, None if record.count is None else row)
        except (OSError, ValueError, KeyError, IndexError, TypeError, safetensors.SafetensorError) as error:
            raise HooklineError(
                f"{record.path}: the output of batch {record.batch} of {record.loader!r} cannot be read: "
                f"{error}"
            ) from error

    def _read_line(self, number: int) -> Any:
        record = self._records[number]
        with record.path.open("rb") as file:
            file.seek(record.offset)
            return parse_json(file.readline(), LINE_LEVELS)["outputs"]

    def _tensor(self, path: Path, name: str, row: int | None) -> Tensor:
        file = self._file(path)
        whole: Tensor = file.get_tensor(name) if row is None else file.get_slice(name)[row : row + 1][0]
        return whole

    def __repr__(self) -> str:
        state = "" if self.complete else f", not complete: {self.problem}"
        return f"<{len(self)} predictions of {self.loader!r} in {self.folder}{state}>"


def _open_tensors(path: Path) -> Any:
    return safetensors.safe_open(path, "pt")


def _order(records: list[Record]) -> tuple[Any, Any, Any]:
    """Return the record and the row of each prediction in order, and its index in the dataset if known."""
    counts = np.array([1 if each.count is None else each.count for each in records], dtype=np.int64)
    of = np.repeat(np.arange(len(records)), counts)
    rows = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    batches, ranks = (
        np.array(each, dtype=np.int64)
        for each in ([one.batch for one in records], [one.rank for one in records])
    )
    if not records or any(each.indices is None for each in records):
        order = np.lexsort((rows, ranks[of], batches[of]))
        return of[order], rows[order], None
    indices = np.concatenate([each.indices for each in records])
    order = np.lexsort((rows, ranks[of], batches[of], indices))
    # a sampler that shards itself repeats samples so that all ranks have equally many
    order = order[np.diff(indices[order], prepend=-1) != 0]
    return of[order], rows[order], indices[order]


def _records_of(path: Path) -> Iterator[Record]:
    rank = _numbers_of(path)[0]
    with path.open("rb") as file:
        while line := file.readline():
            at = file.tell() - len(line)
            try:
                made = parse_json(line, LINE_LEVELS)
                loader, batch, count = made["loader"], made["batch"], made["count"]
                indices = made["indices"]
                if not (is_text(loader) and is_count(batch) and (count is None or is_count(count))):
                    raise ValueError("it is not a record of predictions")
                if indices is not None and (len(indices) != count or not all(map(is_count, indices))):
                    raise ValueError(f"it does not have {count} indices")
                found = None if indices is None else np.array(indices, dtype=np.int64)
                record = Record(path, at, rank, loader, batch, count, found)
            except (ValueError, KeyError, TypeError) as error:
                raise HooklineError(f"{path} is damaged at byte {at}: {error}") from error
            yield record


def _numbers_of(path: Path) -> tuple[int, int]:
    """Return the rank and the number of a shard."""
    try:
        _, rank, number = path.stem.split("-")
        return int(np.int64(rank)), int(number)
    except (ValueError, OverflowError):
        raise HooklineError(f"{path} is not a shard of predictions: rank-0-00000.jsonl is one.") from None


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = parse_json(read_within(path, MANIFEST_BYTES))
        if found["version"] > VERSION:
            raise ValueError(f"a newer version of Hookline has written it (format {found['version']})")
        if not (
            all(is_table(found[each]) for each in ("loaders", "files"))
            and all(is_text(found[each]) for each in ("status", "reason"))
            and all(map(is_count, [found["rank"], *found["ranks"]]))
            and found["per"] in ("sample", "batch")
        ):
            raise ValueError("it is not a manifest of predictions")
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HooklineError(f"{path} is damaged: {error}") from error


def _why_incomplete(folder: Path, manifests: list[dict[str, Any]], writers: set[int]) -> str:
    """Return why not all predictions are there; empty if they are. Raise for a file that has changed."""
    for found in manifests:
        for name, size in found["files"].items():
            path = folder / Path(name).name
            now = path.stat().st_size if path.is_file() else None
            if now != size:
                raise HooklineError(
                    f"{path} is damaged: it has {now} bytes and was written with {size}."
                    if now is not None
                    else f"{path} is missing."
                )
    unfinished = [each for each in manifests if each["status"] != COMPLETE]
    if unfinished:
        first = unfinished[0]
        return f"rank {first['rank']} {first['status']} ({first['reason'] or 'no reason is known'})"
    ended = {each["rank"] for each in manifests}
    wanted = sorted(writers.union(*(each["ranks"] for each in manifests)))
    missing = [str(rank) for rank in wanted if rank not in ended]
    return f"rank {', '.join(missing)} has not finished, or its process was killed" if missing else ""


def _loaders_of(manifests: list[dict[str, Any]]) -> Iterator[str]:
    for found in manifests:
        yield from found["loaders"]


def _choose_loader(folder: Path, names: list[str], wanted: str | None) -> str:
    if wanted is not None and wanted not in names:
        raise OptionError(
            f"{folder} has no predictions of a loader {wanted!r}.{closest(wanted, names)} Loaders: "
            f"{', '.join(map(repr, names))}.",
            option="loader",
            value=wanted,
            allowed=tuple(names),
        )
    if wanted is None and len(names) > 1:
        raise OptionError(
            f"{folder} has predictions of several loaders: pass loader= with one of "
            f"{', '.join(map(repr, names))}.",
            option="loader",
            allowed=tuple(names),
        )
    return wanted if wanted is not None else next(iter(names), "")
