"""DeviceStats: what the operating system and the allocator tell."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Trainer
from hookline.hooks import device_stats
from hookline.hooks.device_stats import CPUMeter, DeviceStats
from hookline.util.errors import OptionError

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


@on_linux
def test_processor_and_memory_are_logged_every_so_many_steps(tmp_path: Path) -> None:
    Trainer(run_dir=tmp_path, max_epochs=1, enable_progress_bar=False, hooks=[DeviceStats(every=2)]).fit(
        Net(), batches(5)
    )
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    found = [
        (row["step"], row["metrics"])
        for row in rows
        if row["type"] == "metrics" and "cpu/percent" in row["metrics"]
    ]
    assert [step for step, _ in found] == [2, 4]
    for _, metrics in found:
        assert {"cpu/percent", "cpu/memory_gb", "cpu/peak_memory_gb", "cpu/system_memory_percent"} <= set(
            metrics
        )
        assert not any(name.startswith("cuda/") for name in metrics)


@on_linux
def test_memory_is_what_this_process_holds() -> None:
    before = device_stats.memory()
    held = torch.ones(50_000_000)  # 200 MB
    after = device_stats.memory()
    assert 0.15 < after["memory_gb"] - before["memory_gb"] < 0.3
    assert after["peak_memory_gb"] == pytest.approx(
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, rel=0.1
    )
    assert after["peak_memory_gb"] * 1.01 >= after["memory_gb"]
    assert 0 < after["system_memory_percent"] < 100
    del held


def test_a_busy_process_takes_more_of_the_processor_than_a_sleeping_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock:
        monotonic = staticmethod(iter([0.0, 10.0, 20.0]).__next__)
        process_time = staticmethod(iter([1.0, 6.0, 6.5]).__next__)

    monkeypatch.setattr(device_stats, "time", Clock)
    ticks = iter([(100, 50), (300, 100), (500, 290)])
    monkeypatch.setattr(device_stats, "_system_times", lambda: next(ticks))
    meter = CPUMeter()
    busy, idle = meter.read(), meter.read()
    assert (busy["percent"], idle["percent"]) == (50.0, 5.0)
    assert (busy["system_percent"], idle["system_percent"]) == pytest.approx((75.0, 5.0))


def test_what_happened_before_the_training_does_not_count() -> None:
    hook = DeviceStats()
    before = hook._meter
    quiet(hooks=[hook]).fit(Net(), batches(1))
    assert hook._meter._last[0] > before._last[0]


def test_a_system_that_tells_nothing_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_stats, "Path", lambda name: Path("/nowhere/at/all"))
    monkeypatch.setitem(sys.modules, "resource", None)
    trainer = quiet(hooks=[DeviceStats(every=1)])
    trainer.fit(Net(), batches(2))
    assert [name for name in trainer.metrics if name.startswith("cpu/")] == ["cpu/percent"]
    assert not caplog.records


def test_on_cuda_the_allocators_books_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    books = {
        "allocated_bytes.all.current": 2_000_000_000,
        "allocated_bytes.all.peak": 3_000_000_000,
        "reserved_bytes.all.current": 4_000_000_000,
        "num_alloc_retries": 1,
        "num_ooms": 2,
    }
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda device: books
    )  # there is no CUDA device to test on
    logged: dict[str, float] = {}

    class Trainer:
        log_dict = staticmethod(logged.update)

    DeviceStats(every=1, cpu=False).on_step_end(Trainer(), 1, torch.device("cuda", 0))
    assert logged == {
        "cuda/allocated_gb": 2.0,
        "cuda/peak_allocated_gb": 3.0,
        "cuda/reserved_gb": 4.0,
        "cuda/peak_reserved_gb": 0.0,
        "cuda/alloc_retries": 1.0,
        "cuda/ooms": 2.0,
    }


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": "5 steps"}, {"cpu": None}], ids=str)
def test_wrong_parameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"DeviceStats: {next(iter(wrong))}="):
        DeviceStats(**wrong)
