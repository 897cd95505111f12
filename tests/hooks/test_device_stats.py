"""DeviceStats: psutil is real here; there is no GPU, so NVML is a library object with what the real one has."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from ranks.torchrun import torchrun
from test_budgets import per_step, with_hooks
from tiny import Net, batches, quiet

from hookline import Hook
from hookline.hooks import DeviceStats, _memory, device_stats
from hookline.hooks.device_stats import GPUMeter, SystemMeter, open_gpu
from hookline.util.errors import HookError, OptionError

KEYS = {
    "cpu/percent",
    "cpu/system_percent",
    "cpu/memory_gb",
    "cpu/peak_memory_gb",
    "cpu/system_memory_percent",
    "cpu/swap_percent",
    "disk/read_mb_per_sec",
    "disk/write_mb_per_sec",
    "network/received_mb_per_sec",
    "network/sent_mb_per_sec",
}


def test_the_machine_is_logged_every_so_many_steps(tmp_path: Path) -> None:
    quiet(logger=True, run_dir=tmp_path, hooks=[DeviceStats(every=2)]).fit(Net(), batches(5))
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    found = [
        (row["step"], row["metrics"])
        for row in rows
        if row["type"] == "metrics" and "cpu/percent" in row["metrics"]
    ]
    assert [step for step, _ in found] == [2, 4]
    has_disks = psutil.disk_io_counters() is not None  # not in every container
    expected = {name for name in KEYS if has_disks or not name.startswith("disk/")}
    for _, metrics in found:
        assert {name for name in metrics if "/" in name and not name.startswith("train/")} == expected
        assert all(metrics[name] >= 0 for name in expected)


def test_memory_is_what_this_process_holds() -> None:
    meter = SystemMeter()
    before = meter.read()
    held = torch.ones(50_000_000)  # 200 MB
    after = meter.read()
    assert 0.15 < after["cpu/memory_gb"] - before["cpu/memory_gb"] < 0.3
    assert after["cpu/peak_memory_gb"] * 1.01 >= after["cpu/memory_gb"]
    assert 0 < after["cpu/system_memory_percent"] < 100
    del held


def test_rates_are_what_was_added_since_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    read = iter([0, 3_000_000, 3_000_000, 1_000_000])
    sent = iter([5_000_000, 6_000_000, 26_000_000, 26_000_000])
    monkeypatch.setattr(
        psutil, "disk_io_counters", lambda: SimpleNamespace(read_bytes=next(read), write_bytes=7)
    )
    monkeypatch.setattr(
        psutil, "net_io_counters", lambda: SimpleNamespace(bytes_sent=next(sent), bytes_recv=9)
    )
    monkeypatch.setattr(
        device_stats, "time", SimpleNamespace(monotonic=iter([10.0, 12.0, 22.0, 23.0]).__next__)
    )
    meter = SystemMeter()
    first, second, third = meter.read(), meter.read(), meter.read()
    assert (first["disk/read_mb_per_sec"], first["network/sent_mb_per_sec"]) == (1.5, 0.5)
    assert (second["disk/read_mb_per_sec"], second["network/sent_mb_per_sec"]) == (0.0, 2.0)
    assert third["disk/read_mb_per_sec"] == 0.0  # a counter that began again
    assert (first["disk/write_mb_per_sec"], first["network/received_mb_per_sec"]) == (0.0, 0.0)


class MacMemory(NamedTuple):
    """What `memory_info` has on macOS."""

    rss: int
    vms: int
    pfaults: int = 0
    pageins: int = 0


class WindowsMemory(NamedTuple):
    """What `memory_info` has on Windows, or the part of it that matters."""

    rss: int
    vms: int
    peak_wset: int


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_names_are_the_same_on_macos_and_windows(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What psutil does not have there is taken away."""
    for name in (
        ("io_counters", "num_fds", "memory_full_info") if system == "darwin" else ("num_fds", "rlimit")
    ):
        monkeypatch.delattr(psutil.Process, name, raising=False)
    for name in ("sensors_temperatures", "sensors_fans", "getloadavg"):
        monkeypatch.delattr(psutil, name, raising=False)
    monkeypatch.delattr(psutil, "cpu_freq", raising=False)
    monkeypatch.setattr(psutil, "cpu_percent", lambda: 20.0)  # the one here computes with fields of Linux
    monkeypatch.delattr(psutil, "cpu_times")  # no iowait there
    monkeypatch.setattr(
        psutil,
        "disk_io_counters",
        lambda: SimpleNamespace(read_bytes=1, write_bytes=1, read_count=1, write_count=1),
    )
    memory: Any = (
        MacMemory(10**9, 2 * 10**9) if system == "darwin" else WindowsMemory(10**9, 2 * 10**9, 3 * 10**9)
    )
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: memory)
    monkeypatch.setattr(sys, "platform", system)
    if system == "win32":
        monkeypatch.setitem(sys.modules, "resource", None)
    found = SystemMeter().read()
    assert set(found) == KEYS
    assert found["cpu/memory_gb"] == 1.0
    if system == "win32":
        assert found["cpu/peak_memory_gb"] == 3.0


def test_what_a_machine_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied() -> Any:
        raise psutil.AccessDenied(pid=os.getpid())

    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    assert {name for name in SystemMeter().read() if not name.startswith("cpu/")} == {
        "network/received_mb_per_sec",
        "network/sent_mb_per_sec",
    }
    monkeypatch.setattr(psutil, "virtual_memory", denied)
    assert set(SystemMeter().read()) == {
        "cpu/percent",
        "cpu/system_percent",
        "cpu/memory_gb",
        "cpu/peak_memory_gb",
        "network/received_mb_per_sec",
        "network/sent_mb_per_sec",
    }


def test_without_psutil_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "psutil" else real(name))
    with pytest.raises(HookError, match=r'pip install "hookline\[device-stats\]".*cpu=False'):
        DeviceStats()
    trainer = quiet(hooks=[DeviceStats(every=1, cpu=False)])
    trainer.fit(Net(), batches(1))
    assert not any(name.startswith("cpu/") for name in trainer.metrics)


# ---- the GPU -----------------------------------------------------------------------------------------------


class NVML:
    """The part of `pynvml` that is used, with one whole GPU and one part of another (MIG)."""

    class NVMLError(Exception):
        """Its base of errors."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, known: tuple[str, ...] = ("GPU-aaaa", "MIG-bbbb")) -> None:
        self.known, self.open, self.broken = known, 0, set[str]()

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return self._known(uuid, uuid in self.known, uuid)

    def _known(self, handle: str, is_supported: bool, value: Any) -> Any:
        if not is_supported:
            raise self.NVMLError(f"not supported: {handle}")
        return value

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        return self._known(handle, not handle.startswith("MIG"), SimpleNamespace(gpu=87, memory=40))

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(total=80 * 10**9, used=20 * 10**9, free=60 * 10**9)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return self._known(handle, not handle.startswith("MIG"), 312_500)  # type: ignore[no-any-return]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        return 61


def as_device(monkeypatch: pytest.MonkeyPatch, uuid: str) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
    return torch.device("cuda", 0)


def test_a_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = NVML()
    meter = GPUMeter(nvml, as_device(monkeypatch, "aaaa"))
    assert meter.read() == {
        "gpu/percent": 87.0,
        "gpu/memory_gb": 20.0,
        "gpu/memory_percent": 25.0,
        "gpu/power_watts": 312.5,
        "gpu/temperature_c": 61.0,
    }
    meter.close()
    assert nvml.open == 0


def test_a_part_of_a_gpu_leaves_out_what_nvml_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    found = GPUMeter(NVML(), as_device(monkeypatch, "bbbb")).read()
    assert set(found) == {"gpu/memory_gb", "gpu/memory_percent", "gpu/temperature_c"}


@pytest.mark.parametrize("rank", [0, 1])
def test_without_nvml_rank_zero_says_so_once(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = as_device(monkeypatch, "cccc")
    nvml = NVML()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert open_gpu(device, rank) is None and nvml.open == 0
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpu(device, rank) is None
    said = [record.getMessage() for record in caplog.records]
    assert [("UUID cccc" in each, "hookline[device-stats]" in each) for each in said] == (
        [] if rank else [(True, False), (False, True)]
    )


def test_on_cuda_the_gpu_and_the_allocator_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = NVML()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    counters = {
        "allocated_bytes.all.current": 2 * 10**9,
        "reserved_bytes.all.current": 4 * 10**9,
        "num_ooms": 2,
    }
    monkeypatch.setattr(_memory, "allocator_counters", lambda device: counters)
    device = as_device(monkeypatch, "aaaa")
    logged: dict[str, tuple[float, str]] = {}

    class Trainer:
        @staticmethod
        def log(name: str, value: float, reduce: str) -> None:
            logged[name] = (value, reduce)

    hook = DeviceStats(every=1, cpu=False)
    hook.on_train_start(device, 0)
    hook.on_step_end(Trainer(), 1, device, 0)
    hook.teardown()
    assert nvml.open == 0
    assert logged == {
        "gpu/percent": (87.0, "mean"),
        "gpu/memory_gb": (20.0, "max"),
        "gpu/memory_percent": (25.0, "max"),
        "gpu/power_watts": (312.5, "mean"),
        "gpu/temperature_c": (61.0, "max"),
        "cuda/allocated_gb": (2.0, "max"),
        "cuda/reserved_gb": (4.0, "max"),
        "cuda/ooms": (2.0, "mean"),
    }


# ---- cost, ranks, settings ---------------------------------------------------------------------------------


def test_a_hook_that_is_added_during_the_run_reports_from_its_second_interval_on() -> None:
    trainer = quiet()
    trainer.on("on_step_end", every="1 steps")(
        lambda step: trainer.add_hook(DeviceStats(every=1)) if step == 1 else None
    )
    trainer.fit(Net(), batches(4))
    assert "cpu/percent" in trainer.metrics


def test_between_two_reports_a_step_costs_one_call() -> None:
    class Returns(Hook):
        def on_step_end(self, step: int) -> None:
            pass

    assert per_step(lambda data: with_hooks(DeviceStats(10**6))(data)) == per_step(
        lambda data: with_hooks(Returns())(data)
    )


TWO_RANKS = """
    import torch
    from hookline import Trainer
    from hookline.hooks import DeviceStats
    from tiny import Net, batches

    trainer = Trainer(strategy="ddp", device="cpu", hooks=[DeviceStats(every=2)], run_dir="run", max_epochs=1,
                      log_every_n_steps=2, enable_progress_bar=False, checkpoint=False)
    held = torch.ones(100_000_000) if int(__import__("os").environ["RANK"]) else None  # 400 MB on rank 1
    trainer.fit(Net(), batches(8))
    import psutil
    print("HOLDS", trainer.state.rank, psutil.Process().memory_info().rss / 1e9)
    print("LOGGED", trainer.metrics["cpu/memory_gb"])
"""


def test_of_two_ranks_the_one_with_more_memory_is_logged(tmp_path: Path) -> None:
    done = torchrun(TWO_RANKS, tmp_path)
    first, second = (float(line.split()[1]) for line in done.lines("HOLDS"))
    assert second > first + 0.3, done.output
    for line in done.lines("LOGGED"):
        assert float(line) == pytest.approx(second, abs=0.15)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": "5 steps"}, {"cpu": None}], ids=str)
def test_wrong_parameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"DeviceStats: {next(iter(wrong))}="):
        DeviceStats(**wrong)
