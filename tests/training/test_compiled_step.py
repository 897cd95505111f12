"""compile="step": the same facts, events and weights as without it, from graphs that are split only where a listener needs it."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet, step_graphs
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hookline import SKIP_BATCH, SKIP_STEP, Hook
from hookline.util.errors import LossError

STEP = {"step": True, "backend": "eager"}  # traces and guards like the real thing, without a compiler
pytestmark = [
    step_graphs,
    pytest.mark.filterwarnings(  # torch's own: when it first compiles, and when it looks at what a graph break hands on
        "ignore:.torch.jit.script_method:DeprecationWarning",
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    ),
]
ONE_GRAPH = "training_step, loss and backward"
SPLIT = "split between forward and backward: "


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Deep(Net):
    """Dropout, a schedule, logged values, numbers beside the loss, and a use of batch_idx."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = torch.relu(self.layer(batch[0]))
        loss = F.mse_loss(self.head(hidden), batch[1])
        self.log("hidden", hidden.mean(), on_epoch=True)
        if batch_idx % 2:
            loss = loss * 2
        return {"loss": loss, "size": hidden.sum(), "nothing": None}

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=0.05)
        return [optimizer], [
            {"scheduler": LambdaLR(optimizer, lambda step: 1 / (1 + step)), "interval": "step"}
        ]


class Simple(Net):
    """Dropout, a logged value and a number beside the loss, in one graph: to trace more takes long."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = F.dropout(self.layer(batch[0]))
        self.log("hidden", hidden.mean(), on_epoch=True)
        return {"loss": F.mse_loss(hidden, batch[1]), "size": hidden.sum()}


class Headed(Simple):
    """Two layers: gradients flow through the second."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.head(self.layer(batch[0])), batch[1])


class Facts(Hook):
    """Keeps the facts of every event of a batch that costs no split."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_after_backward(self, module: Any, lr: float) -> None:
        norms = [None if each.grad is None else float(each.grad.norm()) for each in module.parameters()]
        self.seen.append(("after_backward", norms, lr))

    def on_step_skipped(self, reason: str) -> None:
        self.seen.append(("skipped", reason))

    def on_train_batch_end(self, outputs: Any, loss: Any, metrics: Any) -> None:
        self.seen.append(("batch_end", outputs, loss, dict(metrics)))

    def on_step_end(self, ctx: Any, loss: Any, grad_norm: Any, lr: Any) -> None:
        self.seen.append(("step_end", ctx.step, loss, grad_norm, lr, ctx.loss, ctx.lr))

    def on_train_epoch_end(self, metrics: Any) -> None:
        self.seen.append(("epoch_end", dict(metrics)))


def close(one: Any, two: Any) -> bool:
    """Whether two structures are equal, numbers within float tolerance."""
    if isinstance(one, Tensor | float):
        return type(one) is type(two) and torch.allclose(
            torch.as_tensor(one), torch.as_tensor(two), rtol=1e-4, atol=1e-5
        )
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(close(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(close, one, two))
    return bool(one == two)


class Slots:
    """Records every event of a run in order, also those without listeners, and every call of a listener."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def slot(self, event: Any, slot: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return self._noting(event.name, slot)

    def call(self, listener: Any, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return self._noting(f"{listener.event.name} by {listener.label}", call)

    def _noting(self, what: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(s: Any) -> Any:
            self.seen.append(f"{s.step} {what}")
            return call(s)

        return noted


def train(
    module: Any, compile: Any, hooks: Any = (), *, traced: bool = True, **options: Any
) -> tuple[list[Any], list[str], str]:
    """The facts, the events in their order, and what `explain` says of the graphs at the end."""
    facts, slots, graphs = Facts(), Slots(), [""]
    trainer = quiet(
        compile=compile, seed=1, max_epochs=2, hooks=[facts, *(each() for each in hooks)], **options
    )
    trainer.on("train_end")(lambda trainer: graphs.append(trainer.explain().graphs))
    if traced:
        trainer.plan.attach(slots)
    trainer.fit(module, batches(4))
    return facts.seen, slots.seen, graphs[-1]


class LooksAtLoss(Hook):
    def on_before_backward(self, loss: Tensor) -> Tensor:
        assert loss.requires_grad
        return loss * 0.5


class LooksAtOldGradients(Hook):
    def on_before_zero_grad(self, module: Any, step: int) -> None:
        assert (next(module.parameters()).grad is not None) == (step > 0)


class Skips(Hook):
    def on_train_batch_start(self, batch_idx: int) -> Any:
        return SKIP_BATCH if batch_idx == 1 else None

    def on_before_optimizer_step(self, batch_idx: int) -> Any:
        return SKIP_STEP if batch_idx == 2 else None


class OwnBackward(Simple):
    def backward(self, loss: Tensor) -> None:
        (loss * 2).backward()


class OwnUpdate(Deep):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Any = None
    ) -> None:
        optimizer.step()


class TwoOptimizers(Deep):
    def configure_optimizers(self) -> Any:
        return [SGD(self.layer.parameters(), lr=0.1, momentum=0.9), AdamW(self.head.parameters(), lr=0.1)]


class Recomputes(Net):
    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters(), max_iter=3)


class NoLossAtTimes(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


class Breaks(Simple):
    """Calls what torch cannot trace."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch._dynamo.graph_break()
        return super().training_step(batch, batch_idx)


class PartlyFrozen(Deep):
    """One parameter without gradients, one without use, and one that no optimizer has: its gradient adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.bias.requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        return SGD([*self.layer.parameters(), *self.unused.parameters()], lr=0.1)


class BackwardHooks(Headed):
    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(lambda gradient: gradient * 2)
        self.head.register_full_backward_hook(lambda module, inputs, outputs: None)


SCENES: dict[str, tuple[Callable[[], Any], dict[str, Any], tuple[str, ...]]] = {
    "plain": (Deep, {}, (ONE_GRAPH, "graph 2: AdamW.step")),
    "clipping": (Deep, {"gradient_clip_val": 0.1}, (ONE_GRAPH, "graph 2: AdamW.step")),
    "clipping by value": (
        Simple,
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        (ONE_GRAPH,),
    ),
    "bf16": (Simple, {"precision": "bf16-mixed"}, (ONE_GRAPH,)),
    "skipped batches and steps": (Simple, {"hooks": [Skips]}, (ONE_GRAPH,)),
    "a step without a loss": (NoLossAtTimes, {}, (ONE_GRAPH,)),
    "two optimizers": (TwoOptimizers, {}, (ONE_GRAPH, "graph 2: SGD.step", "graph 3: AdamW.step")),
    "LBFGS": (Recomputes, {}, (ONE_GRAPH, "without a graph: LBFGS.step, because it calls a closure")),
    "frozen and unused parameters": (PartlyFrozen, {}, (ONE_GRAPH,)),
    "a listener before backward": (
        Simple,
        {"hooks": [LooksAtLoss]},
        (SPLIT + "hook 'looks_at_loss' listens to on_before_backward",),
    ),
    "a listener before zero_grad": (
        Simple,
        {"hooks": [LooksAtOldGradients]},
        (SPLIT + "hook 'looks_at_old_gradients'",),
    ),
    "a backward of the module": (OwnBackward, {}, (SPLIT + "module OwnBackward overrides backward",)),
    "an update of the module": (
        OwnUpdate,
        {},
        (ONE_GRAPH, "without a graph: AdamW.step, because OwnUpdate overrides"),
    ),
    "accumulation": (
        Deep,
        {"accumulate_grad_batches": 2},
        (SPLIT + "accumulate_grad_batches=2", "graph 3: AdamW.step"),
    ),
    "nonfinite='skip'": (Simple, {"nonfinite": "skip"}, (SPLIT + "nonfinite='skip'",)),
    "a scaler": (Net, {"precision": "16-mixed"}, (SPLIT + "precision='16-mixed'",)),
    "hooks of torch": (
        BackwardHooks,
        {},
        (SPLIT + "the parameter 'layer.weight'", SPLIT + "the module 'head'"),
    ),
    "a graph break": (
        Breaks,
        {},
        (SPLIT + "torch cannot compile them as one graph", "graph 1: training_step\n"),
    ),
}


@pytest.mark.parametrize("name", SCENES)
def test_events_facts_and_weights_are_those_of_the_eager_step(name: str) -> None:
    make, options, expected = SCENES[name]
    torch.manual_seed(0)
    module = make()
    twin = copy.deepcopy(module)
    if isinstance(module, BackwardHooks):
        twin = BackwardHooks()  # hooks on parameters are not copied
        twin.load_state_dict(module.state_dict())
    facts, events, graphs = train(module, STEP, **options)
    eager_facts, eager_events, nothing = train(twin, False, **options)
    assert events == eager_events
    assert close(facts, eager_facts)
    assert close(list(module.state_dict().values()), list(twin.state_dict().values()))
    assert [text for text in expected if text not in graphs] == []
    assert (SPLIT in graphs) == any(SPLIT in text for text in expected)
    assert nothing == ""


def test_clipping_is_part_of_the_update_unless_a_listener_needs_the_moment_between() -> None:
    module = Simple()
    twin, third = copy.deepcopy(module), copy.deepcopy(module)
    facts, _, graphs = train(module, STEP, gradient_clip_val=0.1, traced=False)
    eager, _, _ = train(twin, False, gradient_clip_val=0.1, traced=False)
    assert close(facts, eager)
    assert "clipping and SGD.step" in graphs

    class Clip(Hook):
        def on_gradient_clip(self, grad_norm: float) -> None:
            norms.append(grad_norm)

    norms: list[float] = []
    facts, _, graphs = train(third, STEP, hooks=[Clip], gradient_clip_val=0.1, traced=False)
    assert close(facts, eager)
    assert close(norms, [each[3] for each in eager if each[0] == "step_end"])
    assert "clipping" not in graphs


def test_a_run_compiles_two_graphs_and_a_changed_learning_rate_none() -> None:
    train(Net(), STEP, traced=False)
    assert counters["stats"]["unique_graphs"] == 2
    counters.clear()
    train(Deep(), STEP, traced=False)  # its rate changes at each step; odd and even batches are two graphs
    assert counters["stats"]["unique_graphs"] == 3


def test_a_short_last_batch_compiles_once_more() -> None:
    data = [*batches(3, size=3), *batches(1, size=2)]
    quiet(compile=STEP, max_epochs=3).fit(Net(), data)
    assert counters["stats"]["unique_graphs"] == 3


def test_a_hook_that_is_added_later_splits_the_step_from_its_next_batch_on() -> None:
    graphs: list[str] = []
    losses: list[bool] = []

    def look(loss: Tensor) -> None:
        losses.append(loss.requires_grad)

    def on_batch_end(trainer: Any, batch_idx: int) -> None:
        graphs.append(trainer.explain().graphs)
        if batch_idx == 1:
            handles.append(trainer.on("before_backward")(look) and trainer.add_hook(Late()))
        if batch_idx == 3:
            handles[0].remove()

    class Late(Hook):
        def on_before_backward(self, loss: Tensor) -> None:
            losses.append(loss.requires_grad)

    handles: list[Any] = []
    module = Net()
    twin = copy.deepcopy(module)
    trainer = quiet(compile=STEP)
    trainer.on("train_batch_end")(on_batch_end)
    trainer.fit(module, batches(6))
    quiet().fit(twin, batches(6))
    assert ["hook 'late'" in each for each in graphs] == [False, False, True, True, False, False]
    assert losses and all(losses)
    assert torch.allclose(module.layer.weight, twin.layer.weight)


def test_a_gradient_hook_that_is_added_later_fires() -> None:
    fired: list[int] = []

    class Adds(Hook):
        def on_train_batch_start(self, module: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                module.layer.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(1))
            if batch_idx == 2:
                module.layer.register_forward_hook(lambda *given: fired.append(2))

    quiet(compile=STEP, hooks=[Adds()]).fit(Net(), batches(4))
    assert fired == [1, 2, 1, 2, 1]


def test_a_full_backward_hook_that_is_added_later_fires(caplog: Any) -> None:
    fired: list[int] = []

    class Adds(Hook):
        def on_train_batch_start(self, module: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                module.head.register_full_backward_hook(lambda *given: fired.append(1))

    with caplog.at_level(logging.WARNING, "hookline"):
        quiet(compile=STEP, hooks=[Adds()]).fit(Headed(), batches(4))
    assert fired == [1, 1]
    assert "cannot compile them as one graph: Module-level backwards hooks" in caplog.text


def test_step_hooks_of_the_optimizer_are_called_and_schedulers_do_not_warn() -> None:
    calls: list[str] = []

    class Hooked(Deep):
        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            made[0][0].register_step_pre_hook(lambda *given: calls.append("before"))
            made[0][0].register_step_post_hook(lambda *given: calls.append("after"))
            return made

    quiet(compile=STEP).fit(Hooked(), batches(2))  # a warning would be an error
    assert calls == ["before", "after"] * 2


def test_an_optimizer_that_torch_cannot_compile_runs_without_a_graph(caplog: Any) -> None:
    class Fused(Net):
        def configure_optimizers(self) -> Any:
            return AdamW(self.parameters(), lr=0.1, fused=True)

    module = Fused()
    twin = copy.deepcopy(module)
    with caplog.at_level(logging.WARNING, "hookline"):
        _, _, graphs = train(module, STEP, gradient_clip_val=0.1, traced=False)
    train(twin, False, gradient_clip_val=0.1, traced=False)
    assert torch.allclose(module.layer.weight, twin.layer.weight)
    assert "without a graph: AdamW.step" in graphs and "AdamW.step runs without a graph" in caplog.text


def test_a_parameter_that_joins_an_optimizer_later_is_trained() -> None:
    class Joins(PartlyFrozen):
        def on_train_epoch_end(self, epoch: int, optimizers: Any) -> None:
            if epoch == 0:
                optimizers[0].add_param_group({"params": list(self.head.parameters())})

    module = Joins()
    twin = copy.deepcopy(module)
    facts, _, graphs = train(module, STEP)
    eager, _, _ = train(twin, False)
    assert close(facts, eager)
    assert ONE_GRAPH in graphs


def test_plain_modules_with_a_loss_function() -> None:
    net = nn.Linear(4, 2)
    twin = copy.deepcopy(net)
    for each, compile in ((net, STEP), (twin, False)):
        trainer = quiet(compile=compile)
        trainer.fit(each, batches(), loss=F.mse_loss, optimizer=SGD(each.parameters(), lr=0.1))
    assert torch.allclose(net.weight, twin.weight)
    assert counters["stats"]["unique_graphs"] == 2


def test_what_a_step_function_logs_through_the_trainer_is_logged() -> None:
    rows: list[Any] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = F.mse_loss(model(batch[0]), batch[1])
        trainer.log("twice", loss * 2)
        return loss

    net = nn.Linear(4, 2)
    trainer = quiet(compile=STEP)
    trainer.on("train_batch_end")(lambda metrics, loss: rows.append((metrics["twice"], 2 * loss)))
    trainer.fit(net, batches(), step=step, optimizer=SGD(net.parameters(), lr=0.1))
    assert len(rows) == 4 and close([one for one, _ in rows], [two for _, two in rows])
    assert counters["stats"]["unique_graphs"] == 2


class Saves(Hook):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen == 6:
            trainer.save_checkpoint(self.path)


class Drops(Net):
    """Dropout and momentum."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(F.dropout(self.layer(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    data = [*batches(3, size=3), *batches(1, size=2)]
    torch.manual_seed(0)
    whole = Drops()
    options = {"compile": STEP, "max_epochs": 3, "seed": 3, **options}
    quiet(**options, hooks=[Saves(tmp_path / "half")]).fit(whole, data)
    torch._dynamo.reset()
    resumed = Drops()
    quiet(**options).fit(resumed, data, resume=tmp_path / "half")
    assert all(
        torch.equal(one, two)
        for one, two in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True)
    )


@pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler"
)
def test_compiled_code_trains_as_without_it_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    data = batches(4)  # of one shape: a compiler takes long for each
    torch.manual_seed(0)
    whole = Drops()
    eager = copy.deepcopy(whole)
    options: dict[str, Any] = {"max_epochs": 3, "seed": 3, "gradient_clip_val": 0.5}
    graphs: list[str] = []
    trainer = quiet(compile="step", **options, hooks=[Saves(tmp_path / "half")])
    trainer.on("train_end")(lambda trainer: graphs.append(trainer.explain().graphs))
    trainer.fit(whole, data)
    quiet(**options).fit(eager, data)
    assert graphs == ["  graph 1: training_step, loss and backward\n  graph 2: clipping and SGD.step"]
    assert torch.allclose(
        whole.layer.weight, eager.layer.weight, rtol=1e-4, atol=1e-5
    )  # dropout drew the same numbers
    torch._dynamo.reset()
    resumed = Drops()
    quiet(compile="step", **options).fit(resumed, data, resume=tmp_path / "half")
    assert torch.equal(whole.layer.weight, resumed.layer.weight) and torch.equal(
        whole.layer.bias, resumed.layer.bias
    )


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_options_of_torch_are_as_before_after_a_run() -> None:
    config = torch._dynamo.config
    before = (
        config.trace_autograd_ops,
        config.skip_nnmodule_hook_guards,
        torch.compiler.config.dynamic_sources,
    )
    quiet(compile=STEP).fit(Net(), batches())
    assert (
        config.trace_autograd_ops,
        config.skip_nnmodule_hook_guards,
        torch.compiler.config.dynamic_sources,
    ) == before


def test_a_loss_that_cannot_be_trained_on_is_the_same_error() -> None:
    class Detached(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx).detach()

    class Many(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0])

    with pytest.raises(LossError, match="detached"):
        quiet(compile=STEP).fit(Detached(), batches())
    with pytest.raises(LossError, match="must be one number"):
        quiet(compile=STEP).fit(Many(), batches())


def test_shapes_that_change_too_often_split_the_step_instead_of_ending_the_run(caplog: Any) -> None:
    data = [batches(1, size=size)[0] for size in range(1, 13)]
    module = Net()
    twin = copy.deepcopy(module)
    with caplog.at_level(logging.WARNING, "hookline"):
        quiet(compile=STEP).fit(module, data)
    quiet().fit(twin, data)
    assert torch.allclose(module.layer.weight, twin.layer.weight)
    assert "it was compiled too often, because shapes or numbers change" in caplog.text
