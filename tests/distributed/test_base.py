"""A strategy is a listener, and may stand around the actions of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn

from hookline import Hook, HookError, OptionError, Strategy, Trainer
from hookline.distributed import SingleDevice
from hookline.distributed.launch import pick_device

CPU = torch.device("cpu")


def test_the_base_says_that_a_strategy_must_place_the_module() -> None:
    with pytest.raises(NotImplementedError):
        Strategy(CPU).place(Net())


def test_a_single_process_needs_no_agreement() -> None:
    strategy = Strategy(CPU)
    assert (strategy.rank, strategy.local_rank, strategy.world_size) == (0, 0, 1)
    assert strategy.reduce(3.0) == 3.0
    assert strategy.barrier() is None


def test_it_hears_events_after_hooks_and_module() -> None:
    heard: list[str] = []

    class Own(SingleDevice):
        def setup(self, stage: str) -> None:
            heard.append(f"strategy setup {stage}")

        def on_train_start(self, world_size: int) -> None:
            heard.append(f"strategy {world_size}")

        def on_train_batch_start(self, batch_idx: int) -> None:
            heard.append(f"strategy batch {batch_idx}")

        def teardown(self) -> None:
            heard.append("strategy teardown")

    class Listens(Net):
        def setup(self) -> None:
            heard.append("module setup")

        def on_train_start(self) -> None:
            heard.append("module")

        def teardown(self) -> None:
            heard.append("module teardown")

    trainer = quiet(strategy=Own(CPU))
    trainer.on("train_start")(lambda: heard.append("hook"))
    trainer.fit(Listens(), batches(1))
    assert heard == [
        "module setup",
        "strategy setup fit",
        "hook",
        "module",
        "strategy 1",
        "strategy batch 0",
        "strategy teardown",
        "module teardown",
    ]


def test_an_event_it_cannot_hear_is_refused() -> None:
    class Wrong(SingleDevice):
        def on_trian_start(self) -> None:
            pass

    with pytest.raises(
        HookError, match="Wrong.on_trian_start is not an event. Did you mean 'on_train_start'"
    ):
        quiet(strategy=Wrong(CPU)).fit(Net(), batches(1))


def test_it_may_stand_around_steps_and_ask_for_facts() -> None:
    around: list[str] = []

    class Own(SingleDevice):
        def training_step(self, call: Callable[[], Any], batch_idx: int) -> Any:
            around.append(f"train {batch_idx}")
            return call() * 0

        def validation_step(self, call: Callable[[], Any]) -> Any:
            around.append("val")
            return call()

        def backward(self, call: Callable[[], Any]) -> None:
            around.append("backward")
            call()

        def optimizer_step(self, call: Callable[[], Any], optimizer: Any) -> None:
            around.append(type(optimizer).__name__)
            call()

    net = Net()
    before = net.layer.weight.detach().clone()
    trainer = quiet(strategy=Own(CPU))
    trainer.fit(net, batches(1), batches(1))
    assert around == ["train 0", "backward", "SGD", "val"]
    assert trainer.metrics["train/loss"] == 0.0
    assert torch.equal(net.layer.weight, before)  # a loss times nothing has no gradient


def test_what_it_leaves_out_does_not_happen() -> None:
    class Dry(SingleDevice):
        def optimizer_step(self, call: Callable[[], Any]) -> None:
            pass

    net = Net()
    before = net.layer.weight.detach().clone()
    quiet(strategy=Dry(CPU)).fit(net, batches(2))
    assert torch.equal(net.layer.weight, before)


def test_hooks_see_its_ranks_and_what_it_runs() -> None:
    class Second(SingleDevice):
        rank, local_rank, world_size = 1, 1, 2

        def place(self, module: nn.Module) -> nn.Module:
            return nn.Sequential(module)

    seen: list[Any] = []

    class Sees(Hook):
        def on_train_start(
            self, rank: int, local_rank: int, world_size: int, module: Any, wrapped_model: Any
        ) -> None:
            seen.extend([rank, local_rank, world_size, wrapped_model[0] is module])

    class OnlyZero(Sees):
        ranks = "zero"

    class OnlyOne(Sees):
        ranks = (1,)

    quiet(strategy=Second(CPU), hooks=[OnlyZero(), OnlyOne()]).fit(Net(), batches(1))
    assert seen == [1, 1, 2, True]


# ---- One process, one device


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


def test_a_device_that_is_not_there_is_refused_with_the_advice_to_leave_it_out() -> None:
    with pytest.raises(OptionError, match=r"'vulkan' is not available here.* Leave device out"):
        pick_device("vulkan")


def test_the_trainer_tells_where_the_module_is() -> None:
    assert Trainer(device="meta").device == torch.device("meta")


def test_a_hundred_steps_read_nothing_from_the_device() -> None:
    trainer = quiet(device="meta", max_epochs=2, log_every_n_steps=10)
    trainer.fit(Net(), batches(50))  # any host read of a meta tensor raises
    assert trainer.global_step == 100
