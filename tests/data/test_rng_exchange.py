"""Random streams of a reader's own: exchanged by memory or by public state, what is drawn is the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline import seed_everything
from hookline.data import rng_exchange
from hookline.data.rng_exchange import OwnStream
from hookline.data.seeding import isolated_rng, rng_state

CHECKS = ("python_words", "numpy_gauss", "torch_engine")
DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python normal": lambda: random.gauss(0, 1),
    "python seed": lambda: random.seed(5),
    "python many": lambda: random.getrandbits(32 * 700),
    "numpy": np.random.rand,
    "numpy normal": np.random.randn,
    "numpy seed": lambda: np.random.seed(5),
    "numpy many": lambda: np.random.randint(9, size=700).tolist(),
    "torch": lambda: torch.rand(()).item(),
    "torch normal": lambda: torch.randn(()).item(),
    "torch seed": lambda: torch.manual_seed(5).initial_seed(),
    "torch double": lambda: torch.randn((), dtype=torch.float64).item(),
    "torch many": lambda: torch.randperm(700).tolist(),
}
SEEDS = {"python seed", "numpy seed", "torch seed"}
programs = st.lists(
    st.tuples(st.booleans(), st.lists(st.sampled_from(sorted(DRAWS)), max_size=4)), max_size=6
)


def plain(state: dict[str, Any]) -> list[Any]:
    kind, keys, *rest = state["numpy"]
    return [state["python"], [kind, keys.tobytes(), *rest], state["torch"].numpy().tobytes()]


def drawn(program: list[tuple[bool, list[str]]]) -> list[Any]:
    """What a program draws inside and outside of blocks, and the state that it leaves."""
    with isolated_rng():
        seed_everything(3)
        stream, found = OwnStream(9), list[Any]()
        for is_inside, draws in program:
            if is_inside:
                with stream:
                    found.append([DRAWS[name]() for name in draws])
            else:
                found.append([DRAWS[name]() for name in draws])
        return [found, plain(rng_state())]


@pytest.fixture(params=list(itertools.product((False, True), repeat=3)), ids=str, scope="module")
def by_memory(request: pytest.FixtureRequest) -> Iterator[tuple[bool, ...]]:
    """All combinations of streams that pass their check."""
    with pytest.MonkeyPatch.context() as patch:
        for name, passes in zip(CHECKS, request.param, strict=True):
            if not passes:
                patch.setattr(rng_exchange, name, lambda: None)
        yield request.param


def test_all_three_checks_pass_here() -> None:
    assert all(getattr(rng_exchange, name)() is not None for name in CHECKS)


@settings(max_examples=6, deadline=None)
@given(programs)
def test_what_is_drawn_does_not_depend_on_how_streams_are_exchanged(
    by_memory: tuple[bool, ...], program: Any
) -> None:
    found = drawn(program)
    with pytest.MonkeyPatch.context() as patch:
        for name in CHECKS:
            patch.setattr(rng_exchange, name, lambda: None)
        assert found == drawn(program)


def test_the_main_streams_draw_as_if_there_was_no_block(by_memory: tuple[bool, ...]) -> None:
    names = sorted(DRAWS.keys() - SEEDS)
    with isolated_rng():
        seed_everything(3)
        alone = [DRAWS[name]() for name in names * 3]
    with_blocks = drawn([each for name in names * 3 for each in ((False, [name]), (True, names))])
    assert [each[0] for each in with_blocks[0][::2]] == alone


def test_each_stream_is_exchanged_by_its_public_state_if_its_check_fails(by_memory: tuple[bool, ...]) -> None:
    kinds = [type(enter.__self__).__name__ for enter in OwnStream(0)._enter]
    expected = [("PublicState", "PythonWords"), ("NumpyState", "NumpyGauss"), ("PublicState", "TorchEngine")]
    assert kinds == [pair[passes] for pair, passes in zip(expected, by_memory, strict=True)]


def test_an_error_in_a_block_puts_the_main_streams_back(by_memory: tuple[bool, ...]) -> None:
    before = plain(rng_state())
    with pytest.raises(ZeroDivisionError), OwnStream(1):
        [draw() for draw in DRAWS.values()]
        raise ZeroDivisionError
    assert plain(rng_state()) == before


def test_another_generator_behind_numpys_stream_is_exchanged_too() -> None:
    numpy_random: Any = np.random
    before = numpy_random.get_bit_generator()
    numpy_random.set_bit_generator(np.random.PCG64(4))
    try:
        expected = np.random.RandomState(np.random.PCG64(4)).randn(3).tolist()
        stream, found = OwnStream(1), []
        for _ in expected:  # the second normal number of each pair is kept across a block
            found.append(np.random.randn())
            with stream:
                np.random.randn()
        assert found == expected
        assert type(numpy_random.get_bit_generator()) is np.random.PCG64
    finally:
        numpy_random.set_bit_generator(before)


def test_a_generator_that_a_block_sets_stays_with_the_block() -> None:
    numpy_random: Any = np.random
    before, other = numpy_random.get_bit_generator(), np.random.PCG64(4)
    stream = OwnStream(1)
    with stream:
        numpy_random.set_bit_generator(other)
    assert numpy_random.get_bit_generator() is before
    with stream:
        assert numpy_random.get_bit_generator() is other


def test_memory_that_is_not_laid_out_as_assumed_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of each stream is looked at in a wrong place: no check may pass, and none may write to it."""
    np.random.seed(0)
    np.random.randn()  # numpy's stream holds a number that is not zero
    memory, before = rng_exchange._memory_at, plain(rng_state())
    places = {name: getattr(rng_exchange, name)() for name in ("_engine_offset", "_gauss_offset")}
    for name, place in places.items():
        monkeypatch.setattr(rng_exchange, name, lambda place=place: place + 4)
    monkeypatch.setattr(rng_exchange, "_memory_at", lambda address, size: memory(address, size).toreadonly())
    with monkeypatch.context() as patch:
        patch.setattr(
            rng_exchange,
            "_words_of",
            lambda generator: memory(id(generator) + object.__basicsize__ + 4, 2500),
        )
        assert rng_exchange._checked_words.__wrapped__(rng_exchange.main_random()) is None
    main: Any = np.random.mtrand._rand  # type: ignore[attr-defined]
    assert rng_exchange._checked_gauss.__wrapped__(main) is None
    assert rng_exchange._checked_engine.__wrapped__(torch.default_generator) is None
    assert plain(rng_state()) == before


def test_a_normal_number_that_torch_keeps_elsewhere_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A move of the stream that the memory does not show would be lost."""
    monkeypatch.setattr(rng_exchange, "TORCH_BYTES", rng_exchange.TORCH_WORDS + 4 * rng_exchange.MT_WORDS)
    assert rng_exchange._checked_engine.__wrapped__(torch.default_generator) is None


def test_a_subclass_in_place_of_pythons_stream_is_not_written_to() -> None:
    class Other(random.Random):
        pass

    assert rng_exchange._checked_words.__wrapped__(Other()) is None


def test_the_checks_move_no_stream() -> None:
    for stream in DRAWS.values():
        stream()
    before = plain(rng_state())
    for check in (rng_exchange._checked_words, rng_exchange._checked_gauss, rng_exchange._checked_engine):
        check.cache_clear()
    assert all(getattr(rng_exchange, name)() is not None for name in CHECKS)
    assert plain(rng_state()) == before
