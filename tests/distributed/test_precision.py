"""The precision of a run: autocast and a scaler, or one type for parameters, batches and new tensors."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, SavesFirstEpoch, batches, quiet
from torch import Tensor, nn

from hookline import Hook, Trainer
from hookline.distributed.precision import make_precision

CPU = torch.device("cpu")


# ---- Mixed precision: autocast around steps, a scaler around the loss, neither when not asked for


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

    assert make_precision(32, CPU).around_step(call) is call
    assert make_precision("bf16-mixed", CPU).around_step(call) is not call


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
    half = make_precision("16-mixed", CPU)
    assert make_precision("bf16-mixed", CPU).scaler is None and make_precision("32", CPU).state_dict() == {}
    assert half.scaler is not None
    half.scaler.scale(torch.ones(1))  # a scaler makes its scale when first used
    half.scaler.update(16.0)
    other = make_precision("16-mixed", CPU)
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


# ---- One type for parameters, batches and new tensors


TYPES = {"64": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class Typed(Net):
    """Records the types that it sees, and has a layer that is made late."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))
        self.register_buffer("phase", torch.ones(1, dtype=torch.complex64))
        self.seen: dict[str, set[torch.dtype]] = {}

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            self.late = nn.Linear(2, 2)
            self.note("made", self.late.weight)

    def note(self, where: str, *tensors: Tensor) -> None:
        self.seen.setdefault(where, set()).update(each.dtype for each in tensors)

    def on_train_batch_start(self, batch: Any) -> None:
        self.note("batch", *batch[:2])
        self.note("labels", batch[2])
        self.note("outside", torch.ones(1))

    def step(self, where: str, batch: Any) -> Tensor:
        self.note(where, torch.ones(1), torch.rand(1), self.scale)
        self.note(f"{where} own", torch.ones(1, dtype=torch.float32))
        loss = nn.functional.mse_loss(self.late(self.layer(batch[0])) * self.scale, batch[1])
        self.note(where, loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step("val", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.late(self.layer(batch["inputs"][0]))

    def on_before_optimizer_step(self) -> None:
        self.note("gradient", *[each.grad for each in self.parameters() if each.grad is not None])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-4)


def labelled(n: int = 4) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(*each, torch.arange(3)) for each in batches(n)]


@pytest.mark.parametrize("name", TYPES)
def test_parameters_batches_gradients_and_new_tensors_have_one_type(name: str) -> None:
    dtype, net = TYPES[name], Typed()
    weight = net.layer.weight
    norms: list[float] = []
    trainer = quiet(precision=name, gradient_clip_val=0.5)
    trainer.on("step_end")(lambda grad_norm: norms.append(grad_norm))
    trainer.fit(net, labelled(), labelled(1))
    assert trainer.strategy.precision.scaler is None and not torch.is_autocast_enabled("cpu")
    assert net.seen == {
        "made": {dtype},
        "batch": {dtype},
        "labels": {torch.int64},
        "outside": {torch.float32},
        "train": {dtype},
        "train own": {torch.float32},
        "val": {dtype},
        "val own": {torch.float32},
        "gradient": {dtype},
    }
    assert len(norms) == 4 and all(0 < each < 100 for each in norms)
    state = trainer.state.optimizers[0].state[weight]
    assert net.layer.weight is weight and {state[each].dtype for each in ("exp_avg", "exp_avg_sq")} == {dtype}
    assert net.scale.dtype == dtype and net.count.dtype == torch.int64  # it stays so after the run
    assert net.phase.dtype == (torch.complex128 if name == "64" else torch.complex64)
    assert torch.get_default_dtype() == torch.float32
    predicted = trainer.predict(net, [{"inputs": [each[0]]} for each in labelled(1)])
    assert predicted[0].dtype == dtype


@pytest.mark.parametrize("given", [64, "64-true"])
def test_lightnings_spellings_are_accepted(given: Any) -> None:
    assert quiet(precision=given).strategy.precision.name == "64"


def test_an_evaluation_alone_converts_the_module_too() -> None:
    net = Net()
    quiet(precision="64").validate(net, batches(1))
    assert net.layer.weight.dtype == torch.float64


def test_a_norm_that_half_precision_cannot_hold_is_measured_and_clipped() -> None:
    class Steep(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.layer(batch[0]) * 2e4).sum()

    norms: list[float] = []
    net, trainer = Steep(lr=1.0), quiet(precision="16-true", gradient_clip_val=1.0)
    trainer.on("step_end")(lambda grad_norm: norms.append(grad_norm))
    before = net.layer.bias.detach().clone()
    trainer.fit(net, [(torch.ones(3, 4), torch.zeros(3, 2))])
    assert 65504 < norms[0] < float("inf")
    moved = (net.layer.bias.detach().float() - before).abs()
    assert (moved > 0.1).all()  # a norm of infinity would have clipped every gradient to zero


def test_a_resume_is_exact_and_another_precision_is_converted_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, saves = Typed(), SavesFirstEpoch()
    start = copy.deepcopy(whole)
    options: dict[str, Any] = {"precision": "bf16-true", "run_dir": tmp_path / "run", "seed": 1}
    quiet(max_epochs=2, hooks=[saves], **options).fit(whole, labelled())
    again = copy.deepcopy(start)
    quiet(max_epochs=2, **options).fit(again, labelled(), resume=saves.path)
    assert torch.equal(again.layer.weight, whole.layer.weight)
    other = copy.deepcopy(start)
    trainer = quiet(max_epochs=2, **{**options, "precision": "64", "run_dir": tmp_path / "other"})
    with caplog.at_level(logging.WARNING, "hookline"):
        trainer.fit(other, labelled(), resume=saves.path)
    assert "precision: 'bf16-true' in the checkpoint, '64' now; '64' is used" in caplog.text
    assert "Weights and optimizer state now have the types of the new precision" in caplog.text
    state = trainer.state.optimizers[0].state[other.layer.weight]
    assert other.layer.weight.dtype == state["exp_avg"].dtype == torch.float64
    assert torch.allclose(other.layer.weight, whole.layer.weight.double(), atol=0.05)


def test_a_loss_that_is_not_finite_ends_a_run_in_half_precision() -> None:
    class Overflows(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.layer(batch[0]) * 1e6).square().sum()

    with pytest.raises(Exception, match="not finite|nan|inf"):
        quiet(precision="16-true").fit(Overflows(), batches())


@pytest.mark.parametrize(("eps", "warns"), [(1e-8, True), (1e-4, False)])
def test_an_eps_that_is_zero_in_float16_is_named_before_the_first_step(
    eps: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Adam(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), eps=eps)

    with caplog.at_level(logging.WARNING, "hookline"):
        quiet(precision="16-true", device="cpu", max_steps=0).fit(Adam(), batches(1))
    assert ("Adam: eps=1e-08 is 0 in float16" in caplog.text) is warns


def test_a_compiled_model_has_the_type_too() -> None:
    class WithForward(Typed):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + torch.ones(2)  # a new tensor in the graph

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.mse_loss(self(batch[0]), batch[1])

    net = WithForward()
    twin = copy.deepcopy(net)
    for kind in ({"backend": "eager"}, {"backend": "eager", "step": True}):
        compiled = copy.deepcopy(net)
        quiet(precision="64", compile=kind).fit(compiled, labelled())
        eager = copy.deepcopy(twin)
        quiet(precision="64").fit(eager, labelled())
        assert compiled.layer.weight.dtype == torch.float64
        assert torch.allclose(compiled.layer.weight, eager.layer.weight)
