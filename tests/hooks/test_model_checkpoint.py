"""Keeping checkpoints: the best, the last, their names, when, and what a resumed run knows of them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hooks.kept import Reasons, Scripted, keep, names
from tiny import Adapted, Net, batches, quiet

from hookline import Hook, HookError, OptionError
from hookline.checkpoint.catalog import best_first, find_checkpoints
from hookline.checkpoint.files import read_manifest
from hookline.hooks.model_checkpoint import ModelCheckpoint


def weights(path: str | Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(path) / "model.safetensors")


# ---- which ones --------------------------------------------------------------------------------------------------


def test_only_the_best_is_kept_and_nothing_is_saved_without_improvement() -> None:
    hook, there, saved = keep(3.0, 2.0, 2.5, 2.0)
    assert there == ["s4"]
    assert saved == [("s2", "best", 2), ("s4", "best", 4)]
    assert hook.best_model_path == "run/checkpoints/s4"
    assert (hook.best_model_score, hook.current_score) == (2.0, 2.0)


def test_the_best_k_are_kept() -> None:
    hook, there, saved = keep(5.0, 3.0, 4.0, 6.0, 2.0, save_top_k=3)
    assert there == ["s10", "s4", "s6"]
    assert [name for name, _, _ in saved] == ["s2", "s4", "s6", "s10"]
    assert hook.best_k_models == {
        "run/checkpoints/s4": 3.0,
        "run/checkpoints/s6": 4.0,
        "run/checkpoints/s10": 2.0,
    }
    assert hook.best_model_path.endswith("s10")


def test_higher_is_better_with_mode_max() -> None:
    hook, there, _ = keep(0.1, 0.3, 0.2, mode="max")
    assert there == ["s4"]
    assert hook.best_model_score == 0.3


@pytest.mark.parametrize("kept", [1, 2, 3, -1])
def test_of_equal_scores_the_first_one_is_the_best(kept: int) -> None:
    hook, there, _ = keep(2.0, 2.0, 2.0, 2.0, save_top_k=kept)
    assert hook.best_model_path.endswith("s2")
    assert there[0] == "s2" and len(there) == (4 if kept == -1 else kept)
    found = best_first(find_checkpoints(Path("run"))[0])
    assert [each.path.name for each in found] == there


def test_a_better_score_displaces_the_newest_of_equal_ones() -> None:
    assert keep(2.0, 2.0, 1.0, save_top_k=2)[1] == ["s2", "s6"]


def test_all_or_none_can_be_kept() -> None:
    assert keep(1.0, 2.0, 3.0, save_top_k=-1)[1] == ["s2", "s4", "s6"]
    assert keep(1.0, 2.0, save_top_k=0, trainer={"run_dir": "other"})[2] == []


def test_a_score_that_is_no_number_never_becomes_best() -> None:
    hook, there, saved = keep(math.nan, 5.0, math.nan, -math.inf, 4.0)
    assert [name for name, _, _ in saved] == ["s4", "s10"]
    assert (there, hook.best_model_score) == (["s10"], 4.0)


def test_without_a_metric_the_newest_are_kept() -> None:
    hook, there, saved = keep(1.0, 1.0, 1.0, monitor=None, save_top_k=2)
    assert there == ["s4", "s6"]
    assert {reason for _, reason, _ in saved} == {"interval"}
    assert hook.best_model_path.endswith("s6")
    assert hook.best_model_score is None


def test_the_last_state_is_kept_whatever_its_score() -> None:
    hook, there, saved = keep(1.0, 2.0, 3.0, save_last=True)
    assert there == ["last", "s2"]
    assert saved[-1] == ("last", "last", 6)
    assert hook.last_model_path == "run/checkpoints/last"
    assert json.loads((Path(hook.last_model_path) / "state.json").read_text())["counters"]["step"] == 6


def test_the_end_of_a_run_is_kept_as_last_also_between_two_looks() -> None:
    _, _, saved = keep(1.0, 1.0, save_last=True, trainer={"max_epochs": None, "max_steps": 3})
    assert saved[-1] == ("last", "last", 3)


def test_what_is_saved_is_what_was_measured() -> None:
    net, seen = Scripted(1.0, 2.0), []
    hook = ModelCheckpoint("val/score")
    trainer = quiet(max_epochs=2, run_dir="run", hooks=[hook])
    trainer.on("validation_end")(lambda module: seen.append(module.layer.weight.detach().clone()))
    trainer.fit(net, batches(2), batches(1))
    assert torch.equal(weights(hook.best_model_path)["layer.weight"], seen[0])


def test_an_older_one_goes_only_once_the_new_one_is_there() -> None:
    there: list[list[str]] = []

    class Look(Hook):
        def on_checkpoint_save(self) -> None:
            there.append(names())

    hook = ModelCheckpoint("val/score", filename="s{step}", auto_insert_metric_name=False)
    quiet(max_epochs=2, run_dir="run", hooks=[hook, Look()]).fit(Scripted(2.0, 1.0), batches(2), batches(1))
    assert there == [["s2"], ["s2", "s4"]]
    assert names() == ["s4"]


# ---- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dirpath", "said"), [("", "is empty"), ("a\0b", "NUL"), ("x" * 300, "300 bytes"), (3, "must be a path")]
)
def test_folders_that_cannot_be_are_refused_when_they_are_written(dirpath: Any, said: str) -> None:
    with pytest.raises(OptionError, match=f"(?s)ModelCheckpoint: dirpath=.*{said}"):
        ModelCheckpoint(dirpath=dirpath)


@pytest.mark.parametrize("dirpath", ["../elsewhere", "a/../../b"])
def test_folders_outside_the_run_are_refused(dirpath: str) -> None:
    with pytest.raises(OptionError, match="inside the run's directory"):
        ModelCheckpoint(dirpath=dirpath)


def test_an_absolute_folder_must_be_inside_the_run(tmp_path: Path) -> None:
    trainer = quiet(run_dir="run", hooks=[ModelCheckpoint(dirpath=tmp_path / "elsewhere")])
    with pytest.raises(OptionError, match="outside the run's directory"):
        trainer.fit(Net(), batches(1))
    assert trainer.global_step == 0
    hook = ModelCheckpoint(dirpath=tmp_path / "run" / "mine")
    quiet(run_dir=tmp_path / "run", hooks=[hook]).fit(Net(), batches(1))
    assert names("run/mine") == ["epoch=0-step=1"]


# ---- when --------------------------------------------------------------------------------------------------------


def test_every_n_epochs() -> None:
    assert keep(*[1.0] * 5, monitor=None, every_n_epochs=2, save_top_k=-1)[1] == ["s4", "s8"]


def test_every_n_steps_without_a_metric() -> None:
    hook = ModelCheckpoint(
        every_n_train_steps=3, save_top_k=-1, filename="s{step}", auto_insert_metric_name=False
    )
    quiet(max_epochs=2, run_dir="run", hooks=[hook]).fit(Net(), batches(5), batches(1))
    assert names() == ["s3", "s6", "s9"]


def test_every_n_steps_with_a_metric_waits_for_its_next_value() -> None:
    """Due at steps 3 and 6; the scores of the validations at 4 and 6 decide, each once, and no old score is used again."""
    _, there, saved = keep(2.0, 1.0, 0.5, every_n_train_steps=3, save_top_k=-1)
    assert [step for _, _, step in saved] == [4, 6]


WAITS = "saves when its metric has a new value, and it had none since the last time"


@pytest.mark.parametrize(
    ("monitor", "advice"),
    [
        (
            "val/loss",
            r"waits for the next validation\. .*Or validate as often: Trainer\(val_check_interval=\.\.\.\)",
        ),
        ("train/loss", r"waits for the next epoch end\. .*Or monitor a value that training_step logs\."),
    ],
)
def test_a_checkpoint_that_waits_for_its_metric_is_reported_once_with_what_saves_at_the_interval(
    caplog: pytest.LogCaptureFixture, monitor: str, advice: str
) -> None:
    hook = ModelCheckpoint(monitor, every_n_train_steps=2)
    trainer = quiet(max_epochs=2, run_dir="run", hooks=[hook])
    trainer.fit(Net(), batches(8), batches(1))
    (said,) = [each for each in caplog.messages if WAITS in each]
    assert re.search(advice, said)
    assert f"ModelCheckpoint(monitor={monitor!r}, every_n_train_steps=2) saves when" in said
    second = re.search(r"without a monitor: ModelCheckpoint\((.*?), dirpath='(.*?)'\)", said)
    assert second and second[1] == "every_n_train_steps=2"
    more = ModelCheckpoint(every_n_train_steps=2, dirpath=second[2], save_top_k=-1)
    quiet(run_dir="more", hooks=[ModelCheckpoint(monitor, every_n_train_steps=2), more]).fit(
        Net(), batches(8), batches(1)
    )
    assert len(names("more/by_time")) == 4
    trainer.fit(Net(), batches(8), batches(1))
    assert sum(WAITS in each for each in caplog.messages) == 3, "once in each run"


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"monitor": "val/loss"}, {"val_check_interval": 2}),
        ({"monitor": "val/loss", "save_last": True}, {}),
        ({"monitor": "train/own"}, {}),
        ({}, {}),
    ],
    ids=["validated", "last", "logged", "unmonitored"],
)
def test_a_checkpoint_that_does_not_wait_for_its_metric_reports_nothing(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("train/own", loss.detach())
            return loss

    hook = ModelCheckpoint(**settings, every_n_train_steps=2)
    quiet(max_epochs=3, run_dir="run", hooks=[hook], **options).fit(Logs(), batches(6), batches(1))
    assert WAITS not in caplog.text and hook.best_model_path


def test_a_metric_that_was_not_measured_again_saves_nothing() -> None:
    hook = ModelCheckpoint("val/score", save_top_k=-1, save_on_train_epoch_end=True, strict=False)
    record = Reasons()
    trainer = quiet(max_epochs=5, check_val_every_n_epoch=2, run_dir="again", hooks=[hook, record])
    trainer.fit(Scripted(2.0, 1.0), batches(2), batches(1))
    assert [step for _, reason, step in record.saved if reason != "last"] == [4, 8]


def test_every_so_often_by_the_clock() -> None:
    hook = ModelCheckpoint(
        train_time_interval=1e-6, save_top_k=-1, filename="s{step}", auto_insert_metric_name=False
    )
    quiet(run_dir="run", hooks=[hook]).fit(Net(), batches(3))
    assert names() == ["s1", "s2", "s3"]
    hook = ModelCheckpoint(train_time_interval="10 hours", save_top_k=-1)
    quiet(run_dir="other", hooks=[hook]).fit(Net(), batches(3))
    assert names("other/checkpoints") == []


@pytest.mark.parametrize(
    ("given", "shown"), [("3 seconds", "3"), (0.25, "0.25"), ("10 hours", "36000"), (1e-6, "0.000001")]
)
def test_an_interval_of_time_is_shown_without_zeros_at_its_end(given: Any, shown: str) -> None:
    trainer = quiet(run_dir="run", hooks=[ModelCheckpoint(train_time_interval=given)])
    trainer.fit(Net(), batches(1))
    assert f"every {shown} seconds" in str(trainer.explain())


def test_without_validation_it_looks_at_epoch_ends() -> None:
    hook = ModelCheckpoint("train/loss", save_top_k=-1)
    quiet(max_epochs=2, run_dir="run", hooks=[hook]).fit(Net(), batches(2))
    assert names() == ["epoch=0-step=2", "epoch=1-step=4"]


def test_only_after_validations_if_told_so() -> None:
    hook = ModelCheckpoint(save_on_train_epoch_end=False, save_top_k=-1)
    quiet(max_epochs=4, run_dir="run", check_val_every_n_epoch=2, hooks=[hook]).fit(
        Net(), batches(2), batches(1)
    )
    assert names() == ["epoch=1-step=4", "epoch=3-step=8"]


def test_a_run_of_steps_without_validation_leaves_its_end() -> None:
    hook = ModelCheckpoint()
    quiet(max_epochs=None, max_steps=3, run_dir="run", hooks=[hook]).fit(Net(), batches(10))
    assert names() == ["epoch=0-step=3"]


def test_the_sanity_check_saves_nothing_and_finds_a_misspelt_metric() -> None:
    trainer = quiet(num_sanity_val_steps=1, run_dir="run", hooks=[ModelCheckpoint("val_loss")])
    with pytest.raises(OptionError, match="Did you mean 'val/loss'"):
        trainer.fit(Net(), batches(2), batches(1))
    assert trainer.global_step == 0
    assert names() == []


@pytest.mark.parametrize("when", [{}, {"every_n_train_steps": 1}, {"every_n_epochs": 1}])
def test_a_metric_of_training_is_judged_when_its_epoch_is_over_however_often_there_is_a_validation(
    when: dict[str, int],
) -> None:
    record = Reasons()
    hook = ModelCheckpoint(
        "train/loss", filename="s{step}", auto_insert_metric_name=False, save_top_k=-1, **when
    )
    trainer = quiet(max_epochs=2, run_dir="run", val_check_interval=1, hooks=[hook, record])
    trainer.fit(Net(), batches(2), batches(1))
    assert record.saved == [("s2", "best", 2), ("s4", "best", 4)]
    assert hook.current_score == trainer.metrics["train/loss"] == hook.best_k_models["run/checkpoints/s4"]


def test_a_missing_metric_is_an_error() -> None:
    with pytest.raises(OptionError, match="ModelCheckpoint monitors 'accuracy', which was not logged"):
        keep(1.0, monitor="accuracy")


def test_a_metric_that_has_no_number_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    _, there, _ = keep(math.nan, math.nan)
    assert there == []
    assert [each.getMessage() for each in caplog.records] == [
        "ModelCheckpoint monitors 'val/score', which is nan: such a value is never the best.",
        "NaN in the last validation: val/score. The model may be of no use.",  # of the run, at its end
    ]


class Failing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("wanted", "there"), [(True, ["exception-step=3"]), (False, [])])
def test_a_failing_run_is_saved_if_wanted(wanted: bool, there: list[str]) -> None:
    record = Reasons()
    with pytest.raises(ValueError, match="boom"):
        quiet(run_dir="run", hooks=[ModelCheckpoint(save_on_exception=wanted), record]).fit(
            Failing(), batches(5)
        )
    assert names() == there
    assert [reason for _, reason, _ in record.saved] == ["exception"] * len(there)


# ---- over a resume, and together ---------------------------------------------------------------------------------


def test_a_resumed_run_knows_the_best_so_far() -> None:
    first, _, _ = keep(3.0, 1.0, 2.0, save_top_k=2, save_last=True)
    hook = ModelCheckpoint("val/score", save_top_k=2, filename="s{step}", auto_insert_metric_name=False)
    net = Scripted(2.5, 1.5)
    quiet(max_epochs=5, run_dir="run", hooks=[hook]).fit(
        net, batches(2), batches(1), resume=first.last_model_path
    )
    assert names(last=True) == ["last", "s10", "s4"]
    assert hook.best_model_score == 1.0
    assert hook.best_model_path == "run/checkpoints/s4"


def test_a_checkpoint_knows_of_itself() -> None:
    """Resumed from the best one, a worse score is not taken for an improvement."""
    first, _, _ = keep(3.0, 1.0)
    hook = ModelCheckpoint("val/score", filename="s{step}", auto_insert_metric_name=False)
    trainer = quiet(max_epochs=3, run_dir="run", hooks=[hook])
    trainer.fit(Scripted(2.0), batches(2), batches(1), resume=first.best_model_path)
    assert names() == ["s4"]
    assert (hook.best_model_score, hook.best_model_path) == (1.0, "run/checkpoints/s4")


def test_a_run_resumed_elsewhere_leaves_the_old_folder_alone() -> None:
    first, _, _ = keep(3.0, 2.0)
    hook = ModelCheckpoint("val/score")
    quiet(max_epochs=3, run_dir="second", hooks=[hook]).fit(
        Scripted(1.0), batches(2), batches(1), resume=first.best_model_path
    )
    assert names() == ["s4"]
    assert names("second/checkpoints") == ["epoch=2-step=6"]


def test_a_second_fit_begins_anew() -> None:
    hook = ModelCheckpoint("val/score")
    trainer = quiet(max_epochs=1, hooks=[hook])
    trainer.fit(Scripted(1.0), batches(2), batches(1))
    first = hook.best_model_path
    trainer.fit(Scripted(5.0), batches(2), batches(1))
    assert hook.best_model_score == 5.0
    assert Path(first).is_dir() and Path(hook.best_model_path).is_dir() and first != hook.best_model_path


def test_two_that_would_write_under_the_same_names_are_refused() -> None:
    trainer = quiet(run_dir="run", hooks=[ModelCheckpoint(), ModelCheckpoint(every_n_train_steps=1)])
    with pytest.raises(HookError, match="give one another dirpath"):
        trainer.fit(Net(), batches(2))
    quiet(
        run_dir="run", hooks=[ModelCheckpoint(), ModelCheckpoint(every_n_train_steps=1, dirpath="steps")]
    ).fit(Net(), batches(2))
    assert names("run/steps") == ["epoch=0-step=2"]


def test_nothing_but_checkpoints_is_left_behind() -> None:
    keep(3.0, 2.0, 1.0, save_last=True)
    assert sorted(each.name for each in Path("run").rglob(".*")) == []


def test_it_costs_a_step_nothing_unless_it_goes_by_steps() -> None:
    assert "on_step_end" not in [
        each.event.name for each in quiet(hooks=[ModelCheckpoint()]).hooks.entries()[0].listeners
    ]
    trainer = quiet(hooks=[ModelCheckpoint(every_n_train_steps=100)])
    assert "on_step_end" in [each.event.name for each in trainer.hooks.entries()[0].listeners]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"save_top_k": True}, "save_top_k=True"),
        ({"mode": "best"}, "mode='best'"),
        ({"monitor": ""}, "monitor=''"),
        ({"save_last": "yes"}, "save_last='yes'"),
        ({"every_n_epochs": -1}, "every_n_epochs=-1"),
        ({"every_n_train_steps": 1.5}, "every_n_train_steps=1.5"),
        ({"train_time_interval": "soon"}, "train_time_interval='soon'"),
        ({"every_n_train_steps": 5, "every_n_epochs": 1}, "cannot be combined"),
        ({"save_on_exception": 1}, "save_on_exception=1"),
        ({"save_on_train_epoch_end": "x"}, "save_on_train_epoch_end='x'"),
        ({"auto_insert_metric_name": None}, "auto_insert"),
    ],
)
def test_wrong_parameters_are_refused_when_they_are_written(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ModelCheckpoint(**options)


def test_a_resumed_run_does_not_take_the_old_score_for_a_new_one() -> None:
    options: dict[str, Any] = {
        "monitor": "val/score",
        "save_top_k": -1,
        "save_on_train_epoch_end": True,
        "strict": False,
    }
    first, record = ModelCheckpoint(**options), Reasons()
    quiet(max_epochs=2, check_val_every_n_epoch=2, run_dir="run", hooks=[first]).fit(
        Scripted(2.0), batches(2), batches(1)
    )
    trainer = quiet(
        max_epochs=4, check_val_every_n_epoch=2, run_dir="run", hooks=[ModelCheckpoint(**options), record]
    )
    trainer.fit(Scripted(1.0), batches(2), batches(1), resume=first.best_model_path)
    assert [step for _, _, step in record.saved] == [8]


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("on_step_end", {"every_n_train_steps": 2}),
        ("on_step_end", {"train_time_interval": 60}),
        ("on_exception", {"save_on_exception": True}),
    ],
)
def test_a_subclass_whose_method_would_be_replaced_is_refused(event, arguments):
    mine = type("Mine", (ModelCheckpoint,), {event: lambda self: None})
    mine()
    with pytest.raises(OptionError, match=f"Mine.{event} would never be called.*hook of its own"):
        mine(**arguments)


# ---- trainable weights only ------------------------------------------------------------------------------------------


def test_a_monitor_keeps_trainable_weights_and_one_beside_it_all(tmp_path: Path) -> None:
    hooks = [
        ModelCheckpoint(filename="small", weights="trainable", save_last=True, dirpath="small"),
        ModelCheckpoint(filename="large"),
    ]
    module = Adapted()
    quiet(run_dir="run", max_epochs=2, hooks=hooks).fit(module, batches(2))
    for name in ("small/small", "small/last"):
        manifest = read_manifest(f"run/{name}")
        assert manifest["base"] and manifest["kind"] != "hookline checkpoint"
    assert "base" not in read_manifest("run/checkpoints/large")


def test_a_hook_that_is_added_during_a_run_is_refused_at_its_first_request(tmp_path: Path) -> None:
    class Adds(Hook):
        def on_train_start(self, trainer: Any) -> None:
            trainer.add_hook(ModelCheckpoint(weights="trainable"))

    with pytest.raises(OptionError, match=r"add ModelCheckpoint\(weights='trainable'\) before fit"):
        quiet(run_dir="run", hooks=[Adds()]).fit(Adapted(), batches(2))


def test_weights_of_another_kind_are_refused() -> None:
    with pytest.raises(OptionError, match="ModelCheckpoint: weights='lora', allowed: .*'trainable'"):
        ModelCheckpoint(weights="lora")  # type: ignore[arg-type]


# ---- which direction is better -----------------------------------------------------------------------------------


class Accurate(Net):
    """A network whose validation accuracy is dictated."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores = list(scores)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val/loss", 1.0)

    def on_validation_epoch_end(self) -> None:
        self.log("val/accuracy", self.scores.pop(0))


def accurate(*scores: float, epochs: int, **options: Any) -> tuple[ModelCheckpoint, Net]:
    """Continue the run in the directory `run` up to an epoch."""
    hook = ModelCheckpoint(**{"monitor": "val/accuracy", "restore_best": True, **options})
    net = Accurate(*scores)
    trainer = quiet(max_epochs=epochs, run_dir="run", checkpoint=True, hooks=[hook])
    trainer.fit(net, batches(2), batches(1), resume="auto")
    return hook, net


def test_the_best_accuracy_is_the_highest_without_a_mode() -> None:
    hook, net = accurate(0.2, 0.9, 0.1, epochs=3)
    assert (hook.mode, hook.best_model_score, Path(hook.best_model_path).name) == (
        "max",
        0.9,
        "epoch=1-step=4",
    )
    assert torch.equal(net.layer.weight, weights(hook.best_model_path)["layer.weight"])
    assert ModelCheckpoint(monitor="val/accuracy", mode="min").mode == "min"
    assert ModelCheckpoint().mode == ModelCheckpoint(monitor="val/score").mode == "min"


def test_the_best_of_another_mode_is_not_restored(caplog: pytest.LogCaptureFixture) -> None:
    worst, _ = accurate(0.4, 0.3, 0.8, epochs=3, mode="min")
    assert worst.best_model_score == 0.3
    caplog.clear()
    hook, net = accurate(epochs=3, mode="max")  # nothing to train
    assert (hook.best_model_path, hook.best_model_score) == ("", None)
    assert not torch.equal(net.layer.weight, weights(worst.best_model_path)["layer.weight"])
    assert torch.equal(net.layer.weight, weights("run/checkpoints/last")["layer.weight"])
    assert caplog.text.count("saved with mode='min', and the hook has mode='max'") == 1
    assert f"its best, {worst.best_model_path}, is not used. The best is found anew" in caplog.text
    assert "no checkpoint was kept for a score of val/accuracy (mode='max')" in caplog.text
    hook, _ = accurate(0.7, epochs=4, mode="max")
    assert (hook.best_model_score, names()) == (0.7, ["epoch=3-step=8"])
    caplog.clear()
    hook, _ = accurate(0.6, epochs=5, mode="max")
    assert (hook.best_model_score, "saved with" in caplog.text) == (0.7, False)


def test_kept_checkpoints_are_ranked_anew_when_the_mode_changes() -> None:
    accurate(0.4, 0.3, 0.8, epochs=3, mode="min", save_top_k=-1)
    hook, net = accurate(epochs=3, save_top_k=-1)
    assert (hook.best_model_score, Path(hook.best_model_path).name) == (0.8, "epoch=2-step=6")
    accurate(0.9, 0.1, epochs=5, mode="min", save_top_k=2)  # 0.4, 0.3 and the newest
    hook, _ = accurate(0.2, epochs=6, save_top_k=2)
    assert hook.best_model_score == max(hook.best_k_models.values()) >= 0.3


def test_the_scores_of_another_metric_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    accurate(0.4, 0.3, epochs=2, monitor="val/loss")
    hook, _ = accurate(0.2, epochs=3)
    assert hook.best_k_models == {hook.best_model_path: 0.2}
    assert "saved with monitor='val/loss' and mode='min'" in caplog.text
    assert len(names()) == 2  # that of the other metric stays
    accurate(0.2, epochs=4, monitor=None, restore_best=False)
    assert "and the hook has monitor=None" in caplog.text
    caplog.clear()
    accurate(0.2, epochs=5, monitor=None, restore_best=False, mode="max")  # a mode of nothing
    assert "saved with" not in caplog.text


def test_of_scores_that_differ_by_rounding_the_first_is_the_best() -> None:
    hook, _ = accurate(0.92444441, 0.92444443, 0.5, epochs=3)
    assert (hook.best_model_score, names()) == (0.92444441, ["epoch=0-step=2"])
    hook, _ = accurate(0.92444442, 0.92444444, epochs=5, save_top_k=2)
    assert Path(hook.best_model_path).name == "epoch=0-step=2"
