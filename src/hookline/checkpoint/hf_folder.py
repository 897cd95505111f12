"""Folders in Hugging Face's layout: safetensors files, with an index if there are several.

transformers writes and reads this layout. torch.distributed.checkpoint writes it too, with its safetensors
storage; then a tensor may be split over the files of several ranks.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hookline.checkpoint.reader import check_regular_file
from hookline.checkpoint.sharded import join_blocks
from hookline.checkpoint.tensors import map_tensors, name_file_in_errors, write_tensors
from hookline.util.errors import CheckpointError, OptionError
from hookline.util.limited_json import STRUCTURE_BYTES, parse_json, read_within

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OWN_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
"""The files that an export writes."""
OURS = ("manifest.json", "state.json", "run.json", "checkpoints")
"""Names in a checkpoint or a run, to which an export may have been written."""
SHARD = re.compile(r"(?:shard-\d+-)?model-(\d+)-of-(\d+)\.safetensors")
"""The file of a shard: its number, and the number of shards; of one rank, if it starts with `shard`."""
DCP_OFFSETS = "DCP_SHARDING_INFO"
"""The entry of a file's metadata in which torch.distributed.checkpoint stores the offsets of its blocks."""
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", re.IGNORECASE)
UNITS = {"b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("b", 1000), ("ib", 1024))
}


def parse_size(given: str | int) -> int:
    """Return a size such as `5GB` or `500MB` in bytes."""
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    found = SIZE.fullmatch(given) if isinstance(given, str) else None
    size = int(float(found[1]) * UNITS[found[2].lower()]) if found else 0
    if size < 1:
        raise OptionError(
            f"shard_size={given!r} is not a size: pass a number of bytes with a unit, such as 5GB, 500MB or "
            "200MiB.",
            option="shard_size",
            value=given,
        )
    return size


# ---- writing -----------------------------------------------------------------------------------------------


def write_hf_folder(weights: Mapping[str, Any], folder: Path, shard_size: int) -> None:
    """Write weights as transformers does: one file, or several of at most `shard_size` and an index.

    A larger tensor has a file of its own. weights: tensors, or unread ones, of which one is read at a time.
    """
    shards: list[dict[str, Any]] = [{}]
    room = shard_size
    for name, value in weights.items():
        size = _bytes_of(value)
        if size > room and shards[-1]:
            shards.append({})
            room = shard_size
        shards[-1][name] = value
        room -= size
    if len(shards) == 1:
        write_tensors(shards[0], folder / ONE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    total = {
        "total_parameters": sum(each.numel() for each in weights.values()),
        "total_size": sum(map(_bytes_of, weights.values())),
    }
    text = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    with name_file_in_errors(folder / INDEX):
        (folder / INDEX).write_text(text, encoding="utf-8")


def _bytes_of(value: Any) -> int:
    return int(value.numel() * value.element_size())


# ---- reading -----------------------------------------------------------------------------------------------


def is_hf_folder(path: Path) -> bool:
    """Return whether a directory has weights in this layout, and is not a run or a checkpoint of Hookline."""
    try:
        if not path.is_dir() or any((path / name).exists() for name in OURS):
            return False
        return (path / INDEX).exists() or bool(_files_in(path))
    except OSError:  # a directory that may not be read
        return False


def read_hf_folder(folder: Path) -> dict[str, Tensor]:
    """Return all weights of a folder, memory-mapped. Raise a CheckpointError if one is missing or doubled."""
    if (folder / INDEX).exists() or (folder / INDEX).is_symlink():
        return _read_by_index(folder, _read_index(folder))
    names = _files_in(folder)
    if not names:
        raise CheckpointError(f"{folder} has neither {ONE_FILE} nor {INDEX}.")
    if len(names) > 1:
        _refuse_missing_files(folder, names)
    return _read_blocks(folder, names)


def _files_in(folder: Path) -> list[str]:
    return sorted(
        each.name for each in folder.iterdir() if each.name == ONE_FILE or SHARD.fullmatch(each.name)
    )


def _read_index(folder: Path) -> dict[str, str]:
    _check_member(folder, INDEX)
    wrong = f"{folder / INDEX} cannot be used: "
    try:
        index = parse_json(read_within(folder / INDEX, STRUCTURE_BYTES))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{wrong}{error}.") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(each, str) for each in weight_map.values()):
        raise CheckpointError(f"{wrong}it has no `weight_map`, a table from weights to files.")
    return weight_map


def _read_by_index(folder: Path, weight_map: Mapping[str, str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(weight_map.values()):
        _check_member(folder, name)
        tensors = _map_file(folder / name)
        wanted = {key for key, file in weight_map.items() if file == name}
        if missing := sorted(wanted - tensors.keys()):
            raise CheckpointError(
                f"{folder / name} does not have {missing[0]!r}, which {INDEX} says that it has."
            )
        if extra := sorted(tensors.keys() - wanted):
            place = f"in {weight_map[extra[0]]}" if extra[0] in weight_map else "nowhere"
            raise CheckpointError(
                f"{folder / name} has {extra[0]!r}, which is {place} according to {INDEX}. The folder may "
                "mix the files of two models."
            )
        found |= tensors
    return {name: found[name] for name in weight_map}


def _refuse_missing_files(folder: Path, names: list[str]) -> None:
    """Raise unless the names are all shards of one model; without an index, only their names say so."""
    numbers = [SHARD.fullmatch(name) for name in names]
    counts = {each[2] for each in numbers if each}
    there = {int(each[1]) for each in numbers if each}
    if None in numbers or len(counts) != 1 or len(counts.pop()) > 9:
        raise CheckpointError(
            f"{folder} has several .safetensors files ({', '.join(names[:4])}) and no {INDEX}, which says "
            "which weights are in which file."
        )
    count = next(int(each[2]) for each in numbers if each)
    if there != set(range(1, count + 1)):
        missing = next(number for number in range(1, count + 2) if number not in there)
        raise CheckpointError(f"{folder} has no file of shard {missing} of {count}: {', '.join(names[:4])}.")


def _read_blocks(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """Read files without an index; join the blocks of a tensor that is in several."""
    blocks: dict[str, list[tuple[list[int], Tensor]]] = {}
    for name in names:
        _check_member(folder, name)
        offsets = _offsets_in(folder / name)
        for key, tensor in _map_file(folder / name).items():
            offset = offsets.get(key, [0] * tensor.dim())
            if len(offset) != tensor.dim():
                raise CheckpointError(
                    f"{folder / name} has the offset {offset} for {key}, of shape {list(tensor.shape)}."
                )
            blocks.setdefault(key, []).append((offset, tensor))
    return {key: _join(folder, key, each) for key, each in blocks.items()}


def _join(folder: Path, name: str, blocks: list[tuple[list[int], Tensor]]) -> Tensor:
    first = blocks[0][1]
    if any(block.dtype != first.dtype or block.dim() != first.dim() for _, block in blocks):
        raise CheckpointError(f"{folder} has {name} in several files, with different shapes or dtypes.")
    shape = [max(offset[dim] + block.shape[dim] for offset, block in blocks) for dim in range(first.dim())]
    try:
        return join_blocks(name, shape, first.dtype, blocks)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from None


def _offsets_in(file: Path) -> dict[str, list[int]]:
    """Return the offsets that torch.distributed.checkpoint has stored in the metadata of a file."""
    with _explain(file), safe_open(file, framework="pt") as opened:
        text = (opened.metadata() or {}).get(DCP_OFFSETS)
    if text is None:
        return {}
    try:
        found = {name: entry["saved_offsets"] for name, entry in parse_json(text.encode()).items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} has offsets that cannot be read: {error!r}.") from error
    for name, offset in found.items():
        if not isinstance(offset, list) or not all(
            type(each) is int and 0 <= each < 2**48 for each in offset
        ):
            raise CheckpointError(f"{file} has an invalid offset of {name[:80]!r}.")
    return found


def _map_file(file: Path) -> dict[str, Tensor]:
    with _explain(file):
        return map_tensors(file)


@contextlib.contextmanager
def _explain(file: Path) -> Iterator[None]:
    """Turn the errors of the reader into a CheckpointError that names the file."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error


def _check_member(folder: Path, name: str) -> None:
    """Raise unless a name is that of a regular file in the folder; a file may name any other."""
    if name != Path(name).name or name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise CheckpointError(
            f"{folder / INDEX} names the file {name[:200]!r}, which is not the plain name of a file in "
            f"{folder}. No file was read."
        )
    # the hub's cache has links from snapshots/COMMIT to blobs
    blobs = (
        [folder.absolute().parent.parent / "blobs"] if folder.absolute().parent.name == "snapshots" else []
    )
    check_regular_file(folder / name, f"{folder} is damaged: {name}", folder, *blobs)
