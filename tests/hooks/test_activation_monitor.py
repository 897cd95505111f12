"""ActivationMonitor: activations by module name, in a run and by itself, and modules left as they were."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tiny import batches, quiet
from torch import Tensor, nn
from torch.nn import functional as F

from hookline import Module
from hookline.hooks.activation_monitor import ActivationMonitor
from hookline.util.errors import HookError, OptionError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.gate = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate(self.mlp(x))


class Deep(Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)
        self.hooks_seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.hooks_seen.append(hooks_on(self))
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def hooks_on(module: nn.Module) -> int:
    return sum(len(each._forward_hooks) for each in module.modules())


def test_statistics_of_the_modules_that_match_are_logged() -> None:
    net, data = Deep(), batches(2)
    trainer = quiet(hooks=[ActivationMonitor("*.mlp", every=2)])
    trainer.fit(net, data)
    with torch.no_grad():
        first = net.blocks[0].mlp(data[1][0])
    names = [name for name in trainer.metrics if name.startswith("activations/")]
    assert len(names) == 8 and all(".mlp/" in name for name in names)
    assert trainer.metrics["activations/blocks.0.mlp/mean"] == pytest.approx(float(first.mean()))
    assert trainer.metrics["activations/blocks.0.mlp/std"] == pytest.approx(
        float(first.std(correction=0)), rel=1e-4
    )
    assert trainer.metrics["activations/blocks.0.mlp/absmax"] == pytest.approx(float(first.abs().max()))


def test_the_share_of_dead_units() -> None:
    net, data = Deep(), batches(1)
    monitor = ActivationMonitor(["blocks.1.gate"], every=1, statistics=["zeros"])
    quiet(hooks=[monitor]).fit(net, data)
    with torch.no_grad():
        gated = net.blocks[1].gate(net.blocks[1].mlp(net.blocks[0](data[0][0])))
    assert monitor.latest == {
        "activations/blocks.1.gate/zeros": pytest.approx(float((gated == 0).float().mean()))
    }


def test_modules_carry_hooks_only_in_the_steps_that_are_looked_at() -> None:
    net = Deep()
    quiet(hooks=[ActivationMonitor("mlp", every=3)]).fit(net, batches(6))
    assert [bool(each) for each in net.hooks_seen] == [False, False, True, False, False, True]
    assert hooks_on(net) == 0


def test_of_an_accumulation_window_the_first_batch_is_seen() -> None:
    net = Deep()
    monitor = ActivationMonitor("head", every=2, capture=True, keep=9)
    data = batches(8)
    quiet(hooks=[monitor], accumulate_grad_batches=2).fit(net, data)
    assert [step for step, _ in monitor.captured] == [2, 4]
    with torch.no_grad():
        assert torch.equal(monitor.captured[0][1]["head"], net(data[2][0]))


def test_a_failing_run_leaves_no_hook_behind() -> None:
    class Fails(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            raise RuntimeError("broken")

    net = Fails()
    with pytest.raises(RuntimeError, match="broken"):
        quiet(hooks=[ActivationMonitor(every=1)]).fit(net, batches(1))
    assert net.hooks_seen[0] > 0 and hooks_on(net) == 0


def test_captures_are_copies_on_the_cpu_and_the_oldest_is_dropped() -> None:
    monitor = ActivationMonitor("head", every=1, capture=True, keep=2, statistics=[])
    quiet(hooks=[monitor]).fit(Deep(), batches(5))
    assert [step for step, _ in monitor.captured] == [4, 5]
    kept = monitor.captured[-1][1]["head"]
    assert kept.shape == (3, 2) and not kept.requires_grad and kept.device.type == "cpu"


def test_a_capture_is_bounded_and_says_what_it_left_out(caplog: pytest.LogCaptureFixture) -> None:
    monitor = ActivationMonitor("*.mlp", every=1, capture=True, max_mb=60e-6)  # 48 bytes each
    with caplog.at_level(logging.WARNING, "hookline"):
        quiet(hooks=[monitor]).fit(Deep(), batches(1))
    assert list(monitor.captured[0][1]) == ["blocks.0.mlp"]
    assert "left out blocks.1.mlp" in caplog.text


def test_by_itself_it_fills_a_dictionary_and_takes_its_hooks_away() -> None:
    net, x = Deep(), batches(1)[0][0]
    with ActivationMonitor(["*.mlp", "head"]).watch(net) as seen:
        out = net(x)
    assert list(seen) == ["blocks.0.mlp", "blocks.1.mlp", "head"]
    assert torch.equal(seen["head"], out)
    assert torch.equal(seen["blocks.0.mlp"], net.blocks[0].mlp(x))
    with pytest.raises(RuntimeError, match="inside"), ActivationMonitor().watch(net):
        assert hooks_on(net) > 0
        raise RuntimeError("inside")
    assert hooks_on(net) == 0


def test_outputs_of_several_tensors_get_numbers_or_keys() -> None:
    net = nn.LSTM(4, 3, batch_first=True)
    outer = nn.ModuleDict({"lstm": net})
    with ActivationMonitor("lstm").watch(outer) as seen:
        net(torch.ones(2, 5, 4))
    assert {name: tuple(each.shape) for name, each in seen.items()} == {
        "lstm.0": (2, 5, 3),
        "lstm.1.0": (1, 2, 3),
        "lstm.1.1": (1, 2, 3),
    }


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch.compile looks at it after a graph break
def test_it_works_in_a_compiled_model() -> None:
    net, data = Deep(), batches(3)
    monitor = ActivationMonitor("*.mlp", every=2)
    quiet(hooks=[monitor], compile={"backend": "eager"}).fit(net, data)
    with torch.no_grad():
        assert monitor.latest["activations/blocks.0.mlp/mean"] == pytest.approx(
            float(net.blocks[0].mlp(data[1][0]).mean())
        )
    assert hooks_on(net) == 0


def test_a_graph_that_must_stay_whole_is_refused_with_the_reason() -> None:
    with pytest.raises(HookError, match="fullgraph=True"):
        quiet(hooks=[ActivationMonitor()], compile={"backend": "eager", "fullgraph": True}).fit(
            Deep(), batches(1)
        )


def test_a_pattern_that_matches_no_module_is_refused_before_the_first_step() -> None:
    net = Deep()
    with pytest.raises(HookError, match=r"'blocks.0.mpl' matches nothing. Did you mean 'blocks.0.mlp'"):
        quiet(hooks=[ActivationMonitor("blocks.0.mpl")]).fit(net, batches(1))
    assert net.hooks_seen == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"statistics": ["maen"]}, "Did you mean 'mean'"),
        ({"every": 0}, "every=0"),
        ({"keep": 0}, "keep=0"),
        ({"max_mb": 0}, "max_mb=0"),
        ({"modules": []}, r"modules=\[\] must be"),
        ({"capture": "no"}, "True or False"),
    ],
)
def test_wrong_parameters_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, HookError), match=message):
        ActivationMonitor(**arguments)
