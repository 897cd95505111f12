"""What every logger must take: each call, and values that are not as nice as one would like."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hookline import Logger

ODD_TAGS = [
    "a/b",
    "a b",
    "",
    "/",
    "../../up",
    "/abs",
    "a//b",
    "acc@1",
    "acc@5",
    'loss (val), "x"',
    "ü€",
    "line\nbreak",
    "step",
    "epoch",
    "time",
    "_hidden",
    "__own",
    "\ud800",
    "nul\0",
    "\x1b[31mred",
    "[bold]x[/bold]",
    "x" * 400,
]


def figure() -> Any:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(1, 1))
    drawn.subplots().plot([1, 2, 3])
    return drawn


def tell_everything(logger: Logger, run_dir: Path) -> None:
    """A run with each kind of record, from plain to odd."""
    logger.open(lambda: run_dir)
    logger.log_hyperparams(
        {
            "lr": 0.5,
            "net": {"width": 8, "deep": True},
            "none": None,
            "nan": math.nan,
            "big": 10**400,
            "list": [1, 2],
            "device": torch.device("cpu"),
            "_own": "x",
            "ü\ud800": "\ud800",
        }
    )
    logger.log_metrics({"train/loss": 1.5, "bad": math.nan, "up": math.inf, "down": -math.inf}, 1, 0)
    logger.log_metrics({"train/loss": 0.5}, 2, 1)
    logger.add_scalar("plain", 3.0, 2)
    logger.add_scalar("tensor", torch.tensor([2.5], requires_grad=True), 3)
    logger.add_scalar("array", np.float32(0.25), None)
    logger.add_scalar("late", 7.0, 1)
    for number, tag in enumerate(ODD_TAGS):
        logger.add_scalar(tag, float(number), 5)
        logger.log_metrics({tag: float(number)}, 6, 1)
    for values in (
        torch.arange(10.0, requires_grad=True),
        [1, 2],
        np.ones((2, 2)),
        torch.zeros(0),
        torch.tensor([math.nan]),
        torch.tensor([1.0, math.inf]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([True]),
    ):
        logger.add_histogram("weights", values, 3)
    logger.add_text("note", "hello <b>\n\ud800", 3)
    logger.add_text("note", "no step")
    for image in (
        torch.rand(3, 4, 5),
        torch.zeros(1, 2, 2, dtype=torch.uint8),
        torch.full((2, 2), math.nan),
        np.ones((4, 3, 3), bool),
    ):
        logger.add_image("image", image, 3)
    logger.add_figure("figure", figure(), 3)
    logger.add_figure("../figure", figure())
    logger.close()


def files(folder: Path) -> set[Path]:
    """What is there, but for the record that every run has."""
    return {path for path in folder.rglob("*") if path.is_file() and path.name != "run.json"}
