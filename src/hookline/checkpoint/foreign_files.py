"""Import files and folders of other tools. No code from them is run: torch files are read with its restricted
unpickler.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from hookline.checkpoint.dcp_folder import DcpEntry, is_dcp_folder, open_dcp_folder
from hookline.checkpoint.hf_folder import is_hf_folder, read_hf_folder
from hookline.checkpoint.tensors import read_tensors
from hookline.util.errors import CheckpointError, closest, missing_checkpoint
from hookline.util.text import redact
from hookline.util.urls import is_url

WEIGHT_KEYS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which tools store the weights; the first one present is taken."""
HPARAM_KEYS = ("hyper_parameters", "hparams", "config", "args")
STEP_KEYS = ("global_step", "step", "iteration")
EPOCH_KEYS = ("epoch", "current_epoch")
OPTIMIZER_KEYS = ("optimizer_states", "optimizer_state_dict", "optimizers", "optimizer")
MOST_LEVELS = 20
"""Levels of nesting in a folder of torch.distributed.checkpoint."""
NO_ELEMENTS = torch.empty(0)
"""Stands for a tensor that is not read yet."""
WANTED = re.compile(r"GLOBAL ([\w.]+)(.*is blocked)?")
"""Torch's message for a class or function that a file requests and that is not allowed; "is blocked" means
that it cannot be allowed.
"""


@dataclass(frozen=True, slots=True, repr=False)
class Imported:
    """The contents of a file of another tool; `load_weights(module, imported)` takes its weights.

    path: the file or folder. weights: tensors by name. hparams: hyper-parameters, if the file has some. step,
    epoch: where the training was, or None.
    """

    path: Path
    weights: Mapping[str, Any]
    hparams: dict[str, Any]
    step: int | None
    epoch: int | None
    optimizers: list[Any]
    """The states of optimizers, in that tool's format."""
    contents: Any
    """The whole file."""

    def __repr__(self) -> str:
        numbers = sum(each.numel() for each in self.weights.values() if isinstance(each, Tensor))
        return (
            f"{self.path}: {len(self.weights)} weights ({numbers:,} numbers), step {self.step}, epoch "
            f"{self.epoch}, {len(self.hparams)} hyper-parameters, {len(self.optimizers)} optimizer states"
        )


def import_checkpoint(path: str | os.PathLike[str], weights: str | None = None) -> Imported:
    """Read weights of another tool: a torch.save file, safetensors, or a folder of either.

    A Lightning `.ckpt` or any torch.save file is read with `torch.load(weights_only=True)`. A folder is one
    of transformers (safetensors) or of torch.distributed.checkpoint; of these only the weights are read.
    weights: the key of the weights, if it is not state_dict, model_state_dict, model or module, and the file
    itself is not a state_dict.

    path: the file or folder.
    """
    file = Path(path)
    if is_dcp_folder(file):
        found = _read_dcp(file, weights)
        return Imported(file, found, {}, None, None, [], found)
    if is_hf_folder(file) or (file.suffix == ".safetensors" and file.is_file()):
        if weights is not None:
            raise CheckpointError(f"{file} has only weights: leave out weights={weights!r}.")
        tensors = read_hf_folder(file) if file.is_dir() else read_safetensors(file)
        return Imported(file, tensors, {}, None, None, [], tensors)
    contents = read_plain(file)
    known = contents if isinstance(contents, Mapping) else {}
    optimizers = _first_entry(known, OPTIMIZER_KEYS, (list, tuple, Mapping))
    hparams = _first_entry(known, HPARAM_KEYS, (Mapping,))
    return Imported(
        file,
        _find_weights(contents, weights, file),
        dict(hparams or {}),
        _first_entry(known, STEP_KEYS, (int,)),
        _first_entry(known, EPOCH_KEYS, (int,)),
        [optimizers] if isinstance(optimizers, Mapping) else list(optimizers or ()),
        contents,
    )


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Return copies of the tensors of a file."""
    try:
        return read_tensors(file)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error


def _read_dcp(folder: Path, key: str | None) -> Mapping[str, Any]:
    """Return the weights of a folder of torch.distributed.checkpoint; leave everything else unread."""
    opened = open_dcp_folder(folder)
    saved: dict[str, Any] = {}
    for entry in opened.entries.values():
        table, names = saved, entry.path[:MOST_LEVELS]
        if all(isinstance(name, str) for name in names):  # not the settings of an optimizer, which is a list
            for name in names[:-1]:
                inner = table.setdefault(name, {})
                table = inner if isinstance(inner, dict) else {}
            if names[-1] in table:
                raise CheckpointError(
                    f"{folder} is damaged: two values in it are called {entry.name[:80]!r}."
                )
            table[names[-1]] = entry
    outline = _map_entries(saved, lambda entry: None if entry.dtype is None else NO_ELEMENTS)
    chosen = _find_weights(outline, key, folder)
    entries = saved if chosen is outline else next(saved[name] for name in outline if outline[name] is chosen)
    return _map_entries(entries, opened.read)


def _map_entries(table: dict[str, Any], convert: Callable[[DcpEntry], Any]) -> dict[str, Any]:
    return {
        name: _map_entries(each, convert) if isinstance(each, dict) else convert(each)
        for name, each in table.items()
    }


def read_plain(file: Path) -> Any:
    """Return the tensors and plain values of a torch.save file."""
    if is_url(file) or re.match(r"\w+:/\w", file.as_posix()):
        # Path has replaced the two slashes by one
        raise CheckpointError(
            f"{redact(file.as_posix().replace(':/', '://', 1))} is a URL: copy the file here first."
        )
    if file.is_dir():
        raise CheckpointError(
            f"{file} is a directory. A Hookline checkpoint does not have to be imported: "
            f"fit(resume={str(file)!r}) continues from it, load_weights(module, {str(file)!r}) takes its "
            "weights."
        )
    if not file.exists():
        raise CheckpointError(missing_checkpoint(file))
    try:
        opened = file.open("rb")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    with opened:
        try:
            return torch.load(opened, map_location="cpu", weights_only=True, mmap=False)
        except Exception as error:  # arbitrary or truncated bytes can raise any exception
            raise CheckpointError(_explain_refusal(file, error)) from error


def _explain_refusal(file: Path, error: Exception) -> str:
    text = str(error)
    wanted = WANTED.search(text)
    if wanted is None:
        why = f"{type(error).__name__}: {_torch_reason(text)}"
        return f"{file} cannot be imported: it is not a torch.save file, or it is incomplete ({why})."
    name = wanted[1].rstrip(".")
    refused = (
        f"{file} was not imported, and no code from it was run: it requests {name}, and only tensors and "
        "plain values are read."
    )
    if wanted[2] or "." not in name:  # such as posix.system, or a built-in function such as eval
        return f"{refused} Weights do not need it: do not trust this file."
    return (
        f"{refused} Save only the weights instead (torch.save(model.state_dict(), ...)). If you know this "
        f"class and trust the file: `with torch.serialization.safe_globals([{name.rpartition('.')[2]}]): "
        "import_checkpoint(...)`."
    )


def _torch_reason(text: str) -> str:
    """Return torch's reason without its advice, which includes reading the file without restrictions."""
    found = text.partition("WeightsUnpickler error:")[2] or text
    return found.strip().partition("\n")[0] or "no reason given"


def _find_weights(contents: Any, key: str | None, file: Path) -> Mapping[str, Any]:
    if not isinstance(contents, Mapping):
        raise CheckpointError(f"{file} contains a {type(contents).__name__}, not a table of named weights.")
    keys = [str(each) for each in contents]
    there = f"It has: {', '.join(keys[:20]) or 'nothing'}{', ...' if len(keys) > 20 else ''}."
    if key is not None:
        if key not in contents:
            raise CheckpointError(f"{file} has no {key!r}.{closest(key, keys)} {there}")
        if not _are_weights(contents[key]):
            raise CheckpointError(f"{key!r} in {file} is not a table of named tensors. {there}")
        return contents[key]  # type: ignore[no-any-return]
    for name in WEIGHT_KEYS:
        if _are_weights(contents.get(name)):
            return contents[name]  # type: ignore[no-any-return]
    others = [name for name, value in contents.items() if not isinstance(value, Tensor)]
    if _are_weights(contents) and all(name.endswith("_extra_state") for name in others):
        return contents
    raise CheckpointError(
        f"{file} has no weights under {', '.join(WEIGHT_KEYS)}. {there} Pass the key of the weights: "
        "import_checkpoint(path, weights=KEY)."
    )


def _are_weights(found: Any) -> bool:
    return (
        isinstance(found, Mapping)
        and all(isinstance(name, str) for name in found)
        and any(isinstance(value, Tensor) for value in found.values())
    )


def _first_entry(contents: Mapping[Any, Any], keys: tuple[str, ...], kinds: tuple[type, ...]) -> Any:
    return next((contents[key] for key in keys if isinstance(contents.get(key), kinds)), None)
