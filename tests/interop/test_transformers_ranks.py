"""Callbacks of transformers on two ranks of Hookline's: what one of them asks for in `control` is done by both."""

from __future__ import annotations

import json
from typing import Any

import pytest
from interop.processes import IMPORTED
from ranks.torchrun import torchrun

SCRIPT = """
import json, sys
from tiny import Net, batches, quiet
from transformers import TrainerCallback
from hookline import Hook

class Asks(TrainerCallback):
    def __init__(self, what, ranks):
        self.what, self.ranks = what, ranks

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and self.rank in self.ranks:
            setattr(control, self.what, True)
        return control

class Epochs(Hook):
    def __init__(self):
        self.lengths = []

    def on_train_epoch_start(self):
        self.lengths.append(0)

    def on_train_batch_end(self):
        self.lengths[-1] += 1

for what, ranks in [("should_epoch_stop", (0, 1)), ("should_epoch_stop", (1,)), ("should_training_stop", (1,))]:
    asks, epochs = Asks(what, ranks), Epochs()
    trainer = quiet(hooks=[asks, epochs], strategy="ddp", max_epochs=2)
    asks.rank = trainer.strategy.rank
    trainer.fit(Net(), batches(16))  # eight for each rank
    print("RESULT", json.dumps([what, len(ranks), epochs.lengths]), flush=True)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[Any]]:
    """How long the epochs were on each rank, by what was asked for and by how many."""
    outcome = torchrun(SCRIPT, tmp_path_factory.mktemp("two"), deadline=300, **IMPORTED)
    assert outcome.code == 0, outcome.output
    found: dict[tuple[str, int], list[Any]] = {}
    for what, asking, lengths in map(json.loads, outcome.lines("RESULT")):
        found.setdefault((what, asking), []).append(lengths)
    return found


def test_an_epoch_that_all_ranks_end_ends_before_the_next_batch(told: Any) -> None:
    assert told["should_epoch_stop", 2] == [[3, 8]] * 2


def test_an_epoch_that_one_rank_ends_ends_for_both_within_two_batches(told: Any) -> None:
    zero, one = told["should_epoch_stop", 1]
    assert zero == one and zero[0] in (4, 5) and zero[1] == 8


def test_a_stop_that_one_rank_asks_for_ends_both_within_two_batches(told: Any) -> None:
    zero, one = told["should_training_stop", 1]
    assert zero == one and len(zero) == 1 and zero[0] in (4, 5)
