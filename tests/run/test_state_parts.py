"""The parts of the state: counts, the request to stop, and facts that only their owner writes."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import Net, batches, quiet

from hookline import Hook, State
from hookline.run.state import STATE_PARTS


class Watch(Hook):
    """Calls `look(state)` at the end of every batch."""

    def __init__(self, look: Any) -> None:
        self.look = look

    def on_train_batch_end(self, state: State) -> None:
        self.look(state)


def test_counts_are_of_finished_things() -> None:
    seen: list[tuple[int, ...]] = []
    look = Watch(lambda s: seen.append((s.batches_seen, s.samples_seen, s.step, s.epoch, s.epochs_seen)))
    trainer = quiet(max_epochs=2, hooks=[look])
    trainer.fit(Net(), batches(2, size=3))
    assert seen == [(1, 3, 1, 0, 0), (2, 6, 2, 0, 0), (3, 9, 3, 1, 1), (4, 12, 4, 1, 1)]
    assert trainer.state.epochs_seen == 2


def test_a_request_to_stop_keeps_its_first_reason() -> None:
    state = State()
    state.request_stop("first")
    state.request_stop("second")
    assert state.should_stop and state.stop_reason == "first"


def test_a_state_shows_every_fact_of_its_parts_and_lets_none_be_written() -> None:
    state = State()
    for part in STATE_PARTS:
        for name in part.__slots__:
            assert isinstance(getattr(State, name), property), name
            assert getattr(state, name) == getattr(state.owner(name), name)
            with pytest.raises(AttributeError):
                setattr(state, name, None)
