"""Totals of a batch: samples, tokens and losses over ranks, and a padding batch that counts nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed.threads import on_ranks
from tiny import Net, quiet
from torch.utils.data import DataLoader, TensorDataset

from hookline import Hook
from hookline.data.sharding import RankBatch
from hookline.distributed.comm import Ranks
from hookline.run.state import State
from hookline.training.ranks.batch_totals import BatchTotals, SharedLoss


def in_a_run(look: Callable[[Any], None], **options: Any) -> None:
    """Call a function with the run of a fit, at the end of its first batch."""
    seen: list[int] = []

    class Looks(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                look(trainer._run)
                seen.append(batch_idx)

    data = TensorDataset(torch.randn(6, 4), torch.randn(6, 2))
    quiet(hooks=[Looks()], **options).fit(Net(), DataLoader(data, batch_size=3))
    assert seen == [0]


def shared(*of_ranks: tuple[float, float]) -> float:
    """The loss that all ranks read, from each one's weighted sum and weight."""

    def read(ranks: Ranks) -> float:
        return float(SharedLoss(ranks.add_up(torch.tensor(of_ranks[ranks.rank], dtype=torch.float64))))

    first, *others = on_ranks(len(of_ranks), read)
    assert isinstance(first, float) and all(repr(each) == repr(first) for each in others)
    return first


def test_the_loss_over_ranks_is_weighted_and_a_rank_without_a_loss_counts_nothing() -> None:
    assert shared((2.0, 1.0), (9.0, 3.0)) == 11.0 / 4.0
    assert shared((0.0, 0.0), (9.0, 3.0)) == 3.0
    assert math.isnan(shared((0.0, 0.0), (0.0, 0.0)))


def test_samples_and_tokens_are_summed_over_ranks() -> None:
    def count(ranks: Ranks) -> Any:
        run: Any = SimpleNamespace(
            data=SimpleNamespace(
                loaders={"train": []}, is_mixture=False, count_tokens=lambda batch: 10 * (ranks.rank + 1)
            ),
            plan=SimpleNamespace(wanted={"tokens_seen"}),
            boundary=SimpleNamespace(waits_for_signals=False),
            strategy=SimpleNamespace(ranks=ranks),
        )
        totals, s = BatchTotals(run, RankBatch()), State()
        assert totals.begin(s, 3 + ranks.rank) == 3 + ranks.rank
        assert (s.samples_seen, s.tokens_seen) == (0, 0)  # read when the batch is over
        totals.count(s)
        return s.samples_seen, s.tokens_seen

    assert on_ranks(2, count) == [(7, 30)] * 2


def test_a_padding_batch_weighs_nothing_and_leaves_log_and_buffers_alone() -> None:
    def look(run: Any) -> None:
        s, log = run.state, run.state.log
        run.module.register_buffer("seen", torch.zeros(1))
        totals = BatchTotals(run, RankBatch(is_padding=True))
        assert totals.begin(s, 3) == 0
        assert s.log is not log
        s.log.log("loss", 100.0, True, False, False, "mean", None)
        run.module.seen += 1
        assert totals.loss_weight(s) == 0.0
        totals.end_backward(run.window, 0.0)
        assert run.module.seen.item() == 0
        totals.end(s)
        assert s.log is log and log.newest.get("loss") != 100.0 and log.weight == 0

    in_a_run(look)


def test_known_samples_are_counted_without_asking_the_ranks() -> None:
    def look(run: Any) -> None:
        totals, s = BatchTotals(run, RankBatch(samples=8)), run.state
        run.boundary.waits_for_signals = False
        before = s.samples_seen
        totals.begin(s, 3)
        assert totals._answer is None
        totals.count(s)
        assert s.samples_seen - before == 8

    in_a_run(look)


@pytest.mark.parametrize(
    ("losses", "weights", "expected"),
    [
        ([2.0, 4.0], [1.0, 3.0], [14.0, 4.0]),
        ([None, 4.0], [1.0, 2.0], [8.0, 2.0]),
        ([5.0], [0.0], [0.0, 0.0]),
    ],
)
def test_losses_of_a_window_are_weighed_and_missing_ones_left_out(
    losses: list[Any], weights: list[float], expected: list[float]
) -> None:
    in_a_run(lambda run: assert_equal(BatchTotals(run, RankBatch())._weighed(losses, weights), expected))


def assert_equal(found: torch.Tensor, expected: list[float]) -> None:
    assert found.tolist() == expected
