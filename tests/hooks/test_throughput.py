"""Throughput: rates over a window, told by a clock that a test can turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline.hooks import throughput
from hookline.hooks.throughput import Throughput
from hookline.util.errors import OptionError

RATES = ("samples", "batches", "steps", "tokens")


class Clock:
    """Stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(throughput, "time", made)
    return made


class Takes(Net):
    """Every training batch takes `seconds`, every validation batch ten times as long."""

    def __init__(self, clock: Clock, seconds: float = 0.5) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += self.seconds
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 10 * self.seconds
        return super().validation_step(batch, batch_idx)


def rates(hook: Throughput, module: Net, *loaders: Any, **options: Any) -> dict[str, float]:
    trainer = quiet(hooks=[hook], **options)
    trainer.fit(module, *loaders)
    return {
        name.removeprefix("throughput/"): value
        for name, value in trainer.metrics.items()
        if name.startswith("throughput/")
    }


def test_samples_batches_and_steps_per_second(clock: Clock) -> None:
    found = rates(Throughput(every=2), Takes(clock), batches(4, size=3), accumulate_grad_batches=2)
    assert found == {"samples_per_sec": 6.0, "batches_per_sec": 2.0, "steps_per_sec": 1.0}


def test_rates_are_logged_under_the_step_they_were_measured_at(clock: Clock) -> None:
    seen: list[tuple[int, float]] = []
    trainer = quiet(hooks=[Throughput(every=3)])
    trainer.on("train_metrics")(
        lambda step, metrics: (
            seen.append((step, metrics["throughput/samples_per_sec"]))
            if "throughput/samples_per_sec" in metrics
            else None
        )
    )
    trainer.fit(Takes(clock), batches(8))
    assert seen == [(3, 6.0), (6, 6.0)]


def test_the_window_moves_on(clock: Clock) -> None:
    module = Takes(clock)
    trainer = quiet(hooks=[Throughput(every=2, window=1)])

    @trainer.on("step_end", every="4 steps")
    def faster() -> None:
        module.seconds = 0.1

    trainer.fit(module, batches(8))
    assert trainer.metrics["throughput/batches_per_sec"] == pytest.approx(10.0)


def test_time_spent_in_validation_does_not_count(clock: Clock) -> None:
    found = rates(Throughput(every=4), Takes(clock), batches(4), batches(3), val_check_interval=1)
    assert found["batches_per_sec"] == 2.0
    assert clock.now > 30


def test_tokens_are_told_if_a_batch_holds_ids(clock: Clock) -> None:
    class Language(Takes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.clock.now += 0.5
            return self.layer(batch["input_ids"].float()).sum()

    ids = [{"input_ids": torch.ones(3, 4, dtype=torch.long), "labels": torch.ones(3)} for _ in range(2)]
    assert rates(Throughput(every=2), Language(clock), ids)["tokens_per_sec"] == 24.0
    assert "tokens_per_sec" not in rates(Throughput(every=2, tokens=False), Language(clock), ids)
    assert rates(Throughput(every=2, tokens=True), Takes(clock), batches(2))["tokens_per_sec"] == 24.0


def test_how_much_of_the_hardware_is_used(clock: Clock) -> None:
    found = rates(Throughput(every=2, flops_per_sample=1e9, peak_flops=1e10), Takes(clock), batches(2))
    assert found["flops_per_sec"] == 6e9
    assert found["mfu"] == pytest.approx(0.6)
    found = rates(Throughput(every=2, flops_per_token=1e9), Takes(clock), batches(2))
    assert found["flops_per_sec"] == 24e9
    assert "mfu" not in found


def test_a_run_shorter_than_the_interval_has_one_report(clock: Clock) -> None:
    assert rates(Throughput(every=50), Takes(clock), batches(3), max_epochs=2)["batches_per_sec"] == 2.0


def test_a_second_run_begins_anew(clock: Clock) -> None:
    hook = Throughput(every=2)
    rates(hook, Takes(clock), batches(2))
    clock.now += 1000
    assert rates(hook, Takes(clock), batches(2))["batches_per_sec"] == 2.0


def test_a_hook_that_joins_in_the_middle_measures_from_there(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = quiet()
    trainer.on("step_end", every="3 steps", once=True)(lambda trainer: trainer.add_hook(Throughput(every=2)))
    trainer.fit(Takes(clock), batches(8))
    assert trainer.metrics["throughput/batches_per_sec"] == 2.0
    assert not caplog.records


def test_nothing_is_read_from_the_device(caplog: pytest.LogCaptureFixture) -> None:
    """On the meta device every read raises, and the hook would be reported and passed over."""
    trainer = quiet(device="meta", hooks=[Throughput(every=1, flops_per_sample=1.0, peak_flops=1.0)])
    with torch.device("meta"):
        net = Net()
    trainer.fit(net, batches(3))
    assert not caplog.records
    assert "throughput/samples_per_sec" in trainer.metrics


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"every": 0}, "every=0 must be a whole number from 1"),
        ({"window": 1.5}, "window=1.5 must be a whole number"),
        ({"flops_per_sample": -1}, "flops_per_sample=-1 must be a number"),
        ({"peak_flops": 1e12}, "peak_flops needs flops_per_sample or flops_per_token"),
        ({"flops_per_sample": 1e3, "flops_per_token": 1e3}, ".*give one of them"),
        ({"tokens": "yes"}, "tokens='yes' must be True or False"),
    ],
    ids=str,
)
def test_wrong_parameters_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=f"Throughput: {says}"):
        Throughput(**wrong)
