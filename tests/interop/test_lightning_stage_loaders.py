"""Loaders in every structure that Lightning takes, its warnings about them and its errors, compared with
Lightning's own trainer.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, RandomDataset
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hookline.interop import lightning as dialect

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

TRAINERS = pytest.mark.parametrize("kind", [pl.Trainer, dialect.Trainer], ids=["theirs", "ours"])
OPTIONS: dict[str, Any] = {
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "accelerator": "cpu",
}


class Seen(BoringModel):
    """Records the batches of every stage; it does not train on them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((batch, batch_idx, dataloader_idx))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch)


class Empty(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def samples(batches: int = 4, **options: Any) -> Any:
    return DataLoader(RandomDataset(32, batches), **options)


# ---- structures --------------------------------------------------------------------------------------------


@TRAINERS
def test_nested_training_loaders_give_batches_of_their_structure(kind: Any) -> None:
    given = {"x": range(3), "y": [range(5, 7), (range(9), {"z": range(1)})]}
    trainer, module = kind(**OPTIONS, limit_val_batches=0), Seen()
    trainer.fit(module, given)
    assert len(module.seen) == 9
    assert [each["y"][1][1]["z"] for each in module.seen] == [0] * 9
    assert module.seen[3] == {"x": 0, "y": [6, (3, {"z": 0})]}
    assert trainer.train_dataloader == given
    assert trainer.num_training_batches == 9


@TRAINERS
def test_nested_evaluation_loaders_are_read_one_after_the_other(kind: Any) -> None:
    given = {"a": [range(3), range(5, 7)], "b": {"c": range(1)}}
    trainer, module = kind(**OPTIONS, limit_val_batches=2), Seen()
    trainer.validate(module, given)
    assert module.seen == [(0, 0, 0), (1, 1, 0), (5, 0, 1), (6, 1, 1), (0, 0, 2)]
    assert trainer.num_val_batches == [2, 2, 1]
    assert trainer.val_dataloaders == given


@TRAINERS
@pytest.mark.parametrize(
    "mode, batches", [("min_size", [[0, 5], [1, 6]]), ("max_size", [[0, 5], [1, 6], [2, None]])]
)
def test_a_combined_loader_keeps_its_mode(kind: Any, mode: str, batches: list[Any]) -> None:
    given = CombinedLoader([range(3), range(5, 7)], mode)  # type: ignore[arg-type]
    trainer, module = kind(**OPTIONS, limit_val_batches=0), Seen()
    trainer.fit(module, given)
    assert module.seen == batches
    assert trainer.train_dataloader is given.iterables
    trainer, module = kind(**OPTIONS), Seen()
    trainer.test(module, given)
    assert module.seen == batches
    assert trainer.num_test_batches == [3, 2]


@TRAINERS
def test_a_training_step_cannot_take_loaders_in_sequence(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"FitLoop` does not support.*sequential"):
        kind(**OPTIONS).fit(Seen(), CombinedLoader([range(3)], "sequential"))


@TRAINERS
def test_predictions_are_made_of_loaders_in_sequence_only(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"predict\(\)` only supports.*sequential"):
        kind(**OPTIONS).predict(Seen(), CombinedLoader([range(3)], "min_size"))


@TRAINERS
def test_a_reloaded_structure_is_the_one_that_is_shown(kind: Any) -> None:
    shown = []

    class Module(Seen):
        def train_dataloader(self) -> Any:
            return {"a": [range(self.current_epoch, 3)]}

        def on_train_epoch_start(self) -> None:
            shown.append(self.trainer.train_dataloader)

    options = {**OPTIONS, "max_epochs": 2}
    kind(**options, limit_val_batches=0, reload_dataloaders_every_n_epochs=1).fit(Module())
    assert shown == [{"a": [range(3)]}, {"a": [range(1, 3)]}]


# ---- limits and lengths ------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.zeros(4, 32))


class Sized(Stream):
    def __len__(self) -> int:
        return 4


@TRAINERS
def test_a_loader_without_a_length_has_infinitely_many_batches(kind: Any) -> None:
    trainer = kind(**OPTIONS)
    trainer.fit(BoringModel(), DataLoader(Stream()), DataLoader(Stream()))
    assert trainer.num_training_batches == float("inf")
    assert trainer.num_val_batches == [float("inf")]


@TRAINERS
@pytest.mark.parametrize("stage, kind_of", [("fit", "train"), ("validate", "val"), ("predict", "predict")])
def test_a_fraction_of_a_loader_without_a_length_is_refused(kind: Any, stage: str, kind_of: str) -> None:
    trainer, module = kind(**OPTIONS, **{f"limit_{kind_of}_batches": 0.5}), BoringModel()
    setattr(module, f"{kind_of}_dataloader", lambda: DataLoader(Stream()))
    with pytest.raises(MisconfigurationException, match=rf"limit_{kind_of}_batches\)`.*`1.0` or an int"):
        {"fit": trainer.fit, "validate": trainer.validate, "predict": trainer.predict}[stage](module)


@TRAINERS
def test_a_fraction_of_no_batch_is_refused(kind: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"0.01 \* 4 < 1.*Try at least"):
        kind(**OPTIONS, limit_train_batches=0.01).fit(BoringModel(), samples())


@TRAINERS
@pytest.mark.parametrize(
    "options",
    [{"limit_train_batches": 1.2}, {"val_check_interval": -0.1}, {"overfit_batches": 1.5}],
    ids=lambda each: next(iter(each)),
)
def test_a_limit_that_is_neither_a_number_nor_a_fraction_is_refused(kind: Any, options: Any) -> None:
    with pytest.raises(MisconfigurationException, match="passed invalid value"):
        kind(**options)


@TRAINERS
def test_a_large_float_is_a_number_of_batches(kind: Any) -> None:
    trainer = kind(**OPTIONS, limit_test_batches=1e50)
    trainer.test(BoringModel(), samples(3))
    assert trainer.num_test_batches == [3]


@TRAINERS
def test_a_validation_interval_beyond_the_epoch_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="less than or equal to the number of the training batches"):
        kind(**OPTIONS, val_check_interval=100).fit(BoringModel(), samples(3))


# ---- no batches --------------------------------------------------------------------------------------------


@TRAINERS
def test_epochs_without_batches_are_counted(kind: Any) -> None:
    trainer = kind(**{**OPTIONS, "max_epochs": 2})
    trainer.fit(BoringModel(), DataLoader(Empty()), DataLoader(Empty()))
    assert (trainer.global_step, trainer.current_epoch) == (0, 2)


@TRAINERS
def test_a_loader_of_length_zero_is_a_warning(kind: Any) -> None:
    trainer, zero = kind(**OPTIONS), samples(0)
    with pytest.warns(UserWarning, match="Total length of `DataLoader` across ranks is zero"):
        trainer.fit(BoringModel(), zero, zero)
    assert (trainer.global_step, trainer.num_training_batches) == (0, 0)
    assert trainer.validate(BoringModel(), zero) == []
    assert trainer.num_val_batches == [0]


# ---- warnings ----------------------------------------------------------------------------------------------


@TRAINERS
def test_a_shuffled_evaluation_loader_is_a_warning(kind: Any) -> None:
    with pytest.warns(PossibleUserWarning, match="recommended .* turn shuffling off for val/test"):
        kind(**OPTIONS).validate(BoringModel(), samples(shuffle=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*shuffling")
        kind(**OPTIONS).validate(BoringModel(), samples())


@TRAINERS
def test_few_workers_are_a_warning_for_every_loader(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = "lightning.pytorch.trainer.connectors.data_connector"
    monkeypatch.setattr(f"{connector}.suggested_max_num_workers", lambda devices: 7)
    with pytest.warns(
        PossibleUserWarning, match="The 'train_dataloader' does not have many workers"
    ) as caught:
        kind(**OPTIONS).fit(Seen(), {"a": [samples(), samples()]}, samples())
    texts = [str(each.message) for each in caught]
    assert sum("'train_dataloader' does not have many" in each for each in texts) == 2
    assert sum("'val_dataloader' does not have many" in each for each in texts) == 1


@TRAINERS
def test_an_iterable_dataset_with_a_length_is_a_warning(kind: Any) -> None:
    for stage in ("fit", "test", "predict"):
        trainer, module = kind(**OPTIONS), BoringModel()
        with pytest.warns(UserWarning, match="Your `IterableDataset` has `__len__` defined"):
            {"fit": trainer.fit, "test": trainer.test, "predict": trainer.predict}[stage](
                module, DataLoader(Sized())
            )


@TRAINERS
def test_a_transfer_hook_of_the_data_module_comes_first_with_a_warning(kind: Any) -> None:
    from lightning.pytorch.trainer.connectors.data_connector import warning_cache

    warning_cache.clear()
    used = []
    module, data = BoringModel(), BoringDataModule()
    module.on_before_batch_transfer = lambda batch, index: used.append("module") or batch  # type: ignore
    data.on_before_batch_transfer = lambda batch, index: used.append("data") or batch  # type: ignore
    with pytest.warns(UserWarning, match="have overridden `on_before_batch_transfer` in both"):
        kind(**OPTIONS, limit_train_batches=1, limit_val_batches=0).fit(module, datamodule=data)
    assert used == ["data"]


@TRAINERS
def test_overfitting_reads_every_loader_in_order_with_a_warning(kind: Any) -> None:
    class Module(Seen):
        def train_dataloader(self) -> Any:
            data = RandomDataset(32, 4)
            return [DataLoader(data, sampler=RandomSampler(data)) for _ in range(2)]

    trainer = kind(**OPTIONS, overfit_batches=2)
    with pytest.warns(UserWarning, match="overfit.*shuffling"):
        trainer.fit(Module())
    assert all(isinstance(each.sampler, SequentialSampler) for each in trainer.train_dataloader)


# ---- errors ------------------------------------------------------------------------------------------------


@TRAINERS
@pytest.mark.parametrize("stage, name", [("fit", "train_dataloaders"), ("predict", "dataloaders")])
@pytest.mark.parametrize("given", [None, object(), [range(1), object()]], ids=["none", "object", "in a list"])
def test_what_is_not_a_loader_is_refused(kind: Any, stage: str, name: str, given: Any) -> None:
    module, trainer = BoringModel(), kind(**OPTIONS)
    module.train_dataloader = module.predict_dataloader = None  # type: ignore
    run: Any = {"fit": trainer.fit, "predict": trainer.predict}[stage]
    with pytest.raises(TypeError, match=rf"invalid dataloader was passed to `Trainer.{stage}\({name}"):
        run(module, given)
    method = "train_dataloader" if stage == "fit" else "predict_dataloader"
    setattr(module, method, lambda: given)
    with pytest.raises(TypeError, match=f"invalid dataloader was returned from `BoringModel.{method}"):
        run(module)


@TRAINERS
def test_the_index_of_the_loader_is_required_with_several_and_refused_with_one(kind: Any) -> None:
    class WithIndex(BoringModel):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...  # type: ignore

    class OtherName(BoringModel):
        def validation_step(self, batch: Any, batch_idx: int, dl_idx: int) -> None: ...  # type: ignore

    trainer = kind(**OPTIONS)
    with pytest.raises(RuntimeError, match="have included `dataloader_idx` in `WithIndex.validation_step"):
        trainer.validate(WithIndex(), samples())
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'dl_idx'"):
        trainer.validate(OtherName(), samples())
    with pytest.raises(RuntimeError, match="no `dataloader_idx` argument in `BoringModel.validation_step"):
        trainer.validate(BoringModel(), [samples(), samples()])
    trainer.validate(WithIndex(), [samples(), samples()])


@TRAINERS
@pytest.mark.parametrize("returned", ["text", 5, {"a": 1}], ids=str)
def test_a_step_that_returns_no_loss_is_refused(kind: Any, returned: Any) -> None:
    class Module(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return returned

    with pytest.raises(MisconfigurationException, match=r"must return a Tensor, a dict, or None|'loss' key"):
        kind(**OPTIONS).fit(Module())


@TRAINERS
def test_a_manual_step_returns_a_tensor_or_a_dictionary(kind: Any) -> None:
    class Module(Seen):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return "text"

    with pytest.raises(MisconfigurationException, match="must either return a Tensor or have no return"):
        kind(**OPTIONS).fit(Module(), samples())


@TRAINERS
def test_a_closure_that_is_not_called_is_refused(kind: Any) -> None:
    class Module(BoringModel):
        def optimizer_step(self, epoch: int, batch_idx: int, *args: Any, **kwargs: Any) -> None:
            kwargs.get("optimizer", args[0] if args else None).step()

    with pytest.raises(MisconfigurationException, match="The closure hasn't been executed"):
        kind(**OPTIONS).fit(Module())


# ---- what a stage returns ----------------------------------------------------------------------------------


@TRAINERS
def test_predictions_that_are_not_kept_are_none(kind: Any) -> None:
    trainer = kind(**OPTIONS)
    assert trainer.predict(BoringModel(), samples(), return_predictions=False) is None
    assert trainer.predict_loop.predictions == []


@TRAINERS
def test_a_prediction_writer_takes_an_iterable_dataset(kind: Any) -> None:
    written = []

    class Writer(BasePredictionWriter):
        def write_on_batch_end(
            self, trainer: Any, module: Any, prediction: Any, indices: Any, *rest: Any
        ) -> None:
            written.append(indices)

    kind(**OPTIONS, callbacks=Writer("batch")).predict(BoringModel(), DataLoader(Stream(), batch_size=2))
    assert [list(each or ()) for each in written] == [[], []]


@TRAINERS
def test_a_stop_before_the_first_epochs_is_logged(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Module(BoringModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = True

    with caplog.at_level(logging.INFO), caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        trainer = kind(**{**OPTIONS, "max_epochs": 3}, min_epochs=2, limit_val_batches=0)
        trainer.fit(Module(), samples(2))
    assert trainer.current_epoch == 2
    assert "`min_epochs=2` or `min_steps=None` has not been met. Training will continue" in caplog.text
