"""Real LightningModules and LightningDataModules in Hookline's trainer: they learn what Lightning's own trainer teaches them."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from tiny import quiet
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import hookline
from hookline import Hook

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Data(pl.LightningDataModule):
    """Twelve samples, the same every time."""

    def __init__(self, batch_size: int = 3) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.heard: list[str] = []

    def prepare_data(self) -> None:
        self.heard.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.heard.append(f"setup {stage}")
        draw = torch.Generator().manual_seed(1)
        self.samples = TensorDataset(torch.randn(12, 4, generator=draw), torch.randn(12, 2, generator=draw))

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def teardown(self, stage: str) -> None:
        self.heard.append(f"teardown {stage}")


class Model(pl.LightningModule):
    """A linear regression that logs as people do."""

    def __init__(self, optimize: Callable[[Any], Any] = lambda self: SGD(self.parameters(), lr=0.1)) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.optimize = optimize
        self.heard: list[Any] = []

    def loss(self, batch: Any) -> Any:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def training_step(self, b: Any, number: int) -> Any:
        loss = self.loss(b)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"test_loss": self.loss(batch)}, batch_size=3)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return self.optimize(self)


def lightning(**options: Any) -> pl.Trainer:
    """Lightning's own trainer, as quiet as it gets."""
    return pl.Trainer(
        **{
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "max_epochs": 3,
            "enable_model_summary": False,
            "accelerator": "cpu",
            **options,
        }
    )


def twins(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Two modules with the same weights."""
    first, second = make(), make()
    second.load_state_dict(first.state_dict())
    return first, second


def both(
    make: Callable[[], Any], data: Callable[[], Any] = Data, **options: Any
) -> tuple[Any, Any, pl.Trainer, hookline.Trainer]:
    """The same training by Lightning's trainer and by ours."""
    theirs, ours = twins(make)
    trainer = lightning(**options)
    trainer.fit(theirs, datamodule=data())
    mine = quiet(**{"max_epochs": 3, "num_sanity_val_steps": 2, **options})
    mine.fit(ours, datamodule=data())
    return theirs, ours, trainer, mine


def assert_same_weights(first: Any, second: Any) -> None:
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def plateau(optimizer: Any) -> Any:
    return ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)


def one(self: Any) -> Any:
    return Adam(self.parameters(), lr=0.1)


def in_a_list(self: Any) -> Any:
    return [one(self)]


def two_lists(self: Any) -> Any:
    optimizer = one(self)
    return [optimizer], [ExponentialLR(optimizer, 0.5)]


def two_lists_with_settings(self: Any) -> Any:
    optimizer = one(self)
    return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step", "name": "mine"}]


def dictionary(self: Any) -> Any:
    optimizer = one(self)
    return {"optimizer": optimizer, "lr_scheduler": ExponentialLR(optimizer, 0.5)}


def monitored(self: Any) -> Any:
    optimizer = one(self)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": plateau(optimizer), "monitor": "val_loss", "frequency": 1},
    }


def monitored_beside(self: Any) -> Any:
    optimizer = one(self)
    return {"optimizer": optimizer, "lr_scheduler": plateau(optimizer), "monitor": "val_loss"}


@pytest.mark.parametrize(
    "optimize",
    [one, in_a_list, two_lists, two_lists_with_settings, dictionary, monitored, monitored_beside],
    ids=lambda f: f.__name__,
)
def test_every_form_of_configure_optimizers_trains_to_the_same_weights(optimize: Any) -> None:
    theirs, ours, trainer, mine = both(lambda: Model(optimize))
    assert_same_weights(theirs, ours)
    assert [o.param_groups[0]["lr"] for o in trainer.optimizers] == [
        o.param_groups[0]["lr"] for o in mine.optimizers
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
        {"max_steps": 5},
        {"val_check_interval": 0.5},
        {"limit_train_batches": 2, "limit_val_batches": 1},
        {"check_val_every_n_epoch": 2},
    ],
    ids=str,
)
def test_options_train_to_the_same_weights(options: dict[str, Any]) -> None:
    theirs, ours, trainer, mine = both(Model, **options)
    assert_same_weights(theirs, ours)
    assert trainer.global_step == mine.global_step


def test_lightnings_own_demonstration_model_and_data_train_to_the_same_weights() -> None:
    torch.manual_seed(3)
    data = BoringDataModule()
    theirs, ours, _, _ = both(BoringModel, lambda: data, max_epochs=1, limit_train_batches=3)
    assert_same_weights(theirs, ours)


def test_what_is_logged_is_the_same() -> None:
    _, ours, trainer, mine = both(Model)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert {name: mine.metrics[name] for name in logged} == pytest.approx(logged)
    assert {name: float(ours.trainer.callback_metrics[name]) for name in logged} == pytest.approx(logged)


def test_validate_test_and_predict_give_the_same() -> None:
    theirs, ours = twins(Model)
    trainer, mine = lightning(), quiet()
    assert dict(mine.validate(ours, Data())) == pytest.approx(
        trainer.validate(theirs, Data(), verbose=False)[0]
    )
    assert dict(mine.test(ours, datamodule=Data())) == pytest.approx(
        trainer.test(theirs, datamodule=Data(), verbose=False)[0]
    )
    assert torch.equal(torch.cat(mine.predict(ours, Data())), torch.cat(trainer.predict(theirs, Data())))  # type: ignore[arg-type]


class Manual(Model):
    """Two optimizers by hand, with clipping and toggling."""

    def __init__(self) -> None:
        super().__init__(lambda self: [SGD([self.layer.weight], lr=0.1), SGD([self.layer.bias], lr=0.2)])
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        return {"loss": loss}


class ManualOne(Model):
    """One optimizer and its scheduler by hand."""

    def __init__(self) -> None:
        super().__init__(dictionary)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Any:
            loss = self.loss(batch)
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)  # type: ignore[union-attr]
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [Manual, ManualOne])
def test_manual_optimization_trains_to_the_same_weights(make: Any) -> None:
    theirs, ours, _, mine = both(make)
    assert_same_weights(theirs, ours)
    assert mine.global_step == 12  # batches with an update, however many optimizers take part


class Overrides(Model):
    """Every operation that people override."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.trainer.global_step)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 3 else None


def test_overridden_operations_train_to_the_same_weights() -> None:
    theirs, ours, trainer, mine = both(Overrides)
    assert_same_weights(theirs, ours)
    assert trainer.global_step == mine.global_step == 9


class Hears(Model):
    """Notes its own hooks, with arguments under names of its own."""

    def on_fit_start(self) -> None:
        self.heard.append(("fit", type(self.trainer.datamodule).__name__, self.trainer.max_epochs))

    def on_train_batch_end(self, o: Any, b: Any, i: int) -> None:
        self.heard.append(("batch", sorted(o), len(b), i, self.global_step, self.current_epoch))

    def on_before_optimizer_step(self, which: Any) -> None:
        self.heard.append(type(which).__name__.removeprefix("Lightning"))

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.heard.append(
            ("val", batch_idx, dataloader_idx, self.trainer.sanity_checking, self.trainer.training)
        )

    def on_train_epoch_end(self) -> None:
        self.log("epoch", float(self.current_epoch))
        self.heard.append(float(self.trainer.callback_metrics["train_loss_epoch"]))

    def on_validation_end(self) -> None:
        self.heard.append(self.training)

    def teardown(self, stage: str) -> None:
        self.heard.append(stage)


def test_a_modules_hooks_hear_the_same_in_the_same_order() -> None:
    theirs, ours, _, _ = both(Hears, max_epochs=2)
    assert [each for each in ours.heard if not isinstance(each, float)] == [
        each for each in theirs.heard if not isinstance(each, float)
    ]
    assert [each for each in ours.heard if isinstance(each, float)] == pytest.approx(
        [each for each in theirs.heard if isinstance(each, float)]
    )


def test_a_data_module_is_prepared_set_up_and_torn_down() -> None:
    data, trainer = Data(), quiet(max_epochs=1)
    trainer.fit(Model(), data)
    trainer.test(datamodule=data)
    assert data.heard == [
        "prepare_data",
        "setup fit",
        "teardown fit",
        "prepare_data",
        "setup test",
        "teardown test",
    ]
    assert data.trainer.max_epochs == 1  # type: ignore[union-attr]


def test_a_module_resumes_with_what_it_put_into_the_checkpoint() -> None:
    class Keeps(Model):
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            assert set(checkpoint["state_dict"]) == {"layer.weight", "layer.bias"}
            checkpoint["mine"] = {"epoch": checkpoint["epoch"]}

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            self.heard.append((checkpoint["mine"], checkpoint["global_step"]))

    whole = Keeps()
    first, second = twins(Keeps)
    whole.load_state_dict(first.state_dict())
    quiet(max_epochs=2).fit(whole, Data())
    trainer = quiet(max_epochs=1)
    trainer.fit(first, Data())
    trainer.save_checkpoint("saved")
    quiet(max_epochs=2).fit(second, Data(), resume="saved")
    assert second.heard == [({"epoch": 0}, 4)]
    assert_same_weights(whole, second)


def test_callbacks_that_the_module_brings_are_heard() -> None:
    class Brings(Model):
        def configure_callbacks(self) -> Any:
            return [
                pl.callbacks.LambdaCallback(on_train_start=lambda trainer, module: self.heard.append(module))
            ]

    model = Brings()
    quiet().fit(model, Data())
    assert model.heard == [model]


def test_several_training_loaders_of_a_module_are_drawn_side_by_side() -> None:
    class Two(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.heard.append({name: len(each[0]) for name, each in batch.items()})
            return self.loss(batch["a"]) + self.loss(batch["b"])

    class TwoLoaders(Data):
        def train_dataloader(self) -> Any:
            return {"a": DataLoader(self.samples, batch_size=6), "b": DataLoader(self.samples, batch_size=3)}

    class Combined(TwoLoaders):
        def train_dataloader(self) -> Any:
            return CombinedLoader(super().train_dataloader(), "min_size")

    for data, updates in ((TwoLoaders, 4), (Combined, 2)):
        theirs, ours, _, mine = both(Two, data, max_epochs=1)
        assert_same_weights(theirs, ours)
        assert ours.heard == theirs.heard and mine.global_step == updates


def test_metric_objects_and_several_validation_loaders_are_logged_as_in_lightning() -> None:
    class Metrics(Model):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.mean(loss)
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.loss(batch) + dataloader_idx)

    class TwoVal(Data):
        def val_dataloader(self) -> Any:
            return [DataLoader(self.samples, batch_size=3) for _ in range(2)]

    _, _, trainer, mine = both(Metrics, TwoVal, max_epochs=2)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert "val_loss/dataloader_idx_1" in logged
    assert {name: mine.metrics[name] for name in logged} == pytest.approx(logged)
    assert not [name for name in mine.metrics if name.startswith("val/dl_")]  # the same values once more


def test_copies_and_pickles_of_a_module_do_not_take_the_run_along() -> None:
    copies: list[Any] = []

    class Copies(Hook):
        def on_train_end(self, module: Any) -> None:
            copies.append(copy.deepcopy(module))

    model = BoringModel()
    quiet(hooks=[Copies()], limit_train_batches=1, limit_val_batches=1).fit(model)
    copies.append(pickle.loads(pickle.dumps(model)))
    assert [each._trainer for each in copies] == [None, None]
    assert model.trainer.global_step == 1


def test_hooks_of_hookline_hear_a_lightning_module_and_explain_shows_whose_it_is() -> None:
    seen: list[Any] = []

    class Looks(Hook):
        def on_step_end(self, module: Any, loss: float, grad_norm: float) -> None:
            seen.append((type(module).__name__, loss > 0, grad_norm > 0))

    model, trainer = Model(), quiet(hooks=[Looks()], max_epochs=1)
    trainer.fit(model, Data())
    assert seen == [("Model", True, True)] * 4
    assert "module Model.training_step (" in str(trainer.explain(model)) and "Lightning module" in str(
        trainer.explain(model)
    )


def test_a_schedule_over_the_whole_training_knows_how_long_it_is() -> None:
    def cycle(self: Any) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        scheduler = OneCycleLR(
            optimizer, max_lr=0.2, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    theirs, ours, _, _ = both(lambda: Model(cycle), accumulate_grad_batches=2)
    assert_same_weights(theirs, ours)


def test_a_module_may_stop_the_run_log_by_hand_and_save() -> None:
    class Does(Model):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.logger.log_metrics({"by_hand": 2.0}, step=self.global_step)  # type: ignore[union-attr]
            if batch_idx == 1:
                self.trainer.should_stop = True
                self.trainer.save_checkpoint("asked.ckpt")
                self.heard.append(self.all_gather(torch.ones(1)).tolist())

    model, trainer = Does(), quiet(logger=True, run_dir="run")
    trainer.fit(model, Data())
    assert (trainer.global_step, trainer.state.stop_reason) == (2, "Does set trainer.should_stop")
    assert model.heard == [[1.0]] and Path("asked.ckpt/manifest.json").exists()
    assert Path("run/log.jsonl").read_text().count("by_hand") == 2


def test_modules_of_the_other_package_name_are_trained_too_with_callbacks_of_either() -> None:
    class Other(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", F.mse_loss(self.layer(batch[0]), batch[1]), on_step=False, on_epoch=True)
            return F.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.1)

    seen: list[Any] = []
    callbacks = [
        each.callbacks.LambdaCallback(on_train_end=lambda t, m: seen.append((type(m), t.current_epoch)))
        for each in (pl, pytorch_lightning)
    ]
    trainer = quiet(hooks=callbacks, max_epochs=2)
    trainer.fit(Other(), Data())
    assert seen == [(Other, 2)] * 2 and trainer.metrics["loss"] == pytest.approx(
        trainer.metrics["train/loss"]
    )


def test_a_module_trained_here_is_trained_on_by_lightning() -> None:
    theirs, ours = twins(Model)
    quiet(max_epochs=1).fit(ours, Data())
    lightning(max_epochs=1).fit(theirs, Data())
    lightning(max_epochs=1).fit(ours, Data())
    lightning(max_epochs=1).fit(theirs, Data())
    assert_same_weights(theirs, ours)


def test_a_hook_of_a_module_that_cannot_be_honoured_is_an_error_that_names_it() -> None:
    class Draws(Model):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            next(dataloader_iter)
            return super().training_step(*next(dataloader_iter)[:2])

    with pytest.raises(
        hookline.HookError, match="Draws.training_step takes a second batch from dataloader_iter"
    ):
        quiet().fit(Draws(), Data())


def test_a_data_module_made_from_datasets_gives_its_loaders() -> None:
    data = Data()
    data.setup("fit")
    made = pl.LightningDataModule.from_datasets(data.samples, data.samples, batch_size=4)
    trainer = quiet(max_epochs=1)
    trainer.fit(Model(), made)
    assert trainer.global_step == 3 and "val_loss" in trainer.metrics


def test_an_attribute_that_is_not_in_the_view_is_an_error_that_lists_what_is() -> None:
    class Reaches(Model):
        def on_train_start(self) -> None:
            self.trainer.fit_loop.epoch_loop.advance()  # type: ignore[union-attr]

    with pytest.raises(
        hookline.HookError,
        match=r"trainer.fit_loop.epoch_loop.advance is not available .* There are: automatic_optimization, batch_idx",
    ):
        quiet().fit(Reaches(), Data())
