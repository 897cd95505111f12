"""Resumes under odd circumstances: cut again before the data is open, with another interval, moved, after a second start."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Net, batches, quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hookline import CheckpointError, Hook, Preempted
from hookline.hooks.model_checkpoint import ModelCheckpoint


class Noisy(Net):
    """Draws from the main random stream in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(batch[0] + torch.randn_like(batch[0])), batch[1])


def shuffled() -> DataLoader[Any]:
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(
        TensorDataset(inputs, inputs[:, :2]), 4, shuffle=True, generator=torch.Generator().manual_seed(3)
    )


def terminated(
    run_dir: Path, event: str, at: int, hooks: Any = (), net: type[Net] = Noisy, resume: Any = None
) -> None:
    """A run that gets SIGTERM when an event is heard and so many batches were seen."""
    torch.manual_seed(1)
    trainer = quiet(run_dir=run_dir, max_epochs=3, seed=1, hooks=hooks)

    def cut(batches_seen: int) -> None:
        if batches_seen == at:
            if resume is not None:
                torch.rand(3)  # what is drawn before a resumed run continues is no part of it
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.on(event)(cut)
    with pytest.raises(Preempted):
        trainer.fit(net(), shuffled(), batches(2), resume=resume)


def finish(run_dir: Path, hooks: Any = (), net: type[Net] = Noisy) -> Net:
    torch.manual_seed(1)
    module = net()
    quiet(run_dir=run_dir, max_epochs=3, seed=1, hooks=hooks).fit(
        module, shuffled(), batches(2), resume="auto"
    )
    return module


# ---- cut before the data is open ---------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [6, 8])
@pytest.mark.parametrize("event", ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_a_run_cut_again_while_it_is_taken_up_ends_as_the_whole_one(
    tmp_path: Path, event: str, at: int
) -> None:
    whole = finish(tmp_path / "whole")
    terminated(tmp_path / "cut", "on_train_batch_end", at)
    terminated(tmp_path / "cut", event, at if event != "setup" else 0, resume="auto")
    assert torch.equal(finish(tmp_path / "cut").layer.weight, whole.layer.weight)


class DrawsAtEpochStart(Hook):
    def on_train_epoch_start(self) -> None:
        torch.rand(1)


def test_what_an_epoch_draws_when_it_begins_is_not_drawn_twice_after_a_signal_there(tmp_path: Path) -> None:
    whole = finish(tmp_path / "whole", [DrawsAtEpochStart()])
    terminated(tmp_path / "cut", "on_train_epoch_start", 4, [DrawsAtEpochStart()])
    assert torch.equal(finish(tmp_path / "cut", [DrawsAtEpochStart()]).layer.weight, whole.layer.weight)


# ---- a validation that is cut short leaves no trace --------------------------------------------------------------


class CountsInAnArray(Hook):
    def __init__(self) -> None:
        super().__init__()
        self.seen = np.zeros(1)

    def on_validation_batch_end(self) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = np.array(state["seen"])


class CountsInABuffer(Noisy):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return super().validation_step(batch, batch_idx)


def test_arrays_that_a_hook_keeps_do_not_count_a_validation_twice(tmp_path: Path) -> None:
    terminated(tmp_path, "on_validation_batch_end", 4, [CountsInAnArray()])
    counts = CountsInAnArray()
    finish(tmp_path, [counts])
    assert counts.seen[0] == 6


def test_buffers_of_the_module_do_not_count_a_validation_twice(tmp_path: Path) -> None:
    terminated(tmp_path, "on_validation_batch_end", 4, net=CountsInABuffer)
    module = finish(tmp_path, net=CountsInABuffer)
    assert isinstance(module, CountsInABuffer)
    assert module.seen.item() == 6


# ---- optimizers and schedulers -----------------------------------------------------------------------------------


class DoubleMomentum(torch.optim.Optimizer):
    """Keeps more digits than its parameters have, as optimizers for half precision do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault(
                "momentum", torch.zeros(parameter.shape, dtype=torch.float64)
            )
            momentum.mul_(0.9).add_(parameter.grad.double())
            parameter.data.sub_((0.1 * momentum).to(parameter.dtype))
        return loss


class Precise(Noisy):
    def configure_optimizers(self) -> Any:
        return DoubleMomentum(self.parameters())


def test_an_optimizer_gets_all_the_digits_back_that_it_kept(tmp_path: Path) -> None:
    whole = finish(tmp_path / "whole", net=Precise)
    terminated(tmp_path / "cut", "on_train_batch_end", 6, net=Precise)
    assert torch.equal(finish(tmp_path / "cut", net=Precise).layer.weight, whole.layer.weight)


class Scheduled(Net):
    def __init__(self, schedulers: int) -> None:
        super().__init__()
        self.schedulers = schedulers

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [
            torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for _ in range(self.schedulers)
        ]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_schedulers_is_refused_like_another_number_of_optimizers(
    tmp_path: Path, before: int, after: int
) -> None:
    quiet(run_dir=tmp_path, hooks=[ModelCheckpoint()]).fit(Scheduled(before), batches())
    with pytest.raises(CheckpointError, match="schedulers"):
        quiet(run_dir=tmp_path, max_epochs=2).fit(Scheduled(after), batches(), resume="auto")


# ---- filters -----------------------------------------------------------------------------------------------------


def fired_after_resume(tmp_path: Path, first: dict[str, Any], then: dict[str, Any]) -> list[int]:
    """The steps at which a function is heard after step 8, when its filter is another one than before."""
    trainer = quiet(run_dir=tmp_path, max_epochs=2, hooks=[ModelCheckpoint(name="keep")])
    trainer.on("on_step_end", name="listens", **first)(lambda step: None)
    trainer.fit(Net(), batches(4))
    heard: list[int] = []
    trainer = quiet(run_dir=tmp_path, max_epochs=5, hooks=[ModelCheckpoint(name="keep")])
    trainer.on("on_step_end", name="listens", **then)(lambda step: heard.append(step))
    trainer.fit(Net(), batches(4), resume="auto")
    return heard


def test_another_interval_than_before_the_resume_fires_when_it_is_due(tmp_path: Path) -> None:
    assert fired_after_resume(tmp_path, {"every": "1 steps"}, {"every": "4 steps"}) == [12, 16, 20]


def test_a_finer_interval_does_not_fire_out_of_step(tmp_path: Path) -> None:
    assert fired_after_resume(tmp_path, {"every": "8 steps"}, {"every": "4 steps"}) == [12, 16, 20]


def test_a_filter_of_another_kind_begins_to_count_at_the_resume(tmp_path: Path) -> None:
    assert fired_after_resume(tmp_path, {"once": True}, {"every": "4 steps"}) == [12, 16, 20]


# ---- which run ---------------------------------------------------------------------------------------------------


def train_until(run_dir: Path, epochs: int) -> ModelCheckpoint:
    """Each epoch scores less than the one before."""
    keep = ModelCheckpoint(monitor="score", mode="max", save_top_k=1, save_last=True)
    quiet(run_dir=run_dir, max_epochs=epochs, hooks=[keep]).fit(
        GetsWorse(), batches(2), batches(1), resume="auto"
    )
    return keep


class GetsWorse(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("score", 1.0 / (1 + self.trainer.current_epoch))
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("how", ["moved", "copied", "spelled otherwise"])
def test_the_best_checkpoint_is_still_known_when_the_run_has_been(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old, new = Path("old"), Path("new")
    train_until(old, 2)
    if how == "moved":
        old.rename(new)
    elif how == "copied":
        shutil.copytree(old, new)
    else:
        new = old.resolve()
    keep = train_until(new, 4)
    assert keep.best_model_score == 1.0
    assert Path(keep.best_model_path) == new / "checkpoints" / "epoch=0-step=2"
    assert sorted(each.name for each in (new / "checkpoints").iterdir()) == ["epoch=0-step=2", "last"]
    assert old.exists() is (how != "moved")


def test_a_moved_run_writes_nothing_at_its_old_place(tmp_path: Path) -> None:
    def train(name: str, epochs: int) -> None:
        keep = ModelCheckpoint(monitor="val/loss", save_top_k=2)
        quiet(run_dir=tmp_path / name, max_epochs=epochs, hooks=[keep]).fit(
            Net(0.01), batches(2), batches(1), resume="auto"
        )

    train("old", 2)
    (tmp_path / "old").rename(tmp_path / "new")
    train("new", 3)
    assert [each.name for each in tmp_path.iterdir()] == ["new"]


def test_the_best_of_a_trainer_that_has_trained_is_not_that_of_another_run(tmp_path: Path) -> None:
    def train(lr: float) -> tuple[Any, Net]:
        net = Net(lr)
        with torch.no_grad():
            net.layer.weight.fill_(1.0)
        trainer = quiet(default_root_dir=tmp_path, hooks=[ModelCheckpoint(monitor="val/loss")])
        trainer.fit(net, batches(4), batches(4))
        return trainer, net

    train(0.1)
    trainer, net = train(1e-9)
    trained = net.layer.weight.clone()
    trainer.validate(net, batches(4), checkpoint="best")
    assert torch.equal(net.layer.weight, trained)


def test_a_finished_run_taken_up_by_a_path_and_killed_continues(tmp_path: Path) -> None:
    def train(resume: Any, fail_at: int = -1) -> Any:
        trainer = quiet(
            run_dir=tmp_path, max_epochs=3, hooks=[ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)]
        )

        def fail(step: int) -> None:
            if step == fail_at:
                raise RuntimeError("killed")

        trainer.on("on_train_batch_start")(fail)
        trainer.fit(Net(), batches(4), resume=resume)
        return trainer

    train(None)
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "checkpoints" / "epoch=0-step=4", fail_at=7)
    assert train("auto").global_step == 12


# ---- weights of a checkpoint -------------------------------------------------------------------------------------


class BuiltLate(Net):
    """Makes a layer in `configure_model`, and keeps something of its own in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.late: nn.Module | None = None
        self.told = 0

    def configure_model(self) -> None:
        if self.late is None:
            self.late = nn.Linear(2, 2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["told"] = 7

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.told = checkpoint["told"]


def test_validating_a_checkpoint_of_a_module_that_makes_its_layers_late(tmp_path: Path) -> None:
    first = BuiltLate()
    quiet(run_dir=tmp_path, hooks=[ModelCheckpoint()]).fit(first, batches())
    second = BuiltLate()
    quiet(run_dir=tmp_path).validate(second, batches(), checkpoint="auto")
    assert torch.equal(first.get_parameter("late.weight"), second.get_parameter("late.weight"))
    assert second.told == 7


# ---- where -------------------------------------------------------------------------------------------------------


def test_a_relative_run_dir_stays_where_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    trainer = quiet(run_dir="run", hooks=[ModelCheckpoint(every_n_train_steps=1)], checkpoint=True)
    trainer.on("on_step_end", once=True, after="2 steps")(lambda: os.chdir(tmp_path / "elsewhere"))
    trainer.fit(Net(), batches(4))
    assert sorted(each.name for each in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "epoch=0-step=4",
        "last",
    ]
    assert not list((tmp_path / "elsewhere").iterdir())
