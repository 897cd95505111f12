"""The step of a run is made of what the run needs, and of nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook
from hookline.training.accumulation import AccumulatedStep, CheckedCountedStep, CheckedStep, CountedStep
from hookline.training.composition import set_accumulation
from hookline.training.manual import ManualStep
from hookline.training.step import TrainStep


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return loss


class Searching(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


class Asks(Hook):
    """Keeps the step of its run."""

    step: Any = None

    def on_train_batch_start(self, trainer: Any) -> None:
        self.step = trainer._run.step


def step_of(net: Net | None = None, *hooks: Hook, **options: Any) -> Any:
    asks = Asks()
    quiet(hooks=[asks, *hooks], **options).fit(net or Net(), batches(2))
    return asks.step


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, TrainStep),
        ({"accumulate_grad_batches": 2}, AccumulatedStep),
        ({"nonfinite": "skip"}, CheckedStep),
        ({"nonfinite": "skip", "accumulate_grad_batches": 2}, CheckedStep),
        ({"accumulate_by": "samples", "accumulate_grad_batches": 2}, CountedStep),
        ({"accumulate_by": "samples", "accumulate_grad_batches": 2, "nonfinite": "skip"}, CheckedCountedStep),
    ],
    ids=str,
)
def test_the_options_decide_the_class_of_the_step(options: dict[str, Any], kind: type) -> None:
    assert type(step_of(**options)) is kind


def test_a_manual_module_has_its_own_step() -> None:
    assert type(step_of(ByHand())) is ManualStep


def test_a_plain_run_has_nothing_around_backward_and_update() -> None:
    step = step_of()
    assert step.backward._factors == step.backward._restore == ()
    assert step.update.checks == step.update.adjustments == step.update.recorders == step.update.closing == ()


class AsksForNorm(Hook):
    def on_step_end(self, grad_norm: float) -> None: ...


@pytest.mark.parametrize(
    ("net", "hooks", "options", "counts"),
    [
        # checks, adjustments, closing, factors
        (Net, (), {"gradient_clip_val": 1.0}, (0, 1, 0, 0)),
        (Searching, (), {}, (1, 1, 0, 0)),  # its own evaluations change the gradients
        (Searching, (), {"gradient_clip_val": 1.0}, (0, 2, 0, 0)),
        (Net, (AsksForNorm,), {}, (0, 0, 0, 0)),  # measured when it is read
        (Net, (), {"precision": "16-mixed"}, (1, 0, 1, 1)),
        (Net, (), {"accumulate_grad_batches": 2}, (0, 0, 0, 1)),
        (
            Net,
            (),
            {"precision": "16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
            (1, 1, 1, 2),
        ),
    ],
)
def test_each_need_adds_its_call(
    net: Any, hooks: Any, options: dict[str, Any], counts: tuple[int, ...]
) -> None:
    step = step_of(net(), *(hook() for hook in hooks), **options)
    update = step.update
    found = (update.checks, update.adjustments, update.closing, step.backward._factors)
    assert tuple(map(len, found)) == counts


def test_another_number_of_batches_holds_from_the_next_window() -> None:
    kinds: list[type] = []

    class Changes(Hook):
        def on_train_batch_start(self, trainer: Any, batch_idx: int) -> None:
            kinds.append(type(trainer._run.step))

        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                set_accumulation(trainer._run, 3)

    trainer = quiet(hooks=[Changes()])
    trainer.fit(Net(), batches(8))
    assert trainer.global_step == 2 + 2
    assert kinds == [TrainStep] * 2 + [AccumulatedStep] * 6
