"""The artifacts of a run reach a tracker whole, once, and never stop the run."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from loggers.everything import figure
from loggers.folder_tracker import FolderTracker, Opens, Scored, keeps, tracked
from tiny import Net, batches, quiet

from hookline import Hook, OptionError, Preempted, load_weights
from hookline.checkpoint.files import read
from hookline.hooks import ModelCheckpoint
from hookline.loggers import Queued, queued
from hookline.loggers.artifacts import MOST_FIGURES, MOST_RECORDED, check_artifacts
from hookline.loggers.base import figure_png

ALL = ("config", "figures", "checkpoints")


def fit(tracker: Any, module: Any, *hooks: Hook, resume: Any = None, **options: Any) -> Any:
    trainer = quiet(
        logger=tracker, run_dir="mine", hooks=hooks, **{"max_epochs": len(module.scores), **options}
    )
    trainer.fit(module, batches(2), resume=resume)
    return trainer


def names(kind: str = "checkpoint") -> list[str]:
    return [facts["file"] for _, facts in tracked(kind)]


def test_the_configuration_and_figures_are_logged_by_default_and_checkpoints_are_not() -> None:
    class Draws(Scored):
        def __init__(self, api_key: str) -> None:
            super().__init__(1.0)
            self.api_key = api_key

        def on_train_end(self) -> None:
            for step in (1, 2):
                self.experiment.add_figure("curve", figure(), step)

    fit(FolderTracker(), Draws("sk-1234567890abcdef1234"), keeps())
    ((config, facts),) = tracked("config")
    record = json.loads(config.read_text())
    assert facts["file"] == "run.json" and facts["metadata"] == {"run": record["id"]}
    assert record["options"]["max_epochs"] == 1 and "optimizers.0.groups.0.lr" in record["settings"]
    assert "1234567890abcdef" not in config.read_text() and record["module"]["hparams"]
    assert record["status"] == "training"  # as it was at the start
    ((figures, _),) = tracked("figures")
    (drawn,) = figures.iterdir()  # the newest of each name
    assert drawn.name.startswith("curve-") and drawn.name.endswith("-2.png")
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert names() == [] and Path("tracked/closed").exists()
    assert sorted(path.name for path in Path("mine").iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize("save", [{}, {"save": "async"}], ids=["sync", "async"])
def test_each_checkpoint_arrives_whole_though_the_rotation_removes_it(save: dict[str, Any]) -> None:
    tracker = FolderTracker(artifacts=ALL)
    tracker.gate.clear()
    fit(tracker, Scored(3.0, 1.0, 2.0, 0.5), keeps(), Opens(tracker.gate), **save)
    assert [path.name for path in Path("mine/checkpoints").iterdir()] == ["e3"]
    assert names() == ["e0", "e1", "e3"]
    for (path, facts), epoch in zip(tracked("checkpoint"), (0, 1, 3), strict=True):
        assert read(path)["counters"]["step"] == 2 * epoch + 2  # reading checks every fingerprint
        assert facts["metadata"]["path"] == f"checkpoints/e{epoch}"
    assert not Path("mine/.uploads").exists()
    fresh = Net()
    load_weights(fresh, tracked("checkpoint")[-1][0])
    assert torch.equal(fresh.layer.weight, read(Path("mine/checkpoints/e3"))["module"]["layer.weight"])


def test_only_a_better_checkpoint_is_the_best_one_and_the_last_is_logged_once_at_the_end() -> None:
    both = FolderTracker(artifacts=("best_checkpoint", "last_checkpoint"))
    fit(both, Scored(2.0, 3.0, 1.0, 4.0), keeps(save_top_k=-1), checkpoint={"last": True})
    assert names() == ["e0", "e2", "last"]
    facts = [facts for _, facts in tracked("checkpoint")]
    assert [each["aliases"] for each in facts] == [
        ["latest", "step-2", "best"],
        ["latest", "step-6", "best"],
        ["latest", "step-8", "last"],
    ]
    best = facts[1]["metadata"]
    record = json.loads(Path("mine/run.json").read_text())
    assert (best["monitor"], best["mode"], best["score"]) == ("score", "min", 1.0)
    assert (best["step"], best["epoch"], best["reason"], best["run"]) == (6, 2, "best", record["id"])
    assert best["metrics"]["score"] == 1.0


def test_a_preempted_run_logs_its_last_checkpoint_when_it_has_resumed_and_ended() -> None:
    class Ends(Hook):
        def on_train_epoch_end(self, epoch: int) -> None:
            if epoch == 0:
                signal.raise_signal(signal.SIGTERM)

    last = {"artifacts": ("last_checkpoint",)}
    with pytest.raises(Preempted):
        fit(FolderTracker(**last), Scored(1.0, 2.0), Ends(), checkpoint={"last": True})
    assert names() == []
    fit(FolderTracker(**last), Scored(1.0, 2.0), resume="auto", checkpoint={"last": True})
    assert names() == ["last"]
    fit(FolderTracker(**last), Scored(1.0, 2.0), resume="auto", checkpoint={"last": True})
    assert names() == ["last"]  # nothing was trained


def test_what_a_kill_prevented_is_logged_by_the_run_that_resumes_and_only_once() -> None:
    folders = [str(Path(__file__).parents[1])]
    code = (
        f"import sys; sys.path[:0] = {folders}\n"
        "from loggers.test_artifacts import *\nimport os\n"
        "class Kills(Hook):\n"
        "    def on_train_batch_start(self, epoch):\n"
        "        if epoch == 2: tracker.began.wait(300); os.kill(os.getpid(), signal.SIGKILL)\n"
        "tracker = FolderTracker(artifacts=('best_checkpoint', 'config'))\ntracker.gate.clear()\n"
        "fit(tracker, Scored(1.0, 2.0, 3.0, 0.5), keeps(save_top_k=-1), Kills())"
    )
    ended = preloaded.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert names() == [] and list(Path("mine/.uploads").iterdir())
    for _ in range(2):  # from the end of the second epoch, whose checkpoint is not the best
        tracker = FolderTracker(artifacts=("best_checkpoint", "config"))
        fit(tracker, Scored(1.0, 2.0, 3.0, 0.5), keeps(save_top_k=-1), resume=Path("mine/checkpoints/e1"))
        # the fourth one is trained, and saved, again
        assert names()[:2] == ["e0", "e3"] and set(names()[2:]) <= {"e3", "e3-v1"}
    assert tracked("checkpoint")[0][1]["aliases"] == ["latest", "step-2", "best"]
    assert not Path("mine/.uploads").exists()
    assert len(names("config")) == 3


def test_a_tracker_that_is_too_slow_gets_the_newest_ones_and_says_which_it_misses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(queued, "MOST_WAITING", 1)
    tracker = FolderTracker(artifacts=("checkpoints",))
    tracker.gate.clear()

    class Waits(Hook):
        def on_train_epoch_start(self, epoch: int) -> None:
            assert epoch == 0 or tracker.began.wait(300)

    fit(tracker, Scored(1.0, 2.0, 3.0, 4.0), keeps(save_top_k=-1), Waits(), Opens(tracker.gate))
    assert names() == ["e0", "e3"]
    told = [each.message for each in caplog.records if "does not get the checkpoint" in each.message]
    assert [each.split()[6].rstrip(":") for each in told] == ["e1", "e2"]
    assert not Path("mine/.uploads").exists()


def test_rows_are_not_dropped_while_a_long_upload_runs(caplog: pytest.LogCaptureFixture) -> None:
    rows: list[int] = []

    class Counts(FolderTracker):
        def _write(self, metrics: Any, step: int) -> None:
            rows.append(step)

    tracker = Counts(artifacts=("checkpoints",))
    tracker.gate.clear()

    class Waits(Hook):
        def on_train_epoch_start(self, epoch: int) -> None:
            assert epoch == 0 or tracker.began.wait(300)

    fit(
        Queued(tracker, size=15),
        Scored(1.0, *[2.0] * 9),
        keeps(),
        Waits(),
        Opens(tracker.gate),
        log_every_n_steps=1,
    )
    assert len({*rows}) == 20 and "dropped" not in caplog.text


@pytest.mark.parametrize("is_queued", [True, False])
def test_an_upload_that_fails_does_not_end_the_run(is_queued: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(FolderTracker):
        def _upload(self, *given: Any) -> bool:
            raise OSError("the disk of the tracker is full")

    tracker = Fails(artifacts=ALL, queued=is_queued)
    trainer = fit(tracker, Scored(2.0, 1.0), keeps())
    assert trainer.state.step == 4 and Path("mine/checkpoints/e1").is_dir()
    told = [each.message for each in caplog.records if each.name == "hookline"]
    assert told == ["Fails failed in log_artifact and is switched off for this run"]
    assert not Path("mine/.uploads").exists()


@pytest.mark.parametrize("is_broken", [True, False])
def test_files_for_a_client_that_sends_later_are_held_until_it_is_closed(
    is_broken: bool, tmp_path: Path
) -> None:
    class Later(FolderTracker):
        def _upload(self, path: Path, *given: Any) -> bool:
            held.append(self._hold(path, tmp_path / "held"))
            return False

        def _disconnect(self) -> None:
            assert held[0].read_text() == "weights"
            if is_broken:
                raise OSError("the line is dead")

    held: list[Path] = []
    file = tmp_path / "model.ckpt"
    file.write_text("weights")
    tracker = Later(artifacts=("checkpoints",))
    tracker.open(lambda: tmp_path)
    tracker.client  # noqa: B018
    tracker.log_artifact(file, "checkpoint", "checkpoint", {"checkpoint": "its id"})
    assert not tracker.has_logged("its id", tmp_path)
    with contextlib.suppress(OSError):
        tracker.close()
    assert not (tmp_path / "held").exists()
    assert tracker.has_logged("its id", tmp_path) is not is_broken


def test_files_of_your_own_are_logged_as_they_were(tmp_path: Path) -> None:
    tracker = FolderTracker(artifacts=())

    class Writes(Scored):
        def on_train_start(self) -> None:
            file = tmp_path / "words.txt"
            file.write_text("one")
            self.logger.log_artifact(file, "words", "vocabulary", {"size": 1}, ["small"])
            file.write_text("another")
            with pytest.raises(ValueError, match=r"log_artifact\('none', 'x'\): there is no such file"):
                self.logger.log_artifact("none", "x")

    fit(tracker, Writes(1.0))
    ((path, facts),) = tracked("vocabulary")
    assert path.read_text() == "one"
    assert (facts["name"], facts["metadata"], facts["aliases"]) == ("words", {"size": 1}, ["small"])
    assert names("config") == []


def test_a_checkpoint_at_a_url_is_left_to_its_store(
    memory_urls: None, caplog: pytest.LogCaptureFixture
) -> None:
    saver = ModelCheckpoint(dirpath="memory://bucket/run", save_top_k=-1)
    fit(FolderTracker(artifacts=("checkpoints",)), Scored(1.0, 2.0), saver)
    told = [each.message for each in caplog.records if "URL" in each.message]
    assert told == ["A checkpoint that is saved to a URL is not logged as an artifact."] and names() == []


def test_a_checkpoint_that_is_saved_after_the_run_starts_no_new_one() -> None:
    before = threading.active_count()
    trainer = fit(FolderTracker(artifacts=ALL), Scored(1.0))
    trainer.save_checkpoint()
    assert Path("mine/checkpoints/step-2").is_dir()
    assert names() == [] and threading.active_count() == before


def test_the_memory_of_figures_and_of_checkpoints_has_a_limit(tmp_path: Path) -> None:
    tracker = FolderTracker(artifacts=("figures", "checkpoints"))
    tracker.open(lambda: tmp_path)
    png = figure_png("x", figure())
    for number in range(MOST_FIGURES + 5):
        tracker.add_drawn_figure(f"figure {number}", png, number)
    for number in range(MOST_RECORDED + 5):
        tracker.log_artifact(Path(__file__), "checkpoint", "checkpoint", {"checkpoint": str(number)})
    tracker.close()
    ((figures, _),) = tracked("figures")
    assert len(list(figures.iterdir())) == MOST_FIGURES
    assert not tracker.has_logged("4", tmp_path) and tracker.has_logged("5", tmp_path)
    assert FolderTracker().has_logged(str(MOST_RECORDED + 4), tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"checkpoints": 3}', '{"checkpoints": [3]}'])
def test_a_damaged_record_of_logged_checkpoints_is_an_empty_one(text: str, tmp_path: Path) -> None:
    (tmp_path / ".artifacts").mkdir()
    (tmp_path / ".artifacts/FolderTracker.json").write_text(text)
    assert not FolderTracker().has_logged("3", tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["checkpoint"], "artifacts='checkpoint', allowed: .* Did you mean 'checkpoints'"),
        ("all", "artifacts='all', allowed"),
        (3, "artifacts=3 must be a list"),
    ],
)
def test_wrong_choices_are_refused(given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FolderTracker(artifacts=given)


def test_nothing_and_one_word_are_choices_too() -> None:
    assert check_artifacts(None) == check_artifacts(False) == check_artifacts(()) == ()
    assert check_artifacts("config") == ("config",)
