"""Timer: a limit on the time of training, and what each part took, told by a clock that a test can turn."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from tiny import Net, batches, quiet

from hookline.hooks import timer as timer_file
from hookline.hooks.timer import Timer
from hookline.util.errors import OptionError


class Clock:
    """Stands still unless a test moves it."""

    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()

    def monotonic() -> float:
        return made.now

    monkeypatch.setattr(timer_file.time, "monotonic", monotonic)
    monkeypatch.setattr(Timer.on_train_batch_end, "__defaults__", (monotonic,))
    return made


class Takes(Net):
    """Batches that take their time: 1 s to train on, 10 to validate, 100 to test, 1000 to predict."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 10
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 100
        return super().test_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 1000
        return super().predict_step(batch, batch_idx)


def test_the_run_stops_after_the_batch_in_which_its_time_is_over(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = quiet(max_epochs=5, hooks=[Timer(duration=6)])
    trainer.fit(Takes(clock), batches(4))
    assert (trainer.global_step, trainer.status) == (6, "stopped")
    assert trainer.state.stop_reason == "Timer: training has taken its 0:00:06"
    assert "training has taken its 0:00:06 and stops" in caplog.text


def test_it_can_wait_for_the_end_of_the_epoch_and_keep_quiet(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = quiet(max_epochs=5, hooks=[Timer(duration="6 seconds", interval="epoch", verbose=False)])
    trainer.fit(Takes(clock), batches(4))
    assert (trainer.global_step, trainer.status) == (8, "stopped")
    assert not caplog.records


def test_without_a_limit_it_only_measures(clock: Clock) -> None:
    timer = Timer()
    trainer = quiet(max_epochs=3, hooks=[timer])
    trainer.fit(Takes(clock), batches(4))
    assert trainer.status == "completed"
    assert timer.time_elapsed() == 12
    assert timer.time_remaining() is None


def test_every_stage_has_its_time(clock: Clock) -> None:
    timer, module = Timer(), Takes(clock)
    trainer = quiet(max_epochs=2, num_sanity_val_steps=1, hooks=[timer])
    trainer.fit(module, batches(3), batches(2))
    trainer.test(module, batches(2))
    trainer.predict(module, batches(3))
    trainer.validate(module, batches(1))
    assert [
        timer.time_elapsed(stage) for stage in ("sanity_check", "train", "validate", "test", "predict")
    ] == [10, 46, 50, 200, 3000]


def test_a_hook_can_ask_how_much_is_left(clock: Clock) -> None:
    timer = Timer({"minutes": 1})
    trainer = quiet(hooks=[timer])
    left: list[Any] = []
    trainer.on("train_batch_end")(lambda: left.append(timer.time_remaining()))
    trainer.fit(Takes(clock), batches(3))
    assert left == [59, 58, 57]


def test_the_time_before_a_resume_counts(clock: Clock, tmp_path: Path) -> None:
    first = quiet(max_epochs=9, max_steps=4, hooks=[Timer(6)])
    first.on("step_end", every="4 steps")(lambda trainer: trainer.save_checkpoint(tmp_path / "four"))
    first.fit(Takes(clock), batches(3))
    clock.now += 5000  # it lay there for a while
    second = quiet(max_epochs=9, hooks=[Timer(6)])
    second.fit(Takes(clock), batches(3), resume=tmp_path / "four")
    assert (second.global_step, second.status) == (6, "stopped")


def test_a_run_whose_time_is_over_trains_no_further_batch_when_resumed(clock: Clock, tmp_path: Path) -> None:
    first = quiet(max_epochs=9, hooks=[Timer(6)])
    first.on("train_epoch_end")(lambda trainer: trainer.save_checkpoint(tmp_path / str(trainer.global_step)))
    first.fit(Takes(clock), batches(3))
    second = quiet(max_epochs=9, hooks=[Timer(6)])
    second.fit(Takes(clock), batches(3), resume=tmp_path / "6")
    assert (second.global_step, second.status) == (6, "stopped")


def test_a_second_run_has_all_its_time(clock: Clock) -> None:
    trainer = quiet(max_epochs=1, hooks=[Timer(5)])
    for _ in range(2):
        trainer.fit(Takes(clock), batches(4))
        assert (trainer.global_step, trainer.status) == (4, "completed")


def test_a_failure_ends_the_measuring(clock: Clock) -> None:
    class Fails(Takes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    timer = Timer()
    with pytest.raises(RuntimeError):
        quiet(hooks=[timer]).fit(Fails(clock), batches(4))
    clock.now += 1000
    assert timer.time_elapsed("train") == 2


@pytest.mark.parametrize(
    "duration", ["00:00:00:06", datetime.timedelta(seconds=6), {"seconds": 6}, 6.0, "6 s"], ids=str
)
def test_a_duration_is_given_as_people_like(duration: Any) -> None:
    assert Timer(duration).duration == 6


@pytest.mark.parametrize(
    "wrong",
    [
        {"duration": 0},
        {"duration": -3},
        {"duration": "soon"},
        {"duration": {"fortnights": 1}},
        {"duration": "3 steps"},
        {"interval": "batch"},
        {"verbose": "loud"},
    ],
    ids=str,
)
def test_wrong_parameters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"Timer: {next(iter(wrong))}"):
        Timer(**wrong)


def test_an_unknown_stage_is_an_error_with_the_closest_one() -> None:
    with pytest.raises(OptionError, match=r"stage='validation'.*Did you mean 'validate'\?"):
        Timer().time_elapsed("validation")
