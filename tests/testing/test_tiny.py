"""The tiny run learns, and is the same every time."""

from __future__ import annotations

import torch

from hookline.testing import TinyModule, play, tiny_batches, tiny_trainer


def test_the_tiny_model_learns() -> None:
    data = [(inputs, inputs[:, :2]) for inputs, _ in tiny_batches(8)]
    torch.manual_seed(0)
    trainer = tiny_trainer(max_epochs=20)
    first = trainer.validate(TinyModule(), data)["val/loss"]
    assert trainer.fit(TinyModule(), data, data)["val/loss"] < first / 2


def test_two_plays_are_equal() -> None:
    assert play().trainer.metrics == play().trainer.metrics
    assert torch.equal(tiny_batches()[0][0], tiny_batches()[0][0])
