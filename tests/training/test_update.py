"""The update: clipping, scaling, several optimizers and closures, equal to a loop written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import Tensor, nn
from training.stepped import Batch, BeforeStep, Curved, Skipped, TwoPart, assert_same_weights, by_hand, twins

from hookline import SKIP_STEP, STEP_DONE, Hook


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradient_clipping_equals_a_loop_written_by_hand(algorithm: str) -> None:
    net, twin = twins()
    quiet(gradient_clip_val=0.05, gradient_clip_algorithm=algorithm, max_epochs=2).fit(net, batches())
    clip = nn.utils.clip_grad_norm_ if algorithm == "norm" else nn.utils.clip_grad_value_
    by_hand(twin, [[b] for b in batches()] * 2, before_step=lambda: clip(list(twin.parameters()), 0.05))
    assert_same_weights(net, twin)


def test_two_optimizers_equal_a_loop_written_by_hand_and_count_one_step() -> None:
    net, twin = twins(TwoPart())
    trainer = quiet()
    trainer.fit(net, batches())
    optimizers = twin.configure_optimizers()
    for batch in batches():
        for each in optimizers:
            each.zero_grad()
        twin.training_step(batch, 0).backward()
        for each in optimizers:
            each.step()
    assert_same_weights(net, twin)
    assert trainer.global_step == 4


def test_every_optimizer_has_its_own_events() -> None:
    heard: list[tuple[str, int]] = []

    class Listen(Hook):
        def on_before_zero_grad(self, optimizer_idx: int) -> None:
            heard.append(("zero_grad", optimizer_idx))

        def on_before_optimizer_step(self, optimizer_idx: int) -> None:
            heard.append(("before", optimizer_idx))

        def on_after_optimizer_step(self, optimizer_idx: int, step: int) -> None:
            assert step == 1
            heard.append(("after", optimizer_idx))

    quiet(hooks=[Listen()]).fit(TwoPart(), batches(1))
    assert heard == [
        ("zero_grad", 0),
        ("zero_grad", 1),
        ("before", 0),
        ("after", 0),
        ("before", 1),
        ("after", 1),
    ]


def scaled_by_hand(net: Net, data: list[Batch], clip: float | None = None) -> torch.amp.GradScaler:
    optimizer, scaler = net.configure_optimizers(), torch.amp.GradScaler("cpu")
    for batch in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = net.training_step(batch, 0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(list(net.parameters()), clip)
        scaler.step(optimizer)
        scaler.update()
    return scaler


def with_overflow() -> list[Batch]:
    """Four batches, the second of which makes gradients that half precision cannot hold once they are scaled."""
    return [(x, y * (1000 if index == 1 else 0.01)) for index, (x, y) in enumerate(batches(4))]


@pytest.mark.parametrize("clip", [None, 0.05])
def test_16_mixed_equals_a_loop_written_by_hand_with_a_scaler(clip: float | None) -> None:
    net, twin = twins()
    trainer = quiet(precision="16-mixed", device="cpu", gradient_clip_val=clip)
    trainer.fit(net, with_overflow())
    scaler = scaled_by_hand(twin, with_overflow(), clip)
    assert_same_weights(net, twin)
    assert trainer.strategy.precision.scaler is not None
    assert trainer.strategy.precision.scaler.get_scale() == scaler.get_scale() == 2.0**15


def test_an_overflow_in_16_mixed_skips_the_step_and_says_so() -> None:
    skipped = Skipped()
    trainer = quiet(precision="16-mixed", device="cpu", hooks=[skipped])
    trainer.fit(Net(), with_overflow())
    assert skipped.reasons == ["nonfinite"]
    assert trainer.global_step == 3


def test_gradients_are_unscaled_when_hooks_see_them() -> None:
    norms: list[float] = []

    class Look(Hook):
        def on_before_optimizer_step(self, module: Net) -> None:
            norms.append(
                float(nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))
            )

    net, twin = twins()
    data = [(x, y * 0.01) for x, y in batches(1)]
    quiet(precision="16-mixed", device="cpu", hooks=[Look()]).fit(net, data)
    twin.training_step(data[0], 0).backward()
    real = float(nn.utils.get_total_norm([p.grad for p in twin.parameters()]))
    assert norms == [pytest.approx(real, rel=0.01)]


def test_lbfgs_equals_a_loop_written_by_hand() -> None:
    net, twin = twins(Curved())
    trainer = quiet(max_epochs=2)
    trainer.fit(net, batches(3))
    optimizer = twin.configure_optimizers()
    for batch in batches(3) * 2:

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = twin.training_step(batch, 0)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same_weights(net, twin)
    assert trainer.global_step == 6


def test_lbfgs_does_not_compute_the_first_loss_twice() -> None:
    calls: list[int] = []

    class Counting(Curved):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            calls.append(batch_idx)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=1)

    quiet().fit(Counting(), batches(3))
    assert calls == [0, 1, 2]


def test_lbfgs_reports_one_loss_per_batch_everywhere() -> None:
    """The loss of the batch as it was before the update, not that of the optimizer's last try."""
    heard: list[float] = []
    trainer = quiet()
    trainer.on("train_batch_end")(lambda loss: heard.append(loss))
    metrics = trainer.fit(Curved(), batches(1))
    assert heard == [metrics["train/loss"]]


def test_skip_step_leaves_the_weights_alone_and_does_not_count() -> None:
    net, twin = twins()
    skipped = Skipped()
    trainer = quiet(hooks=[BeforeStep(lambda optimizer: SKIP_STEP), skipped])
    trainer.fit(net, batches())
    assert_same_weights(net, twin)
    assert skipped.reasons == ["hook"] * 4
    assert trainer.global_step == 0


def test_step_done_counts_the_update_that_the_hook_has_made() -> None:
    def step_at_half_speed(optimizer: Any) -> Any:
        with torch.no_grad():
            for p in optimizer.param_groups[0]["params"]:
                p -= 0.05 * p.grad
        return STEP_DONE

    net, twin = twins()
    twin.lr = 0.05
    trainer = quiet(hooks=[BeforeStep(step_at_half_speed)])
    trainer.fit(net, batches())
    by_hand(twin, [[b] for b in batches()])
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert trainer.global_step == 4


def test_the_finished_steps_gradients_are_there_before_they_are_cleared() -> None:
    at_step_end: list[Tensor] = []
    before_clearing: list[Tensor] = []

    class Look(Hook):
        def on_step_end(self, module: Any) -> None:
            at_step_end.append(module.layer.weight.grad.clone())

        def on_before_zero_grad(self, module: Any, step: int) -> None:
            if step:
                before_clearing.append(module.layer.weight.grad.clone())

    quiet(hooks=[Look()]).fit(Net(), batches(3))
    assert len(before_clearing) == 2
    for early, late in zip(at_step_end, before_clearing, strict=False):
        assert torch.equal(early, late)


def test_the_gradient_norm_without_clipping_is_that_of_the_update() -> None:
    norms: list[float] = []

    class Look(Hook):
        def on_step_end(self, grad_norm: float) -> None:
            norms.append(grad_norm)

    net, twin = twins()
    quiet(hooks=[Look()]).fit(net, batches(1))
    twin.training_step(batches(1)[0], 0).backward()
    assert norms == [pytest.approx(float(nn.utils.get_total_norm([p.grad for p in twin.parameters()])))]


def test_the_gradient_norm_of_several_optimizers_is_that_of_all_gradients() -> None:
    norms: list[float] = []

    class Look(Hook):
        def on_step_end(self, grad_norm: float) -> None:
            norms.append(grad_norm)

    net, twin = twins(TwoPart())
    quiet(hooks=[Look()]).fit(net, batches(1))
    twin.training_step(batches(1)[0], 0).backward()
    assert norms == [pytest.approx(float(nn.utils.get_total_norm([p.grad for p in twin.parameters()])))]
