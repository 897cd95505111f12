"""What hooks ask for, and the random streams that a checkpoint keeps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, HooklineError, OptionError
from hookline.checkpoint.files import read, write
from hookline.data.seeding import rng_state, set_rng_state
from hookline.run.save_request import SAVE_REASONS


def draw() -> tuple[float, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
    )


def test_random_streams_continue_where_they_were(tmp_path: Path) -> None:
    random.gauss(0, 1)  # a Gaussian pair half used up is part of the state
    np.random.randn()
    write({"rng": rng_state()}, tmp_path / "c")
    expected = [draw(), draw()]
    draw()
    set_rng_state(read(tmp_path / "c")["rng"])
    assert [draw(), draw()] == expected


def test_taking_the_state_draws_nothing() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    first = draw()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    rng_state()
    assert draw() == first


class Saves(Hook):
    """Asks for a checkpoint at a moment, and notes what it is told."""

    def __init__(self, event: str, reason: str = "manual") -> None:
        self.heard: list[tuple[int, str, bool]] = []
        self.moments: list[str] = []
        self.reason = reason
        self.event = event

    def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
        if self.event == "batch" and batch_idx == 1:
            trainer.save_checkpoint(reason=self.reason)
            self.moments.append("asked")

    def on_step_end(self) -> None:
        self.moments.append("step end")

    def on_train_epoch_end(self, trainer: Any) -> None:
        self.moments.append("epoch end")
        if self.event == "epoch":
            trainer.save_checkpoint("mine", reason=self.reason)

    def on_checkpoint_save(self, path: Path, step: int, reason: str) -> None:
        self.moments.append("saved")
        self.heard.append((step, reason, (path / "state.json").is_file()))


def test_a_hook_asks_and_the_loop_saves_once_everyone_has_heard_the_step() -> None:
    hook = Saves("batch", "interval")
    trainer = quiet(hooks=[hook], run_dir="run", checkpoint=True)
    trainer.fit(Net(), batches(3))
    assert hook.moments == ["step end", "asked", "step end", "saved", "step end", "epoch end", "saved"]
    assert hook.heard == [(2, "interval", True), (3, "last", True)]
    assert read(Path("run/checkpoints/step-2"))["counters"]["step"] == 2


def test_what_is_asked_for_at_the_epoch_end_is_saved_right_after_it_under_the_path_given() -> None:
    hook = Saves("epoch")
    quiet(hooks=[hook]).fit(Net(), batches(2))
    assert hook.moments[-2:] == ["epoch end", "saved"]
    assert hook.heard == [(2, "manual", True)]
    assert Path("mine/state.json").is_file()


def test_after_a_run_it_is_saved_at_once() -> None:
    trainer = quiet()
    trainer.fit(Net(), batches(2))
    trainer.save_checkpoint("later")
    assert read(Path("later"))["counters"]["step"] == 2


def test_before_any_run_there_is_nothing_to_save() -> None:
    with pytest.raises(HooklineError, match="nothing to save"):
        quiet().save_checkpoint("x")


@pytest.mark.parametrize("reason", SAVE_REASONS)
def test_every_reason_of_the_contract_is_taken(reason: str) -> None:
    hook = Saves("epoch", reason)
    quiet(hooks=[hook]).fit(Net(), batches(1))
    assert hook.heard == [(1, reason, True)]


def test_an_unknown_reason_is_refused_with_the_closest() -> None:
    trainer = quiet()
    trainer.fit(Net(), batches(1))
    with pytest.raises(OptionError, match="reason='intervall', allowed: interval.*Did you mean 'interval'"):
        trainer.save_checkpoint("x", reason="intervall")
    assert not Path("x").exists()


def test_hook_state_that_cannot_be_stored_names_the_hook_and_the_key() -> None:
    class Holds(Hook):
        def state_dict(self) -> dict[str, Any]:
            return {"best": object()}

    trainer = quiet(hooks=[Holds()])
    trainer.fit(Net(), batches(1))
    with pytest.raises(HooklineError, match="hooks.holds.best is a builtins.object"):
        trainer.save_checkpoint("x")
    assert not Path("x").exists()
