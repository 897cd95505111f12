"""Read the memory of an accelerator's allocator and of this process, without waiting for the device."""

from __future__ import annotations

import sys
from typing import Any

import torch

GB = 1e9
PEAKS = ("allocated_bytes.all.peak", "reserved_bytes.all.peak")
_highest: dict[torch.device, tuple[int, int]] = {}
"""The highest peaks of each device before its counters were reset."""


def allocator_counters(device: Any) -> dict[str, int]:
    """Return the counters of the device's caching allocator; empty if it has none, as on the CPU."""
    device = torch.device(device)
    if device.type in ("cpu", "meta"):
        return {}
    if device.type == "mps":  # its allocator keeps no peaks
        return {
            "allocated_bytes.all.current": torch.mps.current_allocated_memory(),
            "reserved_bytes.all.current": torch.mps.driver_allocated_memory(),
        }
    try:
        return dict(torch.accelerator.memory_stats(device))
    except (RuntimeError, ValueError, AttributeError):  # a backend without these counters
        return {}


def allocator_stats(device: Any) -> dict[str, float]:
    """Return the allocator's memory in gigabytes, its peaks since the process began, retries and failures."""
    counters = allocator_counters(device)
    if not counters:
        return {}
    before = _highest.get(torch.device(device), (0, 0))
    peaks = {
        f"peak_{name}_gb": max(counters[key], high) / GB
        for name, key, high in zip(("allocated", "reserved"), PEAKS, before, strict=True)
        if key in counters
    }
    return {
        "allocated_gb": counters.get("allocated_bytes.all.current", 0) / GB,
        "reserved_gb": counters.get("reserved_bytes.all.current", 0) / GB,
        **peaks,
        **{
            name: float(counters[f"num_{name}"])
            for name in ("alloc_retries", "ooms")
            if f"num_{name}" in counters
        },
    }


def take_peaks(device: Any) -> tuple[int, int] | None:
    """Return the peaks of allocated and reserved bytes since the last call, and start them again.

    None: the allocator has no peaks. `allocator_stats` still returns the peaks of the whole process.
    """
    counters = allocator_counters(device)
    if not all(key in counters for key in PEAKS):
        return None
    allocated, reserved = (counters[key] for key in PEAKS)
    device = torch.device(device)
    before = _highest.get(device, (0, 0))
    _highest[device] = (max(allocated, before[0]), max(reserved, before[1]))
    torch.accelerator.reset_peak_memory_stats(device)
    return allocated, reserved


def peak_process_memory() -> int | None:
    """Return the most bytes of memory that this process has had; None if the system does not know."""
    try:
        import resource
    except ImportError:  # Windows
        try:
            import psutil  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            return None
        peak: int | None = getattr(psutil.Process().memory_info(), "peak_wset", None)
        return peak
    # kilobytes, but bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
