"""LRFinder: a useful suggestion, its picture, and a module, optimizer and random streams that are as they were."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Net, batches, quiet
from torch import Tensor, nn
from torch.nn import functional as F

from hookline import SKIP_STEP, Module
from hookline.checkpoint.files import read_manifest
from hookline.hooks.early_stopping import EarlyStopping
from hookline.hooks.lr_finder import LRFinder
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.util.errors import HookError, OptionError


class Valley(Module):
    """A quadratic bowl: steps of plain descent diverge for rates above 1 and hardly move for tiny ones."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.full((4,), 3.0))
        self.register_buffer("seen", torch.zeros(()))
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        return (self.place**2).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_the_suggestion_lies_where_the_loss_falls_and_below_where_it_diverges() -> None:
    finder = LRFinder(1e-5, 100.0, steps=80)
    suggestion = finder.find(quiet(), Valley(), batches(4))
    assert suggestion is not None and suggestion == finder.suggestion
    assert 1e-3 < suggestion < 0.5
    assert len(finder.lrs) < 80  # it ended when the loss blew up
    assert finder.lrs[0] == pytest.approx(1e-5)
    ratios = [b / a for a, b in zip(finder.lrs, finder.lrs[1:], strict=False)]
    assert ratios == pytest.approx([(100.0 / 1e-5) ** (1 / 79)] * len(ratios))


def test_the_rates_are_those_the_optimizer_used_whatever_a_scheduler_says() -> None:
    used: list[float] = []

    class Scheduled(Valley):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(
                [{"params": [self.place]}, {"params": [nn.Parameter(torch.ones(1))], "lr": 0.2}], lr=0.1
            )
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_after_optimizer_step(self, optimizer: Any) -> None:
            used.append(optimizer.param_groups[0]["lr"])
            assert optimizer.param_groups[1]["lr"] == pytest.approx(2 * used[-1])

    finder = LRFinder(1e-6, 1e-2, steps=10)
    finder.find(quiet(), Scheduled(), batches(4))
    assert used == pytest.approx(finder.lrs) and len(used) == 10


def test_a_scheduler_that_monitors_a_validation_is_left_out_of_the_search() -> None:
    class Monitored(Valley):
        def configure_optimizers(self) -> Any:
            sgd = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
            return {"optimizer": sgd, "lr_scheduler": {"scheduler": plateau, "monitor": "val/loss"}}

    found = [LRFinder(plot=False).find(quiet(), cls(), batches(4), batches(1)) for cls in (Valley, Monitored)]
    assert found[0] == found[1] is not None


def test_weights_buffers_modes_and_random_streams_are_as_before() -> None:
    net = Valley().eval()
    before = copy.deepcopy(net.state_dict())
    trainer = quiet(seed=3, hooks=[])
    streams = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), 2, shuffle=True)
    torch.set_rng_state(streams[2])
    LRFinder(steps=20).find(trainer, net, loader, loader)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not net.training and net.place.grad is None
    assert random.getstate() == streams[0]
    assert np.array_equal(np.random.get_state()[1], streams[1])
    assert torch.equal(torch.get_rng_state(), streams[2])


def test_training_afterwards_is_the_same_as_without_the_test() -> None:
    def train(find: bool) -> Tensor:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        if find:
            LRFinder(steps=15, plot=False).find(
                quiet(), net, batches(5), loss=F.mse_loss, optimizer=optimizer
            )
            assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.01
        quiet().fit(net, batches(5), loss=F.mse_loss, optimizer=optimizer)
        return torch.cat([each.detach().flatten() for each in (*net.parameters(), *net.buffers())])

    assert torch.equal(train(True), train(False))


def test_as_a_hook_it_turns_the_run_into_the_test() -> None:
    net, finder = Valley(), LRFinder(1e-5, 100.0, steps=60)
    streams = torch.get_rng_state()
    trainer = quiet(max_epochs=1000, hooks=[finder])
    trainer.fit(net, batches(4))
    assert trainer.status == "stopped" and trainer.global_step <= 60
    assert finder.suggestion is not None
    assert torch.equal(net.place, torch.full((4,), 3.0)) and float(net.seen) == 0
    assert torch.equal(torch.get_rng_state(), streams)
    assert [path.name for path in Path().rglob("*.png")] == ["lr_finder.png"]
    assert (trainer.run_dir / "lr_finder.png").read_bytes().startswith(b"\x89PNG")


def test_a_fit_that_ends_before_the_test_says_so_and_matplotlib_is_not_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    quiet(max_epochs=1, hooks=[LRFinder()]).fit(Valley(), batches(4))
    assert "the fit ended after 4 of 100 steps" in caplog.text and "did not fall" not in caplog.text
    assert "lr_finder.png is left out. LRFinder(plot=True) draws" in caplog.text
    assert 'pip install "hookline[plots]"' in caplog.text and not list(Path().rglob("*.png"))


def test_a_loss_that_still_falls_at_the_highest_rate_asks_for_a_higher_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    LRFinder(1e-5, 100.0, steps=80, plot=False).find(quiet(), Valley(), batches(4))
    assert "still fell" not in caplog.text
    LRFinder(1e-5, 1e-2, steps=40, plot=False).find(quiet(), Valley(), batches(4))
    assert "the loss still fell at max_lr=0.01" in caplog.text


def test_a_loss_that_becomes_nan_ends_the_test_not_the_program() -> None:
    class Cliff(Valley):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * math.nan if float(loss.detach()) < 20 else loss

    net, finder = Cliff(), LRFinder(1e-5, 1.0, steps=50)
    finder.find(quiet(), net, batches(4))
    assert 10 < len(finder.losses) < 50 and all(map(math.isfinite, finder.losses))
    assert torch.equal(net.place, torch.full((4,), 3.0))


def test_a_failure_in_the_test_puts_everything_back_too(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Valley):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.seen == 12:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    net = Fails()
    with pytest.raises(RuntimeError, match="broken"):
        LRFinder(1e-2, 1.0).find(quiet(), net, batches(20))
    assert torch.equal(net.place, torch.full((4,), 3.0)) and float(net.seen) == 0
    assert "the fit ended after" not in caplog.text  # the error says why


def test_with_accumulation_a_point_is_the_mean_loss_of_an_update() -> None:
    class Counts(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * 0 + batch_idx % 2

    finder = LRFinder(steps=10, plot=False)
    finder.find(quiet(accumulate_grad_batches=2), Counts(), batches(4))
    assert finder.losses == [0.5] * 10
    assert finder.suggestion is None  # the loss did not fall


def test_an_update_that_was_skipped_is_no_point_of_the_curve() -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.good = batch_idx % 2 == 1
            return super().training_step(batch, batch_idx) * 0 + (1 if self.good else 100)

        def on_before_optimizer_step(self) -> Any:
            return None if self.good else SKIP_STEP

    finder = LRFinder(steps=10, plot=False)
    finder.find(quiet(), Skips(), batches(4))
    assert finder.losses == [1.0] * 10


def test_the_curve_is_drawn_with_the_suggestion_marked() -> None:
    finder = LRFinder(1e-5, 100.0, steps=60)
    finder.find(quiet(), Valley(), batches(4))
    axes = finder.figure().axes[0]
    points, smooth, *_ = axes.get_lines()
    assert axes.get_xscale() == "log"
    assert list(points.get_xdata()) == finder.lrs and list(points.get_ydata()) == finder.losses
    assert len(smooth.get_ydata()) == len(finder.lrs)
    assert any("suggestion" in text.get_text() for text in axes.get_legend().get_texts())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_lr": 1.0, "max_lr": 0.1}, "the first below the second"),
        ({"min_lr": 0}, "two numbers above 0"),
        ({"steps": 3}, "steps=3 must be a whole number from 10"),
        ({"divergence": 1}, "divergence=1"),
        ({"plot": 1}, "True or False"),
    ],
)
def test_wrong_parameters_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LRFinder(**arguments)


def test_what_cannot_be_tested_is_refused() -> None:
    with pytest.raises(OptionError, match="min_epochs=1"):
        quiet(hooks=[LRFinder()], min_epochs=1).fit(Net(), batches(1))
    with pytest.raises(HookError, match="no optimizer"):

        class Manual(Net):
            automatic_optimization = False

            def configure_optimizers(self) -> Any:
                return None

        quiet(hooks=[LRFinder()]).fit(Manual(), batches(1))


def test_beside_a_range_test_nothing_is_saved_or_stopped_by_monitors_which_are_back_afterwards() -> None:
    class Watched(Valley):
        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.place**2).sum()

    keep = ModelCheckpoint(monitor="val/loss", save_top_k=-1, save_last=True, save_on_exception=True)
    often = ModelCheckpoint(every_n_train_steps=1, dirpath="often", name="often")
    stop = EarlyStopping(monitor="val/loss", patience=1)
    finder = LRFinder(1e-5, 100.0, steps=60)
    trainer = quiet(max_epochs=1000, hooks=[keep, often, stop, finder], num_sanity_val_steps=1)
    trainer.disable_hook("often")
    trainer.fit(Watched(), batches(4), batches(1))
    assert finder.suggestion is not None and len(finder.lrs) > 30
    assert not list(trainer.run_dir.rglob("manifest.json"))
    assert "often" not in trainer.hooks.list_hooks()  # what the user has switched off stays off
    trainer.remove_hook("lr_finder")
    trainer.options.max_epochs = 1
    trainer.fit(Watched(), batches(4), batches(1))
    assert Path(keep.best_model_path).is_dir() and keep.last_model_path


def test_a_range_test_that_fails_saves_nothing_and_gives_the_monitors_back() -> None:
    keep = ModelCheckpoint(save_on_exception=True)

    class Fails(Valley):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.seen == 5:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

    trainer = quiet(max_epochs=10, hooks=[keep, LRFinder(steps=20, plot=False)])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Fails(), batches(4))
    assert not list(trainer.run_dir.rglob("manifest.json"))
    assert "model_checkpoint" in trainer.hooks.list_hooks()


def test_a_search_leaves_the_models_of_its_directory_alone() -> None:
    trainer = quiet(run_dir="run", checkpoint=True)
    trainer.fit(Net(), batches(2))
    before = read_manifest(Path("run/checkpoints/last"))
    LRFinder(steps=20).find(trainer, Net(), batches(20))
    assert read_manifest(Path("run/checkpoints/last")) == before
