"""Ending trials of Optuna early: real studies, what a pruned run leaves, several ranks, resumes, refusals."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from ranks.torchrun import torchrun
from test_budgets import is_ours, per_step, with_hooks, without_hooks
from tiny import Net, batches, quiet

from hookline import Hook, Line, OptionError, Trainer
from hookline.hooks import EarlyStopping, ModelCheckpoint, OptunaPruning
from hookline.report.reader import read_run
from hookline.report.run_events import all_events, level, status_in_words
from hookline.report.runs import list_runs
from hookline.report.summary import summarize

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Scripted(Net):
    """A network whose validation loss is dictated."""

    def __init__(self, *losses: float) -> None:
        super().__init__()
        self.losses, self.at = losses, 0

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return None

    def on_validation_epoch_end(self, sanity_checking: bool) -> None:
        if not sanity_checking:
            self.log("val/loss", self.losses[min(self.at, len(self.losses) - 1)])
            self.at += 1


class PrunesAt(optuna.pruners.BasePruner):
    """Prunes a trial at its report of this number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.last_step is not None and trial.last_step >= self.number


def new_trial(at: int = 99, direction: str = "minimize") -> optuna.Trial:
    return optuna.create_study(direction=direction, pruner=PrunesAt(at)).ask()


def reports(trial: optuna.Trial) -> dict[int, float]:
    return trial.study.trials[trial.number].intermediate_values


def test_a_study_ends_its_worst_trials_early_and_records_them_as_pruned() -> None:
    steps: list[int] = []

    def objective(trial: optuna.Trial) -> float:
        level = trial.suggest_float("level", 0, 10)
        trainer = quiet(max_epochs=6, hooks=[OptunaPruning(trial)])
        try:
            trainer.fit(Scripted(*(level + 1 / epoch for epoch in range(1, 7))), batches(4), batches(2))
        finally:
            steps.append(trainer.global_step)
        return trainer.metrics["val/loss"]

    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1))
    for wanted in (2, 3, 7, 8, 1):
        study.enqueue_trial({"level": wanted})
    study.optimize(objective, n_trials=5)
    states = [each.state for each in study.trials]
    done, pruned = TrialState.COMPLETE, TrialState.PRUNED
    assert states == [done, done, pruned, pruned, done]
    assert steps == [24, 24, 8, 8, 24]
    assert list(study.trials[2].intermediate_values) == [0, 1]
    assert study.best_params == {"level": 1}


def test_a_pruned_run_ends_like_a_stopped_one_and_says_so_everywhere(tmp_path: Path) -> None:
    class Notes(Hook):
        heard: list[str]

        def on_train_end(self, status: str) -> None:
            self.heard = [f"train end {status}"]

        def on_fit_end(self) -> None:
            self.heard.append("fit end")

        def on_exception(self) -> None:
            self.heard.append("exception")

        def teardown(self) -> None:
            self.heard.append("teardown")

    notes, run_dir = Notes(), tmp_path / "run"
    trainer = Trainer(
        run_dir=str(run_dir),
        max_epochs=5,
        enable_progress_bar=False,
        hooks=[notes, OptunaPruning(new_trial(1))],
    )
    with pytest.raises(optuna.TrialPruned, match=r"val/loss = 2 at step 4 \(report 1\)") as ended:
        trainer.fit(Scripted(1.0, 2.0), batches(2), batches(1))
    assert not hasattr(ended.value, "__notes__")  # no summary of a failure
    assert notes.heard == ["train end pruned", "fit end", "teardown"]
    assert (trainer.status, trainer.global_step, trainer._run) == ("pruned", 4, None)
    record = json.loads((run_dir / "run.json").read_text())
    assert (record["status"], record["step"], record["error"]) == ("pruned", 4, None)
    assert record["reason"].startswith("OptunaPruning: val/loss = 2 at step 4")
    assert record["monitors"]["optuna_pruning"] == {"metric": "val/loss", "mode": "min", "best": 1.0}
    assert json.loads((run_dir / "checkpoints" / "last" / "manifest.json").read_text())["step"] == 4
    assert [each.status for each in list_runs(tmp_path).runs] == ["pruned"]
    (about,) = summarize([run_dir])["runs"]
    assert (about["status"], about["error"]) == ("pruned", None) and "not promising" in about["reason"]
    run = read_run(run_dir)
    assert status_in_words(run, 0.0) == ("pruned", "warn")
    assert [(each.kind, level(each.kind)) for each in all_events(run)][-1] == ("pruned", "warn")
    last = json.loads((run_dir / "log.jsonl").read_text().splitlines()[-1])
    assert (last["type"], last["status"]) == ("end", "pruned")


def test_a_pruned_run_is_finished_and_prunes_again_if_it_is_resumed(tmp_path: Path) -> None:
    def fit(trial: optuna.Trial, **options: Any) -> Trainer:
        hooks = [OptunaPruning(trial)]
        trainer = Trainer(
            run_dir=str(tmp_path), enable_progress_bar=False, hooks=hooks, **{"max_epochs": 5, **options}
        )
        try:
            trainer.fit(Scripted(1.0), batches(2), batches(1), resume="auto")
        except optuna.TrialPruned:
            assert trainer.status == "pruned"
        return trainer

    assert fit(new_trial(1)).global_step == 4
    again = new_trial()
    trainer = fit(again)
    assert (trainer.global_step, trainer.status, reports(again)) == (4, "pruned", {})
    longer = new_trial()
    trainer = fit(longer, max_epochs=6)  # other limits: it may continue, and so do the numbers of its reports
    assert (trainer.global_step, trainer.status) == (12, "completed")
    assert list(reports(longer)) == [2, 3, 4, 5]


def test_what_the_trial_has_already_is_not_reported_again(caplog: pytest.LogCaptureFixture) -> None:
    trial = new_trial()
    for loss in (1.0, 2.0):  # two folds
        quiet(max_epochs=2, hooks=[OptunaPruning(trial)]).fit(Scripted(loss), batches(1), batches(1))
    assert reports(trial) == {0: 1.0, 1: 1.0}
    assert "trial 0 has 2 reports of an earlier fit already" in caplog.text


def test_it_reports_every_n_steps_what_was_logged_since() -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx % 4 == 0:
                self.log("score", float(batch_idx))
            return super().training_step(batch, batch_idx)

    trial = new_trial(3)
    trainer = quiet(max_epochs=2, hooks=[OptunaPruning(trial, "train/loss", every="3 steps")])
    with pytest.raises(optuna.TrialPruned, match=r"train/loss = .* at step 12 \(report 3\)"):
        trainer.fit(Net(), batches(8))
    assert list(reports(trial)) == [0, 1, 2, 3] and trainer.global_step == 12
    trial = new_trial()
    quiet(hooks=[OptunaPruning(trial, "score", every="1 steps")]).fit(Logs(), batches(9))
    assert reports(trial) == {0: 0.0, 1: 4.0, 2: 8.0}
    with pytest.raises(OptionError, match="OptunaPruning monitors 'scor'.*Did you mean 'score'"):
        quiet(hooks=[OptunaPruning(new_trial(), "scor", every=1)]).fit(Logs(), batches(2))


def test_a_metric_of_training_is_reported_at_the_end_of_epochs() -> None:
    trial = new_trial(direction="maximize")
    hook = OptunaPruning(trial, "train/loss", mode="max")
    quiet(max_epochs=3, hooks=[hook]).fit(Net(), batches(2))
    assert list(reports(trial)) == [0, 1, 2]
    assert hook.best_score == max(reports(trial).values())


def test_a_run_that_another_hook_stops_first_is_stopped_and_not_pruned() -> None:
    trial = new_trial(1)
    hooks = [EarlyStopping(patience=1), OptunaPruning(trial)]
    trainer = quiet(max_epochs=5, hooks=hooks)
    trainer.fit(Scripted(1.0, 2.0), batches(2), batches(1))
    assert trainer.status == "stopped" and list(reports(trial)) == [0, 1]


def test_the_sanity_check_is_not_reported() -> None:
    trial = new_trial()
    quiet(max_epochs=1, num_sanity_val_steps=1, hooks=[OptunaPruning(trial)]).fit(
        Scripted(1.0), batches(2), batches(1)
    )
    assert list(reports(trial)) == [0]


def test_a_resumed_run_continues_the_numbers_of_its_reports(tmp_path: Path) -> None:
    trial = new_trial()

    class Fails(Hook):
        def on_train_batch_end(self, step: int) -> None:
            if step == 5:
                raise KeyError("broken")

    options: dict[str, Any] = {"run_dir": str(tmp_path), "enable_progress_bar": False, "max_epochs": 4}
    with pytest.raises(KeyError):
        Trainer(**options, hooks=[OptunaPruning(trial), Fails()]).fit(
            Scripted(1.0, 2.0), batches(2), batches(1)
        )
    assert reports(trial) == {0: 1.0, 1: 2.0}
    Trainer(**options, hooks=[OptunaPruning(trial)]).fit(Scripted(3.0), batches(2), batches(1), resume="auto")
    assert reports(trial) == {0: 1.0, 1: 2.0, 2: 3.0, 3: 3.0}


def test_a_rollback_reports_no_number_again(tmp_path: Path) -> None:
    """Optuna would warn and keep the first value."""
    trial = new_trial()

    class Undoes(Hook):
        def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
            if batches_seen == 2:
                trainer.save_checkpoint(tmp_path / "two")
            elif batches_seen == 5 and not (tmp_path / "gone").exists():
                (tmp_path / "gone").touch()
                trainer.roll_back(tmp_path / "two")

    quiet(hooks=[OptunaPruning(trial), Undoes()], max_epochs=3).fit(
        Scripted(1.0, 2.0, 3.0, 4.0), batches(2), batches(1)
    )
    assert reports(trial) == {0: 1.0, 1: 2.0, 2: 4.0}  # 3.0 has the number of 2.0


def test_a_loop_with_line_is_pruned_too() -> None:
    trial, net = new_trial(1), Net()
    line = Line(net, net.configure_optimizers(), hooks=[OptunaPruning(trial)])
    with pytest.raises(optuna.TrialPruned), line:
        for _ in line.epochs(5):
            for batch in line.epoch(batches(2)):
                line.backward(net.training_step(batch, 0))
                line.optimizers[0].step()
            for batch in line.validation(batches(1)):
                line.log("val/loss", net.validation_step(batch, 0))
    assert line.status == "pruned" and line.state.epochs_seen == 2


def test_a_loop_with_line_that_was_pruned_is_pruned_again(tmp_path: Path) -> None:
    trial = new_trial(1)
    for epochs in (2, 0):
        net, done = Net(), 0
        hooks = [OptunaPruning(trial), ModelCheckpoint(save_last=True)]
        line = Line(net, net.configure_optimizers(), hooks=hooks, run_dir=tmp_path)
        with pytest.raises(optuna.TrialPruned, match="is not promising"), line:
            line.load_checkpoint("auto")
            for _ in line.epochs(5):
                for batch in line.epoch(batches(2)):
                    line.backward(net.training_step(batch, 0))
                    line.optimizers[0].step()
                for batch in line.validation(batches(1)):
                    line.log("val/loss", net.validation_step(batch, 0))
                done += 1
        assert (done, line.status, line.global_step) == (epochs, "pruned", 4)


def test_a_stop_can_be_pruned_or_raise_without_optuna() -> None:
    class Ends(Hook):
        def __init__(self, **how: Any) -> None:
            self.how = how

        def on_train_batch_end(self, trainer: Any) -> None:
            trainer.stop("enough", **self.how)

    trainer = quiet(hooks=[Ends(status="pruned")])
    trainer.fit(Net(), batches(3))
    assert (trainer.status, trainer.global_step) == ("pruned", 1)
    with pytest.raises(LookupError, match="after all of it"):
        quiet(hooks=[Ends(raises=LookupError("after all of it"))]).fit(Net(), batches(3))
    with pytest.raises(OptionError, match="status='prund'.*Did you mean 'pruned'"):
        quiet(hooks=[Ends(status="prund")]).fit(Net(), batches(3))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: OptunaPruning("a trial"),
            "trial='a trial' must be the trial that Optuna passes.*configuration",
        ),
        (
            lambda: OptunaPruning(new_trial(), mode="max"),
            "mode='max', but the study has direction='minimize'",
        ),
        (lambda: OptunaPruning(new_trial(), mode="mni"), "mode='mni'"),
        (lambda: OptunaPruning(new_trial(), "vall/loss"), "Did you mean 'val/loss'"),
        (
            lambda: OptunaPruning(optuna.create_study(directions=["minimize", "maximize"]).ask()),
            "the study has 2 objectives",
        ),
    ],
)
def test_what_it_cannot_use_is_refused_when_it_is_made(make: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        make()


def test_what_cannot_work_is_refused_before_the_first_step() -> None:
    def refuses(text: str, *hooks: Hook) -> None:
        with pytest.raises(OptionError, match=text):
            quiet(hooks=hooks).fit(Net(), batches(2))

    refuses("trial=None on rank 0.*study.optimize", OptunaPruning(None))
    refuses("needs the metric 'val/loss'.*no validation data", OptunaPruning(new_trial()))
    on_zero = OptunaPruning(new_trial(), "train/loss")
    on_zero.ranks = "zero"
    refuses("all ranks must end together", on_zero)
    refuses("Two OptunaPruning", *(OptunaPruning(new_trial(), "train/loss", name=each) for each in "ab"))


def test_a_fixed_trial_trains_to_the_end() -> None:
    hook = OptunaPruning(optuna.trial.FixedTrial({"lr": 0.1}))
    trainer = quiet(hooks=[hook], max_epochs=2)
    trainer.fit(Scripted(1.0), batches(2), batches(1))
    assert (trainer.status, hook.reports) == ("completed", 2)


def test_it_costs_nothing_in_a_step() -> None:
    trial = new_trial()
    hook = OptunaPruning(trial, "train/loss")
    assert per_step(with_hooks(hook), is_ours) - without_hooks(is_ours) < 0.5  # a listener is one call


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "hookline"):
        yield caplog


ON_RANKS = """
    import logging, sys, optuna, torch
    from pathlib import Path
    from tiny import Net, batches, quiet
    from hookline.hooks import OptunaPruning
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rank = int(__import__("os").environ["RANK"])

    class PrunesAt1(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.last_step >= 1

    def objective(trial):
        trainer = quiet(max_epochs=4, strategy="ddp", device="cpu", run_dir="run", hooks=[OptunaPruning(trial)])
        try:
            trainer.fit(Net(), batches(4), batches(2))
        finally:
            print("ENDED", rank, trainer.status, trainer.global_step)
        return 0.0

    if rank == 0:
        storage = "sqlite:///" + str(Path("study.db").absolute())
        study = optuna.create_study(storage=storage, pruner=PrunesAt1())
        study.optimize(objective, n_trials=1)
        (trial,) = study.trials
        print("TRIAL", trial.state.name, sorted(trial.intermediate_values))
    else:
        try:
            objective(None)
        except optuna.TrialPruned:
            print("RAISED", rank)
"""


def test_rank_zero_reports_to_a_study_on_disk_and_all_ranks_end_together(tmp_path: Path) -> None:
    outcome = torchrun(ON_RANKS, tmp_path)
    assert outcome.code == 0, outcome.output
    assert outcome.lines("ENDED ") == ["0 pruned 4", "1 pruned 4"]
    assert outcome.lines("TRIAL ") == ["PRUNED [0, 1]"]
    assert outcome.lines("RAISED ") == ["1"]
