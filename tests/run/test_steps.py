"""Plain PyTorch without a subclass: any nn.Module with a loss or a step function."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn
from torch.nn import functional as F

from hookline import HooklineError, LossError, Module, OptionError


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def by_hand(net: nn.Module, data: list[Any]) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for inputs, targets in data:
        optimizer.zero_grad()
        F.mse_loss(net(inputs), targets).backward()
        optimizer.step()


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for mine, theirs in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def test_a_plain_module_with_a_loss_trains_like_a_loop_written_by_hand() -> None:
    net = plain()
    twin = copy.deepcopy(net)
    metrics = quiet(max_epochs=2).fit(net, batches(), batches(2), loss=F.mse_loss, optimizer=sgd(net))
    by_hand(twin, batches() * 2)
    assert_same_weights(net, twin)
    assert {"train/loss", "val/loss"} <= set(metrics)


@pytest.mark.parametrize(
    "step",
    [
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        lambda model, batch, batch_idx: {"loss": F.mse_loss(model(batch[0]), batch[1]), "index": batch_idx},
    ],
    ids=["model and batch", "and its number"],
)
def test_a_step_function_trains_like_a_loop_written_by_hand(step: Any) -> None:
    net = plain()
    twin = copy.deepcopy(net)
    quiet().fit(net, batches(), step=step, optimizer=sgd(net))
    by_hand(twin, batches())
    assert_same_weights(net, twin)


def test_a_step_functions_own_default_is_not_taken_for_the_batch_number() -> None:
    seen: list[float] = []

    def step(model: nn.Module, batch: Any, scale: float = 2.5) -> Any:
        seen.append(scale)
        return scale * F.mse_loss(model(batch[0]), batch[1])

    net = plain()
    quiet().fit(net, batches(2), step=step, optimizer=sgd(net))
    assert seen == [2.5, 2.5]


def test_the_optimizer_may_be_a_function_of_the_parameters() -> None:
    net = plain()
    twin = copy.deepcopy(net)
    quiet().fit(net, batches(), loss=F.mse_loss, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    by_hand(twin, batches())
    assert_same_weights(net, twin)


def test_the_optimizer_may_come_with_a_scheduler() -> None:
    net = plain()
    optimizer = sgd(net)
    schedule = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}
    quiet().fit(
        net, batches(3), loss=F.mse_loss, optimizer={"optimizer": optimizer, "lr_scheduler": schedule}
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)


def test_every_verb_works_and_the_loss_is_remembered() -> None:
    net = plain()
    trainer = quiet()
    trainer.fit(net, batches(), loss=F.mse_loss, optimizer=sgd(net))
    expected = sum(F.mse_loss(net(x), y).item() for x, y in batches(2)) / 2
    assert trainer.validate(net, batches(2))["val/loss"] == pytest.approx(expected)
    assert trainer.test(loaders=batches(2))["test/loss"] == pytest.approx(expected)
    assert torch.equal(trainer.predict(loaders=batches(1))[0], net(batches(1)[0][0]))


def test_a_new_optimizer_for_a_second_fit_is_used() -> None:
    net = plain()
    trainer = quiet()
    trainer.fit(net, batches(), loss=F.mse_loss, optimizer=sgd(net))
    second = torch.optim.Adam(net.parameters())
    trainer.fit(net, batches(), optimizer=second)
    assert trainer.optimizers == [second]


def test_a_plain_modules_methods_are_never_taken_for_hooks() -> None:
    class Odd(nn.Linear):
        def on_train_start(self, anything: Any) -> None:
            raise AssertionError("called")

        def on_no_such_event(self) -> None: ...

    net = Odd(4, 2)
    trainer = quiet()
    trainer.fit(net, batches(), loss=F.mse_loss, optimizer=sgd(net))
    assert trainer.global_step == 4


def test_hooks_get_the_users_own_module() -> None:
    net = plain()
    seen: list[Any] = []
    trainer = quiet()
    trainer.on("train_start")(lambda module: seen.append(module))
    trainer.fit(net, batches(), loss=F.mse_loss, optimizer=sgd(net))
    assert seen == [net]


def test_neither_loss_nor_step_says_what_to_pass() -> None:
    net = plain()
    with pytest.raises(OptionError, match="Sequential is a plain nn.Module: pass loss="):
        quiet().fit(net, batches(), optimizer=sgd(net))


def test_a_missing_loss_and_a_missing_optimizer_are_named_at_once() -> None:
    with pytest.raises(OptionError, match=r"pass optimizer=torch\.optim.* and loss=torch\.nn.* or step="):
        quiet().fit(plain(), batches())


def test_both_loss_and_step_are_refused() -> None:
    net = plain()
    with pytest.raises(OptionError, match="either loss="):
        quiet().fit(net, batches(), loss=F.mse_loss, step=lambda model, batch: None, optimizer=sgd(net))


def test_no_optimizer_says_what_to_pass() -> None:
    with pytest.raises(OptionError, match=r"pass optimizer=torch.optim.AdamW\(model.parameters\(\)\) to fit"):
        quiet().fit(plain(), batches(), loss=F.mse_loss)


def test_batches_that_are_no_pairs_need_a_step_function() -> None:
    net = plain()
    with pytest.raises(
        OptionError, match=r"batches of \(inputs, targets\), but the loader yields dict of length 1"
    ):
        quiet().fit(net, [{"x": torch.randn(3, 4)}], loss=F.mse_loss, optimizer=sgd(net))


def test_a_hookline_module_brings_its_own_and_refuses_others() -> None:
    with pytest.raises(OptionError, match="the steps of Net are its own"):
        quiet().fit(Net(), batches(), loss=F.mse_loss)
    net = Net()
    with pytest.raises(OptionError, match="Return the optimizer from Net.configure_optimizers"):
        quiet().fit(net, batches(), optimizer=sgd(net))


class WithoutOptimizer(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch: Any) -> Any:
        return F.mse_loss(self.layer(batch[0]), batch[1])


def test_a_hookline_module_without_configure_optimizers_takes_the_optimizer_passed_to_fit() -> None:
    net, trainer = WithoutOptimizer(), quiet()
    before = net.layer.weight.detach().clone()
    with pytest.raises(HooklineError, match="has no configure_optimizers.*Or pass optimizer= to fit"):
        trainer.fit(net, batches())
    given = torch.optim.SGD(net.parameters(), lr=0.0)
    trainer.fit(net, batches(), optimizer=given)
    assert trainer.optimizers == [given] and torch.equal(net.layer.weight, before)
    trainer.fit(net, batches(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5 and not torch.equal(net.layer.weight, before)


def test_a_hook_may_replace_the_loss_function_in_the_middle_of_a_run() -> None:
    net, losses = nn.Linear(4, 2), []
    trainer = quiet(max_epochs=1)
    trainer.on("train_batch_end")(lambda loss: losses.append(loss))

    @trainer.on("train_batch_start")
    def change(trainer: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.loss = lambda outputs, targets: (outputs - targets).abs().mean() + 100

    trainer.fit(net, batches(4), loss=F.mse_loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.0))
    assert [loss > 100 for loss in losses] == [False, False, True, True]


def test_the_loss_of_a_module_that_computes_its_own_cannot_be_replaced() -> None:
    trainer = quiet()
    trainer.fit(Net(), batches(1))
    with pytest.raises(HooklineError, match="on_before_backward"):
        trainer.loss = F.l1_loss


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss": nn.MSELoss}, r"loss=MSELoss is a class; pass an object of it, MSELoss\(\)"),
        (
            {"loss": "mse_loss"},
            r"loss='mse_loss' must be a function of outputs and targets. Did you mean 'mse_loss' of torch.nn.functional\?",
        ),
        ({"loss": "mse"}, "Did you mean 'mse_loss' of torch.nn.functional"),
        ({"loss": 3}, "loss=3 must be a function of outputs and targets.$"),
        ({"step": "step"}, "step='step' must be a function of model and batch.$"),
        ({"step": lambda model, x, y: x}, r"function of \(model, x, y\), but gets.*unpack the batch inside"),
        ({"step": lambda batch: 0}, r"function of \(batch\), but gets \(model, batch\)"),
    ],
)
def test_a_loss_or_step_that_cannot_be_called_is_refused_before_the_first_batch(
    given: dict[str, Any], said: str
) -> None:
    net = nn.Linear(4, 2)
    trainer = quiet()
    trainer.on("train_start")(lambda: pytest.fail("the run has begun"))
    with pytest.raises(OptionError, match=said):
        trainer.fit(net, batches(1), optimizer=torch.optim.SGD(net.parameters(), lr=0.1), **given)


@pytest.mark.parametrize("given", ["adam", lambda parameters: "adam"])
def test_what_is_not_an_optimizer_is_named_by_the_argument(given: Any) -> None:
    with pytest.raises(
        OptionError, match=r"optimizer= (is|returned) 'adam'; pass.*torch\.optim\.Adam\(model"
    ):
        quiet().fit(plain(), batches(), loss=F.mse_loss, optimizer=given)


def test_a_step_function_that_returns_nothing_is_named_by_the_argument(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = plain()
    with pytest.raises(LossError, match="the function step= returned no loss for any of 4 batches"):
        quiet().fit(net, batches(), step=lambda model, batch: None, optimizer=sgd(net))
    assert "the last because the function step= returned no loss" in caplog.text
