"""Plain data between ranks: every rank gets the same answer, in rank order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.threads import on_ranks

from hookline.distributed.comm import Ranks, format_ranks
from hookline.util.errors import CheckpointError, PeerError


def test_values_of_any_length_come_from_all_ranks_in_their_order() -> None:
    values: list[Any] = [{"a": [1, None, "ä"]}, "x" * 1000, []]
    assert on_ranks(3, lambda ranks: ranks.gather(values[ranks.rank])) == [values] * 3


def test_numbers_come_from_all_ranks_exactly() -> None:
    numbers = [[0.1, float("inf")], [1e-300, -2.0]]
    assert on_ranks(2, lambda ranks: ranks.gather_numbers(numbers[ranks.rank])) == [numbers] * 2


def test_the_value_of_rank_zero_counts() -> None:
    assert on_ranks(3, lambda ranks: ranks.from_zero(f"of {ranks.rank}")) == ["of 0"] * 3


def test_maxima_and_sums_are_of_each_number() -> None:
    def ask(ranks: Ranks) -> Any:
        mine = [ranks.rank, 10 - ranks.rank]
        added = ranks.add_up(torch.tensor([0.5, float(ranks.rank)]))
        return ranks.largest(mine).read(), ranks.total(mine).read(), added.read()

    assert on_ranks(3, ask) == [([2, 10], [3, 27], [1.5, 3.0])] * 3


def test_a_second_round_may_start_before_the_first_is_read() -> None:
    def ask(ranks: Ranks) -> Any:
        rounds = ranks.rounds(2)
        first = rounds.ask([ranks.rank, 5])
        second = rounds.ask([7, -ranks.rank])
        third_values = [first.read(), second.read()]
        return [*third_values, rounds.ask([ranks.rank + 1, 0]).read()]

    assert on_ranks(2, ask) == [[[1, 5], [7, 0], [2, 0]]] * 2


def test_rank_zero_decides_for_all() -> None:
    asked: list[int] = []

    def choose(ranks: Ranks) -> str:
        return ranks.decide(lambda: asked.append(ranks.rank) or f"chosen by {ranks.rank}")

    assert on_ranks(3, choose) == ["chosen by 0"] * 3
    assert asked == [0]


def test_a_decision_that_fails_raises_on_all_ranks_with_the_reason() -> None:
    def fail() -> None:
        raise ValueError("no such folder")

    first, *others = on_ranks(3, lambda ranks: ranks.decide(fail))
    assert type(first) is ValueError
    for error in others:
        assert type(error) is PeerError and "ValueError: no such folder" in str(error)


def test_a_decision_that_hookline_refuses_is_the_same_error_on_all_ranks() -> None:
    def refuse() -> None:
        raise CheckpointError("no checkpoint")

    for error in on_ranks(3, lambda ranks: ranks.decide(refuse)):
        assert type(error) is CheckpointError and str(error) == "no checkpoint"


def test_exchanges_are_counted_alike() -> None:
    def count(ranks: Ranks) -> int:
        before = ranks.exchanges
        ranks.from_zero(1)
        return ranks.exchanges - before

    first, second = on_ranks(2, count)
    assert first == second and isinstance(first, int) and first > 0


def test_one_process_answers_itself() -> None:
    ranks = Ranks()
    assert ranks.alone and ranks.beside() is ranks
    assert ranks.gather("x") == ["x"] and ranks.gather_numbers([1, 2]) == [[1.0, 2.0]]
    assert ranks.decide(lambda: 3) == 3 and ranks.from_zero(4) == 4
    answer = ranks.total([1, 2])
    assert answer.is_ready and answer.read() == [1, 2]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 2], "ranks 0, 2"), ([*range(9)], "ranks 0, 1, 2, 3, 4, 5, 6, 7, ...")],
)
def test_ranks_are_listed_in_words(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_ranks_with_the_same_batches_share_a_data_parallel_rank() -> None:
    ranks = [Ranks(rank, rank, 4, data_ranks=(0, 0, 1, 1)) for rank in range(4)]
    assert [each.data_rank for each in ranks] == [0, 0, 1, 1]
    assert [each.is_reader for each in ranks] == [True, False, True, False]
    assert {(each.data_size, tuple(each.readers)) for each in ranks} == {(2, (0, 2))}
    every = Ranks(1, 1, 3)
    assert (every.data_rank, every.data_size, every.readers, every.is_reader) == (1, 3, [0, 1, 2], True)
