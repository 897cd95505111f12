"""Where a run writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import Net, batches, quiet

from hookline import OptionError


def test_each_run_gets_a_directory_of_its_own_and_one_that_was_asked_for_is_used() -> None:
    trainer = quiet()
    asked = trainer.run_dir
    trainer.fit(Net(), batches(1))
    assert trainer.run_dir == asked
    trainer.fit(Net(), batches(1))
    assert trainer.run_dir != asked
    assert asked.parent == trainer.run_dir.parent == Path("runs")


def test_a_given_directory_serves_every_run() -> None:
    trainer = quiet(run_dir="mine")
    trainer.fit(Net(), batches(1))
    assert trainer.run_dir == Path("mine")


@pytest.mark.parametrize("below", ["", "/deeper/still"])
def test_a_directory_that_cannot_be_made_is_refused_before_the_first_step(below: str) -> None:
    Path("taken").write_text("a file")
    trainer = quiet(run_dir=f"taken{below}")
    with pytest.raises(OptionError, match=r"run_dir='taken.*' cannot be a directory: .*taken is a file"):
        trainer.fit(Net(), batches(1))
    assert trainer.global_step == 0


def test_so_is_one_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("theirs").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(OptionError, match=r"run_dir='theirs/run' cannot be written to: .*theirs is read-only"):
        quiet(run_dir="theirs/run").fit(Net(), batches(1))
