"""What one run hands out while it goes: rows of metrics, and the state as a dictionary that is true at every moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, Metrics

# ---- rows --------------------------------------------------------------------------------------------------------


def test_fit_returns_the_newest_metrics_as_floats() -> None:
    metrics = quiet().fit(Net(), batches(), batches(1))
    assert isinstance(metrics, Metrics)
    assert {key: type(value) for key, value in metrics.items()} == {"train/loss": float, "val/loss": float}


# ---- where a run writes ------------------------------------------------------------------------------------------


def test_every_fit_has_a_directory_of_its_own(tmp_path: Path) -> None:
    trainer = quiet(default_root_dir=tmp_path)
    dirs: list[Path] = []
    trainer.on("train_start")(lambda trainer: dirs.append(trainer.run_dir))
    trainer.fit(Net(), batches(1))
    trainer.fit(Net(), batches(1))
    assert len(set(dirs)) == 2
    assert all(each.parent == tmp_path / "runs" and each.is_dir() for each in dirs)


def test_run_dir_names_the_directory(tmp_path: Path) -> None:
    trainer = quiet(run_dir=tmp_path / "here")
    assert trainer.run_dir == tmp_path / "here"


def test_a_run_that_writes_nothing_makes_no_directory(tmp_path: Path) -> None:
    quiet().fit(Net(), batches(), batches(1))
    assert list(tmp_path.iterdir()) == []


# ---- the state as a dictionary -----------------------------------------------------------------------------------

NINE = (
    "model",
    "optimizer",
    "device",
    "current_epoch",
    "current_batch_idx",
    "latest_loss",
    "avg_loss",
    "model_params",
    "status",
)


class Snapshots(Hook):
    """The nine keys at every moment of a run."""

    def __init__(self) -> None:
        self.at: dict[str, list[dict[str, Any]]] = {}

    def keep(self, event: str, state: Any) -> None:
        self.at.setdefault(event, []).append({key: state[key] for key in NINE})

    def setup(self, state: Any) -> None:
        self.keep("setup", state)

    def on_train_start(self, state: Any) -> None:
        self.keep("train start", state)

    def on_train_epoch_start(self, state: Any) -> None:
        self.keep("epoch start", state)

    def on_train_batch_start(self, state: Any) -> None:
        self.keep("batch start", state)

    def on_train_batch_end(self, state: Any, loss: float) -> None:
        self.keep("batch end", state)
        assert state["latest_loss"] == loss

    def on_validation_start(self, state: Any) -> None:
        self.keep("validation start", state)

    def on_train_epoch_end(self, state: Any, metrics: Any) -> None:
        self.keep("epoch end", state)
        assert state["avg_loss"] == pytest.approx(metrics["train/loss"])

    def on_train_end(self, state: Any) -> None:
        self.keep("train end", state)

    def on_exception(self, state: Any) -> None:
        self.keep("exception", state)


def snapshots(**options: Any) -> tuple[Snapshots, Any]:
    hook = Snapshots()
    trainer = quiet(hooks=[hook], max_epochs=2, **options)
    trainer.fit(Net(), [*batches(2, size=3), *batches(1, size=1)], batches(2))
    return hook, trainer


def test_the_nine_keys_are_there_from_the_first_moment_on() -> None:
    hook, trainer = snapshots()
    [first] = hook.at["setup"]
    assert first["model"] is trainer.module
    assert first["device"] == torch.device("cpu")
    assert first["model_params"] == 10
    assert (first["optimizer"], first["latest_loss"], first["avg_loss"]) == (None, None, None)
    assert (first["current_epoch"], first["current_batch_idx"], first["status"]) == (0, 0, "training")


def test_the_state_follows_the_batches() -> None:
    hook, trainer = snapshots()
    ends = hook.at["batch end"]
    assert [(each["current_epoch"], each["current_batch_idx"]) for each in ends] == [
        (e, b) for e in range(2) for b in range(3)
    ]
    assert all(each["optimizer"] is trainer.optimizers[0] for each in ends)
    assert all(each["status"] == "training" for each in ends)


def test_the_average_is_that_of_this_epoch_so_far_weighted_by_batch_size() -> None:
    hook, _ = snapshots()
    sizes = [3, 3, 1]
    for epoch in range(2):
        ends = hook.at["batch end"][3 * epoch : 3 * epoch + 3]
        for done in range(1, 4):
            parts = list(zip(ends[:done], sizes, strict=False))
            mean = sum(each["latest_loss"] * size for each, size in parts) / sum(size for _, size in parts)
            assert ends[done - 1]["avg_loss"] == pytest.approx(mean)


def test_the_state_at_an_epochs_start_is_not_that_of_the_last_epochs_end() -> None:
    hook, _ = snapshots()
    starts = hook.at["epoch start"]
    assert [each["current_epoch"] for each in starts] == [0, 1]
    assert [each["avg_loss"] for each in starts] == [None, None]
    assert [each["current_batch_idx"] for each in starts] == [0, 0]


def test_the_newest_training_loss_is_still_there_after_a_validation() -> None:
    hook, _ = snapshots()
    for end, before, after in zip(
        hook.at["batch end"][2::3], hook.at["validation start"], hook.at["epoch end"], strict=True
    ):
        assert end["latest_loss"] == before["latest_loss"] == after["latest_loss"]
        assert end["avg_loss"] == before["avg_loss"] == after["avg_loss"]
        assert end["current_batch_idx"] == after["current_batch_idx"] == 2


def test_the_status_tells_how_the_run_ended() -> None:
    hook, trainer = snapshots()
    assert hook.at["train end"][0]["status"] == trainer.state["status"] == "completed"
    hook = Snapshots()
    trainer = quiet(hooks=[hook])
    trainer.on("step_end")(lambda: 1 / 0 and None)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Net(), batches())
    assert hook.at["exception"][0]["status"] == trainer.state["status"] == "error"


def test_hooks_may_leave_notes_for_each_other_in_the_state_but_not_overwrite_facts() -> None:
    class Producer(Hook):
        def on_train_batch_end(self, state: Any, batch_idx: int) -> None:
            state["from producer"] = batch_idx

    class Consumer(Hook):
        def on_train_batch_end(self, state: Any, batch_idx: int) -> None:
            assert state["from producer"] == batch_idx
            with pytest.raises(TypeError, match="is a fact of the run"):
                state["status"] = "completed"
            self.heard = True

    consumer = Consumer()
    quiet(hooks=[Producer(), consumer]).fit(Net(), batches(2))
    assert consumer.heard
