"""Weighted gradient accumulation on several ranks makes the update of one large batch, however uneven the ranks' batches are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.torchrun import cases
from ranks.weighted_cases import EVERYWHERE, ON_THREE, ON_TWO_RANKS, RESUMED, WEIGHTED, Tuples, samples
from ranks.worlds import CLOSE, distance, fit, quiet, whole
from torch.utils.data import DataLoader, Subset

Found = dict[str, list[Any]]
STRATEGIES = ("ddp", "fsdp", "accelerate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """What each case found, by rank, from one launch."""
    return cases("ranks.weighted_cases", folder, 600)


@pytest.fixture(scope="module")
def on_three(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The same on three ranks."""
    return cases("ranks.weighted_cases", tmp_path_factory.mktemp("three"), 600, ranks=3)


@pytest.fixture
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def assert_close(results: list[Any], ranks: int, tolerance: float = CLOSE) -> None:
    assert len(results) == ranks
    for weights, losses, steps, expected, _ in results:
        assert weights < tolerance
        assert losses < tolerance
        assert steps == expected > 0


@pytest.mark.parametrize(
    ("strategy", "case"), [(name, each) for name in STRATEGIES for each in ON_TWO_RANKS[name]]
)
def test_two_ranks_make_the_update_of_one_large_batch(found: Found, strategy: str, case: str) -> None:
    """Also if one rank leaves a batch out, which then counts nothing."""
    assert_close(found[f"{strategy}, {case}"], 2)


@pytest.mark.parametrize("case", EVERYWHERE)
@pytest.mark.parametrize("strategy", ON_THREE)
def test_three_ranks_make_the_update_of_one_large_batch(on_three: Found, strategy: str, case: str) -> None:
    assert_close(on_three[f"{strategy}, {case}"], 3)


@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if "no tokens" in ON_TWO_RANKS[each]])
def test_a_window_without_tokens_on_any_rank_is_skipped_on_all(found: Found, strategy: str) -> None:
    assert [each[4] for each in found[f"{strategy}, no tokens"]] == [["no_loss", "no_loss"]] * 2


def test_an_optimizer_that_recomputes_the_loss_sees_that_of_one_large_batch(found: Found) -> None:
    assert_close(found["ddp, lbfgs"], 2, 1e-8)  # a line search multiplies what rounding leaves


def test_each_optimizer_counts_what_trains_it_on_all_ranks(found: Found, on_three: Found) -> None:
    assert_close(found["ddp, own optimizers"], 2)
    assert_close(on_three["ddp, own optimizers"], 3)


@pytest.mark.parametrize(("strategy", "at"), [(name, each) for name in STRATEGIES for each in RESUMED[name]])
def test_a_resume_inside_a_window_is_exact_on_every_rank(
    found: Found, on_three: Found, strategy: str, at: int
) -> None:
    assert found[f"{strategy}, resumed, {at}"] == [0.0, 0.0]
    # torch's wrapper adds up three ranks in another order in its first backward than later, which moves the last bit
    if strategy in ON_THREE:
        assert max(on_three[f"{strategy}, resumed, {at}"]) < CLOSE


@pytest.mark.usefixtures("found", "in_float64")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_another_number_of_ranks_every_sample_of_the_window_still_counts_the_same(
    folder: Path, strategy: str
) -> None:
    torch.manual_seed(7)
    module = Tuples()
    trainer = quiet("single", run_dir=folder / f"{strategy}-one", **WEIGHTED)
    trainer.fit(module, DataLoader(samples(), 3), resume=folder / f"{strategy}-2" / "cut")
    data = samples()
    windows = [
        range(9),
        range(9, 15),
        range(15, 21),
        range(21, 23),
    ]  # six samples of two ranks, then three of one
    by_hand = [next(iter(DataLoader(Subset(data, each), len(each)))) for each in windows]
    assert distance(whole(module), fit("single", by_hand, Tuples)[0]) < CLOSE
    assert trainer.state.step == 4
