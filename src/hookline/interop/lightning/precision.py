"""Lightning's `64-true`, `bf16-true` and `16-true`: the module, its batches and new tensors have one type."""

from __future__ import annotations

from typing import Any

import torch

from hookline.distributed.base import Precision
from hookline.engine.binding import Caller
from hookline.engine.hook import Hook
from hookline.engine.listener import overrides
from hookline.interop.lightning.package import installed, refusal
from hookline.run.run import Run

NAMES = {"64": "64-true", "64-true": "64-true", "bf16-true": "bf16-true", "16-true": "16-true"}
"""What users write, and Lightning's name."""
PLUGINS = ("DoublePrecision", "HalfPrecision")
"""Lightning's classes for these precisions."""


def plugin_of(precision: str) -> Any:
    """Return Lightning's own plugin, which converts modules and batches; None for other precisions."""
    name = NAMES.get(precision)
    if name is None:
        return None
    kind = installed("plugins", "DoublePrecision" if name == "64-true" else "HalfPrecision")
    if kind is None:
        raise refusal(
            f"precision={precision!r} needs the package lightning; without it, convert the module: "
            "model.to(dtype).",
            "precision",
            precision,
        )
    return kind() if name == "64-true" else kind(name)


class TruePrecision(Precision):
    """The precision of a run that one of Lightning's plugins sets; without autocast and scaler."""

    def __init__(self, plugin: Any, device: torch.device) -> None:
        super().__init__("32", device)
        self.plugin = plugin
        self.name = str(plugin.precision)

    def around(self, call: Caller) -> Caller:
        """Return the step with this type as torch's default."""
        context = self.plugin.forward_context

        def in_context(s: Any) -> Any:
            with context():
                return call(s)

        return in_context

    def prepare(self, run: Run) -> None:
        """Convert the module once it is complete, before a checkpoint is restored into it."""
        steps: Any = run.steps
        configure = steps.configure_model if overrides(steps, "configure_model") else None

        def configure_model() -> None:
            if configure is not None:
                with self.plugin.module_init_context():
                    configure()
            self.plugin.convert_module(run.module)

        steps.configure_model = configure_model
        run.participants.on_close.append(lambda: vars(steps).pop("configure_model", None))


class ConvertedBatches(Hook):
    """Converts every batch to the type of the run, before other hooks and the step read it."""

    tier = "builtin"
    name = "lightning_precision"

    def __init__(self, precision: TruePrecision) -> None:
        super().__init__()
        self._convert = precision.plugin.convert_input

    def on_before_batch_transfer(self, batch: Any) -> Any:
        """Return the batch with floating-point tensors of that type."""
        return self._convert(batch)
