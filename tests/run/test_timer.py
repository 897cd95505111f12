"""Where the time of a fit goes: parts that do not overlap, whatever runs inside what."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, Trainer
from hookline.run.timings import TIMED_PARTS, Timings

PAUSE = 0.03


def timings_of(trainer: Trainer) -> Timings:
    assert trainer.timings is not None
    return trainer.timings


def in_hooks(trainer: Trainer, event: str) -> float:
    """Seconds that hooks have spent at an event, what happened inside their calls included."""
    return sum(row.seconds for row in trainer.hooks.cost() if row.event == event)


def check_sum(timings: Timings) -> None:
    assert sum(getattr(timings, part) or 0.0 for part in TIMED_PARTS) == pytest.approx(timings.total)
    assert all((getattr(timings, part) or 0.0) >= 0 for part in TIMED_PARTS)


class SlowLoader:
    """Takes a while for every batch."""

    def __init__(self, count: int, pause: float = PAUSE) -> None:
        self.count, self.pause = count, pause

    def __iter__(self) -> Iterator[Any]:
        for batch in batches(self.count):
            time.sleep(self.pause)
            yield batch


class SlowHook(Hook):
    """Takes a while at the end of every batch."""

    def on_train_batch_end(self) -> None:
        time.sleep(PAUSE)


def test_the_wait_for_the_loader_is_counted() -> None:
    trainer = quiet()
    trainer.fit(Net(), SlowLoader(4))
    timings = timings_of(trainer)
    check_sum(timings)
    assert timings.data >= 4 * PAUSE and timings.batches == 4
    assert timings.validation == 0 and not timings.hooks


def test_hooks_are_counted_from_the_start_of_the_training() -> None:
    class SlowSetUp(SlowHook):
        def setup(self) -> None:
            time.sleep(10 * PAUSE)

    trainer = quiet(hooks=[SlowSetUp()])
    trainer.fit(Net(), batches(4))
    timings = timings_of(trainer)
    check_sum(timings)
    assert timings.hooks is not None and timings.hooks >= 4 * PAUSE
    assert timings.hooks <= timings.total  # set-up is not part of it


def test_a_hook_that_was_removed_still_counts() -> None:
    class Leaves(SlowHook):
        def on_train_epoch_end(self, trainer: Trainer) -> None:
            trainer.remove_hook("leaves")

    trainer = quiet(hooks=[Leaves()])
    trainer.fit(Net(), batches(4))
    assert (timings_of(trainer).hooks or 0) >= 4 * PAUSE


def test_without_accounting_hooks_are_not_measured() -> None:
    trainer = quiet(hooks=[SlowHook()], accounting=False)
    trainer.fit(Net(), batches(2))
    timings = timings_of(trainer)
    check_sum(timings)
    assert timings.hooks is None and "hooks" not in str(timings) and timings.training >= 2 * PAUSE


def test_validation_includes_its_data_and_its_hooks() -> None:
    class InValidation(Hook):
        def on_validation_batch_end(self) -> None:
            time.sleep(PAUSE)

    trainer = quiet(hooks=[InValidation()], num_sanity_val_steps=1)
    trainer.fit(Net(), batches(2), SlowLoader(2, pause=0.2))
    timings = timings_of(trainer)
    check_sum(timings)
    assert timings.validation >= 3 * (0.2 + PAUSE)  # of the sanity check too
    assert timings.data < 0.6 and timings.hooks == pytest.approx(0.0, abs=1e-6)


def test_a_validation_inside_a_hook_is_no_time_of_the_hook() -> None:
    class Validates(Hook):
        def on_train_batch_end(self, trainer: Trainer) -> None:
            trainer.validate()

        def on_validation_batch_end(self) -> None:
            time.sleep(PAUSE)

    trainer = quiet(hooks=[Validates()], check_val_every_n_epoch=2)
    trainer.fit(Net(), batches(2), batches(2))
    timings = timings_of(trainer)
    check_sum(timings)
    assert timings.validation >= 4 * PAUSE and timings.hooks is not None
    assert timings.hooks <= in_hooks(trainer, "on_train_batch_end") - timings.validation + 1e-6


def test_a_validation_inside_the_modules_own_event_is_counted_once() -> None:
    class Validates(Net):
        def on_train_batch_end(self) -> None:
            self.trainer.validate()

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(PAUSE)
            return super().validation_step(batch, batch_idx)

    trainer = quiet(hooks=[SlowHook()])
    trainer.fit(Validates(), batches(2), batches(1))
    timings = timings_of(trainer)
    check_sum(timings)
    assert timings.validation >= 2 * PAUSE
    assert timings.hooks == pytest.approx(in_hooks(trainer, "on_train_batch_end"))


def test_saving_includes_the_hooks_of_its_events() -> None:
    class Saves(Hook):
        def on_train_epoch_end(self, trainer: Trainer) -> None:
            trainer.save_checkpoint()

        def on_checkpoint_save(self) -> None:
            time.sleep(PAUSE)

    trainer = quiet(hooks=[Saves()])
    trainer.fit(Net(), batches(2))
    timings = timings_of(trainer)
    check_sum(timings)
    assert timings.saving >= PAUSE and timings.hooks == pytest.approx(in_hooks(trainer, "on_train_epoch_end"))


def test_timings_are_a_fact_at_every_event_of_a_fit() -> None:
    seen: dict[str, Timings | None] = {}

    class Asks(Hook):
        def on_fit_start(self, timings: Timings | None) -> None:
            seen["fit start"] = timings

        def on_validation_end(self, timings: Timings) -> None:
            seen["validation"] = timings

        def on_train_epoch_end(self, timings: Timings) -> None:
            seen["epoch"] = timings

        def on_train_end(self, timings: Timings) -> None:
            seen["train end"] = timings

        def on_fit_end(self, timings: Timings) -> None:
            seen["fit end"] = timings

    trainer = quiet(hooks=[Asks()])
    trainer.fit(Net(), batches(3), batches(1))
    assert seen.pop("fit start") is None
    times = [each for each in seen.values() if each is not None]
    assert len(times) == 4 and times[0].validation > 0
    assert [each.total for each in (*times, timings_of(trainer))] == sorted(
        each.total for each in (*times, timings_of(trainer))
    )
    for each in times:
        check_sum(each)


def test_outside_of_a_fit_there_are_none() -> None:
    seen: list[Any] = []
    trainer = quiet()
    trainer.on("validation_end")(lambda timings: seen.append(timings))
    assert trainer.timings is None
    trainer.validate(Net(), batches(1))
    assert seen == [None] and trainer.timings is None


def test_those_of_a_fit_stay_after_other_runs() -> None:
    trainer = quiet()
    trainer.fit(Net(), batches(2))
    before = timings_of(trainer)
    trainer.validate(Net(), batches(1))
    trainer.save_checkpoint("later")
    assert trainer.timings == before


def test_a_resumed_run_counts_its_own_part(tmp_path: Path) -> None:
    trainer = quiet(run_dir=tmp_path / "run", max_epochs=1)
    trainer.fit(Net(), SlowLoader(3))
    trainer.save_checkpoint(tmp_path / "kept")
    again = quiet(run_dir=tmp_path / "again", max_epochs=2)
    again.fit(Net(), batches(3), resume=tmp_path / "kept")
    assert timings_of(again).batches == 3 and again.state.batches_seen == 6


def test_a_fit_writes_a_record_and_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(max_epochs=1, run_dir=tmp_path, enable_progress_bar=True)
    trainer.fit(Net(), batches(3))
    assert f"\nTime: {trainer.timings}\n" in capsys.readouterr().err
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    found = [each for each in records if each["type"] == "timings"]
    assert len(found) == 1 and records[-1]["type"] == "end"
    assert {
        key: value for key, value in found[0].items() if key not in ("type", "time", "step")
    } == timings_of(trainer).record()


def test_a_quiet_fit_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    quiet().fit(Net(), batches(2))
    assert "Time:" not in capsys.readouterr().err


def test_a_failed_fit_has_its_timings_too(tmp_path: Path) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    trainer = Trainer(max_epochs=1, run_dir=tmp_path, enable_progress_bar=False)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Fails(), SlowLoader(4))
    timings = timings_of(trainer)
    check_sum(timings)
    assert timings.batches == 2 and timings.data >= 3 * PAUSE
    assert '"timings"' in (tmp_path / "log.jsonl").read_text()


def test_a_run_inside_a_hook_of_another_run_counts_for_itself() -> None:
    inner = quiet()

    class Nests(Hook):
        def on_train_end(self) -> None:
            inner.fit(Net(), batches(2), SlowLoader(2))

    trainer = quiet(hooks=[Nests()])
    trainer.fit(Net(), batches(2))
    check_sum(timings_of(inner))
    assert timings_of(inner).validation >= 2 * PAUSE
    assert (timings_of(trainer).hooks or 0) >= timings_of(inner).validation


def test_timings_read_nothing_from_the_device() -> None:
    """On meta any read of a value raises."""

    class Meta(Net):
        def on_train_batch_end(self) -> None:
            assert self.trainer.timings is not None

    trainer = quiet(device="meta", max_steps=4)
    with torch.device("meta"):
        data = batches(4)
    trainer.fit(Meta().to("meta"), data)
    assert timings_of(trainer).batches == 4


class Watches:
    """Observes the windows that begin at these steps, and those after them if another sample is taken."""

    def __init__(self, trainer: Trainer, *steps: int) -> None:
        self.state, self.steps = trainer.state, list(steps)
        self.seen: list[str] = []
        self.due, self.is_open = float(steps[0]), False

    def begin(self) -> None:
        assert not self.is_open and not self.state.timer.sampler.is_open
        self.is_open = True
        self.seen.append(f"begin {self.state.step}")

    def end(self) -> None:
        assert self.is_open
        self.is_open = False
        self.seen.append(f"end {self.state.step}")
        self.due = next((step for step in self.steps if step > self.state.step - 1), float("inf"))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_observer_has_windows_of_its_own_and_the_samples_of_the_timer_stay(accumulate: int) -> None:
    watching: list[Watches] = []

    class Observes(Hook):
        def on_train_start(self, trainer: Trainer, state: Any) -> None:
            watching.append(Watches(trainer, 0, 1, 4, 7))
            state.timer.observers.append(watching[0])

    trainer = quiet(hooks=[Observes()], accumulate_grad_batches=accumulate, max_epochs=2)
    trainer.fit(Net(), batches(4 * accumulate))
    # the loader has no batch after the fourth step: the window that begins there is observed in the next epoch
    seen = "begin 0, end 1, begin 2, end 3, begin 4, end 4, begin 4, end 5, begin 7, end 8"
    assert ", ".join(watching[0].seen) == seen
    assert trainer.state.timer.sampler.batches == accumulate  # of the step after the first
    assert timings_of(trainer).sampled_batches == accumulate
