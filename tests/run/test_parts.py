"""The parts of a run: a window that is cleared, progress that a checkpoint keeps, and what a resume still needs."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import Net, batches, quiet

from hookline import Hook
from hookline.run.parts import STILL_NEEDED, Progress, Resume, Window
from hookline.run.save_request import RollbackRequest


def test_a_cleared_window_is_a_new_one_but_for_what_is_known_of_its_size() -> None:
    window = Window()
    window.batches, window.count, window.had_none = 2, 1.5, True
    window.losses, window.factors = [1.0], [0.5]
    window.held, window.fed = [(1.0, 2.0, "train")], {0: 1.0}
    window.size, window.unit, window.correction = 4, 3, 2.0
    handed_out = window.losses
    window.clear()
    assert (window.batches, window.count, window.had_none) == (0, 0, False)
    assert (window.losses, window.factors, window.held, window.fed) == ([], [], [], {})
    assert (window.size, window.unit, window.correction) == (4, 3, 2.0)
    assert handed_out == [1.0]  # a listener may have kept it


def test_progress_comes_back_from_a_checkpoint_also_after_json() -> None:
    progress = Progress(
        position=3, epoch_advanced=True, validated_at=(1, 7), validation_pending=True, skips=5
    )
    saved = {**progress.state_dict(), "validated_at": [1, 7]}
    other = Progress()
    other.load_state_dict(saved)
    assert other.state_dict() == progress.state_dict() and other.validated_at == (1, 7)
    assert other.skips == 0  # of this process


def test_a_resume_drops_what_was_restored_and_knows_whether_it_was_refused() -> None:
    resume = Resume()
    assert not resume.was_refused
    resume.take({"module": {"w": 1}, "hooks": {"a": 1}}, "checkpoints/last")
    assert resume.was_refused
    resume.keep_needed()
    assert resume.contents["hooks"] == {"a": 1} and set(resume.contents) == set(STILL_NEEDED)
    assert not resume.was_refused and resume.path == "checkpoints/last"


@pytest.mark.parametrize(
    ("val", "names"),
    [(batches(2), {"train", "val"}), ({"a": batches(2), "b": batches(1)}, {"train", "val a", "val b"})],
)
def test_how_each_loader_is_read_is_told_by_kind_and_name(val: object, names: set[str]) -> None:
    readings: dict[str, str] = {}

    class Asks(Hook):
        def on_train_end(self, trainer: Any) -> None:
            readings.update(trainer._run.data.readings())

    quiet(hooks=[Asks()]).fit(Net(), batches(2), val)
    assert set(readings) == names and all(readings.values())


def test_a_state_after_a_rollback_differs_from_an_abandoned_one_with_the_same_counters() -> None:
    progress = Progress(revision=2, before_validation={"hooks": {}}, schedulers_advanced_at=7)
    progress.abandon()
    assert (progress.revision, progress.before_validation, progress.schedulers_advanced_at) == (3, {}, -1)


def test_a_request_to_go_back_stays_the_first_one_until_it_is_carried_out() -> None:
    first, second = (RollbackRequest(None, None, each, "raise") for each in ("first", "second"))
    resume = Resume()
    resume.request_rollback(first)
    resume.request_rollback(second)
    assert resume.rollback is first
    resume.end_rollback()
    resume.request_rollback(second)
    assert resume.rollback is second
