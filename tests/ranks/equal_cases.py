"""Two ranks against one process: the same weights and the same gradient facts. Run by test_equal.py under torchrun."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from ranks.worlds import Deep, Plain, distance, fit, joined, mine, pairs, report
from thorough import some
from torch import Tensor

from hookline import DDP, FSDP, Accelerated, Hook, Trainer
from hookline.hooks.gradient_monitor import GradientMonitor

STRATEGIES: dict[str, Callable[[], Any]] = {"ddp": DDP, "fsdp": FSDP, "accelerate": Accelerated}
MODELS: dict[str, Callable[[], Any]] = {"module": Deep, "plain": Plain}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "accumulated": {"accumulate_grad_batches": 4},  # 6 batches: the last window is short
    "clipped": {"gradient_clip_val": 0.05},
    "clipped by value": {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.001,
        "gradient_clip_algorithm": "value",
    },
}
FEW: dict[tuple[str, str], list[str]] = {
    ("ddp", "module"): [*OPTIONS],
    ("fsdp", "module"): [*OPTIONS],
    ("accelerate", "module"): ["accumulated", "clipped"],
    ("ddp", "plain"): ["clipped"],
    ("fsdp", "plain"): ["accumulated"],
    ("accelerate", "plain"): ["clipped by value"],
}
CASES = [
    (strategy, model, name)
    for strategy, model in itertools.product(STRATEGIES, MODELS)
    for name in some(FEW[strategy, model], [each for each in OPTIONS if each not in FEW[strategy, model]])
]


class Norms(Hook):
    """Asks for the norm of every update."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, grad_norm: float) -> None:
        self.seen.append(grad_norm)


class NormsOnZero(Norms):
    """On one rank only: no other rank may have to wait for it."""

    ranks = "zero"


@functools.cache
def of_one_process(model: str, name: str) -> tuple[dict[str, Tensor], Trainer, Norms]:
    """What every strategy is compared with."""
    norms, data = Norms(), joined(pairs())
    return *fit("single", data, MODELS[model], data, max_epochs=2, hooks=[norms], **OPTIONS[name]), norms


def compare(strategy: str, model: str, name: str) -> dict[str, Any]:
    here, data = Norms(), mine(pairs())
    many, trainer = fit(
        STRATEGIES[strategy](), data, MODELS[model], data, max_epochs=2, hooks=[here], **OPTIONS[name]
    )
    one, alone, there = of_one_process(model, name)
    return {
        "weights": distance(many, one),
        "steps": [trainer.state.step, alone.state.step],
        "norms": max(abs(a - b) for a, b in zip(here.seen, there.seen, strict=True)),
        "val": abs(trainer.metrics["val/loss"] - alone.metrics["val/loss"]),
    }


def facts(strategy: Any) -> dict[str, float]:
    """Norms, percentiles, histograms and update ratios of the last update, for each layer."""
    data = pairs()

    def measured(strategy: Any, batches: Any) -> Any:
        monitor = GradientMonitor(
            log_frequency=1, percentiles=[10, 50, 90], log_histogram=True, update_ratio=True
        )
        fit(strategy, batches, hooks=[monitor])
        return monitor.latest

    many, one = measured(strategy, mine(data)), measured("single", joined(data))
    assert many.norms.keys() == one.norms.keys() == many.ratios.keys() == many.samples.keys()
    return {
        "total": abs(many.total - one.total),
        "norms": max(abs(many.norms[row] - one.norms[row]) for row in one.norms),
        "ratios": max(abs(many.ratios[row] - one.ratios[row]) for row in one.ratios),
        "percentiles": max(
            abs(a - b)
            for row in one.percentiles
            for a, b in zip(many.percentiles[row], one.percentiles[row], strict=True)
        ),
        "samples": max(
            (many.samples[row].sort().values - one.samples[row].sort().values).abs().max().item()
            for row in one.samples
        ),
    }


def asked_on_zero() -> int:
    hook = NormsOnZero()
    fit(FSDP(), mine(pairs()), hooks=[hook])
    return len(hook.seen)


def main() -> None:
    for case in CASES:
        report(", ".join(case), functools.partial(compare, *case))
    report("facts, ddp", lambda: facts(DDP()))
    report("facts, fsdp", lambda: facts(FSDP()))
    report("facts, hsdp", lambda: facts(FSDP(replicas=2)))
    report("asked on zero", asked_on_zero)


if __name__ == "__main__":
    main()
