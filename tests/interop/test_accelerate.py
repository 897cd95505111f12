"""Hooks in a loop on Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from tiny import batches
from torch.nn.functional import mse_loss

import hookline
from hookline import Hook, every

pytestmark = pytest.mark.filterwarnings("default")


class Counts(Hook):
    """Counts, on a schedule, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    @every("2 steps")
    def on_step_end(self, step: int) -> None:
        self.steps.append(step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


def a_line(hook: Hook, window: int = 2, scheduler: bool = False) -> tuple[Any, Any, Any, Any]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=window)
    line = hookline.hosts.accelerate(accelerator, hooks=[hook])
    net = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    more = [torch.optim.lr_scheduler.StepLR(sgd, 1)] if scheduler else []
    net, sgd, *_ = line.prepare(net, sgd, *more)
    return accelerator, line, net, sgd


def train(accelerator: Any, line: Any, net: Any, sgd: Any, epochs: int = 1) -> None:
    with line:
        for _ in line.epochs(epochs):
            for x, y in line.epoch(batches(6)):
                with accelerator.accumulate(net):
                    line.backward(mse_loss(net(x), y))
                    if accelerator.sync_gradients:
                        line.clip_gradients(1.0)
                    sgd.step()
                    sgd.zero_grad()


def test_what_is_prepared_is_what_is_listened_to() -> None:
    accelerator, line, net, sgd = a_line(Counts(), scheduler=True)
    assert line.module is accelerator.unwrap_model(net) and line.state.wrapped_model is net
    assert line.optimizers == [sgd.optimizer] and len(line.state.schedulers) == 1
    assert (line.device, line.outer, line.state.rank, line.state.world_size) == (
        accelerator.device,
        accelerator,
        0,
        1,
    )


def test_steps_are_those_that_accelerate_really_makes_and_losses_are_whole() -> None:
    class Looks(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def on_gradient_clip(self, grad_norm: float) -> None:
            self.seen.append("clip")

        def on_before_zero_grad(self) -> None:
            self.seen.append("zero")

        def on_step_end(self, step: int, batches_seen: int) -> None:
            self.seen.append((step, batches_seen))

    hook = Looks()
    train(*a_line(hook))
    assert hook.seen == ["clip", "zero", (1, 2), "clip", "zero", (2, 4), "clip", "zero", (3, 6)]


def test_the_hooks_state_is_part_of_accelerate_s_own(tmp_path: Path) -> None:
    first, second = Counts(), Counts()
    accelerator, line, net, sgd = a_line(first)
    accelerator.register_for_checkpointing(line)
    train(accelerator, line, net, sgd)
    accelerator.save_state(str(tmp_path))

    accelerator, line, net, sgd = a_line(second)
    accelerator.register_for_checkpointing(line)
    accelerator.load_state(str(tmp_path))
    train(accelerator, line, net, sgd, epochs=2)
    assert (first.steps, second.steps) == ([2], [2, 4, 6])
    assert line.global_step == 6 and line.state.resumed


def test_a_run_without_a_model_says_what_is_missing() -> None:
    line = hookline.hosts.accelerate(accelerate.Accelerator(cpu=True))
    with pytest.raises(hookline.OptionError, match="needs the model that is trained"), line:
        pass


def test_what_is_prepared_in_several_calls_is_heard() -> None:
    hook = Counts()
    line = hookline.hosts.accelerate(accelerate.Accelerator(cpu=True), hooks=[hook])
    layer = torch.nn.Linear(4, 2)
    net = line.prepare(layer)
    sgd = line.prepare(torch.optim.SGD(layer.parameters(), lr=0.1))
    train(line.outer, line, net, sgd)
    assert line.global_step == 6 and hook.steps == [2, 4, 6]


def test_with_a_scaler_hooks_see_the_gradients_unscaled_and_not_yet_clipped() -> None:
    class Looks(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def on_before_optimizer_step(self, module: Any) -> None:
            self.seen.append(float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])))

        def on_step_end(self, grad_norm: float) -> None:
            self.seen.append(grad_norm)

        def on_step_skipped(self, reason: str) -> None:
            self.seen.append(reason)

    accelerator, hook, net = accelerate.Accelerator(cpu=True), Looks(), torch.nn.Linear(4, 2)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # as on a GPU with fp16
    accelerator.native_amp = True
    kept, accelerator.state._mixed_precision = accelerator.state._mixed_precision, "fp16"
    try:
        line = hookline.hosts.accelerate(accelerator, hooks=[hook])
        sgd = accelerator.prepare_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        line.attach(net, sgd)
        real, clipped = [], []
        with line:
            for index, (x, y) in enumerate(line.epoch(batches(2))):
                sgd.zero_grad()
                loss = mse_loss(net(x), y)
                gradients = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
                real.append(float(torch.nn.utils.get_total_norm(gradients)))
                line.backward(loss * float("inf") if index else loss)
                line.clip_gradients(0.1)
                clipped.append(
                    float(
                        torch.nn.utils.get_total_norm(
                            [p.grad for p in net.parameters() if p.grad is not None]
                        )
                    )
                )
                sgd.step()
    finally:
        accelerator.state._mixed_precision = kept
    assert hook.seen[:2] == pytest.approx([real[0], real[0]], rel=1e-4) and clipped[0] == pytest.approx(
        0.1, rel=1e-3
    )
    assert hook.seen[3:] == ["nonfinite"] and line.global_step == 1
