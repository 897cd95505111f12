"""The model to try hooks on."""

from __future__ import annotations

import torch
from tiny import quiet

from hookline.interop.demo import BoringModel, RandomDataset


def test_the_dataset_is_drawn_once() -> None:
    data = RandomDataset(size=3, length=5)
    assert len(data) == 5 and data[4].shape == (3,)
    assert torch.equal(data[2], data[2]) and not torch.equal(data[2], data[3])


def test_every_stage_runs_with_its_own_data_and_the_loss_goes_down() -> None:
    torch.manual_seed(0)
    model, trainer = BoringModel(), quiet(max_epochs=3)
    before = trainer.validate(model)
    trainer.fit(model)
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.01  # the schedule advances every epoch
    after = trainer.validate(model)
    assert after["val/x"] < before["val/x"]
    assert set(trainer.test(model)) >= {"test/y"}
    predictions = trainer.predict(model)
    assert len(predictions) == 64 and predictions[0].shape == (1, 2)
