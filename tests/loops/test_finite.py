"""A loss that is NaN or infinite: the run stops one step late and saves nothing, or leaves such updates out."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, NonFiniteLoss
from hookline.loops.finite import FiniteWatch


def poisoned(at: int, n: int = 4, value: float = math.nan) -> list[Any]:
    """Batches of which one makes the loss not finite."""
    data = batches(n)
    data[at][1].fill_(value)
    return data


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_run_stops_one_step_late(value: float) -> None:
    trainer = quiet()
    with pytest.raises(NonFiniteLoss, match=f"The loss became {value}"):
        trainer.fit(Net(), poisoned(at=1, value=value))
    assert trainer.status == "error"
    assert trainer.state.batch_idx == 2


def test_a_loss_that_is_not_finite_on_the_very_last_batch_is_noticed() -> None:
    with pytest.raises(NonFiniteLoss):
        quiet().fit(Net(), poisoned(at=3))


def test_nothing_is_saved_from_such_a_loss(tmp_path: Path) -> None:
    class SaveEveryStep(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            trainer.save_checkpoint(tmp_path / f"step-{step}")

    with pytest.raises(NonFiniteLoss):
        quiet(hooks=[SaveEveryStep()]).fit(Net(), poisoned(at=2))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_nothing_is_saved_after_the_run_either(tmp_path: Path) -> None:
    trainer = quiet()
    trainer.on("train_epoch_end")(lambda trainer: trainer.save_checkpoint(tmp_path / "last", "last"))
    with pytest.raises(NonFiniteLoss):
        trainer.fit(Net(), poisoned(at=3))
    assert list(tmp_path.iterdir()) == []


def test_skip_leaves_the_update_out_and_says_so() -> None:
    net = Net()
    twin = copy.deepcopy(net)
    reasons: list[str] = []
    trainer = quiet(nonfinite="skip")
    trainer.on("step_skipped")(lambda reason: reasons.append(reason))
    metrics = trainer.fit(net, poisoned(at=1))
    clean = [b for i, b in enumerate(batches(4)) if i != 1]
    expected = quiet().fit(twin, clean)
    assert reasons == ["nonfinite"]
    assert trainer.global_step == 3
    assert torch.equal(net.layer.weight, twin.layer.weight)
    assert metrics["train/loss"] == expected["train/loss"]


def test_skip_leaves_a_whole_window_out() -> None:
    net = Net()
    twin = copy.deepcopy(net)
    trainer = quiet(nonfinite="skip", accumulate_grad_batches=2)
    trainer.fit(net, poisoned(at=0))
    quiet(accumulate_grad_batches=2).fit(twin, batches(4)[2:])
    assert trainer.global_step == 1
    assert torch.equal(net.layer.weight, twin.layer.weight)


def test_skip_does_not_stop_a_manual_run() -> None:
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if loss.isfinite():
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

    trainer = quiet(nonfinite="skip")
    trainer.fit(Manual(), poisoned(at=1))
    assert trainer.global_step == 3


def test_the_watch_reads_nothing_where_reading_would_fail() -> None:
    watch = FiniteWatch(torch.device("meta"))
    watch.look(torch.empty((), device="meta"))
    watch.look(torch.empty((), device="meta"))
    watch.settle()
