"""torch.inference_mode in evaluations: an option, and nothing that outlives an evaluation is spoilt by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import Tensor, nn

from hookline import Hook, OptionError
from hookline.hooks import WeightAveraging
from hookline.training.inference import check_inference_mode, leaving_ordinary, ordinary

ON = {"inference_mode": True}


class Caches(Net):
    """Stores tensors in evaluations that training uses: a table made on demand, and a running buffer."""

    table: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(2))
        self.modes: dict[str, set[bool]] = {}

    def run_step(self, kind: str, batch: Any) -> Tensor:
        self.modes.setdefault(kind, set()).add(torch.is_inference_mode_enabled())
        if self.table is None:
            self.table = torch.ones(2)
        outputs = self.layer(batch[0]) * self.table
        if kind != "train":
            self.running = self.running * 0.9 + outputs.mean(0)
        else:
            self.running.add_(outputs.detach().mean(0))
        loss = nn.functional.mse_loss(outputs + self.running, batch[1])
        self.log(f"{kind}/own", loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.run_step("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.run_step("val", batch), "more": torch.ones(())}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.run_step("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.modes.setdefault("predict", set()).add(torch.is_inference_mode_enabled())
        return {"y": [self.layer(batch[0])]}


def test_validation_before_and_inside_training_leaves_a_module_that_trains() -> None:
    results = []
    for evaluation in (ON, None):
        torch.manual_seed(0)
        net = Caches()
        kept: list[Any] = []
        trainer = quiet(
            evaluation=evaluation, max_epochs=2, num_sanity_val_steps=1, hooks=[WeightAveraging()]
        )
        trainer.on("validation_batch_end")(lambda outputs: kept.append(outputs["loss"].add_(1)))
        trainer.fit(net, batches(3), {"a": batches(1), "b": batches(2)})
        assert net.modes == {"train": {False}, "val": {evaluation is not None}}
        assert not any(each.is_inference() for each in (*net.parameters(), *net.buffers(), net.table, *kept))
        results.append((net.layer.weight.detach().clone(), dict(trainer.metrics)))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert {"val/loss", "val/more", "val/own"} <= set(results[0][1])


def test_results_and_predictions_of_evaluations_alone_can_be_differentiated() -> None:
    net, trainer = Caches(), quiet(evaluation=ON)
    assert trainer.validate(net, batches(2))["val/own"] > 0
    assert trainer.test(net, batches(2))["test/own"] > 0
    predictions = trainer.predict(net, batches(2))
    assert net.modes == {"val": {True}, "test": {True}, "predict": {True}}
    weight = nn.Parameter(torch.ones(2))
    loss = sum((each["y"][0] * weight).square().sum() for each in predictions)
    loss.backward()
    predictions[0]["y"][0].mul_(2)
    assert weight.grad is not None
    trainer.fit(net, batches(1))


def test_hooks_of_an_evaluation_run_without_gradients_and_outside_of_it() -> None:
    seen: list[tuple[bool, bool]] = []

    class Looks(Hook):
        def on_validation_start(self) -> None:
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

        def on_validation_batch_end(self) -> None:
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    quiet(evaluation=ON, hooks=[Looks()]).validate(Net(), batches(1))
    assert seen == [(False, False)] * 2


def test_a_compiled_model_evaluates_and_trains() -> None:
    class WithForward(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.mse_loss(self(batch[0]), batch[1])

        training_step = validation_step

    results = []
    for options in ({"evaluation": ON, "compile": {"backend": "eager"}}, {}):
        torch.manual_seed(0)
        net = WithForward()
        trainer = quiet(num_sanity_val_steps=1, **options)
        trainer.fit(net, batches(2), batches(1))
        results.append(float(trainer.metrics["val/loss"]))
    assert results[0] == pytest.approx(results[1])


def test_sharded_parameters_refuse_it() -> None:
    options = quiet(evaluation=ON).options
    run: Any = SimpleNamespace(options=options, strategy=SimpleNamespace(shards=True))
    with pytest.raises(OptionError, match="inference_mode.*cannot be combined.*torch.no_grad"):
        check_inference_mode(run)


def test_only_inference_tensors_are_copied() -> None:
    tensor = torch.ones(2)
    assert ordinary(tensor) is tensor
    module = nn.BatchNorm1d(2)
    kept = module.running_mean
    with leaving_ordinary(module), torch.inference_mode():
        module.running_var = torch.ones(2)
    assert module.running_mean is kept
    assert module.running_var is not None and not module.running_var.is_inference()
    assert torch.is_grad_enabled()
