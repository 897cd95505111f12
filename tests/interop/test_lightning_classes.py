"""The dialect's own classes have what users call on Lightning's, and do the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from tiny import quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hookline import OptionError
from hookline.interop import lightning as dialect

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

OPTIONS: dict[str, Any] = {
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
    "accelerator": "cpu",
}
NOT_HERE = {"to_tensorrt", "configure_sharded_model"}
"""TensorRT is not a part of PyTorch; the other is an old name of configure_model, which is supported."""


def train(package: Any, module: Any, *data: Any, **options: Any) -> Any:
    extra = {"enable_model_summary": False} if package is pl else {}
    trainer = package.Trainer(**OPTIONS, **extra, **options)
    trainer.fit(module, *data)
    return trainer


def net_of(package: Any) -> Any:
    class Net(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("count", torch.zeros(1, dtype=torch.long))

        def forward(self, x: Any) -> Any:
            return self.layer(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0] if isinstance(batch, list | tuple) else batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Net


def samples(n: int = 4) -> Any:
    return TensorDataset(torch.arange(4.0 * n).reshape(n, 4))


both = pytest.mark.parametrize("package", [pl, dialect], ids=["lightning", "hookline"])


@pytest.mark.parametrize("name", ["LightningModule", "LightningDataModule", "Callback"])
def test_no_public_name_is_missing(name: str) -> None:
    theirs, ours = getattr(pl, name), getattr(dialect, name)
    public = {each for each in dir(theirs) if each[0].islower()} - NOT_HERE
    assert {each for each in public if not hasattr(ours, each)} == set()


@both
def test_a_module_is_frozen_and_unfrozen(package: Any) -> None:
    module = net_of(package)()
    assert module.freeze() is module
    assert not module.training
    assert not any(each.requires_grad for each in module.parameters())
    module.unfreeze()
    assert module.training
    assert all(each.requires_grad for each in module.parameters())


@both
def test_a_module_outside_of_a_run_has_zeros_and_no_logger(package: Any) -> None:
    module = net_of(package)()
    assert (module.current_epoch, module.global_step, module.global_rank, module.local_rank) == (0, 0, 0, 0)
    assert (module.logger, module.loggers, module.example_input_array) == (None, [], None)
    assert (module.strict_loading, module.on_gpu, module.device_mesh, module.fabric) == (
        True,
        False,
        None,
        None,
    )
    assert (module.dtype, module.to(torch.float64).dtype) == (torch.float32, torch.float64)


@both
def test_after_a_run_a_module_still_has_its_trainer(package: Any) -> None:
    module = net_of(package)()
    trainer = train(package, module, DataLoader(samples()))
    assert (module.global_step, module.current_epoch) == (4, 1)
    assert module.trainer.global_step == trainer.global_step == 4


@both
def test_all_gather_returns_tensors_in_the_same_structure(package: Any) -> None:
    class Gathers(net_of(package)):  # type: ignore[misc]
        def on_train_start(self) -> None:
            self.gathered = self.all_gather({"a": torch.ones(2), "b": [1, 2.5]})

    module = Gathers()
    train(package, module, DataLoader(samples(1)))
    assert module.gathered["a"].tolist() == [1, 1]
    assert [each.item() for each in module.gathered["b"]] == [1, 2.5]


@both
def test_manual_optimization_has_lightnings_calls(package: Any) -> None:
    class Manual(net_of(package)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, plain = self.optimizers(), self.optimizers(use_pl_optimizer=False)
            assert isinstance(plain, torch.optim.SGD)
            assert plain is optimizer.optimizer
            assert self.lr_schedulers() is None
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = self(batch[0]).sum()
            self.manual_backward(loss, None, True)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "value")
            self.clip_gradients(optimizer)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.clipped = self.layer.weight.grad.abs().max().item()

    module = Manual()
    train(package, module, DataLoader(samples(2)))
    assert module.clipped == 0.5


@both
def test_several_schedulers_are_a_list(package: Any) -> None:
    class Scheduled(net_of(package)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(self.number)]

        def on_train_start(self) -> None:
            self.found = self.lr_schedulers()

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            self.saved = [len(checkpoint["lr_schedulers"]), len(checkpoint["optimizer_states"])]
            assert "layer.weight" in checkpoint["state_dict"]
            assert checkpoint["epoch"] == 0 and checkpoint["global_step"] > 0
            checkpoint["own"] = 3

    for number in (1, 2):
        module = Scheduled()
        module.number = number
        package.Trainer(**{**OPTIONS, "enable_checkpointing": True}).fit(module, DataLoader(samples(1)))
        assert isinstance(module.found, list) == (number == 2)
        assert module.saved == [number, 1]


@both
def test_a_combined_loader_gives_a_batch_of_each(package: Any) -> None:
    class Combined(net_of(package)):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return CombinedLoader({"a": DataLoader(samples(2)), "b": DataLoader(samples(4))}, "min_size")

        def val_dataloader(self) -> Any:
            return CombinedLoader([DataLoader(samples(1)), DataLoader(samples(2))], "sequential")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            got.append(sorted(batch))
            return self(batch["a"][0]).sum()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            got.append(dataloader_idx)

    got: list[Any] = []
    train(package, Combined())
    assert got == [["a", "b"], ["a", "b"], 0, 1, 1]
    got.clear()
    train(package, Combined(), CombinedLoader({"a": DataLoader(samples(1))}))
    assert got == [["a"], 0, 1, 1]


@both
def test_a_data_module_is_made_from_datasets(package: Any) -> None:
    class Sized(package.LightningDataModule):  # type: ignore[misc]
        def __init__(self, batch_size: int, note: str) -> None:
            super().__init__()
            self.size, self.note = batch_size, note

    made = Sized.from_datasets(samples(4), [samples(2), samples(3)], batch_size=2, note="n")
    assert (made.size, made.note) == (2, "n")
    assert made.train_dataloader().batch_size == 2
    assert [len(each) for each in made.val_dataloader()] == [1, 2]
    assert not hasattr(made, "trainer") or made.trainer is None

    class Counts(net_of(package)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            got.append(dataloader_idx)

    got: list[int] = []
    trainer = train(package, Counts(), made)
    assert trainer.global_step == 2
    assert got == [0, 1, 1]
    plain = package.LightningDataModule.from_datasets(samples(3))
    assert train(package, Counts(), plain).global_step == 3


def test_a_data_module_is_made_again_from_a_checkpoint(tmp_path: Path) -> None:
    class Sized(dialect.LightningDataModule):
        def __init__(self, batch_size: int = 1, shuffle: bool = False) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.epochs = 0

        def train_dataloader(self) -> Any:
            self.epochs += 1
            return DataLoader(samples(), **self.hparams)

        def state_dict(self) -> dict[str, Any]:
            return {"epochs": self.epochs}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.epochs = state["epochs"]

    quiet(checkpoint=True, run_dir=tmp_path).fit(net_of(dialect)(), datamodule=Sized(2))
    again = Sized.load_from_checkpoint(tmp_path, shuffle=True)
    assert (again.hparams, again.epochs) == ({"batch_size": 2, "shuffle": True}, 1)
    assert again.name == "Sized"


@both
def test_a_module_may_clear_its_gradients_before_validation(package: Any) -> None:
    class Clears(net_of(package)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            got.append(self.training)

        def on_validation_model_zero_grad(self) -> None:
            got.append("clear")
            super().on_validation_model_zero_grad()

        def on_validation_model_train(self) -> None:
            super().on_validation_model_train()
            got.append("train")

    got: list[Any] = []
    train(package, Clears(), DataLoader(samples(1)), DataLoader(samples(1)))
    assert got == ["clear", False, "train"]


@both
def test_without_strict_loading_missing_weights_stay(package: Any, tmp_path: Path) -> None:
    class Partial(net_of(package)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.strict_loading = False
            self.frozen = nn.Linear(2, 2)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            full = super().state_dict(*args, **kwargs)
            return {name: each for name, each in full.items() if not name.startswith("frozen")}

    first = Partial()
    quiet(checkpoint=True, run_dir=tmp_path).fit(first, DataLoader(samples(2)))
    second = Partial()
    kept = second.frozen.weight.detach().clone()
    quiet(max_epochs=2).fit(second, DataLoader(samples(2)), resume=tmp_path)
    assert torch.equal(second.frozen.weight, kept)
    third = Partial()
    third.strict_loading = True
    with pytest.raises(Exception, match="frozen"):
        quiet(max_epochs=2).fit(third, DataLoader(samples(2)), resume=tmp_path)


def test_torchscript_is_refused_with_what_to_write_instead(tmp_path: Path) -> None:
    module = net_of(dialect)()
    with pytest.raises(OptionError, match=r"Net.to_torchscript is not available.*torch.export.export"):
        module.to_torchscript()
    exported = torch.export.export(module, (torch.ones(1, 4),))
    assert torch.equal(exported.module()(torch.ones(1, 4)), module(torch.ones(1, 4)))
    with pytest.raises(OptionError, match=r"to_onnx needs an input of Net.forward: .*example_input_array"):
        module.to_onnx(tmp_path / "net.onnx")


def test_a_model_is_exported_to_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    module = net_of(dialect)()
    module.to_onnx(tmp_path / "net.onnx", torch.ones(1, 4))
    assert (tmp_path / "net.onnx").stat().st_size > 100


@pytest.mark.parametrize("is_automatic", [True, False], ids=["automatic", "manual"])
def test_the_trainer_shows_the_progress_in_the_hooks_of_a_module(is_automatic: bool) -> None:
    def seen_by(package: Any) -> list[Any]:
        seen: list[Any] = []

        class Watching(net_of(package)):  # type: ignore[misc]
            automatic_optimization = is_automatic

            def look(self) -> None:
                loop = self.trainer.fit_loop.epoch_loop
                progress = loop.batch_progress.current, loop.batch_progress.total
                counts = [(each.ready, each.started, each.processed, each.completed) for each in progress]
                seen.append((self.trainer.is_last_batch, loop.batch_idx, *counts))

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.look()
                loss = super().training_step(batch, batch_idx)
                if self.automatic_optimization:
                    return loss
                self.manual_backward(loss)
                return self.optimizers().step()

            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                self.look()

            def on_before_optimizer_step(self, optimizer: Any) -> None:
                self.look()

            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                self.look()

        train(package, Watching(), DataLoader(torch.ones(6, 4), 2))
        return seen

    seen = seen_by(dialect)
    assert seen == seen_by(pl)
    assert [each[0] for each in seen] == [False] * 8 + [True] * 4
