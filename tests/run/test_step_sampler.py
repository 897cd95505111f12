"""One step in many is timed: forward, backward, optimizer. It computes the same as the others."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import SKIP_BATCH, SKIP_STEP, Hook, Trainer
from hookline.engine.events import EVENTS
from hookline.engine.plan import Plan, noop
from hookline.run.timer import DeviceClock, HostClock, StepSampler, clock_for
from hookline.training import data_pass

PAUSE, LONG = 0.02, 0.1
MARKED = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_gradient_clip",
    "on_after_optimizer_step",
    "on_step_skipped",
    "on_train_batch_end",
)


class Slow(Net):
    """Each part of its step takes a known time at least."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(PAUSE)
        return super().training_step(batch, batch_idx)

    def backward(self, loss: Any) -> None:
        time.sleep(2 * PAUSE)
        super().backward(loss)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        time.sleep(3 * PAUSE)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


def fit(module: Any, count: int = 3, **options: Any) -> Any:
    trainer = quiet(**options)
    trainer.fit(module, batches(count))
    assert trainer.timings is not None
    return trainer.timings


def sampled(module: Any, count: int = 3, **options: Any) -> Any:
    """The seconds of the sampled steps, as they were measured."""
    trainer = quiet(**options)
    trainer.fit(module, batches(count))
    return trainer.state.timer.sampler.seconds


def test_forward_backward_and_optimizer_are_told_apart() -> None:
    seconds = sampled(Slow())
    assert (
        seconds["forward"] >= PAUSE and seconds["backward"] >= 2 * PAUSE and seconds["optimizer"] >= 3 * PAUSE
    )


def test_the_estimates_are_those_of_all_steps_and_not_more_than_the_training() -> None:
    timings = fit(Slow())
    assert timings.sampled_batches == 1 and timings.batches == 3  # the second step: the first one warms up
    assert timings.forward + timings.backward + timings.optimizer <= timings.training + 1e-9


def test_a_run_of_one_step_has_no_sample() -> None:
    timings = fit(Net(), count=1)
    assert timings.forward is timings.backward is timings.optimizer is None and "forward" not in str(timings)


def test_one_step_in_fifty_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_pass.SAMPLE_EVERY == 50
    monkeypatch.setattr(data_pass, "SAMPLE_EVERY", 4)
    assert fit(Net(), count=13).sampled_batches == 3  # steps 2, 6 and 10
    assert fit(Net(), count=3, max_epochs=4).sampled_batches == 3  # an epoch's end does not begin anew


def test_a_window_of_several_batches_is_sampled_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_pass, "SAMPLE_EVERY", 2)
    trainer = quiet(accumulate_grad_batches=2)
    trainer.fit(Slow(), batches(8))
    sampler = trainer.state.timer.sampler
    assert sampler.batches == 4  # the second and the fourth update
    assert sampler.seconds["backward"] >= 8 * PAUSE and sampler.seconds["optimizer"] >= 6 * PAUSE


def test_time_in_hooks_is_in_no_part() -> None:
    class Slows(Hook):
        def on_train_batch_start(self) -> None:
            time.sleep(LONG)

        def on_before_backward(self) -> None:
            time.sleep(LONG)

        def on_after_backward(self) -> None:
            time.sleep(LONG)

        def on_before_optimizer_step(self) -> None:
            time.sleep(LONG)

        def on_train_batch_end(self) -> None:
            time.sleep(LONG)

    assert sum(sampled(Net(), count=2, hooks=[Slows()]).values()) < 5 * LONG


def test_manual_optimization_is_told_apart_too() -> None:
    class Manual(Slow):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = Net.training_step(self, batch, batch_idx)
            time.sleep(PAUSE)
            self.manual_backward(loss)
            time.sleep(PAUSE)
            optimizer.step()

    seconds = sampled(Manual())
    assert seconds["forward"] >= 2 * PAUSE and seconds["backward"] >= 2 * PAUSE and seconds["optimizer"] > 0


def test_an_optimizer_that_recomputes_the_loss_is_sampled() -> None:
    class Recomputes(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    timings = fit(Recomputes())
    assert timings.sampled_batches == 1 and timings.optimizer > 0


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_sampled_step_computes_the_same(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for every in (1, 10_000):
        monkeypatch.setattr(data_pass, "SAMPLE_EVERY", every)
        torch.manual_seed(0)
        net = Net()
        trainer = quiet(max_epochs=2, accumulate_grad_batches=accumulate, gradient_clip_val=0.1)
        trainer.fit(net, batches(7))
        weights.append([each.clone() for each in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_slots_are_as_before_once_the_sample_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_pass, "SAMPLE_EVERY", 2)
    seen: list[bool] = []

    class Looks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.trainer.plan.on_before_backward is noop)
            return super().training_step(batch, batch_idx)

    trainer = quiet()
    trainer.fit(Looks(), batches(5))
    assert seen == [True, False, True, False, True]
    assert all(getattr(trainer.plan, event) is noop for event in MARKED)


@pytest.mark.parametrize("where", ["training_step", "on_before_backward", "on_train_batch_end"])
def test_a_failure_in_a_sampled_step_leaves_no_marks(where: str) -> None:
    class Fails(Net):
        pass

    def fail(self: Any, *args: Any) -> Any:
        if self.trainer.state.batch_idx == 1:
            raise RuntimeError("broken")
        return Net.training_step(self, *args) if where == "training_step" else None

    setattr(
        Fails,
        where,
        (lambda self, batch, batch_idx: fail(self, batch, batch_idx))
        if where == "training_step"
        else (lambda self: fail(self)),
    )
    trainer = quiet()
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Fails(), batches(3))
    assert all(getattr(trainer.plan, event) is noop for event in MARKED)
    trainer.fit(Net(), batches(3))


def test_a_hook_that_joins_in_a_sampled_step_is_heard_and_the_sample_is_dropped() -> None:
    heard: list[int] = []

    class Joins(Hook):
        def on_before_backward(self, trainer: Trainer, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.on("after_backward")(lambda batch_idx: heard.append(batch_idx))

    timings = fit(Net(), count=4, hooks=[Joins()])
    assert heard == [1, 2, 3] and timings.sampled_batches == 1  # that of the step after it


def test_skipped_batches_and_steps_do_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_pass, "SAMPLE_EVERY", 1)

    class Skips(Hook):
        def on_train_batch_start(self, batch_idx: int) -> Any:
            return SKIP_BATCH if batch_idx == 2 else None

        def on_before_optimizer_step(self, batch_idx: int) -> Any:
            return SKIP_STEP if batch_idx == 3 else None

    timings = fit(Net(), count=6, hooks=[Skips()])
    assert timings.batches == 5 and 0 < timings.sampled_batches <= 5


# ---- clocks ------------------------------------------------------------------------------------------------------


def test_the_cpu_is_timed_by_the_host_and_a_device_without_events_not_at_all() -> None:
    assert isinstance(clock_for(torch.device("cpu")), HostClock)
    assert isinstance(clock_for(torch.device("meta")), HostClock)
    assert clock_for(torch.device("vulkan")) is None


def test_a_device_without_a_clock_has_no_sample() -> None:
    sampler = StepSampler(Plan(EVENTS), None)
    sampler.begin(False, False)
    assert not sampler.is_open
    sampler.end()
    assert sampler.batches == 0


class Stream:
    """A device that runs behind: events are passed when the test says so, and waiting for one is an error."""

    def __init__(self) -> None:
        self.recorded = self.passed = 0
        stream = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, on: Any) -> None:
                assert on is stream
                stream.recorded += 1
                self.at = stream.recorded

            def query(self) -> bool:
                return self.at <= stream.passed

            def elapsed_time(self, other: Any) -> float:
                assert self.query() and other.query(), "this would wait for the device"
                return 1000.0 * (other.at - self.at)

        self.Event = Event

    def current_stream(self, device: Any) -> Any:
        return self


def test_device_events_are_read_once_the_device_has_passed_them() -> None:
    """There is no accelerator where the tests run: a stream that is behind stands in for one."""
    stream, plan = Stream(), Plan(EVENTS)
    sampler = StepSampler(plan, DeviceClock(torch.device("cuda", 0), stream))
    sampler.begin(False, False)
    for event in (
        "on_train_batch_start",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_after_optimizer_step",
        "on_train_batch_end",
    ):
        getattr(plan, event)(None)
    stream.passed = stream.recorded - 1
    sampler.end()
    assert sampler.batches == 0 and not any(sampler.seconds.values())
    stream.passed = stream.recorded
    sampler.read()
    assert sampler.batches == 1
    assert sampler.seconds == {"forward": 1.0, "backward": 1.0, "optimizer": 1.0}
