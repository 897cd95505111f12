"""Which checkpoints of a run each logger gets, under which names, also after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from loggers.folder_tracker import Scored, keeps
from tiny import Net, batches, quiet

from hookline import Hook, Logger, OptionError
from hookline.hooks import ModelCheckpoint
from hookline.loggers import Loggers
from hookline.loggers.run_artifacts import ARTIFACTS, RunArtifacts, safe_name


class Gets(Logger):
    """A logger of the user: it takes artifacts by naming them."""

    queued = False

    def __init__(self, *artifacts: str) -> None:
        self.artifacts = artifacts
        self.got: list[tuple[str, str, dict[str, Any], list[str]]] = []

    def log_artifact(
        self, path: Any, name: str, kind: str = "", metadata: Any = None, aliases: Any = ()
    ) -> None:
        assert path.exists()
        self.got.append((path.name, kind, dict(metadata), list(aliases)))

    def names(self) -> list[str]:
        return [name for name, kind, *_ in self.got if kind == "checkpoint"]


def test_each_logger_gets_what_it_names() -> None:
    every, best, last, config = (
        Gets("checkpoints"),
        Gets("best_checkpoint"),
        Gets("last_checkpoint"),
        Gets("config"),
    )
    nothing = Gets()
    quiet(
        logger=[every, best, last, config, nothing],
        run_dir="mine",
        max_epochs=3,
        hooks=[keeps(mode="max", save_top_k=2)],
        checkpoint={"last": True},
    ).fit(Scored(1.0, 3.0, 2.0), batches(2))
    assert every.names() == ["e0", "e1", "e2", "last"]  # each when it is saved
    assert best.names() == ["e0", "e1"]
    assert last.names() == ["last"] and last.got[0][3] == ["latest", "step-6", "last"]
    assert [(name, kind) for name, kind, *_ in config.got] == [("run.json", "config")]
    assert nothing.got == []


def test_a_run_whose_directory_is_made_late_logs_its_configuration_too() -> None:
    config = Gets("config")
    trainer = quiet(logger=config, max_epochs=2, hooks=[ModelCheckpoint()])
    trainer.fit(Net(), batches(2))
    ((name, _, facts, aliases),) = config.got
    assert (name, aliases) == ("run.json", ["latest"])
    assert facts["run"] == json.loads((trainer.run_dir / "run.json").read_text())["id"]


def test_two_metrics_have_a_best_checkpoint_each() -> None:
    class Both(Scored):
        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            self.log("other/loss", -self.scores[self.current_epoch])

    best = Gets("best_checkpoint")
    hooks = [keeps(save_top_k=-1), keeps(monitor="other/loss", save_top_k=-1, dirpath="other")]
    quiet(logger=best, run_dir="mine", max_epochs=3, hooks=hooks).fit(Both(2.0, 1.0, 3.0), batches(2))
    marks = [(facts["path"], aliases[2]) for _, _, facts, aliases in best.got]
    assert marks == [
        ("checkpoints/e0", "best"),
        ("other/e0", "best-other_loss"),
        ("checkpoints/e1", "best"),
        ("other/e2", "best-other_loss"),
    ]


def test_a_resume_continues_with_the_best_score_of_its_checkpoint() -> None:
    def fit(*scores: float, resume: Any = None) -> Gets:
        best = Gets("best_checkpoint")
        quiet(logger=best, run_dir="mine", max_epochs=len(scores), hooks=[keeps(save_top_k=-1)]).fit(
            Scored(*scores), batches(2), resume=resume
        )
        return best

    assert fit(3.0, 2.0, 1.0).names() == ["e0", "e1", "e2"]
    # back to the second epoch: the third one never was, so 1.5 is the best, but 2.5 is not
    assert fit(0.0, 0.0, 2.5, 1.5, resume=Path("mine/checkpoints/e1")).names() == ["e3"]


def test_a_run_that_continues_elsewhere_logs_only_its_own_checkpoints() -> None:
    first = Gets("checkpoints")
    quiet(logger=first, run_dir="mine", hooks=[keeps(save_top_k=-1)]).fit(Scored(1.0), batches(2))
    second = Gets("checkpoints", "best_checkpoint")
    second.has_logged = lambda *given: False  # type: ignore[method-assign]
    quiet(logger=second, run_dir="other", max_epochs=2, hooks=[keeps(save_top_k=-1)]).fit(
        Scored(1.0, 2.0), batches(2), resume=Path("mine/checkpoints/e0")
    )
    assert second.names() == ["e1"] and second.got[0][2]["path"] == "checkpoints/e1"
    assert "best" not in second.got[0][3]  # the score of the first one counts


def test_a_checkpoint_without_a_manifest_is_logged_with_what_is_known(tmp_path: Path) -> None:
    taker = Gets("checkpoints")
    together = Loggers([taker])
    together.log_checkpoint(tmp_path, "interval", 3)  # not in a run
    together.open(lambda: tmp_path)
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "file.ckpt").touch()
    for name in ("checkpoint-3", "file.ckpt"):
        together.log_checkpoint(tmp_path / name, "interval", 3)
    together.log_checkpoint(tmp_path / "file.ckpt", "interval", 3)  # the same one again
    together.close()
    assert [name for name, *_ in taker.got] == ["checkpoint-3", "file.ckpt"]
    assert taker.got[0][2] == {
        "step": 3,
        "reason": "interval",
        "path": "checkpoint-3",
        "checkpoint": "checkpoint-3 of step 3",
    }


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_never_the_best(score: float, tmp_path: Path) -> None:
    run = RunArtifacts([Gets("best_checkpoint")], lambda *given: None, lambda: tmp_path)
    described = run._describe(tmp_path / "a", "best", 1)
    described.metadata |= {"monitor": "x", "mode": "max", "score": score}
    assert not run._note_score(described) and run.position() is None


@pytest.mark.parametrize(
    "position",
    [
        None,
        3,
        {"best": 3},
        {"best": {"x": 3}},
        {"best": {"x": {"score": "low", "path": "a", "id": "b"}}},
        {"best": {"x": {"score": 1.0, "path": "../../elsewhere", "id": "b"}}},
        {"best": {"x": {"score": 1.0, "path": "/etc", "id": "b"}}},
    ],
)
def test_a_position_that_is_not_one_is_ignored(position: Any, tmp_path: Path) -> None:
    run = RunArtifacts([Gets("best_checkpoint")], lambda *given: None, lambda: tmp_path)
    run.resume(position, tmp_path / "none")
    assert run.position() is None


def test_loggers_without_artifacts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise AssertionError("no logger takes artifacts")

    monkeypatch.setattr(RunArtifacts, "__init__", refuse)
    plain = Gets()
    quiet(logger=plain, run_dir="mine", hooks=[ModelCheckpoint()]).fit(Net(), batches(2))
    assert plain.got == []


def test_a_logger_with_a_wrong_choice_is_refused_by_the_trainer() -> None:
    with pytest.raises(OptionError, match="Gets: artifacts='checkpoint', allowed: .* Did you mean"):
        quiet(logger=Gets("config", "checkpoint"))


def test_names_are_allowed_everywhere() -> None:
    assert safe_name("a b/ü:c.d_e-f") == "a_b_c.d_e-f"
    assert safe_name("") == "_" and len(safe_name("x" * 500)) == 120
    assert all(safe_name(each) == each for each in ARTIFACTS)


def test_a_hook_sees_the_event_after_the_loggers_have_the_checkpoint() -> None:
    every = Gets("checkpoints")
    seen: list[int] = []

    class Removes(Hook):
        def on_checkpoint_save(self, trainer: Any, path: Path) -> None:
            seen.append(len(every.got))
            trainer.remove_checkpoint(path)

    quiet(logger=every, run_dir="mine", hooks=[ModelCheckpoint(), Removes()]).fit(Net(), batches(2))
    assert seen == [1]
