"""Prediction: what predict_step returns, collected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn

from hookline import Hook, Module, OptionError, Recorder


def test_predict_collects_what_the_step_returns_without_gradients() -> None:
    net = Net()
    predictions = quiet().predict(net, batches(3))
    assert len(predictions) == 3
    for got, (inputs, _) in zip(predictions, batches(3), strict=True):
        assert torch.equal(got, net.layer(inputs).detach())
        assert not got.requires_grad


def test_several_loaders_give_one_list_each() -> None:
    predictions = quiet().predict(Net(), {"a": batches(3), "b": batches(1)})
    assert [len(each) for each in predictions] == [3, 1]


def test_predictions_need_not_be_kept() -> None:
    count: list[int] = []
    trainer = quiet()
    trainer.on("predict_batch_end")(lambda outputs: count.append(len(outputs)))
    assert trainer.predict(Net(), batches(3), return_predictions=False) == []
    assert count == [3, 3, 3]


def test_limit_predict_batches_is_honoured() -> None:
    assert len(quiet(limit_predict_batches=2).predict(Net(), batches(3))) == 2


def test_without_a_predict_step_the_module_is_called_with_the_inputs() -> None:
    class Plain(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

    net = Plain()
    assert torch.equal(quiet().predict(net, batches(1))[0], net(batches(1)[0][0]))


def test_a_plain_module_can_predict() -> None:
    net = nn.Linear(4, 2)
    [got] = quiet().predict(net, [batches(1)[0][0]])
    assert torch.equal(got, net(batches(1)[0][0]))


def test_predict_fires_its_own_events_in_order() -> None:
    class Listen(Hook):
        def setup(self, stage: str) -> None:
            assert stage == "predict"

        def on_predict_start(self) -> None: ...
        def on_predict_epoch_start(self) -> None: ...
        def on_predict_batch_start(self, batch_idx: int) -> None: ...
        def on_predict_batch_end(self, outputs: Any) -> None: ...

        def on_predict_epoch_end(self, outputs: Any) -> None:
            self.all = outputs

        def on_predict_end(self) -> None: ...
        def on_fit_end(self) -> None: ...
        def teardown(self, stage: str) -> None: ...

    listen = Listen()
    trainer = quiet(hooks=[listen])
    with Recorder(trainer) as recorder:
        trainer.predict(Net(), batches(1))
    assert [each.event for each in recorder.calls] == [
        "setup",
        "on_predict_start",
        "on_predict_epoch_start",
        "on_predict_batch_start",
        "predict_step",
        "on_predict_batch_end",
        "on_predict_epoch_end",
        "on_predict_end",
        "teardown",
    ]
    assert [len(each) for each in listen.all] == [1]


def test_predict_without_a_loader_says_what_to_pass() -> None:
    with pytest.raises(OptionError, match="predict needs a loader: pass it to predict"):
        quiet().predict(Net())


def test_after_fit_predict_needs_no_module() -> None:
    net = Net()
    trainer = quiet()
    trainer.fit(net, batches())
    assert torch.equal(trainer.predict(loaders=batches(1))[0], net.layer(batches(1)[0][0]))
