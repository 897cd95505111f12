"""Which direction is better, by the words of a metric's name."""

from __future__ import annotations

import pytest

from hookline.metrics.direction import best_first, direction_of, is_same, mode_of


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("train/loss", "lower"),
        ("val/loss", "lower"),
        ("val_error_rate", "lower"),
        ("perplexity", "lower"),
        ("valPpl", "lower"),
        ("eval/WER", "lower"),
        ("acc", "higher"),
        ("val/accuracy", "higher"),
        ("F1", "higher"),
        ("val_auc", "higher"),
        ("top1", "higher"),
        ("bleu", "higher"),
        ("lr", None),
        ("throughput/samples_per_sec", None),
        ("glossary", None),
        ("accumulated", None),
        ("loss_accuracy", None),
        ("", None),
        ("val/macro_f1", "higher"),
        ("macroF1Score", "higher"),
        ("AUCScore", "higher"),
        ("mIoU", "higher"),
        ("mAP@0.5", "higher"),
        ("box.map50-95", "higher"),
        ("top_1-accuracy", "higher"),
        ("loss2", "lower"),
        ("val/distance", None),
        ("val/inaccuracy", None),
        ("loss_accumulated", "lower"),
        ("mapping", None),
        ("accuracy_std", None),
        ("train_val_accuracy_gap", None),
        ("neg_mse", None),
    ],
)
def test_what_is_better_is_known_by_the_words_of_a_name(name: str, way: str | None) -> None:
    assert direction_of(name) == way


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("val/accuracy", "max"),
        ("val/f1_score", "max"),
        ("val/score", "min"),
        ("brier_score", "min"),
        ("x", "min"),
    ],
)
def test_a_hook_takes_the_higher_value_only_if_the_name_is_clear(name: str, mode: str) -> None:
    assert mode_of(name) == mode


@pytest.mark.parametrize(
    ("score", "other", "same"),
    [
        (0.92444441, 0.92444443, True),  # 416 of 450, as two orders of float32 means give it
        (0.92444441, 0.9244454, False),
        (1e-9, 1.0000001e-9, True),
        (1e-9, 2e-9, False),
        (0.0, 1e-12, False),
        (20_000_001.0, 20_000_002.0, False),  # steps are exact
        (0.0, 0.0, True),
    ],
)
def test_scores_that_differ_by_rounding_are_the_same(score: float, other: float, same: bool) -> None:
    assert is_same(score, other) is is_same(other, score) is same


@pytest.mark.parametrize(("mode", "order"), [("max", ["b", "c", "a", "d"]), ("min", ["d", "a", "b", "c"])])
def test_of_scores_that_are_equal_but_for_rounding_the_first_is_better(mode: str, order: list[str]) -> None:
    scores = {"a": 0.9, "b": 0.92444441, "c": 0.92444443, "d": 0.1}
    assert best_first(scores, mode) == order
