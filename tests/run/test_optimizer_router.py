"""Loaders that train some of the optimizers only: against the loop that one would write by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import quiet
from torch import Tensor, nn
from torch.nn import functional as F

from hookline import SKIP_BATCH, Hook, Mixture, Module, OptionError

NAMES = ("web", "code", "both")


class Two(Module):
    """Both layers take part in every loss; each has its own optimizer and scheduler."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)
        self.shared = shared

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.b(self.a(batch[0])), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.a.parameters(), lr=0.05),
            torch.optim.SGD(self.parameters() if self.shared else self.b.parameters(), lr=0.1, momentum=0.9),
        ]
        schedulers = [
            {"scheduler": torch.optim.lr_scheduler.StepLR(each, 2, 0.5), "interval": "step"}
            for each in optimizers
        ]
        return optimizers, schedulers


def data(web: int = 4, code: int = 4, both: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    lengths = zip(NAMES, (web, code, both), strict=True)
    return {
        name: [
            (torch.randn(3, 4, generator=generator), torch.randn(3, 2, generator=generator)) for _ in range(n)
        ]
        for name, n in lengths
        if n
    }


FED = {"web": [0], "code": [1]}


def by_hand(
    sources: dict[str, Any], picks: list[str], accumulate: int = 1, skip: tuple[int, ...] = ()
) -> Two:
    """Every batch adds its gradients to the parameters it is for; each optimizer with gradients steps, on their mean."""
    net = Two()
    optimizers, schedules = net.configure_optimizers()
    owned = [list(net.a.parameters()), list(net.b.parameters())]
    streams = {name: iter(source) for name, source in sources.items()}
    drawn = [(name, next(streams[name])) for name in picks]
    for start in range(0, len(drawn), accumulate):
        got: dict[int, list[list[Tensor]]] = {0: [], 1: []}
        for index, (name, batch) in enumerate(drawn[start : start + accumulate], start):
            if index in skip:
                continue
            loss = net.loss(batch)
            for number in FED.get(name, [0, 1]):
                got[number].append(list(torch.autograd.grad(loss, owned[number], retain_graph=True)))
        for number, grads in got.items():
            if grads:
                for parameter, *each in zip(owned[number], *grads, strict=True):
                    parameter.grad = torch.stack(each).mean(0)
                optimizers[number].step()
                schedules[number]["scheduler"].step()
    return net


def close(trained: nn.Module, expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], value, msg=name)


class Heard(Hook):
    def __init__(self, skip: tuple[int, ...] = ()) -> None:
        self.skip = skip
        self.events: list[tuple[str, int]] = []
        self.picks: list[str] = []
        self.left_alone: list[bool] = []

    def on_train_batch_start(self, batch_idx: int, dataloader_name: str) -> Any:
        self.picks.append(dataloader_name)
        return SKIP_BATCH if batch_idx in self.skip else None

    def on_before_optimizer_step(self, optimizer_idx: int) -> None:
        self.events.append(("before", optimizer_idx))

    def on_after_optimizer_step(self, optimizer_idx: int) -> None:
        self.events.append(("after", optimizer_idx))


@pytest.mark.parametrize("accumulate", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("skip", [(), (1, 2)])
@pytest.mark.parametrize("order", ["round_robin", "sequential", "random"])
def test_it_trains_as_the_loop_by_hand_does(accumulate: int, skip: tuple[int, ...], order: Any) -> None:
    heard, sources = Heard(skip), data(both=3)
    trainer = quiet(hooks=[heard], accumulate_grad_batches=accumulate)
    trainer.fit(Two(), sources, mixture=Mixture(order, optimizers=FED))
    expected = by_hand(sources, heard.picks, accumulate, skip)
    close(trainer.module, expected)


def test_an_optimizer_that_had_no_part_hears_nothing_and_its_scheduler_waits() -> None:
    heard = Heard()
    trainer = quiet(hooks=[heard])
    trainer.fit(Two(), data(web=4, code=1), mixture=Mixture("sequential", optimizers=FED))
    assert heard.events == [("before", 0), ("after", 0)] * 4 + [("before", 1), ("after", 1)]
    assert [group["lr"] for each in trainer.optimizers for group in each.param_groups] == [0.05 / 4, 0.1]
    assert trainer.global_step == 5


def test_under_accumulation_every_optimizer_with_gradients_steps_before_they_are_cleared() -> None:
    class Clearing(Heard):
        def on_before_zero_grad(self, optimizer_idx: int, optimizer: Any) -> None:
            self.events.append(("clear", optimizer_idx))

    heard = Clearing()
    quiet(hooks=[heard], accumulate_grad_batches=4).fit(Two(), data(), mixture=Mixture(optimizers=FED))
    a_window = [("clear", 0), ("clear", 1), ("before", 0), ("after", 0), ("before", 1), ("after", 1)]
    assert heard.events == a_window * 2


def test_parameters_that_a_batch_is_not_for_keep_the_gradients_they_had() -> None:
    kept: list[tuple[str, bool, bool]] = []

    class Looks(Hook):
        def on_after_backward(self, module: Any, state: Any) -> None:
            kept.append(
                (state.dataloader_name, module.a.weight.grad is not None, module.b.weight.grad is not None)
            )

    quiet(hooks=[Looks()], accumulate_grad_batches=2).fit(
        Two(), data(2, 2), mixture=Mixture("sequential", optimizers=FED)
    )
    assert kept == [("web", True, False)] * 2 + [("code", False, True)] * 2


def test_a_scaler_of_mixed_precision_takes_part() -> None:
    heard, sources = Heard(), data(both=2)
    trainer = quiet(hooks=[heard], precision="16-mixed", accumulate_grad_batches=2, device="cpu")
    trainer.fit(Two(), sources, mixture=Mixture(optimizers=FED))
    expected = by_hand(sources, heard.picks, 2)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(trainer.module.state_dict()[name], value, atol=0.05, rtol=0.05)
    assert ("after", 0) in heard.events and ("after", 1) in heard.events


def test_shared_parameters_are_trained_by_whom_the_batch_is_for_and_refused_under_accumulation() -> None:
    trainer = quiet()
    trainer.fit(
        Two(shared=True), data(web=0, code=3, both=1), mixture=Mixture("sequential", optimizers={"code": 1})
    )
    assert trainer.global_step == 4
    with pytest.raises(OptionError, match="optimizers 0 and 1 train the same parameters"):
        quiet(accumulate_grad_batches=2).fit(Two(shared=True), data(), mixture=Mixture(optimizers=FED))


def test_a_loader_that_would_train_nothing_of_its_optimizer_is_refused() -> None:
    class OnlyA(Two):
        def loss(self, batch: Any) -> Tensor:
            return self.a(batch[0]).square().mean()

    with pytest.raises(
        OptionError, match="'code' should train optimizer 1, but the loss of its first batch reaches none"
    ):
        quiet().fit(OnlyA(), data(), mixture=Mixture(optimizers=FED))


def test_manual_optimization_chooses_its_own() -> None:
    class Manual(Two):
        automatic_optimization = False

    with pytest.raises(OptionError, match="a manual training step chooses its own"):
        quiet().fit(Manual(), data(), mixture=Mixture(optimizers=FED))


def test_a_loader_that_comes_late_trains_all_optimizers() -> None:
    heard = Heard()

    class Adds(Hook):
        def on_train_start(self, trainer: Any) -> None:
            trainer.loaders.add("new", data(1)["web"])

    quiet(hooks=[heard, Adds()]).fit(Two(), data(1, 1), mixture=Mixture("sequential", optimizers=FED))
    assert [index for event, index in heard.events if event == "after"] == [0, 1, 0, 1]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_resumed_run_continues_exactly(accumulate: int, tmp_path: Any) -> None:
    class Saves(Hook):
        def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
            if batches_seen == 4:
                trainer.save_checkpoint(tmp_path / "cut")

    def fit(hooks: list[Any], sources: dict[str, Any], resume: Any = None) -> Any:
        trainer = quiet(hooks=hooks, accumulate_grad_batches=accumulate, max_epochs=2)
        trainer.fit(Two(), sources, mixture=Mixture(optimizers=FED), resume=resume)
        return trainer.module.state_dict()

    sources = data(4, 3, 2)
    expected = fit([Saves()], sources)
    ended = fit([], sources, tmp_path / "cut")
    assert all(torch.equal(value, ended[name]) for name, value in expected.items())
