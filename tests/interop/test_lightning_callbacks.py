"""Real Lightning callbacks in `hookline.Trainer(hooks=[...])`: Lightning's own and people's, doing what they do in Lightning."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from test_budgets import per_step, with_hooks
from tiny import Net, batches, quiet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import hookline
from hookline import Hook, HookError
from hookline.checkpoint.files import read_manifest
from hookline.interop.lightning import MAPPING
from hookline.interop.lightning.table import CALLBACK_ROWS
from hookline.testing import fire

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(pl.LightningModule):
    """The linear regression of `tiny`, for Lightning; it gets worse after the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", abs(self.current_epoch - 1.0))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def loader(n: int) -> Any:
    return DataLoader(batches(n), batch_size=None)


def both(make: Callable[[], Callback], epochs: int = 5, **options: Any) -> tuple[Any, Any, Any, Any]:
    """The same callback in Lightning's trainer and in ours; the callbacks and the modules."""
    (theirs, ours), (first, second) = (make(), make()), (Model(), Model())
    second.load_state_dict(first.state_dict())
    pl.Trainer(
        callbacks=[theirs],
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        enable_checkpointing=isinstance(theirs, ModelCheckpoint),
        default_root_dir="lightning",
        **options,
    ).fit(first, loader(4), loader(1))
    quiet(hooks=[ours], max_epochs=epochs, run_dir="ours", num_sanity_val_steps=2, **options).fit(
        second, loader(4), loader(1)
    )
    return theirs, ours, first, second


# ---- Lightning's own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"patience": 2}, {"stopping_threshold": 0.5}, {"patience": 1, "min_delta": 2.0}], ids=str
)
def test_early_stopping_stops_when_it_does_in_lightning(settings: dict[str, Any]) -> None:
    theirs, ours, _, _ = both(lambda: EarlyStopping("score", **settings))
    assert ours.stopped_epoch == theirs.stopped_epoch > 0
    assert ours.state_dict() == theirs.state_dict()


def test_early_stopping_is_the_reason_that_the_run_gives() -> None:
    trainer = quiet(hooks=[EarlyStopping("val/loss", patience=1, min_delta=100.0)], max_epochs=9)
    trainer.fit(Net(), batches(2), batches(1))
    assert (trainer.status, trainer.state.stop_reason) == ("stopped", "EarlyStopping set trainer.should_stop")


@pytest.mark.parametrize(
    "settings",
    [
        {"monitor": "score", "save_top_k": 1},
        {"monitor": "score", "save_top_k": 2, "save_last": True},
        {"save_top_k": -1},
        {"monitor": "score", "mode": "max", "filename": "{epoch:02d}-{score:.1f}"},
        {"every_n_train_steps": 3},
        {"save_last": "link"},
        {"every_n_epochs": 2},
        {"monitor": "score", "every_n_train_steps": 2, "save_top_k": 2},
    ],
    ids=str,
)
def test_model_checkpoint_keeps_the_same_checkpoints_as_in_lightning(settings: dict[str, Any]) -> None:
    theirs, ours, _, _ = both(lambda: ModelCheckpoint(**settings))
    assert names(Path("ours/checkpoints")) == names(Path("lightning/checkpoints")) != []
    for path in ("best_model_path", "last_model_path", "kth_best_model_path"):
        assert Path(getattr(ours, path)).name == Path(getattr(theirs, path)).name
    assert ours.best_model_score == theirs.best_model_score
    assert {Path(k).name: v for k, v in ours.best_k_models.items()} == {
        Path(k).name: v for k, v in theirs.best_k_models.items()
    }


def names(folder: Path) -> list[str]:
    """The callback's checkpoints; `last` is the state that Hookline keeps of the run's end."""
    return sorted(each.name for each in folder.iterdir() if each.name != "last")


def test_the_checkpoints_are_hooklines_and_a_run_continues_from_them() -> None:
    def callback() -> Any:
        return ModelCheckpoint(monitor="score", save_top_k=1, save_last=True)

    first, trainer = callback(), quiet(max_epochs=3, run_dir="run")
    trainer.add_hook(first)
    trainer.fit(Model(), loader(4), loader(1))
    manifest = read_manifest(first.best_model_path)
    assert (manifest["reason"], manifest["monitor"]) == (
        "best",
        {"name": "score", "mode": "min", "score": 0.0},
    )
    second, again = callback(), quiet(max_epochs=4, run_dir="run")
    again.add_hook(second)
    again.fit(Model(), loader(4), loader(1), resume=first.last_model_path)
    assert again.global_step == 16 and again.state.resumed
    assert (second.best_model_path, float(second.best_model_score)) == (first.best_model_path, 0.0)
    best = quiet(run_dir="run", max_epochs=5)
    best.fit(Model(), loader(4), loader(1), resume="best")
    assert best.global_step == 20  # three epochs after the second one


def test_a_run_continues_from_a_link_to_the_newest_one() -> None:
    callback = ModelCheckpoint(save_last="link", dirpath="kept")
    quiet(hooks=[callback], max_epochs=2).fit(Net(), batches(2))
    assert Path(callback.last_model_path).is_symlink()
    again = quiet(max_epochs=3)
    again.fit(Net(), batches(2), resume=callback.last_model_path)
    assert again.state.resumed and again.global_step == 6


def test_an_old_best_one_goes_only_when_its_replacement_is_complete() -> None:
    there: list[list[str]] = []

    class Looks(Hook):
        def on_save_checkpoint(self, path: Any) -> None:
            there.append(names(Path(path).parent) if Path(path).parent.exists() else [])

    quiet(hooks=[ModelCheckpoint(save_top_k=1), Looks()], max_epochs=3, run_dir="run").fit(Net(), batches(2))
    assert there == [[], ["epoch=0-step=2.ckpt"], ["epoch=1-step=4.ckpt"]]
    assert names(Path("run/checkpoints")) == ["epoch=2-step=6.ckpt"]


def test_checkpoints_written_in_the_background_stay_until_their_own_replacement_is_complete() -> None:
    there: list[bool] = []

    class LooksLast(Hook):
        order = 300

        def on_checkpoint_save(self, path: Any) -> None:
            there.append(Path(path).exists())

    quiet(hooks=[ModelCheckpoint(save_top_k=1), LooksLast()], max_epochs=4, run_dir="run", save="async").fit(
        Net(), batches(1)
    )
    assert there == [True] * 4
    assert names(Path("run/checkpoints")) == ["epoch=3-step=4.ckpt"]


class Saves(Model):
    """Two metrics whose best epochs differ, and a schedule."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", float(self.current_epoch))
        self.log("rounded", float(self.current_epoch // 2))


@pytest.mark.parametrize(
    "shared",
    [
        {},
        {"filename": "best"},
        {"filename": "{rounded:.0f}", "save_top_k": 2},
        {"save_last": True},
        {"filename": "best", "enable_version_counter": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("write", ["sync", "async"])
def test_each_of_two_model_checkpoints_keeps_files_of_its_own_as_in_lightning(
    shared: dict[str, Any], write: str
) -> None:
    def pair() -> list[Any]:
        return [
            ModelCheckpoint(monitor="score", **shared),
            ModelCheckpoint(monitor="rounded", mode="max", **shared),
        ]

    theirs, ours, first = pair(), pair(), Saves()
    second = copy.deepcopy(first)
    options: dict[str, Any] = {"max_epochs": 4, "logger": False, "num_sanity_val_steps": 0}
    pl.Trainer(callbacks=[*theirs], default_root_dir="lightning", **options, enable_progress_bar=False).fit(
        first, loader(4), loader(1)
    )
    quiet(hooks=[*ours], run_dir="ours", save=write, **options).fit(second, loader(4), loader(1))
    assert names(Path("ours/checkpoints")) == names(Path("lightning/checkpoints"))
    for expected, found in zip(theirs, ours, strict=True):
        for attribute in ("best_model_path", "last_model_path", "kth_best_model_path"):
            assert Path(getattr(found, attribute)).name == Path(getattr(expected, attribute)).name
        assert [Path(each).name for each in found.best_k_models] == [
            Path(each).name for each in expected.best_k_models
        ]
    for path in Path("lightning/checkpoints").iterdir():
        there = torch.load(path)
        here = Path("ours/checkpoints", path.name)
        assert read_manifest(here)["step"] == there["global_step"], path.name
        restored = Saves()
        hookline.load_weights(restored, here)
        torch.testing.assert_close(dict(restored.state_dict()), dict(there["state_dict"]))


@pytest.mark.parametrize("package", [pl, pytorch_lightning], ids=lambda each: each.__name__)
def test_two_model_checkpoints_with_one_key_are_refused_before_the_first_step(package: Any) -> None:
    kind = package.callbacks.ModelCheckpoint
    trainer = quiet(hooks=[kind(monitor="score"), kind(monitor="score", save_top_k=3)], run_dir="run")
    with pytest.raises(
        HookError, match=r"`ModelCheckpoint` with the state_key .*'score'.* another monitor, mode"
    ):
        trainer.fit(Model(), loader(4), loader(1))
    assert trainer.global_step == 0
    others = [
        kind(monitor="score"),
        kind(monitor="score", every_n_epochs=2),
        kind(monitor="score", mode="max"),
    ]
    quiet(hooks=others, run_dir="run").fit(Model(), loader(4), loader(1))


class Dies(Callback):
    def __init__(self, epoch: int, batch: int) -> None:
        self.at = (epoch, batch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == self.at:
            raise RuntimeError("on purpose")


class Normed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Model, Normed])
@pytest.mark.parametrize("at", [(4, 0), (1, 3), (3, 2)], ids=str)
def test_a_resume_after_weight_averaging_has_begun_leaves_the_weights_of_one_run(
    kind: Any, at: tuple[int, int]
) -> None:
    def fit(model: Any, hooks: list[Any], **options: Any) -> Any:
        own = [StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=3), *hooks]
        quiet(hooks=own, max_epochs=6, **options).fit(model, loader(4), resume="auto")
        return model

    def saving() -> Any:
        return ModelCheckpoint(every_n_train_steps=1)

    start = kind()
    whole = fit(copy.deepcopy(start), [saving()], run_dir="whole")
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(copy.deepcopy(start), [saving(), Dies(*at)], run_dir="parts")
    resumed = fit(kind(), [saving()], run_dir="parts")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_without_the_averaging_that_replaced_a_schedule_its_state_is_refused() -> None:
    average = StochasticWeightAveraging(0.01, swa_epoch_start=1)
    quiet(hooks=[average, ModelCheckpoint()], max_epochs=2, run_dir="run").fit(Model(), loader(4))
    with pytest.raises(hookline.CheckpointError, match=r"There: SGD, SWALR\. Here: SGD, ExponentialLR"):
        quiet(max_epochs=3, run_dir="run").fit(Model(), loader(4), resume="auto")


def test_a_failing_run_is_saved_by_the_callbacks_that_are_for_it() -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    callback = ModelCheckpoint(dirpath="kept", save_on_exception=True)
    with pytest.raises(RuntimeError, match="on purpose"):
        quiet(hooks=[callback, OnExceptionCheckpoint("died")]).fit(Fails(), batches(4))
    assert names(Path("kept")) == ["epoch=0-step=2.ckpt"]
    assert read_manifest("kept/epoch=0-step=2.ckpt")["reason"] == "exception"


def test_the_learning_rate_monitor_sees_the_same_rates_and_logs_them() -> None:
    theirs, ours = LearningRateMonitor("epoch"), LearningRateMonitor("epoch")
    pl.Trainer(
        callbacks=[theirs],
        max_epochs=3,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=pl.loggers.CSVLogger("lightning"),
    ).fit(Model(), loader(2), loader(1))
    trainer = quiet(hooks=[ours], max_epochs=3, logger=True, run_dir="run")
    trainer.fit(Model(), loader(2), loader(1))
    assert ours.lrs == theirs.lrs == {"lr-SGD": [0.1, 0.05, 0.025]}
    rows = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    assert [each["metrics"]["lr-SGD"] for each in rows if "lr-SGD" in each.get("metrics", {})] == [
        0.1,
        0.05,
        0.025,
    ]
    assert trainer.metrics["lr-SGD"] == pytest.approx(0.025)


def test_the_device_stats_monitor_logs_what_lightning_measures() -> None:
    quiet(hooks=[DeviceStatsMonitor(cpu_stats=True)], logger=True, run_dir="run", log_every_n_steps=1).fit(
        Net(), batches(1)
    )
    text = Path("run/log.jsonl").read_text()
    assert (
        "DeviceStatsMonitor.on_train_batch_start/cpu_percent" in text
        and "DeviceStatsMonitor.on_train_batch_end/" in text
    )


def test_gradients_are_accumulated_as_the_scheduler_says() -> None:
    _, _, first, second = both(lambda: GradientAccumulationScheduler({0: 2, 1: 4, 3: 1}))
    assert torch.equal(first.layer.weight, second.layer.weight)
    trainer = quiet(hooks=[GradientAccumulationScheduler({0: 2, 1: 4, 3: 1})], max_epochs=5)
    trainer.fit(Net(), batches(4))
    assert trainer.global_step == 2 + 1 + 1 + 4 + 4


def test_a_schedule_of_the_accumulation_keeps_the_weights_of_batches() -> None:
    data = [(x[: 1 + index % 3], y[: 1 + index % 3]) for index, (x, y) in enumerate(batches(4))]
    schedule = {0: 2, 1: 4, 3: 1}
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    quiet(hooks=[GradientAccumulationScheduler(schedule)], max_epochs=5, accumulate_by="samples").fit(
        net, data
    )
    optimizer = twin.configure_optimizers()
    for size in (2, 4, 4, 1, 1):
        for start in range(0, 4, size):
            optimizer.zero_grad()
            whole = [torch.cat(parts) for parts in zip(*data[start : start + size], strict=True)]
            twin.training_step(whole, 0).backward()
            optimizer.step()
    assert torch.allclose(net.layer.weight, twin.layer.weight, rtol=0, atol=1e-5)


def test_the_timer_stops_the_run_and_knows_how_long_it_took() -> None:
    timer = Timer(duration={"microseconds": 1}, verbose=False)
    trainer = quiet(hooks=[timer], max_epochs=3)
    trainer.fit(Net(), batches(4))
    assert trainer.status == "stopped" and trainer.state.batches_seen <= 1
    watch = Timer()
    quiet(hooks=[watch]).fit(Net(), batches(1), batches(1))
    assert 0 < watch.time_elapsed("validate") < watch.time_elapsed("train")


@pytest.mark.parametrize("module", [Net, Model])
def test_the_model_summary_is_written(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        logging.getLogger("lightning.pytorch").propagate = True
        quiet(hooks=[ModelSummary()]).fit(module(), loader(1))
    assert "layer | Linear | 10" in caplog.text


CHANGE_WEIGHTS: dict[str, Callable[[], Callback]] = {
    "average": WeightAveraging,
    "moving average": lambda: EMAWeightAveraging(decay=0.9),
    "pruning": lambda: ModelPruning("l1_unstructured", amount=0.5),
}


@pytest.mark.parametrize("make", CHANGE_WEIGHTS.values(), ids=CHANGE_WEIGHTS)
def test_callbacks_that_change_weights_leave_the_same_ones(make: Callable[[], Callback]) -> None:
    _, _, first, second = both(make, epochs=2)
    assert torch.allclose(first.layer.weight, second.layer.weight)


# ---- people's own ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", [pl, pytorch_lightning])
def test_a_callback_of_either_package_is_recognised_by_its_class(package: Any) -> None:
    class Own(package.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.state = (
                trainer.state.fn.value,
                trainer.state.stage.value,
                isinstance(pl_module, package.LightningModule),
            )

    own = Own()
    trainer = quiet(hooks=[own])
    trainer.fit(Net(), batches(1))
    assert own.state == ("fit", "train", True)
    assert own in trainer.hooks and trainer.hooks["own"] is own and list(trainer.hooks) == [own]
    with pytest.raises(HookError, match="already registered"):
        trainer.add_hook(own)
    assert trainer.remove_hook("own") is own and own not in trainer.hooks


def test_hparams_of_a_hookline_module_are_the_arguments_it_was_created_with() -> None:
    class Sized(Net):
        def __init__(self, width: int = 4, act: Any = None) -> None:
            super().__init__()

    class Kept(Net):
        hparams = {"own": 1}

    class Reads(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            found.append((dict(pl_module.hparams), dict(pl_module.hparams_initial)))
            self.width = getattr(pl_module.hparams, "width", None)

    found: list[Any] = []
    reads = Reads()
    quiet(hooks=[reads]).fit(Sized(8, nn.ReLU()), batches(1))
    assert found.pop() == ({"width": 8}, {"width": 8}) and reads.width == 8
    quiet(hooks=[Reads()]).fit(Kept(), batches(1))
    assert found.pop() == ({"own": 1}, {"own": 1})


def test_arguments_come_by_position_trimmed_to_what_is_taken_and_returned_values_are_ignored() -> None:
    got: list[Any] = []

    class Own(Callback):
        def on_train_batch_start(self, t: Any, m: Any, b: Any) -> Any:  # type: ignore[override]
            got.append(("start", t.global_step, len(b)))
            return -1

        def on_train_batch_end(self, t: Any, *rest: Any) -> Any:
            got.append(("end", t.global_step, len(rest), sorted(rest[1])))
            return hookline.END_EPOCH

        def on_validation_batch_end(self, t: Any, m: Any, o: Any, b: Any, i: int) -> None:  # type: ignore[override]
            got.append(("val", float(o) > 0, i))

        def on_before_backward(self, t: Any, m: Any, loss: Any) -> Any:
            got.append(loss.requires_grad)
            return loss * 0

    net = Net()
    before = net.layer.weight.detach().clone()
    quiet(hooks=[Own()]).fit(net, batches(2), batches(1))
    batch = [("start", 0, 2), True, ("end", 1, 4, ["loss"])]
    assert got == [*batch, ("start", 1, 2), True, ("end", 2, 4, ["loss"]), ("val", True, 0)]
    assert not torch.equal(before, net.layer.weight)


def test_a_required_argument_that_lightning_does_not_pass_is_an_error_when_added() -> None:
    class Wrong(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any, more: Any) -> None: ...  # type: ignore[override]

    with pytest.raises(
        HookError, match=r"Wrong.on_train_start takes 'more', but on_train_start is called with 2"
    ):
        quiet(hooks=[Wrong()])


def test_only_overridden_methods_are_called_a_lambda_callbacks_own_ones_too() -> None:
    heard: list[str] = []
    callback = LambdaCallback(
        on_train_start=lambda *args: heard.append("start"), setup=lambda t, m, stage: heard.append(stage)
    )
    trainer = quiet(hooks=[callback])
    assert [row["event"] for row in trainer.explain().data() if row["listeners"]] == [
        "setup",
        "on_train_start",
    ]
    trainer.fit(Net(), batches(1))
    assert heard == ["fit", "start"]


def test_explain_shows_a_callback_with_its_origin() -> None:
    text = str(quiet(hooks=[EarlyStopping("val/loss")]).explain())
    assert (
        "hook early_stopping: EarlyStopping.on_train_epoch_end (lightning/pytorch/callbacks/early_stopping.py:"
        in text
    )
    assert "Lightning callback · a monitor: after the module" in text


class Counts(Callback):
    """Keeps a number under a key of its own."""

    def __init__(self, which: str, steps: int = 1) -> None:
        self.which, self.steps, self.count = which, steps, 0

    @property
    def state_key(self) -> str:
        return f"Counts[{self.which}]"

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.count += self.steps

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        checkpoint[self.which] = self.count

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.found = checkpoint[self.which]


def test_state_is_kept_and_found_again_by_its_key_in_whatever_order_callbacks_are() -> None:
    trainer = quiet(hooks=[Counts("one"), Counts("ten", 10)])
    trainer.fit(Net(), batches(3))
    trainer.save_checkpoint("saved")
    ten, one = Counts("ten", 10), Counts("one")
    quiet(hooks=[ten, one], max_epochs=2).fit(Net(), batches(3), resume="saved")
    assert (one.found, ten.found) == (3, 30)
    assert (one.count, ten.count) == (6, 60)


def test_a_module_of_hookline_has_what_callbacks_use_of_a_lightning_module() -> None:
    seen: dict[str, Any] = {}

    class Own(Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            pl_module.log(
                "mine", float(batch_idx), prog_bar=True, on_step=False, on_epoch=True, sync_dist=True
            )
            pl_module.note = batch_idx

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            seen["is"] = (
                isinstance(pl_module, Net),
                isinstance(pl_module, pl.LightningModule),
                isinstance(pl_module, nn.Module),
            )
            seen["copy"] = type(copy.deepcopy(pl_module)) is Net
            seen["same"] = pl_module == trainer.lightning_module and pl_module.trainer is trainer
            seen["makes"] = (
                pl_module.layer(torch.zeros(1, 4)).shape,
                len(list(pl_module.parameters())),
                pl_module.global_step,
            )

    net = Net()
    trainer = quiet(hooks=[Own()])
    trainer.fit(net, batches(3))
    assert seen == {"is": (True, True, True), "copy": True, "same": True, "makes": ((1, 2), 2, 3)}
    assert (net.note, trainer.metrics["mine"]) == (2, 1.0)


def test_a_callback_that_joins_in_the_middle_is_set_up_and_one_that_leaves_torn_down() -> None:
    heard: list[Any] = []
    late = LambdaCallback(
        setup=lambda t, m, stage: heard.append(("setup", t.global_step)),
        on_train_batch_end=lambda t, *rest: heard.append(("batch", t.global_step)),
        teardown=lambda t, m, stage: heard.append(("teardown", t.global_step)),
    )

    class Adds(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.add_hook(late, "late")
            if batch_idx == 2:
                trainer.remove_hook("late")

    quiet(hooks=[Adds()]).fit(Net(), batches(5))
    assert heard[0] == ("setup", 2) and heard[-1] == ("teardown", 3) and heard.count(("teardown", 3)) == 1


def test_a_plain_module_is_trained_with_callbacks_too() -> None:
    stop = EarlyStopping("train/loss", patience=1, min_delta=100.0, check_on_train_epoch_end=True)
    trainer = quiet(hooks=[stop], max_epochs=5)
    net = nn.Linear(4, 2)
    trainer.fit(net, batches(2), loss=F.mse_loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    assert trainer.state.epochs_seen == 2


# ---- what cannot be honoured -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("callback", "ours"),
    [(BatchSizeFinder, "BatchSizeFinder"), (LearningRateFinder, "LRFinder")],
    ids=["batch size finder", "lr finder"],
)
def test_a_callback_that_runs_lightnings_loop_is_refused_with_the_hook_to_use_instead(
    callback: Any, ours: str
) -> None:
    with pytest.raises(HookError, match="cannot run in Hookline") as error:
        quiet(hooks=[callback()])
    assert f"Use hookline.hooks.{ours}().find(trainer, module, loader), or" in str(error.value)
    assert "There are: " not in str(error.value)


def test_what_code_asks_about_first_is_no_reason_to_refuse_it() -> None:
    class Careful(Callback):
        heard = ""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if hasattr(trainer, "something_of_mine"):
                self.heard = trainer.something_of_mine
            try:
                trainer.another.thing()
            except AttributeError as error:
                self.heard = str(error)

    careful = Careful()
    quiet(hooks=[careful]).fit(Net(), batches(1))
    assert careful.heard.startswith("trainer.another is not available to Lightning's hooks")


def test_an_attribute_reached_in_a_way_that_cannot_be_read_is_an_error_at_run_time() -> None:
    class Hidden(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.helps(trainer)

        @staticmethod
        def helps(t: Any) -> None:
            t.fit_loop.max_batches = 3

    with pytest.raises(
        HookError, match=r"trainer.fit_loop.max_batches = ... is not available .* There are: batch_idx, "
    ):
        quiet(hooks=[Hidden()]).fit(Net(), batches(4))


def test_an_event_of_lightning_that_hookline_has_not_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Callback, "on_moon", lambda self, trainer, pl_module: None, raising=False)

    class Own(Callback):
        def on_moon(self, trainer: Any, pl_module: Any) -> None: ...

    with pytest.raises(
        HookError, match="Own listens to on_moon, an event of Lightning that Hookline does not have"
    ):
        quiet(hooks=[Own()])


# ---- the order, the table, the cost ------------------------------------------------------------------------------


def spy(heard: list[str]) -> Callback:
    """A callback that notes everything that it hears."""

    def noting(event: str) -> Any:
        return lambda self, *args, **named: heard.append(event)

    return type("Spy", (Callback,), {event: noting(event) for event in CALLBACK_ROWS})()  # type: ignore[no-any-return]


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"val_check_interval": 2}], ids=str)
def test_a_callback_hears_the_same_sequence_as_in_lightning(verb: str, options: dict[str, Any]) -> None:
    theirs: list[str] = []
    ours: list[str] = []
    data = (
        {"train_dataloaders": loader(4), "val_dataloaders": loader(2)}
        if verb == "fit"
        else {"dataloaders": loader(2)}
    )
    module = type(
        "Tested", (Model,), {"test_step": Model.validation_step, "predict_step": Model.training_step}
    )
    getattr(
        pl.Trainer(
            callbacks=[spy(theirs)],
            max_epochs=2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            enable_checkpointing=False,
            **options,
        ),
        verb,
    )(module(), **data)
    getattr(quiet(hooks=[spy(ours)], max_epochs=2, num_sanity_val_steps=2, **options), verb)(
        module(), *data.values()
    )
    assert ours == theirs


def test_every_hook_of_lightnings_callback_is_in_the_table() -> None:
    offered = {name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")}
    assert offered == set(CALLBACK_ROWS) and offered <= set(MAPPING.values())


def test_an_adapted_callback_costs_no_more_calls_than_a_hook() -> None:
    class Theirs(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None: ...

    class Ours(Hook):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None: ...

    class TheirEnd(Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None: ...

    class OurEnd(Hook):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None: ...

    assert per_step(with_hooks(Theirs())) == per_step(with_hooks(Ours()))
    assert (
        per_step(with_hooks(TheirEnd())) == per_step(with_hooks(OurEnd())) + 1
    )  # the loss goes into a dictionary
    assert per_step(with_hooks(type("Silent", (Callback,), {})())) == per_step(with_hooks())


def test_one_can_be_taken_out_of_a_manager_of_another_system_and_is_listed_as_itself() -> None:
    from hookline.interop.model_training_framework import GenericTrainer, GenericTrainerConfig
    from hookline.interop.trainers import get_trainer

    model, mine = (
        torch.nn.Linear(4, 2),
        pl.callbacks.LambdaCallback(on_train_start=lambda trainer, module: None),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = GenericTrainer(GenericTrainerConfig(), model, [optimizer]).hook_manager
    manager.register_hook(mine)
    assert mine in manager.hooks
    manager.unregister_hook(mine)
    assert mine not in manager.hooks
    trainer = get_trainer("simple", model, [torch.ones(2, 4)], optimizer)
    trainer.add_hook(mine)
    assert mine in list(trainer.hooks)


def test_one_that_is_removed_and_added_again_is_torn_down_before_it_is_set_up() -> None:
    heard: list[Any] = []

    class Told(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            heard.append("setup")

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            heard.append(batch_idx)

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            heard.append("teardown")

    class Swaps(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.add_hook(trainer.remove_hook("told"))

    quiet(hooks=[Told(), Swaps()]).fit(Net(), batches(3))
    assert heard == ["setup", 0, 1, "teardown", "setup", 2, "teardown"]


def test_a_callback_can_be_tested_with_single_events():
    class Report(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = outputs["loss"] > 1
            return batch_idx

    trainer = SimpleNamespace(should_stop=False)
    assert (
        fire(Report(), "train_batch_end", trainer=trainer, pl_module=None, outputs={"loss": 2}, batch=None)
        == 0
    )
    assert trainer.should_stop
    with pytest.raises(
        HookError, match=r"Report.on_train_batch_end takes outputs, without a value outside a run"
    ):
        fire(Report(), "train_batch_end", trainer=trainer, pl_module=None, batch=None)


def test_the_best_that_a_callback_keeps_outside_of_the_run_is_found() -> None:
    """A logger of Lightning has a folder of its own, and the callback writes there."""
    seen: list[torch.Tensor] = []
    callback = ModelCheckpoint(monitor="score", mode="min")
    trainer = hookline.Trainer(
        hooks=[callback],
        logger=pl.loggers.CSVLogger("logs", "digits"),
        max_epochs=3,
        run_dir="run",
        enable_progress_bar=False,
    )
    model = Model()
    trainer.fit(model, loader(4), loader(1))
    best = Path(callback.best_model_path)
    assert Path("logs/digits/version_0") in best.parents and not best.is_relative_to("run")
    trainer.on("validation_start")(lambda module: seen.append(module.layer.weight.detach().clone()))
    trainer.validate(model, loader(1), checkpoint="best")
    again = Model()
    report = trainer.load_best(again)
    assert Path(report.source) == best
    assert torch.equal(seen[0], again.layer.weight)
    assert float(callback.best_model_score) == 0.0
    with pytest.raises(
        hookline.CheckpointError, match=r"Searched: run, and where the hooks .* \(none of them knows one\)"
    ):
        other = quiet(max_epochs=1, run_dir="run", checkpoint=True)
        other.fit(Net(), batches(2))
        other.test(Net(), batches(1), checkpoint="best")
