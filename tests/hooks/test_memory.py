"""Counters of memory. There is no accelerator to test on: its counters are written by hand, in torch's own form."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch

from hookline.hooks import _memory
from hookline.hooks._memory import allocator_counters, allocator_stats, peak_process_memory, take_peaks

COUNTERS = {
    "allocated_bytes.all.current": 2_000_000_000,
    "allocated_bytes.all.peak": 3_000_000_000,
    "reserved_bytes.all.current": 4_000_000_000,
    "reserved_bytes.all.peak": 5_000_000_000,
    "num_alloc_retries": 1,
    "num_ooms": 2,
}


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The counters of `cuda:0`, which a reset of the peaks changes as torch does."""
    made = dict(COUNTERS)

    def reset(device: Any) -> None:
        assert device == torch.device("cuda", 0)
        for kind in ("allocated", "reserved"):
            made[f"{kind}_bytes.all.peak"] = made[f"{kind}_bytes.all.current"]

    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: made)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(_memory, "_highest", {})
    return made


def test_the_allocators_counters_in_gigabytes(counters: dict[str, int]) -> None:
    assert allocator_stats(torch.device("cuda", 0)) == {
        "allocated_gb": 2.0,
        "peak_allocated_gb": 3.0,
        "reserved_gb": 4.0,
        "peak_reserved_gb": 5.0,
        "alloc_retries": 1.0,
        "ooms": 2.0,
    }


def test_peaks_start_again_and_those_of_the_process_stay(counters: dict[str, int]) -> None:
    assert take_peaks("cuda:0") == (3_000_000_000, 5_000_000_000)
    assert take_peaks("cuda:0") == (2_000_000_000, 4_000_000_000)
    stats = allocator_stats("cuda:0")
    assert (stats["peak_allocated_gb"], stats["peak_reserved_gb"]) == (3.0, 5.0)
    counters["allocated_bytes.all.peak"] = 7_000_000_000
    assert allocator_stats("cuda:0")["peak_allocated_gb"] == 7.0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_device_without_an_allocator_of_its_own_has_no_counters(device: str) -> None:
    assert allocator_counters(device) == allocator_stats(device) == {}
    assert take_peaks(device) is None


def test_a_backend_that_knows_no_counters_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: Any) -> Any:
        raise RuntimeError("not supported by this backend")

    monkeypatch.setattr(torch.accelerator, "memory_stats", refuse)
    assert allocator_stats("xpu:0") == {}


def test_on_mps_there_is_memory_without_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 10**9)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2 * 10**9)
    assert allocator_stats("mps") == {"allocated_gb": 1.0, "reserved_gb": 2.0}
    assert take_peaks("mps") is None


def test_the_peak_of_the_process_is_what_the_system_counts() -> None:
    held = torch.ones(20_000_000)
    found = peak_process_memory()
    assert found is not None and found >= held.nbytes
    assert found == pytest.approx(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, rel=0.1)
