"""What a checkpoint holds of hooks is put back into them: in order, and in an evaluation too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import CheckpointError, Hook, parameter_groups
from hookline.hooks.early_stopping import EarlyStopping
from hookline.hooks.model_checkpoint import ModelCheckpoint


class Worse(Net):
    """Its validation gets worse and worse."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.tensor(1.0 + self.trainer.current_epoch)


class Notes(Hook):
    """Notes when it is asked for its state, and when it gets it back."""

    def __init__(self, name: str, seen: list[str], tier: str = "user", order: int | None = None) -> None:
        super().__init__(name)
        self.seen, self.tier, self.order, self.found = seen, tier, order, 0

    def on_save_checkpoint(self) -> None:
        self.seen.append(f"{self.name}: on_save_checkpoint")

    def state_dict(self) -> dict[str, Any]:
        self.seen.append(f"{self.name}: state_dict")
        return {"found": self.found}

    def on_load_checkpoint(self) -> None:
        self.seen.append(f"{self.name}: on_load_checkpoint")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.append(f"{self.name}: load_state_dict")
        self.found = state["found"]


IN_ORDER = ["first", "user", "late user", "built-in", "monitor"]


def noting(seen: list[str]) -> list[Notes]:
    return [
        Notes("monitor", seen, "monitor"),
        Notes("user", seen),
        Notes("built-in", seen, "builtin"),
        Notes("late user", seen),
        Notes("first", seen, "monitor", order=-1),
    ]


def test_hooks_get_their_state_in_the_order_in_which_they_hear_of_the_checkpoint(tmp_path: Path) -> None:
    seen: list[str] = []
    trainer = quiet(hooks=noting([]))
    trainer.fit(Net(), batches(1))
    trainer.save_checkpoint(tmp_path / "kept")
    quiet(hooks=noting(seen), max_epochs=2).fit(Net(), batches(1), resume=tmp_path / "kept")
    assert seen == [
        f"{name}: {call}" for call in ("on_load_checkpoint", "load_state_dict") for name in IN_ORDER
    ]


def test_hooks_are_asked_for_their_state_in_the_same_order(tmp_path: Path) -> None:
    seen: list[str] = []
    trainer = quiet(hooks=noting(seen))
    trainer.fit(Net(), batches(1))
    seen.clear()
    trainer.save_checkpoint(tmp_path / "kept")
    assert seen == [f"{name}: {call}" for call in ("state_dict", "on_save_checkpoint") for name in IN_ORDER]


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_monitors_get_their_state_when_a_checkpoint_is_evaluated(tmp_path: Path, verb: str) -> None:
    keep = ModelCheckpoint("val/loss")
    quiet(run_dir=tmp_path, hooks=[keep, EarlyStopping("val/loss")]).fit(Net(), batches(2), batches(1))
    again, stopping = ModelCheckpoint("val/loss"), EarlyStopping("val/loss")
    trainer = quiet(run_dir=tmp_path, hooks=[again, stopping])
    during: list[Any] = []
    trainer.on(f"{verb if verb != 'validate' else 'validation'}_start")(
        lambda: during.append(again.best_model_score)
    )
    getattr(trainer, verb)(Net(), batches(1), checkpoint="best")
    assert again.best_model_score == stopping.best_score == keep.best_model_score is not None
    assert again.best_model_path == keep.best_model_path
    assert during == [keep.best_model_score]


def test_monitors_of_a_trainer_that_has_trained_keep_what_they_found(tmp_path: Path) -> None:
    seen: list[str] = []
    monitor, stopping = Notes("monitor", seen, "monitor"), EarlyStopping("val/loss", patience=1)
    trainer = quiet(run_dir=tmp_path, hooks=[ModelCheckpoint("val/loss"), monitor, stopping], max_epochs=5)
    net = Worse()
    trainer.fit(net, batches(2), batches(1))
    assert (trainer.status, stopping.stopped_epoch) == ("stopped", 1)
    monitor.found = 7
    seen.clear()
    during: list[Any] = []
    trainer.on("test_start")(lambda: during.append((monitor.found, stopping.stopped_epoch)))
    trainer.test(net, batches(1), checkpoint="best")
    assert during == [(0, None)]
    assert (monitor.found, stopping.stopped_epoch) == (7, 1)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_an_evaluation_of_a_checkpoint_shows_its_counters_only_while_it_runs(
    tmp_path: Path, verb: str
) -> None:
    trainer = quiet(run_dir=tmp_path, hooks=[ModelCheckpoint("val/loss")], max_epochs=3)
    net, during = Worse(), []
    trainer.fit(net, batches(2), batches(1))
    word = "validation" if verb == "validate" else verb
    trainer.on(f"{word}_start")(lambda step, epoch: during.append((step, epoch)))
    for module in (net, Worse()):
        getattr(trainer, verb)(module, batches(1), checkpoint="best")
        assert (trainer.global_step, trainer.current_epoch) == (6, 2)
    assert during == [(2, 0), (2, 0)]


class Grouped(Net):
    """Has groups for its optimizer by rules."""

    def __init__(self, rules: Any) -> None:
        super().__init__()
        self.rules = rules

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(parameter_groups(self, self.rules, lr=0.1))


def test_parameter_groups_of_other_rules_are_refused_and_of_the_same_rules_restored(tmp_path: Path) -> None:
    rules = {"biases": {"weight_decay": 0.0}}
    first = quiet(run_dir=tmp_path, max_epochs=1)
    first.fit(Grouped(rules), batches(2))
    first.save_checkpoint(tmp_path / "one")
    for others, said in (
        (
            {"*": {"lr": 0.1}},
            r"layer.weight is in group 'rest', at place 0 in the checkpoint, and in group '\*', at place 0",
        ),
        (
            {"layer.*": {"lr": 0.2}, "biases": {"weight_decay": 0.0}},
            "Resume with the same parameters in the same groups",
        ),
    ):
        with pytest.raises(CheckpointError, match=said):
            quiet(max_epochs=2).fit(Grouped(others), batches(2), resume=tmp_path / "one")
    again = quiet(max_epochs=2)
    again.fit(Grouped(rules), batches(2), resume=tmp_path / "one")
    assert [each["name"] for each in again.optimizers[0].param_groups] == ["rest", "biases"]
    assert again.global_step == 4
