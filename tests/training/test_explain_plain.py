"""`explain` takes what `fit` takes, and shows the functions of the user for a plain nn.Module."""

from __future__ import annotations

from typing import Any

import torch
from tiny import batches, quiet
from torch import nn


def my_step(model: Any, batch: Any) -> Any:
    return model(batch[0]).sum()


def test_explain_takes_the_arguments_of_fit_and_shows_the_step_of_the_user() -> None:
    net = nn.Linear(4, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = quiet()
    shown = str(trainer.explain(net, batches(), batches(), step=my_step, optimizer=sgd))
    line = my_step.__code__.co_firstlineno
    assert shown.count(f"module my_step (tests/training/test_explain_plain.py:{line})") == 2 or (
        shown.count(f"module my_step (test_explain_plain.py:{line})") == 2
    )
    assert "PlainSteps.training_step" not in shown
    assert "module CrossEntropyLoss (built in)" in str(trainer.explain(net, loss=nn.CrossEntropyLoss()))
