"""MemoryMonitor: peaks every n steps, and a file and a note that say where and why memory ran out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.torchrun import torchrun
from test_budgets import per_step, with_hooks
from tiny import Net, batches, quiet
from torch import Tensor, nn

from hookline import Hook, Module
from hookline.hooks import DeviceStats, MemoryMonitor, _memory, memory_monitor
from hookline.util.errors import HooklineError
from hookline.util.memory import out_of_memory


class Full(nn.Module):
    """Allocates what no machine has: a real failure of the CPU's allocator."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.empty(2**58)[: x.shape[-1]]


class FullBackward(torch.autograd.Function):
    """Raises in the backward what CUDA's allocator raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Late(nn.Module):
    """Fails from the third call on."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase, self.calls, self.full = phase, 0, Full()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls < 3 or self.phase not in ("forward", "backward"):
            return x * 1.0
        return self.full(x) if self.phase == "forward" else FullBackward.apply(x)  # type: ignore[no-any-return]


class FullAdam(torch.optim.Adam):
    """Fails in its third step."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().step(closure)


class Model(Module):
    """Two layers and something between them that fails."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase
        self.encoder, self.late, self.head = nn.Linear(4, 64), Late(phase), nn.Linear(64, 2)

    def training_step(self, batch: Any) -> Any:
        return (self.head(self.late(self.encoder(batch[0]))) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return (FullAdam if self.phase == "update" else torch.optim.Adam)(self.parameters())


def run_out(
    folder: Path, module: Any, *loaders: Any, **options: Any
) -> tuple[BaseException, MemoryMonitor, Any]:
    hook = MemoryMonitor(every=1)
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        quiet(hooks=[hook], run_dir=folder, **options).fit(module, *(loaders or (batches(4),)))
    found = json.loads(hook.snapshot.read_text()) if hook.snapshot is not None else None
    return caught.value, hook, found


@pytest.mark.parametrize(
    ("phase", "modules"),
    [("forward", ["late.full"]), ("backward", ["late.full", "encoder"]), ("update", [])],
    ids=["forward", "backward", "update"],
)
def test_the_file_names_the_module_and_the_step(tmp_path: Path, phase: str, modules: list[str]) -> None:
    error, hook, found = run_out(tmp_path, Model(phase))
    assert hook.snapshot == tmp_path / "memory" / "out-of-memory-step-2-rank-0.json"
    assert (found["phase"], found["possible_modules"]) == (phase, modules)
    assert found["module"] == (modules[0] if len(modules) == 1 else None)
    assert (found["step"], found["epoch"], found["batch_idx"], found["rank"], found["stage"]) == (
        2,
        0,
        2,
        0,
        "fit",
    )
    assert found["batch"] == "float32[3, 4], float32[3, 2]"
    assert found["where"].startswith(__file__)
    # what holds the memory: the encoder has 4*64 + 64 numbers, each as weight, gradient and two states of Adam
    encoder = next(each for each in found["modules"] if each["module"] == "encoder")
    assert encoder["class"] == "Linear" and encoder["parameters"] == pytest.approx(320 * 4 / 1e6)
    # two numbers of Adam count its steps
    assert encoder["optimizer"] == pytest.approx((2 * 320 + 2) * 4 / 1e6)
    assert [each["mb"] for each in found["modules"]] == sorted(
        (each["mb"] for each in found["modules"]), reverse=True
    )
    assert len(found["tensors"]) == hook.top == 20
    assert [each["mb"] for each in found["tensors"]] == sorted(
        (each["mb"] for each in found["tensors"]), reverse=True
    )
    assert found["peak_process_bytes"] > 0 and found["allocator"] == {}
    note = "\n".join(error.__notes__)
    assert str(hook.snapshot) in note and "epoch 0, batch 2, step 2, rank 0 on cpu" in note
    assert "float32[3, 4], float32[3, 2]" in note and "bf16-mixed" in note
    assert ("activation_checkpointing=True" in note) is (phase != "update")
    if phase == "forward":
        assert "in the forward of late.full (Full)" in note
        assert (
            type(error) is RuntimeError and "DefaultCPUAllocator: can't allocate memory" in found["message"]
        )


def test_tensors_have_the_names_of_parameters_gradients_and_states(tmp_path: Path) -> None:
    big = nn.Linear(4096, 512)
    module = Model("forward")
    module.add_module("big", big)  # 8 MB, larger than whatever other tests have left behind
    hook = MemoryMonitor(top=200)
    with pytest.raises(RuntimeError):
        quiet(hooks=[hook], run_dir=tmp_path).fit(module, batches(4))
    assert hook.snapshot is not None
    rows = {each["name"]: each for each in json.loads(hook.snapshot.read_text())["tensors"]}
    assert rows["big.weight (parameters)"]["shape"] == [512, 4096]
    assert rows["big.weight (parameters)"]["dtype"] == "float32"


def test_a_validation_a_hook_and_a_cause_are_named_too(tmp_path: Path) -> None:
    class Validates(Model):
        def validation_step(self, batch: Any) -> None:
            self.late.full(batch[0])

    _, _, found = run_out(tmp_path / "validation", Validates(""), batches(4), batches(1))
    assert (found["phase"], found["module"], found["step"]) == ("forward", "late.full", 4)

    class Hungry(Hook):
        def on_step_end(self, step: int) -> None:
            if step == 1:
                raise MemoryError("no room for the histogram")

    hook = MemoryMonitor()
    with pytest.raises(MemoryError) as caught:
        quiet(hooks=[Hungry(), hook], run_dir=tmp_path / "hook").fit(Net(), batches(2))
    assert hook.snapshot is not None
    assert json.loads(hook.snapshot.read_text())["hook"] == "hook 'hungry'"
    assert any(
        each.startswith("Out of memory in hook 'hungry', on_step_end") for each in caught.value.__notes__
    )

    class Wraps(Model):
        def training_step(self, batch: Any) -> Any:
            try:
                return super().training_step(batch)
            except RuntimeError as error:
                raise ValueError("the step failed") from error

    hook = MemoryMonitor()
    with pytest.raises(ValueError, match="the step failed") as wrapped:
        quiet(hooks=[hook], run_dir=tmp_path / "cause").fit(Wraps("forward"), batches(4))
    assert hook.snapshot is not None and any("late.full" in each for each in wrapped.value.__notes__)


def test_other_errors_leave_no_file(tmp_path: Path) -> None:
    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("shapes do not fit")

    error, hook, _ = run_out(tmp_path, Wrong())
    assert hook.snapshot is None and not (tmp_path / "memory").exists()
    assert not any("Out of memory" in each for each in error.__notes__)


class Quotes(HooklineError, RuntimeError):
    """An error of Hookline about another rank."""


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (Quotes("Rank 1 has failed: OutOfMemoryError: CUDA out of memory."), False),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_counts_as_out_of_memory(error: BaseException, is_one: bool) -> None:
    assert (out_of_memory(error) is error) is is_one


def test_the_error_of_the_run_survives_whatever_fails_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*args: Any) -> Any:
        raise MemoryError("nor here")

    monkeypatch.setattr(memory_monitor, "live_tensors", no_memory)
    error, _, found = run_out(tmp_path / "one", Model("backward"))
    assert isinstance(error, torch.OutOfMemoryError)
    assert found["tensors"] == {"problem": "MemoryError: nor here"} and found["modules"]

    monkeypatch.setattr(memory_monitor, "find_failed_place", no_memory)
    monkeypatch.setattr(MemoryMonitor, "_write", no_memory)
    error, hook, _ = run_out(tmp_path / "two", Model("backward"))
    assert isinstance(error, torch.OutOfMemoryError) and hook.snapshot is None
    assert "the snapshot is missing: MemoryError: nor here" in caplog.text
    assert any(each.startswith("Out of memory in the fit") for each in error.__notes__)


def test_torchs_own_snapshot_is_json_that_can_be_pickled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no CUDA device to test on: the functions of its backend return what they return there."""
    segments = {"segments": [{"device": 0, "address": 2**40, "blocks": [{"size": 512, "state": "inactive"}]}]}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: segments)
    monkeypatch.setattr(torch.cuda.memory, "memory_summary", lambda device: f"| memory of {device} |")
    real = memory_monitor._of_backend
    monkeypatch.setattr(
        memory_monitor, "_of_backend", lambda device, function: real(torch.device("cuda", 0), function)
    )
    _, hook, found = run_out(tmp_path, Model("forward"))
    assert hook.snapshot is not None and found["memory_summary"] == "| memory of cuda:0 |"
    file = hook.snapshot.with_name("out-of-memory-step-2-rank-0-allocator.json")
    assert json.loads(file.read_text()) == segments
    assert real(torch.device("cpu"), "_snapshot") is None


# ---- peaks -------------------------------------------------------------------------------------------------


def logged(folder: Path, prefix: str = "memory/") -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {
        row["step"]: {name: value for name, value in row["metrics"].items() if name.startswith(prefix)}
        for row in rows
        if row["type"] == "metrics" and any(name.startswith(prefix) for name in row["metrics"])
    }


def test_on_the_cpu_the_peak_of_the_process_is_logged(tmp_path: Path) -> None:
    quiet(hooks=[MemoryMonitor(every=2)], logger=True, run_dir=tmp_path).fit(Net(), batches(5))
    rows = logged(tmp_path)
    assert list(rows) == [2, 4]
    assert all(
        set(row) == {"memory/peak_process_gb"} and row["memory/peak_process_gb"] > 0.01
        for row in rows.values()
    )


class Allocator:
    """An allocator with torch's counters: there is no accelerator to test on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        patch.setattr(_memory, "allocator_counters", self.counters)
        patch.setattr(_memory, "_highest", {})
        patch.setattr(torch.accelerator, "reset_peak_memory_stats", self.reset)

    def counters(self, device: Any) -> dict[str, int]:
        return {
            f"{kind}_bytes.all.{key}": value * factor
            for kind, factor in (("allocated", 10**9), ("reserved", 2 * 10**9))
            for key, value in (("current", self.now), ("peak", self.peak))
        }

    def reset(self, device: Any) -> None:
        self.peak = self.now

    def touch(self, gigabytes: int) -> None:
        """Allocate and free."""
        self.peak = max(self.peak, self.now + gigabytes)


class Touches(Hook):
    """Uses 10 GB plus the step in a forward, 20 in a backward, 5 in an update, and 40 after step 2."""

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self.allocator = allocator

    def on_train_batch_start(self, step: int) -> None:
        self.allocator.touch(10 + step)

    def on_before_backward(self, step: int) -> None:
        self.allocator.touch(10 + step)  # the forward

    def on_after_backward(self, step: int) -> None:
        self.allocator.touch(20 + step)

    def on_before_optimizer_step(self, step: int) -> None:
        self.allocator.touch(5 + step)

    def on_train_batch_end(self, step: int) -> None:
        if step == 3:
            self.allocator.touch(40)


@pytest.mark.parametrize("phases", [False, True], ids=["whole", "phases"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_peaks_of_each_interval_and_of_each_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phases: bool, accumulate: int
) -> None:
    allocator = Allocator(monkeypatch)
    quiet(
        hooks=[Touches(allocator), MemoryMonitor(every=2, phases=phases), DeviceStats(every=2)],
        logger=True,
        run_dir=tmp_path,
        accumulate_grad_batches=accumulate,
    ).fit(Net(), batches(6 * accumulate))
    rows = logged(tmp_path)
    assert list(rows) == [2, 4, 6]
    assert [row["memory/peak_allocated_gb"] for row in rows.values()] == [21.0, 40.0, 25.0]
    assert [row["memory/peak_reserved_gb"] for row in rows.values()] == [42.0, 80.0, 50.0]
    assert [set(row) for row in rows.values()] == 3 * [
        {"memory/peak_allocated_gb", "memory/peak_reserved_gb"}
        | ({f"memory/{each}_peak_gb" for each in ("forward", "backward", "update")} if phases else set())
    ]
    if phases:
        assert [row["memory/forward_peak_gb"] for row in rows.values()] == [11.0, 13.0, 15.0]
        assert [row["memory/backward_peak_gb"] for row in rows.values()] == [21.0, 23.0, 25.0]
        update = [row["memory/update_peak_gb"] for row in rows.values()]
        assert (update[0], update[2]) == (6.0, 10.0)


def test_phases_without_an_accelerator_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(hooks=[MemoryMonitor(every=1, phases=True)])
    trainer.fit(Net(), batches(2))
    assert "phases=True has no effect" in caplog.text
    assert [name for name in trainer.metrics if name.startswith("memory/")] == ["memory/peak_process_gb"]


def test_between_two_reports_a_step_costs_one_call() -> None:
    class Returns(Hook):
        def on_step_end(self, step: int) -> None:
            pass

    costs = [
        per_step(lambda data, made=made: with_hooks(made())(data))
        for made in (Returns, lambda: MemoryMonitor(10**6))
    ]
    assert costs[0] == costs[1]


TWO_RANKS = """
    import sys, torch, json
    from pathlib import Path
    from hookline import Trainer
    from hookline.hooks import MemoryMonitor
    from tiny import Net, batches

    class One(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1 and self.trainer.state.rank == 1:
                torch.empty(2 ** 58)
            return super().training_step(batch, batch_idx)

    hook = MemoryMonitor(every=1)
    trainer = Trainer(strategy="ddp", device="cpu", hooks=[hook], run_dir="run", max_epochs=1, enable_progress_bar=False,
                      checkpoint=False)
    try:
        trainer.fit(One(), batches(4))
    except Exception as error:
        print("CAUGHT", trainer.state.rank, hook.snapshot)
"""


def test_on_two_ranks_the_one_that_ran_out_writes_the_file(tmp_path: Path) -> None:
    done = torchrun(TWO_RANKS, tmp_path)
    assert done.lines("CAUGHT") == ["0 None", "1 run/memory/out-of-memory-step-1-rank-1.json"], done.output
    found = json.loads((tmp_path / "run/memory/out-of-memory-step-1-rank-1.json").read_text())
    assert (found["rank"], found["step"], found["phase"], found["possible_modules"]) == (
        1,
        1,
        "forward",
        ["the module itself"],
    )
