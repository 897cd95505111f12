"""Several of transformers' callbacks in one run: one `state`, one `control`, as its own trainer has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from interop.hosted import DATA, VAL
from tiny import Net, quiet
from transformers import TrainerCallback

import hookline
from hookline.hooks import ModelCheckpoint

pytestmark = pytest.mark.filterwarnings("default")


class Asks(TrainerCallback):
    """Asks for everything at the second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            control.should_evaluate = control.should_save = control.should_log = True


class Hears(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.seen.append(("evaluated", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("saved", state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(("logged", state.global_step, sorted(logs)))


def test_what_two_callbacks_ask_for_at_one_step_is_done_once(tmp_path: Path) -> None:
    hears = Hears()
    trainer = quiet(
        hooks=[Asks(), Asks(), hears],
        run_dir=tmp_path,
        check_val_every_n_epoch=9,
        log_every_n_steps=1000,
        checkpoint=True,
    )
    trainer.fit(Net(), DATA, VAL)
    assert hears.seen[:4] == [
        ("logged", 2, ["epoch", "learning_rate", "loss"]),
        ("logged", 2, ["epoch", "eval_loss"]),
        ("evaluated", 2),
        ("saved", 2),
    ]
    assert [each for each in hears.seen[4:] if each[0] != "logged"] == [
        ("saved", len(DATA))
    ]  # the state at the end


def test_a_later_callback_sees_what_an_earlier_one_has_set_and_may_take_it_back(tmp_path: Path) -> None:
    class Wants(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = control.should_training_stop = control.should_epoch_stop = True

    class Denies(Hears):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append((control.should_save, control.should_training_stop))
            control.should_save = control.should_training_stop = control.should_epoch_stop = False

    denies = Denies()
    trainer = quiet(hooks=[Wants(), denies], run_dir=tmp_path)
    trainer.fit(Net(), DATA)
    assert trainer.status == "completed" and trainer.global_step == len(DATA)
    assert [each for each in denies.seen if each[0] != "logged"] == [(True, True)] * len(DATA)


def test_the_reason_of_a_stop_is_who_asked_for_it_and_not_who_came_last() -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    trainer = quiet(hooks=[Stops(), Looks()])
    trainer.fit(Net(), DATA)
    assert trainer.global_step == 2
    assert trainer.state.stop_reason == "Stops set control.should_training_stop"


def test_a_callback_that_hears_only_the_end_finds_the_whole_history_there() -> None:
    class AtEnd(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.found = (
                state.best_metric,
                state.best_global_step,
                [row["step"] for row in state.log_history],
            )

    alone, beside = AtEnd(), AtEnd()
    trainer = quiet(hooks=[alone], log_every_n_steps=1)
    trainer.fit(Net(), DATA, VAL)
    quiet(hooks=[beside, Hears(), Hears()], log_every_n_steps=1).fit(Net(), DATA, VAL)
    assert alone.found[:2] == (pytest.approx(trainer.metrics["val/loss"]), len(DATA))
    steps = alone.found[2]
    assert (
        steps[: len(DATA)] == list(range(1, len(DATA) + 1)) and beside.found[2] == steps
    )  # each row once, whoever listens


def test_the_best_metric_is_known_when_its_checkpoint_is_saved() -> None:
    class OnSave(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.best = state.best_metric

    callback = OnSave()
    trainer = quiet(hooks=[callback, ModelCheckpoint(monitor="val/loss")])
    trainer.fit(Net(), DATA, VAL)
    assert callback.best == pytest.approx(trainer.metrics["val/loss"])


def test_a_second_fit_begins_with_an_empty_history() -> None:
    class Begins(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append((state.best_metric, state.best_global_step, state.log_history))

    callback = Begins()
    trainer = quiet(hooks=[callback], log_every_n_steps=1)
    for _ in range(2):
        trainer.fit(Net(), DATA, VAL)
    assert callback.seen[1][:2] == (None, None) and len(callback.seen[1][2]) == len(callback.seen[0][2])


def test_a_resumed_run_knows_the_best_step_and_the_history(tmp_path: Path) -> None:
    class Knows(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.found = (state.best_metric, state.best_global_step, len(state.log_history))

    first, second = Knows(), Knows()
    trainer = quiet(hooks=[first, ModelCheckpoint(save_last=True)], run_dir=tmp_path, max_epochs=2)
    trainer.fit(Net(), DATA, VAL)
    again = quiet(hooks=[second, ModelCheckpoint(save_last=True)], run_dir=tmp_path, max_epochs=3)
    again.fit(Net(), DATA, VAL, resume="auto")
    best, step, rows = second.found
    assert (best, step) == (pytest.approx(trainer.metrics["val/loss"]), 2 * len(DATA)) and rows >= 2


def test_a_monitored_metric_is_given_to_on_evaluate_whatever_it_is_called() -> None:
    class Scores(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("acc", 0.5)
            return super().validation_step(batch, batch_idx)

    class Looks(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            self.found = metrics[args.metric_for_best_model]

    looks, stops = Looks(), transformers.EarlyStoppingCallback(1)
    trainer = quiet(hooks=[looks, stops, ModelCheckpoint(monitor="acc", mode="max")], max_epochs=5)
    trainer.fit(Scores(), DATA, VAL)
    assert looks.found == 0.5 and trainer.status == "stopped" and trainer.state.epochs_seen == 2


def test_an_evaluation_asked_for_at_the_end_of_an_epoch_that_was_validated_is_not_done_again() -> None:
    class AtEpochEnd(Hears):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_evaluate = True

    validated, not_validated = AtEpochEnd(), AtEpochEnd()
    quiet(hooks=[validated]).fit(Net(), DATA, VAL)
    quiet(hooks=[not_validated], check_val_every_n_epoch=9).fit(Net(), DATA, VAL)
    for each in (validated, not_validated):
        assert [what for what, *_ in each.seen if what == "evaluated"] == ["evaluated"]


def test_an_epoch_that_one_callback_ends_at_its_beginning_is_not_begun_again_by_the_next() -> None:
    class Ends(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = True

    trainer = quiet(hooks=[Ends(), Hears()])
    trainer.fit(Net(), DATA)
    assert trainer.global_step == 0


def test_a_callback_that_joins_in_the_middle_shares_what_the_others_have(tmp_path: Path) -> None:
    late = Hears()

    class Brings(hookline.Hook):
        def on_train_batch_start(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.add_hook(late)

    quiet(hooks=[Brings(), Asks()], run_dir=tmp_path, log_every_n_steps=1000).fit(Net(), DATA, VAL)
    assert ("saved", 2) in late.seen
