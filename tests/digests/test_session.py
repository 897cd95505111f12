"""`Trainer(digest=...)`: digests at the right steps, nothing when it is off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import Net, batches, quiet

from hookline import Hook, read_digests
from hookline.engine.plan import noop


@pytest.mark.parametrize(
    ("digest", "steps"),
    [
        (True, [1, 2, 3, 4, 5, 6, 7]),
        (3, [1, 3, 6]),
        ("every 5 steps", [1, 5]),
        ({"every": 7}, [1, 7]),
        (False, []),
    ],
    ids=str,
)
def test_the_first_step_and_every_nth_are_digested(digest: Any, steps: list[int]) -> None:
    trainer = quiet(run_dir="run", digest=digest)
    trainer.fit(Net(), batches(7))
    assert [step for step, _ in read_digests("run").current] == steps
    assert Path("run/digests.jsonl").exists() == bool(steps)
    assert trainer.plan.tracers == ()


def test_only_a_fit_is_digested_and_no_trial_run() -> None:
    trainer = quiet(run_dir="run", digest=True)
    trainer.validate(Net(), batches(2))
    quiet(run_dir="run", digest=True, fast_dev_run=True).fit(Net(), batches(2))
    assert not Path("run/digests.jsonl").exists()
    assert repr(trainer.digesting) == "<digests: every 1 steps>" and "off" in repr(quiet().digesting)


def test_the_recorder_is_absent_in_steps_without_a_digest() -> None:
    trainer = quiet(run_dir="run", digest=4)
    seen: list[bool] = []
    trainer.on("train_batch_end")(lambda: seen.append(trainer.plan.on_before_batch_transfer is not noop))
    trainer.fit(Net(), batches(9))
    assert [number for number, is_wrapped in enumerate(seen, 1) if is_wrapped] == [1, 4, 8]


def test_a_run_that_fails_writes_the_steps_before() -> None:
    class Fails(Hook):
        def on_before_optimizer_step(self, step: int) -> None:
            if step == 3:
                raise RuntimeError("broken")

    trainer = quiet(run_dir="run", digest=True, hooks=[Fails()])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Net(), batches(6))
    assert [step for step, _ in read_digests("run").current] == [1, 2, 3]
    assert trainer.plan.tracers == ()
    trainer.hooks.remove("fails")
    trainer.fit(Net(), batches(6))  # another run in the same directory
    assert [step for step, _ in read_digests("run").current] == [1, 2, 3, 4, 5, 6]
