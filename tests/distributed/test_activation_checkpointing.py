"""Activation checkpointing: fewer tensors are kept for the backward pass, and nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import Tensor, nn

from hookline import FSDP, Hook, OptionError
from hookline.distributed.activation_checkpointing import RecomputedForward, checkpoint_activations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 4)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        # a new tensor of torch's default type, and random numbers: both must be the same the second time
        return x + scale * self.down(self.drop(torch.relu(self.up(x)))) * torch.ones(1)


class Deep(Net):
    """Four blocks, and a record of the gradients and of what the last forward kept."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.gradients: list[Tensor] = []
        self.kept = self.depth = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            found[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.kept = sum(found.values())
        self.depth = sum("forward" in vars(each) for each in self.blocks[0].modules())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def on_after_backward(self) -> None:
        self.gradients += [each.grad.clone() for each in self.parameters()]  # type: ignore[union-attr]


def trained(net: Deep, **options: Any) -> Deep:
    net = copy.deepcopy(net)
    quiet(seed=3, **options).fit(net, batches(3, size=64), batches(1))
    return net


@pytest.fixture(scope="module")
def plain() -> tuple[Deep, Deep]:
    torch.manual_seed(0)
    net = Deep()
    return net, trained(net)


@pytest.mark.parametrize(
    ("choice", "falls_to"),
    [
        (True, 0.5),
        ("blocks.*", 0.5),
        ("Block", 0.5),
        (Block, 0.5),
        (lambda name, module: name in ("blocks.0", "blocks.1"), 0.75),
        (["blocks.0", "blocks.1"], 0.75),
    ],
    ids=["true", "pattern", "class name", "class", "function", "list"],
)
def test_fewer_numbers_are_kept_and_gradients_are_equal(
    plain: tuple[Deep, Deep], choice: Any, falls_to: float
) -> None:
    start, without = plain
    net = trained(start, activation_checkpointing=choice)
    assert net.kept < without.kept * falls_to
    assert len(net.gradients) == len(without.gradients) == 3 * len(list(net.parameters()))
    assert all(map(torch.equal, net.gradients, without.gradients))
    assert list(net.state_dict()) == list(start.state_dict())
    assert net.depth == 1  # a layer inside a chosen one is not recomputed twice
    assert not any("forward" in vars(each) for each in net.modules())  # the module is clean after the run


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", FSDP(activation_checkpointing=True)], ids=str)
def test_every_strategy_takes_the_same_option(plain: tuple[Deep, Deep], strategy: Any) -> None:
    given = {} if isinstance(strategy, FSDP) else {"activation_checkpointing": True}
    net = trained(plain[0], strategy=strategy, **given)
    assert net.kept < plain[1].kept * 0.5
    assert all(map(torch.equal, net.gradients, plain[1].gradients))


def test_a_second_fit_applies_it_once_and_a_failed_one_leaves_nothing(plain: tuple[Deep, Deep]) -> None:
    net, depths = copy.deepcopy(plain[0]), []

    class Looks(Hook):
        def on_train_batch_start(self, module: Any) -> None:
            forward = module.blocks[0].forward
            assert isinstance(forward, RecomputedForward)
            depths.append(isinstance(forward.forward, RecomputedForward))

        def on_step_end(self, step: int) -> None:
            if step == 3:
                raise RuntimeError("enough")

    trainer = quiet(activation_checkpointing=True, hooks=[Looks()], max_steps=2)
    trainer.fit(net, batches(4))
    trainer = quiet(activation_checkpointing=True, hooks=[Looks()], max_steps=3)
    with pytest.raises(RuntimeError, match="enough"):
        trainer.fit(net, batches(4))
    assert depths == [False] * 5
    assert not any("forward" in vars(each) for each in net.modules())


def test_hooks_on_a_layer_run_once_and_evaluations_recompute_nothing(plain: tuple[Deep, Deep]) -> None:
    net, calls = copy.deepcopy(plain[0]), []
    net.blocks[0].register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    quiet(activation_checkpointing=True).fit(net, batches(2), batches(1))
    assert calls == [True, True, False]


@pytest.mark.parametrize("precision", ["64", "bf16-true", "bf16-mixed"])
def test_a_layer_is_computed_again_in_the_same_precision(precision: str) -> None:
    torch.manual_seed(0)
    start = Deep()
    without, net = (
        trained(start, precision=precision, activation_checkpointing=choice) for choice in (False, True)
    )
    assert all(map(torch.equal, net.gradients, without.gradients))


def test_a_copy_made_during_the_run_is_of_its_own() -> None:
    layer = Block()
    restore = checkpoint_activations([layer])
    copied: Any = copy.deepcopy(layer)
    assert copied.forward.forward.__self__ is copied
    restore()
    assert "forward" not in vars(layer)


def test_a_forward_of_the_layers_own_comes_back() -> None:
    layer = nn.Linear(2, 2)
    own = layer.forward = lambda x: x * 2  # type: ignore[method-assign]
    checkpoint_activations([layer])()
    assert layer.forward is own


def test_a_wrong_choice_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(OptionError, match="activation_checkpointing='blok.*' names no part of Deep.*Did you"):
        quiet(activation_checkpointing="blok.*").fit(Deep(), batches(1))
    with pytest.raises(OptionError, match="True means the items of every ModuleList, and Net has none"):
        quiet(activation_checkpointing=True).fit(Net(), batches(1))
    with pytest.raises(OptionError, match="activation_checkpointing=3 must be a pattern of names"):
        quiet(activation_checkpointing=3)
    with pytest.raises(
        OptionError, match="activation_checkpointing=<.* must be a .*function of name and module"
    ):
        quiet(activation_checkpointing=lambda name: True)
    with pytest.raises(OptionError, match="given twice: to the trainer and to FSDP"):
        quiet(activation_checkpointing=True, strategy=FSDP(activation_checkpointing=True))
    with pytest.raises(OptionError, match="backend='eager' cannot be combined.*'aot_eager'"):
        quiet(activation_checkpointing=True, compile={"backend": "eager"}).fit(Deep(), batches(1))
