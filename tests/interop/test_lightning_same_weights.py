"""A seeded Lightning program gives the same losses and weights with Hookline's trainer, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import hookline.interop.lightning as dialect


class Noisy(Dataset[Tensor]):
    """Samples with noise from torch's stream, so that a draw too many changes everything after it."""

    def __init__(self, size: int) -> None:
        self.rows = torch.randn(size, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] + 0.01 * torch.randn(6)


class Stream(IterableDataset[Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.randn(6) for _ in range(self.size))


class Model(pl.LightningModule):
    def __init__(self, optimizers: Callable[[Model], Any], manual: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 1))
        self.optimizers_of = optimizers
        self.automatic_optimization = not manual
        self.losses: list[float] = []
        self.steps: list[tuple[int, int]] = []

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, list | tuple):
            batch = sum(batch)
        if isinstance(batch, dict):
            batch = sum(each for each in batch.values() if each is not None)
        found: Tensor = self.net(batch).pow(2).mean()
        self.losses.append(found.item())
        self.steps.append((self.trainer.global_step, self.trainer.current_epoch))
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.automatic_optimization:
            return self.loss(batch)
        loss = torch.zeros(())
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(self)


def adam(model: Model) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def two(model: Model) -> Any:
    return torch.optim.SGD(model.net[0].parameters(), 0.1), torch.optim.Adam(model.net[2].parameters(), 0.01)


def lbfgs(model: Model) -> Any:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


def falling(**schedule: Any) -> Callable[[Model], Any]:
    def make(model: Model) -> Any:
        optimizer = adam(model)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.7), **schedule},
        }

    return make


def plateau(model: Model) -> Any:
    optimizer = adam(model)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def train(size: int = 22, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(Noisy(size), batch_size=4, shuffle=True, **options)


def val(size: int = 9, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(Noisy(size), batch_size=4, **options)


def both() -> tuple[Any, Any]:
    return train(), val()


def combined(mode: str) -> Callable[[], tuple[Any, Any]]:
    return lambda: (CombinedLoader({"a": train(8), "b": train(16)}, mode), val())  # type: ignore[arg-type]


def weighted() -> tuple[Any, Any]:
    return DataLoader(Noisy(22), batch_size=4, sampler=WeightedRandomSampler([1.0] * 22, 16)), val()


CASES: dict[str, tuple[Callable[[Model], Any], Callable[[], tuple[Any, Any]], dict[str, Any]]] = {
    "shuffled": (adam, both, {"max_epochs": 3}),
    "no sanity check": (adam, both, {"max_epochs": 2, "num_sanity_val_steps": 0}),
    "workers": (adam, lambda: (train(num_workers=2), val(num_workers=1)), {"max_epochs": 2}),
    "persistent workers": (
        adam,
        lambda: (train(num_workers=1, persistent_workers=True), None),
        {"max_epochs": 3},
    ),
    "own generator": (
        adam,
        lambda: (train(generator=torch.Generator().manual_seed(3)), val()),
        {"max_epochs": 2},
    ),
    "sampler": (adam, weighted, {"max_epochs": 2}),
    "shuffled validation": (adam, lambda: (train(), train(9)), {"max_epochs": 2}),
    "two validation loaders": (adam, lambda: (train(), [val(), val(5)]), {"max_epochs": 2}),
    "two training loaders": (adam, lambda: ([train(8), train(16)], val()), {"max_epochs": 2}),
    "combined by the shortest": (adam, combined("min_size"), {"max_epochs": 2}),
    "combined by the longest": (adam, combined("max_size"), {"max_epochs": 2}),
    "combined in cycles": (adam, combined("max_size_cycle"), {"max_epochs": 2}),
    "stream": (
        adam,
        lambda: (DataLoader(Stream(10), batch_size=3), DataLoader(Stream(4), batch_size=2)),
        {"max_epochs": 3},
    ),
    "limited stream": (
        adam,
        lambda: (DataLoader(Stream(10), batch_size=3), val()),
        {"max_epochs": 3, "limit_train_batches": 2},
    ),
    "accumulated stream": (
        adam,
        lambda: (DataLoader(Stream(10), batch_size=3), None),
        {"max_epochs": 3, "accumulate_grad_batches": 3},
    ),
    "short last window": (adam, both, {"max_epochs": 3, "accumulate_grad_batches": 4}),
    "clipped by norm": (adam, both, {"max_epochs": 2, "gradient_clip_val": 0.1}),
    "clipped by value": (
        adam,
        both,
        {"max_epochs": 2, "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    ),
    "manual": (two, both, {"max_epochs": 2}),
    "manual with max_steps": (two, both, {"max_steps": 7}),
    "lbfgs": (lbfgs, both, {"max_epochs": 2}),
    "schedule by step": (falling(interval="step", frequency=4), both, {"max_epochs": 3}),
    "schedule by step, accumulated": (
        falling(interval="step", frequency=2),
        both,
        {"max_epochs": 3, "accumulate_grad_batches": 2},
    ),
    "schedule by epoch": (falling(interval="epoch", frequency=2), both, {"max_epochs": 4}),
    "plateau": (plateau, both, {"max_epochs": 4}),
    "overfit": (adam, both, {"max_epochs": 3, "overfit_batches": 2}),
    "overfit a share": (adam, both, {"max_epochs": 3, "overfit_batches": 0.5}),
    "limits": (adam, both, {"max_epochs": 3, "limit_train_batches": 3, "limit_val_batches": 1}),
    "limited shares": (adam, both, {"max_epochs": 2, "limit_train_batches": 0.5, "limit_val_batches": 0.4}),
    "validation every 2 batches": (adam, both, {"max_epochs": 3, "val_check_interval": 2}),
    "validation by a share": (adam, both, {"max_epochs": 3, "val_check_interval": 0.4}),
    "validation across epochs": (
        adam,
        both,
        {"max_epochs": 3, "val_check_interval": 8, "check_val_every_n_epoch": None},
    ),
    "validation every 2 epochs": (adam, both, {"max_epochs": 4, "check_val_every_n_epoch": 2}),
    "max_steps": (adam, both, {"max_steps": 8}),
    "bf16": (adam, both, {"max_epochs": 2, "precision": "bf16-mixed"}),
    "fast_dev_run": (adam, both, {"fast_dev_run": 4, "accumulate_grad_batches": 2}),
}


def fitted(kind: type[Any], name: str) -> tuple[Model, Any, float]:
    """Train, and return also the next random number: both must have drawn as many."""
    optimizers, data, options = CASES[name]
    pl.seed_everything(1, verbose=False)
    model = Model(optimizers, manual=optimizers is two)
    loaders = data()
    trainer = kind(
        **options,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, *loaders)
    return model, trainer, torch.rand(()).item()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_losses_the_weights_and_the_counts_are_lightnings(name: str) -> None:
    theirs, their_trainer, their_next = fitted(pl.Trainer, name)
    ours, our_trainer, our_next = fitted(dialect.Trainer, name)
    assert len(theirs.losses) > 3
    assert ours.losses == theirs.losses
    assert ours.steps == theirs.steps
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, other)
    assert our_next == their_next
    assert our_trainer.global_step == their_trainer.global_step
    assert our_trainer.current_epoch == their_trainer.current_epoch


class Cut(Model):
    """Ends each epoch at its fourth batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


@pytest.mark.filterwarnings("ignore")
def test_an_epoch_that_minus_one_ends_is_not_validated_as_in_lightning() -> None:
    found = []
    for kind in (pl.Trainer, dialect.Trainer):
        pl.seed_everything(1, verbose=False)
        model = Cut(adam)
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        kind(max_epochs=3, accelerator="cpu", enable_model_summary=False, **options).fit(model, *both())
        found.append((model.losses, model.net[0].weight.tolist(), torch.rand(()).item()))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("base", [dialect.Callback, pl.Callback])
def test_the_loss_among_the_outputs_is_divided_by_the_window_in_every_callback(base: Any) -> None:
    class Seen(base):  # type: ignore[misc]
        losses: list[tuple[str, float]]

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            self.losses.append(("backward", loss.item()))

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.losses.append(("end", outputs["loss"].item()))

    found = []
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for kind, bases in ((pl.Trainer, pl.Callback), (dialect.Trainer, base)):
        seen = type(
            "Seen", (bases,), {name: vars(Seen)[name] for name in vars(Seen) if name.startswith("on_")}
        )()
        seen.losses = []
        pl.seed_everything(1, verbose=False)
        trainer = kind(
            max_epochs=1, accumulate_grad_batches=2, enable_model_summary=False, callbacks=[seen], **options
        )
        trainer.fit(Model(adam), train())
        found.append(seen.losses)
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore")
def test_a_sanity_check_does_not_change_the_batches() -> None:
    with_check, without = (fitted(dialect.Trainer, name)[0] for name in ("shuffled", "no sanity check"))
    checked = 2
    assert with_check.losses[checked : checked + 6] == without.losses[:6]


class Stopped(RuntimeError):
    pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_failed_in_an_epoch_continues_with_the_same_batches(tmp_path: Any, workers: int) -> None:
    def run(fail_at: int | None, **more: Any) -> Model:
        class Fails(pl.Callback):
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                if trainer.global_step == 8:
                    trainer.save_checkpoint(str(tmp_path / "saved"))
                if trainer.global_step == fail_at:
                    raise Stopped

        pl.seed_everything(1, verbose=False)
        model = Model(adam)
        trainer = dialect.Trainer(
            max_epochs=3,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[Fails()] if fail_at != -1 else [],
            default_root_dir=tmp_path,
        )
        try:
            trainer.fit(model, train(num_workers=workers), val(), **more)
        except Stopped:
            assert fail_at is not None
        return model

    whole = run(None)
    run(9)
    rest = run(-1, ckpt_path=str(tmp_path / "saved"))
    assert rest.losses == whole.losses[-len(rest.losses) :]
    for own, other in zip(rest.parameters(), whole.parameters(), strict=True):
        assert torch.equal(own, other)
