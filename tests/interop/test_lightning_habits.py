"""What people's Lightning code does besides: logs from callbacks, draws from several loaders, is resumed in a finetuning."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from tiny import Net, batches, quiet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hookline import Hook, HookError, OptionError
from hookline.data.mixing import Mixture
from hookline.interop import lightning as dialect
from hookline.interop.kempnerforge import TrainingHook
from hookline.interop.lightning.loaders import CombinedBatches

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def loader(n: int) -> Any:
    return DataLoader(batches(n), batch_size=None)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def theirs(**options: Any) -> Any:
    settings = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "enable_checkpointing": False,
        "max_epochs": 1,
    }
    return pl.Trainer(**{**settings, **options})


# ---- code for Lightning 1 ----------------------------------------------------------------------------------------


BASES = pytest.mark.parametrize(
    "base", [pl.LightningModule, dialect.LightningModule], ids=["Lightning's", "dialect's"]
)


@BASES
@pytest.mark.parametrize("kind", ["training", "validation", "test"])
def test_an_epoch_end_hook_of_lightning_1_is_refused_with_the_name_of_the_new_one(
    base: Any, kind: str
) -> None:
    old = type(
        "Old",
        (base,),
        {"training_step": Model.training_step, f"{kind}_epoch_end": lambda self, outputs: None},
    )
    new = "on_train_epoch_end" if kind == "training" else f"on_{kind}_epoch_end"
    with pytest.raises(HookError, match=rf"`{kind}_epoch_end` has been removed.* {new}\."):
        quiet().fit(old(), loader(2))


@BASES
@pytest.mark.parametrize(
    ("argument", "advice"), [("optimizer_idx", r"self\.optimizers\(\)"), ("hiddens", "on the module")]
)
def test_an_argument_of_lightning_1_is_refused_before_something_else_is_passed_for_it(
    base: Any, argument: str, advice: str
) -> None:
    space: dict[str, Any] = {}
    exec(f"def training_step(self, batch, batch_idx, {argument}): raise AssertionError", space)
    old = type("Old", (base,), {"training_step": space["training_step"]})
    with pytest.raises(
        HookError, match=rf"Old\.training_step takes {argument}, an argument of Lightning 1: .*{advice}"
    ):
        quiet().fit(old(), loader(2))


# ---- logging -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "beside",
    [lambda: EarlyStopping("val_loss"), lambda: ModelCheckpoint("kept", monitor="val_loss")],
    ids=["EarlyStopping", "ModelCheckpoint"],
)
@pytest.mark.parametrize(
    "event",
    [
        "on_train_start",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_validation_epoch_end",
        "on_train_epoch_end",
    ],
)
def test_a_hook_logs_through_a_lightning_module_beside_any_callback(
    event: str, beside: Callable[[], Callback]
) -> None:
    space: dict[str, Any] = {}
    exec(f"def {event}(self, module): module.log('mine', 3.0)", space)
    hook = type("Logs", (Hook,), {event: space[event]})()
    trainer = quiet(hooks=[beside(), hook], max_epochs=2)
    trainer.fit(Model(), loader(2), loader(1))
    assert trainer.metrics["mine"] == 3.0


def test_what_a_hook_logs_in_validation_batches_is_their_mean() -> None:
    class Logs(Hook):
        def on_validation_batch_start(self, module: Any, batch_idx: int) -> None:
            module.log("index", float(batch_idx))

    trainer = quiet(hooks=[Logs()])
    trainer.fit(Model(), loader(2), loader(3))
    assert trainer.metrics["index"] == 1.0


def test_lightnings_own_rule_where_not_to_log_still_holds() -> None:
    class Wrong(Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("x", 1.0)

    with pytest.raises(Exception, match=r"can't `self.log\(\)` inside `on_validation_end`"):
        quiet(hooks=[Wrong()]).fit(Model(), loader(1), loader(1))


class Logging(Callback):
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.log("index", float(batch_idx), on_step=False, on_epoch=True)
        self.log_dict({"twice": 2.0 * batch_idx}, on_step=False, on_epoch=True)


@pytest.mark.parametrize("make", [Model, Net], ids=["a LightningModule", "another module"])
def test_a_callback_logs_by_itself_as_in_lightning(make: Any) -> None:
    trainer = quiet(hooks=[Logging()])
    trainer.fit(make(), loader(3), loader(1))
    assert (trainer.metrics["index"], trainer.metrics["twice"]) == (1.0, 2.0)


def test_names_with_several_validation_loaders_are_lightnings() -> None:
    class Both(Model):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("vl", 1.0 + dataloader_idx, on_step=True, on_epoch=True)

    there, here = theirs(), quiet()
    there.fit(Both(), loader(1), [loader(1), loader(1)])
    here.fit(Both(), loader(1), [loader(1), loader(1)])
    names = {name for name in there.callback_metrics if name.startswith("vl")}
    assert "vl_epoch/dataloader_idx_0" in names and names <= set(here.metrics)
    assert here.metrics["vl_epoch/dataloader_idx_1"] == 2.0


def test_a_forge_hook_gets_what_a_lightning_module_logs_in_a_validation() -> None:
    class Evaluates(TrainingHook):
        def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
            self.found = metrics

    hook = Evaluates()
    quiet(hooks=[hook]).fit(Model(), loader(1), loader(1))
    assert set(hook.found) == {"eval/loss", "eval/perplexity"}


# ---- callbacks that the module brings, settings, checkpoints -----------------------------------------------------


class Brings(Model):
    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss", patience=7)]


@pytest.mark.parametrize("verb", ["explain", "validate", "fit"])
def test_a_callback_that_the_modules_own_stood_in_for_is_back_in_its_place_afterwards(verb: str) -> None:
    first, mine, last = Logging(), EarlyStopping("val_loss", patience=9), Callback()
    trainer = quiet(hooks=[first, mine, last])
    module = Brings()
    {
        "explain": lambda: trainer.explain(module),
        "validate": lambda: trainer.validate(module, loader(1)),
        "fit": lambda: trainer.fit(module, loader(1), loader(1)),
    }[verb]()
    assert list(trainer.hooks) == [first, mine, last]
    assert [each.owner.original for each in trainer.plan.listeners("on_validation_end")] == [mine]


@pytest.mark.parametrize("kind", [dialect.Trainer, pl.Trainer], ids=["hookline", "lightning"])
def test_callbacks_that_a_module_brings_stay_with_the_trainer(kind: Any) -> None:
    mine = EarlyStopping("val_loss", patience=9)
    trainer = kind(callbacks=[mine], max_epochs=1, logger=False, enable_progress_bar=False)
    trainer.fit(Brings(), loader(1), loader(1))
    assert trainer.early_stopping_callback.patience == 7
    trainer.fit(Model(), loader(1), loader(1))
    assert trainer.early_stopping_callback.patience == 7 and mine not in trainer.callbacks


def test_what_a_hook_is_told_about_itself_is_heard_of_a_callback_too() -> None:
    class Fails(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise ValueError("boom")

    fails: Any = Fails()
    fails.on_error, fails.order, fails.ranks, fails.name = "warn", -5, "zero", "mine"
    trainer = quiet(hooks=[fails])
    (entry,) = trainer.hooks.entries()
    assert (entry.name, entry.listeners[0].order, entry.hook.ranks) == ("mine", -5, "zero")
    trainer.fit(Model(), loader(2))
    assert trainer.status == "completed"


def test_two_callbacks_whose_name_means_something_else_are_both_taken() -> None:
    class Named(Callback):
        def __init__(self) -> None:
            self.name, self.order, self.ranks = "accuracy", "descending", 7

    trainer = quiet(hooks=[Named(), Named()])
    assert trainer.hooks.list_hooks() == ["accuracy", "named"]


def test_an_entry_that_a_checkpoint_has_not_is_an_error_that_lists_those_it_has() -> None:
    class Asks(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            assert checkpoint.get("hyper_parameters") is None and "epoch" in checkpoint
            checkpoint["hyper_parameters"]

    trainer = quiet(hooks=[Asks()])
    with pytest.raises(
        KeyError, match=r"the checkpoint has no entry 'hyper_parameters'.* There are: epoch, global_step"
    ):
        trainer.fit(Model(), loader(1))
        trainer.save_checkpoint("kept")


def test_an_attribute_of_ones_own_on_the_trainer_is_there_for_all() -> None:
    class Marks(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.my_flag = [1]

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.found = trainer.my_flag

    class Finds(Model):
        def on_train_end(self) -> None:
            self.found = self.trainer.my_flag

    marks, module = Marks(), Finds()
    quiet(hooks=[marks]).fit(module, loader(1))
    assert marks.found == module.found == [1]


@pytest.mark.parametrize(
    "name",
    ["limit_train_batches", "predict_loop", "reload_dataloaders_every_n_epochs", "_checkpoint_connector"],
)
def test_an_attribute_of_lightnings_own_trainer_is_not_the_users_to_set(name: str) -> None:
    class Sets(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            setattr(trainer, name, 1)

    with pytest.raises(HookError, match=f"trainer.{name} = ... is not available"):
        quiet(hooks=[Sets()]).fit(Model(), loader(1))


# ---- a finetuning that is resumed --------------------------------------------------------------------------------


class Tuned(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 2), nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


def test_a_resumed_finetuning_continues_as_if_it_had_not_been_interrupted() -> None:
    def run(epochs: int, resume: str | None = None) -> Any:
        torch.manual_seed(0)
        module = Tuned()
        hooks = [
            BackboneFinetuning(unfreeze_backbone_at_epoch=1),
            ModelCheckpoint("kept", save_last=True, save_top_k=0),
        ]
        trainer = quiet(hooks=hooks, max_epochs=epochs)
        trainer.fit(module, loader(3), resume=resume)
        return module, [len(group["params"]) for group in trainer.optimizers[0].param_groups]

    whole, _ = run(4)
    run(2)
    resumed, groups = run(4, "kept/last.ckpt")
    assert groups == [2, 2]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


# ---- several loaders ---------------------------------------------------------------------------------------------


class Sees(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(
            sorted(batch) if isinstance(batch, dict) else [type(each).__name__ for each in batch]
        )
        return self.layer.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((batch_idx, dataloader_idx))


SEVERAL = {
    "list": lambda: [loader(3), loader(2)],
    "dict": lambda: {"a": loader(3), "b": loader(2)},
    "CombinedLoader": lambda: CombinedLoader({"a": loader(3), "b": loader(2)}, "min_size"),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_loaders_given_to_fit_are_drawn_from_at_once_as_in_lightning(kind: str) -> None:
    there, here = Sees(), Sees()
    theirs().fit(there, SEVERAL[kind]())
    quiet().fit(here, SEVERAL[kind]())
    assert here.seen == there.seen and len(here.seen) == (2 if kind == "CombinedLoader" else 3)


def test_whoever_says_how_to_mix_several_loaders_gets_hooklines_mixture() -> None:
    module = Sees()
    quiet().fit(module, {"a": loader(3), "b": loader(2)}, mixture=Mixture(order="sequential"))
    assert module.seen == [["Tensor", "Tensor"]] * 5


def test_a_combined_loader_is_validated_on_one_loader_after_the_other() -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(1)

        def val_dataloader(self) -> Any:
            return CombinedLoader([loader(2), loader(1)], "sequential")

    given, asked = Sees(), Sees()
    quiet().validate(given, CombinedLoader([loader(2), loader(1)], "sequential"))
    quiet().fit(asked, datamodule=Data())
    assert given.seen == asked.seen[1:] == [(0, 0), (1, 0), (0, 1)]


def test_asking_for_the_length_in_the_middle_of_an_epoch_loses_no_place() -> None:
    beside = CombinedBatches(CombinedLoader([loader(3), loader(2)], "max_size_cycle"))
    assert [len(beside) for _ in beside] == [3, 3, 3]


# ---- what goes another way ---------------------------------------------------------------------------------------


def test_a_compiled_lightning_module_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(
        OptionError, match=r"wrapped by torch.compile.*pass the Model itself, and Trainer\(compile=True\)"
    ):
        quiet().fit(torch.compile(Model(), backend="eager"), loader(1))
