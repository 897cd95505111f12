"""Precisions of Lightning in which every number has one type, compared with Lightning's own trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.utils.data import DataLoader, TensorDataset

from hookline.interop import lightning as dialect

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

TRAINERS = (pl.Trainer, dialect.Trainer)
TYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "max_epochs": 1,
        "limit_val_batches": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "default_root_dir": folder,
        **more,
    }


class Recorder(BoringModel):
    """Records the types that it sees, and has a layer that is made late."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(2))

    def on_fit_start(self) -> None:
        self.seen.append(("start", self.layer.weight.dtype, self.late.dtype, torch.get_default_dtype()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("batch", [each.dtype for each in batch], torch.get_default_dtype()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).sum() * self.late.sum()
        self.seen.append(("step", loss.dtype, torch.ones(1).dtype, torch.ones(1, dtype=torch.half).dtype))
        return loss

    def on_after_backward(self) -> None:
        self.seen.append(("gradient", self.layer.weight.grad.dtype))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("validation", batch[0].dtype, torch.ones(1).dtype))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0])


def loader() -> Any:
    return DataLoader(TensorDataset(torch.ones(4, 32), torch.arange(4)), batch_size=2)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-true", "64", 64])
def test_module_batches_and_new_tensors_have_the_type(precision: Any, tmp_path: Path) -> None:
    seen, weights = [], []
    for number, kind in enumerate(TRAINERS):
        torch.manual_seed(0)
        model = Recorder()
        trainer = kind(**options(tmp_path / str(number), precision=precision))
        trainer.fit(model, loader(), loader())
        predictions = trainer.predict(model, loader())
        assert torch.get_default_dtype() == torch.float32
        assert trainer.precision == ("64-true" if "64" in str(precision) else precision)
        seen.append([*model.seen, predictions[0].dtype])
        weights.append(model.layer.weight)
    assert seen[0] == seen[1]
    assert torch.equal(*weights)
    assert weights[0].dtype == TYPES[trainer.precision]


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_checkpoint_has_the_type_and_resumes(precision: str, tmp_path: Path) -> None:
    ends = []
    for number, kind in enumerate(TRAINERS):
        torch.manual_seed(0)
        folder = tmp_path / str(number)
        first = kind(**options(folder, precision=precision))
        first.fit(BoringModel(), DataLoader(torch.ones(2, 32)), DataLoader(torch.ones(2, 32)))
        path = first.checkpoint_callback.best_model_path
        saved = torch.load(path, weights_only=True)["state_dict"]["layer.weight"]
        assert saved.dtype == TYPES[precision]
        model = BoringModel()
        again = kind(**options(folder, precision=precision, max_epochs=2))
        again.fit(model, DataLoader(torch.ones(2, 32)), DataLoader(torch.ones(2, 32)), ckpt_path=path)
        assert again.global_step == 4
        ends.append(model.layer.weight)
    assert ends[0].dtype == ends[1].dtype == TYPES[precision]
    torch.testing.assert_close(*ends, rtol=1e-6 if precision == "64-true" else 1e-2, atol=0)


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize(
    ("given", "plugin"),
    [
        ({}, Precision),
        ({"precision": "bf16"}, MixedPrecision),
        ({"precision": "64-true"}, DoublePrecision),
        ({"precision": "16-true"}, HalfPrecision),
        ({"plugins": HalfPrecision("bf16-true")}, HalfPrecision),
        ({"plugins": [DoublePrecision()]}, DoublePrecision),
    ],
)
def test_the_plugin_is_lightnings(kind: Any, given: dict[str, Any], plugin: Any, tmp_path: Path) -> None:
    trainer = kind(**options(tmp_path), **given)
    assert isinstance(trainer.precision_plugin, plugin)
    with trainer.init_module():
        made = torch.nn.Linear(2, 2)
    assert made.weight.dtype == TYPES.get(trainer.precision, torch.float32)
    if trainer.precision in TYPES:
        converted = trainer.precision_plugin.convert_module(torch.nn.Linear(2, 2))
        assert converted.weight.dtype == TYPES[trainer.precision]


@pytest.mark.parametrize("kind", TRAINERS)
def test_wrong_precisions_are_refused(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Precision 'double' is invalid"):
        kind(**options(tmp_path), precision="double")
    with pytest.raises(ValueError, match="Received both `precision=64-true` and `plugins="):
        kind(**options(tmp_path), precision="64-true", plugins=DoublePrecision())


def test_the_dialects_own_modules_are_converted(tmp_path: Path) -> None:
    class Own(dialect.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Own()
    dialect.Trainer(**options(tmp_path, precision="64-true")).fit(model, DataLoader(torch.ones(2, 32)))
    assert model.layer.weight.dtype == torch.float64
    assert "configure_model" not in vars(model)


def test_the_package_is_not_needed(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("hookline.interop.lightning.trainer_parts.installed", lambda *names: None)
    trainer = dialect.Trainer(**options(tmp_path), precision="64-true")
    assert trainer.precision == "64-true"
    with trainer.init_module():
        assert torch.nn.Linear(2, 2).weight.dtype == torch.float64
    with pytest.raises(AttributeError):
        trainer.precision_plugin.convert_module
