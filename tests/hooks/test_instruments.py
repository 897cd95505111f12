"""The instruments of a meter: their names, and runs that share a meter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hookline.hooks import _instruments
from hookline.hooks._instruments import COUNTERS, RunMetrics, instrument_name


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("train/loss", "train.loss"),
        ("val/dl_first/acc", "val.dl_first.acc"),
        ("Top 5 %", "Top_5__"),
        ("µ", "_"),
        ("", ""),
    ],
)
def test_a_name_is_made_one_that_opentelemetry_allows(name: str, allowed: str) -> None:
    assert instrument_name(name) == allowed
    assert len(instrument_name(name * 300)) <= 200


def reading() -> tuple[Any, Any]:
    """A meter, and what reads its values."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("test")

    def read() -> dict[str, list[Any]]:
        found = reader.get_metrics_data()
        return {
            metric.name: list(metric.data.data_points)
            for group in (found.resource_metrics if found is not None else [])
            for scope in group.scope_metrics
            for metric in scope.metrics
        }

    return meter, read


def state(step: int) -> Any:
    return SimpleNamespace(
        step=step,
        batches_seen=step,
        samples_seen=2 * step,
        tokens_seen=0,
        epoch=1,
        timer=None,
        hooks=SimpleNamespace(entries=list),
    )


def test_runs_share_the_counters_of_a_meter_and_leave_them(caplog: pytest.LogCaptureFixture) -> None:
    meter, read = reading()
    first, second = (RunMetrics(meter, state(step), {"run": step}) for step in (3, 5))
    values = read()
    assert {(point.attributes["run"], point.value) for point in values["hookline.steps"]} == {(3, 3), (5, 5)}
    assert "hookline.tokens" not in values and set(values) <= {f"hookline.{name}" for name in COUNTERS}
    first.leave()
    first.leave()
    assert [point.value for point in read()["hookline.samples"]] == [10]
    second.leave()
    assert read() == {}
    assert caplog.records == []  # OpenTelemetry warns about an instrument that is made twice


def test_names_that_change_with_every_row_are_limited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_instruments, "MOST_GAUGES", 3)
    meter, read = reading()
    run = RunMetrics(meter, state(1), {})
    for step in range(5):
        run.log_metrics({f"at/{step}": 1.0}, step, 0)
    run.log_metrics({"at/0": 2.0, "new": 1.0}, 6, 0, "epoch")
    gauges = {name for name in read() if name.startswith("hookline.metric.")}
    assert gauges == {f"hookline.metric.at.{step}" for step in range(3)}
    (message,) = (each.getMessage() for each in caplog.records)
    assert message == "OpenTelemetry: the run logs more than 3 names; 'at/3' and others are left out"


def test_skips_are_counted_although_only_some_are_logged() -> None:
    meter, read = reading()
    run = RunMetrics(meter, state(1), {})
    for number in (1, 2, 100):
        run.log_event("skip", {"number": number, "reason": "nonfinite"})
    run.log_event("failure", {})
    assert [point.value for point in read()["hookline.skipped_steps"]] == [100]
