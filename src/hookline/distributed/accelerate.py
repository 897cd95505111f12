"""The Accelerate strategy: Hugging Face Accelerate's model wrapper, optimizers and backward in our loop."""

from __future__ import annotations

from typing import Any

import torch

from hookline.distributed.base import StepModule
from hookline.distributed.ddp import DDP
from hookline.util.errors import HooklineError, OptionError, missing_package

PRECISION_NAMES = {"no": "32", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class Accelerated(DDP):
    """A strategy that runs on an `accelerate.Accelerator`, yours or one made for the run.

    Hookline shards the data, accumulates, clips and scales, so that its events match what happens. The
    Accelerator wraps the model, runs the backward and steps the optimizers.
    """

    def __init__(
        self, accelerator: Any = None, device: str | torch.device = "auto", precision: str | int = 32
    ) -> None:
        """Use a given Accelerator with its precision, or make one from `device` and `precision`.

        accelerator: a given one; None: made for the run. device, precision: those of the one that is made.
        """
        if accelerator is not None:
            if device != "auto" or precision != 32:
                raise OptionError(
                    "Accelerated: an Accelerator brings its own device and precision; leave both out."
                )
            device, precision = accelerator.device, _precision_of(accelerator)
            _check_accelerator(accelerator)
        super().__init__(device, precision)
        self.accelerator: Any = accelerator
        """The Accelerator; made at the start of the run if none was given."""
        self._prepared: list[Any] = []

    def connect(self) -> None:
        """Connect to the other ranks, then make the Accelerator, which uses the existing process group."""
        super().connect()
        if self.accelerator is None:
            self.accelerator = self._make()
            _check_accelerator(self.accelerator)
        # the loop runs the scaler, because its events are about it; Accelerate must not run it too
        if self.accelerator.scaler is not None:
            self.precision.scaler, self.accelerator.scaler = self.accelerator.scaler, None
        self.differentiate = self.accelerator.backward

    def _make(self) -> Any:
        try:
            import accelerate  # type: ignore[import-untyped]
        except ImportError as error:
            raise HooklineError(
                missing_package("strategy='accelerate'", "accelerate", "accelerate")
            ) from error
        # with 64, bf16-true and 16-true Hookline converts the module, and Accelerate computes in its type
        wanted = {name: theirs for theirs, name in PRECISION_NAMES.items()}.get(self.precision.name, "no")
        try:
            made = accelerate.Accelerator(cpu=self.device.type == "cpu", mixed_precision=wanted)
        except ValueError as error:
            raise OptionError(
                f"precision={self.precision.name!r}: Accelerate keeps one precision for the whole process, "
                "and was used with another one before. Pass the existing Accelerator: "
                f"Accelerated(accelerator). ({error})",
                option="precision",
                value=self.precision.name,
            ) from error
        if made.num_processes != self.world_size:
            raise HooklineError(
                f"Accelerate sees {made.num_processes} processes, but "
                f"{self.rank_info.launcher or 'Hookline'} started {self.world_size}. Start the job with "
                "torchrun."
            )
        return made

    def make_wrapper(self, step_module: StepModule) -> Any:
        """Return Accelerate's wrapper around the module; with one process, the module itself."""
        self._forget()
        prepared = self.accelerator.prepare_model(step_module)
        self._prepared.append(prepared)
        return prepared

    def prepare_optimizers(self, optimizers: list[Any]) -> list[Any]:
        """Return Accelerate's wrappers around the optimizers."""
        return [self.accelerator.prepare_optimizer(each, device_placement=False) for each in optimizers]

    def teardown(self) -> None:
        """Release the module, here and in the Accelerator."""
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
    if name not in PRECISION_NAMES:
        raise OptionError(
            f"Accelerated: the Accelerator's mixed_precision is {name!r}; allowed: "
            f"{', '.join(PRECISION_NAMES)}."
        )
    return PRECISION_NAMES[name]


def _check_accelerator(accelerator: Any) -> None:
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
            "Trainer, whose events depend on it."
        )
