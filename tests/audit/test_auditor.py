"""Planted faults: hooks that each change one thing. The audit names every one, with its kind and step."""

from __future__ import annotations

import contextlib
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny import quiet
from torch import nn
from torch.nn import functional as F
from torch.utils import _python_dispatch as modes
from torch.utils.flop_counter import FlopCounterMode

from hookline import SKIP_BATCH, SKIP_STEP, Hook, HookError, LossError, Module, ObserverError, observer, on
from hookline.audit import observation as kinds

FIRST = 3
"""The step of the first fault."""


class Small(Module):
    """Two layers, a frozen one, a buffer and batch norm, so that every kind of change is possible."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("scale", torch.ones(1))

    def training_step(self, batch: Any) -> Any:
        return F.mse_loss(self.frozen(self.head(self.body(batch[0]))) * self.scale, batch[1])

    def validation_step(self, batch: Any) -> Any:
        return self.training_step(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data(n: int) -> list[Any]:
    torch.manual_seed(0)
    return [[torch.randn(3, 4), torch.randn(3, 2)] for _ in range(n)]


def audited(hook: Any, n: int = 6, **options: Any) -> Any:
    trainer = quiet(hooks=[hook], audit=True, **{"max_epochs": 1, **options})
    with contextlib.suppress(RuntimeError, LossError):  # some faults end the run a step later
        trainer.fit(Small(), data(n), data(2))
    return trainer


Fault = Callable[..., Any]
FAULTS: dict[str, tuple[str, str, str, Fault]] = {}
"""By name: the event, the kind, what is named, and the function with the fault."""


def fault(event: str, kind: str, what: str) -> Callable[[Fault], Fault]:
    def keep(function: Fault) -> Fault:
        FAULTS[function.__name__] = (event, kind, what, function)
        return function

    return keep


# ---- parameters and buffers ----------------------------------------------------------------------------------------


@fault("step_end", kinds.PARAMETERS, "head.weight")
def add_in_place_without_grad(module: Any) -> None:
    with torch.no_grad():
        module.head.weight.add_(1)


@fault("train_batch_start", kinds.PARAMETERS, "head.weight")
def copy_in_place_before_the_step(module: Any) -> None:
    with torch.no_grad():
        module.head.weight.copy_(torch.zeros(2, 3))


@fault("train_batch_end", kinds.PARAMETERS, "body.0.bias")
def write_through_data(module: Any) -> None:
    module.body[0].bias.data.mul_(0.5)


@fault("after_backward", kinds.PARAMETERS, "body.0.weight")
def write_one_element_through_data(module: Any) -> None:
    module.body[0].weight.data[0, 0] = 3.0


@fault("before_optimizer_step", kinds.PARAMETERS, "head.bias")
def write_through_detach(module: Any) -> None:
    module.head.bias.detach().zero_()


@fault("step_end", kinds.PARAMETERS, "head.bias")
def write_through_a_view_of_data(module: Any) -> None:
    module.head.bias.data.view(-1)[1:].fill_(2.0)


@fault("step_end", kinds.PARAMETERS, "head.weight")
def replace_the_data(module: Any) -> None:
    module.head.weight.data = torch.zeros(2, 3)


@fault("step_end", kinds.PARAMETERS, "head.weight")
def replace_the_parameter(module: Any) -> None:
    module.head.weight = nn.Parameter(torch.zeros(2, 3))


@fault("step_end", kinds.PARAMETERS, "extra.weight")
def add_a_submodule(module: Any) -> None:
    if not hasattr(module, "extra"):
        module.extra = nn.Linear(1, 1)


@fault("step_end", kinds.PARAMETERS, "head.weight")
def write_in_inference_mode(module: Any) -> None:
    with torch.inference_mode():
        module.head.weight.data.add_(1)


@fault("step_end", kinds.PARAMETERS, "head.weight")
def write_with_a_foreach_operator(module: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_([module.head.weight, module.head.bias], 0.5)


@fault("step_end", kinds.PARAMETERS, "head.weight")
def write_as_an_out_argument(module: Any) -> None:
    torch.add(torch.ones(2, 3), 1, out=module.head.weight.data)


@fault("step_end", kinds.PARAMETERS, "frozen.weight")
def initialise_a_frozen_layer(module: Any) -> None:
    nn.init.constant_(module.frozen.weight, 0.1)


@fault("validation_end", kinds.PARAMETERS, "head.bias")
def load_a_state_dict(module: Any) -> None:
    module.load_state_dict(module.state_dict())


@fault("step_end", kinds.PARAMETERS, "head.weight")
def take_an_extra_step_of_the_optimizer(optimizers: Any) -> None:
    optimizers[0].step()


@fault("step_end", kinds.BUFFERS, "scale")
def write_a_buffer(module: Any) -> None:
    module.scale.mul_(1.5)


@fault("train_batch_end", kinds.BUFFERS, "scale")
def write_a_buffer_through_data(module: Any) -> None:
    module.scale.data.fill_(2.0)


@fault("step_end", kinds.BUFFERS, "scale")
def replace_a_buffer(module: Any) -> None:
    module.scale = torch.full((1,), 2.0)


@fault("step_end", kinds.BUFFERS, "body.1.running_mean")
def run_a_forward_that_updates_batch_norm(module: Any) -> None:
    with torch.no_grad():
        module.body(torch.ones(3, 4))


@fault("validation_end", kinds.BUFFERS, "body.1.num_batches_tracked")
def reset_running_statistics(module: Any) -> None:
    module.body[1].reset_running_stats()


@fault("step_end", kinds.BUFFERS, "later")
def register_a_buffer(module: Any) -> None:
    if "later" not in module._buffers:
        module.register_buffer("later", torch.zeros(1))


# ---- gradients -----------------------------------------------------------------------------------------------------


@fault("before_optimizer_step", kinds.GRADIENTS, "head.weight")
def scale_a_gradient(module: Any) -> None:
    module.head.weight.grad.mul_(0.5)


@fault("after_backward", kinds.GRADIENTS, "head.weight")
def scale_a_gradient_through_data(module: Any) -> None:
    module.head.weight.grad.data.mul_(0.5)


@fault("before_optimizer_step", kinds.GRADIENTS, "body.0.weight")
def clip_gradients(module: Any) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 1e-3)


@fault("after_backward", kinds.GRADIENTS, "head.bias")
def remove_a_gradient(module: Any) -> None:
    module.head.bias.grad = None


@fault("after_backward", kinds.GRADIENTS, "head.bias")
def replace_a_gradient(module: Any) -> None:
    module.head.bias.grad = torch.zeros(2)


@fault("step_end", kinds.GRADIENTS, "head.bias")
def clear_gradients(optimizers: Any) -> None:
    optimizers[0].zero_grad()


@fault("step_end", kinds.GRADIENTS, "head.weight")
def run_a_backward(module: Any) -> None:
    module.head(torch.ones(1, 3)).sum().backward()


@fault("train_batch_end", kinds.GRADIENTS, "frozen.weight")
def give_a_frozen_layer_a_gradient(module: Any) -> None:
    module.frozen.weight.grad = torch.ones(2, 2)


# ---- the optimizer -------------------------------------------------------------------------------------------------


@fault("step_end", kinds.OPTIMIZER_SETTINGS, "optimizer 0, group 0: weight_decay")
def set_weight_decay(optimizers: Any) -> None:
    optimizers[0].param_groups[0]["weight_decay"] *= 0.9


@fault("before_optimizer_step", kinds.OPTIMIZER_SETTINGS, "optimizer 0, group 0: betas")
def set_betas(optimizers: Any, step: int) -> None:
    optimizers[0].param_groups[0]["betas"] = (0.5, 0.9 + 0.001 * step)


@fault("step_end", kinds.OPTIMIZER_SETTINGS, "optimizer 0, group 1: params")
def add_a_parameter_group(optimizers: Any) -> None:
    if len(optimizers[0].param_groups) == 1:
        optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@fault("step_end", kinds.OPTIMIZER_SETTINGS, "optimizer 0, group 0: params")
def remove_a_parameter_from_a_group(optimizers: Any) -> None:
    optimizers[0].param_groups[0]["params"].pop()


@fault("step_end", kinds.OPTIMIZER_STATE, "optimizer 0, parameter 0: exp_avg")
def clear_momentum(optimizers: Any) -> None:
    next(iter(optimizers[0].state.values()))["exp_avg"].zero_()


@fault("step_end", kinds.OPTIMIZER_STATE, "optimizer 0, parameter 0: exp_avg_sq")
def write_momentum_through_data(optimizers: Any) -> None:
    next(iter(optimizers[0].state.values()))["exp_avg_sq"].data.mul_(2)


@fault("train_batch_start", kinds.OPTIMIZER_STATE, "optimizer 0, parameter 0: exp_avg")
def replace_momentum(optimizers: Any) -> None:
    next(iter(optimizers[0].state.values()))["exp_avg"] = torch.zeros(3, 4)


@fault("step_end", kinds.OPTIMIZER_STATE, "optimizer 0, parameter 0: step")
def set_the_step_count(optimizers: Any) -> None:
    next(iter(optimizers[0].state.values()))["step"].fill_(1.0)


@fault("step_end", kinds.OPTIMIZER_STATE, "optimizer 0, parameter 0: exp_avg")
def forget_the_state(optimizers: Any) -> None:
    optimizers[0].state.clear()


@fault("step_end", kinds.LEARNING_RATES, "optimizer 0, group 0: lr")
def set_the_learning_rate(optimizers: Any) -> None:
    optimizers[0].param_groups[0]["lr"] *= 0.5


@fault("train_batch_start", kinds.LEARNING_RATES, "optimizer 0, group 0: lr")
def make_the_learning_rate_a_tensor(optimizers: Any) -> None:
    optimizers[0].param_groups[0]["lr"] = torch.tensor(0.01)


@fault("validation_end", kinds.LEARNING_RATES, "optimizer 0, group 0: lr")
def step_a_scheduler(optimizers: Any) -> None:
    torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda epoch: 0.1)


# ---- flags and modes -----------------------------------------------------------------------------------------------


@fault("step_end", kinds.REQUIRES_GRAD, "head.weight")
def freeze_a_layer(module: Any) -> None:
    module.head.requires_grad_(not module.head.weight.requires_grad)


@fault("train_batch_start", kinds.REQUIRES_GRAD, "frozen.bias")
def unfreeze_a_parameter(module: Any) -> None:
    module.frozen.bias.requires_grad = not module.frozen.bias.requires_grad


@fault("validation_end", kinds.MODES, "Small")
def leave_the_model_in_the_other_mode(module: Any) -> None:
    module.train(not module.training)


@fault("step_end", kinds.MODES, "body.1")
def leave_a_layer_in_eval_mode(module: Any) -> None:
    module.body[1].train(not module.body[1].training)


@fault("train_batch_end", kinds.MODES, "head")
def set_the_flag_itself(module: Any) -> None:
    module.head.training = not module.head.training


# ---- the batch -----------------------------------------------------------------------------------------------------


@fault("train_batch_start", kinds.BATCH, "batch[0]")
def write_into_the_batch(batch: Any) -> None:
    batch[0].clamp_(-1, 1)


@fault("after_batch_transfer", kinds.BATCH, "batch[0]")
def write_into_the_batch_through_data(batch: Any) -> None:
    batch[0].data[0] = 0


@fault("train_batch_start", kinds.BATCH, "batch[1]")
def replace_a_tensor_of_the_batch(batch: Any) -> None:
    batch[1] = batch[1] * 2


@fault("train_batch_end", kinds.BATCH, "batch[1]")
def write_the_batch_after_the_step(batch: Any) -> None:
    batch[1].zero_()


@fault("train_batch_start", kinds.BATCH, "batch[2]")
def append_to_the_batch(batch: Any) -> None:
    batch.append("more")


# ---- random streams ------------------------------------------------------------------------------------------------


@fault("step_end", kinds.RANDOM, "torch")
def draw_from_torch(step: int) -> None:
    torch.rand(1)


@fault("validation_end", kinds.RANDOM, "torch")
def seed_torch() -> None:
    torch.manual_seed(random.getrandbits(30))


@fault("train_batch_start", kinds.RANDOM, "Python")
def draw_from_python() -> None:
    random.random()


@fault("train_epoch_end", kinds.RANDOM, "Python")
def shuffle_with_python() -> None:
    random.shuffle([1, 2, 3])


@fault("step_end", kinds.RANDOM, "numpy")
def draw_from_numpy() -> None:
    np.random.rand()


@fault("validation_start", kinds.RANDOM, "numpy")
def seed_numpy(step: int) -> None:
    np.random.seed(step)


@fault("step_end", kinds.RANDOM, "torch")
def use_dropout() -> None:
    F.dropout(torch.ones(4), 0.5)


# ---- flags of torch ------------------------------------------------------------------------------------------------


@fault("step_end", kinds.GRAD_MODE, "torch.is_grad_enabled")
def switch_gradients_off() -> None:
    torch.set_grad_enabled(not torch.is_grad_enabled())


@fault("train_epoch_end", kinds.DEFAULT_DTYPE, "torch.get_default_dtype")
def set_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64 if torch.get_default_dtype() is torch.float32 else torch.float32)


@fault("step_end", kinds.DETERMINISM, "torch.backends.cudnn.benchmark")
def switch_the_benchmark_on() -> None:
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark


@fault("train_epoch_end", kinds.DETERMINISM, "torch.are_deterministic_algorithms_enabled")
def require_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())


@fault("step_end", kinds.DETERMINISM, "torch.get_float32_matmul_precision")
def set_the_matmul_precision() -> None:
    torch.set_float32_matmul_precision(
        "high" if torch.get_float32_matmul_precision() == "highest" else "highest"
    )


# ---- hooks on modules ----------------------------------------------------------------------------------------------


@fault("step_end", kinds.MODULE_HOOKS, "head")
def register_a_forward_hook(module: Any) -> None:
    module.head.register_forward_hook(lambda *given: None)


@fault("train_batch_start", kinds.MODULE_HOOKS, "body.0")
def register_a_pre_hook(module: Any) -> None:
    module.body[0].register_forward_pre_hook(lambda *given: None)


@fault("step_end", kinds.MODULE_HOOKS, "head")
def register_a_backward_hook(module: Any) -> None:
    module.head.register_full_backward_hook(lambda *given: None)


@fault("step_end", kinds.MODULE_HOOKS, "head.weight")
def register_a_hook_on_a_parameter(module: Any) -> None:
    module.head.weight.register_hook(lambda grad: None)


@fault("step_end", kinds.MODULE_HOOKS, "head.weight")
def register_a_hook_after_accumulation(module: Any) -> None:
    module.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)


@fault("step_end", kinds.MODULE_HOOKS, "head")
def replace_forward(module: Any) -> None:
    forward = type(module.head).forward
    module.head.forward = lambda x: forward(module.head, x)


@fault("train_epoch_end", kinds.MODULE_HOOKS, "all modules: forward_hooks")
def register_a_hook_on_all_modules() -> None:
    LEFT.append(nn.modules.module.register_module_forward_hook(lambda *given: None))


# ---- returned values -----------------------------------------------------------------------------------------------


@fault("train_batch_start", kinds.RETURNED, "SKIP_BATCH")
def skip_a_batch() -> Any:
    return SKIP_BATCH


@fault("before_optimizer_step", kinds.RETURNED, "SKIP_STEP")
def skip_a_step() -> Any:
    return SKIP_STEP


@fault("before_backward", kinds.RETURNED, "a tensor of shape ()")
def replace_the_loss(loss: Any) -> Any:
    return loss * 2


@fault("before_batch_transfer", kinds.RETURNED, "a list")
def replace_the_batch(batch: Any) -> Any:
    return [each.clone() for each in batch]


@fault("step_end", kinds.MODULE_HOOKS, "head")
def register_a_hook_after_loading(module: Any) -> None:
    LEFT.append(module.head.register_load_state_dict_post_hook(lambda module, keys: None))


LEFT: list[Any] = []
"""Handles that tests remove afterwards."""
ONCE = ("train_epoch_end", "validation_start", "validation_end")


@pytest.fixture(autouse=True)
def flags_of_torch() -> Any:
    flags = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = flags[0]
    torch.set_float32_matmul_precision(flags[1])
    while LEFT:
        LEFT.pop().remove()


def test_there_are_at_least_sixty_faults_of_every_kind() -> None:
    assert len(FAULTS) >= 60
    assert {kind for _, kind, _, _ in FAULTS.values()} == set(kinds.KINDS)


def planted(event: str, function: Fault) -> tuple[Any, list[int]]:
    """A hook that makes the fault once, and the list that gets the step of it."""
    at: list[int] = []

    def when(step: int, sanity_checking: bool) -> bool:
        if at or sanity_checking or (step < FIRST and event not in ONCE):
            return False
        at.append(step)
        return True

    copied = types.FunctionType(function.__code__, globals(), function.__name__)  # marking changes a function
    return on(event, when=when)(copied), at


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_with_its_kind_and_step(name: str) -> None:
    event, kind, what, function = FAULTS[name]
    hook, at = planted(event, function)
    trainer = audited(hook)
    rows = [row for row in trainer.hooks.changes() if row.kind == kind]
    assert [(row.hook, row.event, row.first_step, row.count) for row in rows] == [
        (name, f"on_{event}", at[0], 1)
    ]
    assert what in rows[0].names
    others = {row.kind for row in trainer.hooks.changes()} - {kind}
    assert others == ALSO.get(name, set())


ALSO = {
    "replace_the_parameter": {kinds.GRADIENTS},
    "add_a_submodule": {kinds.GRADIENTS, kinds.RANDOM, kinds.REQUIRES_GRAD, kinds.MODES},
    "load_a_state_dict": {kinds.BUFFERS},
    "take_an_extra_step_of_the_optimizer": {kinds.OPTIMIZER_STATE},
    "add_a_parameter_group": {kinds.LEARNING_RATES},
}
"""Faults that change more than one kind of thing."""


# ---- what is not a fault -------------------------------------------------------------------------------------------


class Looks(Hook):
    """Reads everything, and computes with copies: no change."""

    observes = True

    def on_train_batch_start(self, module: Any, batch: Any, optimizers: Any) -> None:
        batch[0].clone().zero_()
        [each.detach().clone().mul_(2) for each in module.parameters()]

    def on_step_end(self, module: Any, optimizers: Any, loss: float, grad_norm: float) -> None:
        torch.stack([each.grad.norm() for each in module.parameters() if each.grad is not None]).sum()
        module.state_dict()
        optimizers[0].state_dict()
        with torch.no_grad():
            module.eval()
            module.body(torch.ones(2, 4))
            module.train()

    def on_validation_end(self, module: Any, metrics: Any) -> None:
        with torch.random.fork_rng():
            torch.rand(2)
        dict(metrics)


def test_a_hook_that_looks_and_undoes_has_changed_nothing() -> None:
    trainer = audited(Looks())
    assert trainer.status == "completed"
    assert trainer.hooks.changes() == []


class Validates(Hook):
    def on_step_end(self, trainer: Any) -> None:
        trainer.validate()


class Spoils(Hook):
    def on_validation_end(self, module: Any, sanity_checking: bool) -> None:
        if not sanity_checking:
            module.head.weight.data.add_(1)


def test_a_change_inside_a_validation_belongs_to_the_hook_that_made_it() -> None:
    trainer = quiet(hooks=[Validates(), Spoils()], audit=True, max_epochs=1)
    trainer.fit(Small(), data(2), data(2))
    assert [(row.hook, row.kind, row.count) for row in trainer.hooks.changes()] == [
        ("spoils", kinds.PARAMETERS, 3)
    ]


# ---- the promise ---------------------------------------------------------------------------------------------------


class Promises(Hook):
    observes = True

    def on_step_end(self, module: Any, step: int) -> None:
        if step == 2:
            module.head.bias.data.zero_()


def test_a_broken_promise_is_an_error_that_names_hook_event_and_change() -> None:
    trainer = quiet(hooks=[Promises()], audit=True, max_epochs=1)
    with pytest.raises(
        ObserverError, match=r"hook 'promises' .* only observes.* on_step_end: parameters \(head\.bias\)"
    ):
        trainer.fit(Small(), data(4))
    assert trainer.state.step == 2


@pytest.mark.parametrize(("policy", "rows"), [("warn", 1), ("disable", 1)])
def test_the_error_policy_applies_to_a_broken_promise(
    policy: str, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    hook = Promises()
    hook.on_error = policy
    trainer = quiet(hooks=[hook], audit=True, max_epochs=1)
    trainer.fit(Small(), data(4))
    assert trainer.status == "completed" and len(trainer.hooks.changes()) == rows
    assert "ObserverError" in caplog.text
    assert ("promises" in trainer.hooks.list_hooks()) == (policy == "warn")


def test_a_function_can_promise_too() -> None:
    @observer
    @on("step_end")
    def draws() -> None:
        torch.rand(1)

    with pytest.raises(ObserverError, match=r"random streams \(torch\)"):
        quiet(hooks=[draws], audit=True, max_epochs=1).fit(Small(), data(2))


def test_without_the_audit_nothing_is_checked_and_no_call_is_wrapped() -> None:
    trainer = quiet(hooks=[Promises()], max_epochs=1)
    trainer.fit(Small(), data(4))
    assert trainer.plan.tracers == ()
    with pytest.raises(HookError, match="audit=True"):
        trainer.hooks.changes()


def test_an_error_of_the_hook_itself_is_not_hidden_by_what_it_has_changed() -> None:
    class Fails(Promises):
        def on_step_end(self, module: Any, step: int) -> None:
            module.head.bias.data.zero_()
            raise ValueError("of its own")

    trainer = quiet(hooks=[Fails()], audit=True, max_epochs=1)
    with pytest.raises(ValueError, match="of its own"):
        trainer.fit(Small(), data(2))
    assert [row.kind for row in trainer.hooks.changes()] == [kinds.PARAMETERS]


def test_the_audit_does_not_change_the_training() -> None:
    def weights(**options: Any) -> Any:
        torch.manual_seed(0)
        module = Small()
        quiet(max_epochs=2, hooks=[Looks()], **options).fit(module, data(4), data(2))
        return module.state_dict()

    plain, checked = weights(), weights(audit=True)
    assert all(torch.equal(plain[name], checked[name]) for name in plain)


class CountsFlops(Hook):
    """Enters a mode of operators in one event and leaves it in another."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_start(self) -> None:
        self.counter: Any = FlopCounterMode(display=False)
        self.counter.__enter__()

    def on_after_backward(self, module: Any) -> None:
        module.head.bias.grad.data.mul_(2)  # seen below the other mode

    def on_train_batch_end(self) -> None:
        self.counter.__exit__(None, None, None)
        self.counts.append(self.counter.get_total_flops())


def test_a_mode_that_a_hook_keeps_entered_works_as_without_the_audit() -> None:
    plain, checked = CountsFlops(), CountsFlops()
    quiet(hooks=[plain], max_epochs=1).fit(Small(), data(2))
    trainer = audited(checked, 2)
    assert plain.counts == checked.counts and min(plain.counts) > 0
    assert (kinds.GRADIENTS, ["head.bias"]) in [(row.kind, row.names) for row in trainer.hooks.changes()]
    assert modes._get_current_dispatch_mode_stack() == []
    assert not modes.is_in_torch_dispatch_mode()  # else torch.compile would do nothing from now on
