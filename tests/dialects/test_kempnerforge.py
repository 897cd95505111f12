"""KempnerForge's page on hooks: each of its code blocks runs with another import line, and does what the page says of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dialects.forged import Heard
from test_budgets import per_step, python_calls, with_hooks
from tiny import Net, batches, quiet
from torch.nn.functional import mse_loss

import hookline
from hookline import STEP_DONE, Hook, HookError, StopTraining
from hookline.config import load_config
from hookline.interop.kempnerforge import HookRunner, StepContext, TrainingHook

PAGE = "from kempnerforge.training.hooks import"
HERE = "from hookline.interop.kempnerforge import"

INTERFACE = """\
from kempnerforge.training.hooks import TrainingHook, StepContext, HookRunner

class MyHook(TrainingHook):
    def on_train_begin(self, config): ...
    def on_step_end(self, ctx: StepContext): ...
    def on_eval_end(self, metrics: dict[str, float], step: int): ...
    def on_checkpoint_save(self, step: int, path: str): ...
    def on_train_end(self, step: int, tokens_seen: int): ...
"""

STEP_CONTEXT = """\
@dataclass
class StepContext:
    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_seen: int
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
"""

LOOP_ORDER = """\
optimizer.step()
scheduler.step()
optimizer.zero_grad()                   # grads cleared here
...
tracker.end_step(...)
hook_runner.on_step_end(StepContext(...))
"""

STEP_BOUNDARY = """\
… step body …
tracker.end_step(...)                   # metrics dispatched to WandB/TB
hook_runner.on_step_end(StepContext(...))
# MoE-specific metrics logged
# NCCL health / eval / profiler / checkpoint / shutdown
"""

REGISTERING = """\
# In a custom launcher that imports scripts/train.py as a library,
# or in a fork that monkey-patches the hook_runner after construction:

from kempnerforge.training.hooks import HookRunner
hook_runner = HookRunner([MyHook1(), MyHook2()])
"""

GRAD_HISTOGRAM = '''\
class GradHistogramHook(TrainingHook):
    """Stash pre-clip grad norms during backward, log them in on_step_end.

    This requires adding a forward hook during on_train_begin because
    gradients are zeroed by the time on_step_end fires.
    """
    def __init__(self) -> None:
        self._norms: dict[str, float] = {}

    def on_train_begin(self, config) -> None:
        # Subclass or patch training loop to populate _norms during backward
        pass

    def on_step_end(self, ctx: StepContext) -> None:
        if self._norms:
            wandb.log(
                {f"grad_norm/{n}": v for n, v in self._norms.items()},
                step=ctx.step,
            )
            self._norms.clear()
'''


def run_block(block: str, **names: Any) -> dict[str, Any]:
    """Run a block of the page with its import line changed and nothing else."""
    exec(block.replace(PAGE, HERE), names)
    return names


def script(hook_runner: HookRunner, config: Any) -> torch.nn.Module:
    """A training script as the page describes it: two epochs of three steps, an evaluation and a checkpoint after each."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = tokens_seen = 0
    hook_runner.on_train_begin(config)
    for _ in range(2):
        for inputs, targets in batches(3):
            loss = mse_loss(net(inputs), targets)
            loss.backward()
            grad_norm = torch.nn.utils.get_total_norm(
                [p.grad for p in net.parameters() if p.grad is not None]
            )
            optimizer.step()
            optimizer.zero_grad()
            step, tokens_seen = step + 1, tokens_seen + inputs.numel()
            hook_runner.on_step_end(
                StepContext(step, loss.item(), float(grad_norm), 0.1, tokens_seen, net, optimizer)
            )
        with torch.no_grad():
            measured = float(mse_loss(net(batches(1)[0][0]), batches(1)[0][1]))
        hook_runner.on_eval_end({"eval/loss": measured, "eval/perplexity": math.exp(measured)}, step)
        hook_runner.on_checkpoint_save(step, "checkpoints")
    hook_runner.on_train_end(step, tokens_seen)
    return net


def in_trainer(*hooks: Any, config: Any = None, **options: Any) -> torch.nn.Module:
    """The same training in Hookline's trainer."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = quiet(hooks=hooks, config=config, max_epochs=2, run_dir="run", checkpoint=True, **options)
    trainer.on("validation_end")(
        lambda trainer, sanity_checking: sanity_checking or trainer.save_checkpoint()
    )
    trainer.fit(net, batches(3), batches(1), loss=mse_loss, optimizer=optimizer)
    return net


# ---- the blocks --------------------------------------------------------------------------------------------------


def test_the_interface_of_the_page_runs_in_a_script_and_in_a_trainer() -> None:
    my_hook = run_block(INTERFACE)["MyHook"]
    plain = script(HookRunner(), None)
    for net in (
        script(HookRunner([my_hook()]), None),
        in_trainer(my_hook()),
    ):  # hooks that only observe change nothing
        assert torch.equal(net.weight, plain.weight)  # type: ignore[arg-type]


def test_the_contexts_fields_are_those_of_the_page_and_the_pages_own_dataclass_is_as_good() -> None:
    pages = run_block(STEP_CONTEXT, torch=torch, dataclass=dataclass)["StepContext"]
    names = [field.name for field in dataclasses.fields(pages)]
    values = (3, 0.5, 1.5, 0.1, 96, torch.nn.Linear(1, 1), object())
    ours, theirs = StepContext(*values), pages(*values)
    assert (
        [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names] == list(values)
    )
    hook = Heard()
    HookRunner([hook]).on_step_end(theirs)
    assert hook.heard == [("step", 3)]
    assert StepContext is hookline.StepContext


def test_the_pages_loop_calls_the_hooks_after_its_tracker_with_new_weights_and_no_gradients() -> None:
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    order: list[str] = []

    class Looks(TrainingHook):
        def on_step_end(self, ctx: StepContext) -> None:
            order.append("hook")
            assert net.weight.grad is None

    net(torch.ones(4)).sum().backward()
    run_block(
        LOOP_ORDER,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        tracker=SimpleNamespace(end_step=lambda row: order.append("tracker")),
        hook_runner=HookRunner([Looks()]),
        StepContext=StepContext,
    )
    assert order == ["tracker", "hook"]


def test_at_a_step_boundary_come_metrics_then_the_hook_then_evaluation_then_the_checkpoint() -> None:
    order: list[str] = []
    first, *rest = STEP_BOUNDARY.splitlines(keepends=True)
    assert first == "… step body …\n"  # words, not code
    hook = Heard()
    tracker = SimpleNamespace(end_step=lambda row: order.append("metrics"))
    run_block("".join(rest), tracker=tracker, hook_runner=HookRunner([hook]), StepContext=StepContext)
    assert (order, [each[0] for each in hook.heard]) == (["metrics"], ["step"])

    class Boundary(Heard):
        def on_train_metrics(self, metrics: Any) -> None:
            self.heard.append(("metrics",))

    hook = Boundary()
    in_trainer(hook, log_every_n_steps=1, val_check_interval=1)
    names = [each[0] for each in hook.heard]
    after_each_step = ["metrics", "step", "eval", "save"]
    assert names == [
        "begin",
        *(after_each_step * 3 + ["metrics"]) * 2,
        "save",
        "end",
    ]  # the last state is saved before the end


def test_a_runner_is_made_and_patched_as_the_page_says_and_calls_in_the_order_of_its_list() -> None:
    heard: list[Any] = []
    first, second = (lambda: Heard(heard, "1 ")), (lambda: Heard(heard, "2 "))
    runner = run_block(REGISTERING, MyHook1=first, MyHook2=second)["hook_runner"]
    runner.on_train_begin("job")
    runner.hooks = [Heard(heard, "patched ")]
    runner.on_train_begin("job")
    assert heard == [("1 begin", "job"), ("2 begin", "job"), ("patched begin", "job")]


def test_the_histogram_example_logs_norms_that_a_subclass_takes_during_backward() -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    wandb = SimpleNamespace(log=lambda row, step: logged.append((step, row)))
    names = run_block(GRAD_HISTOGRAM, TrainingHook=TrainingHook, StepContext=StepContext, wandb=wandb)
    example: Any = names["GradHistogramHook"]

    in_trainer(example())  # it is empty
    assert logged == []

    class Filled(example):  # type: ignore[misc]
        def on_after_backward(self, model: Any) -> None:
            self._norms.update({name: p.grad.norm().item() for name, p in model.named_parameters()})

    in_trainer(Filled())
    assert [step for step, _ in logged] == [1, 2, 3, 4, 5, 6]
    assert all(
        sorted(row) == ["grad_norm/bias", "grad_norm/weight"] and row["grad_norm/weight"] > 0
        for _, row in logged
    )


# ---- the table of events -----------------------------------------------------------------------------------------


def test_the_same_hook_hears_the_same_in_a_script_and_in_a_trainer() -> None:
    by_hand, by_trainer = Heard(), Heard()
    config = {"job": 1}
    left, right = script(HookRunner([by_hand]), config), in_trainer(by_trainer, config=config)
    assert torch.equal(left.weight, right.weight)  # type: ignore[arg-type]
    by_trainer.heard.remove(
        ("save", 6, "run/checkpoints/last")
    )  # the run's last state, which the script does not save
    saves = [each for each in by_trainer.heard if each[0] == "save"]
    assert saves == [
        ("save", 3, "run/checkpoints/step-3"),
        ("save", 6, "run/checkpoints/step-6"),
    ]  # exact, so it can be uploaded
    assert all(Path(path).is_dir() for _, _, path in saves)
    assert by_hand.heard == [
        (*each[:2], "checkpoints") if each[0] == "save" else each for each in by_trainer.heard
    ]
    assert by_hand.heard[-1] == ("end", 6, 72)


def test_evaluations_arrive_as_loss_and_perplexity_in_a_plain_dictionary_and_the_sanity_check_is_none() -> (
    None
):
    got: list[tuple[dict[str, float], int]] = []

    class Evals(TrainingHook):
        def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
            got.append((metrics, step))

    trainer = quiet(hooks=[Evals()], num_sanity_val_steps=1)
    trainer.fit(Net(), batches(3), batches(1))
    ((metrics, step),) = got
    assert type(metrics) is dict
    assert metrics == {
        "eval/loss": trainer.metrics["val/loss"],
        "eval/perplexity": math.exp(trainer.metrics["val/loss"]),
    }
    assert step == 3


@pytest.mark.parametrize(("loss", "perplexity"), [(1e6, math.inf), (math.nan, math.nan)])
def test_a_loss_without_a_perplexity_and_further_metrics_are_no_problem(
    loss: float, perplexity: float
) -> None:
    got: list[dict[str, float]] = []

    class Evals(TrainingHook):
        def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
            got.append(metrics)

    class Huge(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": torch.tensor(loss), "accuracy": torch.tensor(0.25)}

    quiet(hooks=[Evals()]).fit(Huge(), batches(1), batches(1))
    assert got == [
        pytest.approx({"eval/loss": loss, "eval/perplexity": perplexity, "eval/accuracy": 0.25}, nan_ok=True)
    ]


def test_the_end_is_told_once_to_stopped_runs_too() -> None:
    class Stops(Heard):
        def on_step_end(self, ctx: StepContext) -> None:
            if ctx.step == 2:
                raise StopTraining("enough")

    hook = Stops()
    quiet(hooks=[hook]).fit(Net(), batches(5))
    assert [each for each in hook.heard if each[0] == "end"] == [("end", 2, 24)]


# ---- what the page says needs a fork -----------------------------------------------------------------------------


def test_gradients_can_be_inspected_in_a_hook_at_the_end_of_a_step_even() -> None:
    norms: list[float] = []

    class Inspects(TrainingHook):
        def on_step_end(self, ctx: StepContext) -> None:
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in ctx.model.parameters()])))
            assert ctx.grad_norm == pytest.approx(norms[-1])

    in_trainer(Inspects())
    assert len(norms) == 6 and all(norms)


def test_a_custom_optimizer_step_is_a_hook() -> None:
    class SignStep(TrainingHook):
        def on_before_optimizer_step(self, model: Any) -> Any:
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.5 * p.grad.sign()
            return STEP_DONE

    torch.manual_seed(0)
    start = torch.nn.Linear(4, 2).weight.detach().clone()
    moved = (in_trainer(SignStep()).weight.detach() - start) / 0.5  # type: ignore[operator]
    assert torch.allclose(moved, moved.round(), atol=1e-4) and moved.abs().max() >= 1


def test_the_loss_function_is_changed_in_the_middle_by_a_hook() -> None:
    class Changes(TrainingHook):
        def on_step_end(self, ctx: StepContext, trainer: Any) -> None:
            if ctx.step == 2:
                trainer.loss = lambda outputs, targets: 0.0 * outputs.sum() + 7.0

    losses: list[float] = []

    class Keeps(TrainingHook):
        def on_step_end(self, ctx: StepContext) -> None:
            losses.append(ctx.loss)

    in_trainer(Changes(), Keeps())
    assert losses[2:] == [7.0] * 4 and 7.0 not in losses[:2]


def test_hooks_come_from_a_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Path(tmp_path, "forge_hooks.py").write_text(
        f"{HERE} TrainingHook\nclass Ping(TrainingHook):\n"
        "    def __init__(self, url):\n        self.url, self.steps = url, []\n"
        "    def on_step_end(self, ctx):\n        self.steps.append(ctx.step)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    given = {
        "module": {"class_path": "torch.nn.Linear", "in_features": 4, "out_features": 2},
        "hooks": {"ping": {"class_path": "forge_hooks.Ping", "url": "http://here"}},
    }
    hooks = load_config(given, allow=["forge_hooks"]).build().hooks
    quiet(hooks=list(hooks.values())).fit(Net(), batches(2))
    assert (hooks["ping"].url, hooks["ping"].steps) == ("http://here", [1, 2])


# ---- wrong use ---------------------------------------------------------------------------------------------------


def test_a_misspelt_method_is_refused_by_runner_and_trainer_with_the_right_name() -> None:
    class Misspelt(TrainingHook):
        def on_stp_end(self, ctx: StepContext) -> None: ...

    for add in (lambda: HookRunner([Misspelt()]), lambda: quiet(hooks=[Misspelt()])):
        with pytest.raises(
            HookError, match=r"Misspelt.on_stp_end is not an event. Did you mean 'on_step_end'"
        ):
            add()


def test_a_runner_refuses_events_that_only_a_trainer_has() -> None:
    class Grads(TrainingHook):
        def on_after_backward(self) -> None: ...

    with pytest.raises(
        HookError, match=r"Grads.on_after_backward would never be called: HookRunner calls on_train_begin"
    ):
        HookRunner([Grads()])


def test_a_method_that_takes_too_much_is_refused_before_the_first_step() -> None:
    class Greedy(TrainingHook):
        def on_step_end(self, ctx: StepContext, extra: int) -> None: ...

    with pytest.raises(
        HookError,
        match=r"Greedy.on_step_end is called with \(ctx\), which it does not accept: missing .* 'extra'",
    ):
        HookRunner([Greedy()])
    with pytest.raises(HookError, match=r"Greedy.on_step_end: \w+ has no argument 'extra'"):
        quiet(hooks=[Greedy()])


def test_a_runner_refuses_swapped_parameters_which_a_trainer_gets_right() -> None:
    got: list[Any] = []

    class Swapped(TrainingHook):
        def on_eval_end(self, step: int, metrics: Any) -> None:
            got.append((step, sorted(metrics)))

    with pytest.raises(
        HookError, match=r"passes \(metrics, step\) in this order, so 'step' would be the metrics"
    ):
        HookRunner([Swapped()])
    quiet(hooks=[Swapped()]).fit(Net(), batches(1), batches(1))
    assert got == [(1, ["eval/loss", "eval/perplexity"])]


def test_a_runner_takes_instances_of_training_hooks_only() -> None:
    with pytest.raises(HookError, match=r"Pass Heard\(\)"):
        HookRunner([Heard])  # type: ignore[list-item]
    with pytest.raises(HookError, match=r"pass hooks of another kind to hookline.Trainer"):
        HookRunner([Hook()])  # type: ignore[list-item]


# ---- cost --------------------------------------------------------------------------------------------------------


def test_a_hook_of_this_kind_costs_what_a_native_one_costs() -> None:
    class Native(Hook):
        def on_step_end(self, ctx: StepContext) -> None: ...

    class Forge(TrainingHook):
        def on_step_end(self, ctx: StepContext) -> None: ...

    class Renamed(TrainingHook):
        def on_step_end(self, context: StepContext) -> None: ...

    native = per_step(with_hooks(Native()))
    assert per_step(with_hooks(Forge())) == native
    assert per_step(with_hooks(Renamed())) == native
    assert per_step(with_hooks(TrainingHook())) == per_step(with_hooks())


def test_an_empty_runner_is_one_call_per_entry_point() -> None:
    runner = HookRunner()
    runner.on_train_begin(None)
    runner.on_eval_end({}, 0)
    runner.on_checkpoint_save(0, "")
    runner.on_train_end(0, 0)
    assert python_calls(lambda: runner.on_step_end(None)) == 2  # type: ignore[arg-type]  # the lambda, and the method
