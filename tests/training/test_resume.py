"""A run is found again: the newest whole checkpoint, what was passed over and why, and runs that are finished."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hooks.kept import Elsewhere
from tiny import Net, batches, quiet

from hookline import CheckpointError, Hook, OptionError
from hookline.checkpoint.catalog import find_checkpoints
from hookline.hooks.early_stopping import EarlyStopping
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.run.lock import hold_lock
from hookline.util.errors import RunLockedError


class Fails(Hook):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.at = step

    def on_train_batch_start(self, step: int) -> None:
        if step == self.at:
            raise RuntimeError("killed")


class Looks(Hook):
    """Where the run has begun."""

    def on_checkpoint_load(self, path: Path, step: int) -> None:
        self.path, self.step = path, step


def train(
    run_dir: Path, *hooks: Any, resume: Any = "auto", seed: int = 1, every: int = 2, **options: Any
) -> tuple[Any, Net]:
    torch.manual_seed(seed)
    net = Net()
    keep = ModelCheckpoint(every_n_train_steps=every, save_top_k=-1)
    trainer = quiet(run_dir=run_dir, hooks=[keep, *hooks], **{"max_epochs": 3, **options})
    trainer.fit(net, batches(4), resume=resume)
    return trainer, net


def fail_at(run_dir: Path, step: int, **given: Any) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        train(run_dir, Fails(step), **given)


def saved(run_dir: Path) -> list[str]:
    return sorted(each.name for each in (run_dir / "checkpoints").iterdir())


def test_auto_begins_afresh_then_continues_from_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, whole = train(tmp_path / "whole")
    assert "so a new run begins" in caplog.text
    fail_at(tmp_path / "cut", 5)
    assert saved(tmp_path / "cut") == ["epoch=0-step=2", "epoch=0-step=4"]
    caplog.clear()
    trainer, net = train(tmp_path / "cut", seed=2)
    assert (
        "resuming from" in caplog.text
        and "step 4" in caplog.text
        and "newest of 2 complete ones" in caplog.text
    )
    assert trainer.global_step == 12
    assert torch.equal(net.layer.weight, whole.layer.weight)


def test_the_only_checkpoint_is_a_singular(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fail_at(tmp_path / "cut", 3)
    train(tmp_path / "cut")
    assert "the newest of 1 complete one)" in caplog.text


@pytest.mark.parametrize("harm", ["truncate", "flip", "delete", "empty", "manifest"])
def test_auto_passes_over_a_damaged_one_and_says_which_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    _, whole = train(tmp_path / "whole")
    fail_at(tmp_path / "cut", 5)
    file = (
        tmp_path
        / "cut"
        / "checkpoints"
        / "epoch=0-step=4"
        / ("manifest.json" if harm == "manifest" else "model.safetensors")
    )
    data = file.read_bytes()
    if harm == "delete":
        file.unlink()
    else:
        flipped = bytes([*data[:-5], data[-5] ^ 1, *data[-4:]])
        file.write_bytes({"truncate": data[:-1], "flip": flipped, "empty": b"", "manifest": data[:-9]}[harm])
    caplog.clear()
    _, net = train(tmp_path / "cut", seed=2)
    assert " skips " in caplog.text and file.name in caplog.text
    assert "epoch=0-step=2 (epoch 0, step 2" in caplog.text
    assert torch.equal(net.layer.weight, whole.layer.weight)


def test_the_newest_is_the_one_saved_last_not_the_one_with_the_highest_step(tmp_path: Path) -> None:
    fail_at(tmp_path, 9)
    shutil.rmtree(tmp_path / "checkpoints" / "epoch=1-step=6")
    first = tmp_path / "checkpoints" / "epoch=0-step=2"
    fail_at(tmp_path, 5, resume=first)  # another way from there on
    assert find_checkpoints(tmp_path)[0][0].manifest["step"] == 4
    taken = Looks()
    train(tmp_path, taken, max_steps=5)
    assert taken.step == 4


@pytest.mark.parametrize("options", [{}, {"max_epochs": None, "max_steps": 6}])
def test_a_finished_run_is_not_trained_again_unless_it_may_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    train(tmp_path, every=5, **options)  # the newest checkpoint is older than the end
    heard: list[str] = []
    listener = Hook()
    listener.__dict__["on_train_start"] = lambda: heard.append("trained")
    train(tmp_path, listener, every=5, **options)
    assert not heard
    assert "Nothing to train: this run was completed at step" in caplog.text
    trainer, _ = train(tmp_path, every=5, max_epochs=4)
    assert trainer.global_step == 16


def test_a_run_that_was_stopped_early_is_finished(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stops = EarlyStopping("train/loss", patience=1, min_delta=10.0)
    trainer, _ = train(tmp_path, stops, max_epochs=50)
    assert trainer.status == "stopped"
    again, _ = train(tmp_path, EarlyStopping("train/loss", patience=1, min_delta=10.0), max_epochs=50)
    assert "this run was stopped at step" in caplog.text
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "stopped"
    assert again.global_step <= trainer.global_step


def test_a_new_run_in_an_old_directory_does_not_continue_from_the_old_ones_checkpoints(
    tmp_path: Path,
) -> None:
    train(tmp_path)
    fail_at(tmp_path, 1, resume=None)  # begun afresh, and dead before its first checkpoint
    _, anew = train(tmp_path, seed=7)
    _, expected = train(tmp_path / "other", seed=7)
    assert torch.equal(anew.layer.weight, expected.layer.weight)


def test_without_a_run_dir_the_newest_run_continues_in_its_own_directory(tmp_path: Path) -> None:
    for step in (3, 5):
        with pytest.raises(RuntimeError, match="killed"):
            quiet(
                default_root_dir=tmp_path,
                max_epochs=2,
                hooks=[ModelCheckpoint(every_n_train_steps=2), Fails(step)],
            ).fit(Net(), batches(4))
    trainer = quiet(default_root_dir=tmp_path, max_epochs=2)
    trainer.fit(Net(), batches(4), resume="auto")
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 2 and trainer.run_dir == runs[1]
    assert trainer.global_step == 8


class Scored(Net):
    """Its validation gets worse and worse."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.tensor(1.0 + self.trainer.current_epoch)


def test_best_is_found_by_the_scores_in_the_manifests(tmp_path: Path) -> None:
    keep = ModelCheckpoint("val/loss", save_top_k=2, save_last=True)
    quiet(run_dir=tmp_path, hooks=[keep], max_epochs=3).fit(Scored(), batches(2), batches(1))
    trainer = quiet(run_dir=tmp_path, max_epochs=9)
    measured: list[Any] = []
    trainer.on("test_start")(lambda module: measured.append(module.layer.weight.detach().clone()))
    trainer.test(Scored(), batches(1), checkpoint="best")
    from safetensors.torch import load_file

    assert torch.equal(
        measured[0],
        load_file(tmp_path / "checkpoints" / "epoch=0-step=2" / "model.safetensors")["layer.weight"],
    )


@pytest.mark.usefixtures("memory_urls")
def test_the_best_that_a_hook_keeps_at_a_url_is_found(tmp_path: Path) -> None:
    keep = ModelCheckpoint("val/loss", dirpath="memory://bucket/kept")
    trainer = quiet(run_dir=tmp_path, hooks=[keep], max_epochs=3, checkpoint=True)
    net, measured = Scored(), []
    trainer.on("train_epoch_end")(lambda module: measured.append(module.layer.weight.detach().clone()))
    trainer.on("test_start")(lambda module: measured.append(module.layer.weight.detach().clone()))
    trainer.fit(net, batches(2), batches(1))
    trainer.test(net, batches(1), checkpoint="best")
    assert torch.equal(measured[0], measured[3]) and not torch.equal(measured[2], measured[3])


@pytest.mark.usefixtures("memory_urls")
@pytest.mark.parametrize("where", ["url", "folder"])
@pytest.mark.parametrize(
    "options", [{"run_dir": "run"}, {"default_root_dir": "root"}], ids=["named", "unnamed"]
)
def test_best_resumes_from_where_the_hooks_of_the_run_kept_it(
    tmp_path: Path, where: str, options: dict[str, Any]
) -> None:
    def make() -> Any:
        url = ModelCheckpoint("val/loss", dirpath="memory://bucket/kept")
        return url if where == "url" else Elsewhere(tmp_path / "kept")

    first = quiet(**options, hooks=[make()], max_epochs=3, checkpoint=True)
    first.fit(Scored(), batches(2), batches(1))
    looks = Looks()
    trainer = quiet(**options, hooks=[make(), looks], max_epochs=4, checkpoint=True)
    trainer.fit(Scored(), batches(2), batches(1), resume="best")
    assert (looks.step, trainer.global_step) == (2, 8)
    assert trainer.run_dir == first.run_dir and "kept" in str(looks.path)


@pytest.mark.usefixtures("memory_urls")
def test_a_url_in_a_checkpoint_is_not_read_unless_a_hook_writes_there(tmp_path: Path) -> None:
    keep = ModelCheckpoint("val/loss", dirpath="memory://bucket/kept")
    quiet(run_dir=tmp_path, hooks=[keep], checkpoint=True).fit(Scored(), batches(2), batches(1))
    with pytest.raises(
        CheckpointError,
        match=r"(?s)Searched: .*, and where the hooks of the run keep .* \(none of them knows one\).*resume=PATH",
    ):
        quiet(run_dir=tmp_path, max_epochs=2).fit(Scored(), batches(2), batches(1), resume="best")


class Given(Net):
    """Its score in every validation."""

    def __init__(self, score: float) -> None:
        super().__init__()
        self.score = score

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.tensor(self.score)


@pytest.mark.parametrize("is_same", [True, False], ids=["same trainer", "new process"])
def test_best_is_of_the_newest_run_also_if_another_run_has_a_better_score(
    is_same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        return quiet(hooks=[ModelCheckpoint("val/loss"), Looks()], max_epochs=1)

    first = make()
    first.fit(Given(0.1), batches(2), batches(1))
    second = first if is_same else make()
    better, second_dir = first.run_dir, None
    second.fit(Given(0.9), batches(2), batches(1))
    second_dir = second.run_dir
    trainer = second if is_same else make()
    trainer.max_epochs = 2
    trainer.fit(module := Given(0.9), batches(2), batches(1), resume="best")
    assert trainer.run_dir == second_dir != better
    looks = next(each.hook for each in trainer.hooks.entries() if isinstance(each.hook, Looks))
    assert looks.path.is_relative_to(second_dir)
    assert trainer.load_best(module).source.startswith(str(second_dir))
    assert "has kept no such checkpoint" not in caplog.text


def test_best_of_an_earlier_run_is_taken_with_a_warning_if_the_newest_has_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keep = quiet(hooks=[ModelCheckpoint("val/loss")])
    keep.fit(Given(0.5), batches(2), batches(1))
    plain = quiet(hooks=[ModelCheckpoint()])
    plain.fit(Given(0.5), batches(2), batches(1))
    trainer = quiet(hooks=[ModelCheckpoint("val/loss")], max_epochs=2)
    trainer.fit(Given(0.5), batches(2), batches(1), resume="best")
    assert trainer.run_dir == keep.run_dir and trainer.global_step == 4
    assert f"The newest run, {plain.run_dir}, has kept no such checkpoint" in caplog.text


def test_a_copy_of_a_run_resumes_from_its_own_best(tmp_path: Path) -> None:
    keep = ModelCheckpoint("val/loss")
    quiet(run_dir=tmp_path / "a", hooks=[keep], checkpoint=True).fit(Scored(), batches(2), batches(1))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    looks = Looks()
    trainer = quiet(run_dir=tmp_path / "b", hooks=[ModelCheckpoint("val/loss"), looks], max_epochs=2)
    trainer.fit(Scored(), batches(2), batches(1), resume="best")
    assert looks.path == tmp_path / "b" / "checkpoints" / "epoch=0-step=2"


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing.* does not exist"):
        quiet().fit(Net(), batches(2), resume=tmp_path / "nothing")
    with pytest.raises(OptionError, match="Did you mean 'auto'"):
        quiet().fit(Net(), batches(2), resume="aut")
    with pytest.raises(CheckpointError, match=f"no checkpoint was found below {tmp_path}"):
        quiet(run_dir=tmp_path).validate(Net(), batches(2), checkpoint="best")


def test_the_directory_of_a_run_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    fail_at(tmp_path / "a", 5)
    trainer, _ = train(tmp_path / "b", resume=tmp_path / "a")
    assert trainer.global_step == 12 and Path(trainer.run_dir).name == "b"
    with pytest.raises(OptionError, match="resume=True: pass None, 'auto', 'best' or the path"):
        train(tmp_path / "c", resume=True)


class Momentum(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def test_other_optimizers_or_another_model_are_refused_by_name(tmp_path: Path) -> None:
    fail_at(tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"There: SGD\. Here: Adam\."):
        quiet(run_dir=tmp_path).fit(Momentum(), batches(4), resume="auto")
    other = Net()
    other.layer = torch.nn.Linear(4, 3)
    with pytest.raises(
        CheckpointError, match=r"The weights in .*step=4 do not fit Net(.|\n)*size mismatch(.|\n)*fit --fresh"
    ) as caught:
        quiet(run_dir=tmp_path).fit(other, batches(4), resume="auto")
    assert caught.value.__cause__ is None and caught.value.__suppress_context__  # it says what torch said
    (note,) = caught.value.__notes__
    assert " do not fit Net: Error(s) in loading state_dict for Net, at the start, rank 0." in note


def test_what_is_requested_before_a_save_error_stays_and_the_run_continues_if_the_option_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class AsksForTheImpossible(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 3:
                trainer.save_checkpoint(tmp_path / "file" / "cannot be")

    (tmp_path / "file").write_text("not a folder")
    trainer, _ = train(tmp_path / "a", AsksForTheImpossible(), on_save_error="warn")
    assert trainer.status == "completed"
    assert "file/cannot be could not be written" in caplog.text and "continues without it" in caplog.text
    with pytest.raises(CheckpointError, match="cannot be could not be written"):
        train(tmp_path / "b", AsksForTheImpossible())
    whole, broken = find_checkpoints(tmp_path / "b")
    assert not broken and [each.manifest["step"] for each in whole] == [2]


def test_a_save_that_fails_does_not_hide_what_the_run_failed_of(tmp_path: Path) -> None:
    class SavesToNowhere(Hook):
        def on_exception(self, trainer: Any) -> None:
            trainer.save_checkpoint(tmp_path / "file" / "cannot be", "exception")

    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RuntimeError, match="killed") as failed:
        train(tmp_path / "run", Fails(3), SavesToNowhere())
    assert any("cannot be could not be written" in note for note in failed.value.__notes__)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "event",
    [
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_after_optimizer_step",
        "on_train_batch_end",
        "on_step_end",
    ],
)
def test_a_batch_that_failed_half_way_is_trained_once(tmp_path: Path, event: str, accumulate: int) -> None:
    class FailsHere(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.left = 2
            self.__dict__[event] = self._fail

        def _fail(self) -> None:
            self.left -= 1
            if not self.left:
                raise RuntimeError("killed")

    def fit(hooks: list[Any], resume: str | None = None) -> Any:
        torch.manual_seed(0)
        trainer = quiet(run_dir=tmp_path, hooks=hooks, accumulate_grad_batches=accumulate, max_epochs=2)
        trainer.fit(Scheduled(), batches(6), resume=resume)
        return trainer

    whole = fit([])
    with pytest.raises(RuntimeError, match="killed"):
        fit([FailsHere(), ModelCheckpoint(save_on_exception=True)])
    again = fit([], resume="auto")
    assert (again.global_step, again.state.batches_seen, again.state.samples_seen) == (
        12 // accumulate,
        12,
        36,
    )
    if (event, accumulate) != ("on_before_optimizer_step", 3):  # there the window has lost what it had before
        assert torch.equal(again.module.layer.weight, whole.module.layer.weight)
        assert again.state.lr == whole.state.lr


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_nothing_is_made_where_nothing_is_saved(tmp_path: Path) -> None:
    quiet(run_dir=tmp_path / "run").fit(Net(), batches(2))
    assert not (tmp_path / "run").exists()


def test_messages_go_to_the_log_of_the_library(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path)
    assert {record.name for record in caplog.records} == {"hookline"}
    assert all(record.levelno <= logging.WARNING for record in caplog.records)


# ---- what is passed, and what is done with it -------------------------------------------------------------------


def test_looking_for_a_checkpoint_removes_nothing_that_is_not_the_runs_own(tmp_path: Path) -> None:
    train(tmp_path / "runs" / "a", resume=None, max_epochs=1)
    mine = tmp_path / "runs" / ".notes.gone"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    left = tmp_path / "runs" / "a" / "checkpoints" / ".step-9.gone"
    left.mkdir()
    trainer = quiet(run_dir=tmp_path / "runs" / "a")
    trainer.validate(Net(), batches(1), checkpoint=tmp_path / "runs")
    trainer.validate(Net(), batches(1), checkpoint="auto")
    train(tmp_path / "b", resume=tmp_path / "runs", max_epochs=2)
    assert left.exists()  # those who only read leave everything as it is
    quiet(run_dir=tmp_path / "runs", max_epochs=3).fit(Net(), batches(4), resume="auto")
    assert not left.exists() and (mine / "thesis.txt").read_text() == "mine"


def test_what_is_told_of_a_checkpoint_names_what_was_passed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "a", resume=None, max_epochs=1)
    caplog.clear()
    train(tmp_path / "b", resume=tmp_path / "a", max_epochs=2)
    assert f"resume={str(tmp_path / 'a')!r}: resuming from" in caplog.text and "auto" not in caplog.text
    caplog.clear()
    quiet(run_dir=tmp_path / "a").validate(Net(), batches(1), checkpoint=str(tmp_path / "a"))
    assert (
        f"checkpoint={str(tmp_path / 'a')!r}: the weights are those of" in caplog.text
        and "resume=" not in caplog.text
    )
    with pytest.raises(OptionError, match="checkpoint='beste'"):
        quiet(run_dir=tmp_path / "a").validate(Net(), batches(1), checkpoint="beste")
    caplog.clear()
    with pytest.raises(CheckpointError, match="no checkpoint was found"):
        quiet(run_dir=tmp_path / "none").validate(Net(), batches(1), checkpoint="auto")
    assert "checkpoint='auto': there is no" in caplog.text and "afresh" not in caplog.text


def test_a_directory_of_several_runs_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        train(tmp_path / "runs" / name, resume=None, max_epochs=1)
    train(tmp_path / "c", resume=tmp_path / "runs", max_epochs=2)
    runs = tmp_path / "runs"
    assert "several runs" in caplog.text and f"{runs / 'a'}, {runs / 'b'}." in caplog.text
    caplog.clear()
    train(tmp_path / "d", resume=runs / "a", max_epochs=2)
    assert "several runs" not in caplog.text


# ---- the state of hooks -----------------------------------------------------------------------------------------


class Counts(Hook):
    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.n = 0
        self.fails = fails

    def on_step_end(self) -> None:
        self.n += 1

    def state_dict(self) -> dict[str, Any]:
        return {self.fails: {}["m"]} if self.fails == "state_dict" else {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["m" if self.fails == "load_state_dict" else "n"]


class Renamed(Counts):
    pass


def test_state_that_no_hook_claims_and_hooks_that_find_none_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, Counts(), resume=None, max_epochs=1)
    assert "state" not in caplog.text
    renamed = Renamed()
    train(tmp_path, renamed, max_epochs=2)
    assert renamed.n == 4
    assert "holds state of hooks that this run does not have, which is not used: counts." in caplog.text
    assert "holds no state of these hooks, which start without it: renamed." in caplog.text


def test_a_resume_with_the_same_hooks_has_nothing_to_tell_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, Counts(), Fails(-1), resume=None, max_epochs=1)
    counts = Counts()
    train(tmp_path, counts, max_epochs=2)  # the one that is missing kept nothing
    assert counts.n == 8 and "state of" not in caplog.text
    quiet(run_dir=tmp_path).validate(
        Net(), batches(1), checkpoint="auto"
    )  # hooks of the training are not needed there
    assert "state of" not in caplog.text


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
def test_a_hook_whose_state_cannot_be_taken_or_given_is_named(tmp_path: Path, method: str) -> None:
    if method == "load_state_dict":
        train(tmp_path, Counts(), resume=None, max_epochs=1)
    with pytest.raises(KeyError) as failed:
        train(tmp_path, Counts(method), max_epochs=2)
    assert any(
        f"raised by hook 'counts' in {method} (Counts) at epoch" in note for note in failed.value.__notes__
    )
    assert f"in hook 'counts', {method}, epoch" in failed.value.__notes__[-1]


# ---- checkpoints that are there, and none that can be used -------------------------------------------------------


def damage(run_dir: Path, file: str = "model.safetensors") -> list[Path]:
    found = sorted((run_dir / "checkpoints").iterdir())
    for each in found:
        (each / file).write_bytes(b"x" + (each / file).read_bytes()[1:])
    return found


@pytest.mark.parametrize(
    ("file", "resume"),
    [
        ("model.safetensors", "auto"),
        ("model.safetensors", "path"),
        ("manifest.json", "auto"),
        ("manifest.json", "best"),
        ("manifest.json", "path"),
    ],
)
def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew_by_itself(
    tmp_path: Path, file: str, resume: str
) -> None:
    fail_at(tmp_path, 5)
    before = {path: (path / file).read_bytes() for path in damage(tmp_path, file)}
    with pytest.raises(CheckpointError) as refused:
        train(tmp_path, resume=tmp_path if resume == "path" else resume)
    said = str(refused.value)
    assert "2 checkpoints" in said and "none of them can be used" in said
    assert all(path.name in said for path in before) and said.count(file) == 2
    assert "resume=None" in said and "--fresh" in said
    assert {path: (path / file).read_bytes() for path in before} == before
    trainer, _ = train(tmp_path, resume=None)  # whoever says so begins anew
    assert trainer.global_step == 12


def test_best_is_refused_if_no_checkpoint_was_kept_for_a_score(tmp_path: Path) -> None:
    fail_at(tmp_path, 5)
    with pytest.raises(
        CheckpointError, match=r"(?s)none of them can be used.*no monitor has kept it.*resume='auto'"
    ):
        train(tmp_path, resume="best")


def test_weights_are_not_taken_from_damaged_checkpoints_and_each_is_named(tmp_path: Path) -> None:
    fail_at(tmp_path, 5)
    damage(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"(?s)none of them can be used.*step=2.*step=4|step=4.*step=2"
    ) as refused:
        quiet(run_dir=tmp_path).validate(Net(), batches(1), checkpoint="auto")
    assert "fresh" not in str(refused.value)


@pytest.mark.parametrize("resume", ["auto", "best"])
def test_a_kill_in_the_very_first_save_leaves_nothing_that_keeps_a_run_from_beginning(
    tmp_path: Path, resume: str
) -> None:
    train(tmp_path / "other")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    half = tmp_path / "run" / "checkpoints" / ".epoch=0-step=2.0badcafe-1.new"
    shutil.copytree(tmp_path / "other" / "checkpoints" / "epoch=0-step=2", half)
    (half / "manifest.json").unlink()
    trainer, _ = train(tmp_path / "run", resume=resume)
    assert trainer.global_step == 12


def test_weights_that_a_hook_exports_into_the_run_directory_are_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run" / "hf").mkdir(parents=True)
    (tmp_path / "run" / "hf" / "model.safetensors").write_text("of another tool")
    trainer, _ = train(tmp_path / "run")
    assert trainer.global_step == 12


def test_checkpoints_of_an_earlier_run_are_named_when_a_run_begins_beside_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path)
    fail_at(tmp_path, 1, resume=None)  # a new run, that ended before its first checkpoint
    caplog.clear()
    trainer, _ = train(tmp_path, max_epochs=1)
    assert trainer.global_step == 4
    assert "6 checkpoints below" in caplog.text and "belong to an earlier run" in caplog.text


def test_a_checkpoint_that_a_dead_job_had_moved_aside_is_put_back_by_the_job_that_holds_the_lock(
    tmp_path: Path,
) -> None:
    fail_at(tmp_path, 3)
    (only,) = (tmp_path / "checkpoints").iterdir()
    only.rename(only.with_name(f".{only.name}.0badcafe-1.old"))
    trainer, _ = train(tmp_path)
    assert trainer.global_step == 12 and trainer.state.resumed


# ---- trainers without a run_dir ----------------------------------------------------------------------------


class Interrupts(Hook):
    def on_step_end(self, step: int) -> None:
        if step == 2:
            raise KeyboardInterrupt


class OtherNet(Net):
    pass


def dated(root: Path, **options: Any) -> Any:
    """Return a trainer that saves `checkpoints/last` below a root, in a directory that is named by date."""
    return quiet(default_root_dir=root, **{"checkpoint": True, **options})


def test_a_trainer_continues_its_own_run_not_a_newer_one_of_another_trainer(tmp_path: Path) -> None:
    looks = Looks()
    first = dated(tmp_path, max_epochs=2, hooks=[Interrupts(name="interrupts"), looks])
    with pytest.raises(KeyboardInterrupt):
        first.fit(Net(), batches(4))
    own = first.run_dir
    other = dated(tmp_path, max_epochs=3)
    other.fit(Net(), batches(4))
    first.hooks.remove("interrupts")
    first.fit(Net(), batches(4), resume="auto")
    assert first.run_dir == own != other.run_dir
    assert (looks.path, looks.step, first.global_step) == (own / "checkpoints" / "last", 2, 8)


def test_an_attempt_that_saved_nothing_does_not_hide_the_trainers_earlier_run(tmp_path: Path) -> None:
    trainer = dated(tmp_path, max_epochs=1, hooks=[looks := Looks()])
    trainer.fit(Net(), batches(4))
    own = trainer.run_dir
    failing = trainer.add_hook(Fails(0))
    with pytest.raises(RuntimeError, match="killed"):
        trainer.fit(Net(), batches(4))
    assert trainer.run_dir != own
    failing.remove()
    dated(tmp_path, max_epochs=1).fit(Net(), batches(4))
    trainer.fit(Net(), batches(4), resume="auto")
    assert trainer.run_dir == own and looks.step == 4


def test_a_trainer_whose_run_saved_nothing_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = dated(tmp_path, max_epochs=1, checkpoint=False)
    trainer.fit(Net(), batches(1))
    dated(tmp_path, max_epochs=1).fit(Net(), batches(1))
    trainer.fit(Net(), batches(1), resume="auto")
    assert trainer.global_step == 1 and not trainer.state.resumed
    assert "so a new run begins" in caplog.text


@pytest.mark.parametrize("name", ["chosen", "2024-05-06_07-08-09"])
def test_a_trainer_without_a_run_dir_does_not_take_a_run_whose_program_chose_its_run_dir(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = tmp_path / "runs" / name
    quiet(checkpoint=True, run_dir=chosen, max_epochs=1).fit(Net(), batches(4))
    trainer = dated(tmp_path, max_epochs=2)
    trainer.fit(Net(), batches(4), resume="auto")
    assert trainer.run_dir != chosen and not trainer.state.resumed
    assert f"there is no checkpoint below {tmp_path / 'runs'}, so a new run begins. It skips {chosen}" in (
        caplog.text
    )
    assert f"pass resume={str(chosen)!r}, or the same run_dir" in caplog.text
    again = dated(tmp_path, max_epochs=3)
    again.fit(Net(), batches(4), resume="auto")  # the same program in a new process
    assert again.run_dir == trainer.run_dir and again.global_step == 12


def test_nor_a_run_of_another_class_of_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = dated(tmp_path, max_epochs=1)
    mine.fit(Net(), batches(4))
    other = dated(tmp_path, max_epochs=1)
    other.fit(OtherNet(), batches(4))
    trainer = dated(tmp_path, max_epochs=2)
    trainer.fit(Net(), batches(4), resume="auto")
    assert trainer.run_dir == mine.run_dir and trainer.global_step == 8
    assert f"It skips {other.run_dir} (its module is OtherNet, not Net): to use it, pass " in caplog.text
    caplog.clear()
    dated(tmp_path, max_epochs=3).fit(Net(), batches(4), resume="auto")
    assert "It skips" not in caplog.text  # the newest run is the one that continues


def test_a_run_that_another_job_holds_does_not_become_the_trainers_own(tmp_path: Path) -> None:
    other = dated(tmp_path, max_epochs=1)
    other.fit(Net(), batches(1))
    trainer = dated(tmp_path, max_epochs=2, checkpoint=False)
    with hold_lock(other.run_dir), pytest.raises(RunLockedError):
        trainer.fit(Net(), batches(1), resume="auto")
    trainer.fit(Net(), batches(1))
    trainer.fit(Net(), batches(1), resume="auto")
    assert trainer.run_dir != other.run_dir and not trainer.state.resumed
