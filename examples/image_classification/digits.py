"""Train a small CNN to read handwritten digits: augmentation, averaged weights, early stopping, the best
checkpoint.

`python examples/image_classification/digits.py`, then `classify_digits.py` beside this file.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader, TensorDataset

from hookline import DataModule, Hook, Metrics, Module, Trainer, seed_everything
from hookline.hooks import EarlyStopping, ModelCheckpoint, WeightAveraging


class DigitNet(Module):
    """A CNN for images of 8 x 8 pixels."""

    def __init__(self, width: int = 16, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * width, 10)),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return cross_entropy(self(images), labels)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        images, labels = batch
        logits = self(images)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        return {"loss": cross_entropy(logits, labels), "accuracy": accuracy}  # val/loss, val/accuracy

    def test_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        return self.validation_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)


class Digits(DataModule):
    """The digits that come with scikit-learn: 1297 to train, 200 to validate, 300 to test."""

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.train, self.val, self.test = (
            TensorDataset(images[part], labels[part])
            for part in (order[:1297], order[1297:1497], order[1497:])
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=64, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val, batch_size=200)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.test, batch_size=300)


class Augment(Hook):
    """Shifts each batch of training images by up to one pixel."""

    def on_after_batch_transfer(self, batch: list[Tensor], module: DigitNet) -> list[Tensor]:
        if not module.training:  # a validation or a test
            return batch
        images, labels = batch
        down, right = torch.randint(3, (2,)).tolist()
        return [pad(images, (1, 1, 1, 1))[:, :, down : down + 8, right : right + 8], labels]


class Report(Hook):
    """Prints the result of each validation."""

    def on_validation_end(self, epoch: int, metrics: Metrics, sanity_checking: bool) -> None:
        if not sanity_checking:
            print(
                f"epoch {epoch:2}   loss {metrics['val/loss']:.3f}   accuracy {metrics['val/accuracy']:.3f}"
            )


def main() -> None:
    """Train, then test the best checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--run-dir", default="runs/digits")
    options = parser.parse_args()

    seed_everything(1)
    trainer = Trainer(
        max_epochs=options.epochs,
        run_dir=options.run_dir,
        enable_progress_bar=False,
        hooks=[
            Augment(),
            Report(),
            WeightAveraging("ema", decay=0.98),  # validations and checkpoints use the averaged weights
            EarlyStopping("val/loss", patience=5),
            ModelCheckpoint(monitor="val/loss", filename="best"),
        ],
    )
    data = Digits()
    trainer.fit(DigitNet(), datamodule=data)
    print(f"{trainer.status} after {trainer.global_step} steps")
    metrics = trainer.test(datamodule=data, checkpoint="best")
    print(f"test accuracy of the best checkpoint: {metrics['test/accuracy']:.3f}")


if __name__ == "__main__":
    main()
