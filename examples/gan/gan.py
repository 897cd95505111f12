"""Train a GAN with two optimizers: manual optimization, in which `training_step` makes both updates itself.

The data are points around eight corners of a ring. `python examples/gan/gan.py`
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from hookline import Hook, Module, Trainer, every, seed_everything

CORNERS = torch.tensor([(math.cos(a * math.pi / 4), math.sin(a * math.pi / 4)) for a in range(8)])
NOISE, SPREAD = 8, 0.05


def mlp(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    """Return a network with two hidden layers."""
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.LeakyReLU(0.2)),
        *(nn.Linear(width, width), nn.LeakyReLU(0.2)),
        nn.Linear(width, outputs),
    )


class GAN(Module):
    """A generator makes points from noise; a discriminator tells them from real ones."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(NOISE, 2), mlp(2, 1)

    def sample(self, count: int) -> Tensor:
        """Return points of the generator."""
        points: Tensor = self.generator(torch.randn(count, NOISE, device=self.device))
        return points

    def training_step(self, real: Tensor, batch_idx: int) -> dict[str, Tensor]:
        of_generator, of_discriminator = self.optimizers()
        ones, zeros = real.new_ones(len(real), 1), real.new_zeros(len(real), 1)
        fake = self.sample(len(real))

        loss_d = bce(self.discriminator(real), ones) + bce(self.discriminator(fake.detach()), zeros)
        of_discriminator.zero_grad()
        self.manual_backward(loss_d)
        of_discriminator.step()

        loss_g = bce(self.discriminator(fake), ones)
        of_generator.zero_grad()
        self.manual_backward(loss_g)
        of_generator.step()
        return {"loss": loss_g.detach(), "discriminator": loss_d.detach()}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        ]


class Quality(Hook):
    """Prints how far points are from the nearest corner, and how many corners have points."""

    @every("500 batches")
    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, module: GAN, batches_seen: int) -> None:
        distance, corner = torch.cdist(module.sample(2000).cpu(), CORNERS).min(dim=1)
        found = corner[distance < 4 * SPREAD].bincount(minlength=8) > 50  # a fair share would be 250
        trainer.log("distance", distance.mean())
        print(f"batch {batches_seen:4}   distance {distance.mean():.3f}   {int(found.sum())} of 8 corners")


def main() -> None:
    """Train the GAN."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=3000)
    options = parser.parse_args()

    seed_everything(0)
    chosen = CORNERS[torch.randint(8, (options.batches, 128))]
    batches = list(chosen + SPREAD * torch.randn(chosen.shape))
    trainer = Trainer(max_epochs=1, hooks=[Quality()], enable_progress_bar=False)
    trainer.fit(GAN(), batches)


if __name__ == "__main__":
    main()
