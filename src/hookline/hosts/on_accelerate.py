"""A loop that is written on Accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.hosts.tables import ACCELERATE
from hookline.line import Line
from hookline.loggers import Logger


class AcceleratedLine(Line):
    """A line whose backward, clipping and place among the ranks are the accelerator's, which is `trainer.outer` for hooks."""

    def __init__(self, accelerator: Any, module: Any = None, optimizers: Any = (), *, logger: Any = None, **options: Any) -> None:
        """logger: as of `Line`; by default what the accelerator tracks with, if it was told to."""
        tracked = [Trackers(accelerator)] if logger is None and accelerator.log_with else False
        self.outer = accelerator
        super().__init__(module, optimizers, logger=tracked if logger is None else logger, host=ACCELERATE, **options)

    def attach(self, module: nn.Module, optimizers: Any = (), schedulers: Any = ()) -> None:
        """Say whose training it is; as they are, or as the accelerator has prepared them."""
        s, accelerator = self.state, self.outer
        super().attach(accelerator.unwrap_model(module), optimizers, schedulers)
        s.wrapped_model, s.device = module, accelerator.device
        self.take_place(accelerator.process_index, accelerator.local_process_index, accelerator.num_processes)

    def prepare(self, *given: Any) -> Any:
        """`accelerator.prepare`: the model, the optimizers and the schedulers among them are those of this training."""
        prepared = self.outer.prepare(*given)
        every = prepared if isinstance(prepared, tuple) else (prepared,)
        models = [each for each in every if isinstance(each, nn.Module)]
        if models:
            optimizers = [each for each in every if isinstance(each, Optimizer)]
            schedulers = [each for each in every if hasattr(each, "get_last_lr")]
            self.attach(models[0], optimizers, schedulers)
        return prepared

    def differentiate(self, loss: Tensor, **options: Any) -> None:
        """`accelerator.backward`, which divides by the accumulation and scales."""
        self.outer.backward(loss, **options)

    def clip(self, parameters: list[Any], max_norm: float) -> Tensor:
        """`accelerator.clip_grad_norm_`, which unscales first."""
        norm: Tensor = self.outer.clip_grad_norm_(parameters, max_norm)
        return norm


class Trackers(Logger):
    """Rows go to whatever the accelerator tracks with."""

    queued = False

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        """One row."""
        self.accelerator.log({"epoch": epoch, **metrics}, step=step)
