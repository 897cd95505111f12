"""The walk of a foreign callback, as CONTRIBUTING.md describes it: taken from a run with a real Lightning callback."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from test_walks import called, described
from tiny import Net, batches, quiet


class Listens(Callback):
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None: ...


def test_a_foreign_callback_is_adapted_where_the_guide_says() -> None:
    listed = described("a foreign callback")
    calls = called(lambda: quiet(hooks=[Listens()]).fit(Net(), batches(2)))
    assert listed and [each for each in listed if each not in calls] == []
    assert sorted(listed, key=calls.index) == listed, "another order"
    assert len({file for file, _ in listed}) <= 4
