"""Buffers that a batch with a NaN has spoiled: a run that continues, or is resumed, has finite ones."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hookline import SKIP_STEP, Hook, Module, NonFiniteLoss
from hookline.checkpoint.files import read
from hookline.hooks import ExcludeSamples, NaNGuard, SpikeGuard
from hookline.run.buffers import FiniteBuffers, KeptBuffers, find_nonfinite_buffers, find_places

BAD = (5, 14)
"""The samples that have a NaN."""


class Normed(Module):
    """A network with batch norm and with a mask, whose infinities are deliberate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ByHand(Normed):
    """The same with manual optimization, and a second backward pass after the update was skipped."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        optimizer.step()
        if not loss.isfinite():
            loss.backward()
        return loss


def samples(bad: tuple[int, ...] = BAD) -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(20, 4, generator=drawn), torch.randn(20, 2, generator=drawn)
    inputs[list(bad), 0] = math.nan
    return DataLoader(TensorDataset(inputs, targets), batch_size=4)


def fit(net: nn.Module, **options: Any) -> Any:
    trainer = quiet(max_epochs=2, **options)
    trainer.fit(net, samples(), samples(()))
    return trainer


def averages(net: Normed) -> Tensor:
    norm = net.net[1]
    assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None and norm.running_var is not None
    return torch.stack([norm.running_mean, norm.running_var])


# ---- runs that go on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"nonfinite": "skip"},
        {"nonfinite": "skip", "accumulate_grad_batches": 2},
        {"hooks": [NaNGuard(exclude=True)]},
        {"hooks": [NaNGuard(exclude=True, check=["batch", "loss"])]},
        {"hooks": [SpikeGuard("skip")]},
        {"nonfinite": "skip", "hooks": [NaNGuard(break_on_nan=False)]},
    ],
    ids=["skip", "window", "exclude", "batch", "spike", "warn"],
)
def test_a_run_that_skips_a_nan_has_a_model_that_can_be_evaluated(options: dict[str, Any]) -> None:
    net = Normed()
    trainer = fit(net, **options)
    assert trainer.status == "completed"
    assert averages(net).isfinite().all()
    assert math.isfinite(trainer.metrics["val/loss"])


def test_manual_optimization_too() -> None:
    net = ByHand()
    trainer = fit(net, nonfinite="skip")
    assert averages(net).isfinite().all() and math.isfinite(trainer.metrics["val/loss"])


def test_a_skipped_batch_leaves_the_averages_of_the_update_before_it() -> None:
    seen: list[Tensor] = []

    class Look(Hook):
        def on_after_optimizer_step(self, module: Any) -> None:
            seen.append(averages(module))

        def on_step_skipped(self, module: Any) -> None:
            assert torch.equal(averages(module), seen[-1])
            seen.append(averages(module))

    fit(Normed(), nonfinite="skip", hooks=[Look()])
    assert len(seen) == 10


def test_a_batch_that_is_not_finite_is_left_out_before_the_model_is_called() -> None:
    guard, calls = NaNGuard(exclude=True, check=["batch", "loss"]), list[int]()

    class Counts(Normed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert batch[0].isfinite().all()
            calls.append(batch_idx)
            return super().training_step(batch, batch_idx)

    fit(Counts(), hooks=[guard])
    assert guard.found == guard.excluded == 2
    assert calls == [0, 2, 4, 0, 1, 2, 3, 4]


# ---- runs that stop --------------------------------------------------------------------------------------------


def test_the_checkpoint_of_a_stopped_run_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss, match=r"are put back: net\.1\.running_mean, net\.1\.running_var"):
        fit(Normed(), run_dir=tmp_path, checkpoint=True, hooks=[NaNGuard()])
    saved = read(tmp_path / "checkpoints" / "last")["module"]
    assert saved["net.1.running_mean"].isfinite().all() and saved["net.1.running_var"].isfinite().all()
    net, trainer = (
        Normed(),
        quiet(max_epochs=2, run_dir=tmp_path, checkpoint=True, hooks=[ExcludeSamples([*BAD])]),
    )
    trainer.fit(net, samples(), samples(()), resume="auto")
    assert averages(net).isfinite().all() and math.isfinite(trainer.metrics["val/loss"])


class SkipsSilently(Hook):
    """A guard of a user, which knows nothing of buffers."""

    def on_before_optimizer_step(self, loss: float) -> Any:
        return None if math.isfinite(loss) else SKIP_STEP


def test_a_save_says_that_buffers_are_not_finite_and_so_does_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Hook):
        def on_train_epoch_start(self, epoch: int) -> None:
            if epoch == 1:
                raise ValueError("enough")

    with pytest.raises(ValueError, match="enough") as caught:
        fit(Normed(), run_dir=tmp_path, checkpoint=True, hooks=[SkipsSilently(), Fails()])
    warnings = [each.getMessage() for each in caplog.records if "and saved so" in each.getMessage()]
    assert len(warnings) == 1 and warnings[0].startswith("net.1.running_mean, net.1.running_var: not finite")
    assert "Buffers in it are not finite: net.1.running_mean" in "\n".join(caught.value.__notes__)
    caplog.clear()
    quiet(max_epochs=2, run_dir=tmp_path, checkpoint=True).fit(
        Normed(), samples(()), samples(()), resume="auto"
    )
    assert "net.1.running_mean, net.1.running_var: NaN before the first step" in caplog.text


def test_a_completed_run_whose_validation_is_nan_says_so(caplog: pytest.LogCaptureFixture) -> None:
    trainer = fit(Normed(), hooks=[SkipsSilently()])
    assert trainer.status == "completed" and math.isnan(trainer.metrics["val/loss"])
    assert "NaN in the last validation: val/loss." in caplog.text


def test_a_good_run_with_a_mask_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(max_epochs=2, run_dir=tmp_path, checkpoint=True, nonfinite="skip")
    trainer.fit(Normed(), samples(()), samples(()))
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


# ---- the parts -------------------------------------------------------------------------------------------------


def test_only_buffers_that_a_checkpoint_holds_are_kept() -> None:
    net = Normed()
    net.register_buffer("constant", torch.zeros(2), persistent=False)
    net.register_buffer("nothing", None)
    assert [each.name for each in find_places(net)] == ["mask", "net.1.running_mean", "net.1.running_var"]
    assert find_nonfinite_buffers(find_places(net)) == ["mask"]


def test_a_buffer_that_the_module_replaces_is_followed() -> None:
    net = nn.BatchNorm1d(2)
    kept = KeptBuffers(net)
    net.running_mean = torch.tensor([1.0, 2.0])
    kept.keep()
    net.running_mean = torch.tensor([math.nan, 3.0])
    net.running_var = torch.tensor([5.0, 5.0])
    assert kept.put_back() == ["running_mean"]
    assert net.running_mean.tolist() == [1.0, 2.0] and net.running_var.tolist() == [1.0, 1.0]
    assert kept.put_back() == []


def test_a_value_that_is_not_finite_is_not_kept() -> None:
    net = nn.BatchNorm1d(2)
    kept = KeptBuffers(net)
    assert net.running_mean is not None
    net.running_mean.copy_(torch.tensor([math.inf, 4.0]))
    kept.keep()
    assert kept.put_back() == ["running_mean"] and net.running_mean.tolist() == [0.0, 4.0]


def test_a_buffer_of_another_shape_is_kept_from_then_on() -> None:
    net = nn.Module()
    net.register_buffer("seen", torch.ones(2))
    kept = KeptBuffers(net)
    net.seen = torch.tensor([math.nan, 1.0, 1.0])
    assert kept.put_back() == []
    net.seen = torch.ones(3)
    kept.keep()
    net.seen[0] = math.nan
    assert kept.put_back() == ["seen"] and net.seen.tolist() == [1.0, 1.0, 1.0]


def test_all_ranks_put_their_buffers_back_if_one_has_to() -> None:
    net, asked = nn.BatchNorm1d(2), list[bool]()

    def disagree(flag: bool) -> bool:
        asked.append(flag)
        return False

    kept = KeptBuffers(net, disagree)
    assert net.running_mean is not None
    net.running_mean.fill_(7.0)
    assert kept.put_back() == [] and asked == [True]
    assert net.running_mean.tolist() == [0.0, 0.0]


def test_a_module_without_buffers_costs_nothing() -> None:
    kept = KeptBuffers(nn.Linear(2, 2))
    kept.keep()
    assert kept.put_back() == []


def test_a_save_warns_of_each_buffer_once(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.BatchNorm1d(2)
    buffers = FiniteBuffers(net)
    buffers.check()
    assert net.running_mean is not None and net.running_var is not None
    net.running_var[0] = math.inf
    buffers.check()
    buffers.check()
    assert caplog.text.count("running_var: not finite") == 1 and buffers.broken == ["running_var"]
