"""One GPU: no device syncs in the loop, exact resumes with a scaler and the device's random numbers, memory, streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.accelerator import DEVICE, ON_GPU, KeepsScale, Net, batches, made, quiet, same, weights
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hookline import Hook, load_weights
from hookline.hooks import DeviceStats, MemoryMonitor

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="the CPU has nothing like it")


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    yield
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()


def test_a_run_without_a_device_uses_the_accelerator() -> None:
    trainer = quiet(device="auto" if ON_GPU else DEVICE)
    module = made()
    trainer.fit(module, batches(2))
    assert trainer.strategy.device.type == next(module.parameters()).device.type == DEVICE


# ---- no device syncs --------------------------------------------------------------------------------------------------


class ForbidsSyncs(Hook):
    """Makes torch raise at a device sync, from the fifth batch on: the first ones allocate."""

    def on_train_batch_start(self, batch_idx: int) -> None:
        if ON_GPU and batch_idx == 5:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_epoch_end(self) -> None:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")


class Logs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("error", loss, on_epoch=True)
        return loss


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}],
    ids=["plain", "bf16", "accumulated"],
)
def test_no_step_waits_for_the_device(options: dict[str, Any]) -> None:
    module = Logs()
    trainer = quiet(hooks=[ForbidsSyncs()], log_every_n_steps=10**6, **options)
    trainer.fit(module, batches(20, pinned=True))
    assert trainer.state.batches_seen == 20 and trainer.metrics["error_epoch"] > 0


@needs_gpu
def test_a_hook_that_waits_for_the_device_would_be_found() -> None:
    class Reads(Hook):
        def on_train_batch_end(self, module: Any) -> None:
            next(module.parameters()).sum().item()

    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        quiet(hooks=[ForbidsSyncs(), Reads()]).fit(made(), batches(20, pinned=True))


# ---- batches ------------------------------------------------------------------------------------------------------------


class SeesBatches(Hook):
    """Keeps where batches are before and after they are moved."""

    def __init__(self) -> None:
        self.pinned: list[bool] = []
        self.devices: set[str] = set()

    def on_before_batch_transfer(self, batch: Any) -> None:
        self.pinned.append(batch[0].is_pinned() if ON_GPU else True)

    def on_train_batch_start(self, batch: Any) -> None:
        self.devices.add(batch[0].device.type)


def test_pinned_batches_of_workers_reach_the_device() -> None:
    inputs, targets = (torch.cat(parts) for parts in zip(*batches(8), strict=True))
    seen = SeesBatches()
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, num_workers=1, pin_memory=ON_GPU)
    module, plain = made(), made()
    quiet(hooks=[seen]).fit(module, loader)
    quiet().fit(plain, batches(8))
    assert seen.pinned == [True] * 8 and seen.devices == {DEVICE}
    assert same(weights(module), weights(plain))


def test_batches_that_a_thread_prefetches_and_moves_are_those_of_the_loader() -> None:
    """The thread copies while the model computes; large batches would show a buffer that is used twice."""
    found = []
    for ahead in (0, 3):
        module = made()
        quiet(prefetch_batches=ahead, max_epochs=2).fit(module, batches(30, size=4096, pinned=True))
        found.append(weights(module))
    assert same(*found)


# ---- exact resumes ------------------------------------------------------------------------------------------------------


class SavesAt(Hook):
    """Asks for a checkpoint after a batch of the first epoch."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer: Any, epoch: int, batch_idx: int) -> None:
        if (epoch, batch_idx) == (0, self.batch):
            trainer.save_checkpoint(self.path)


def test_the_random_numbers_of_the_device_continue_after_a_resume(tmp_path: Path) -> None:
    path, whole = tmp_path / "middle", made(dropout=0.5)
    quiet(max_epochs=2, hooks=[SavesAt(3, path)]).fit(whole, batches())
    torch.manual_seed(99)  # a resumed run restores the streams
    resumed = Net(dropout=0.5)
    quiet(max_epochs=2).fit(resumed, batches(), resume=path)
    assert same(weights(whole), weights(resumed))


class Overflows(Net):
    """The third batch has gradients that float16 cannot hold: the scaler skips its update."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.layers(batch[0]), batch[1])
        return loss * 1e30 if batch_idx == 2 else loss


def test_the_scaler_skips_an_overflow_and_resumes_exactly(tmp_path: Path) -> None:
    path, whole, seen = tmp_path / "middle", KeepsScale(), {}
    torch.manual_seed(3)
    module = Overflows()
    trainer = quiet(precision="16-mixed", max_epochs=2, hooks=[whole, SavesAt(3, path)])

    @trainer.on("train_batch_end")
    def keep(epoch: int, batch_idx: int) -> None:
        seen[epoch, batch_idx] = weights(module)

    trainer.fit(module, batches())
    assert same(seen[0, 1], seen[0, 2]) and not same(seen[0, 2], seen[0, 3]), "one update is skipped"
    assert whole.scales[2] == whole.scales[1] / 2
    again, resumed = KeepsScale(), Overflows()
    quiet(precision="16-mixed", max_epochs=2, hooks=[again]).fit(resumed, batches(), resume=path)
    assert again.scales == whole.scales[4:]
    assert same(weights(module), weights(resumed))


@pytest.mark.parametrize("write", ["sync", "async"])
def test_a_checkpoint_of_the_device_resumes_on_the_cpu(write: str, tmp_path: Path) -> None:
    """'async' copies the tensors through pinned memory while the next steps change them."""
    path, module, at_save = tmp_path / "saved", made(), {}
    trainer = quiet(checkpoint={"last": False, "write": write}, hooks=[SavesAt(3, path)])

    @trainer.on("train_batch_end")
    def keep(batch_idx: int) -> None:
        if batch_idx == 3:
            at_save.update(weights(module))

    trainer.fit(module, batches())
    loaded = Net()
    assert load_weights(loaded, path).complete
    assert same(weights(loaded), at_save)
    moved = Net()
    trainer = quiet(device="cpu")
    trainer.fit(moved, batches(), resume=path)
    assert trainer.state.batches_seen == 8
    assert all(
        torch.allclose(value, weights(module)[name], rtol=1e-3, atol=1e-4)
        for name, value in weights(moved).items()
    )


# ---- torch.compile ------------------------------------------------------------------------------------------------------


def test_a_compiled_model_learns_as_an_eager_one() -> None:
    found = []
    # on the CPU without a C++ compiler
    for option in (False, True if ON_GPU else {"backend": "aot_eager"}):
        module = made()
        quiet(compile=option).fit(module, batches(20))
        found.append(weights(module))
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], rtol=1e-3, atol=1e-4), name


# ---- memory -------------------------------------------------------------------------------------------------------------


def logged(folder: Path) -> dict[str, float]:
    """Everything that a run has logged; of each name the last value."""
    found: dict[str, float] = {}
    for line in (folder / "log.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.update(row["metrics"] if row["type"] == "metrics" else {})
    return found


def test_the_memory_monitor_reports_the_peaks_of_the_allocator(tmp_path: Path) -> None:
    trainer = quiet(
        run_dir=tmp_path, logger=True, log_every_n_steps=2, hooks=[MemoryMonitor(every=2, phases=ON_GPU)]
    )
    trainer.fit(Net(width=4096), batches(8, size=1024))
    found = logged(tmp_path)
    if not ON_GPU:
        assert found["memory/peak_process_gb"] > 0
        return
    weights_and_state = 4 * 4 * sum(each.numel() for each in Net(width=4096).parameters()) / 1e9
    highest = torch.cuda.get_device_properties(0).total_memory / 1e9
    assert weights_and_state < found["memory/peak_allocated_gb"] <= found["memory/peak_reserved_gb"] < highest
    for phase in ("forward", "backward", "update"):
        assert 0 < found[f"memory/{phase}_peak_gb"] <= found["memory/peak_reserved_gb"]


def test_running_out_of_memory_is_described(tmp_path: Path) -> None:
    class Hungry(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)
            return super().training_step(batch, batch_idx)

    monitor = MemoryMonitor()
    with pytest.raises(torch.OutOfMemoryError if ON_GPU else RuntimeError) as caught:
        quiet(run_dir=tmp_path, hooks=[monitor]).fit(Hungry(), batches())
    assert any(each.startswith("Out of memory in") for each in caught.value.__notes__)
    assert monitor.snapshot is not None
    described = json.loads(monitor.snapshot.read_text())
    assert described["step"] == 2 and {each["device"].partition(":")[0] for each in described["tensors"]} >= {
        DEVICE
    }


def test_device_stats_report_the_device(tmp_path: Path) -> None:
    trainer = quiet(run_dir=tmp_path, logger=True, log_every_n_steps=2, hooks=[DeviceStats(every=2)])
    trainer.fit(made(), batches(8))
    found = logged(tmp_path)
    assert any(name.startswith("cpu/") for name in found)
    if ON_GPU:
        assert any(name.startswith("cuda/") for name in found)
