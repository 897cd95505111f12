"""Precision, activation checkpointing and compiled blocks on two ranks. Run by strategy_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ranks.worlds import RANK, Deep, distance, fit, in_float32, joined, mine, pairs, quiet, report, whole
from torch import Tensor, nn

from hookline import DDP, FSDP, Accelerated

BLOCKS = {"blocks": "blocks.*", "backend": "aot_eager"}
MAKERS: dict[str, Callable[..., Any]] = {"ddp": DDP, "accelerate": Accelerated, "fsdp": FSDP}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp, activations": ("ddp", {"activation_checkpointing": lambda name, module: name == "blocks.0"}),
    "accelerate, activations": ("accelerate", {"activation_checkpointing": "blocks.*"}),
    "fsdp, activations": ("fsdp", {"activation_checkpointing": nn.Linear}),
    "ddp, compiled blocks": ("ddp", {"compile": BLOCKS}),
    "fsdp, compiled blocks": ("fsdp", {"compile": BLOCKS}),
    "fsdp, both": ("fsdp", {"compile": BLOCKS, "activation_checkpointing": True}),
}


class Tidy(Deep):
    """Uses parameters only in the layers that have them."""

    def measure(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])


class Momentum(Tidy):
    """Without Adam, which makes much of small gradients."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def equal(name: str, options: dict[str, Any]) -> float:
    data = pairs()
    many = fit(MAKERS[name](), mine(data), Tidy, max_epochs=2, **options)[0]
    return distance(many, fit("single", joined(data), Tidy, max_epochs=2)[0])


def in_double(name: str) -> list[Any]:
    """How far two ranks are from one process, if float32 models and data become float64; and a type."""
    with in_float32():
        data = pairs()
        many, trainer = fit(
            MAKERS[name](precision="64"), mine(data), Tidy, mine(data), gradient_clip_val=0.05
        )
        one = fit("single", joined(data), Tidy, precision="64", gradient_clip_val=0.05)[0]
    return [distance(many, one), str(many["first.weight"].dtype), trainer.metrics["val/loss"]]


def in_half(name: str) -> list[Any]:
    """How far bfloat16 leads from float32, and how far float32 has moved; types; a resume."""
    with in_float32():
        data = pairs()
        options: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": 1.0, "seed": 1}
        half, trainer = fit(
            MAKERS[name](precision="bf16-true"), mine(data), Momentum, run_dir=f"{name}-half", **options
        )
        full = fit("single", joined(data), Momentum, **options)[0]
        first = fit("single", joined(data), Momentum, max_epochs=0)[0]
        kinds = {
            str(each.dtype) for each in trainer.state.optimizers[0].state.values() for each in each.values()
        }
        quiet(MAKERS[name](precision="bf16-true"), run_dir=f"{name}-cut", **{**options, "max_epochs": 1}).fit(
            start(), mine(data)
        )
        again = start()
        quiet(MAKERS[name](precision="bf16-true"), run_dir=f"{name}-cut", **options).fit(
            again, mine(data), resume="auto"
        )
        other = start()
        quiet(MAKERS[name](precision="64"), run_dir=f"{name}-cut", **{**options, "max_epochs": 3}).fit(
            other, mine(data), resume="auto"
        )
    return [
        distance(half, full),
        distance(full, first),
        sorted(kinds),
        distance(whole(again), half),
        str(whole(other)["first.weight"].dtype),
        float(sum(each.double().sum() for each in half.values())),
    ]


def start() -> Momentum:
    torch.manual_seed(7)
    return Momentum()


def measured_in_inference_mode() -> float:
    data = pairs()
    found = [
        fit(DDP(), mine(data), val=mine(data), evaluation={"inference_mode": given})[1].metrics["val/loss"]
        for given in (True, False)
    ]
    return abs(found[0] - found[1])


def main() -> None:
    for name, (strategy, options) in VARIANTS.items():
        report(f"memory: {name}", lambda s=strategy, o=options: equal(s, o))  # type: ignore[misc]
    for name in MAKERS:
        report(f"memory: {name}, 64", lambda n=name: in_double(n))  # type: ignore[misc]
    for name in ("ddp", "fsdp"):
        report(f"memory: {name}, bf16-true", lambda n=name: in_half(n))  # type: ignore[misc]
    report("memory: inference mode, ddp", measured_in_inference_mode)
    report(
        "memory: inference mode, fsdp",
        lambda: fit(FSDP(), mine(pairs()), evaluation={"inference_mode": True}),
    )


if __name__ == "__main__":
    assert RANK in (0, 1)
    main()
