"""torch.compile: the same weights, and hooks put on layers later still fire."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet, step_graphs
from torch import Tensor, nn
from torch._dynamo.utils import counters

from hookline import Hook
from hookline.distributed import SingleDevice
from hookline.util.errors import OptionError

pytestmark = pytest.mark.filterwarnings(  # torch's own: when it first compiles, and when it looks at what a graph break hands on
    "ignore:.torch.jit.script_method:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
EAGER = {"backend": "eager"}  # traces and guards like the real thing, without a compiler


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.skip_nnmodule_hook_guards = before


class WithForward(Net):
    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch[0]), batch[1])


@pytest.mark.parametrize("cls", [Net, WithForward])
def test_compiled_training_ends_at_the_same_weights(cls: type[Net]) -> None:
    net = cls()
    twin = copy.deepcopy(net)
    quiet(compile=EAGER).fit(net, batches())
    quiet().fit(twin, batches())
    assert torch.equal(net.layer.weight, twin.layer.weight)


@pytest.mark.parametrize("cls", [Net, WithForward])
def test_a_forward_hook_added_after_the_first_step_still_fires(cls: type[Net]) -> None:
    fired: list[int] = []

    def add(module: Any, step: int) -> None:
        if step == 1:
            module.layer.register_forward_hook(lambda *_: fired.append(1))

    net = cls()
    trainer = quiet(compile=EAGER)
    trainer.on("step_end")(add)
    trainer.fit(net, batches(4))
    assert len(fired) == 3


def test_the_model_really_is_compiled() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    quiet(compile={"backend": backend}).fit(WithForward(), batches(2))
    assert graphs


def test_the_names_in_the_state_dict_do_not_change() -> None:
    net = WithForward()
    before = list(net.state_dict())
    quiet(compile=EAGER).fit(net, batches(2))
    assert list(net.state_dict()) == before


# ---- Where a compiled step is split into graphs, what cannot be compiled, and how that is said


STEP = {"step": True, **EAGER}


SPLIT = "split between forward and backward: "


class LooksAtLoss(Hook):
    def on_before_backward(self, loss: Tensor) -> Tensor:
        assert loss.requires_grad
        return loss * 0.5


class Manual(Net):
    automatic_optimization = False


class AroundTheStep(SingleDevice):
    def backward(self, call: Any) -> None:
        call()


@step_graphs
def test_what_cannot_be_compiled_is_refused_before_the_first_step(monkeypatch: Any) -> None:
    with pytest.raises(OptionError, match="Manual has automatic_optimization = False.*compile=True"):
        quiet(compile="step").fit(Manual(), batches())
    with pytest.raises(OptionError, match="needs one process on one device, and this run uses AroundTheStep"):
        quiet(compile=STEP, strategy=AroundTheStep(torch.device("cpu"))).fit(Net(), batches())
    with pytest.raises(OptionError, match="fullgraph=True.*split.*looks_at_loss"):
        quiet(compile={**STEP, "fullgraph": True}, hooks=[LooksAtLoss()]).fit(Net(), batches())
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", no_compiler)
    with pytest.raises(OptionError, match=r"needs a C\+\+ compiler"):
        quiet(compile="step").fit(Net(), batches())
    assert "refused: compile='step': torch.compile needs a C++ compiler" in str(
        quiet(compile="step").explain(Net(), batches())
    )


def no_compiler() -> str:
    from torch._inductor.exc import InvalidCxxCompiler

    raise InvalidCxxCompiler


def test_a_torch_without_the_option_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr("hookline.training.compile.OPTION", "an_option_of_another_version")
    with pytest.raises(OptionError, match="needs torch 2.13.*an_option_of_another_version"):
        quiet(compile=STEP).fit(Net(), batches())


@step_graphs
def test_explain_names_the_listener_that_splits_the_step_before_it_runs() -> None:
    trainer = quiet(compile=STEP, gradient_clip_val=1.0)
    assert "graph 1: training_step, loss and backward\n  graph 2: clipping and optimizer.step" in str(
        trainer.explain(Net())
    )
    trainer.add_hook(LooksAtLoss())
    shown = str(trainer.explain(Net(), batches()))
    assert (
        "graph 2: backward" in shown and SPLIT + "hook 'looks_at_loss' listens to on_before_backward" in shown
    )
    assert "test_compile.py" in shown  # where the listener is written
    assert trainer.explain(Net(), stage="test").graphs == ""


# ---- Some layers: compile={"blocks": ...}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Deep(Net):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.layer(x), batch[1])


class CountedGraphs:
    """A backend that counts the graphs it gets."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward


@pytest.mark.parametrize(
    "blocks", [True, "blocks.*", "Block", Block, [lambda name, _: name[:7] == "blocks."]]
)
def test_chosen_blocks_are_compiled_in_place_and_train_the_same_weights(blocks: Any) -> None:
    net, counted = Deep(2), CountedGraphs()
    twin, names = copy.deepcopy(net), list(net.state_dict())
    quiet(compile={"blocks": blocks, "backend": counted}).fit(net, batches())
    quiet().fit(twin, batches())
    compiled = {name for name, each in net.named_modules() if each._compiled_call_impl is not None}
    assert counted.graphs and compiled == {"blocks.0", "blocks.1"}
    assert torch.equal(net.layer.weight, twin.layer.weight)
    assert torch.equal(net.blocks[0].up.weight, twin.blocks[0].up.weight)
    assert list(net.state_dict()) == names


def test_blocks_of_one_class_share_compiled_code() -> None:
    counts = []
    for depth in (2, 6):
        torch._dynamo.reset()
        counted = CountedGraphs()
        quiet(compile={"blocks": "Block", "backend": counted}).fit(Deep(depth), batches(2))
        counts.append(len(counted.graphs))
    assert counts == [2, 2]  # the first block's input needs no gradient, those of the others do


def test_a_hook_added_to_a_compiled_block_later_still_fires() -> None:
    fired: list[int] = []

    def add(module: Any, step: int) -> None:
        if step == 1:
            module.blocks[1].up.register_forward_hook(lambda *_: fired.append(1))
            module.blocks[1].register_forward_hook(lambda *_: fired.append(2))

    trainer = quiet(compile={"blocks": True, **EAGER})
    trainer.on("step_end")(add)
    trainer.fit(Deep(2), batches(3))
    assert fired == [1, 2] * 2


def test_compiled_blocks_that_recompute_their_activations_have_the_same_gradients() -> None:
    class Drops(Deep):
        def __init__(self) -> None:
            super().__init__(2)
            self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.5)) for _ in range(2))

    net = Drops()
    twin = copy.deepcopy(net)
    options = {"compile": {"blocks": True, "backend": "aot_eager"}, "activation_checkpointing": True}
    quiet(seed=1, **options).fit(net, batches())
    quiet(seed=1).fit(twin, batches())
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_wrong_blocks_are_refused() -> None:
    with pytest.raises(
        OptionError, match="compile: blocks='Blok' names no part of Deep. Did you mean 'Block'"
    ):
        quiet(compile={"blocks": "Blok"}).fit(Deep(1), batches())
    with pytest.raises(OptionError, match="blocks compiles some layers, and step=True the whole"):
        quiet(compile={"blocks": "Block", "step": True})
    with pytest.raises(OptionError, match="compile: blocks=False must be a pattern of names"):
        quiet(compile={"blocks": False})
