"""A fit that pauses after an update: everything is in place there, and is torn down afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import Net, batches, quiet

from hookline import Hook
from hookline.run.run import Run
from hookline.training.paused import NotReached, PausingRules, paused_fit


class Heard(Hook):
    """The events that it has received."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def setup(self) -> None:
        self.events.append("setup")

    def on_step_end(self, step: int, trainer: Any) -> None:
        self.events.append(step)
        trainer.save_checkpoint()

    def on_checkpoint_save(self) -> None:
        self.events.append("saved")

    def on_validation_start(self) -> None:
        self.events.append("validation")

    def on_train_epoch_end(self) -> None:
        self.events.append("epoch")

    def on_train_end(self) -> None:
        self.events.append("end")

    def teardown(self) -> None:
        self.events.append("teardown")


def pause(heard: Heard, at: int, data: Any = None, **options: Any) -> Any:
    trainer = quiet(hooks=[heard], max_epochs=2, **options)
    arguments = {"module": Net(), "train": batches(4) if data is None else data, "val": batches(1)}
    return paused_fit(trainer, arguments, lambda ranks: None, PausingRules(lambda run: run.state.step >= at))


def test_the_last_event_is_that_of_the_update_and_nothing_is_saved() -> None:
    heard = Heard()
    with pause(heard, 4) as run:  # the last update of an epoch, after which a validation is due
        assert heard.events == ["setup", 1, 2, 3, 4]
        assert run.trainer.state.status == "training" and run.trainer._run is run
        assert run.state.batch is not None and run.state.optimizers[0].state_dict()
        assert run.trainer.validate()
        heard.events.clear()
    assert heard.events == ["teardown"]
    assert run.trainer._run is None


def test_a_pause_after_the_window_that_ends_an_epoch_comes_before_the_end_of_the_epoch() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter(batches(4))

    heard = Heard()
    with pause(heard, 2, Endless(), accumulate_grad_batches=3):
        assert heard.events == ["setup", 1, 2]
    heard = Heard()
    with pause(heard, 3, Endless(), accumulate_grad_batches=3):
        assert heard.events == ["setup", 1, 2, "validation", "epoch", 3]


def test_a_fit_that_ends_before_its_pause_says_why() -> None:
    with pytest.raises(NotReached, match="its limits are reached"), pause(Heard(), 99):
        pass


def test_an_error_of_the_block_or_of_a_step_is_raised_after_the_teardown() -> None:
    class Own(Exception): ...

    heard = Heard()
    with pytest.raises(Own), pause(heard, 1):
        raise Own
    assert heard.events == ["setup", 1, "teardown"]

    class Fails(Heard):
        def on_step_end(self, step: int, trainer: Any) -> None:
            raise Own

    fails = Fails()
    with pytest.raises(Own), pause(fails, 1):
        pass
    assert fails.events == ["setup", "teardown"]


def test_a_failure_can_be_a_pause() -> None:
    class Own(Exception): ...

    class Fails(Heard):
        def on_train_batch_start(self, step: int) -> None:
            if step == 2:
                raise Own

    kept: list[Exception] = []

    def keeps(run: Run, error: Exception) -> bool:
        kept.append(error)
        return True

    trainer, fails = quiet(hooks=[Fails()]), PausingRules(lambda run: False, keeps)
    with paused_fit(trainer, {"module": Net(), "train": batches(4)}, lambda ranks: None, fails) as run:
        assert run.state.step == 2 and isinstance(kept[0], Own)
