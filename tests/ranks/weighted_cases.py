"""Weighted gradient accumulation on several ranks against one large batch. Run by test_weighted.py under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from ranks.worlds import RANK, Deep, Own, Stream, distance, fit, quiet, report, whole
from thorough import some
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hookline import DDP, FSDP, SKIP_BATCH, Accelerated, Hook, Mixture

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
STRATEGIES: dict[str, Callable[[], Any]] = {"ddp": DDP, "fsdp": FSDP, "accelerate": Accelerated}
COUNTS = [[5, 2, 7], [1, 9, 4], [3, 3, 2], [8, 1, 6], [2, 6, 5]]
"""Samples of each rank in each turn."""
Batch = dict[str, Tensor]


class Summed(Deep):
    """A mean over the samples that the mask keeps; a batch that keeps none has the loss NaN."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        errors = (self(batch["x"]) - batch["y"]).square().mean(1)
        return (errors * batch["mask"]).sum() / batch["mask"].sum()


class Bounded(Summed):
    """The same without the division by nothing."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        errors = (self(batch["x"]) - batch["y"]).square().mean(1)
        return (errors * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)


class Momentum(Summed):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Curved(Summed):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


class Parts(Summed):
    """Two optimizers."""

    def configure_optimizers(self) -> Any:
        inner = [*self.first.parameters(), *self.blocks.parameters()]
        return [torch.optim.SGD(each, lr=0.1) for each in (inner, list(self.last.parameters()))]


class Some(Momentum):
    """No loss for batches whose first tag says so."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if (batch["tag"] == 1).any() else loss


def count(batch: Batch) -> int:
    return int(batch["mask"].sum())


def batch_of(samples: int, kept: int, seed: int, tag: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, 4, generator=generator),
        "y": torch.randn(samples, 2, generator=generator),
        "mask": (torch.arange(samples) < kept).double(),
        "tag": torch.full((samples,), tag),
    }


def data(
    counts: list[list[int]] = COUNTS, kept: Callable[[int, int, int], int] = lambda turn, rank, n: n
) -> list[list[Batch]]:
    """For every turn a batch for each rank."""
    return [
        [batch_of(n, kept(turn, rank, n), 10 * turn + rank) for rank, n in enumerate(row[:WORLD])]
        for turn, row in enumerate(counts)
    ]


def large(batches: list[Batch]) -> Batch:
    return {name: torch.cat([each[name] for each in batches]) for name in batches[0]}


def windows(turns: list[list[Batch]], size: int, used: Callable[[Batch], Any] = bool) -> list[Batch]:
    """The large batch of each update."""
    flat = [
        [each for turn in turns[start : start + size] for each in turn if used(each)]
        for start in range(0, len(turns), size)
    ]
    return [large(each) for each in flat if each]


def mine(turns: list[list[Batch]]) -> Own:
    return Own(turn[RANK] for turn in turns)  # type: ignore[misc]


class Losses(Hook):
    """The losses of updates, and of rows."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.skips: list[str] = []

    def on_step_end(self, ctx: Any) -> None:
        self.seen.append(float(ctx.loss))

    def on_step_skipped(self, reason: str) -> None:
        self.skips.append(reason)

    def on_train_metrics(self, metrics: Any) -> None:
        if "train/loss" in metrics:
            self.seen.append(float(metrics["train/loss"]))


def compare(
    strategy: Any,
    turns: list[list[Batch]],
    size: int,
    make: Callable[[], nn.Module] = Summed,
    by: str = "samples",
    loader: Callable[[Any], Any] = lambda each: each,
    used: Callable[[Batch], Any] = bool,
    hooks: tuple[Any, ...] = (),
    **options: Any,
) -> list[Any]:
    """The distance to one process that trains on large batches, of weights and losses, and the numbers of steps."""
    here, there = Losses(), Losses()
    options = {"max_epochs": 2, "count_tokens": count, "log_every_n_steps": 1, **options}
    many, a = fit(
        strategy,
        loader(mine(turns)),
        make,
        accumulate_by=by,
        accumulate_grad_batches=size,
        hooks=[here, *hooks],
        **options,
    )
    one, b = fit("single", windows(turns, size, used), make, hooks=[there], accumulate_by=by, **options)
    losses = max(abs(x - y) for x, y in zip(here.seen, there.seen, strict=True))
    return [distance(many, one), losses, a.state.step, b.state.step, here.skips]


class Skips(Hook):
    def on_train_batch_start(self, batch: Batch) -> Any:
        return SKIP_BATCH if (batch["tag"] == 2).any() else None


def tagged(turns: list[list[Batch]], tags: dict[tuple[int, int], int]) -> list[list[Batch]]:
    for (turn, rank), tag in tags.items():
        turns[turn][rank]["tag"].fill_(tag)
    return turns


def untagged(batch: Batch) -> bool:
    return not batch["tag"].any()


def short() -> list[list[Batch]]:
    """Rank zero has two batches more than the others; what they repeat meanwhile counts nothing."""
    turns = data()
    return [turn if index < 3 else turn[:1] for index, turn in enumerate(turns)]


def out_of_data(strategy: Any, size: int) -> list[Any]:
    turns = short()
    many, a = fit(
        strategy,
        Own(turn[RANK] for turn in turns if len(turn) > RANK),
        Momentum,  # type: ignore[misc]
        accumulate_by="samples",
        accumulate_grad_batches=size,
    )
    one, b = fit("single", windows(turns, size), Momentum)
    return [distance(many, one), 0.0, a.state.step, b.state.step, []]


def samples() -> Any:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(23, 4, generator=generator), torch.randn(23, 2, generator=generator))


class Tuples(Momentum):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch[0]), batch[1])


class SaveAt(Hook):
    """Asks for a checkpoint after so many batches."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen == self.at:
            trainer.save_checkpoint(f"{trainer.run_dir}/cut")


WEIGHTED: dict[str, Any] = {"accumulate_by": "samples", "accumulate_grad_batches": 2}


def dealt(strategy: Any, name: str) -> list[Any]:
    """One loader for all ranks, whose last turn does not have enough for all ranks. It leaves a checkpoint inside a window."""
    many, a = fit(
        strategy, DataLoader(samples(), 3), Tuples, hooks=[SaveAt(1)], run_dir=f"{name}-{WORLD}", **WEIGHTED
    )
    one, b = fit("single", DataLoader(samples(), 6 * WORLD), Tuples)
    return [distance(many, one), 0.0, a.state.step, b.state.step, []]


def resumed(make: Callable[[], Any], name: str, at: int) -> float:
    """The distance between a run that is cut after so many batches and resumed, and one that is not."""
    folder = f"{name}-{at}-{WORLD}"
    options: dict[str, Any] = {"count_tokens": count, "accumulate_by": "tokens", "accumulate_grad_batches": 3}
    weights, _ = fit(make(), mine(data(kept=empty)), Bounded, hooks=[SaveAt(at)], run_dir=folder, **options)
    torch.manual_seed(7)
    module = Bounded()
    quiet(make(), run_dir=f"{folder}-again", **options).fit(
        module, mine(data(kept=empty)), resume=f"{folder}/cut"
    )
    return distance(weights, whole(module))


def each_its_own(strategy: Any) -> list[Any]:
    """Two loaders, each for one of two optimizers; ranks have batches of different sizes."""
    first, second = data(), data([row[::-1] for row in COUNTS])
    for turn in second:
        for each in turn:
            each["x"] = each["x"] + 1
    mixture = Mixture(order="round_robin", optimizers={"a": [0], "b": [1]})
    options: dict[str, Any] = {"max_epochs": 1, "count_tokens": count}
    torch.manual_seed(7)
    net = Parts()
    trainer = quiet(strategy, accumulate_by="samples", accumulate_grad_batches=2, **options)
    trainer.fit(net, {"a": mine(first), "b": mine(second)}, mixture=mixture)
    torch.manual_seed(7)
    alone = Parts()
    single = quiet("single", accumulate_grad_batches=2, **options)
    single.fit(
        alone, {"a": [large(turn) for turn in first], "b": [large(turn) for turn in second]}, mixture=mixture
    )
    return [distance(whole(net), whole(alone)), 0.0, trainer.state.step, single.state.step, []]


def empty(turn: int, rank: int, n: int) -> int:
    return 0 if (turn, rank) in {(0, 0), (1, 1), (3, 1)} else n - 1 if n > 2 else n


def all_empty(turn: int, rank: int, n: int) -> int:
    return 0 if turn < 2 else n


ON_THREE: list[str] = some(["ddp"], ["fsdp", "accelerate"])
"""The strategies on three ranks."""
SIZES: list[int] = some([1, 3], [2])
CUTS: list[int] = some([1, 4], [2])
EVERYWHERE = [
    *(f"uneven, {size}" for size in SIZES),
    "tokens",
    "no tokens",
    "out of data, 1",
    "out of data, 2",
    "dealt",
]
ON_TWO = ["momentum, clipped", "clipped by value", "stream", "finite"]
PLAIN = ["nan", "no loss", "skipped"]
ON_TWO_RANKS: dict[str, list[str]] = {
    "ddp": [*EVERYWHERE, *ON_TWO, *PLAIN],
    "fsdp": [*EVERYWHERE, *some(["momentum, clipped", "finite"], ["clipped by value", "stream"])],
    "accelerate": some(
        ["uneven, 3", "tokens", "dealt", "momentum, clipped", "no loss"],
        [
            each
            for each in (*EVERYWHERE, *ON_TWO, *PLAIN)
            if each not in ("uneven, 3", "tokens", "dealt", "momentum, clipped", "no loss")
        ],
    ),
}
"""The cases of each strategy. With fsdp, a forward that communicates leaves a batch out on all ranks, or on none."""
RESUMED: dict[str, list[int]] = {"ddp": CUTS, "fsdp": CUTS, "accelerate": some([4], [1, 2])}
"""After how many batches runs are cut."""
TAGS = ((0, 1), (1, 0), (3, 1), (4, 0))


def run(case: str, make: Callable[[], Any], name: str) -> Any:
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    kind, _, number = case.partition(", ")
    return {
        "uneven": lambda: compare(make(), data(), int(number)),
        "tokens": lambda: compare(make(), data(kept=empty), 2, Bounded, "tokens"),
        "no tokens": lambda: compare(make(), data(kept=all_empty), 2, Bounded, "tokens", used=count),
        "out of data": lambda: out_of_data(make(), int(number)),
        "dealt": lambda: dealt(make(), name),
        "momentum": lambda: compare(make(), data(), 2, Momentum, gradient_clip_val=0.05),
        "clipped by value": lambda: compare(make(), data(), 2, **by_value),
        "stream": lambda: compare(make(), data(), 3, loader=Stream),
        "finite": lambda: compare(make(), data(), 2, nonfinite="skip"),
        "nan": lambda: compare(make(), data(kept=empty), 2, Summed, "tokens", used=count),
        "no loss": lambda: compare(make(), tagged(data(), dict.fromkeys(TAGS, 1)), 2, Some, used=untagged),
        "skipped": lambda: compare(
            make(), tagged(data(), dict.fromkeys(TAGS, 2)), 2, Momentum, used=untagged, hooks=(Skips(),)
        ),
    }[kind]()


def main() -> None:
    for name in STRATEGIES if WORLD == 2 else ON_THREE:
        make = STRATEGIES[name]
        for case in ON_TWO_RANKS[name] if WORLD == 2 else EVERYWHERE:
            report(f"{name}, {case}", lambda c=case, m=make, n=name: run(c, m, n))  # type: ignore[misc]
        for at in RESUMED[name]:
            report(f"{name}, resumed, {at}", lambda m=make, n=name, a=at: resumed(m, n, a))  # type: ignore[misc]
    if WORLD == 2:
        report("ddp, lbfgs", lambda: compare(DDP(), data(), 1, Curved))
    report("ddp, own optimizers", lambda: each_its_own(DDP()))


if __name__ == "__main__":
    main()
