"""Lightning's `.ckpt`: one file with Lightning's entries, and with one entry that Hookline resumes from.

The file holds tensors and plain values only, so `torch.load(path, weights_only=True)` reads it. The entry
`hookline` has everything that Lightning's entries lack: the position in the data, random streams, the open
accumulation window. Tensors are stored once.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import enum
import io
import logging
import os
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookline.checkpoint.cleanup import remove_abandoned_files
from hookline.checkpoint.foreign_files import read_plain
from hookline.checkpoint.format import Packed, Stored, pack_contents, unpack, unpack_contents
from hookline.checkpoint.rank_state import PerRankState, RankFiles, buffers_of
from hookline.checkpoint.writer import flush, owner, protect_from_cleanup
from hookline.data.seeding import rng_state
from hookline.interop.lightning.package import find
from hookline.metrics.metric_log import MetricLog
from hookline.run.parts import Progress
from hookline.run.state_parts import Counts
from hookline.util.errors import CheckpointError
from hookline.util.urls import as_url, open_url

log = logging.getLogger("hookline")
ENTRY = "hookline"
"""The entry of the file that Hookline resumes from."""
LIGHTNING = "lightning_file"
"""The part of a checkpoint's contents that has Lightning's entries, as hooks see and edit them."""
SHARED = {"state_dict": "module", "optimizer_states": "optimizers", "lr_schedulers": "schedulers"}
"""Lightning's entries that are parts of Hookline's contents."""
WRAPPED = "state_key"
"""The key in the state of an adopted callback under which Lightning stores it."""
EXACT = (bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, type(None))
CONTAINERS = (list, tuple, set, dict, OrderedDict, Counter)
VERSION = "2.6.0"
"""The version of Lightning's format, in files of a program that has not imported Lightning."""


# ---- plain values ------------------------------------------------------------------------------------------


class Omitted:
    """Stands for a value that a file without pickled objects cannot hold."""


def plain(value: Any, where: str, lost: dict[str, str]) -> Any:
    """Return a value as tensors and plain values; the same object if it is plain already.

    lost: gets the type of each value that is left out, by its place in the file.
    """
    kind: Any = type(value)
    if kind in EXACT or kind in (Tensor, nn.Parameter):
        return value
    if isinstance(value, Mapping | argparse.Namespace):
        return _plain_table(value, kind, where, lost)
    if isinstance(value, list | tuple | set | frozenset):
        items = [plain(each, f"{where}[{index}]", lost) for index, each in enumerate(value)]
        if kind in CONTAINERS and all(new is old for new, old in zip(items, value, strict=True)):
            return value
        known = [each for each in items if not isinstance(each, Omitted)]
        return next(each for each in (list, tuple, set) if isinstance(value, each) or each is set)(known)
    if isinstance(value, enum.Enum):
        return plain(value.value, where, lost)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value.item()
    if isinstance(value, Tensor):
        return value.detach().as_subclass(Tensor)
    for base in (bool, int, float, str):
        if isinstance(value, base):
            return base(value)
    lost[where] = f"{kind.__module__}.{kind.__qualname__}"
    return Omitted()


def _plain_table(value: Any, kind: Any, where: str, lost: dict[str, str]) -> Any:
    table: Mapping[Any, Any] = vars(value) if isinstance(value, argparse.Namespace) else value
    pairs = {key: plain(each, f"{where}.{key}", lost) for key, each in table.items()}
    are_names = all(type(key) in (str, int, bool, float, tuple) for key in pairs)
    if kind in CONTAINERS and are_names and all(new is table[key] for key, new in pairs.items()):
        return value
    return {
        key if type(key) in (str, int, bool, float, tuple) else str(key): each
        for key, each in pairs.items()
        if not isinstance(each, Omitted)
    }


# ---- writing -----------------------------------------------------------------------------------------------


_reported: set[str] = set()
"""Places of values that were left out, so that each is reported once."""


def plain_file(entries: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a file without pickled objects; warn once of what is left out."""
    lost: dict[str, str] = {}
    made: dict[str, Any] = {}
    for key, value in entries.items():
        converted = plain(value, str(key), lost)
        if not isinstance(converted, Omitted):
            made[str(key)] = converted
    if new := {where: kind for where, kind in lost.items() if where not in _reported}:
        _reported.update(new)
        names = ", ".join(f"{where} (a {kind})" for where, kind in new.items())
        warnings.warn(
            f"Checkpoints contain no pickled objects, so these values are left out: {names}. Pass "
            "hyper-parameters that are objects to load_from_checkpoint.",
            stacklevel=2,
        )
    return made


def file_of(contents: dict[str, Any], run: Any) -> dict[str, Any]:
    """Return the whole file: Lightning's entries, and in one entry the contents that they lack.

    All ranks call it, if there are several; the file contains the state of each.
    """
    entries = contents.pop(LIGHTNING)
    file = plain_file(entries)
    rest = {name: value for name, value in contents.items() if name not in SHARED.values()}
    rest["hooks"], keys = _own_hooks(rest["hooks"], entries.get("callbacks", {}), file.get("callbacks", {}))
    ranks = run.strategy.ranks
    parts = []
    if ranks.alone:
        packed = pack_contents(rest)
    else:
        state = PerRankState(rest, buffers_of(run.module, contents["module"]))
        packed = state.for_rank(ranks.rank, ranks.from_zero(state.sums if ranks.rank == 0 else None))
        parts = [_unpacked(text) for text in ranks.gather(_as_text(packed) if ranks.rank else "")]
    file[ENTRY] = {
        "format": 1,
        "structure": packed.structure,
        "tensors": dict(packed.rest),
        "callbacks": keys,
        "ranks": parts,
    }
    return file


def _own_hooks(
    hooks: dict[str, Any], states: dict[str, Any], written: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of hooks that the entry `callbacks` does not have, and the keys of the others."""
    own, keys = {}, {}
    for name, state in hooks.items():
        key, inner = _key_of(name, state, states)
        if key in states and states[key] is inner and written.get(key) is inner:
            keys[name] = [key, inner is not state]
            continue
        try:
            pack_contents({"hooks": {name: state}})
        except CheckpointError as error:
            if name not in _reported:
                _reported.add(name)
                log.warning("A resumed run starts without the state of %s: %s", name, error)
        else:
            own[name] = state
    return own, keys


def _key_of(name: str, state: Any, states: dict[str, Any]) -> tuple[Any, Any]:
    if isinstance(state, dict) and state.keys() == {WRAPPED, "state"}:
        return state[WRAPPED], state["state"]
    return next((key for key, each in states.items() if each is state), None), state


def _as_text(packed: Packed) -> str:
    """Return a rank's own state as text, because ranks exchange JSON."""
    buffer = io.BytesIO()
    torch.save({"structure": packed.part.structure["own"], "tensors": dict(packed.part.tensors)}, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _unpacked(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True) if text else None


def write_file(file: dict[str, Any], path: Path | str) -> None:
    """Write a file atomically: into a hidden one beside it, which is flushed and then renamed."""
    try:
        if url := as_url(path):
            _write_url(file, url)
            return
        target = Path(os.path.abspath(path))
        if target.is_dir() and not target.is_symlink():
            raise IsADirectoryError(0, "a directory of that name exists")
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned_files(target.parent)
        temporary = target.with_name(f".{target.name}.{owner()}.new")
        with protect_from_cleanup(temporary):
            try:
                with temporary.open("wb") as opened:
                    torch.save(file, opened)
                    opened.flush()
                    os.fsync(opened.fileno())
                os.replace(temporary, target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        flush(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {error.strerror or error}"
        ) from error


def _write_url(file: dict[str, Any], url: str) -> None:
    system, path = open_url(url)
    system.makedirs(path.rpartition("/")[0], exist_ok=True)
    buffer = io.BytesIO()
    torch.save(file, buffer)
    with system.open(path, "wb") as opened:  # object stores show an object when it is complete
        opened.write(buffer.getvalue())


# ---- reading -----------------------------------------------------------------------------------------------


class LoadedEntries(dict[str, Any]):
    """Lightning's entries of a file that is being restored. What a hook replaces is restored instead."""

    def __init__(self, entries: Mapping[str, Any], contents: dict[str, Any]) -> None:
        super().__init__(entries)
        self._contents = contents

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key in SHARED:
            self._contents[SHARED[key]] = value

    update = MutableMapping.update  # calls `__setitem__`, which that of `dict` does not


class RanksInFile(RankFiles):
    """The states of the ranks that wrote the file."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def own(self, rank: int, find: Any) -> dict[str, Any]:
        """Return the saved state of a rank that differs from rank zero's."""
        part = self.parts[rank] if rank < len(self.parts) else None
        if part is None:
            return {}
        tensors = Stored(part["tensors"], find)
        return {name: unpack(structure, tensors) for name, structure in part["structure"].items()}


def read_file(path: Path | str, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Return the contents of a Lightning file, as a run restores them on one rank."""
    try:
        with _local(path) as file:
            found = read_plain(file)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} A checkpoint of Hookline is a directory; a file can only be one of Lightning's."
        ) from error
    return contents_of_file(found, path, rank, world_size)


def contents_of_file(found: Any, path: Path | str, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Return the contents of a Lightning file that was read, as a run restores them on one rank."""
    if not isinstance(found, dict) or not isinstance(found.get("state_dict"), Mapping):
        raise CheckpointError(
            f"{path} is not a checkpoint of Lightning: it has no state_dict. To load weights from a file of "
            f"another tool: load_weights(module, hookline.import_checkpoint({str(path)!r}))."
        )
    own = found.pop(ENTRY, None)
    try:
        contents = _foreign_contents(found, path) if own is None else _own_contents(found, own)
        if own is not None:
            RanksInFile(own["ranks"]).adapt(contents, rank, range(world_size), _refuse_shards)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"The checkpoint {path} cannot be read: {type(error).__name__}: {error}"
        ) from error
    contents[LIGHTNING] = LoadedEntries(found, contents)
    return contents


def _refuse_shards(entry: dict[str, Any]) -> Any:
    raise CheckpointError("it refers to sharded tensors, which one file cannot hold.")


@contextlib.contextmanager
def _local(path: Path | str) -> Iterator[Path]:
    """Yield the path of a file; one behind a URL is copied first."""
    url = as_url(path)
    if not url:
        yield Path(path)
        return
    import tempfile

    from hookline.checkpoint.remote import open_remote

    with open_remote(url, "cannot be read") as (system, remote), tempfile.TemporaryDirectory() as folder:
        system.get_file(remote, f"{folder}/checkpoint.ckpt")
        yield Path(folder, "checkpoint.ckpt")


def _own_contents(found: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    if own["format"] != 1:
        raise CheckpointError(f"a newer version of Hookline has written it (format {own['format']!r}).")
    contents = unpack_contents(own["structure"], {}, Stored(own["tensors"], _refuse_shards))
    contents |= {name: found[key] for key, name in SHARED.items() if key in found}
    for name, (key, is_wrapped) in own["callbacks"].items():
        state = found["callbacks"][key]
        contents["hooks"][name] = {WRAPPED: key, "state": state} if is_wrapped else state
    return contents


def _foreign_contents(found: dict[str, Any], path: Path | str) -> dict[str, Any]:
    """Return the contents of a file that Lightning wrote: what it lacks begins anew."""
    migrate = find("utilities.migration.utils", "_pl_migrate_checkpoint")
    if migrate is not None and "loops" not in found and "pytorch-lightning_version" in found:
        migrate(found, checkpoint_path=str(path))
    name, hparams = found.get("hparams_name"), dict(found.get("hyper_parameters") or {})
    has_training = "optimizer_states" in found
    return {
        "run": "",
        "world_size": 1,
        "module": found["state_dict"],
        "hparams": hparams if name in (None, "kwargs") else {name: hparams},
        "hooks": {
            key: {WRAPPED: key, "state": state} for key, state in (found.get("callbacks") or {}).items()
        },
        "datamodule": {},
        "optimizers": list(found.get("optimizer_states") or []),
        "schedulers": list(found.get("lr_schedulers") or []),
        "kinds": None if has_training else [],
        "settings": None,
        "precision": found.get("MixedPrecision") or {},
        **_progress_of(found),
        "log": MetricLog().state_dict(),
        "filters": {},
        "metrics": {},
        "loggers": {},
        "rng": rng_state(),
        "loader": None,
        "feeding": {},
    }


def _progress_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the counters, the position and whether an accumulation window may be open, from the progress of
    Lightning's loops.
    """
    loops = (found.get("loops") or {}).get("fit_loop") or {}
    epochs = (loops.get("epoch_progress") or {}).get("current") or {}
    batches = loops.get("epoch_loop.batch_progress") or {}
    validation = loops.get("epoch_loop.val_loop.batch_progress") or {}
    seen, current = batches.get("total") or {}, batches.get("current") or {}
    epoch = max(epochs.get("completed", found.get("epoch", 0)), epochs.get("processed", 0))
    is_inside = epochs.get("ready", epoch) > epoch
    seen_batches = seen.get("processed", seen.get("completed", int(found.get("global_step", 0))))
    of_validation = validation.get("current") or {}
    is_over = batches.get("is_last_batch") and current.get("completed") == current.get("processed")
    is_validated = is_inside and is_over and of_validation.get("ready", 0) > 0
    progress = Progress(
        position=current.get("processed", current.get("completed", 0)) if is_inside else 0,
        validated_at=(epoch, seen_batches) if is_validated else (-1, -1),
    )
    return {
        "counters": Counts(
            epoch=epoch if is_inside else max(0, epoch - 1),
            epochs_seen=epoch,
            step=int(found.get("global_step", 0)),
            batches_seen=seen_batches,
        ).state_dict(),
        "position": progress.state_dict(),
        "window": {"is_lost": True} if progress.position and not batches.get("is_last_batch") else {},
    }
