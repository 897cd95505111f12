"""Hugging Face Accelerate's own objects under Hookline's loop: its model wrapper, its optimizers, its
backward.
"""

from __future__ import annotations

from typing import Any

import torch

from hookline.distributed.base import StepModule
from hookline.distributed.ddp import DDP
from hookline.util.errors import HooklineError, OptionError

PRECISIONS = {"no": "32", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class Accelerated(DDP):
    """Runs on an `accelerate.Accelerator`, yours or one made for the run. What it has prepared is in the
    state.

    Hookline deals the data to the ranks, accumulates, clips and scales, so that its events stay true; the
    Accelerator wraps the model, differentiates and steps.
    """

    def __init__(
        self, accelerator: Any = None, device: str | torch.device = "auto", precision: str | int = 32
    ) -> None:
        """accelerator: with its own precision and handlers; None: one is made from `device`
        and `precision`.
        """
        if accelerator is not None:
            if device != "auto" or precision != 32:
                raise OptionError(
                    "Accelerated: an Accelerator brings its own device and precision; leave both out."
                )
            device, precision = accelerator.device, _precision_of(accelerator)
            _check(accelerator)
        super().__init__(device, precision)
        self.accelerator: Any = accelerator
        """Made when the run begins, if none was given."""
        self._prepared: list[Any] = []

    def connect(self) -> None:
        """Find the other ranks; then Accelerate finds the process group that is there."""
        super().connect()
        if self.accelerator is None:
            self.accelerator = self._make()
            _check(self.accelerator)
        if (
            self.accelerator.scaler is not None
        ):  # one scaler, in the hands of the loop, whose events it belongs to
            self.precision.scaler, self.accelerator.scaler = self.accelerator.scaler, None
        self.differentiate = self.accelerator.backward

    def _make(self) -> Any:
        try:
            import accelerate  # type: ignore[import-untyped]
        except ImportError as error:
            raise HooklineError(
                "strategy='accelerate' needs the package accelerate: pip install accelerate."
            ) from error
        place = self.rank_info
        wanted = {name: theirs for theirs, name in PRECISIONS.items()}[self.precision.name]
        try:
            made = accelerate.Accelerator(cpu=self.device.type == "cpu", mixed_precision=wanted)
        except ValueError as error:
            raise OptionError(
                f"precision={self.precision.name!r}: Accelerate keeps one precision for the whole process, "
                "and was used with another before. Pass the Accelerator there is: "
                f"Accelerated(accelerator). ({error})",
                option="precision",
                value=self.precision.name,
            ) from error
        if made.num_processes != self.world_size:
            raise HooklineError(
                f"Accelerate sees {made.num_processes} processes where {place.launcher or 'Hookline'} "
                f"started {self.world_size}. Start the job with torchrun."
            )
        return made

    def make_wrapper(self, shell: StepModule) -> Any:
        """What Accelerate makes of it; on one process there is nothing to wrap."""
        self._forget()
        prepared = self.accelerator.prepare_model(shell)
        self._prepared.append(prepared)
        return prepared

    def prepare_optimizers(self, optimizers: list[Any]) -> list[Any]:
        """Accelerate's optimizers around these."""
        return [self.accelerator.prepare_optimizer(each, device_placement=False) for each in optimizers]

    def teardown(self) -> None:
        """Let go of the module, and let the Accelerator do so."""
        super().teardown()
        self._forget()

    def _forget(self) -> None:
        known = self.accelerator._models
        known[:] = [
            each
            for each in known
            if not any(each is mine or each is getattr(mine, "module", None) for mine in self._prepared)
        ]
        self._prepared.clear()


def _precision_of(accelerator: Any) -> str:
    name = str(accelerator.mixed_precision)
    if name not in PRECISIONS:
        raise OptionError(
            f"Accelerated: the Accelerator's mixed_precision is {name!r}; allowed: {', '.join(PRECISIONS)}."
        )
    return PRECISIONS[name]


def _check(accelerator: Any) -> None:
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise OptionError(
            f"Accelerated: the Accelerator is set up for {kind}, which shards the model its own way. Sharded "
            "models run with strategy='fsdp' (hookline.FSDP)."
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise OptionError(
            "Accelerated: leave the Accelerator's gradient_accumulation_steps "
            f"({accelerator.gradient_accumulation_steps}) at 1, and pass accumulate_grad_batches to the "
            "Trainer: its events tell which batch updates."
        )
