"""Where a run writes."""

from __future__ import annotations

from pathlib import Path

from tiny import Net, batches, quiet


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
