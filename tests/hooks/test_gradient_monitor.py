"""GradientMonitor: the right numbers under the right step, one read per report, nothing in between, and a picture."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hookline import SKIP_STEP, STEP_DONE, Hook, Module, Trainer
from hookline.hooks._statistics import norms
from hookline.hooks.gradient_monitor import GradientMonitor
from hookline.util.errors import HookError, OptionError


class Deep(Module):
    def __init__(self, layers: int = 3, sparse: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 8)
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        self.decoder = nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.decoder(self.blocks(torch.tanh(self.encoder(batch[0])))), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Truth(Hook):
    """What a person would compute by hand, one parameter at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[dict[str, float]] = []

    def on_before_optimizer_step(self, module: nn.Module) -> None:
        self.norms.append(
            {name: float(p.grad.norm()) for name, p in module.named_parameters() if p.grad is not None}
        )


def rows_of(trainer: Trainer, key: str) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (trainer.run_dir / "log.jsonl").read_text().splitlines()]
    return {
        line["step"]: line["metrics"]
        for line in lines
        if line["type"] == "metrics" and key in line["metrics"]
    }


def test_norms_are_those_of_the_gradients_and_go_out_under_their_own_step() -> None:
    truth, monitor = Truth(), GradientMonitor(log_frequency=2)
    trainer = quiet(logger=True, log_every_n_steps=50, hooks=[truth, monitor])
    trainer.fit(Deep(), batches(6))
    rows = rows_of(trainer, "grad_norm")
    assert sorted(rows) == [2, 4, 6]
    for step, row in rows.items():
        by_hand = truth.norms[step - 1]
        assert row["grad_norm"] == pytest.approx(math.hypot(*by_hand.values()))
        for layer in ("encoder", "blocks.0", "blocks.2", "decoder"):
            assert row[f"grad_norm/{layer}"] == pytest.approx(
                math.hypot(by_hand[f"{layer}.weight"], by_hand[f"{layer}.bias"])
            )


def test_by_parameter_and_filtered_by_text_or_pattern() -> None:
    truth = Truth()
    monitor = GradientMonitor(log_frequency=1, group="parameter", param_filter=["encoder", "blocks.*.bias"])
    trainer = quiet(hooks=[truth, monitor])
    trainer.fit(Deep(2), batches(1))
    assert monitor.latest is not None
    assert monitor.latest.norms == pytest.approx(
        {
            name: truth.norms[0][name]
            for name in ("encoder.weight", "encoder.bias", "blocks.0.bias", "blocks.1.bias")
        }
    )
    assert monitor.latest.total == pytest.approx(
        math.hypot(*truth.norms[0].values())
    )  # the total is of everything


def test_a_filter_that_matches_nothing_is_refused_before_the_first_step() -> None:
    net = Deep()
    before = net.encoder.weight.clone()
    with pytest.raises(HookError, match=r"'encodr' matches nothing.*Did you mean 'encoder"):
        quiet(hooks=[GradientMonitor(param_filter=["encodr"])]).fit(net, batches(2))
    assert torch.equal(net.encoder.weight, before)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_counts_updates_not_batches_and_sees_the_whole_window(accumulate: int) -> None:
    truth, monitor = Truth(), GradientMonitor(log_frequency=2)
    quiet(hooks=[truth, monitor], accumulate_grad_batches=accumulate).fit(Net(), batches(12))
    updates = 12 // accumulate
    assert monitor.history.steps == list(range(2, updates + 1, 2))
    expected = [math.hypot(*truth.norms[step - 1].values()) for step in monitor.history.steps]
    assert monitor.history.norms["layer"] == pytest.approx(expected)


def test_gradients_are_unscaled_and_not_yet_clipped() -> None:
    found = {}
    for name, options in {
        "plain": {},
        "mixed": {"precision": "16-mixed"},
        "clipped": {"gradient_clip_val": 1e-3},
    }.items():
        torch.manual_seed(0)
        monitor = GradientMonitor(log_frequency=1)
        quiet(hooks=[monitor], max_steps=1, **options).fit(
            Net(), batches(1) * 30
        )  # the scaler skips a few first
        assert monitor.latest is not None
        found[name] = monitor.latest.total
    assert found["mixed"] == pytest.approx(found["plain"], rel=0.02)
    assert found["clipped"] == found["plain"]


def test_a_skipped_update_is_not_reported_and_the_step_is_caught_up_with() -> None:
    class SkipsOnce(Hook):
        calls = 0

        def on_before_optimizer_step(self) -> Any:
            self.calls += 1
            return SKIP_STEP if self.calls == 2 else None

    truth, monitor = Truth(), GradientMonitor(log_frequency=2)
    quiet(hooks=[truth, monitor, SkipsOnce()]).fit(Net(), batches(5))
    assert monitor.history.steps == [2, 4]
    assert monitor.history.norms["layer"][0] == pytest.approx(math.hypot(*truth.norms[2].values()))


def test_several_optimizers_are_one_report() -> None:
    class Two(Deep):
        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(self.encoder.parameters(), lr=0.1),
                torch.optim.SGD(self.decoder.parameters(), lr=0.1),
            ]

    monitor = GradientMonitor(log_frequency=2)
    quiet(hooks=[monitor]).fit(Two(), batches(4))
    assert monitor.history.steps == [2, 4]
    assert set(monitor.history.norms) == {"encoder", "decoder"}


def test_an_optimizer_whose_update_was_skipped_is_left_out_of_the_report() -> None:
    class Two(Deep):
        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(self.encoder.parameters(), lr=0.1),
                torch.optim.SGD(self.decoder.parameters(), lr=0.1),
            ]

        def on_before_optimizer_step(self, optimizer_idx: int) -> Any:
            return SKIP_STEP if optimizer_idx == 1 else None

    monitor = GradientMonitor(log_frequency=1)
    quiet(hooks=[monitor]).fit(Two(), batches(2))
    assert monitor.history.steps == [1, 2] and set(monitor.history.norms) == {"encoder"}


def test_the_ratio_of_update_to_weight() -> None:
    class Weights(Hook):
        def on_before_optimizer_step(self, module: Net) -> None:
            self.before = [p.detach().clone() for p in module.parameters()]

        def on_after_optimizer_step(self, module: Net) -> None:
            change = math.hypot(
                *(
                    float((p - b).detach().norm())
                    for p, b in zip(module.parameters(), self.before, strict=True)
                )
            )
            self.ratio = change / math.hypot(*(float(b.norm()) for b in self.before))

    weights, monitor = Weights(), GradientMonitor(log_frequency=1, update_ratio=True)
    trainer = quiet(logger=True, hooks=[weights, monitor])
    trainer.fit(Net(), batches(2))
    assert rows_of(trainer, "update_ratio/layer")[2]["update_ratio/layer"] == pytest.approx(
        weights.ratio, rel=1e-5
    )


def test_percentiles_and_histograms_are_of_the_gradients() -> None:
    class Keeps(Hook):
        def on_before_optimizer_step(self, module: Net) -> None:
            self.grads = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

    keeps, monitor = Keeps(), GradientMonitor(log_frequency=1, percentiles=[10, 50, 90], log_histogram=True)
    trainer = quiet(logger=True, hooks=[keeps, monitor])
    trainer.fit(Net(), batches(1))
    row = rows_of(trainer, "gradients/p50/layer")[1]
    for percentile in (10, 50, 90):
        assert row[f"gradients/p{percentile}/layer"] == pytest.approx(
            float(keeps.grads.abs().quantile(percentile / 100)), rel=1e-4
        )
    lines = [json.loads(line) for line in (trainer.run_dir / "log.jsonl").read_text().splitlines()]
    (histogram,) = [line for line in lines if line["type"] == "histogram"]
    assert histogram["tag"] == "gradients/layer" and histogram["step"] == 1
    assert sum(histogram["counts"]) == keeps.grads.numel()
    assert histogram["edges"][0] == pytest.approx(float(keeps.grads.min()))


def test_without_norms_only_what_is_asked_for_is_logged() -> None:
    trainer = quiet(hooks=[GradientMonitor(log_frequency=1, log_norm=False, percentiles=[50])])
    trainer.fit(Net(), batches(1))
    assert [name for name in trainer.metrics if name.startswith("gradients/p50")]
    assert "grad_norm" not in trainer.metrics


def test_vanishing_and_exploding_layers_are_named_once_until_they_recover(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Sick(Deep):
        def on_after_backward(self, step: int) -> None:
            factor = {2: 1.0}.get(step, 0.0)
            self.encoder.weight.grad.mul_(factor)
            self.encoder.bias.grad.mul_(factor)
            self.decoder.weight.grad.mul_(1e6)
            self.blocks[0].weight.grad.fill_(math.nan)

        def on_before_optimizer_step(self) -> Any:
            return STEP_DONE  # such gradients would spoil the weights

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return sum((p * p).sum() for p in self.parameters())

    monitor = GradientMonitor(log_frequency=1)
    with caplog.at_level(logging.WARNING, "hookline"):
        quiet(hooks=[monitor], max_steps=4).fit(Sick(2), batches(4))
    assert [record.getMessage() for record in caplog.records] == [
        "step 1: vanishing gradients (norm below 1e-07) in encoder",
        "step 1: exploding gradients (norm above 1000 or not finite) in blocks.0, decoder",
        "step 4: vanishing gradients (norm below 1e-07) in encoder",
    ]
    assert monitor.history.norms["blocks.0"] == [math.inf] * 4


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for a device, and the norms that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.items = self.norms = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.items += name in ("_local_scalar_dense", "item", "nonzero")
        self.norms += "norm" in name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [2, 30])
def test_one_reduction_and_no_read_per_parameter(layers: int) -> None:
    monitor = GradientMonitor(log_frequency=1, percentiles=[50], log_histogram=True, update_ratio=False)
    net = Deep(layers)
    net.training_step(batches(1)[0], 0).backward()
    with Reads() as seen:
        monitor.on_before_optimizer_step(net, torch.optim.SGD(net.parameters()), 0)
    assert seen.norms == 1 and seen.items == 0
    copies: list[int] = []
    cpu = Tensor.cpu
    trainer = quiet()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "cpu", lambda self: copies.append(self.numel()) or cpu(self))
        with Reads() as seen:
            monitor.on_step_end(trainer, trainer.logger, 1)
    assert len(copies) == 1 and seen.items == 0


def test_the_steps_between_reports_look_at_no_tensor() -> None:
    monitor = GradientMonitor(log_frequency=100)
    net = Deep()
    net.training_step(batches(1)[0], 0).backward()
    trainer = quiet()

    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(function)

    with Nothing():
        for step in range(1, 99):
            monitor.on_before_optimizer_step(net, torch.optim.SGD(net.parameters()), 0)
            monitor.on_after_optimizer_step(0)
            monitor.on_step_end(trainer, trainer.logger, step)
    assert monitor.latest is None


def test_the_history_is_bounded_and_covers_the_whole_run() -> None:
    monitor = GradientMonitor(log_frequency=1, history=8)
    quiet(hooks=[monitor]).fit(Net(), batches(50))
    steps = monitor.history.steps
    assert len(steps) <= 8 and len(monitor.history.norms["layer"]) == len(steps)
    assert steps[0] == 1 and steps[-1] > 40
    assert len({b - a for a, b in zip(steps, steps[1:], strict=False)}) == 1


def test_the_history_continues_after_a_resume() -> None:
    class Saves(Hook):
        def on_step_end(self, trainer: Trainer, step: int) -> None:
            if step == 4:
                trainer.save_checkpoint("half")

    quiet(hooks=[GradientMonitor(log_frequency=2), Saves()], max_steps=4).fit(Net(), batches(8))
    monitor = GradientMonitor(log_frequency=2)
    quiet(hooks=[monitor]).fit(Net(), batches(8), resume="half")
    assert monitor.history.steps == [2, 4, 6, 8]
    assert all(math.isfinite(each) for each in monitor.history.norms["layer"])


def test_the_heat_map_is_a_picture_in_the_run_directory_also_after_a_failure() -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    trainer = quiet(hooks=[GradientMonitor(log_frequency=1, heatmap=True)])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Fails(), batches(4))
    assert (trainer.run_dir / "gradient_flow.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in Path().rglob("*.png")] == ["gradient_flow.png"]


def test_the_picture_shows_every_layer_over_the_steps() -> None:
    monitor = GradientMonitor(log_frequency=2)
    with pytest.raises(HookError, match="nothing to draw"):
        monitor.figure()
    quiet(hooks=[monitor]).fit(Deep(2), batches(6))
    axes = monitor.figure().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "encoder",
        "blocks.0",
        "blocks.1",
        "decoder",
    ]
    (mesh,) = axes.collections
    assert mesh.get_array().shape == (4, 3)
    assert mesh.get_array()[0].tolist() == pytest.approx(monitor.history.norms["encoder"])


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HookError, match=r'pip install "hookline\[plots\]"'):
        quiet(hooks=[GradientMonitor(heatmap=True)]).fit(Net(), batches(1))


def test_sparse_half_and_unused_parameters_are_measured_or_left_out() -> None:
    class Odd(Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, 2, sparse=True)
            self.unused = nn.Linear(3, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.words(torch.tensor([1, 1, 2])) ** 2).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monitor = GradientMonitor(log_frequency=1, percentiles=[50])
    net = Odd()
    expected = float(torch.cat([4 * net.words.weight[1:2], 2 * net.words.weight[2:3]]).detach().norm())
    quiet(hooks=[monitor]).fit(net, batches(1))
    assert monitor.latest is not None and monitor.latest.norms == {"words": pytest.approx(expected)}
    huge = torch.full((10,), 1e3, dtype=torch.float16)
    assert norms([huge]).item() == pytest.approx(1e3 * math.sqrt(10), rel=1e-3)
    assert norms([huge, huge.double()]).dtype is torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_frequency": 0}, "log_frequency=0 must be a whole number from 1"),
        ({"log_frequency": True}, "log_frequency=True"),
        ({"percentiles": [50, 101]}, "must be numbers from 0 to 100"),
        ({"group": "layr"}, "Did you mean 'layer'"),
        ({"vanishing": 1.0, "exploding": 0.1}, "the first below the second"),
        ({"log_norm": "yes"}, "must be True or False"),
        ({"param_filter": 3}, "param_filter=3 must be"),
        ({"history": 1}, "history=1"),
    ],
)
def test_wrong_parameters_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, HookError), match=message):
        GradientMonitor(**arguments)


def test_frozen_parameters_only_make_a_warning_in_words_instead_of_a_picture(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Half(Net):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(4, 2).requires_grad_(False)

    hook = GradientMonitor(log_frequency=1, heatmap=True, param_filter="frozen.*")
    trainer = quiet(hooks=[hook])
    trainer.fit(Half(), batches(2))
    (record,) = caplog.records
    assert (
        "no parameter that fits param_filter=['frozen.*'] had a gradient. Are they frozen"
        in record.getMessage()
    )
    assert record.exc_info is None
    with pytest.raises(HookError, match="Are they frozen"):
        hook.figure()
    assert not list(trainer.run_dir.glob("*.png"))
