"""`rewound`: what it runs again, what it leaves out, and what it refuses. Nothing of the recorded run changes."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rewind.rewound_runs import SEED, Digests, Noisy, data, digest, hooks, make_module, record, tree
from tiny import Net, batches, quiet

import hookline
from hookline import Hook, HooklineError, Logger, OptionError, Trainer, every
from hookline.checkpoint.files import read_manifest
from hookline.cli import main
from hookline.hooks import ModelCheckpoint, Throughput, WeightAveraging
from hookline.interop.demo import BoringModel
from hookline.interop.lightning import Trainer as LightningTrainer
from hookline.rewind.rerun import RunAgain, make_run_again
from hookline.run.lock import hold_lock
from hookline.util.urls import MANIFEST


class GoesBack(Hook):
    """Goes back once, after an update; from then on the inputs are larger, so that the steps are others."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.is_done = at, False

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == self.at and not self.is_done:
            self.is_done = True
            trainer.roll_back(before=4)

    def on_train_batch_start(self, batch: Any) -> None:
        if self.is_done:
            batch[0].mul_(1.5)

    def state_dict(self) -> dict[str, Any]:
        return {"is_done": self.is_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.is_done = self.is_done or state["is_done"]  # a rollback does not make it forget


def again(folder: Path, to: int, more: tuple[Any, ...] = (), **settings: Any) -> RunAgain:
    """A run of the kind 'averaged' that can run again."""
    given = {"module": make_module(), **data("averaged")}
    return make_run_again(folder, to, given, [*hooks("averaged"), *more], **settings)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """A completed run, and its digests."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    return folder, record("averaged", folder)


# ---- the block ---------------------------------------------------------------------------------------------


def test_inside_the_block_the_run_stands_after_the_update_and_afterwards_nothing_is_left(
    recorded: tuple[Path, dict[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    folder, digests = recorded
    events: list[str] = []

    class Probe(Hook):
        def setup(self) -> None:
            events.append("setup")

        def on_step_end(self, step: int) -> None:
            events.append(f"step {step}")

        def on_train_end(self) -> None:
            events.append("on_train_end")

        def on_exception(self) -> None:
            events.append("on_exception")

        def teardown(self) -> None:
            events.append("teardown")

    class Own(Exception): ...

    with (
        pytest.raises(Own),
        hookline.rewound(
            folder, 7, module=make_module(), **data("averaged"), hooks=hooks("averaged"), probes=[Probe()]
        ) as trainer,
    ):
        assert digest(trainer) == digests[7]
        assert isinstance(trainer.model, Noisy) and trainer.global_step == 7
        assert [each.shape for each in trainer.state.batch] == [(3, 4), (3, 2)]
        assert trainer.optimizers[0].state
        assert trainer.validate()["val/loss"] > 0
        assert events == ["setup", "step 5", "step 6", "step 7"]
        assert trainer.run_dir.is_relative_to(tmp_path / "temporary")
        raise Own
    assert events[4:] == ["teardown"]  # no event of an ending, also not of a failed one
    assert list((tmp_path / "temporary").iterdir()) == []


def test_what_a_rewound_run_writes_can_be_kept(recorded: tuple[Path, dict[int, str]], tmp_path: Path) -> None:
    with again(recorded[0], 6, out=tmp_path / "kept").paused() as trainer:
        trainer.logger.add_text("found", "something", 6)
    lines = (tmp_path / "kept" / "log.jsonl").read_text().splitlines()
    assert "something" in str([json.loads(line) for line in lines])
    written = json.loads((tmp_path / "kept" / "run.json").read_text())
    assert (written["status"], written["step"]) == ("stopped", 6)
    assert not (tmp_path / "kept" / "checkpoints").exists()
    with pytest.raises(OptionError, match="not an empty directory"):
        again(recorded[0], 6, out=tmp_path / "kept")
    with pytest.raises(OptionError, match="inside of the recorded run"):
        again(recorded[0], 6, out=recorded[0] / "kept")


# ---- probes ------------------------------------------------------------------------------------------------


def test_a_probe_that_changes_something_is_detached_and_reported(
    recorded: tuple[Path, dict[int, str]], caplog: pytest.LogCaptureFixture
) -> None:
    class Draws(Hook):
        calls = 0

        def on_step_end(self) -> None:
            self.calls += 1
            torch.rand(1)

    probe = Draws()
    run = again(recorded[0], 7, probes=[probe])
    with run.paused():
        found = run.compared()
    assert probe.calls == 1
    assert "random" in run.collector.detached["draws"]
    assert "was attached to observe and is detached" in caplog.text
    assert found.differences, "the random number that it has drawn changes the next step"
    assert run.may_differ == []


def test_a_probe_may_declare_that_it_changes_the_run(recorded: tuple[Path, dict[int, str]]) -> None:
    class Scales(Hook):
        observes = False

        def on_train_batch_start(self, batch: Any) -> None:
            batch[0].mul_(2)

    run = again(recorded[0], 6, probes=[Scales()])
    with run.paused():
        assert run.compared().differences
    assert run.may_differ == ["the probe Scales may change the run"] and run.collector.detached == {}


def test_values_that_a_probe_logs_are_separate_from_those_of_the_run(
    recorded: tuple[Path, dict[int, str]],
) -> None:
    class Logs(Hook):
        @every("2 steps")
        def on_step_end(self, trainer: Any, step: int) -> None:
            trainer.log("probe/step", step)

    run = again(recorded[0], 8, probes=[Logs()])
    with run.paused():
        found = run.compared()
    assert found.new == {(6, "step"): {"probe/step": 6.0}, (8, "step"): {"probe/step": 8.0}}
    assert found.steps == [5, 6, 7, 8] and found.values == 4 * 3 + 2  # and the means of an epoch


# ---- nothing acts a second time ----------------------------------------------------------------------------


class Outside(Logger):
    """A logger that counts its rows in a file outside of the run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log_metrics(self, metrics: Any, step: int, epoch: int) -> None:
        with self.path.open("a") as file:
            file.write(f"{step}\n")


class Sends(Hook):
    """A hook of the user that must not send anything twice."""

    rewinds = False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_step_end(self, step: int) -> None:
        with self.path.open("a") as file:
            file.write(f"{step}\n")


class Manages(Hook):
    """A hook of the user that saves and removes checkpoints of the run by their paths."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_step_end(self, trainer: Any, step: int) -> None:
        trainer.save_checkpoint(self.folder / f"mine-{step}")
        if step > 3:
            trainer.remove_checkpoint(self.folder / f"mine-{step - 3}")
        if step % 5 == 0:
            trainer.save_checkpoint()


def test_a_recorded_run_stays_as_it_is_and_its_hooks_and_loggers_do_not_act_again(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"

    def all_hooks() -> list[Any]:
        saves = ModelCheckpoint(dirpath=folder / "best", every_n_train_steps=3, save_top_k=2)
        own = [Sends(outside), Manages(folder / "own"), Throughput(), saves]
        return [WeightAveraging(decay=0.9), *own]

    digests = Digests()
    trainer = Trainer(
        seed=SEED,
        run_dir=folder,
        max_epochs=2,
        logger=[Outside(outside), hookline.JSONLines()],
        log_every_n_steps=1,
        enable_progress_bar=False,
        hooks=[*all_hooks(), digests],
    )
    trainer.fit(make_module(), **data("averaged"))
    left = folder / "own" / ".mine-3.0123abcd-1.new"  # a resume would remove it
    left.mkdir()
    sent = outside.read_text()
    before = tree(folder)
    with hold_lock(folder):  # as if the run were running
        locked = tree(folder)
        run = make_run_again(folder, 18, {"module": make_module(), **data("averaged")}, all_hooks())
        with run.paused() as again:
            assert digest(again) == digests.seen[18]
            assert run.beginning.step == 15  # so that it asks for checkpoints twice on the way
        assert tree(folder) == locked
    assert {name: about[0] for name, about in tree(folder).items()} == {
        name: about[0] for name, about in before.items()
    }
    assert outside.read_text() == sent
    assert run.left_out == {
        "sends": "it acts outside of the training",
        "throughput": "it only observes",
        "model_checkpoint": "it acts outside of the training",
    }
    run = make_run_again(
        folder, 3, {"module": make_module(), **data("averaged")}, all_hooks(), without=["manages"]
    )
    with run.paused() as again:
        assert digest(again) == digests.seen[3]
    assert run.left_out["manages"] == "it was excluded"
    run = make_run_again(
        folder, 3, {"module": make_module(), **data("averaged")}, all_hooks(), without=["manage"]
    )
    with pytest.raises(OptionError, match="no hook of this name. Did you mean 'manages'"), run.paused():
        pass


# ---- the last time counts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["kept", "gone"])
def test_of_a_step_that_was_reached_twice_the_last_time_counts(target: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    digests = record(
        "averaged", folder, hooks=[GoesBack(7), *hooks("averaged"), seen := Digests()], max_epochs=3
    )
    assert digests == {} and len(seen.seen) == 15
    if target == "gone":
        shutil.rmtree(folder / "checkpoints" / "epoch=0-step=4")
    before = tree(folder)
    for to in (3, 6, 8, 10):
        run = again(folder, to, (GoesBack(7),))
        with run.paused() as trainer:
            assert digest(trainer) == seen.seen[to], to
            found = run.compared()
        assert found.differences == [] and found.values
    assert tree(folder) == before


def test_a_rollback_that_does_not_happen_again_is_an_error(tmp_path: Path) -> None:
    record("averaged", tmp_path / "run", hooks=[GoesBack(7), *hooks("averaged")])
    with (
        pytest.raises(HooklineError, match="went back at step 7 to step 4, and this one did not"),
        again(tmp_path / "run", 6, (GoesBack(99),)).paused(),
    ):
        pass


def test_steps_that_a_resume_from_an_older_checkpoint_has_replaced_are_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    record("averaged", folder)

    def resume(path: Path, **options: Any) -> dict[int, str]:
        digests = Digests()
        trainer = Trainer(
            seed=SEED,
            run_dir=folder,
            log_every_n_steps=1,
            enable_progress_bar=False,
            accumulate_grad_batches=2,
            hooks=[WeightAveraging(decay=0.9), *hooks("averaged")[1:2], digests],
            **options,
        )
        trainer.fit(make_module(), **data("averaged"), resume=path)
        return digests.seen

    resumed = resume(folder / "checkpoints" / "epoch=0-step=4", max_epochs=3, gradient_clip_val=0.01)
    assert (folder / "checkpoints" / "epoch=1-step=8").is_dir()  # of the steps that were replaced
    for to, begins in ((10, 4), (11, 4), (3, 0)):
        run = make_run_again(folder, to, {"module": make_module(), **data("averaged")}, hooks("averaged")[:2])
        with run.paused() as trainer:
            assert run.beginning.step == begins
            assert to == 3 or digest(trainer) == resumed[to]


def test_the_learning_rate_that_was_set_from_outside_is_set_again(tmp_path: Path) -> None:
    from hookline.control.commands import check_request, execute

    class SetsRate(Hook):  # as `hookline control RUN lr x0.5` does
        def on_train_batch_end(self, trainer: Any, step: int, batch_idx: int) -> None:
            if step == 5:  # a job that was stopped and resumed
                trainer.logger.log_event("control", {"command": "stop", "step": 5, "epoch": 0})
            if step == 6 and batch_idx % 2:
                execute(trainer._run, check_request(trainer._run, {"command": "lr", "value": "x0.5"}))

    folder = tmp_path / "run"
    record("averaged", folder, hooks=[SetsRate(), *hooks("averaged"), seen := Digests()])
    assert '"command": "lr"' in (folder / "log.jsonl").read_text()
    run = again(folder, 8)
    with run.paused() as trainer:
        assert run.beginning.step == 4 and digest(trainer) == seen.seen[8]


# ---- checkpoints -------------------------------------------------------------------------------------------


def test_damaged_checkpoints_are_passed_over_and_named(
    tmp_path: Path, recorded: tuple[Path, dict[int, str]], caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(recorded[0], tmp_path / "run")
    places = folder / "checkpoints"
    (places / "epoch=1-step=8" / "model.safetensors").write_bytes(b"damaged")
    (places / "epoch=2-step=12" / MANIFEST).write_text("{}")
    before = tree(folder)
    run = again(folder, 14)
    with run.paused() as trainer:
        assert digest(trainer) == recorded[1][14]
    assert run.beginning.step == 4
    assert [Path(path).name for path in run.beginning.unusable] == ["epoch=2-step=12", "epoch=1-step=8"]
    assert "epoch=1-step=8 cannot be used" in caplog.text
    assert tree(folder) == before
    shutil.rmtree(places)
    with again(folder, 2).paused() as trainer:
        assert digest(trainer) == recorded[1][2]


def test_a_run_that_began_with_a_checkpoint_of_another_begins_with_it_again(
    tmp_path: Path, recorded: tuple[Path, dict[int, str]]
) -> None:
    start = recorded[0] / "checkpoints" / "epoch=1-step=8"
    trainer = Trainer(
        seed=SEED,
        run_dir=tmp_path / "other",
        max_epochs=3,
        accumulate_grad_batches=2,
        enable_progress_bar=False,
        checkpoint=False,
        hooks=[*hooks("averaged")[:2]],
    )
    trainer.fit(make_module(), **data("averaged"), resume=start)
    run = again(tmp_path / "other", 10)
    with run.paused() as trainer:
        assert run.beginning.step == 8 and digest(trainer) == recorded[1][10]
    with pytest.raises(OptionError, match="began at step 8, from .*: choose 9 to 15"):
        again(tmp_path / "other", 8)


# ---- runs that failed, and values that differ --------------------------------------------------------------


class Fails(Hook):
    """Ends the run with an error in a step."""

    def on_before_backward(self, step: int, epoch: int) -> None:
        if step == 6:
            raise ValueError("a bad batch")


def test_the_step_in_which_a_run_failed_can_be_seen(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="a bad batch"):
        record("averaged", folder, hooks=[Fails(), *hooks("averaged")])
    before = tree(folder)
    run = again(folder, 7, (Fails(),))
    with run.paused(keeps_failure=True) as trainer:
        assert trainer.global_step == 6 and str(run.failure) == "a bad batch"
        assert trainer.state.batch[0].shape == (3, 4)
    run = again(folder, 7, (Fails(),))
    with pytest.raises(ValueError, match="a bad batch") as raised, run.paused():
        pass
    assert any("ran again from" in note for note in raised.value.__notes__)
    assert tree(folder) == before
    with pytest.raises(OptionError, match="last step of .* is 6: choose 1 to 6, and 7 to see the step"):
        again(folder, 8)


def test_other_data_is_a_difference_and_an_error_on_the_same_machine(
    recorded: tuple[Path, dict[int, str]], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder = shutil.copytree(recorded[0], tmp_path / "run")

    def other() -> Any:
        given = data("averaged")
        given["train"].dataset.tensors[0].mul_(1.5)
        return {"module": make_module(), **given, "hooks": hooks("averaged")}

    with hookline.rewound(folder, 7, **other()):
        pass
    (said,) = [each for each in caplog.records if "differs from its log" in each.getMessage()]
    assert said.levelno == logging.ERROR and "differs from its log at step 5: " in said.getMessage()
    known = json.loads((folder / "run.json").read_text())
    known["versions"]["torch"], known["machine"]["threads"] = "1.0", 99
    (folder / "run.json").write_text(json.dumps(known))
    caplog.clear()
    with hookline.rewound(folder, 7, **other()):
        pass
    (said,) = [each for each in caplog.records if "differs from its log" in each.getMessage()]
    assert said.levelno == logging.WARNING
    assert (
        "Bits may differ here: torch 1.0 there" in said.getMessage()
        and "threads 99 there" in said.getMessage()
    )
    caplog.clear()
    with hookline.rewound(folder, 7, **other(), ignore=["t*", "*/loss"]):
        pass
    assert "differs" not in caplog.text


# ---- errors ------------------------------------------------------------------------------------------------


def test_errors_say_what_is_needed(recorded: tuple[Path, dict[int, str]], tmp_path: Path) -> None:
    folder = recorded[0]
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: again(folder, 16), r"the last step of .* is 15: choose 1 to 15\."),
        (lambda: again(folder, 0), "to=0: pass the number of an update, from 1 on"),
        (lambda: again(folder.parent / "rum", 1), "it does not exist. Did you mean 'run'"),
        (lambda: again(folder.parent, 1), "it has no run.json. There are runs below it: run"),
        (
            lambda: make_run_again(folder, 3),
            r"started by a program(.|\n)*with hookline.rewound\(.*module=Noisy",
        ),
        (
            lambda: make_run_again(folder, 3, {"module": make_module()}, hooks("averaged")[1:]),
            "had the hook 'weight_averaging'",
        ),
        (
            lambda: make_run_again(folder, 3, {"module": make_module()}, hooks("averaged"), {"max_epoch": 2}),
            "no option 'max_epoch'. Did you mean 'max_epochs'",
        ),
    ]
    for call, text in wrong:
        with pytest.raises(HooklineError, match=text):
            call()
    copy = shutil.copytree(folder, tmp_path / "copy")
    known = json.loads((copy / "run.json").read_text())
    known["machine"]["world_size"] = 2
    (copy / "run.json").write_text(json.dumps(known))
    with pytest.raises(
        OptionError, match=r"ran on 2 ranks, and this job has 1(.|\n)*nproc-per-node 2 -m hookline rewind"
    ):
        again(copy, 3)
    (copy / "run.json").write_text("{")
    with pytest.raises(OptionError, match="its run.json is damaged"):
        again(copy, 3)


def test_a_run_of_a_lightning_trainer_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Own(LightningTrainer): ...

    trainer = Own(max_epochs=1, run_dir="run", logger=False, enable_progress_bar=False, checkpoint=True)
    trainer.fit(BoringModel())
    ours = BoringModel()
    ours.prepare_data = lambda: pytest.fail("the run was begun")  # type: ignore[method-assign]
    said = r"run was trained by .*Own: only runs of hookline.Trainer can be rewound"
    with pytest.raises(OptionError, match=said), hookline.rewound("run", 2, module=ours):
        pass
    assert main(["rewind", "run", "--to", "2"]) == 2
    error = capsys.readouterr().err
    assert "only runs of hookline.Trainer can be rewound" in error and "rewound(" not in error


def test_a_run_that_ends_before_the_step_says_so(recorded: tuple[Path, dict[int, str]]) -> None:
    given = {"module": make_module(), **data("averaged")}
    run = make_run_again(recorded[0], 10, given, hooks("averaged"), {"max_epochs": 1})
    with pytest.raises(HooklineError, match="ended at step 8, before step 10"), run.paused():
        pass


def test_the_manifests_of_the_recorded_run_are_as_expected(recorded: tuple[Path, dict[int, str]]) -> None:
    places = sorted((recorded[0] / "checkpoints").iterdir())
    assert [read_manifest(each)["step"] for each in places] == [4, 8, 12, 15]


def test_a_probe_that_goes_back_again_and_again_does_not_run_for_ever(
    recorded: tuple[Path, dict[int, str]],
) -> None:
    class Returns(Hook):
        observes = False

        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 7:
                trainer.roll_back()

    run = again(recorded[0], 8, probes=[Returns()])
    with pytest.raises(HooklineError, match="goes back at step 7 for the second time"), run.paused():
        pass


def test_a_hook_of_the_program_that_is_not_passed_again_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quiet(seed=SEED, run_dir=tmp_path, logger=True, hooks=[GoesBack(99)]).fit(Net(), batches(3))
    for passed in ([], [GoesBack(99)]):
        caplog.clear()
        make_run_again(tmp_path, 2, {"module": Net(), "train": batches(3)}, passed)
        assert ("ran with the hook 'goes_back'" in caplog.text) == (not passed)
