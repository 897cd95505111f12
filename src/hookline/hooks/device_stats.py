"""Log the use of the CPU, memory, disks and network (psutil), of the GPU (NVML), and of its allocator."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch

from hookline.engine.checks import Count, checked_parameters
from hookline.engine.hook import Hook
from hookline.hooks._memory import GB, allocator_stats, peak_process_memory
from hookline.util.errors import HookError, install_command

EXTRA = install_command("device-stats")
MB = 1e6
LARGEST = ("_gb", "memory_percent", "swap_percent", "temperature_c")
"""How names end whose value is the largest of all ranks; others are the mean."""
log = logging.getLogger("hookline")


class DeviceStats(Hook):
    """Logs every n steps what the machine does: `cpu/...`, `disk/...` and `network/...` with psutil, on a GPU
    `gpu/...` with NVML, and `cuda/...` (or another backend's name) of torch's allocator.

    Names and units are the same on Linux, macOS and Windows; a number that a machine does not have is left
    out. It does not wait for the device. Each rank reads its own process and GPU. The log has the largest
    memory and temperature of all ranks, and the mean of the rest.
    """

    tier = "builtin"
    observes = True
    on_error = "disable"

    @checked_parameters
    def __init__(self, every: Annotated[int, Count(1)] = 50, cpu: bool = True) -> None:
        """every: steps between two reports. cpu: also measure the machine; False: only the accelerator,
        without psutil.
        """
        if cpu and importlib.util.find_spec("psutil") is None:
            raise HookError(
                f"DeviceStats reads the CPU with psutil, which is not installed: {EXTRA}. "
                "DeviceStats(cpu=False) reports only the accelerator."
            )
        self.every = every
        self.cpu = cpu
        self._meters: list[Callable[[], dict[str, float]]] | None = None
        self._gpu: GPUMeter | None = None

    def on_train_start(self, device: Any, rank: int) -> None:
        self._begin(device, rank)  # rates and shares of time start here

    def on_step_end(self, trainer: Any, step: int, device: Any, rank: int) -> None:
        if step % self.every:
            return
        if self._meters is None:  # added during the run
            self._begin(device, rank)
            return
        for read in self._meters:
            for name, value in read().items():
                trainer.log(name, value, reduce="max" if name.endswith(LARGEST) else "mean")

    def teardown(self) -> None:
        self._meters = None
        gpu, self._gpu = self._gpu, None
        if gpu is not None:
            gpu.close()

    def _begin(self, device: Any, rank: int) -> None:
        self.teardown()
        device = torch.device(device)
        self._meters = [SystemMeter().read] if self.cpu else []
        if device.type == "cuda" and torch.version.hip is None:
            self._gpu = open_gpu(device, rank)
        if self._gpu is not None:
            self._meters.append(self._gpu.read)
        if allocator_stats(device):
            self._meters.append(
                lambda: {f"{device.type}/{key}": value for key, value in allocator_stats(device).items()}
            )


class SystemMeter:
    """The process and the machine since the last reading, by what psutil has on every system."""

    def __init__(self) -> None:
        import psutil  # type: ignore[import-untyped,unused-ignore]

        self._psutil: Any = psutil
        self._process = psutil.Process()
        self._totals: dict[str, int] = {}
        self._time = 0.0
        self.read()  # psutil's first shares of time are zero

    def read(self) -> dict[str, float]:
        """Return shares of processor time, memory in gigabytes, and megabytes per second of all disks and
        networks.
        """
        stats: dict[str, float] = {}
        for group in (self._processor, self._memory, self._rates):
            with contextlib.suppress(OSError, RuntimeError, self._psutil.Error), warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", RuntimeWarning
                )  # psutil, about counters that a container hides
                stats.update(group())
        return stats

    def _processor(self) -> Iterator[tuple[str, float]]:
        yield "cpu/percent", self._process.cpu_percent()  # of one core
        yield "cpu/system_percent", self._psutil.cpu_percent()  # of all cores

    def _memory(self) -> Iterator[tuple[str, float]]:
        yield "cpu/memory_gb", self._process.memory_info().rss / GB
        if (peak := peak_process_memory()) is not None:
            yield "cpu/peak_memory_gb", peak / GB
        yield "cpu/system_memory_percent", self._psutil.virtual_memory().percent
        yield "cpu/swap_percent", self._psutil.swap_memory().percent

    def _rates(self) -> Iterator[tuple[str, float]]:
        disks, networks = self._psutil.disk_io_counters(), self._psutil.net_io_counters()
        totals: dict[str, int] = {}
        if disks is not None:  # a machine without disks of its own
            totals |= {"disk/read_mb_per_sec": disks.read_bytes, "disk/write_mb_per_sec": disks.write_bytes}
        if networks is not None:
            totals |= {
                "network/received_mb_per_sec": networks.bytes_recv,
                "network/sent_mb_per_sec": networks.bytes_sent,
            }
        before, self._totals = self._totals, totals
        now = time.monotonic()
        seconds, self._time = max(now - self._time, 1e-9), now
        for name, total in totals.items():
            if name in before:
                yield name, max(total - before[name], 0) / MB / seconds


class GPUMeter:
    """One GPU by NVML. Its UUID finds it, because NVML's numbers ignore CUDA_VISIBLE_DEVICES and MIG."""

    def __init__(self, nvml: Any, device: torch.device) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        try:
            self._handle = self._find(str(torch.cuda.get_device_properties(device).uuid))
        except BaseException:
            self.close()
            raise

    def _find(self, uuid: str) -> Any:
        for kind in ("GPU", "MIG"):
            with contextlib.suppress(self._nvml.NVMLError):
                return self._nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
        raise RuntimeError(f"NVML has no GPU with the UUID {uuid}")

    def read(self) -> dict[str, float]:
        """Return use, memory of all processes, power and temperature, as far as this GPU provides them."""
        stats: dict[str, float] = {}
        for group in (self._use, self._memory, self._power, self._temperature):
            with contextlib.suppress(self._nvml.NVMLError):
                stats.update(group())
        return stats

    def _use(self) -> Iterator[tuple[str, float]]:
        yield "gpu/percent", float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)

    def _memory(self) -> Iterator[tuple[str, float]]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        yield "gpu/memory_gb", memory.used / GB
        yield "gpu/memory_percent", 100 * memory.used / max(memory.total, 1)

    def _power(self) -> Iterator[tuple[str, float]]:
        yield "gpu/power_watts", self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000

    def _temperature(self) -> Iterator[tuple[str, float]]:
        sensor = self._nvml.NVML_TEMPERATURE_GPU
        yield "gpu/temperature_c", float(self._nvml.nvmlDeviceGetTemperature(self._handle, sensor))

    def close(self) -> None:
        """Release NVML."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def open_gpu(device: torch.device, rank: int) -> GPUMeter | None:
    """Return the meter of a GPU; None if NVML is missing or does not know it, with a warning of rank zero."""
    try:
        import pynvml  # type: ignore[import-untyped,unused-ignore]

        return GPUMeter(pynvml, device)
    except ImportError:
        problem = f"nvidia-ml-py is not installed: {EXTRA}"
    except Exception as error:  # NVMLError, or a driver without NVML
        problem = f"{type(error).__name__}: {error}"
    if rank == 0:
        log.warning("DeviceStats logs no gpu/...: %s", problem)
    return None
