"""Log the use of the CPU, of memory and of CUDA's allocator."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch

from hookline.engine.checks import Count, checked_parameters
from hookline.engine.hook import Hook

GB = 1e9


class DeviceStats(Hook):
    """Logs `cpu/...` and, on CUDA, `cuda/...` every n steps.

    It does not synchronize with the device and needs no package: the numbers come from the operating system
    and from the allocator. Numbers that a system does not provide are left out.
    """

    tier = "builtin"
    on_error = "disable"

    @checked_parameters
    def __init__(self, every: Annotated[int, Count(1)] = 50, cpu: bool = True) -> None:
        """`every`: steps between two reports. `cpu=False`: only the accelerator."""
        self.every = every
        self.cpu = cpu
        self._meter = CPUMeter()

    def on_train_start(self) -> None:
        self._meter = CPUMeter()  # shares of time start here

    def on_step_end(self, trainer: Any, step: int, device: Any) -> None:
        if step % self.every:
            return
        if self.cpu:
            trainer.log_dict({f"cpu/{name}": value for name, value in self._meter.read().items()})
        if torch.device(device).type == "cuda":
            trainer.log_dict({f"cuda/{name}": value for name, value in cuda_stats(device).items()})


class CPUMeter:
    """Shares of processor time since the last reading, and memory now."""

    def __init__(self) -> None:
        self._last = time.monotonic(), time.process_time(), _system_times()

    def read(self) -> dict[str, float]:
        """Return the process's use of one core, the system's use of all cores, and memory in gigabytes."""
        before, self._last = self._last, (time.monotonic(), time.process_time(), _system_times())
        spent, used = self._last[0] - before[0], self._last[1] - before[1]
        stats = {"percent": 100 * used / max(spent, 1e-9)}
        if before[2] is not None and self._last[2] is not None:
            total, idle = (now - then for now, then in zip(self._last[2], before[2], strict=True))
            if total > 0:  # the system's clock ticks 100 times a second
                stats["system_percent"] = 100 * (1 - idle / total)
        return {**stats, **memory()}


def memory() -> dict[str, float]:
    """Return the process's memory and its peak, and the use of the machine's memory."""
    stats: dict[str, float] = {}
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        stats["memory_gb"] = pages * os.sysconf("SC_PAGE_SIZE") / GB
    except (OSError, ValueError, IndexError):
        pass  # no such file outside Linux
    try:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        stats["peak_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GB
    except ImportError:
        pass  # not on Windows
    try:
        rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        sizes = {row[0].rstrip(":"): int(row[1]) for row in rows}
        stats["system_memory_percent"] = 100 * (1 - sizes["MemAvailable"] / sizes["MemTotal"])
    except (OSError, ValueError, KeyError, IndexError):
        pass
    return stats


def cuda_stats(device: Any) -> dict[str, float]:
    """Return the caching allocator's memory, its peaks, retries and failures."""
    stats = torch.cuda.memory_stats(device)
    return {
        "allocated_gb": stats.get("allocated_bytes.all.current", 0) / GB,
        "peak_allocated_gb": stats.get("allocated_bytes.all.peak", 0) / GB,
        "reserved_gb": stats.get("reserved_bytes.all.current", 0) / GB,
        "peak_reserved_gb": stats.get("reserved_bytes.all.peak", 0) / GB,
        "alloc_retries": float(stats.get("num_alloc_retries", 0)),
        "ooms": float(stats.get("num_ooms", 0)),
    }


def _system_times() -> tuple[int, int] | None:
    """Return the total and the idle time of all processors, in ticks."""
    try:
        numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]
    except (OSError, ValueError, IndexError):
        return None
