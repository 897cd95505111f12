"""The formats of an export: how each is named, written, and moved into place when it is complete."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.checkpoint import dcp_folder, hf_folder
from hookline.checkpoint.averages import storage_of
from hookline.checkpoint.dcp_folder import write_dcp_folder
from hookline.checkpoint.hf_folder import parse_size, write_hf_folder
from hookline.checkpoint.sharded import ShardedTensor, is_dtensor
from hookline.checkpoint.tensors import DTYPE_NAMES, write_tensors
from hookline.checkpoint.writer import flush, move_into_place, owner, protect_from_cleanup
from hookline.util.errors import CheckpointError, OptionError, closest
from hookline.util.text import redact

SHARD_SIZE = "5GB"
"""The largest file of a sharded export, unless another size is given."""


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """A format: a file with an ending, or a folder of files with these names."""

    name: str
    ending: str = ""
    files: re.Pattern[str] | None = None
    is_program: bool = False
    """Whether it stores the computation too, so that the module is needed."""


FORMATS = {
    each.name: each
    for each in (
        ExportFormat("torch", ".pt"),
        ExportFormat("safetensors", ".safetensors"),
        ExportFormat("hf-sharded", files=hf_folder.OWN_FILE),
        ExportFormat("dcp", files=dcp_folder.OWN_FILE),
        ExportFormat("onnx", ".onnx", is_program=True),
        ExportFormat("torch-export", ".pt2", is_program=True),
    )
}
BY_ENDING = {each.ending: each for each in FORMATS.values() if each.ending}
FOLDERS = [each.name for each in FORMATS.values() if not each.ending]


def choose_format(out: Path, wanted: str | None) -> ExportFormat:
    """Return the format with this name, or the one of the file's ending. Raise if they contradict."""
    if re.match(r"\w\w+:/\w", out.as_posix()):  # Path has replaced the two slashes by one
        url = redact(out.as_posix().replace(":/", "://", 1))
        raise OptionError(f"{url}: weights are exported to a file here, not to a URL.")
    if wanted is None:
        if out.suffix not in BY_ENDING:
            raise OptionError(
                f"{out} must end with {', '.join(BY_ENDING)}.{closest(out.suffix, BY_ENDING)} To write a "
                f"folder, name its format: {' or '.join(FOLDERS)}."
            )
        return BY_ENDING[out.suffix]
    if wanted not in FORMATS:
        raise OptionError(
            f"format={wanted!r}, allowed: {', '.join(FORMATS)}.{closest(wanted, FORMATS)}",
            option="format",
            value=wanted,
            allowed=tuple(FORMATS),
        )
    format = FORMATS[wanted]
    if format.ending and out.suffix != format.ending:
        raise OptionError(
            f"{out} must end with {format.ending}, because the format {wanted} is a file with this ending: "
            f"{out.with_suffix(format.ending)}."
        )
    if not format.ending and out.suffix in BY_ENDING:
        raise OptionError(
            f"{out} ends like a file of the format {BY_ENDING[out.suffix].name}, but {wanted} is a folder: "
            f"{out.with_suffix('')}."
        )
    return format


# ---- put in place ------------------------------------------------------------------------------------------


def check_target(out: Path, format: ExportFormat, force: bool) -> None:
    """Raise if the target exists and may not be replaced, before anything is computed."""
    data = out.with_name(f"{out.name}.data")  # torch stores the weights of a large ONNX program there
    if format.name == "onnx" and os.path.lexists(data) and not force:
        raise OptionError(f"{data} exists; --force replaces it (force=True in Python).")
    if not os.path.lexists(out):
        return
    if not force:
        raise OptionError(f"{out} exists; --force replaces it (force=True in Python).")
    if format.ending:
        if out.is_dir():
            raise OptionError(f"{out} exists and is a directory.")
        return
    if not out.is_dir() or out.is_symlink():
        raise OptionError(f"{out} exists and is not a directory, and the format {format.name} is one.")
    assert format.files is not None
    others = sorted(each.name for each in out.iterdir() if not format.files.fullmatch(each.name))
    if others:
        raise OptionError(
            f"{out} has files that an export in the format {format.name} does not write: "
            f"{', '.join(others[:4])}{', ...' if len(others) > 4 else ''}. It is not replaced, because they "
            "would be lost: choose another folder, or remove it."
        )


@contextlib.contextmanager
def put_in_place(out: Path, *, is_file: bool) -> Iterator[Path]:
    """Yield the path to write to, in a temporary directory beside `out`; move the result to `out` at the end.

    After an exception the temporary directory is removed and `out` is not changed. A program may write more
    files, which start with the name of the first: they are moved before it.
    """
    temporary = out.parent / f".{out.name}.{owner()}.new"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        with protect_from_cleanup(temporary):
            temporary.mkdir()
            yield temporary / out.name if is_file else temporary
            _flush_all(temporary)
            if is_file:
                for file in sorted(temporary.iterdir(), key=lambda each: each.name == out.name):
                    os.replace(file, out.with_name(file.name))
            else:
                move_into_place(temporary, out)
        flush(out.parent)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _flush_all(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            with (Path(parent) / name).open("rb") as file:
                os.fsync(file.fileno())
        flush(Path(parent))


# ---- write weights -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnreadTensor:
    """A tensor in the files of several ranks, with the methods of a tensor that a writer calls."""

    source: ShardedTensor

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype."""
        return self.source.dtype

    def numel(self) -> int:
        """Return the number of elements."""
        return self.source.shape.numel()

    def element_size(self) -> int:
        """Return the bytes of one element."""
        return self.source.dtype.itemsize

    def data_ptr(self) -> int:
        """Return 0, because it has no memory."""
        return 0

    def read_whole(self) -> Tensor:
        """Read it."""
        return self.source.whole()

    cpu = read_whole


def write_weights(
    weights: Mapping[str, Any], path: Path, format: ExportFormat, shard_size: str | int = SHARD_SIZE
) -> None:
    """Write weights in one of the formats that hold weights only. Sharded ones are read one at a time."""
    for name, value in weights.items():
        if is_dtensor(value):
            raise CheckpointError(
                f"{name} is sharded over ranks. Save a checkpoint (trainer.save_checkpoint) and export it."
            )
    unread: dict[str, Any] = {
        name: UnreadTensor(value) if isinstance(value, ShardedTensor) else value
        for name, value in weights.items()
    }
    if format.name == "torch":
        _write_torch(_read_all(weights), path)
    elif format.name == "dcp":
        write_dcp_folder(unread, path)
    else:
        _refuse_values(weights, format.name)
        if format.name == "safetensors":
            write_tensors(unread, path)  # tied ones under each name, because plain readers expect them all
        else:
            write_hf_folder(_without_tied(unread, weights), path, parse_size(shard_size))


def _read_all(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights with all tensors read; tied ones are the same tensor, which torch.save stores once."""
    read: dict[Any, Tensor] = {}
    for value in weights.values():
        if isinstance(value, ShardedTensor) and storage_of(value) not in read:
            read[storage_of(value)] = value.whole()
    return {
        name: read[storage_of(value)] if isinstance(value, ShardedTensor) else value
        for name, value in weights.items()
    }


def _refuse_values(weights: Mapping[str, Any], format: str) -> None:
    for name, value in weights.items():
        if not isinstance(value, Tensor | ShardedTensor) or value.dtype not in DTYPE_NAMES:
            kind = value.dtype if isinstance(value, Tensor | ShardedTensor) else type(value).__name__
            a_file = "A .safetensors file" if format == "safetensors" else f"The format {format}"
            raise CheckpointError(f"{a_file} cannot store {name} ({kind}). Export to a .pt file instead.")


def _without_tied(unread: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return tied weights under their first name only, as transformers stores them; it ties them again."""
    found: dict[Any, str] = {}
    for name, value in weights.items():
        found.setdefault(storage_of(value) or name, name)
    return {name: unread[name] for name in found.values()}


def _write_torch(weights: Mapping[str, Any], path: Path) -> None:
    torch.save(dict(weights), path)
    try:
        torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:
        raise CheckpointError(
            "These weights contain state that can be read only with pickled classes: "
            f"{str(error).partition('.')[0]}."
        ) from error
