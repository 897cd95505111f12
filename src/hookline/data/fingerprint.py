"""Small fingerprints of batches and loader states, to check whether two are the same."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEAVES, NUMBERS, TEXT = 256, 4096, 4096
"""Limits: values of a batch, evenly spaced elements of each, and characters."""
SUMMED_SECTIONS = 4
"""Parts of a floating-point array that are summed separately."""
TOLERANCE = 1e-4
"""Relative. Another processor may round the values of the same decoded image differently."""
MAX_STATE_BYTES = 1_000_000
"""Larger states are not compared."""

Fingerprint = dict[str, Any]


def fingerprint(batch: Any) -> Fingerprint:
    """Return hashes of a batch's structure, integers and text, and sums of its floating-point numbers.

    Tensors on an accelerator count only by shape and dtype, because reading them would wait for the device.
    """
    structure, exact, floats, has_exact = (
        hashlib.blake2b(digest_size=8),
        hashlib.blake2b(digest_size=8),
        list[float](),
        False,
    )
    for path, leaf in itertools.islice(_leaves(batch, ""), LEAVES):
        structure.update(f"{path} {_leaf_type(leaf)};".encode())
        if isinstance(leaf, str | bytes):
            content = leaf[:TEXT].encode(errors="replace") if isinstance(leaf, str) else leaf[:TEXT]
        else:
            numbers = _leaf_numbers(leaf)
            if numbers is None:
                continue
            if numbers.dtype.kind in "fc":
                floats += _sums(numbers)
                continue
            content = numbers.tobytes()
        exact.update(content + b";")
        has_exact = True
    return {
        "structure": structure.hexdigest(),
        "exact": exact.hexdigest() if has_exact else "",
        "floats": floats,
    }


def difference(was: Fingerprint, now: Fingerprint) -> str:
    """Return a description of the difference between two batches; an empty string if they are the same."""
    if was["structure"] != now["structure"]:
        return "its structure, shapes or types differ"
    if was["exact"] != now["exact"]:
        return "its integers or text differ"
    pairs = list(zip(was["floats"], now["floats"], strict=False))
    # sums come as (weighted sums, mean size): all are compared relative to the size
    for first in range(0, len(pairs), SUMMED_SECTIONS + 1):
        group = pairs[first : first + SUMMED_SECTIONS + 1]
        size = max(map(abs, group[-1]))
        if any(abs(a - b) > TOLERANCE * size for a, b in group):
            same = "its integers and text are the same, but " if was["exact"] else ""
            return f"{same}its floating-point numbers differ"
    return ""


def digest(state: Any) -> str | None:
    """Return a hash of a state; None if it is too large or contains an object that cannot be hashed."""
    found = hashlib.blake2b(digest_size=8)
    size = 0
    for path, leaf in _leaves(state, ""):
        numbers = _leaf_numbers(leaf, whole=True)
        if numbers is not None:
            content = f"{path} {numbers.dtype} {numbers.shape} ".encode() + numbers.tobytes()
        elif leaf is None or isinstance(leaf, str | bytes):
            content = f"{path} {leaf!r}".encode(errors="replace")
        else:
            return None
        size += len(content)
        if size > MAX_STATE_BYTES:
            return None
        found.update(content + b";")
    return found.hexdigest()


def _leaves(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each leaf of a nested structure."""
    if isinstance(value, Mapping):
        parts: Any = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    else:
        parts = None
    if parts is None or depth > 20:
        yield path, value
        return
    for key, part in parts:
        yield from _leaves(part, f"{path}.{key}", depth + 1)


def _leaf_type(leaf: Any) -> str:
    shape = getattr(leaf, "shape", "")
    return (
        f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')} "
        f"{tuple(shape) if isinstance(shape, tuple) else ''}"
    )


def _leaf_numbers(leaf: Any, whole: bool = False) -> np.ndarray[Any, Any] | None:
    """Return `NUMBERS` numbers of a leaf, or all with `whole`; None if it has none that can be read here."""
    if isinstance(leaf, bool | int | float | complex):
        leaf = (
            np.asarray(leaf)
            if not isinstance(leaf, int) or abs(leaf) < 2**63
            else np.frombuffer(str(leaf).encode(), np.uint8)
        )
    if isinstance(leaf, Tensor):
        if (
            leaf.device.type != "cpu"
            or leaf.layout is not torch.strided
            or leaf.is_quantized
            or leaf.is_nested
        ):
            return None
        try:
            flat = leaf.detach().as_subclass(Tensor).reshape(-1)
            flat = flat if whole else flat[:: max(1, flat.numel() // NUMBERS)]
            flat = flat.resolve_conj().resolve_neg()
            return (
                flat.to(torch.float32) if flat.dtype.is_floating_point and flat.dtype.itemsize < 4 else flat
            ).numpy()
        except (RuntimeError, TypeError, NotImplementedError):  # a subclass without readable values
            return None
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.asarray(leaf).reshape(-1)
        if array.dtype.kind not in "biufcmMSU":
            return None
        return array if whole else array[:: max(1, array.size // NUMBERS)]
    return None


def _sums(numbers: np.ndarray[Any, Any]) -> list[float]:
    """Return weighted means of sections and the mean magnitude; they depend on the order, not on rounding."""
    parts = (
        numbers.astype(np.complex128).view(np.float64)
        if numbers.dtype.kind == "c"
        else numbers.astype(np.float64)
    )
    parts = np.nan_to_num(parts, nan=0.0, posinf=0.0, neginf=0.0)
    weighted = parts * np.linspace(1.0, 2.0, parts.size)
    size = max(1, parts.size)
    sums = [float(each.sum() / size) for each in np.array_split(weighted, SUMMED_SECTIONS)]
    return [float(f"{each:.9g}") for each in (*sums, float(np.abs(parts).sum() / size))]


# ---- states that do not advance ----------------------------------------------------------------------------


log = logging.getLogger("hookline")


class StateCheck:
    """A check that the state_dict of a training loader or sampler advances as batches are read.

    It compares the states at the start of a pass, after the first batch, and at each save.
    """

    def __init__(self, owner: Any, trains: bool) -> None:
        self.owner = owner
        self.trains = trains
        self.is_stuck = False
        self._is_reported = False
        self._first = 0
        self._passes = 0
        self._at_open: str | None = None
        self._after_first: str | None = None

    def open(self, position: int, stuck: bool = False, loaded: Any = None) -> None:
        """Record the start of a pass. stuck: whether the loaded state is known not to advance.

        A loaded state is not asked for again before the first batch, because that may change it.
        """
        self._first, self._after_first = position, None
        self.is_stuck = self.is_stuck or stuck
        # a later pass may reset its state only when its first batch is read
        self._at_open = None
        if self._passes == 0 and self.trains:
            self._at_open = self._now() if loaded is None else digest(loaded)
        self._passes += 1

    def after_first(self) -> None:
        """Record the state after the first batch of the pass."""
        self._after_first = self._now()

    def check(self, state: Any, position: int) -> bool:
        """Return whether the state of a save at this batch has not advanced. Log it the first time."""
        read = position - self._first
        before = self._after_first if read > 1 else self._at_open
        if read > 0 and before is not None:
            self.is_stuck = digest(state) == before
        if self.is_stuck and not self._is_reported:
            self._is_reported = True
            log.warning(
                "%s.state_dict() does not advance: at batch %d it is the same as at batch %d, so it does not "
                "determine the position. A resume ignores it and reads the epoch again up to the saved "
                "batch. Make state_dict() count the yielded batches.",
                type(self.owner).__name__,
                position,
                self._first + (read > 1),
            )
        return self.is_stuck

    def _now(self) -> str | None:
        try:
            return digest(self.owner.state_dict()) if self.trains else None
        except Exception:  # it may have no state before the first batch; a save raises the error
            return None
