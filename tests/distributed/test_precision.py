"""Mixed precision: autocast around steps, a scaler around the loss, neither when not asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, Trainer
from hookline.distributed.precision import Precision

CPU = torch.device("cpu")


def half_precision(*hooks: Hook) -> Trainer:
    """A scale that does not overflow by itself: the default one begins too high on purpose, to find its level."""
    trainer = quiet(precision="16-mixed", device="cpu", hooks=hooks)
    trainer.strategy.precision.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    return trainer


class Looks(Net):
    """Notes what kind of number its layer makes in each kind of step."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, set[torch.dtype]] = {"train": set(), "val": set(), "predict": set()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kinds["train"].add(self.layer(batch[0]).dtype)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.kinds["val"].add(self.layer(batch[0]).dtype)
        return super().validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().predict_step(batch, batch_idx)
        self.kinds["predict"].add(out.dtype)
        return out


@pytest.mark.parametrize(
    ("precision", "dtype"), [(32, torch.float32), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)]
)
def test_every_step_runs_in_the_precision_asked_for_and_weights_stay_whole(
    precision: Any, dtype: torch.dtype
) -> None:
    net = Looks()
    trainer = quiet(precision=precision, device="cpu")
    trainer.fit(net, batches(2), batches(1))
    assert trainer.state.batches_seen == 2
    trainer.predict(net, batches(1))
    assert net.kinds == {"train": {dtype}, "val": {dtype}, "predict": {dtype}}
    assert net.layer.weight.dtype == torch.float32


def test_full_precision_wraps_nothing() -> None:
    def call(s: Any) -> None: ...

    assert Precision("32", CPU).around(call) is call
    assert Precision("bf16-mixed", CPU).around(call) is not call


def test_autocast_ends_with_the_step() -> None:
    seen: list[bool] = []

    class After(Hook):
        def on_before_backward(self) -> None:
            seen.append(torch.is_autocast_enabled("cpu"))

        def on_step_end(self) -> None:
            seen.append(torch.is_autocast_enabled("cpu"))

    quiet(precision="bf16-mixed", device="cpu", hooks=[After()]).fit(Net(), batches(1))
    assert seen == [False, False]


def test_only_half_precision_has_a_scaler_and_only_it_has_state() -> None:
    half = Precision("16-mixed", CPU)
    assert Precision("bf16-mixed", CPU).scaler is None and Precision("32", CPU).state_dict() == {}
    assert half.scaler is not None
    half.scaler.scale(torch.ones(1))  # a scaler makes its scale when first used
    half.scaler.update(16.0)
    other = Precision("16-mixed", CPU)
    other.load_state_dict(half.state_dict())
    assert other.state_dict()["scale"] == 16.0
    other.load_state_dict({})  # a checkpoint of a run in another precision
    assert other.state_dict()["scale"] == 16.0


def test_hooks_see_true_gradients_and_losses_not_scaled_ones() -> None:
    def gradients(half: bool) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        seen: list[float] = []
        losses: list[float] = []

        class Sees(Hook):
            def on_before_optimizer_step(self, module: Any) -> None:
                seen.append(float(module.layer.bias.grad[0]))

            def on_step_end(self, loss: float) -> None:
                losses.append(loss)

        trainer = half_precision(Sees()) if half else quiet(device="cpu", hooks=[Sees()])
        trainer.fit(Net(), batches(3))
        return seen, losses

    full, half = gradients(half=False), gradients(half=True)
    assert half[0] == pytest.approx(full[0], rel=0.05, abs=0.02)
    assert half[1] == pytest.approx(full[1], rel=0.05, abs=0.02)


def test_an_overflow_skips_the_update_and_lowers_the_scale() -> None:
    reasons: list[str] = []

    class Explodes(Net):
        def on_after_backward(self) -> None:
            if self.trainer.state.batch_idx == 1:
                self.layer.weight.grad.fill_(torch.inf)

    net = Explodes()
    trainer = half_precision()
    trainer.on("step_skipped")(lambda reason: reasons.append(reason))
    trainer.fit(net, batches(3))
    assert reasons == ["nonfinite"]
    assert trainer.global_step == 2
    assert torch.isfinite(net.layer.weight).all()
    assert trainer.strategy.precision.state_dict()["scale"] == 128.0
