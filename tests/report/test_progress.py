"""What the values of a metric say: the best one by the right rule, and a trend that is not fooled by noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hookline.report.progress import best_of, progress_of, trend_of
from hookline.report.reader import RecordedRun, take


def run_of(*rows: dict[str, Any], record: dict[str, Any] | None = None) -> RecordedRun:
    run = RecordedRun(Path("run"), record=record or {})
    for row in rows:
        take(run, {"type": "metrics", **row})
    run.name_curves()
    return run


def test_a_monitor_says_more_than_a_name() -> None:
    record = {"monitors": {"stop": {"metric": "val/loss", "mode": "max", "best": 3.0}}}
    run = run_of(
        *({"step": n, "over": "evaluation", "metrics": {"val/loss": float(n)}} for n in range(5)),
        record=record,
    )
    found = progress_of(run)[0]
    assert (found.direction, found.best.value if found.best else None, found.data()["direction_from"]) == (
        "higher",
        4.0,
        "monitor",
    )


@pytest.mark.parametrize(
    ("values", "way", "said"),
    [
        ([4.0, 3.0, 2.0, 1.0], "lower", "improving"),
        ([1.0, 2.0, 3.0, 4.0], "lower", "worsening"),
        ([1.0, 2.0, 3.0, 4.0], "higher", "improving"),
        ([1.0, 2.0, 3.0, 4.0], None, "rising"),
        ([4.0, 3.0, 2.0, 1.0], None, "falling"),
        ([1.0, 1.0, 1.0, 1.0], "lower", "flat"),
        ([0.0] * 9, "lower", "flat"),
        ([3.0, 2.0, 1.0], "lower", "too short"),
        ([], "lower", "too short"),
        ([1.0, 2.0, 3.0, float("nan")], "lower", "not finite"),
        ([float("nan"), 4.0, 3.0, 2.0, 1.0], "lower", "improving"),
        ([9.0, 5.0, 3.0, 2.0, 1.5, 1.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], "lower", "flat"),
        ([1e308, 5e307, 2e307, 1e307], "lower", "improving"),
        ([-1.0, -2.0, -3.0, -4.0], "lower", "improving"),
        ([5e-324, 0, 0, 0], "lower", "flat"),
    ],
)
def test_the_trend_of_the_last_part(values: list[float], way: str | None, said: str) -> None:
    assert trend_of(np.array(values, dtype=float), way) == said


def test_noise_is_no_trend_and_a_trend_in_noise_is_one() -> None:
    noise = np.random.default_rng(0).normal(size=3000)
    assert trend_of(5 + noise, "lower") == "flat"
    assert trend_of(5 + 0.1 * noise - np.linspace(0, 2, 3000), "lower") == "improving"


def test_the_best_value_has_the_step_at_which_it_was_first_reached() -> None:
    values = [3.0, 1.0, float("inf"), 1.0, 2.0]
    run = run_of(
        *(
            {"step": n, "over": "step", "metrics": {"loss": value if value != float("inf") else "inf"}}
            for n, value in enumerate(values)
        )
    )
    data = progress_of(run)[0].data()
    assert (data["best"], data["last"], data["highest"]) == (
        {"value": 1.0, "step": 1},
        {"value": 2.0, "step": 4},
        {"value": 3.0, "step": 0},
    )


def test_a_metric_that_was_never_finite_has_no_best_value() -> None:
    run = run_of({"step": 1, "over": "step", "metrics": {"loss": "nan"}})
    data = progress_of(run)[0].data()
    assert (data["best"], data["last"], data["trend"]) == (None, {"value": "nan", "step": 1}, "not finite")
    assert best_of(run) is None


@pytest.mark.parametrize(
    ("metrics", "chosen"),
    [
        ({"train/loss": 1.0, "val/loss": 2.0, "val/acc": 0.5}, "val/loss"),
        ({"train/loss": 1.0, "val/acc": 0.5}, "val/acc"),
        ({"train/loss": 1.0, "lr": 0.1}, "train/loss"),
        ({"d_loss": 0.5, "g_loss": 2.0, "train/loss": 1.0}, "train/loss"),
        ({"lr": 0.1}, None),
        ({"val/loss": 1.0, "val/dl_1/loss": 2.0}, "val/loss"),
    ],
)
def test_a_run_without_a_monitor_is_judged_by_its_validation_loss(
    metrics: dict[str, float], chosen: str | None
) -> None:
    best = best_of(run_of({"step": 1, "over": "epoch", "metrics": metrics}))
    assert (best.metric if best else None) == chosen


def test_the_mean_of_an_epoch_says_more_than_one_step() -> None:
    run = run_of(
        {"step": 1, "over": "step", "metrics": {"train/loss": 0.1}},
        {"step": 2, "over": "epoch", "metrics": {"train/loss": 0.7}},
    )
    best = best_of(run)
    assert best is not None and (best.metric, best.value) == ("train/loss", 0.7)


@pytest.mark.parametrize(
    "monitors",
    [
        None,
        3,
        [],
        {"a": 1},
        {"a": {"metric": 1, "mode": "min", "best": 1}},
        {"a": {"metric": "x", "mode": [], "best": 1}},
        {"a": {"metric": "x", "mode": "min", "best": True}},
        {"a": {"metric": "x", "mode": "min", "best": "nan"}},
    ],
    ids=range(8),
)
def test_a_hostile_record_of_monitors_is_passed_over(monitors: Any) -> None:
    assert best_of(run_of(record={"monitors": monitors})) is None


def test_an_evaluation_after_the_fit_does_not_continue_the_curve_of_the_fit() -> None:
    run = run_of(*({"step": n, "over": "evaluation", "metrics": {"val/loss": 1.0 + n}} for n in range(3)))
    take(run, {"type": "end", "step": 2, "status": "completed"})
    for name in ("val/loss", "test/loss"):
        take(run, {"type": "metrics", "step": 1, "over": "evaluation", "metrics": {name: 0.5}})
    found = {each.name: (each.count, each.last.value) for each in progress_of(run)}
    assert found == {"val/loss": (3, 3.0), "val/loss (after the fit)": (1, 0.5), "test/loss": (1, 0.5)}
