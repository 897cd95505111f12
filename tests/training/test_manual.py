"""Manual optimization: the step calls backward and the optimizers itself, and the events still fire."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn
from torch.nn import functional as F

from hookline import (
    SKIP_STEP,
    STEP_DONE,
    Hook,
    HooklineError,
    LossError,
    NonFiniteLoss,
    OptionError,
    Recorder,
)


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = F.mse_loss(self.layer(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Gan(Net):
    """Two players, each with its own optimizer and its own turn in every batch."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.player = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.turn(batch, first, 1.0, self.manual_backward)
        self.turn(batch, second, -1.0, self.manual_backward)

    def turn(self, batch: Any, optimizer: Any, sign: float, backward: Any) -> None:
        optimizer.zero_grad()
        backward(sign * F.mse_loss(self.layer(self.player(batch[0])), batch[1]))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.player.parameters(), lr=0.01),
            torch.optim.SGD(self.layer.parameters(), lr=0.01),
        ]


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, mine), (_, theirs) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_manual_optimization_equals_automatic() -> None:
    net = Manual()
    twin = Net()
    twin.load_state_dict(net.state_dict())
    trainer = quiet(max_epochs=2)
    manual = trainer.fit(net, batches())
    automatic = quiet(max_epochs=2).fit(twin, batches())
    assert_same_weights(net, twin)
    assert trainer.global_step == 8
    assert manual["train/loss"] == automatic["train/loss"]


def test_two_players_equal_a_loop_written_by_hand_and_count_one_step_per_batch() -> None:
    net = Gan()
    twin = copy.deepcopy(net)
    steps: list[int] = []
    trainer = quiet()
    trainer.on("step_end")(lambda step: steps.append(step))
    trainer.fit(net, batches(3))
    first, second = twin.configure_optimizers()
    for batch in batches(3):
        twin.turn(batch, first, 1.0, lambda loss: loss.backward())
        twin.turn(batch, second, -1.0, lambda loss: loss.backward())
    assert_same_weights(net, twin)
    assert steps == [1, 2, 3]


def test_every_call_fires_its_events() -> None:
    class Listen(Hook):
        def on_before_zero_grad(self, optimizer_idx: int) -> None: ...
        def on_before_backward(self, loss: Any) -> None: ...
        def on_after_backward(self) -> None: ...
        def on_before_optimizer_step(self, optimizer_idx: int) -> None: ...
        def on_after_optimizer_step(self, optimizer_idx: int) -> None: ...
        def on_train_batch_end(self) -> None: ...
        def on_step_end(self) -> None: ...

    trainer = quiet(hooks=[Listen()])
    with Recorder(trainer) as recorder:
        trainer.fit(Gan(), batches(1))
    turn = [
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_after_optimizer_step",
    ]
    heard = [each.event for each in recorder.calls if each.receiver == "H"]
    assert heard == [*turn, *turn, "on_train_batch_end", "on_step_end"]


def test_events_name_the_optimizer_that_is_at_work() -> None:
    seen: list[tuple[int, bool]] = []

    class Look(Hook):
        def on_after_optimizer_step(self, optimizer_idx: int, optimizer: Any, optimizers: list[Any]) -> None:
            seen.append((optimizer_idx, optimizer is optimizers[optimizer_idx]))

    quiet(hooks=[Look()]).fit(Gan(), batches(1))
    assert seen == [(0, True), (1, True)]


@pytest.mark.parametrize(("answer", "steps"), [(SKIP_STEP, 0), (STEP_DONE, 4)])
def test_a_hook_can_skip_or_make_the_update(answer: Any, steps: int) -> None:
    net = Manual()
    before = copy.deepcopy(net.state_dict())
    reasons: list[str] = []
    trainer = quiet()
    trainer.on("before_optimizer_step")(lambda: answer)
    trainer.on("step_skipped")(lambda reason: reasons.append(reason))
    trainer.fit(net, batches(4))
    assert torch.equal(net.layer.weight, before["layer.weight"])
    assert trainer.global_step == steps
    assert reasons == ["hook"] * (4 - steps)


def test_the_gradient_norm_can_be_asked_for() -> None:
    norms: list[float] = []
    trainer = quiet()
    trainer.on("step_end")(lambda grad_norm: norms.append(grad_norm))
    net = Manual()
    twin = copy.deepcopy(net)
    trainer.fit(net, batches(1))
    F.mse_loss(twin.layer(batches(1)[0][0]), batches(1)[0][1]).backward()
    assert norms == [pytest.approx(float(nn.utils.get_total_norm([p.grad for p in twin.parameters()])))]


def test_the_gradient_norm_of_one_of_two_optimizers_leaves_out_the_other_s_gradients() -> None:
    norms: list[tuple[float, float]] = []
    trainer = quiet()

    @trainer.on("before_optimizer_step")
    def compare(grad_norm: float, optimizer: Any) -> None:
        own = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append((grad_norm, float(nn.utils.get_total_norm(own))))

    trainer.fit(Gan(), batches(2))
    assert len(norms) == 4 and all(found == pytest.approx(own) for found, own in norms)


def test_a_batch_without_an_update_does_not_count() -> None:
    class EverySecond(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx % 2 else None

    trainer = quiet()
    trainer.fit(EverySecond(), batches(4))
    assert trainer.global_step == 2
    assert trainer.state.batches_seen == 4


def test_the_handle_gives_the_optimizers_own_attributes() -> None:
    class Look(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.rate = self.optimizers().param_groups[0]["lr"]
            return super().training_step(batch, batch_idx)

    net = Look()
    quiet().fit(net, batches(1))
    assert net.rate == 0.1


def test_accumulation_by_the_trainer_is_refused() -> None:
    with pytest.raises(OptionError, match="Manual optimization accumulates by itself"):
        quiet(accumulate_grad_batches=2).fit(Manual(), batches())


def test_clipping_by_the_trainer_is_refused_not_ignored() -> None:
    with pytest.raises(OptionError, match="gradient_clip_val"):
        quiet(gradient_clip_val=0.01).fit(Manual(), batches())


def test_a_scheduler_can_be_stepped_by_hand() -> None:
    class Scheduled(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.lr_schedulers().step()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "epoch", "frequency": 100},
            }

    trainer = quiet()
    trainer.fit(Scheduled(), batches(3))
    assert trainer.state.lr == pytest.approx(0.1 * 0.5**3)


def test_the_context_of_a_step_that_returns_no_loss_has_that_of_the_last_backward() -> None:
    losses: list[float] = []
    trainer = quiet()
    trainer.on("step_end")(lambda ctx: losses.append(ctx.loss))
    trainer.fit(Gan(), batches(2))
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)


def test_a_loss_that_is_not_finite_stops_a_manual_run_too() -> None:
    data = batches(4)
    data[1][1].fill_(math.nan)
    with pytest.raises(NonFiniteLoss):
        quiet().fit(Manual(), data)


def with_overflow() -> list[Any]:
    return [(x, y * (1000 if index == 1 else 0.01)) for index, (x, y) in enumerate(batches(4))]


def test_16_mixed_scales_and_skips_in_manual_optimization() -> None:
    net = Manual()
    twin = Net()
    twin.load_state_dict(net.state_dict())
    reasons: list[str] = []
    trainer = quiet(precision="16-mixed", device="cpu")
    trainer.on("step_skipped")(lambda reason: reasons.append(reason))
    trainer.fit(net, with_overflow())
    quiet(precision="16-mixed", device="cpu").fit(twin, with_overflow())
    assert_same_weights(net, twin)
    assert reasons == ["nonfinite"]
    assert trainer.global_step == 3


def test_gradients_that_are_clipped_are_unscaled_once_whatever_is_around_the_optimizer() -> None:
    class Coat(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            super().__init__(optimizer.param_groups, {})

        def step(self, closure: Any = None) -> Any:
            return self.optimizer.step(closure)

    class Clips(Net):
        automatic_optimization = False
        has_coat = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(F.mse_loss(self.layer(batch[0]), 0.01 * batch[1]))
            self.clip_gradients(optimizer, 1e9)
            optimizer.step()

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return Coat(optimizer) if self.has_coat else optimizer

    net, twin = Clips(), Clips()
    twin.load_state_dict(net.state_dict())
    twin.has_coat = True
    for each in (net, twin):
        quiet(precision="16-mixed", device="cpu").fit(each, batches())
    assert_same_weights(net, twin)


def test_an_overflow_of_one_optimizer_does_not_change_the_others_gradients_in_the_same_batch() -> None:
    """Both losses were scaled by the same number, so both have to be unscaled by it."""

    class Both(Net):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.manual_backward(F.mse_loss(self.layer(batch[0]), 1000 * batch[1]))
            self.manual_backward(F.mse_loss(self.other(batch[0]), 0.01 * batch[1]))
            first.step()
            second.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.layer, self.other)]

    net = Both()
    twin = copy.deepcopy(net)
    quiet(precision="16-mixed", device="cpu").fit(net, batches(1))
    [batch] = batches(1)
    F.mse_loss(twin.other(batch[0]), 0.01 * batch[1]).backward()
    torch.optim.SGD(twin.other.parameters(), lr=0.1).step()
    assert torch.equal(net.layer.weight, twin.layer.weight)
    torch.testing.assert_close(net.other.weight, twin.other.weight, rtol=1e-2, atol=1e-3)


class Forgets(Manual):
    """Trains by itself and does not say so."""

    automatic_optimization = True


class ForgetsAndOnlySteps(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().step()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "call"), [(Forgets, r"self\.manual_backward\(\)"), (ForgetsAndOnlySteps, r"step\(\) on what")]
)
def test_training_by_hand_without_saying_so_is_refused_not_done_twice(kind: type[Net], call: str) -> None:
    net = kind()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(
        HooklineError, match=f"{kind.__name__} has called {call}.*automatic_optimization = False"
    ):
        quiet().fit(net, batches(2))
    assert torch.equal(net.layer.weight, before["layer.weight"])


def test_a_manual_module_that_never_steps_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class NeverSteps(Net):
        automatic_optimization = False

    trainer = quiet(max_epochs=1)
    trainer.fit(NeverSteps(), batches(2))
    assert trainer.global_step == 0
    assert "training_step of NeverSteps never called step()" in caplog.text
    caplog.clear()
    quiet().fit(Manual(), batches(2))
    assert "No update" not in caplog.text


def test_a_loss_without_a_graph_is_refused_by_manual_backward_too() -> None:
    class Detaches(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx).detach())

    with pytest.raises(LossError, match="cannot be differentiated"):
        quiet().fit(Detaches(), batches(1))


class Accumulates(Net):
    """Updates after every third batch of the run, also across the end of an epoch."""

    automatic_optimization = False

    def __init__(self, fails_at: int = -1, fails_inside: bool = False) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(1))
        self.fails_at, self.fails_inside = fails_at, fails_inside

    def training_step(self, batch: Any, batch_idx: int) -> None:
        is_broken = int(self.batches) == self.fails_at
        if is_broken and not self.fails_inside:
            raise RuntimeError("broken")
        self.manual_backward(F.mse_loss(self.layer(batch[0]), batch[1]))
        if is_broken:
            raise RuntimeError("broken")
        self.batches += 1
        if self.batches % 3 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


@pytest.mark.parametrize("fails_at", range(3, 8))
def test_gradients_that_a_manual_step_accumulates_survive_a_resume(tmp_path: Path, fails_at: int) -> None:
    def run(module: Net, **options: Any) -> Net:
        torch.manual_seed(0)
        with torch.no_grad():
            for each in module.layer.parameters():
                each.copy_(torch.randn_like(each))
        trainer = quiet(max_epochs=2, run_dir=tmp_path / "run", seed=0, checkpoint={"last": True}, **options)
        trainer.fit(module, batches(4), resume="auto")
        return module

    whole = Accumulates()
    torch.manual_seed(0)
    for each in whole.layer.parameters():
        each.data.copy_(torch.randn_like(each))
    quiet(max_epochs=2, seed=0).fit(whole, batches(4))
    with pytest.raises(RuntimeError, match="broken"):
        run(Accumulates(fails_at))
    resumed = Accumulates()
    stale = torch.full_like(resumed.layer.weight, 7.0)
    resumed.layer.weight.grad = stale  # of an earlier run in the same process
    assert torch.equal(run(resumed).layer.weight, whole.layer.weight)
    assert int(resumed.batches) == 8


def test_a_manual_step_that_fails_after_its_backward_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for inside in (False, True):
        caplog.clear()
        with pytest.raises(RuntimeError, match="broken"):
            quiet(run_dir=tmp_path / str(inside), checkpoint={"last": True}).fit(
                Accumulates(4, inside), batches(8)
            )
        assert ("failed after it had called backward" in caplog.text) == inside
