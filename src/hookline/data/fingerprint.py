"""Fingerprints of batches and of loader states: enough to tell whether two are the same, small enough to
write down.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEAVES, NUMBERS, TEXT = 256, 4096, 4096
"""At most so many values of a batch are looked at, so many elements of each, spread evenly, and so many
characters.
"""
SECTIONS = 4
"""Parts of an array of floating-point numbers that are summed up separately."""
TOLERANCE = 1e-4
"""Relative. Another processor may round a decoded image otherwise, and that is still the same image."""
LARGEST_STATE = 1_000_000
"""Bytes. Larger states are not compared."""

Fingerprint = dict[str, Any]


def fingerprint(batch: Any) -> Fingerprint:
    """Return what identifies a batch: hashes of its structure and of its integers and text, sums of its other
    numbers.

    Nothing is read from an accelerator, because that would wait for the device: such tensors count by shape
    and type alone.
    """
    structure, exact, floats, has_exact = (
        hashlib.blake2b(digest_size=8),
        hashlib.blake2b(digest_size=8),
        list[float](),
        False,
    )
    for path, leaf in itertools.islice(_leaves(batch, ""), LEAVES):
        structure.update(f"{path} {_kind(leaf)};".encode())
        if isinstance(leaf, str | bytes):
            content = leaf[:TEXT].encode(errors="replace") if isinstance(leaf, str) else leaf[:TEXT]
        else:
            numbers = _numbers(leaf)
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
    """Return in words what differs between two batches; an empty string if they are the same."""
    if was["structure"] != now["structure"]:
        return "its structure, shapes or types differ"
    if was["exact"] != now["exact"]:
        return "its integers or text differ"
    pairs = list(zip(was["floats"], now["floats"], strict=False))
    # sums come as (weighted sums, mean size): all are compared relative to the size
    for first in range(0, len(pairs), SECTIONS + 1):
        group = pairs[first : first + SECTIONS + 1]
        size = max(map(abs, group[-1]))
        if any(abs(a - b) > TOLERANCE * size for a, b in group):
            same = "its integers and text are the same, but " if was["exact"] else ""
            return f"{same}its floating-point numbers differ"
    return ""


def digest(state: Any) -> str | None:
    """Return a hash of all of a state; None if it is too large, or holds what has no plain content."""
    found = hashlib.blake2b(digest_size=8)
    size = 0
    for path, leaf in _leaves(state, ""):
        numbers = _numbers(leaf, whole=True)
        if numbers is not None:
            content = f"{path} {numbers.dtype} {numbers.shape} ".encode() + numbers.tobytes()
        elif leaf is None or isinstance(leaf, str | bytes):
            content = f"{path} {leaf!r}".encode(errors="replace")
        else:
            return None
        size += len(content)
        if size > LARGEST_STATE:
            return None
        found.update(content + b";")
    return found.hexdigest()


def _leaves(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield what is in a nested structure, with the way to it."""
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


def _kind(leaf: Any) -> str:
    shape = getattr(leaf, "shape", "")
    return (
        f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')} "
        f"{tuple(shape) if isinstance(shape, tuple) else ''}"
    )


def _numbers(leaf: Any, whole: bool = False) -> np.ndarray[Any, Any] | None:
    """Return the numbers of a leaf, `NUMBERS` of them unless all are asked for; None if it has none that can
    be read here.
    """
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
        except (RuntimeError, TypeError, NotImplementedError):  # a subclass without numbers of its own
            return None
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.asarray(leaf).reshape(-1)
        if array.dtype.kind not in "biufcmMSU":
            return None
        return array if whole else array[:: max(1, array.size // NUMBERS)]
    return None


def _sums(numbers: np.ndarray[Any, Any]) -> list[float]:
    """Return weighted means of sections, and the mean size of a number: what survives other rounding, and not
    another order.
    """
    parts = (
        numbers.astype(np.complex128).view(np.float64)
        if numbers.dtype.kind == "c"
        else numbers.astype(np.float64)
    )
    parts = np.nan_to_num(parts, nan=0.0, posinf=0.0, neginf=0.0)
    weighted = parts * np.linspace(1.0, 2.0, parts.size)
    size = max(1, parts.size)
    sums = [float(each.sum() / size) for each in np.array_split(weighted, SECTIONS)]
    return [float(f"{each:.9g}") for each in (*sums, float(np.abs(parts).sum() / size))]
