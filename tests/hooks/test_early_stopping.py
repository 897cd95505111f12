"""Stopping when a metric no longer improves: checks, patience, thresholds, resume."""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn

from hookline import Hook, HooklineError, Line, OptionError
from hookline.hooks.early_stopping import EarlyStopping
from hookline.hooks.model_checkpoint import ModelCheckpoint


class Scripted(Net):
    """A network whose validation score is dictated."""

    def __init__(self, *scores: float, name: str = "val/score") -> None:
        super().__init__()
        self.scores, self.at, self.metric = scores, 0, name

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return None

    def on_validation_epoch_end(self, sanity_checking: bool) -> None:
        if not sanity_checking:
            self.log(self.metric, self.scores[min(self.at, len(self.scores) - 1)])
            self.at += 1


def stop(*scores: float, trainer: dict[str, Any] | None = None, **options: Any) -> Any:
    """Run up to 12 epochs with these scores; returns the trainer and the hook."""
    hook = EarlyStopping(**{"monitor": "val/score", "patience": 2, **options})
    runner = quiet(**{"max_epochs": 12, "hooks": [hook], **(trainer or {})})
    runner.fit(Scripted(*scores), batches(2), batches(1))
    return runner, hook


def test_the_run_stops_after_patience_checks_without_improvement() -> None:
    trainer, hook = stop(3.0, 2.0, 2.5, 2.5)
    assert trainer.status == "stopped"
    assert trainer.state.epochs_seen == 4
    assert (hook.best_score, hook.wait_count, hook.stopped_epoch, hook.stopped_step) == (2.0, 2, 3, 8)
    assert "val/score did not improve in 2 checks" in trainer.state.stop_reason


def test_one_check_is_a_singular() -> None:
    trainer, _ = stop(2.0, 2.5, patience=1)
    assert "val/score did not improve in 1 check;" in trainer.state.stop_reason


def test_it_runs_on_while_the_metric_improves() -> None:
    trainer, hook = stop(*[10.0 - n for n in range(12)])
    assert trainer.status == "completed"
    assert hook.wait_count == 0


def test_higher_is_better_with_mode_max() -> None:
    trainer, hook = stop(0.1, 0.2, 0.15, 0.15, mode="max")
    assert trainer.state.epochs_seen == 4
    assert hook.best_score == 0.2


def test_an_improvement_must_be_greater_than_min_delta() -> None:
    trainer, hook = stop(1.0, 0.95, 0.92, min_delta=0.1)
    assert trainer.state.epochs_seen == 3
    assert hook.best_score == 1.0


def test_patience_counts_validations_also_without_epochs() -> None:
    """One endless epoch, measured in steps, validated every 2 batches."""
    trainer, hook = stop(
        1.0,
        2.0,
        2.0,
        trainer={"max_epochs": None, "max_steps": 40, "val_check_interval": 2, "limit_train_batches": 2},
    )
    assert trainer.global_step == 6
    hook = EarlyStopping("val/score", patience=2)
    runner = quiet(max_epochs=None, max_steps=40, val_check_interval=2, hooks=[hook])
    runner.fit(Scripted(1.0, 2.0, 2.0), batches(100), batches(1))
    assert runner.global_step == 6
    assert runner.state.epochs_seen == 0
    assert hook.checks == 3


def test_at_epoch_ends_it_counts_epochs_whatever_is_validated() -> None:
    trainer, hook = stop(
        1.0,
        2.0,
        3.0,
        4.0,
        5.0,
        6.0,
        7.0,
        8.0,
        trainer={"val_check_interval": 1},
        check_on_train_epoch_end=True,
    )
    assert hook.checks == trainer.state.epochs_seen == 3


def test_a_training_metric_is_checked_at_epoch_ends_when_there_is_no_validation() -> None:
    hook = EarlyStopping("train/loss", patience=1, min_delta=1e9)
    trainer = quiet(max_epochs=9, hooks=[hook])
    trainer.fit(Net(), batches(2))
    assert trainer.state.epochs_seen == 2


def test_the_sanity_check_is_no_check() -> None:
    hook = EarlyStopping("val/loss", patience=5)
    trainer = quiet(max_epochs=2, num_sanity_val_steps=1, hooks=[hook])
    trainer.fit(Net(), batches(2), batches(1))
    assert hook.checks == 2


def test_a_misspelt_metric_is_refused_in_the_sanity_check_before_the_first_step() -> None:
    trainer = quiet(max_epochs=2, num_sanity_val_steps=1, hooks=[EarlyStopping("val_loss")])
    with pytest.raises(OptionError, match="Did you mean 'val/loss'"):
        trainer.fit(Net(), batches(2), batches(1))
    assert trainer.global_step == 0


def test_a_missing_metric_is_an_error_or_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OptionError, match="monitors 'accuracy', which was not logged"):
        stop(1.0, monitor="accuracy")
    with caplog.at_level(logging.WARNING, "hookline"):
        trainer, _ = stop(1.0, monitor="accuracy", strict=False, trainer={"max_epochs": 2})
    assert trainer.status == "completed"
    assert "EarlyStopping monitors 'accuracy'" in caplog.text
    assert "never checked 'accuracy'" in caplog.text


class Worsens(Net):
    """Its training metric is the epoch's number; the validation has one of another name, or of the same."""

    def __init__(self, name: str = "error", also: str = "val/error") -> None:
        super().__init__()
        self.metric, self.also = name, also

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log(self.metric, float(self.trainer.current_epoch), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log(self.also, -float(self.trainer.current_epoch))


@pytest.mark.parametrize(
    ("monitor", "checks"), [("train/loss", 4), ("error", 3)]
)  # the loss falls, the error does not
def test_a_metric_of_training_is_checked_when_its_epoch_is_over_however_often_there_is_a_validation(
    monitor: str, checks: int
) -> None:
    hook = EarlyStopping(monitor, patience=2)
    trainer = quiet(max_epochs=4, val_check_interval=1, hooks=[hook])
    trainer.fit(Worsens(), batches(2), batches(1))
    assert hook.checks == trainer.state.epochs_seen == checks


def test_one_that_both_have_is_checked_after_validations() -> None:
    hook = EarlyStopping("error", patience=2)
    quiet(max_epochs=4, val_check_interval=1, hooks=[hook]).fit(Worsens(also="error"), batches(2), batches(1))
    assert (hook.checks, hook.best_score) == (8, -3.0)


def test_checks_after_validation_need_a_validation() -> None:
    trainer = quiet(max_epochs=3, hooks=[EarlyStopping("train/loss", check_on_train_epoch_end=False)])
    with pytest.raises(OptionError, match="acts after validations, and this run has no validation data"):
        trainer.fit(Net(), batches(2))
    assert trainer.global_step == 0


def test_epochs_without_a_due_validation_are_no_checks() -> None:
    trainer, hook = stop(1.0, 2.0, 2.0, trainer={"check_val_every_n_epoch": 2})
    assert hook.checks == 3
    assert trainer.state.epochs_seen == 6


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"stopping_threshold": 2.5}, "has reached the threshold 2.5"),
        ({"divergence_threshold": 5.0}, "is worse than the limit 5"),
    ],
)
def test_thresholds_stop_at_once(options: dict[str, float], why: str) -> None:
    scores = (4.0, 2.0, 1.0) if "stopping_threshold" in options else (4.0, 6.0, 1.0)
    trainer, _ = stop(*scores, **options)
    assert trainer.state.epochs_seen == 2
    assert why in trainer.state.stop_reason


def test_nan_stops_at_once_unless_told_not_to() -> None:
    trainer, hook = stop(1.0, math.nan, 0.5)
    assert trainer.state.epochs_seen == 2
    assert "became nan" in trainer.state.stop_reason
    trainer, hook = stop(1.0, math.nan, math.nan, 0.5, check_finite=False)
    assert trainer.state.epochs_seen == 3
    assert hook.best_score == 1.0


def test_verbose_prints_what_it_sees(capsys: pytest.CaptureFixture[str]) -> None:
    stop(1.0, 2.0, 2.0, verbose=True)
    out = capsys.readouterr().out
    assert "val/score improved to 1" in out
    assert "(1 of 2)" in out
    stop(1.0, 2.0, 2.0)
    assert capsys.readouterr().out == ""


def test_messages_have_short_numbers_and_the_state_has_exact_ones(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, hook = stop(0.4712839123891237, 0.4812839123891237, verbose=True)
    assert trainer.state.stop_reason.endswith("in 2 checks; the best was 0.471284 in epoch 0")
    assert "did not improve on 0.471284 (1 of 2)" in capsys.readouterr().out
    assert hook.best_score == hook.state_dict()["best_score"] == pytest.approx(0.4712839123891237, rel=1e-7)


class SaveAt(Hook):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_end(self, trainer: Any, epoch: int) -> None:
        if epoch == self.epoch:
            trainer.save_checkpoint()

    def on_checkpoint_save(self, path: Any) -> None:
        self.path = path


def test_a_resumed_run_continues_counting() -> None:
    saver = SaveAt(2)
    quiet(max_epochs=3, hooks=[EarlyStopping("val/score", patience=2), saver]).fit(
        Scripted(1.0, 2.0, 0.5, 3.0), batches(2), batches(1)
    )
    hook = EarlyStopping("val/score", patience=2)
    trainer = quiet(max_epochs=12, hooks=[hook])
    trainer.fit(Scripted(0.7), batches(2), batches(1), resume=saver.path)
    assert trainer.state.epochs_seen == 5  # 0.7 would be an improvement for a hook that had forgotten 0.5
    assert hook.best_score == 0.5


def test_a_second_fit_begins_anew() -> None:
    trainer, hook = stop(1.0, 2.0, 2.0)
    trainer.fit(Scripted(5.0, 4.0, 6.0, 6.0), batches(2), batches(1))
    assert hook.best_score == 4.0
    assert trainer.state.epochs_seen == 4


def test_min_epochs_are_trained_before_a_stop_is_honoured() -> None:
    trainer, _ = stop(1.0, 2.0, trainer={"min_epochs": 6})
    assert trainer.state.epochs_seen == 6


def test_an_evaluation_of_its_own_is_no_check() -> None:
    trainer, hook = stop(3.0, 2.0, 2.5, 2.5)
    trainer.validate(loaders=batches(1))
    assert hook.checks == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": -1}, "patience=-1 must be a whole number from 0"),
        ({"patience": 1.5}, "patience=1.5"),
        ({"patience": True}, "patience=True"),
        ({"mode": "least"}, "mode='least', allowed: 'auto', 'min', 'max'"),
        ({"min_delta": "a"}, "min_delta='a'"),
        ({"monitor": None}, "monitor=None"),
        ({"stopping_threshold": "low"}, "stopping_threshold='low'"),
        ({"divergence_threshold": math.nan}, "divergence_threshold=nan"),
        ({"verbose": 1}, "verbose=1"),
        ({"check_on_train_epoch_end": "no"}, "check_on_train_epoch_end='no'"),
        ({"check_finite": 0}, "check_finite=0"),
    ],
)
def test_wrong_parameters_are_refused_when_they_are_written(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        EarlyStopping(**options)


# ---- which direction is better -----------------------------------------------------------------------------------


def test_the_name_of_the_metric_decides_which_direction_is_better(caplog: pytest.LogCaptureFixture) -> None:
    hook = EarlyStopping("val/accuracy", patience=2)
    runner = quiet(max_epochs=5, hooks=[hook])
    with caplog.at_level(logging.INFO, "hookline"):
        runner.fit(Scripted(0.1, 0.2, 0.3, 0.4, 0.5, name="val/accuracy"), batches(2), batches(1))
    assert (runner.status, hook.mode, hook.best_score) == ("completed", "max", 0.5)
    said = [each.message for each in caplog.records if "higher is better" in each.message]
    assert said == [
        "EarlyStopping: higher is better for 'val/accuracy', by its name (mode='max'). Pass mode='min' for the "
        "opposite."
    ]
    assert [EarlyStopping(name).mode for name in ("val/loss", "val/distance", "val/score")] == ["min"] * 3


def test_a_given_mode_wins_over_the_name(caplog: pytest.LogCaptureFixture) -> None:
    hook = EarlyStopping("val/accuracy", patience=1, mode="min")
    with caplog.at_level(logging.INFO, "hookline"):
        quiet(max_epochs=5, hooks=[hook]).fit(Scripted(0.1, 0.2, name="val/accuracy"), batches(2), batches(1))
    assert (hook.mode, hook.best_score, hook.checks) == ("min", 0.1, 2)
    assert "by its name" not in caplog.text


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            {"mode": "min"},
            {"mode": "max"},
            "saved with mode='min', and the hook has mode='max': its best value, 0.1",
        ),
        ({"mode": "min"}, {}, "has mode='max', by the name of the metric: its best value, 0.1, is not used"),
        (
            {"monitor": "val/loss", "check_on_train_epoch_end": True},
            {},
            "with monitor='val/loss' and mode='min', and the hook has monitor='val/accuracy' and mode='max'",
        ),
    ],
)
def test_a_best_value_of_another_mode_or_metric_is_not_used(
    before: dict[str, Any], after: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Both(Scripted):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val/loss", 0.1)

    usual = {"monitor": "val/accuracy", "patience": 3}
    for epochs, options, scores in ((3, before, (0.1, 0.2, 0.3)), (4, after, (0.4,))):
        hook = EarlyStopping(**{**usual, **options})
        runner = quiet(max_epochs=epochs, run_dir="run", checkpoint=True, hooks=[hook])
        runner.fit(Both(*scores, name="val/accuracy"), batches(2), batches(1), resume="auto")
    assert (hook.best_score, hook.wait_count, hook.checks) == (0.4, 0, 4)
    assert len([each for each in caplog.records if says in each.message]) == 1


def test_a_saved_state_without_a_mode_was_of_the_default_of_that_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = EarlyStopping("val/accuracy", mode="max")
    state = {**given.state_dict(), "best_score": 0.4, "wait_count": 1}
    del state["mode"], state["monitor"]
    given.load_state_dict(state)
    assert (given.best_score, caplog.text) == (0.4, "")  # a mode that is given is taken for that of the state
    by_name = EarlyStopping("val/accuracy")
    by_name.load_state_dict(state)
    assert (by_name.best_score, by_name.wait_count) == (None, 0) and "mode='min'" in caplog.text


def test_a_misspelled_parameter_comes_with_the_right_one() -> None:
    with pytest.raises(
        TypeError, match="unexpected keyword argument 'pateince'. Did you mean 'patience'"
    ) as error:
        EarlyStopping(pateince=3)  # type: ignore[call-arg]
    assert isinstance(error.value, HooklineError)  # which a notebook shows without Hookline's frames


def test_an_unknown_parameter_comes_with_those_that_there_are() -> None:
    with pytest.raises(
        TypeError, match="argument 'log_rank_zero_only'. Arguments: monitor, patience, mode, "
    ):
        EarlyStopping(log_rank_zero_only=True)  # type: ignore[call-arg]


# ---- in a loop of which it is not known whether it validates -----------------------------------------------


def loop(hook: Any, tmp_path: Path, validates_at: int, epochs: int = 3, score: str = "val/score") -> Line:
    """Train epochs of two updates, with a validation every so many updates, 0: without any."""
    net = nn.Linear(4, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with Line(net, sgd, hooks=[hook], run_dir=tmp_path) as line:
        for _ in line.epochs(epochs):
            for batch in line.epoch(torch.randn(2, 3, 4)):
                sgd.zero_grad()
                line.backward(net(batch).square().mean())
                sgd.step()
                if validates_at and line.state.step % validates_at == 0:
                    for _ in line.validation([1]):
                        line.log(score, 0.5)
    return line


CHECKS: list[Any] = [
    *(
        functools.partial(EarlyStopping, "val/score", check_on_train_epoch_end=at)
        for at in (None, True, False)
    ),
    *(
        functools.partial(ModelCheckpoint, "val/score", save_on_train_epoch_end=at)
        for at in (None, True, False)
    ),
]
names = [f"{make.func.__name__}-{[*make.keywords.values()][0]}" for make in CHECKS]
in_loops = pytest.mark.parametrize("make", CHECKS, ids=names)


@in_loops
def test_a_loop_may_validate_for_the_first_time_after_its_first_epoch(make: Any, tmp_path: Path) -> None:
    hook = make()
    loop(hook, tmp_path, validates_at=3)
    assert (hook.best_score if isinstance(hook, EarlyStopping) else hook.best_model_score) == 0.5


@in_loops
def test_a_loop_without_a_validation_ends_with_a_warning(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook = make()
    with caplog.at_level(logging.WARNING):
        loop(hook, tmp_path, validates_at=0)
    assert f"{type(hook).__name__} never checked 'val/score'" in caplog.text


@in_loops
def test_a_metric_that_the_first_validation_of_a_loop_lacks_is_an_error(make: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'val/score', which was not logged. Did you mean 'val/scores'"):
        loop(make(), tmp_path, validates_at=3, score="val/scores")


@pytest.mark.parametrize("name", ["train/perplexity", "train-loss", "traim/loss"])
def test_a_misspelt_metric_of_training_is_an_error_at_the_first_epoch_end_of_a_loop(
    name: str, tmp_path: Path
) -> None:
    for kind in (EarlyStopping, ModelCheckpoint):
        with pytest.raises(OptionError, match="which was not logged.*Metrics: train/loss"):
            loop(kind(monitor=name), tmp_path, validates_at=0, epochs=1)
