"""Which direction is better, by the words of a metric's name."""

from __future__ import annotations

import pytest

from hookline.metrics.direction import direction_of, mode_of


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
