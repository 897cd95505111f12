"""Calls that a loop has left out, and the hooks that wait for them."""

from __future__ import annotations

import pytest
from dialects.looped import net_and_sgd
from tiny import batches
from torch.nn import functional as F

from hookline import Hook, Line
from hookline.hooks import EarlyStopping, ModelCheckpoint


class Formats(Hook):
    """Formats the loss, as a hook that prints it does."""

    def on_step_end(self, loss: float) -> None:
        assert f"{loss:.3f}"


def test_the_error_of_a_hook_that_formats_the_loss_names_a_forgotten_backward() -> None:
    net, sgd = net_and_sgd()
    with pytest.raises(TypeError, match="format") as caught, Line(net, sgd, hooks=[Formats()]) as line:
        for x, y in line.epoch(batches(2)):
            F.mse_loss(net(x), y).backward()
            sgd.step()
    notes = "\n".join(caught.value.__notes__)
    assert "1 update was made without line.backward(loss), so the loss was None at on_step_end" in notes


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_a_line_without_an_optimizer_warns_of_hooks_that_wait_for_updates(
    has_optimizer: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net, sgd = net_and_sgd()
    with Line(net, sgd if has_optimizer else (), hooks=[Formats()]) as line:
        for x, y in line.epoch(batches(3)):
            line.backward(F.mse_loss(net(x), y))
            sgd.step()
    said = [each for each in caplog.messages if "no optimizer to observe" in each]
    assert len(said) == (not has_optimizer)
    if said:
        assert said[0].startswith("3 backward passes") and "on_step_end (hooks: formats)" in said[0]
        assert "Line(model, optimizer" in said[0]


@pytest.mark.parametrize("way", ["nothing", "start_epoch", "epoch", "validation"])
def test_epochs_without_batches_warn_of_hooks_that_wait_for_their_end(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    net, _ = net_and_sgd()
    hooks = [EarlyStopping("score", strict=False), ModelCheckpoint(save_top_k=0)]
    with Line(net, hooks=hooks) as line:
        for _ in line.epochs(2):
            if way == "start_epoch":
                line.start_epoch()
            for _ in line.epoch(range(2)) if way == "epoch" else ():
                line.log("score", 1.0)
            for _ in line.validation(batches(1)) if way == "validation" else ():
                line.log("score", 1.0)
    said = [each for each in caplog.messages if "did not fire" in each]
    assert len(said) == (way == "nothing")
    if said:
        assert said[0].startswith("2 epochs of line.epochs ran outside of line.epoch(loader)")
        assert "on_train_epoch_end (hooks: early_stopping, model_checkpoint)" in said[0]
        assert "line.epoch(range(n))" in said[0] and "line.start_epoch() first in the body" in said[0]
