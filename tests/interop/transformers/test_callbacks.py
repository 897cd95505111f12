"""transformers' callbacks in Hookline's trainer, as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from interop.hosted import DATA, VAL, transformers_trainer
from test_budgets import per_step, with_hooks
from tiny import Net, batches, quiet
from transformers import TrainerCallback

import hookline
from hookline import Hook
from hookline.engine.events import EVENTS
from hookline.hooks import ModelCheckpoint
from hookline.interop.transformers.callbacks import TRANSFORMERS_METHODS

pytestmark = pytest.mark.filterwarnings("default")


class Records(transformers.TrainerCallback):
    """Writes down what it hears, as people write such a thing."""

    def __init__(self) -> None:
        self.seen: list[Any] = []


def recording(names: list[str]) -> Records:
    def listening_to(name: str) -> Any:
        def method(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append((name, state.global_step, round(state.epoch, 4)))

        return method

    made: Records = type("Records", (Records,), {name: listening_to(name) for name in names})()
    return made


TRAINING = [
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_epoch_end",
    "on_train_end",
]


@pytest.mark.parametrize("window", [1, 2])
def test_a_callback_hears_the_same_as_in_transformers_own_trainer(window: int) -> None:
    there, here = recording(TRAINING), recording(TRAINING)
    transformers_trainer([there], "out", window, eval_strategy="no").train()
    quiet(hooks=[here], max_epochs=2, accumulate_grad_batches=window).fit(Net(), DATA)
    assert here.seen == there.seen
    assert {name for name, *_ in here.seen} == set(TRAINING) - ({"on_substep_end"} if window == 1 else set())


def test_evaluations_predictions_and_saves_are_heard(tmp_path: Path) -> None:
    class Saves(Hook):
        def on_train_epoch_end(self, trainer: Any) -> None:
            trainer.save_checkpoint()

    class Hears(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.seen.append(type(model).__name__)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append("batch")

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            self.seen.append(f"{metrics['eval_loss']:.3f}")

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append(f"saved at {state.global_step}")

        def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            self.seen.append(f"{metrics['test_loss']:.3f}")

    callback = Hears()
    trainer = quiet(hooks=[Saves(), callback], run_dir=tmp_path, num_sanity_val_steps=2)
    net = Net()
    found = trainer.fit(net, DATA, VAL)
    tested = trainer.test(net, VAL)
    assert callback.seen == [
        "Net",
        "batch",
        "batch",
        f"{found['val/loss']:.3f}",
        "saved at 5",
        "Net",
        "batch",
        "batch",
        f"{tested['test/loss']:.3f}",
    ]


def test_early_stopping_callback_stops_the_run() -> None:
    callback = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    trainer = quiet(hooks=[callback], max_epochs=10)
    trainer.fit(Net(lr=0.0), DATA, VAL)
    assert trainer.state.epochs_seen == 3
    assert trainer.state.stop_reason == "EarlyStoppingCallback set control.should_training_stop"
    assert trainer.status == "stopped"


def test_early_stopping_callback_goes_by_a_monitor_s_metric_and_mode() -> None:
    class Scores(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val/score", float(self.trainer.current_epoch))  # ever better, if more is better
            return super().validation_step(batch, batch_idx)

    callback = transformers.EarlyStoppingCallback(1)
    checkpoint = hookline.hooks.ModelCheckpoint(monitor="val/score", mode="max")
    trainer = quiet(hooks=[callback, checkpoint], max_epochs=4)
    trainer.fit(Scores(lr=0.0), DATA, VAL)
    assert trainer.status == "completed"


def test_what_early_stopping_has_counted_survives_a_resume(tmp_path: Path) -> None:
    class Saves(Hook):
        def on_train_epoch_end(self, trainer: Any, epoch: int) -> None:
            trainer.save_checkpoint(tmp_path / f"epoch-{epoch}")

    first = quiet(
        hooks=[transformers.EarlyStoppingCallback(3), Saves()], max_epochs=2, run_dir=tmp_path / "run"
    )
    first.fit(Net(lr=0.0), DATA, VAL)
    second = quiet(hooks=[transformers.EarlyStoppingCallback(3)], max_epochs=10, run_dir=tmp_path / "run")
    second.fit(Net(lr=0.0), DATA, VAL, resume=tmp_path / "epoch-1")
    assert second.state.epochs_seen == 4


def test_printer_callback_prints_what_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(hooks=[transformers.PrinterCallback()], log_every_n_steps=2).fit(Net(), DATA, VAL)
    printed = capsys.readouterr().out
    assert "'loss':" in printed and "'learning_rate':" in printed and "'epoch':" in printed
    assert "'eval_loss':" in printed


def test_progress_callback_shows_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(hooks=[transformers.ProgressCallback()], max_epochs=2).fit(Net(), DATA, VAL)
    assert "10/10" in capsys.readouterr().err


def test_everything_asked_for_by_control_is_done(tmp_path: Path) -> None:
    class Steers(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.logged: list[Any] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_save = state.global_step == 1
            control.should_evaluate = state.global_step == 2
            control.should_log = state.global_step == 3
            control.should_epoch_stop = state.global_step == 4
            control.should_training_stop = state.global_step == 6
            return control

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.logged.append((state.global_step, set(logs)))

    class Hears(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def on_checkpoint_save(self, step: int) -> None:
            self.seen.append(("saved", step))

        def on_validation_end(self, step: int) -> None:
            self.seen.append(("validated", step))

        def on_train_epoch_end(self, step: int) -> None:
            self.seen.append(("epoch", step))

    steers, hears = Steers(), Hears()
    trainer = quiet(
        hooks=[steers, hears],
        max_epochs=9,
        run_dir=tmp_path,
        check_val_every_n_epoch=100,
        log_every_n_steps=1000,
        checkpoint=True,
    )
    trainer.fit(Net(), DATA, VAL)
    assert hears.seen == [("saved", 1), ("validated", 2), ("epoch", 4), ("epoch", 6), ("saved", 6)]
    step, logged = steers.logged[1]  # the first one is of the validation
    assert step == 3 and {"loss", "learning_rate", "epoch"} <= logged
    assert trainer.status == "stopped" and trainer.global_step == 6


def test_a_callback_is_given_what_it_names_only() -> None:
    class Names(transformers.TrainerCallback):
        def on_train_begin(
            self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, train_dataloader: Any
        ) -> None:
            self.given = (type(model), type(optimizer).__name__, train_dataloader)

    callback = Names()
    quiet(hooks=[callback]).fit(Net(), DATA)
    assert callback.given == (Net, "SGD", DATA)


def test_args_that_a_run_has_not_are_named_when_they_are_asked_for() -> None:
    class Asks(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert args.gradient_accumulation_steps == 1
            self.found = args.warmup_steps

    with pytest.raises(hookline.HookError, match=r"reads args.warmup_steps, .*config=TrainingArguments"):
        quiet(hooks=[Asks()]).fit(Net(), DATA)
    callback = Asks()
    arguments = transformers.TrainingArguments(output_dir="out", warmup_steps=7, use_cpu=True, report_to=[])
    quiet(hooks=[callback], config=arguments).fit(Net(), DATA)
    assert callback.found == 7


def test_what_cannot_be_honoured_is_refused_when_it_is_added() -> None:
    class Pushes(transformers.TrainerCallback):
        def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    with pytest.raises(
        hookline.HookError,
        match="Pushes listens to on_push_begin, which Hookline lacks: Hookline does not push",
    ):
        quiet(hooks=[Pushes()])


def test_it_is_recognised_named_and_found_again() -> None:
    callback = transformers.EarlyStoppingCallback()
    trainer = quiet(hooks=[callback])
    assert callback in trainer.hooks and trainer.hooks.list_hooks() == ["early_stopping_callback"]
    assert "transformers callback" in str(trainer.explain())


def test_it_also_runs_in_a_hand_written_loop() -> None:
    import torch

    heard = recording(["on_train_begin", "on_step_end", "on_train_end"])
    net = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    line = hookline.Line(net, sgd, hooks=[heard])
    with line:
        for x, y in line.epoch(batches(2)):
            line.backward(torch.nn.functional.mse_loss(net(x), y))
            sgd.step()
    assert [(name, step) for name, step, _ in heard.seen] == [
        ("on_train_begin", 0),
        ("on_step_end", 1),
        ("on_step_end", 2),
        ("on_train_end", 2),
    ]


def test_the_table_knows_every_method_of_the_package() -> None:
    theirs = {name for name in vars(transformers.TrainerCallback) if name.startswith("on_")}
    assert theirs == {*TRANSFORMERS_METHODS, "on_push_begin"}
    assert all(event in EVENTS for events in TRANSFORMERS_METHODS.values() for event in events)


def test_a_callback_costs_no_more_calls_than_a_hook_of_hookline_s_own() -> None:
    class Silent(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    class Native(Hook):
        def on_step_end(self, trainer: Any, state: Any, ctx: Any) -> None: ...

    per_step(with_hooks(Native()))
    native = per_step(with_hooks(Native())) - per_step(with_hooks())
    assert 1 <= per_step(with_hooks(Silent())) - per_step(with_hooks()) <= native


def test_what_is_asked_for_at_another_moment_is_done_at_the_end_of_the_step(tmp_path: Path) -> None:
    class Asks(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step == 1
            control.should_epoch_stop = state.global_step == 3

    class Hears(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def on_checkpoint_save(self, step: int) -> None:
            self.seen.append(("saved", step))

        def on_train_epoch_end(self, step: int) -> None:
            self.seen.append(("epoch", step))

    hears = Hears()
    trainer = quiet(hooks=[Asks(), hears], max_epochs=2, run_dir=tmp_path, checkpoint=True)
    trainer.fit(Net(), DATA)
    assert hears.seen == [("saved", 2), ("epoch", 4), ("epoch", 9), ("saved", 9)]
    assert not [
        each for each in trainer.plan.listeners("on_step_end") if each.owner is not hears
    ]  # it listens no longer


class LogSteps(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.logged: list[int] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.logged.append(state.global_step)


@pytest.mark.parametrize("by", ["steps", "epoch"])
def test_training_is_logged_as_often_as_in_transformers(by: str, tmp_path: Path) -> None:
    theirs, ours = LogSteps(), LogSteps()
    transformers_trainer(
        [theirs], tmp_path, logging_strategy=by, logging_steps=2, num_train_epochs=2, eval_strategy="no"
    ).train()

    class Epochs(transformers.TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_log = by == "epoch"

    every = 2 if by == "steps" else 1000
    trainer = quiet(hooks=[Epochs(), ours], max_epochs=2, log_every_n_steps=every)
    trainer.fit(Net(), DATA)
    assert ours.logged == theirs.logged != []


def test_constructor_arguments_of_a_callback_are_restored_as_in_transformers(tmp_path: Path) -> None:
    saved = transformers.EarlyStoppingCallback(early_stopping_patience=7, early_stopping_threshold=0.5)
    options: dict[str, Any] = {"run_dir": tmp_path, "checkpoint": True}
    config = transformers.TrainingArguments(
        str(tmp_path),
        eval_strategy="epoch",
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        use_cpu=True,
        report_to=[],
    )
    quiet(hooks=[saved], config=config, **options).fit(Net(), DATA, VAL)
    other = transformers.EarlyStoppingCallback(early_stopping_patience=1)
    quiet(hooks=[other], config=config, max_epochs=2, **options).fit(Net(), DATA, VAL, resume="auto")
    assert other.state()["args"] == {"early_stopping_patience": 7, "early_stopping_threshold": 0.5}


def test_a_callback_is_removed_as_the_object_or_by_its_class() -> None:
    one, two = LogSteps(), transformers.PrinterCallback()
    trainer = quiet(hooks=[one, two])
    assert trainer.remove_hook(one) is one
    assert trainer.remove_hook(transformers.PrinterCallback) is two
    assert trainer.hooks.list_hooks() == []


# ---- several callbacks in one run: one `state`, one `control`, as transformers' own trainer has them --------------------


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
