"""Which direction of a metric is better, by the words of its name: accuracy is higher, loss is lower."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TypeVar

K = TypeVar("K")

LOWER = (
    "loss",
    "error",
    "err",
    "perplexity",
    "ppl",
    "nll",
    "mse",
    "rmse",
    "mae",
    "mape",
    "wer",
    "cer",
    "bpc",
    "bpb",
    "fid",
    "kl",
    "divergence",
    "entropy",
)
HIGHER = (
    "acc",
    "accuracy",
    "top1",
    "top5",
    "f1",
    "auc",
    "auroc",
    "auprc",
    "ap",
    "map",
    "precision",
    "recall",
    "iou",
    "miou",
    "dice",
    "bleu",
    "rouge",
    "score",
    "r2",
    "psnr",
    "ssim",
    "reward",
    "return",
    "mcc",
    "sensitivity",
    "specificity",
    "ndcg",
    "mrr",
)
VAGUE = ("score",)
"""Words that are enough for a report, but not to choose checkpoints by: a lower Brier score is better."""
REVERSING = ("std", "var", "variance", "gap", "drop", "time", "seconds", "neg", "negative", "minus")
"""Words beside which the others do not decide: a spread, a difference, a duration, a changed sign."""
_WORDS = re.compile(r"[a-z]+[0-9]*|[0-9]+")
_CAMEL_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def direction_of(name: str, vague: bool = True) -> str | None:
    """Return 'lower' or 'higher' by the words of a name; None if they do not say it, or say both.

    Words end at separators, and at a capital letter. vague: whether words like 'score' decide.
    """
    parts = {*_WORDS.findall(name.lower()), *_WORDS.findall(_CAMEL_CASE.sub("_", name).lower())}
    words = parts | {part.rstrip("0123456789") for part in parts}  # map50, acc1
    if words & set(REVERSING):
        return None
    higher = set(HIGHER) - set(() if vague else VAGUE)
    known = [side for side, marks in (("lower", set(LOWER)), ("higher", higher)) if words & marks]
    return known[0] if len(known) == 1 else None


def mode_of(name: str) -> str:
    """Return 'max' for a metric whose name says that higher is better, otherwise 'min'."""
    return "max" if direction_of(name, vague=False) == "higher" else "min"


ROUNDING = 2.0**-22
"""The relative difference that rounding explains: of means of float32 values over batches."""


def is_same(score: float, other: float, rounding: float = ROUNDING) -> bool:
    """Return whether two scores are equal but for rounding. Whole numbers, such as steps, are exact."""
    are_whole = score.is_integer() and other.is_integer()
    return score == other if are_whole else math.isclose(score, other, rel_tol=rounding)


def best_first(scores: Mapping[K, float], mode: str, rounding: float = ROUNDING) -> list[K]:
    """Return the keys, that of the best score first; of equal scores the first in the mapping."""
    levels: dict[K, float] = {}
    level = math.nan
    for key in sorted(scores, key=scores.__getitem__, reverse=mode == "max"):
        levels[key] = level = level if is_same(scores[key], level, rounding) else scores[key]
    # sorted() keeps the order of equal ones, also when it sorts in reverse
    return sorted(scores, key=levels.__getitem__, reverse=mode == "max")
