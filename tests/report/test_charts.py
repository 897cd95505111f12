"""Which metrics share a chart, and with how many points."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report.reported import curve, data_of, metrics, traced, whole_run, written
from tiny import Net, batches, quiet

from hookline import Hook
from hookline.report.charts import group_columns, in_order, min_max, strongest


def test_train_and_val_share_a_chart_and_layers_share_a_heat_map() -> None:
    data = data_of(whole_run())
    charts = {
        chart["title"]: [each["name"] for each in chart["series"]]
        for part in data["sections"]
        for chart in part["charts"]
    }
    assert charts["loss"] == ["train/loss", "train/loss (epoch)", "val/loss"]
    assert charts["learning rate"] == ["lr"]
    assert charts["samples per second"] == ["throughput/samples_per_sec"]
    assert not any(name.startswith("grad_norm/") for names in charts.values() for name in names)
    heat = data["heat"][0]
    assert (heat["family"], heat["rows"]) == ("grad_norm", ["layer"]) and len(heat["values"][0]) == len(
        heat["steps"]
    ) == 12


def test_stages_in_names_with_an_underscore_share_a_chart_too() -> None:
    names = ("train_loss_step", "train_loss_epoch", "val_loss", "test_loss", "valid_acc", "validation_acc")
    others = ("train_seconds_per_step", "training_loss", "value")
    data = data_of(
        written("run", *(metrics(step, **dict.fromkeys(names + others, 1.0)) for step in range(3)))
    )
    [part] = data["sections"]
    charts = {chart["title"]: [each["name"] for each in chart["series"]] for chart in part["charts"]}
    assert charts == {
        "loss": ["train_loss_epoch", "train_loss_step", "val_loss", "test_loss"],
        "acc": ["valid_acc", "validation_acc"],
        "seconds_per_step": ["train_seconds_per_step"],
        "training_loss": ["training_loss"],
        "value": ["value"],
    }


def test_a_curve_far_from_zero_keeps_its_shape_and_numbers_in_names_are_in_order() -> None:
    near = [1_000_000.0000026 + step * 1e-6 for step in range(50)]
    rows = [
        metrics(
            step,
            near=value,
            far=-123456.79 - step / 50,
            flat=123456.789,
            **{"lr-Adam__pg10": 1.0, "lr-Adam__pg2": 1.0, "lr-Adam__pg1": 1.0},
        )
        for step, value in enumerate(near)
    ]
    data = data_of(written("run", *rows))
    assert curve(data, "near")["y"] == pytest.approx(near, abs=2e-8)
    assert curve(data, "far")["y"] == pytest.approx([-123456.79 - step / 50 for step in range(50)], abs=1e-4)
    assert set(curve(data, "flat")["y"]) == {123456.789}
    rates = [f"lr-Adam/pg{number}" for number in (1, 2, 10)]
    assert [each["name"] for each in data["summary"] if each["name"] in rates] == rates
    charts = {
        chart["title"]: [each["name"] for each in chart["series"]]
        for part in data["sections"]
        for chart in part["charts"]
    }
    assert charts["learning rate"] == rates


# ---- downsampling ------------------------------------------------------------------------------------------


VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400)


@settings(max_examples=60, deadline=None)
@given(VALUES, st.integers(10, 60), st.integers(1, 7))
def test_what_is_drawn_are_true_points_with_both_extremes_and_both_ends(
    values: list[float], most: int, apart: int
) -> None:
    steps, given_values = np.arange(len(values), dtype=float) * apart, np.array(values)
    x, y, means = min_max(steps, given_values, most)
    assert len(x) <= most
    assert set(zip(x, y, strict=True)) <= set(zip(steps, given_values, strict=True))
    assert np.all(np.diff(x) > 0)
    assert (y.min(), y.max()) == (given_values.min(), given_values.max())
    assert (x[0], x[-1]) == (steps[0], steps[-1])
    assert (means is None) == (len(values) <= most)


def test_a_single_spike_among_a_million_is_kept() -> None:
    values = np.zeros(1_000_000)
    values[654_321] = 7.0
    x, y, means = min_max(np.arange(1_000_000.0), values, 500)
    assert 654_321 in x[y == 7.0] and len(x) <= 500
    assert means is not None and means.max() == pytest.approx(7.0 * 249 / 1_000_000, rel=0.01)


def test_smoothing_starts_from_means_not_from_the_middle_of_the_extremes() -> None:
    values = np.where(np.arange(10_000) % 10 == 0, 10.0, 0.0)
    steps = np.arange(10_000.0)
    steps[5_000:] += 50_000  # with a gap, in which buckets are empty
    _, _, means = min_max(steps, values, 102)
    assert means is not None and np.median(means) == pytest.approx(1.0, rel=0.1)


def test_many_values_under_one_step_do_not_break_it() -> None:
    x, y, means = min_max(np.full(1000, 5.0), np.arange(1000.0), 100)
    assert set(x) == {5.0} and {0.0, 999.0} <= set(y)


def test_steps_that_go_back_are_put_in_order_and_what_is_not_finite_is_left_out() -> None:
    steps, values = in_order(np.array([3.0, 1, 2, 4]), np.array([30.0, 10, np.nan, np.inf]))
    assert steps.tolist() == [1, 3] and values.tolist() == [10, 30]


def test_a_column_of_a_heat_map_shows_its_strongest_value() -> None:
    firsts, place = group_columns(np.arange(10.0), 5)
    assert firsts.tolist() == [0, 2, 4, 6, 8]
    found = strongest(place, np.array([1, 2, -9, 3, np.nan, 1e9, 0, 0, 5, 4]), 5)
    assert found.tolist() == [2, -9, np.inf, 0, 5]


def test_steps_that_a_layer_has_no_value_for_stay_empty() -> None:
    firsts, place = group_columns(np.array([0.0, 10, 20]), 100)
    assert np.isnan(strongest(place[:2], np.array([1.0, 2.0]), firsts.size)).tolist() == [False, False, True]


# ---- timeline ----------------------------------------------------------------------------------------------


class Works(Hook):
    def on_step_end(self) -> None:
        sum(range(20_000))


def lanes(timeline: dict[str, Any]) -> dict[str, tuple[int, float]]:
    return {each["name"]: (each["calls"], each["total"]) for each in timeline["lanes"]}


def test_a_traced_run_shows_every_call_of_its_hooks() -> None:
    trainer = quiet(run_dir="run", logger=True, trace=True, max_epochs=2, hooks=[Works()])
    trainer.fit(Net(), batches())
    found = data_of(Path("run"))["timeline"]
    assert len(found) == 1 and (found[0]["run"], found[0]["rank"]) == (0, 0)
    calls, total = lanes(found[0])["works"]
    assert (
        calls
        == sum(cell[3] for cell in found[0]["cells"] if found[0]["lanes"][cell[0]]["name"] == "works")
        == 8
    )
    spent = [
        each["dur"]
        for each in json.loads(Path("run/trace.json").read_text())
        if each.get("cat") == "hook" and each["name"] == "works"
    ]
    assert len(spent) == 8 and total == pytest.approx(sum(spent) / 1e6)
    assert {found[0]["events"][cell[5]] for cell in found[0]["cells"] if cell[0] == 0} == {"on_step_end"}


def test_a_run_without_a_trace_has_no_timeline() -> None:
    assert data_of(written("run", metrics(1, loss=1.0)))["timeline"] == []


def test_of_a_large_job_the_first_ranks_are_read() -> None:
    path = written("run", metrics(1, loss=1.0))
    for rank in range(12):
        traced(path, ("a", "on_step_end", 0, 10, 1), rank=rank)
    data = data_of(path)
    assert [each["rank"] for each in data["timeline"]] == list(range(8))
    assert data["notes"] == ["run: the traces of 4 further ranks are not read."]
