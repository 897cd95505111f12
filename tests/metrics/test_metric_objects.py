"""Metric objects of a module are part of a checkpoint: the value of a resumed epoch covers all its batches."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryPrecision,
    BinaryRecall,
    MulticlassAccuracy,
    MulticlassAveragePrecision,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MultilabelAccuracy,
)
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef, R2Score
from torchmetrics.wrappers import Running

from hookline import Hook
from hookline.hooks import ModelCheckpoint
from hookline.metrics.metric_log import MetricLog
from hookline.metrics.metric_objects import load_objects, metric_objects, save_objects


class Total:
    """A metric object that is not a module, with the methods of torcheval's."""

    def __init__(self) -> None:
        self.total = 0.0

    def update(self, value: Tensor) -> None:
        self.total += value.item()

    def compute(self) -> float:
        return self.total

    def reset(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


class Spread(CatMetric):
    """Has a list state of one tensor per batch, and depends on the order of its values."""

    def compute(self) -> Tensor:
        values = super().compute()
        return (values * torch.arange(len(values))).sum()


class Measured(Net):
    """Logs the objects of torchmetrics in each of their forms."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread, self.area, self.total = MeanMetric(), Spread(), BinaryAUROC(), Total()
        self.low = MinMaxMetric(MeanMetric())
        self.few = Running(SumMetric(), window=3)
        self.rates = nn.ModuleDict({"of": MetricCollection([BinaryPrecision(), BinaryRecall()])})
        self.val_mean = MeanMetric()
        self.classes, self.unused = MulticlassAccuracy(2), MulticlassConfusionMatrix(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        score, hit = torch.sigmoid(x[:, 0]), (x[:, 1] > 0).long()
        self.mean(x)
        self.low.update(x)
        self.low.compute()
        for metric in (self.few, self.spread):
            metric.update(x[:, 0])
        self.total.update(x.sum())
        self.area.update(score, hit)
        self.classes.update(x[:, :2], hit)
        self.rates["of"].update(score, hit)
        for name in ("mean", "spread", "few", "area", "total", "classes"):
            self.log(name, getattr(self, name), on_step=False, on_epoch=True)
        self.log_dict(dict(self.rates["of"].items()), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("low", self.low._base_metric.compute())
        for name in ("min_val", "max_val"):
            self.log(name, getattr(self.low, name))
        self.low.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.val_mean(batch[0])
        self.log("val_mean", self.val_mean)


def data(count: int = 8) -> Any:
    torch.manual_seed(5)
    return [(torch.randn(4, 4), torch.randn(4, 2)) for _ in range(count)]


def train(run_dir: Path, *hooks: Any, resume: Any = None, **options: Any) -> dict[str, float]:
    torch.manual_seed(1)
    trainer = quiet(run_dir=run_dir, hooks=hooks, **{"max_epochs": 2, **options})
    return dict(trainer.fit(Measured(), data(), data(3), resume=resume).items())


def saves(every: int) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath="kept", every_n_train_steps=every, save_top_k=-1, filename="{step}")


@pytest.mark.parametrize("write", ["sync", "async"])
def test_a_run_resumed_inside_an_epoch_ends_with_the_same_values(tmp_path: Path, write: str) -> None:
    whole = train(tmp_path / "whole", saves(1), checkpoint={"last": False, "write": write})
    assert {"mean", "spread", "few", "area", "total", "low", "min_val", "BinaryRecall"} <= whole.keys()
    for step in (3, 8, 13):
        assert train(tmp_path / f"{step}", resume=tmp_path / f"whole/kept/step={step}") == whole, step


@pytest.mark.parametrize("step", [5, 8])
def test_a_run_that_was_stopped_inside_an_epoch_continues_with_its_values(tmp_path: Path, step: int) -> None:
    """The end of the stopped epoch has computed and reset the objects before the last checkpoint."""
    whole = train(tmp_path / "whole")
    train(tmp_path / "cut", max_steps=step, checkpoint={})
    assert train(tmp_path / "cut", resume=tmp_path / "cut/checkpoints/last") == whole


def test_a_validation_that_a_signal_abandons_leaves_nothing_in_its_metrics(tmp_path: Path) -> None:
    class Ends(Hook):
        def on_validation_batch_end(self, batch_idx: int, batches_seen: int) -> None:
            if batch_idx == 1 and batches_seen == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    options: dict[str, Any] = {"val_check_interval": 5}
    whole = train(tmp_path / "whole", **options)
    with pytest.raises(SystemExit):
        train(tmp_path / "cut", Ends(), checkpoint={}, **options)
    assert train(tmp_path / "cut", resume=tmp_path / "cut/checkpoints/last", **options) == whole


def test_a_rollback_restores_metric_objects(tmp_path: Path) -> None:
    class GoesBack(Hook):
        went = False

        def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
            if batches_seen == 6 and not self.went:
                self.went = True
                trainer.roll_back()

    assert train(tmp_path / "back", saves(4), GoesBack()) == train(tmp_path / "a")


def test_an_object_that_cannot_be_restored_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Hidden(Net):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = {"mean": MeanMetric()}  # torch does not find it in a dict

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.metrics["mean"].update(batch[0])
            self.log("hidden", self.metrics["mean"], on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    quiet(run_dir=tmp_path, max_steps=3, checkpoint={}).fit(Hidden(), batches(8))
    with caplog.at_level(logging.WARNING, logger="hookline"):
        quiet(run_dir=tmp_path, max_steps=5).fit(Hidden(), batches(8), resume="auto")
    assert "the batches after it: hidden" in caplog.text


def test_another_number_of_ranks_begins_the_objects_anew_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Changes(Hook):
        def on_load_checkpoint(self, checkpoint: Any) -> None:
            checkpoint["metric_objects"] = None  # as reading it on another number of ranks does

    train(tmp_path, max_steps=5, checkpoint={})
    with caplog.at_level(logging.WARNING, logger="hookline"):
        found = train(tmp_path, Changes(), max_epochs=1, resume=tmp_path / "checkpoints/last")
    assert "another number of ranks" in caplog.text
    assert found["mean"] == pytest.approx(torch.stack([each[0] for each in data()[5:]]).mean().item())


def test_values_that_no_checkpoint_can_hold_do_not_prevent_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(MeanMetric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("seen", [])

        def update(self, value: Any) -> None:
            self.seen.append(object())
            super().update(value)

    class Kept(Net):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.odd.update(batch[0])
            self.log("odd", self.odd, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    quiet(run_dir=tmp_path, max_steps=3, checkpoint={}).fit(Kept(), batches(8))
    with caplog.at_level(logging.WARNING, logger="hookline"):
        quiet(run_dir=tmp_path, max_steps=5).fit(Kept(), batches(8), resume="auto")
    assert "the batches after it: odd" in caplog.text


def test_lists_are_saved_as_one_tensor_and_restored_as_they_were() -> None:
    net, other = nn.Module(), nn.Module()
    net.cat, other.cat = CatMetric(), CatMetric()
    parts = [torch.randn(2), torch.randn(5), torch.randn(1)]
    for each in parts:
        net.cat.update(each)
    other.cat.update(torch.zeros(3))
    saved = save_objects(net, {})
    assert saved["states"]["cat"]["value"].keys() == {"joined", "lengths"}
    load_objects(other, saved)
    assert [each.tolist() for each in other.cat.value] == [each.tolist() for each in parts]
    other.cat.update(torch.ones(1))
    assert len(net.cat.value) == 3  # the two share nothing
    load_objects(other, {"states": {}})
    assert other.cat.value == []  # updated since, and not in the checkpoint


@pytest.mark.parametrize("wrong", [3, "text", None, {"joined": 1, "lengths": None}])
def test_state_of_another_type_is_refused(wrong: Any) -> None:
    net = nn.Module()
    net.mean = MeanMetric()
    with pytest.raises((TypeError, AttributeError)):
        load_objects(net, {"states": {"mean": {"mean_value": wrong}}})


def test_metric_objects_of_the_module_and_of_the_log_are_found_once() -> None:
    net, other = Measured(), MeanMetric()
    log = MetricLog()
    log.mode = "train"  # computed at the end of the epoch
    for name, metric in (("a", net.mean), ("b", other)):
        metric.update(1.0)
        log.log(name, metric, None, True, False, "mean", None)
    found = [id(each) for each in metric_objects(net, log.objects())]
    assert found.count(id(net.mean)) == found.count(id(other)) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: MulticlassAccuracy(3),
        lambda: MulticlassAccuracy(3, average=None),
        lambda: MulticlassF1Score(3, average="macro"),
        lambda: MulticlassConfusionMatrix(3),
        lambda: MulticlassAveragePrecision(3, thresholds=5),
        lambda: MulticlassAveragePrecision(3),
        lambda: MultilabelAccuracy(3),
        lambda: MeanSquaredError(num_outputs=3),
        lambda: R2Score(multioutput="raw_values"),
        lambda: PearsonCorrCoef(num_outputs=3),
    ],
)
def test_states_of_any_shape_are_saved_before_and_after_an_update(make: Any) -> None:
    torch.manual_seed(3)
    scores, real = torch.rand(6, 3), torch.rand(6, 3)
    module, again = nn.Module(), nn.Module()
    module.metric, again.metric = make(), make()
    assert save_objects(module, {})["states"] == {}
    name = type(module.metric).__name__
    labels = torch.tensor([0, 1, 2, 0, 1, 2]) if "class" in name else (real > 0.5).long()
    module.metric.update(scores, labels if name.startswith("Multi") else real)
    load_objects(again, save_objects(module, {}))
    torch.testing.assert_close(again.metric.compute(), module.metric.compute(), equal_nan=True)
