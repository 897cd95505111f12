"""What Hookline calls where Lightning has nothing to compare with, held against recorded sequences.

Each line of `recorded/hookline.json` is one moment: the count of updates, the event, and who heard it in which order.
If a sequence changed and that is meant, record it anew and look at every changed line before keeping it:

    python tests/test_hookline_sequences.py && git diff tests/recorded/hookline.json
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from spies import RETURN_NONE, Scene
from torch.optim import LBFGS, SGD

from hookline import END_EPOCH, SKIP_BATCH, SKIP_STEP, STEP_DONE
from hookline.engine.recorder import Call

FILE = Path(__file__).parent / "recorded" / "hookline.json"
RECEIVERS = {"M": "module", "D": "data", "S": "strategy"}


def at_batch(number: int, answer: Any) -> Callable[[Any], Any]:
    """A deed that answers once, at this batch of an epoch."""
    return lambda state: answer if state.batch_idx == number else None


def step_by_hand(state: Any) -> Any:
    if state.batch_idx != 0:
        return None
    state.optimizer.step()
    return STEP_DONE


def nan_loss(state: Any) -> Any:
    return state.module.layer.weight.sum() * float("nan") if state.batch_idx == 0 else None


def two_optimizers(module: Any) -> Any:
    return [SGD([module.layer.weight], lr=0.1), SGD([module.layer.bias], lr=0.1)]


def lbfgs(module: Any) -> Any:
    return LBFGS(module.parameters(), max_iter=2)


def one_sgd(module: Any) -> Any:
    return SGD(module.parameters(), lr=0.1)


def fit(does: dict[str, Any] | None = None, train: int = 2, **settings: Any) -> list[Call]:
    settings = {"optimizers": one_sgd, "num_sanity_val_steps": 0, "limit_val_batches": 0, **settings}
    return Scene(does=does, batches_of={"train": [train]}, **settings).run()


SCENARIOS: dict[str, Callable[[], list[Call]]] = {
    "a batch without a loss": lambda: fit({"module training_step": at_batch(0, RETURN_NONE)}),
    "a window whose last batch has no loss": lambda: fit(
        {"module training_step": at_batch(1, RETURN_NONE)}, accumulate_grad_batches=2
    ),
    "a window without any loss": lambda: fit(
        {"module training_step": lambda state: RETURN_NONE if state.batch_idx < 2 else None},
        train=4,
        accumulate_grad_batches=2,
    ),
    "a loss that is not finite": lambda: fit({"module training_step": nan_loss}, nonfinite="skip"),
    "a hook skips a step": lambda: fit({"plain on_before_optimizer_step": at_batch(0, SKIP_STEP)}),
    "a hook makes the step itself": lambda: fit({"plain on_before_optimizer_step": step_by_hand}),
    "a hook skips a batch": lambda: fit({"plain on_train_batch_start": at_batch(0, SKIP_BATCH)}),
    "a hook skips the last batch of a window": lambda: fit(
        {"plain on_train_batch_start": at_batch(1, SKIP_BATCH)}, accumulate_grad_batches=2
    ),
    "a hook ends the epoch": lambda: fit(
        {"plain on_train_batch_start": at_batch(1, END_EPOCH)}, limit_val_batches=1.0
    ),
    "ending the epoch beats skipping the batch": lambda: fit(
        {
            "plain on_train_batch_start": at_batch(0, END_EPOCH),
            "monitor on_train_batch_start": at_batch(0, SKIP_BATCH),
        }
    ),
    "an epoch ended in an open window": lambda: fit(
        {"module on_train_batch_start": at_batch(1, -1)}, train=4, accumulate_grad_batches=2
    ),
    "an optimizer that recomputes the loss": lambda: fit(optimizers=lbfgs, train=1),
    "two optimizers": lambda: fit(optimizers=two_optimizers, train=1),
    "two optimizers, one step skipped": lambda: fit(
        {"plain on_before_optimizer_step": lambda state: SKIP_STEP if state.optimizer_idx == 0 else None},
        optimizers=two_optimizers,
        train=1,
    ),
    "clipping with two optimizers": lambda: fit(optimizers=two_optimizers, train=1, gradient_clip_val=0.5),
    "a short last window": lambda: fit(train=3, accumulate_grad_batches=2),
    "saving at both save points": lambda: fit(
        {
            "plain on_step_end": lambda state: state.trainer.save_checkpoint("step"),
            "plain on_train_epoch_end": lambda state: state.trainer.save_checkpoint("epoch"),
        },
        train=1,
        limit_val_batches=1.0,
    ),
}


def moments(calls: list[Call]) -> list[str]:
    """Consecutive calls of one event in one line."""
    lines = []
    for (step, event), group in groupby(calls, lambda call: (call.step, call.event)):
        who = " ".join(call.name if call.receiver == "H" else RECEIVERS[call.receiver] for call in group)
        lines.append(f"{step} {event}: {who}")
    return lines


@pytest.mark.parametrize("name", SCENARIOS)
def test_sequence_is_the_recorded_one(name: str) -> None:
    assert moments(SCENARIOS[name]()) == json.loads(FILE.read_text())[name]


def test_nothing_is_recorded_that_is_not_run() -> None:
    assert list(json.loads(FILE.read_text())) == list(SCENARIOS)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as aside:
        os.chdir(aside)  # what the runs save is not kept
        FILE.write_text(
            json.dumps({name: moments(scenario()) for name, scenario in SCENARIOS.items()}, indent=0) + "\n"
        )
