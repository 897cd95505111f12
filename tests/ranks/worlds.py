"""What the scripts of several ranks have in common: a model with layers, data that both worlds see, and how a case reports."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookline import Module, Trainer

RANK = int(os.environ.get("RANK", "0"))
CLOSE = 1e-10
"""How far the results of two ranks may be from those of one process: float64 sums in another order differ by far less."""
if (
    "RANK" in os.environ
):  # in a job; a processor that adds float32 in another order would decide what counts as equal
    torch.set_default_dtype(torch.float64)
Batch = tuple[Tensor, Tensor, Tensor]


class Deep(Module):
    """Some layers in a list, some not; the step uses a parameter outside forward, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for each in self.blocks:
            x = torch.tanh(each(x))
        return self.last(x)

    def measure(self, batch: Batch) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1]) + 0.01 * self.last.weight.square().sum()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.measure(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.measure(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Plain(nn.Module):
    """No module of Hookline's: its optimizer is made before anything is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Own(list[Batch]):
    """Batches that are this rank's already."""

    shards_itself = True


class Stream:
    """The same, of unknown length."""

    shards_itself = True

    def __init__(self, items: Iterable[Batch]) -> None:
        self.items = list(items)

    def __iter__(self) -> Any:
        return iter(self.items)


def pairs(n: int = 6) -> list[list[Batch]]:
    """For every turn a batch for each of two ranks, with a tag that names turn and rank."""
    generator = torch.Generator().manual_seed(1)
    return [
        [
            (
                torch.randn(3, 4, generator=generator),
                torch.randn(3, 2, generator=generator),
                torch.tensor([turn, rank]),
            )
            for rank in range(2)
        ]
        for turn in range(n)
    ]


@contextlib.contextmanager
def in_float32() -> Iterator[None]:
    """Make models and data in float32, which mixed precision casts from."""
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float64)


def mine(data: list[list[Batch]]) -> Own:
    """This rank's batches."""
    return Own(pair[RANK] for pair in data)


def joined(data: list[list[Batch]]) -> list[Batch]:
    """What one process would train on in one step."""
    return [tuple(torch.cat(parts) for parts in zip(*pair, strict=True)) for pair in data]  # type: ignore[misc]


def flat(data: list[list[Batch]]) -> list[Batch]:
    """What one process would train on in as many steps as there are batches."""
    return [each for pair in data for each in pair]


def whole(module: nn.Module) -> dict[str, Tensor]:
    """The weights, put together if they are sharded."""
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for name, each in module.state_dict().items()
    }


def quiet(strategy: Any, **options: Any) -> Trainer:
    """A trainer that shows nothing, and leaves a checkpoint at the end only in a directory that is named."""
    return Trainer(
        **{
            "strategy": strategy,
            "logger": False,
            "enable_progress_bar": False,
            "max_epochs": 1,
            "num_sanity_val_steps": 0,
            **({} if "run_dir" in options else {"checkpoint": {"last": False}}),
            **options,
        }
    )


def fit(
    strategy: Any, data: Any, make: Callable[[], nn.Module] = Deep, val: Any = None, **options: Any
) -> tuple[Any, Trainer]:
    """Train a model that is the same every time; its whole weights, and the trainer."""
    torch.manual_seed(7)
    module = make()
    trainer = quiet(strategy, **options)
    more: dict[str, Any] = {}
    if isinstance(module, Plain):
        more = {
            "step": lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
            "optimizer": torch.optim.AdamW(module.parameters(), lr=0.01),
        }
    trainer.fit(module, data, val, **more)
    return whole(module), trainer


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between two models' weights."""
    return max((one[name].double() - other[name].double()).abs().max().item() for name in other)


def report(name: str, case: Callable[[], Any]) -> None:
    """Run a case and print what it returns, or how it failed; the other cases continue."""
    try:
        found = case()
    except Exception as error:
        traceback.print_exc()
        found = {
            "error": type(error).__name__,
            "text": str(error),
            "notes": " ".join(getattr(error, "__notes__", [])),
        }
    print("CASE", json.dumps([name, RANK, found]), flush=True)
