"""Digests of tensors: sensitive to every bit, the same on every device, computed where the tensor is.

The bits of a tensor are read as integers, multiplied by fixed odd numbers and added up modulo 2**64. Sums of
integers do not depend on the order of the additions, so the result is the same for any number of threads or
thread blocks. A single changed bit always changes the sum; several changes cancel with a probability of about
2**-31.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

WIDTH = 2**18
"""Elements that one row of factors covers; a larger tensor has several rows, each with a factor of its own.
"""
MOST_ROWS = 64
"""Rows that are computed at once: the products take 8 bytes for each element."""
MOST_SAMPLES = 64
"""Samples of a batch that have digests of their own."""
SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""By the bytes of an element: the integers that its bits are read as."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that was digested: its name, its type and shape, and where its sums are."""

    name: str
    kind: str
    places: tuple[int, ...]

    def digest(self, sums: list[int]) -> str:
        """Return the digest, once the sums are read."""
        return text_digest(self.kind, *[sums[place] for place in self.places])


def text_digest(*parts: Any) -> str:
    """Return a digest of plain values, the same in every process: 12 hexadecimal digits."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


class Sums:
    """The sums of one step. They stay on their device until `read`, which reads once."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Tensor]] = []
        self._count = 0
        self._single: set[int] = set()
        """The places of numbers that are in 32 bits."""

    def add(self, name: str, tensor: Tensor) -> Entry:
        """Start the digest of a tensor."""
        try:
            sums = [weighted_sum(each) for each in dense_parts(tensor)]
            return Entry(name, describe(tensor), tuple(map(self._keep, sums)))
        except (RuntimeError, TypeError, NotImplementedError):
            # a class of another package without these operators: its digest says so, and the run continues
            return Entry(name, f"{type(tensor).__name__} that cannot be read", ())

    def add_all(self, named: Iterable[tuple[str, Tensor | None]]) -> list[Entry]:
        """Start the digests of several tensors; None has one, too."""
        return [
            Entry(name, "None", ()) if tensor is None else self.add(name, tensor) for name, tensor in named
        ]

    def add_samples(self, tensor: Tensor) -> tuple[int, ...]:
        """Start a digest of every sample: of each row of a tensor. Return the places of the sums."""
        bits = _bits(tensor.detach()).reshape(len(tensor), -1)
        sums = (bits * factors(tensor.device)[: bits.shape[1]]).sum(1)
        first, self._count = self._count, self._count + len(tensor)
        self._waiting.append((first, sums))
        return tuple(range(first, self._count))

    def add_number(self, tensor: Tensor) -> int:
        """Take a single number, to be read as it is: `read` returns its bits in 64."""
        if tensor.device.type != "mps":
            return self._keep(tensor.detach().to(torch.float64).reshape(()).view(torch.int64))
        bits = tensor.detach().to(torch.float32).reshape(()).view(torch.int32)  # it has no numbers of 64 bits
        self._single.add(self._count)
        return self._keep(bits.to(torch.int64))

    def _keep(self, value: Tensor) -> int:
        self._waiting.append((self._count, value.reshape(1)))
        self._count += 1
        return self._count - 1

    def read(self) -> list[int]:
        """Return all sums. Each device is read once; the host's own tensors are not read from a device."""
        found = [0] * self._count
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for place, value in self._waiting:
            by_device.setdefault(value.device, []).append((place, value))
        for group in by_device.values():
            if group[0][1].device.type == "meta":
                continue  # no values
            numbers = iter(torch.cat([value for _, value in group]).tolist())
            for place, value in group:
                for offset in range(len(value)):
                    found[place + offset] = next(numbers)
        self._waiting.clear()
        for place in self._single:
            found[place] = int(np.float64(np.int32(found[place]).view(np.float32)).view(np.int64))
        return found


def as_number(text: str) -> float:
    """Return the number whose bits a digest has as text."""
    return float(np.uint64(int(text, 16)).view(np.float64))


# ---- one tensor --------------------------------------------------------------------------------------------


def describe(tensor: Tensor) -> str:
    """Return type, shape and layout of a tensor."""
    shape: Any = ""
    if tensor.is_nested:  # ragged sizes are among its parts; their symbols are numbered anew in each process
        shape = f"nested {tensor.dim()}"
    elif not is_lazy(tensor):
        shape = tuple(tensor.shape)
    return f"{tensor.dtype} {shape} {tensor.layout}"


def dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor consists of: its local shard, or the parts of a sparse one."""
    if is_lazy(tensor):
        return
    wait: Any = getattr(tensor, "wait", None)
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if wait is not None:  # the result of a collective that is under way
        yield from dense_parts(wait())
    elif tensor.layout is torch.jagged:  # without the lengths that it may have computed meanwhile
        nested: Any = tensor
        yield from (each for each in (nested._values, nested._offsets, nested._lengths) if each is not None)
    elif flatten is not None:  # a DTensor, or a class of another package
        for part in (getattr(tensor, name) for name in flatten()[0]):  # a DTensor also has its mesh there
            yield from dense_parts(part) if isinstance(part, Tensor) else ()
    elif tensor.is_nested:
        for part in tensor.unbind():
            yield from (torch.tensor(part.shape), *dense_parts(part))
    elif tensor.is_quantized:
        yield tensor.int_repr()
    elif tensor.layout is torch.strided:
        yield tensor.detach().as_subclass(Tensor)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor.to_dense()


def weighted_sum(tensor: Tensor) -> Tensor:
    """Return the sum over the bits of a plain tensor, as one number on its device."""
    bits = _bits(tensor)
    count, factor = bits.numel(), factors(tensor.device)
    if count <= WIDTH:
        return _dot(bits, factor[:count])
    whole = count // WIDTH
    rows = [
        (bits[start * WIDTH : min(whole, start + MOST_ROWS) * WIDTH].view(-1, WIDTH) * factor).sum(1)
        for start in range(0, whole, MOST_ROWS)
    ]
    if count % WIDTH:
        rows.append(_dot(bits[whole * WIDTH :], factor[: count % WIDTH]).reshape(1))
    sums = torch.cat(rows)
    return _dot(sums, factor.flip(0)[torch.arange(len(sums), device=sums.device) % WIDTH])


def _dot(bits: Tensor, factor: Tensor) -> Tensor:
    if bits.device.type == "cpu":  # half the time; other devices have no product of integer vectors
        return torch.dot(bits.to(torch.int64), factor)
    return (bits * factor).sum()


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a plain tensor as a vector of integers; a view, if its elements are in order."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().reshape(-1)
    flat = flat if flat.is_contiguous() else flat.contiguous()
    return flat.view(SIGNED[flat.element_size()])


@functools.cache
def factors(device: torch.device) -> Tensor:
    """Return the odd numbers that elements are multiplied by. No random stream is used."""
    with np.errstate(over="ignore"):
        mixed = (np.arange(1, WIDTH + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(multiplier)
        mixed = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(mixed.view(np.int64)).to(device)
