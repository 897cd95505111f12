"""Two ranks train what one process would have trained on the same global batches, with every strategy."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.equal_cases import CASES
from ranks.torchrun import cases
from ranks.worlds import CLOSE

Found = dict[str, list[Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each case found, by rank, from one launch."""
    return cases("ranks.equal_cases", tmp_path_factory.mktemp("job"), 300)


@pytest.mark.parametrize("case", [", ".join(each) for each in CASES])
@pytest.mark.parametrize("rank", [0, 1])
def test_weights_norms_and_metrics_are_those_of_one_process(found: Found, case: str, rank: int) -> None:
    result = found[case][rank]
    assert result["steps"][0] == result["steps"][1] > 0
    assert result["weights"] < CLOSE
    assert result["norms"] < CLOSE
    assert result["val"] < CLOSE


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_gradient_facts_of_every_layer_are_those_of_one_process(
    found: Found, strategy: str, rank: int
) -> None:
    result = found[f"facts, {strategy}"][rank]
    assert set(result) == {"total", "norms", "ratios", "percentiles", "samples"}
    assert max(result.values()) < CLOSE


def test_a_hook_on_rank_zero_may_ask_for_a_norm_that_takes_all_ranks(found: Found) -> None:
    assert found["asked on zero"] == [6, 0]
