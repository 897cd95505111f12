"""Where loaders come from, when they are asked for, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch.utils.data import DataLoader, TensorDataset

from hookline import DataModule, Module, OptionError
from hookline.hooks import PredictionWriter


class WithLoaders(Net):
    """Returns its own loaders and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def train_dataloader(self) -> Any:
        self.asked.append("train")
        return batches(2)

    def val_dataloader(self) -> Any:
        self.asked.append("val")
        return batches(1)

    def test_dataloader(self) -> Any:
        self.asked.append("test")
        return batches(3)

    def predict_dataloader(self) -> Any:
        self.asked.append("predict")
        return batches(4)


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return batches(5)

    def val_dataloader(self) -> Any:
        return {"left": batches(1), "right": batches(1)}

    def test_dataloader(self) -> Any:
        return batches(2)

    def predict_dataloader(self) -> Any:
        return batches(2)


def test_the_module_may_bring_its_own_loaders_and_is_asked_once() -> None:
    net = WithLoaders()
    trainer = quiet(max_epochs=3, num_sanity_val_steps=1)
    metrics = trainer.fit(net)
    assert trainer.global_step == 6
    assert "val/loss" in metrics
    assert sorted(net.asked) == ["train", "val"]


def test_loaders_that_are_passed_come_first() -> None:
    net = WithLoaders()
    trainer = quiet()
    trainer.fit(net, batches(4), batches(2))
    assert trainer.global_step == 4
    assert net.asked == []


def test_every_verb_finds_its_loader() -> None:
    net = WithLoaders()
    assert set(quiet().validate(net)) == {"val/loss"}
    assert set(quiet().test(net)) == {"test/loss"}
    assert len(quiet().predict(net)) == 4


def test_a_data_module_serves_every_verb_and_comes_before_the_module() -> None:
    net, data = WithLoaders(), Data()
    trainer = quiet()
    metrics = trainer.fit(net, datamodule=data)
    assert trainer.global_step == 5
    assert {"val/loss", "val/dl_left/loss", "val/dl_right/loss"} <= set(metrics)
    assert set(quiet().test(net, datamodule=data)) == {"test/loss"}
    assert len(quiet().predict(net, datamodule=data)) == 2
    assert net.asked == []


def test_a_data_module_may_be_passed_in_the_loaders_place() -> None:
    trainer = quiet()
    trainer.fit(Net(), Data())
    assert trainer.global_step == 5


def test_after_fit_the_data_module_is_remembered() -> None:
    trainer = quiet()
    trainer.fit(Net(), Data())
    assert set(trainer.test()) == {"test/loss"}


def test_any_iterable_of_batches_is_a_loader() -> None:
    data = TensorDataset(torch.randn(6, 4), torch.randn(6, 2))
    for loader in (DataLoader(data, batch_size=2), batches(3), tuple(batches(3)), iter(batches(3))):
        trainer = quiet()
        trainer.fit(Net(), loader)
        assert trainer.global_step == 3


def test_training_without_a_loader_says_where_it_may_come_from() -> None:
    with pytest.raises(
        OptionError, match=r"needs a training loader: pass it to fit, or return it from Net.train_dataloader"
    ):
        quiet().fit(Net())


def test_something_that_is_no_loader_is_refused() -> None:
    with pytest.raises(OptionError, match="is a int, which cannot be iterated over"):
        quiet().fit(Net(), 3)
    with pytest.raises(OptionError, match=r"look like inputs and targets: pass DataLoader\(TensorDataset"):
        quiet().fit(Net(), torch.randn(6, 4), torch.randn(6, 2))


def test_a_loader_that_drops_its_only_batch_is_refused_with_the_numbers() -> None:
    data = TensorDataset(torch.randn(6, 4), torch.randn(6, 2))
    with pytest.raises(OptionError, match="is empty: 6 samples, batch_size=50 and drop_last=True make no"):
        quiet().fit(Net(), DataLoader(data, batch_size=50, drop_last=True))


def test_a_val_loader_without_a_validation_step_is_refused_before_training() -> None:
    class NoValidation(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("trained")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(
        OptionError,
        match=r"There is a val loader, but NoValidation has no validation_step\(self, batch, batch_idx\)",
    ):
        quiet().fit(NoValidation(), batches(), batches(1))


def test_a_method_with_nearly_the_name_of_a_missing_one_is_named() -> None:
    class Misnamed(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def train_step(self, batch: Any, batch_idx: int) -> Any: ...

        def valid_step(self, batch: Any, batch_idx: int) -> Any: ...

        def configure_optimizer(self) -> Any: ...

    class Steps(Misnamed):
        training_step = Misnamed.train_step

    class Optimizes(Misnamed):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Trains(Optimizes, Steps): ...

    with pytest.raises(OptionError, match="If train_step is meant to be it, rename it"):
        quiet().fit(Optimizes(), batches())
    with pytest.raises(OptionError, match="If configure_optimizer is meant to be it, rename it"):
        quiet().fit(Steps(), batches())
    with pytest.raises(OptionError, match="If valid_step is meant to be it, rename it"):
        quiet().fit(Trains(), batches(), batches())


def test_predictions_of_a_loader_that_shuffles_are_not_in_its_order(caplog: pytest.LogCaptureFixture) -> None:
    data = TensorDataset(torch.randn(6, 4), torch.randn(6, 2))
    quiet().predict(Net(), DataLoader(data, 2))
    assert "shuffles" not in caplog.text
    quiet().predict(Net(), DataLoader(data, 2, shuffle=True))
    assert "The loader 'predict' shuffles, so the predictions are not in the order of" in caplog.text


def test_a_hook_that_writes_predictions_also_writes_their_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = TensorDataset(torch.arange(6.0).reshape(6, 1).expand(6, 4))
    writer = PredictionWriter()
    trainer = quiet(hooks=[writer], run_dir=tmp_path)
    assert trainer.predict(Net(), DataLoader(data, 2, shuffle=True)) == []
    assert "shuffles" not in caplog.text


def test_a_module_without_a_training_step_is_refused() -> None:
    class Nothing(Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(OptionError, match="has no training_step"):
        quiet().fit(Nothing(), batches())


def test_loaders_are_there_only_after_setup() -> None:
    order: list[str] = []

    class Late(Data):
        def prepare_data(self) -> None:
            order.append("prepare")

        def setup(self, stage: str) -> None:
            order.append("setup")

        def train_dataloader(self) -> Any:
            order.append("loader")
            return batches(1)

    quiet(limit_val_batches=0).fit(Net(), Late())
    assert order == ["prepare", "setup", "loader"]


def test_a_sampler_hears_the_epoch() -> None:
    epochs: list[int] = []

    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    data = TensorDataset(torch.randn(4, 4), torch.randn(4, 2))
    quiet(max_epochs=3).fit(Net(), DataLoader(data, sampler=Sampler(data)))
    assert epochs == [0, 1, 2]


# ---- how many updates there will be ------------------------------------------------------------------------------


def estimate(loader: Any, **options: Any) -> float:
    class Ask(Net):
        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    net = Ask()
    trainer = quiet(**options)
    trainer.fit(net, loader)
    if math.isfinite(net.estimate):
        assert trainer.global_step == net.estimate
    return net.estimate


def test_the_number_of_updates_is_known_in_configure_optimizers() -> None:
    assert estimate(batches(5), max_epochs=3) == 15
    assert estimate(batches(5), max_epochs=3, accumulate_grad_batches=2) == 9
    assert estimate(batches(5), max_epochs=3, max_steps=7) == 7
    assert estimate(batches(5), max_epochs=2, limit_train_batches=3) == 6


def test_the_number_of_updates_is_infinite_if_it_cannot_be_told() -> None:
    assert estimate(iter(batches(5))) == math.inf


def test_num_training_batches_is_that_of_one_epoch() -> None:
    trainer = quiet(limit_train_batches=3)
    assert trainer.num_training_batches is None
    trainer.fit(Net(), batches(5))
    assert trainer.num_training_batches == 3


def test_an_empty_validation_loader_is_said_and_the_training_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = quiet()
    metrics = trainer.fit(Net(), batches(2), DataLoader([]))  # type: ignore[arg-type]
    assert "The validation loader 'val' is empty; there is no validation." in caplog.text
    assert trainer.global_step == 2 and "val/loss" not in metrics


def test_validating_on_an_empty_loader_is_refused_because_it_is_empty() -> None:
    with pytest.raises(OptionError, match="The validation loader 'val' is empty"):
        quiet().validate(Net(), [])
    with pytest.raises(OptionError, match=r"validate\(\) needs a loader"):
        quiet().validate(Net())


@pytest.mark.parametrize("options", [{}, {"limit_val_batches": 0}])
def test_nobody_is_warned_who_says_that_there_is_no_validation(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Without(Net):
        def val_dataloader(self) -> Any:
            return []

    quiet(**options).fit(Without(), batches(1), DataLoader([]) if options else None)  # type: ignore[arg-type]
    assert caplog.text == ""
