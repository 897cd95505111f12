"""One process, one device."""

from __future__ import annotations

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import OptionError, Trainer
from hookline.distributed import SingleDevice
from hookline.distributed.launch import pick_device


def test_the_module_and_its_batches_go_to_the_device() -> None:
    devices = []

    class Looks(Net):
        def on_train_batch_start(self, batch: object, device: torch.device) -> None:
            devices.append((str(batch[0].device), str(self.layer.weight.device), str(device)))  # type: ignore[index]

    quiet(device="meta").fit(Looks(), batches(2))
    assert devices == [("meta", "meta", "meta")] * 2


def test_a_module_that_is_there_already_keeps_its_parameters() -> None:
    net = Net()
    weight = net.layer.weight
    assert SingleDevice(torch.device("cpu")).place(net) is net
    assert net.layer.weight is weight


def test_auto_takes_an_accelerator_if_there_is_one() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert pick_device("auto") == (accelerator or torch.device("cpu"))
    assert pick_device("cpu") == pick_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("device", ["gpu", "cpu:x", "", 1.5, None])
def test_what_is_no_device_is_refused(device: object) -> None:
    with pytest.raises(OptionError, match="device=.* is not a device"):
        pick_device(device)


def test_the_trainer_tells_where_the_module_is() -> None:
    assert Trainer(device="meta").device == torch.device("meta")


def test_a_hundred_steps_read_nothing_from_the_device() -> None:
    trainer = quiet(device="meta", max_epochs=2, log_every_n_steps=10)
    trainer.fit(Net(), batches(50))  # any host read of a meta tensor raises
    assert trainer.global_step == 100
