"""Tensor parallelism with FSDP on four ranks: the weights of one process, each batch once, checkpoints for any mesh."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.mesh_cases import EQUAL_CASES, IN_A_WINDOW, RESUMED, SAMPLES
from ranks.torchrun import cases
from ranks.worlds import CLOSE

Found = dict[str, list[Any]]
EQUAL = [f"equal, {mesh}, {name}" for mesh, names in EQUAL_CASES.items() for name in names]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each case found, by rank, from one launch."""
    folder = tmp_path_factory.mktemp("job")
    return cases("ranks.mesh_cases", folder, 400, ranks=4, HOOKLINE_TEST_FOLDER=str(folder))


@pytest.mark.parametrize("case", EQUAL)
def test_weights_norms_and_losses_are_those_of_one_process(found: Found, case: str) -> None:
    for result in found[case]:
        assert result["steps"][0] == result["steps"][1] > 0
        assert result["samples"][0] == result["samples"][1]
        assert max(result["weights"], result["norms"], result["val"]) < CLOSE
    assert {each["size"] for each in found[case]} == {1 if "1 x 4" in case else 2}


def test_sequence_parallelism_trains_the_weights_of_one_process(found: Found) -> None:
    assert max(max(each) for each in found["sequence"]) < CLOSE


def test_ranks_of_a_tensor_parallel_group_read_the_same_batches_and_draw_the_same_numbers(
    found: Found,
) -> None:
    ranks = found["counts, 2 x 2"]
    for field in ("tags", "random", "predicted"):
        assert ranks[0][field] == ranks[1][field] != ranks[2][field] == ranks[3][field]
    assert ranks[0]["tags"] == [[0, 0], [1, 0], [2, 0], [3, 0]]
    assert ranks[2]["tags"] == [[0, 1], [1, 1], [2, 1], [3, 0]]  # the last one is a padding batch
    assert ranks[2]["predicted"] == [[0, 1], [1, 1], [2, 1]]
    assert all(each["weights"] == ranks[0]["weights"] for each in ranks)
    alone = found["counts, 1 x 4"]
    assert all(each["tags"] == alone[0]["tags"] and len(each["tags"]) == 7 for each in alone)


@pytest.mark.parametrize("mesh", ["2 x 2", "1 x 4"])
def test_samples_tokens_sums_and_metric_objects_count_each_batch_once(found: Found, mesh: str) -> None:
    for each in found[f"counts, {mesh}"]:
        assert (each["samples"], each["tokens"]) == (21, 210)
        assert (each["rows"], each["val rows"]) == (21.0, 21.0)
    assert [each["reduced"] for each in found["counts, 2 x 2"]] == [[3.0, 1.5, 2.0]] * 4


def test_windows_that_count_samples_weigh_each_sample_once(found: Found) -> None:
    assert max(found["weighted"]) < CLOSE


def test_gradient_facts_of_every_layer_are_those_of_one_process(found: Found) -> None:
    for each in found["facts"]:
        assert set(each) == {"total", "norms", "ratios", "percentiles", "samples"}
        assert max(each.values()) < CLOSE


def test_an_infinite_gradient_in_the_shard_of_one_rank_skips_the_update_on_all(found: Found) -> None:
    assert len({str(each) for each in found["overflow"]}) == 1
    assert 2 in found["overflow"][0][0]
    assert len({str(each) for each in found["skipped"]}) == 1
    assert found["skipped"][0][0] == [2]


def test_a_model_made_without_memory_gets_the_same_weights_on_all_ranks(found: Found) -> None:
    assert all(each == found["meta"][0] for each in found["meta"])
    assert min(found["meta"][0]) > 0


def test_a_tensor_parallel_mesh_without_divided_layers_is_refused(found: Found) -> None:
    for each in found["whole layers"]:
        assert each["error"] == "OptionError" and "no layer of Whole is divided" in each["text"]
        assert "self.trainer.strategy.tensor_mesh" in each["text"]


def test_a_layer_that_cannot_be_divided_evenly_is_refused_by_name(found: Found) -> None:
    for each in found["uneven layers"]:
        assert each["error"] == "OptionError"
        assert "cannot divide blocks.1.up.weight of shape [10, 6]: its dimension 0" in each["text"]


def test_compiled_layers_that_are_recomputed_are_refused_under_tensor_parallelism(found: Found) -> None:
    for each in found["recomputed graphs"]:
        assert each["error"] == "OptionError" and "a limit of torch. Leave one of them out" in each["text"]


def test_a_divided_module_is_refused_by_a_strategy_without_tensor_parallelism(found: Found) -> None:
    for each in found["divided before"]:
        assert each["error"] == "OptionError"
        assert "Parallel was divided by tensor_parallel=2 in an earlier run" in each["text"]


def test_other_batches_within_a_tensor_parallel_group_are_refused_before_the_first_step(found: Found) -> None:
    for each in found["other batches"]:
        assert each["error"] == "OptionError"
        assert "differs between rank 0 and rank 1 of one tensor-parallel group" in each["text"]
        assert "trainer.strategy.ranks.data_rank" in each["text"]
    for each in found["other lengths"]:
        assert each["error"] == "OptionError" and "rank 0: 4, rank 1: 5, rank 2: 6, rank 3: 7" in each["text"]


def test_ranks_with_different_meshes_are_refused(found: Found) -> None:
    for each in found["other mesh"]:
        assert each["error"] == "OptionError"
        assert "the device mesh is shard 1 x tp 4 on rank 0, shard 2 x tp 2 on ranks 1, 2, 3" in each["text"]


@pytest.mark.parametrize(("source", "target"), [(a, b) for a, targets in RESUMED.items() for b in targets])
def test_a_run_saved_on_one_mesh_continues_on_another(found: Found, source: str, target: str) -> None:
    for each in found[f"resume, {source}"]:
        assert each[target]["begin"] == 0  # weights and moments, exactly
        assert each[target]["end"] < CLOSE


@pytest.mark.parametrize("target", IN_A_WINDOW)
def test_an_open_accumulation_window_continues(found: Found, target: str) -> None:
    for each in found["resume in a window"]:
        assert each[target]["begin"] == 0
        assert each[target]["end"] < CLOSE


@pytest.mark.parametrize(
    ("case", "targets"),
    [("resume in a window", IN_A_WINDOW), *[("resume, 2 x 2", each) for each in [RESUMED["2 x 2"]] if each]],
)
def test_a_resumed_run_reads_the_samples_that_were_left(found: Found, case: str, targets: list[str]) -> None:
    ranks = found[case]
    assert ranks[0]["samples"] == ranks[1]["samples"] and len(ranks[0]["samples"]) == SAMPLES
    left = sorted([*ranks[0]["samples"][12:], *ranks[2]["samples"][12:]])
    assert len(left) == 2 * SAMPLES - 24
    readers = {"single": [0], "1 x 4": [0], "4": [0, 1, 2, 3], "2 x 2": [0, 2]}  # one of each group
    for target in set(targets) & set(readers):
        read = [sample for rank in readers[target] for sample in ranks[rank][target]["samples"]]
        assert sorted(read) == left


def test_the_manifest_names_the_mesh(found: Found) -> None:
    meshes = {"2 x 2": "shard 2 x tp 2", "4": "shard 4", "single": "", "ddp": ""}
    assert found["resume in a window"][0]["mesh"] == meshes["2 x 2"]
    for source in (source for source, targets in RESUMED.items() if targets):
        assert found[f"resume, {source}"][0]["mesh"] == meshes[source]
