"""Names of checkpoints by a template."""

from __future__ import annotations

from pathlib import Path

import pytest
from hooks.kept import keep, names
from tiny import Net, batches, quiet

from hookline import OptionError
from hookline.checkpoint.files import read_manifest
from hookline.hooks import ModelCheckpoint


def test_a_template_may_name_metrics_with_a_slash() -> None:
    options = {"filename": "epoch_{epoch}_loss_{val/score:.2f}", "save_top_k": -1}
    assert keep(1.234, 0.5, **options)[1] == ["epoch_0_loss_1.23", "epoch_1_loss_0.50"]


def test_names_of_metrics_are_inserted_if_wanted_and_make_no_folders() -> None:
    options = {"filename": "{epoch}-{step:04d}-{val/score:.1f}", "auto_insert_metric_name": True}
    assert keep(1.25, **options)[1] == ["epoch=0-step=0002-val_score=1.2"]


def test_the_default_name_says_epoch_and_step() -> None:
    hook = ModelCheckpoint()
    quiet(max_epochs=1, run_dir="run", hooks=[hook]).fit(Net(), batches(2), batches(1))
    assert names() == ["epoch=0-step=2"]


def test_a_fixed_name_is_written_over_or_numbered() -> None:
    hook, there, _ = keep(3.0, 2.0, 1.0, filename="best")
    assert there == ["best"]
    assert hook.best_k_models == {"run/checkpoints/best": 1.0}
    _, there, _ = keep(3.0, 2.0, filename="best", save_top_k=2)
    assert there == ["best", "best-v1"]  # a new run replaces the checkpoints of the same name


def test_a_new_run_replaces_the_earlier_runs_checkpoint_of_the_same_name() -> None:
    keep(1.0, filename="best")
    first = read_manifest(Path("run/checkpoints/best"))
    hook, there, _ = keep(9.0, filename="best")
    assert there == ["best"] and hook.best_model_path == "run/checkpoints/best"
    assert read_manifest(Path(hook.best_model_path))["run"] != first["run"]


def test_a_folder_that_is_not_a_checkpoint_is_not_replaced() -> None:
    Path("run/checkpoints/best").mkdir(parents=True)
    Path("run/checkpoints/best/notes.txt").write_text("mine")
    hook, _, _ = keep(1.0, filename="best")
    assert hook.best_model_path == "run/checkpoints/best-v1"
    assert Path("run/checkpoints/best/notes.txt").read_text() == "mine"


def test_a_misspelt_metric_in_a_name_is_refused_with_the_right_one() -> None:
    with pytest.raises(
        OptionError, match="names 'val_score', which was not logged. Did you mean 'val/score'"
    ):
        keep(1.0, filename="x_{val_score:.2f}")


@pytest.mark.parametrize(
    "filename",
    ["../up", "a/b", "/abs", "..", ".hidden", "", "x\\y", "{epoch", "{}", "{epoch:.2q}", "{val/loss:d}"],
)
def test_names_that_lead_elsewhere_or_are_no_templates_are_refused(filename: str) -> None:
    with pytest.raises(OptionError, match="filename="):
        ModelCheckpoint(filename=filename)


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("val/lss", "val/loss"),
        ("val/los", "val/loss"),
        ("vall/loss", "val/loss"),
        ("train/losss", "train/loss"),
        ("tarin/loss", "train/loss"),
        ("Val/Loss", "val/loss"),
        ("epcoh", "epoch"),
        ("Epoch", "epoch"),
        ("stpe", "step"),
        ("sttep", "step"),
    ],
)
def test_a_misspelt_name_that_every_run_has_is_refused_when_it_is_written(field: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"has the field '{field}'. Did you mean '{meant}'?"):
        ModelCheckpoint(filename=f"x-{{{field}}}")


@pytest.mark.parametrize(
    "field", ["val/mloss", "val/loss_a", "val_loss", "loss", "epochs", "lr", "val/acc", "train/acc"]
)
def test_names_that_a_metric_may_have_are_not(field: str) -> None:
    ModelCheckpoint(filename=f"x-{{{field}}}")


@pytest.mark.parametrize("options", [{}, {"every_n_train_steps": 1}])
def test_a_field_that_is_nearly_a_metric_is_refused_in_the_sanity_check(options: dict[str, int]) -> None:
    hook = ModelCheckpoint(filename="x-{val_loss:.2f}", **options)
    trainer = quiet(num_sanity_val_steps=1, run_dir="run", hooks=[hook])
    with pytest.raises(OptionError, match="names 'val_loss', which was not logged. Did you mean 'val/loss'?"):
        trainer.fit(Net(), batches(2), batches(1))
    assert trainer.global_step == 0


@pytest.mark.parametrize("val", [None, 1])
def test_an_unknown_metric_in_a_name_by_steps_is_an_error_the_first_time_it_should_be_known(
    val: int | None,
) -> None:
    hook = ModelCheckpoint(every_n_train_steps=1, filename="{step}-{accuracy}", save_top_k=-1)
    trainer = quiet(max_epochs=3, run_dir="run", hooks=[hook], val_check_interval=2)
    with pytest.raises(OptionError, match="names 'accuracy', which was not logged. There are: "):
        trainer.fit(Net(), batches(4), batches(1) if val else None)
    assert trainer.global_step == (3 if val else 1)  # after the first validation, which might have logged it


def test_a_metric_that_comes_with_the_epochs_end_is_not_a_number_before_it() -> None:
    hook = ModelCheckpoint(
        every_n_train_steps=1, filename="{step}-{train/loss:.0f}-{val/loss:.0f}", save_top_k=-1
    )
    quiet(max_epochs=2, run_dir="run", hooks=[hook]).fit(Net(), batches(2), batches(1))
    kept = names()
    assert kept[0].endswith("train_loss=nan-val_loss=nan") and "nan" not in kept[2] and len(kept) == 4


@pytest.mark.parametrize(
    "filename",
    [
        "x" * 300,
        "ä" * 150,
        "x" * 230,
        "{epoch}" * 20,
        "{val/loss}" * 8,
        "{%s}" % ("m" * 260),
        "{epoch:0300d}",
    ],
)
def test_names_that_no_file_system_holds_are_refused_when_they_are_written(filename: str) -> None:
    with pytest.raises(OptionError, match="filename=") as caught:
        ModelCheckpoint(filename=filename)
    assert len(str(caught.value)) < 600


def test_the_longest_name_that_is_taken_can_be_written() -> None:
    hook = ModelCheckpoint(filename="x" * 229, save_top_k=-1)
    quiet(run_dir="run", max_epochs=2, hooks=[hook]).fit(Net(), batches(1))
    assert names() == ["x" * 229, "x" * 229 + "-v1"]


@pytest.mark.parametrize("filename", ["{epoch:/>2}", "{epoch:>300}", "   ", "a\ty"])
def test_no_template_makes_a_name_that_leaves_the_folder(filename: str) -> None:
    with pytest.raises(OptionError, match="filename"):
        ModelCheckpoint(filename=filename)


def test_a_metrics_name_cannot_make_a_folder() -> None:
    trainer = quiet(hooks=[ModelCheckpoint(filename="{a/b\\c:.1f}", save_top_k=-1)], run_dir="run")
    trainer.on("train_batch_end")(lambda: trainer.log("a/b\\c", 1.0))
    trainer.fit(Net(), batches(2))
    assert [each.name for each in Path("run/checkpoints").iterdir()] == ["a_b_c=1.0"]
