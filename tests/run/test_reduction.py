"""Rows of metrics over ranks: the values of one process that had seen all batches, whoever logged what."""

from __future__ import annotations

import math
from typing import Any

import pytest
from distributed.threads import on_ranks
from torch import nn

from hookline.distributed.comm import Ranks
from hookline.metrics.metric_log import MetricLog
from hookline.run.reduction import RankReduction, WaitingRows, computed_over


def reduced(*of_ranks: dict[str, Any]) -> dict[str, Any]:
    """The one row that all ranks get."""
    first, *others = on_ranks(len(of_ranks), lambda ranks: RankReduction(ranks)("row", of_ranks[ranks.rank]))
    assert all(repr(each) == repr(first) for each in others), others
    assert isinstance(first, dict), first
    return first


def test_means_are_weighted_by_the_batches_of_each_rank() -> None:
    assert reduced({"loss": ("mean", 3.0, 1.0)}, {"loss": ("mean", 2.0, 3.0)}) == {"loss": 5.0 / 4.0}


def test_a_value_that_is_equal_on_all_ranks_stays_as_it_is() -> None:
    # 0.1 * 3 / 3 is not 0.1
    assert reduced(*[{"lr": ("mean", 0.1, 1.0)}] * 3) == {"lr": 0.1}


def test_a_rank_without_a_batch_counts_nothing_in_a_mean() -> None:
    assert reduced({"loss": ("mean", 0.0, 0.0)}, {"loss": ("mean", 4.0, 2.0)}) == {"loss": 2.0}
    assert reduced({"loss": ("mean", 0.0, 0.0)}, {"loss": ("mean", 0.0, 0.0)}) == {}


@pytest.mark.parametrize(("reduce", "value"), [("sum", 3.0), ("min", -1.0), ("max", 4.0), ("last", 4.0)])
def test_each_reduction_is_over_ranks(reduce: str, value: float) -> None:
    assert reduced({"x": (reduce, 4.0, 1.0)}, {"x": (reduce, -1.0, 5.0)}) == {"x": value}


@pytest.mark.parametrize("reduce", ["sum", "min", "max", "mean"])
def test_one_value_that_is_not_a_number_is_not_hidden(reduce: str) -> None:
    row = reduced({"x": (reduce, 1.0, 1.0)}, {"x": (reduce, math.nan, 1.0)})
    assert math.isnan(row["x"])


def test_a_name_of_one_rank_only_is_in_the_row_of_all() -> None:
    row = reduced({"a": ("mean", 1.0, 1.0)}, {"b": ("sum", 2.0, 1.0), "object": ("object", 1.0, 1.0)})
    assert row == {"a": 1.0, "b": 2.0, "object": (1, 2)}


def test_names_are_exchanged_only_when_one_is_new() -> None:
    def ask(ranks: Ranks) -> Any:
        reduce, counts = RankReduction(ranks), []
        for name in ("a", "a", "b"):
            before = ranks.exchanges
            row = reduce("row", {name: ("mean", float(ranks.rank), 1.0)})
            counts.append((row, ranks.exchanges - before))
        return counts

    first, other = on_ranks(2, ask)
    assert first == other and isinstance(first, list)
    assert [row for row, _ in first] == [{"a": 0.5}, {"a": 0.5}, {"b": 0.5}]
    new, known, new_again = [count for _, count in first]
    assert known < new == new_again


def test_values_between_rows_wait_for_the_next_collective_and_keep_their_step() -> None:
    def write(ranks: Ranks) -> Any:
        log = MetricLog()
        log.weight = 1
        rows = WaitingRows(ranks, log)
        if ranks.rank == 1:  # the other rank logs nothing, and must not wait
            rows.keep({"seen": 4.0}, step=7, epoch=1, is_used=True)
            rows.keep({"seen": 6.0}, step=8, epoch=1, is_used=True)
            rows.keep({"unused": 1.0}, step=8, epoch=1, is_used=False)
        first = rows.reduce_rows("row", {"loss": float(ranks.rank)}, step=10)
        return first, rows.reduce_rows("row", {"loss": 3.0}, step=11)

    late = [(7, 1, {"seen": 4.0}), (8, 1, {"seen": 6.0})]
    assert on_ranks(2, write) == [(({"loss": 0.5}, late), ({"loss": 3.0}, []))] * 2


def test_rows_of_a_run_that_failed_are_written_with_local_values_once() -> None:
    log = MetricLog()
    log.weight = 2
    rows = WaitingRows(Ranks(), log)
    rows.keep({"loss": 4.0}, step=3, epoch=0, is_used=True)
    assert rows.alone() == [(3, 0, {"loss": 4.0})] and rows.alone() == []


def test_ranks_with_the_same_batches_count_once() -> None:
    rows: list[dict[str, Any]] = [
        {"x": ("sum", float(rank), 1.0), "y": ("mean", 1.0, 1.0)} for rank in range(4)
    ]
    rows[1]["only here"] = ("sum", 7.0, 1.0)

    def reduce(ranks: Ranks) -> dict[str, Any]:
        ranks.data_ranks = (0, 0, 1, 1)
        return RankReduction(ranks)("row", rows[ranks.rank])

    assert on_ranks(4, reduce) == [{"x": 2.0, "y": 1.0, "only here": 7.0}] * 4


def test_metric_objects_communicate_over_the_given_group_while_they_are_computed() -> None:
    class Metric(nn.Module):
        process_group: Any = None

    outer, own = Metric(), Metric()
    outer.inner, own.process_group = Metric(), "own"
    with computed_over("group", [outer, own, object()]):
        assert (outer.process_group, outer.inner.process_group, own.process_group) == (
            "group",
            "group",
            "own",
        )
    assert outer.process_group is outer.inner.process_group is None
    with computed_over(None, [outer]):
        assert outer.process_group is None
