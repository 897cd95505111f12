"""What the error of a failed run says beside its message: the batch of a failed step, and how to mend common mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Module


class Failing(Net):
    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.stage == "train":
            self.layer(batch[0].double())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, _, _ = batch
        return inputs


@pytest.mark.parametrize("stage", ["train", "val"])
def test_an_error_in_a_step_describes_its_batch(stage: str) -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        quiet().fit(Failing(stage), batches(1, size=3), batches(1, size=3))
    assert caught.value.__notes__[0] == "batch: float32[3, 4], float32[3, 2]"


def test_an_error_elsewhere_does_not_describe_a_batch() -> None:
    trainer = quiet()
    trainer.on("step_end")(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.fit(Net(), batches(1))
    assert not any(each.startswith("batch:") for each in caught.value.__notes__)


def test_a_step_that_calls_backward_itself_is_told_not_to() -> None:
    class Twice(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx).square()
            loss.backward()
            return loss

    with pytest.raises(RuntimeError, match="a second time") as caught:
        quiet().fit(Twice(), batches(1))
    assert "If training_step calls backward itself: only return the loss, or set" in caught.value.__notes__[0]


def test_layers_in_a_list_are_told_to_be_in_a_module_list() -> None:
    class Listed(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [torch.nn.Linear(4, 2)]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("trained")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(ValueError, match="empty parameter list") as caught:
        quiet().fit(Listed(), batches(1))
    assert caught.value.__notes__[0].startswith(
        "Listed has no parameters; layers in a Python list must be in"
    )


def test_a_prediction_of_a_plain_model_says_what_it_is_called_with() -> None:
    rows = [{"x": torch.randn(3, 4)}]
    net = torch.nn.Sequential(torch.nn.Linear(4, 2))
    with pytest.raises(TypeError) as caught:
        quiet().predict(net, rows)
    assert any("write predict_step(self, batch, batch_idx)" in each for each in caught.value.__notes__)


def test_an_argument_of_log_that_is_nearly_right_is_named() -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0, onepoch=True)  # type: ignore[call-arg]

    with pytest.raises(TypeError) as caught:
        quiet().fit(Logs(), batches(1))
    assert "log() has no argument 'onepoch'. Did you mean 'on_epoch'?" in caught.value.__notes__


def test_a_prediction_on_batches_that_forward_does_not_take_names_predict_step() -> None:
    class Bare(Module):
        def forward(self, x: Any) -> Any:
            return x.square()

    with pytest.raises(AttributeError) as caught:
        quiet().predict(Bare(), [{"x": torch.ones(2, 4)}])
    assert any(each.startswith("Bare has no predict_step, so predict") for each in caught.value.__notes__)
