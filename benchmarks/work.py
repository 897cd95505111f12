"""What is trained: three models with one `training_step` each, the same code whoever drives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention

Batch = tuple[Tensor, Tensor]


class Tiny(nn.Module):
    """So small that nearly everything is overhead: the hardest case for whoever runs the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        return mse_loss(self.layer(batch[0]), batch[1])


class MLP(nn.Module):
    """A classifier with three layers."""

    def __init__(self, inputs: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        return cross_entropy(self.layers(batch[0]), batch[1])


class Digits(MLP):
    """The same for images of 28 x 28."""

    def __init__(self) -> None:
        super().__init__(784)


class Block(nn.Module):
    """Attention over the past, then a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and the feed-forward layer make of it."""
        n, length, width = x.shape
        split = self.qkv(self.before_attention(x)).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        return x + self.feed(self.before_feed(x))


class GPT(nn.Module):
    """A decoder of two layers."""

    def __init__(self, vocabulary: int = 65, length: int = 32, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(
            Block(width, 4), Block(width, 4), nn.LayerNorm(width), nn.Linear(width, vocabulary)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        logits = self.blocks(self.tokens(batch[0]) + self.places)
        return cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def numbers(size: int = 16) -> Batch:
    """Return a batch of the tiny model."""
    return torch.randn(size, 32), torch.randn(size, 2)


def classes(size: int = 64, inputs: int = 128) -> Batch:
    """Return a batch of the classifier."""
    return torch.randn(size, inputs), torch.randint(10, (size,))


def text() -> Batch:
    """Return a batch of the GPT."""
    tokens = torch.randint(65, (8, 33))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True)
class Work:
    """A model and its data, and how many steps a slice has."""

    name: str
    title: str
    model: type[nn.Module]
    batch: Callable[[], Batch]
    untimed: int
    timed: int

    def batches(self, count: int) -> list[Batch]:
        """Return a list of so many batches, few of them different."""
        few = [self.batch() for _ in range(20)]
        return [few[index % len(few)] for index in range(count)]


WORKS = (
    Work("linear", "Linear(32, 2)", Tiny, numbers, untimed=10, timed=40),
    Work("mlp", "MLP, 101 k weights", MLP, classes, untimed=4, timed=16),
    Work("gpt", "GPT, 2 layers, 110 k weights", GPT, text, untimed=1, timed=4),
)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer that all sides use."""
    return torch.optim.SGD(parameters, lr=1e-3)
