"""The module in which a run failed: from the traceback, the graph, the gradients and the optimizer's states."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hookline import Hook
from hookline.hooks._failed_module import FailedPlace, find_failed_place, live_tensors


class Break(nn.Module):
    """Fails in the forward, in the backward, or never. Which of several does is a matter of the instance alone."""

    def __init__(self, when: str = "") -> None:
        super().__init__()
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise torch.OutOfMemoryError("forward")
        return BreakBackward.apply(x) if self.when == "backward" else x * 1.0  # type: ignore[no-any-return]


class BreakBackward(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise torch.OutOfMemoryError("backward")


class Scale(nn.Module):
    """Uses its parameter, then fails or not."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.scale, self.fails = nn.Parameter(torch.ones(4)), fails

    def forward(self, x: Tensor) -> Tensor:
        x = self.grown(x)
        if self.fails:
            raise torch.OutOfMemoryError("after its parameter")
        return x

    def grown(self, x: Tensor) -> Tensor:
        return x * self.scale


class Block(nn.Module):
    """A block of a stack: its layers are called by their names, and in a Sequential."""

    def __init__(self, when: str = "", odd: bool = False) -> None:
        super().__init__()
        self.norm, self.skip = nn.LayerNorm(4), Break()
        self.mlp = nn.Sequential(nn.Linear(4, 4), Break(when), nn.Linear(4, 5 if odd else 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.mlp(self.norm(x))


class Stack(Net):
    """A stack of blocks called in a loop."""

    def __init__(self, blocks: list[nn.Module], recompute: bool = False) -> None:
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList(blocks), recompute

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0], batch[1])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.mse_loss(self.layer(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Place(Hook):
    """Keeps where the run failed."""

    found = FailedPlace("", [], "")

    def on_exception(self, exception: BaseException, module: nn.Module, optimizers: Any) -> None:
        self.found = find_failed_place(exception, module, optimizers)


def place_of(module: nn.Module, *loaders: Any, **options: Any) -> FailedPlace:
    hook = Place()
    with pytest.raises((torch.OutOfMemoryError, RuntimeError)):
        quiet(hooks=[hook], **options).fit(module, *(loaders or (batches(2),)))
    return hook.found


@pytest.mark.parametrize("at", range(3))
def test_of_blocks_that_a_loop_calls_the_one_that_failed_is_named(at: int) -> None:
    found = place_of(Stack([Block("forward" if n == at else "") for n in range(3)]))
    assert found.phase == "forward"
    assert found.modules == [f"blocks.{at}.mlp.1"]
    assert found.where.startswith(__file__) and found.where.endswith("in forward")


@pytest.mark.parametrize("at", range(2))
def test_of_a_failing_operator_in_a_block_only_its_input_is_left(at: int) -> None:
    """`skip + mlp` fails: what it would add is gone with the call, so the block before may have failed at its end."""
    found = place_of(Stack([Block(odd=n == at) for n in range(3)]))
    assert found.modules == ["blocks.0", "blocks.1"][: at + 1]


def test_a_module_that_has_used_its_parameters_may_have_been_the_one_or_the_next() -> None:
    found = place_of(Stack([Scale(False), Scale(True), Scale(False)]))
    assert found.modules == ["blocks.1", "blocks.2"]


def test_without_a_graph_all_that_can_be_meant_are_named() -> None:
    module = Stack([Block(), Block("forward")])
    hook = Place()
    with pytest.raises(torch.OutOfMemoryError):
        quiet(hooks=[hook]).validate(module, batches(1))
    assert hook.found.modules == ["blocks.0.mlp.1", "blocks.1.mlp.1"]


def test_a_module_called_by_its_name_is_told_from_its_siblings_without_a_graph() -> None:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a": Break(), "b": Break("forward")})

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(self.parts["b"](self.parts["a"](batch[0]))).sum()

    hook = Place()
    with pytest.raises(torch.OutOfMemoryError):
        quiet(hooks=[hook]).validate(Two(), batches(1))
    assert hook.found.modules == ["parts.b"]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("at", range(2))
def test_a_backward_fails_between_the_last_gradient_and_the_next(at: int, accumulate: int) -> None:
    class Later(Stack):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == accumulate - 1:
                self.blocks[at].mlp[1].when = "backward"
            return super().training_step(batch, batch_idx)

    found = place_of(Later([Block(), Block()]), accumulate_grad_batches=accumulate)
    assert found.phase == "backward"
    assert found.modules == [f"blocks.{at}.mlp.1", f"blocks.{at}.mlp.0"]
    assert found.where.endswith("in backward")


def test_the_forward_that_activation_checkpointing_repeats_belongs_to_the_backward() -> None:
    class Second(Break):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 2:
                raise torch.OutOfMemoryError("again")
            return x * 1.0

    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.skip = Second()

    found = place_of(Stack([Block(), Own()], recompute=True))
    assert (found.phase, found.modules) == ("backward", ["blocks.1.skip"])


def test_an_update_fails_at_the_first_parameter_without_a_state() -> None:
    class Full(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            first = self.param_groups[0]["params"][0]
            self.state[first]["exp_avg"] = torch.zeros_like(first)
            raise torch.OutOfMemoryError("no room for the next")

    class Own(Stack):
        def configure_optimizers(self) -> Any:
            return Full(reversed(list(self.parameters())))

    found = place_of(Own([Block()]))
    assert (found.phase, found.modules) == ("update", ["blocks.0.mlp.2"])


def test_a_failure_outside_the_model_is_of_no_module() -> None:
    class Raises(Hook):
        def on_train_start(self) -> None:
            raise RuntimeError("elsewhere")

    hook = Place()
    with pytest.raises(RuntimeError, match="elsewhere"):
        quiet(hooks=[hook, Raises()]).fit(Net(), batches(1))
    assert (hook.found.phase, hook.found.modules) == ("", [])


def test_a_graph_that_was_kept_says_nothing() -> None:
    class Keeps(Stack):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.blocks[1].mlp[1].when = "forward" if batch_idx else ""
            loss = super().training_step(batch, batch_idx)
            self.kept = [loss]
            return loss

    assert place_of(Keeps([Block(), Block()])).modules == ["blocks.0.mlp.1", "blocks.1.mlp.1"]


def test_live_tensors_are_all_that_objects_hold() -> None:
    held = torch.ones(3)
    assert any(each is held for each in live_tensors())


def test_tensors_without_memory_are_left_out() -> None:
    """torch.compile keeps tensors without memory in its caches, whose sizes may be symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    real = torch.ones(3)
    found = {id(each) for each in live_tensors()}
    assert id(real) in found and id(fake) not in found and id(ragged) not in found
