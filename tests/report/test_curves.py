"""Which metrics share a chart, and with how many points."""

from __future__ import annotations

import pytest
from report.reported import curve, data_of, metrics, whole_run, written


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
