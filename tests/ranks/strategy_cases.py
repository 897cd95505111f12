"""What strategies do when ranks differ, and with their options. Run by test_strategies.py under torchrun."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from ranks import memory_cases
from ranks.worlds import (
    RANK,
    Deep,
    Stream,
    distance,
    fit,
    flat,
    in_float32,
    joined,
    mine,
    pairs,
    quiet,
    report,
    whole,
)
from thorough import some
from torch import Tensor, nn
from torch import distributed as dist

from hookline import DDP, FSDP, SKIP_BATCH, Accelerated, Hook
from hookline.hooks.weight_averaging import WeightAveraging

Tags = set[tuple[int, int]]
DATA = pairs()
MAKERS: dict[str, Callable[[], Any]] = {
    "ddp": DDP,
    "accelerate": Accelerated,
    "unused": functools.partial(DDP, find_unused_parameters=True),
}
FEW = {
    "accelerate": {
        "no loss on the last batch",
        "skipped",
        "not finite",
        "frozen",
        "manual",
        "again",
        "facts",
    },
    "unused": {"no loss in a window", "skipped", "frozen"},
}
"""The cases of strategies that wrap the model as `ddp` does, except in a thorough run."""
VARIANTS: dict[str, Callable[[], Any]] = {
    "two copies": lambda: FSDP(replicas=2),
    "mesh": lambda: FSDP(mesh=dist.init_device_mesh("cpu", (2,))),
    "by pattern": lambda: FSDP(wrap="blocks.*"),
    "by class": lambda: FSDP(wrap=nn.Linear),
    "by class name": lambda: FSDP(wrap="Linear"),
    "by function": lambda: FSDP(wrap=lambda name, module: name == "last"),
    "kept whole": lambda: FSDP(reshard_after_forward=False),
    "activations": lambda: FSDP(activation_checkpointing=True),
    "some activations": lambda: FSDP(activation_checkpointing=["first"]),
    "static graph": lambda: DDP(static_graph=True),
    "small buckets": lambda: DDP(sync_buffers=False, bucket_cap_mb=1),
    "own way to send": lambda: DDP(communication_hook=lambda state, bucket: halved(bucket)),
}


def names(case: str, *more: str) -> list[str]:
    """Return the strategies that have this case."""
    every = [*MAKERS, *more]
    few = [name for name in every if case in FEW.get(name, {case})]
    return some(few, [name for name in every if name not in few])


def halved(bucket: Any) -> Any:
    work: Any = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Tidy(Deep):
    """Uses parameters only in the layers that have them."""

    def measure(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])


class Momentum(Deep):
    """A rule says which batches give no loss."""

    without: Tags = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.measure(batch)
        return None if tuple(batch[2].tolist()) in self.without else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def without(tags: Tags) -> Callable[[], Momentum]:
    def make() -> Momentum:
        module = Momentum()
        module.without = tags
        return module

    return make


class Skips(Hook):
    def __init__(self, tags: Tags) -> None:
        self.tags = tags

    def on_train_batch_start(self, batch: Any) -> Any:
        return SKIP_BATCH if tuple(batch[2].tolist()) in self.tags else None

    def on_step_end(self, loss: float) -> None:
        """Ask for the loss over all ranks, which they find together also if one of them has skipped the last batch."""


class HearsSkips(Hook):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_step_skipped(self, reason: str, step: int) -> None:
        self.seen.append((reason, step))


# ---- ranks that differ -------------------------------------------------------------------------------------------


def no_loss(strategy: Any, tags: Tags, accumulate: int = 2) -> list[Any]:
    """One process accumulates the batches of both ranks, and leaves out the same ones."""
    many, a = fit(strategy, mine(DATA), without(tags), accumulate_grad_batches=accumulate)
    one, b = fit("single", flat(DATA), without(tags), accumulate_grad_batches=2 * accumulate)
    return [distance(many, one), a.state.step, b.state.step]


def skipped(strategy: Any, tags: Tags, accumulate: int = 2, by_all: Tags | None = None) -> list[Any]:
    many, a = fit(strategy, mine(DATA), Momentum, hooks=[Skips(tags)], accumulate_grad_batches=accumulate)
    one, b = fit(
        "single", flat(DATA), Momentum, hooks=[Skips(by_all or tags)], accumulate_grad_batches=2 * accumulate
    )
    return [distance(many, one), a.state.step, b.state.step]


def short_window(strategy: Any) -> list[Any]:
    """Nobody knew that the data would end in the middle of a window."""
    many, a = fit(strategy, Stream(mine(DATA)[:5]), Momentum, accumulate_grad_batches=3)
    one, b = fit("single", Stream(flat(DATA)[:10]), Momentum, accumulate_grad_batches=6)
    return [distance(many, one), a.state.step, b.state.step]


def broken() -> list[Any]:
    data = pairs()
    data[3][1][1].fill_(math.nan)
    return data


def not_finite(strategy: Any) -> list[Any]:
    hook = HearsSkips()
    many, a = fit(strategy, mine(broken()), Momentum, nonfinite="skip", hooks=[hook])
    one, b = fit("single", flat(broken()), Momentum, nonfinite="skip", accumulate_grad_batches=2)
    return [distance(many, one), a.state.step, b.state.step, hook.seen]


class Normed(Momentum):
    """Batch norm, whose averages a NaN in the inputs spoils."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.measure((self.norm(batch[0]), batch[1]))


class HearsBuffers(Hook):
    """Whether a skipped update leaves the averages of the update before it, and how often it was asked."""

    def __init__(self) -> None:
        self.seen: list[bool] = []
        self.before: Any = None

    def on_after_optimizer_step(self, module: Any) -> None:
        self.before = module.norm.running_mean.clone()

    def on_step_skipped(self, module: Any) -> None:
        self.seen.append(torch.equal(module.norm.running_mean, self.before))


def spoiled_buffers(strategy: Any) -> list[Any]:
    """The inputs of rank 1, later those of rank 0, have a NaN."""
    data, hook = pairs(), HearsBuffers()
    for turn, rank in ((2, 1), (4, 0)):
        data[turn][rank][0].fill_(math.nan)
    weights, trainer = fit(strategy, mine(data), Normed, nonfinite="skip", hooks=[hook])
    is_finite = all(bool(each.isfinite().all()) for each in weights.values())
    return [is_finite, trainer.state.step, hook.seen]


class Poisoned(Momentum):
    """One rank's loss is finite once, and one element of its gradients is not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return poison(self, batch, self.measure(batch))


def poison(module: Any, batch: Any, loss: Tensor) -> Tensor:
    return loss + (0 * module.last.bias[0]).sqrt() if batch[2].tolist() == [3, 1] else loss


def not_finite_gradient(strategy: Any) -> list[Any]:
    hook = HearsSkips()
    many, a = fit(strategy, mine(DATA), Poisoned, nonfinite="skip", hooks=[hook])
    one, b = fit("single", flat(DATA), Poisoned, nonfinite="skip", accumulate_grad_batches=2)
    return [distance(many, one), a.state.step, b.state.step, hook.seen]


class Overflows(HearsSkips):
    """One rank's gradients are infinite once."""

    def on_before_backward(self, loss: Tensor, batch: Any, rank: int) -> Any:
        return loss * 1e30 if rank == 1 and int(batch[2][0]) == 4 else None


def overflow(strategy: Any) -> list[Any]:
    hook = Overflows()
    with in_float32():
        weights, trainer = fit(strategy, mine(pairs()), hooks=[hook])
    scaler = strategy.precision.scaler
    return [
        float(sum(each.double().sum() for each in weights.values())),
        trainer.state.step,
        scaler.get_scale(),
        hook.seen[-1],
    ]


class Freezes(Hook):
    def on_train_batch_start(self, module: Any, batch_idx: int) -> None:
        if batch_idx in (0, 2):
            module.first.requires_grad_(batch_idx == 2)
        if batch_idx == 4:
            module.last.requires_grad_(False)


def frozen(strategy: Any) -> float:
    return distance(
        fit(strategy, mine(DATA), hooks=[Freezes()])[0], fit("single", joined(DATA), hooks=[Freezes()])[0]
    )


def first_sharded(strategy: Any) -> None:
    """A module that an earlier run has cut in pieces."""
    module = Deep()
    quiet(FSDP()).fit(module, mine(DATA))
    quiet(strategy).fit(module, mine(DATA))


class Tied(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].weight = self.blocks[0].weight


# ---- modules of other kinds --------------------------------------------------------------------------------------


class Manual(Tidy):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            loss = self.measure(batch)
            self.manual_backward(loss)
            optimizer.step()
        return loss


class ManualPoisoned(Tidy):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.measure(batch)
        self.manual_backward(poison(self, batch, loss))
        optimizer.step()
        return loss


def not_finite_by_hand(strategy: Any) -> list[Any]:
    hook = HearsSkips()
    weights, trainer = fit(strategy, mine(DATA), ManualPoisoned, nonfinite="skip", hooks=[hook])
    return [all(bool(each.isfinite().all()) for each in weights.values()), trainer.state.step, hook.seen]


class Searches(Deep):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.3, max_iter=3, line_search_fn="strong_wolfe")


class Draws(Deep):
    drawn: list[float]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.drawn = torch.rand(3).tolist()
        return self.measure(batch)


def equal(strategy: Any, make: Callable[[], Any] = Deep) -> float:
    return distance(fit(strategy, mine(DATA), make)[0], fit("single", joined(DATA), make)[0])


def line_search() -> list[Any]:
    """How far two ranks are from one process, and this rank's weights."""
    weights, _ = fit(DDP(), mine(DATA), Searches)
    return [
        distance(weights, fit("single", joined(DATA), Searches)[0]),
        {name: each.tolist() for name, each in weights.items()},
    ]


def half_precision() -> list[float]:
    """How far half precision leads from float32, and how far float32 has moved: without Adam, which makes much of small gradients."""
    with in_float32():
        data = pairs()
        half = fit(FSDP(precision="bf16-mixed"), mine(data), Momentum)[0]
        full = fit("single", joined(data), Momentum)[0]
        return [distance(half, full), distance(full, fit("single", joined(data), Momentum, max_epochs=0)[0])]


def averaged(strategy: Any) -> list[float]:
    """A hook that keeps weights of its own, and measures with them."""
    many, here = fit(strategy, mine(DATA), val=mine(DATA), hooks=[WeightAveraging(decay=0.9)])
    one, there = fit("single", joined(DATA), val=joined(DATA), hooks=[WeightAveraging(decay=0.9)])
    return [distance(many, one), abs(here.metrics["val/loss"] - there.metrics["val/loss"])]


def again(make: Callable[[], Any]) -> list[Any]:
    """The same module in a second fit, in a validation between them, and under another trainer."""

    def three_times(strategy: Callable[[], Any], data: Any) -> tuple[Any, float]:
        torch.manual_seed(7)
        module, trainer = Deep(), quiet(strategy())
        trainer.fit(module, data)
        measured = trainer.validate(module, data)["val/loss"]
        trainer.fit(module, data)
        quiet(strategy()).fit(module, data)
        return whole(module), measured

    (many, here), (one, there) = three_times(make, mine(DATA)), three_times(lambda: "single", joined(DATA))
    return [distance(many, one), abs(here - there)]


def from_meta() -> list[Any]:
    with torch.device("meta"):
        module = Deep()
    strategy = FSDP()
    trainer = quiet(strategy)
    trainer.fit(module, mine(DATA), mine(DATA))
    weights = [float(each.sum()) for each in whole(module).values()]
    return [weights, trainer.metrics["val/loss"], type(module.first.weight).__name__]


def draws(seed: int | None) -> list[Any]:
    module, strategy = Draws(), DDP()
    quiet(strategy, seed=seed).fit(module, mine(DATA))
    return strategy.ranks.gather(module.drawn)


def started_alike() -> list[Any]:
    """Ranks whose models were drawn differently train rank zero's."""
    found = []
    for make in (DDP, FSDP):
        torch.manual_seed(RANK)
        module = Deep()
        trainer = quiet(make(), max_epochs=0)
        trainer.fit(module, mine(DATA))
        found.append([float(each.sum()) for each in whole(module).values()])
    torch.manual_seed(0)
    return [*found, [float(each.sum()) for each in Deep().state_dict().values()]]


class Extra(Hook):
    def on_step_end(self) -> None: ...


class OnZero(Extra):
    ranks = "zero"


class Facts(Hook):
    def on_train_start(
        self, rank: int, world_size: int, local_rank: int, wrapped_model: Any, optimizers: Any, module: Any
    ) -> None:
        self.found = [
            rank,
            world_size,
            local_rank,
            type(wrapped_model).__name__,
            type(optimizers[0]).__name__,
            type(module).__name__,
            list(wrapped_model(torch.ones(1, 4)).shape),
        ]


def facts(strategy: Any) -> list[Any]:
    hook = Facts()
    fit(strategy, mine(DATA), hooks=[hook])
    return hook.found


def main() -> None:
    unsharded: dict[str, Callable[..., Any]] = {
        "no loss on the last batch": lambda make: no_loss(make(), {(1, 1), (4, 0), (4, 1)}),
        "no loss in a window": lambda make: no_loss(make(), {(2, 1), (3, 1)}),
        "skipped": lambda make: skipped(make(), {(1, 1), (2, 1), (3, 1), (5, 0)}),
        "skipped, no window": lambda make: skipped(make(), {(1, 1), (2, 0), (2, 1)}, 1),
    }
    of_all: dict[str, Callable[..., Any]] = {
        "short window": lambda make: short_window(make()),
        "not finite": lambda make: not_finite(make()),
        "gradient not finite": lambda make: not_finite_gradient(make()),
        "spoiled buffers": lambda make: spoiled_buffers(make()),
        "not finite by hand": lambda make: not_finite_by_hand(make()),
        "frozen": lambda make: frozen(make()),
        "manual": lambda make: equal(make(), Manual),
        "again": again,
        "facts": lambda make: facts(make()),
    }
    for case, act in {**unsharded, **of_all}.items():
        for name in names(case, *(["fsdp"] if case in of_all else [])):
            report(f"{name}: {case}", functools.partial(act, {**MAKERS, "fsdp": FSDP}[name]))
    for n in (1, 2, 3):
        turns = {(turn, rank) for turn in (1, 4) for rank in (0, 1)}
        report(f"fsdp: no loss, {n}", lambda n=n: [*no_loss_on_one(n)])  # type: ignore[misc]
        report(f"fsdp: skipped, {n}", lambda n=n, t=turns: skipped(FSDP(), {(1, 1), (4, 0)}, n, t))  # type: ignore[misc]
    for name, make in VARIANTS.items():
        report(f"variant: {name}", lambda m=make: equal(m(), Tidy))  # type: ignore[misc]
    report("static graph, windows", lambda: no_loss(DDP(static_graph=True), set(), 3))
    report("sharded before, ddp", lambda: first_sharded(DDP()))
    report("sharded before, single", lambda: first_sharded("single"))
    report("tied", lambda: fit(FSDP(), mine(DATA), Tied))
    report("tied, together", lambda: equal(FSDP(wrap="first"), Tied))
    report("outside", lambda: equal(FSDP(wrap="last")))
    report("averaged, ddp", lambda: averaged(DDP()))
    report("averaged, fsdp", lambda: averaged(FSDP()))
    report("stops", lambda: fit(DDP(), mine(broken()), Momentum))
    report("stops at the end", lambda: fit(DDP(), mine(broken()[:4]), Momentum))
    report("line search", line_search)
    report("wrong wrap", lambda: fit(FSDP(wrap="block.*"), mine(DATA)))
    report("mesh of some ranks", lambda: fit(FSDP(mesh=dist.device_mesh.DeviceMesh("cpu", [0])), mine(DATA)))
    report(
        "mesh of too many dimensions",
        lambda: fit(FSDP(mesh=dist.init_device_mesh("cpu", (1, 2, 1))), mine(DATA)),
    )
    report("from meta", from_meta)
    report("draws", lambda: [draws(None), draws(5), draws(5)])
    report("started alike", started_alike)
    report("other hooks", lambda: fit(DDP(), mine(DATA), hooks=[Extra()] if RANK else []))
    report("other options", lambda: fit(DDP(), mine(DATA), accumulate_grad_batches=1 + RANK))
    report(
        "hook for zero", lambda: fit(DDP(), mine(DATA), hooks=[OnZero()] if RANK == 0 else [])[1].state.step
    )
    report("half precision", half_precision)
    report("overflow, fsdp", lambda: overflow(FSDP(precision="16-mixed")))
    report("overflow, ddp", lambda: overflow(DDP(precision="16-mixed")))
    memory_cases.main()
    report("second precision of accelerate", lambda: fit(Accelerated(precision="bf16-mixed"), mine(DATA)))


def no_loss_on_one(accumulate: int) -> list[Any]:
    """Sharded layers make ranks wait for each other in backward: a batch without a loss on one is left out by all."""
    both = {(turn, rank) for turn in (1, 4) for rank in (0, 1)}
    many, a = fit(FSDP(), mine(DATA), without({(1, 1), (4, 0)}), accumulate_grad_batches=accumulate)
    one, b = fit("single", flat(DATA), without(both), accumulate_grad_batches=2 * accumulate)
    return [distance(many, one), a.state.step, b.state.step]


if __name__ == "__main__":
    main()
