"""Separate random streams for a reader, exchanged with the main ones of Python, NumPy and torch around each
fetch.

The public state of a stream is slow to read and write: 27 µs for Python's, 95 µs for NumPy's, 4 µs for
torch's. So each stream is exchanged through its memory, if a check confirms the assumed layout. A stream that
fails its check is exchanged through its public state; the other two are not affected.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

numpy_random: Any = np.random  # its stubs know neither get_bit_generator nor set_bit_generator
MT_WORDS = 624
"""The words of a Mersenne Twister, the generator of all three streams."""
MT_BYTES = 4 * (MT_WORDS + 1)
"""The size of the words and the position in them."""
TORCH_WORDS = 20
"""The offset of the words in torch's generator: after its seed, the number of words left, a flag and the
position.
"""
TORCH_BYTES = 2544
"""The size of torch's generator: seed, counts and words (2520), and the second of a pair of normal numbers,
as float and as double.
"""
TORCH_HEAD = 256
"""Bytes of torch's object in which the seed is searched."""
Memory = memoryview


class Stream(Protocol):
    """One separate random stream of a reader."""

    def enter(self) -> None:
        """Save the main stream and replace it by this one."""

    def leave(self) -> None:
        """Save this stream and restore the main one."""


class OwnStream:
    """The random streams of one reader. Inside a block, they replace the main ones."""

    __slots__ = ("_enter", "_leave")

    def __init__(self, key: int) -> None:
        words, gauss, engine = python_words(), numpy_gauss(), torch_engine()
        streams: tuple[Stream, Stream, Stream] = (
            PublicState(random.Random(key).getstate(), random.getstate, random.setstate)
            if words is None
            else PythonWords(key, words),
            NumpyState(key) if gauss is None else NumpyGauss(key, gauss),
            PublicState(
                torch.Generator().manual_seed(key).get_state(),
                torch.default_generator.get_state,
                torch.default_generator.set_state,
            )
            if engine is None
            else TorchEngine(key, engine),
        )
        self._enter = tuple(each.enter for each in streams)
        self._leave = tuple(each.leave for each in streams)

    def __enter__(self) -> None:
        python, numpy, torch_ = self._enter
        python()
        numpy()
        torch_()

    def __exit__(self, *error: object) -> None:
        python, numpy, torch_ = self._leave
        python()
        numpy()
        torch_()


class PublicState:
    """A stream of Python or torch, exchanged by its public state."""

    def __init__(self, own: Any, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self._other, self._read, self._write = own, read, write

    def enter(self) -> None:
        """Exchange the two."""
        before = self._read()
        self._write(self._other)
        self._other = before

    leave = enter


# ---- Python ------------------------------------------------------------------------------------------------


def main_random() -> random.Random:
    """Return the object behind the functions of the module `random`."""
    main: random.Random = random.getstate.__self__  # type: ignore[attr-defined]
    return main


class PythonWords:
    """Python's stream, exchanged as the words of the generator."""

    def __init__(self, key: int, live: Memory) -> None:
        self._main, self._live, own = main_random(), live, random.Random(key)
        self._own_words, self._main_words = (
            memoryview(bytearray(_words_of(own))),
            memoryview(bytearray(MT_BYTES)),
        )
        self._own_gauss: Any = None
        self._main_gauss: Any = None

    def enter(self) -> None:
        """Exchange the words, and the second of a pair of normal numbers, which is an attribute."""
        main: Any = self._main
        self._main_words[:] = self._live
        self._live[:] = self._own_words
        self._main_gauss, main.gauss_next = main.gauss_next, self._own_gauss

    def leave(self) -> None:
        """Exchange them back."""
        main: Any = self._main
        self._own_words[:] = self._live
        self._live[:] = self._main_words
        self._own_gauss, main.gauss_next = main.gauss_next, self._main_gauss


def python_words() -> Memory | None:
    """Return the memory of Python's main stream; None if it is not laid out as assumed."""
    return _checked_words(main_random())


@functools.cache
def _checked_words(main: random.Random) -> Memory | None:
    has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    if sys.implementation.name != "cpython" or not has_gil() or type(main) is not random.Random:
        return None
    moved = random.Random(1)
    moved.random()
    if object.__basicsize__ + MT_BYTES > random.Random.__basicsize__ or any(
        not _has_words(each) for each in (moved, main)
    ):
        return None
    return _words_of(main)


def _has_words(generator: random.Random) -> bool:
    *words, position = generator.getstate()[1]
    return _words_of(generator).tobytes() == struct.pack(f"i{MT_WORDS}I", position, *words)


def _words_of(generator: random.Random) -> Memory:
    """Return the position and the words, which are the first fields of CPython's object."""
    return _memory_at(id(generator) + object.__basicsize__, MT_BYTES)


# ---- NumPy -------------------------------------------------------------------------------------------------


class NumpyGauss:
    """NumPy's stream, exchanged by its bit generator.

    That clears the second of a pair of normal numbers, so the main stream's is saved from the memory of
    NumPy's object.
    """

    def __init__(self, key: int, live: Memory) -> None:
        self._other: Any = np.random.MT19937(key)
        self._live, self._gauss = live, memoryview(bytearray(len(live)))

    def enter(self) -> None:
        """Save the normal number and exchange the generators."""
        before = numpy_random.get_bit_generator()
        self._gauss[:] = self._live
        numpy_random.set_bit_generator(self._other)
        self._other = before

    def leave(self) -> None:
        """Exchange the generators and restore the normal number."""
        before = numpy_random.get_bit_generator()
        numpy_random.set_bit_generator(self._other)
        self._live[:] = self._gauss
        self._other = before


class NumpyState:
    """NumPy's stream, exchanged by its bit generator, and for a stored normal number by its public state.

    A main stream without such a number has none until it advances, so that the state is rarely read.
    """

    def __init__(self, key: int) -> None:
        self._other: Any = np.random.MT19937(key)
        self._words = b""
        self._half_drawn: Any = None

    def enter(self) -> None:
        """Save the state if it has a normal number, and exchange the generators."""
        generator: Any = numpy_random.get_bit_generator()
        words = (
            ctypes.string_at(generator.ctypes.state_address, MT_BYTES)
            if type(generator) is np.random.MT19937
            else b""
        )
        self._half_drawn = None
        if not words or words != self._words:
            state: Any = np.random.get_state(legacy=False)
            self._words = b"" if state["has_gauss"] else words
            self._half_drawn = state if state["has_gauss"] else None
        numpy_random.set_bit_generator(self._other)
        self._other = generator

    def leave(self) -> None:
        """Exchange the generators and restore the normal number."""
        before = numpy_random.get_bit_generator()
        numpy_random.set_bit_generator(self._other)
        self._other = before
        if self._half_drawn is not None:
            np.random.set_state(self._half_drawn)


def numpy_gauss() -> Memory | None:
    """Return the memory of the stored normal number in NumPy's main stream; None if it is not found."""
    return _checked_gauss(numpy_random.mtrand._rand)


@functools.cache
def _checked_gauss(main: np.random.RandomState) -> Memory | None:
    if sys.implementation.name != "cpython" or type(main) is not np.random.RandomState:
        return None
    offset = _gauss_offset()
    if offset is None:
        return None
    memory, state = _memory_at(id(main) + offset, 16), _gauss_of(main)
    return memory if struct.unpack("i4xd", memory) == state else None


def _gauss_offset() -> int | None:
    """Find the flag and the number by values set through the public state, and check that writing works."""
    scratch = np.random.RandomState(0)
    size = np.random.RandomState.__basicsize__
    state: Any = scratch.get_state(legacy=False)
    offsets = set()
    for value in (1.2345678e-77, -8.7654321e88):
        scratch.set_state({**state, "has_gauss": 1, "gauss": value})
        offsets.add(_memory_at(id(scratch), size).tobytes().find(struct.pack("i4xd", 1, value)))
    offset = offsets.pop()
    if offsets or offset < 0:
        return None
    memory = _memory_at(id(scratch) + offset, 16)
    scratch.set_state({**state, "has_gauss": 0, "gauss": 0.0})
    is_cleared = struct.unpack("i4xd", memory) == (0, 0.0)
    memory[:] = struct.pack("i4xd", 1, 0.25)
    return offset if is_cleared and _gauss_of(scratch) == (1, 0.25) else None


def _gauss_of(generator: np.random.RandomState) -> tuple[int, float]:
    state: Any = generator.get_state(legacy=False)
    return state["has_gauss"], state["gauss"]


# ---- torch -------------------------------------------------------------------------------------------------


class TorchEngine:
    """Torch's stream, exchanged by its public state, which is read only if the memory has changed.

    Its memory is not written: other threads may draw from the stream without the GIL, and writing the public
    state takes torch's own lock.
    """

    def __init__(self, key: int, live: Memory) -> None:
        self._live = live
        self._own, self._own_seen = torch.Generator().manual_seed(key).get_state(), b""
        self._main, self._main_seen = self._own, b""

    def enter(self) -> None:
        """Read the main stream's state if it has advanced since the last block."""
        seen = self._live.tobytes()
        if seen != self._main_seen:
            self._main, self._main_seen = torch.default_generator.get_state(), seen
        torch.default_generator.set_state(self._own)

    def leave(self) -> None:
        """Read this stream's state if it has advanced since the last block."""
        seen = self._live.tobytes()
        if seen != self._own_seen:
            self._own, self._own_seen = torch.default_generator.get_state(), seen
        torch.default_generator.set_state(self._main)


def torch_engine() -> Memory | None:
    """Return the memory of torch's main stream on the CPU; None if it is not laid out as assumed."""
    return _checked_engine(torch.default_generator)


@functools.cache
def _checked_engine(main: Any) -> Memory | None:
    offset = (
        _engine_offset() if sys.implementation.name == "cpython" and type(main) is torch.Generator else None
    )
    if offset is None:
        return None
    address: int = getattr(main, "_cdata")  # noqa: B009  # its stubs do not know it
    memory = _memory_at(address + offset, TORCH_BYTES)
    return memory if _is_engine(memory, main) else None


def _engine_offset() -> int | None:
    """Find the seed of a generator in its memory, and check that the memory shows all of the public state."""
    seed = 0x123456789ABCDEF
    scratch = torch.Generator().manual_seed(seed)
    address: int | None = getattr(scratch, "_cdata", None)
    if address is None:
        return None
    offset = _memory_at(address, TORCH_HEAD).tobytes().find(struct.pack("Q", seed))
    if offset < 0:
        return None
    memory = _memory_at(address + offset, TORCH_BYTES)
    is_known, before = _is_engine(memory, scratch), memory.tobytes()
    # the first normal draw stores the second number of the pair, which the second draw uses
    for change in (_draw_uniform, _draw_normal, _draw_normal, _set_float):
        change(scratch)
        is_known = is_known and _is_engine(memory, scratch) and memory.tobytes() != before
        before = memory.tobytes()
    return offset if is_known else None


def _draw_uniform(generator: torch.Generator) -> None:
    torch.rand(3, generator=generator, device="cpu")


def _draw_normal(generator: torch.Generator) -> None:
    torch.randn((), generator=generator, dtype=torch.float64, device="cpu")


def _set_float(generator: torch.Generator) -> None:
    """Set the stored normal float: the last 8 bytes of the public state, a number and a flag."""
    state = generator.get_state()
    state[-8:] = torch.frombuffer(bytearray(struct.pack("f?3x", 0.25, True)), dtype=torch.uint8)
    generator.set_state(state)


def _is_engine(memory: Memory, generator: torch.Generator) -> bool:
    """Compare with the public state: seed, words left, flag, position, and words of 8 bytes."""
    public = generator.get_state().numpy().tobytes()
    seed, left, seeded, position, *words = struct.unpack_from(f"QiiQ{MT_WORDS}Q", public)
    head = (seed, left, bool(seeded), position)
    return (
        struct.unpack_from("Qi?3xI", memory) == head
        and list(struct.unpack_from(f"{MT_WORDS}I", memory, TORCH_WORDS)) == words
    )


def _memory_at(address: int, size: int) -> Memory:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
