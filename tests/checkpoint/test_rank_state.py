"""What each rank keeps for itself, and what another number of ranks makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hookline.checkpoint.format import Packed, Shards, TensorStore, pack
from hookline.checkpoint.rank_state import (
    BUFFERS_PART,
    PerRankState,
    RankFiles,
    add_logs,
    mean_window,
    nothing_logged,
    saved_data_ranks,
    sum_window,
)
from hookline.checkpoint.writer import write_parts
from hookline.metrics.metric_log import MetricLog
from hookline.util.errors import CheckpointError

CONTENTS: dict[str, Any] = {
    "run": "r",
    "world_size": 2,
    "module": {"w": torch.ones(3), "mean": torch.zeros(2)},
    "optimizers": [],
    "hooks": {"same": {"n": 1}, "other": {"seen": [1]}},
    "counters": {"step": 4},
    "rng": torch.arange(4),
}


def of_rank_one(**changed: Any) -> set[str]:
    """What rank one writes for itself."""
    zero, one = PerRankState(CONTENTS, {}), PerRankState({**CONTENTS, **changed}, {})
    return set(one.for_rank(1, zero.sums).part.structure["own"])


def test_a_rank_writes_only_what_differs_from_rank_zero() -> None:
    assert of_rank_one() == set()
    assert of_rank_one(rng=torch.arange(4) + 1) == {"rng"}
    assert of_rank_one(hooks={"same": {"n": 1}, "other": {"seen": [2]}}) == {"hooks/other"}
    assert of_rank_one(hooks={**CONTENTS["hooks"], "only_here": {"n": 0.5}}) == {"hooks/only_here"}


def test_weights_are_not_compared_but_buffers_are() -> None:
    zero = PerRankState(CONTENTS, {"mean": torch.zeros(2)})
    one = PerRankState({**CONTENTS, "module": {"w": torch.ones(3) * 2}}, {"mean": torch.ones(2)}).for_rank(
        1, zero.sums
    )
    assert set(one.part.structure["own"]) == {BUFFERS_PART}
    assert list(one.part.tensors.values())[0].tolist() == [1.0, 1.0]
    assert not one.model and not one.rest and not one.structure


def test_rank_zero_writes_everything_and_nothing_twice() -> None:
    parts = PerRankState(CONTENTS, {"mean": torch.zeros(2)})
    packed = parts.for_rank(0, parts.sums)
    assert set(packed.model) == {"w", "mean"}
    assert packed.structure["counters"] == {"step": 4}
    assert not packed.part.tensors and not packed.part.structure["own"]


def test_what_is_a_ranks_own_is_read_without_its_pieces(tmp_path: Path) -> None:
    piece, shards = torch.ones(2), Shards()
    shards["module.w"] = piece
    shards.blocks["module.w"] = ([0], [2])
    own = TensorStore(label="0: ")
    structure = pack(torch.arange(3), own, "rng")
    own.update(shards)
    write_parts(
        tmp_path, Packed({}, TensorStore(), TensorStore(), shards.as_part(own, {"rng": structure})), rank=1
    )
    files = RankFiles(tmp_path, rank=1)
    asked: list[str] = []
    opened = files.files[1]._open()

    class Asked:
        def keys(self) -> Any:
            return opened.keys()

        def get_tensor(self, name: str) -> Any:
            asked.append(name)
            return opened.get_tensor(name)

    files.files[1]._file = Asked()
    assert files.own(1, files.sharded)["rng"].tolist() == [0, 1, 2]
    assert asked == ["0: rng"]
    assert files.count() == 2 and files.count(1, 2) == 0


def logged(*losses: float) -> dict[str, Any]:
    log = MetricLog()
    log.mode = "train"
    for loss in losses:
        log.train_loss.add(loss, 2)
        log.log("error", loss * 10, False, True, False, "mean", 2)
        log.log("peak", loss, False, True, False, "max", 2)
    return log.state_dict()


def test_one_process_continues_with_the_means_of_all_ranks() -> None:
    log = MetricLog()
    log.mode = "train"
    log.load_state_dict(add_logs([logged(1.0, 2.0), logged(6.0)]))
    found = {name: float(value) for name, value in log.finish("train").items()}
    assert found == {"train/loss": 3.0, "error": 30.0, "peak": 6.0}


def test_other_ranks_begin_with_nothing_logged_so_that_nothing_counts_twice() -> None:
    log = MetricLog()
    log.mode = "train"
    log.load_state_dict(nothing_logged(logged(1.0, 2.0)))
    assert {name: value for name, value in log.finish("train").items() if value is not None} == {}


def test_an_open_window_continues_with_the_mean_of_the_ranks_gradients() -> None:
    one: dict[str, Any] = {
        "batches": 2,
        "count": 2,
        "gradients": {"w": torch.tensor([2.0, 4.0]), "b": torch.tensor([1.0])},
    }
    other: dict[str, Any] = {"batches": 2, "count": 2, "gradients": {"w": torch.tensor([4.0, 0.0])}}
    found = mean_window([one, other])
    assert found["count"] == 2
    assert found["gradients"]["w"].tolist() == [3.0, 2.0]
    assert found["gradients"]["b"].tolist() == [0.5]  # the other rank had nothing to add
    assert mean_window([{}, {}]) == {}


def test_samples_of_a_weighted_window_count_as_much_on_another_number_of_ranks() -> None:
    one: dict[str, Any] = {"batches": 1, "count": 5, "fed": {0: 5}, "gradients": {"w": torch.tensor([2.0])}}
    other: dict[str, Any] = {
        "batches": 1,
        "count": 1,
        "fed": {},
        "gradients": {"w": torch.tensor([4.0]), "b": torch.tensor([8.0])},
    }
    found = sum_window([one, other], 4)
    assert (found["count"], found["fed"]) == (1.5, {0: 1.25})
    assert {name: each.tolist() for name, each in found["gradients"].items()} == {"w": [1.5], "b": [2.0]}
    between = {"by": "tokens", "unit": 4.0, "correction": 1.0}
    assert sum_window([between, between], 4) == between


def test_ranks_at_different_places_of_a_window_cannot_be_shared_out() -> None:
    one: dict[str, Any] = {"batches": 2, "count": 2, "gradients": {"w": torch.zeros(1)}}
    with pytest.raises(CheckpointError, match="Resume with as many ranks as before"):
        mean_window([one, {**one, "count": 1}])


class Own(RankFiles):
    """Ranks whose own state is their number."""

    def __init__(self) -> None:
        self.ranks = [1, 2, 3]

    def own(self, rank: int, find: Any) -> dict[str, Any]:
        return {"rng": rank} if rank else {}


@pytest.mark.parametrize(
    ("saved", "now", "found"),
    [
        ([0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 2, 3]),  # as saved: each rank's own
        ([0, 0, 1, 1], [0, 1], [0, 2]),  # the rank that read the same batches
        ([0, 0, 1, 1], [0, 1, 2, 3], [0, 2, None, None]),
        ([0, 1, 2, 3], [0, 0, 1, 1], [0, 0, 1, 1]),
        ([0, 0, 1, 1], [0], [0]),
        ([0, 0, 0, 0], [0, 1], [0, None]),
    ],
    ids=str,
)
def test_on_another_mesh_a_rank_continues_as_the_rank_with_its_batches(
    saved: Any, now: Any, found: Any
) -> None:
    restored = []
    for rank in range(len(now)):
        contents: dict[str, Any] = {"world_size": 4, "data_ranks": saved, "rng": 0}
        Own().adapt(contents, rank, now, lambda entry: entry)
        restored.append(contents["rng"])
    assert restored == found


class OwnMetrics(RankFiles):
    """Two ranks, of which only rank one has updated a metric object."""

    def __init__(self) -> None:
        self.ranks = [0, 1]

    def own(self, rank: int, find: Any) -> dict[str, Any]:
        return {"metric_objects": {"states": {"mean": {"_update_count": 2}}, "logged": {}}} if rank else {}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_metric_objects_are_of_their_rank_and_begin_anew_on_another_number_of_ranks(ranks: int) -> None:
    assert of_rank_one(metric_objects={"states": {"mean": {"_update_count": 2}}}) == {"metric_objects"}
    found = []
    for rank in range(ranks):
        contents: dict[str, Any] = {"world_size": 2, "metric_objects": {"states": {}, "logged": {}}}
        OwnMetrics().adapt(contents, rank, range(ranks), lambda entry: entry)
        found.append(contents["metric_objects"] and list(contents["metric_objects"]["states"]))
    assert found == ([[], ["mean"]] if ranks == 2 else [None] * ranks)


@pytest.mark.parametrize(
    "wrong", [[0, 0], [0, 0, 2, 2], [0, "0", 1, 1], [0, 0, 1, True], 4, [-1, 0, 0, 0]], ids=str
)
def test_data_parallel_ranks_that_no_run_has_are_refused(wrong: Any) -> None:
    with pytest.raises(CheckpointError, match="does not give a data-parallel rank to each of 4 ranks"):
        saved_data_ranks({"world_size": 4, "data_ranks": wrong})
