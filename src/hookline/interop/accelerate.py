"""`Line` for a loop that is written on Accelerate."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.interop.hosted.host import ACCELERATE_HOST
from hookline.interop.hosted.objects import HostLogger
from hookline.interop.loop import Line


class AcceleratedLine(Line):
    """A line that takes backward, clipping and the rank from the accelerator, which hooks find as
    `trainer.outer`.
    """

    def __init__(
        self,
        accelerator: Any,
        module: Any = None,
        optimizers: Any = (),
        *,
        logger: Any = None,
        **options: Any,
    ) -> None:
        """logger: as of `Line`; by default the accelerator's trackers, if it has any."""
        tracked = [Trackers(accelerator.log)] if logger is None and accelerator.log_with else False
        self.outer = accelerator
        self._prepared: list[Any] = []
        self._norm: Tensor | None = None
        """The norm of gradients that were unscaled for hooks and are about to be clipped."""
        super().__init__(
            module, optimizers, logger=tracked if logger is None else logger, host=ACCELERATE_HOST, **options
        )

    def attach(self, module: nn.Module, optimizers: Any = (), schedulers: Any = ()) -> None:
        """Set what is trained: the plain objects, or those that the accelerator has prepared."""
        accelerator = self.outer
        super().attach(accelerator.unwrap_model(module), optimizers, schedulers)
        self.set_device(accelerator.device, module)
        self.set_rank(accelerator.process_index, accelerator.local_process_index, accelerator.num_processes)

    def prepare(self, *given: Any) -> Any:
        """Call `accelerator.prepare` and attach the model, the optimizers and the schedulers among the
        results.
        """
        prepared = self.outer.prepare(*given)
        # after what earlier calls have prepared
        self._prepared += prepared if isinstance(prepared, tuple) else (prepared,)
        models = [each for each in self._prepared if isinstance(each, nn.Module)]
        if models or self.state.wrapped_model is not None:
            optimizers = [each for each in self._prepared if isinstance(each, Optimizer)]
            schedulers = [each for each in self._prepared if hasattr(each, "get_last_lr")]
            self.attach(
                models[0] if models else self.state.wrapped_model,
                optimizers or self.state.optimizers,
                schedulers or self.state.schedulers,
            )
        return prepared

    def differentiate(self, loss: Tensor, **options: Any) -> None:
        """Call `accelerator.backward`, which divides by the accumulation and scales."""
        self.outer.backward(loss, **options)

    def unscale(self, parameters: list[Any]) -> None:
        """Call `accelerator.clip_grad_norm_` without a limit if there is a scaler: it unscales and
        measures.
        """
        self._norm = (
            None if self.outer.scaler is None else self.outer.clip_grad_norm_(parameters, float("inf"))
        )

    def clip(self, parameters: list[Any], max_norm: float) -> Tensor:
        """Call `accelerator.clip_grad_norm_`, or clip by the norm that `unscale` has measured."""
        if self._norm is None:
            norm: Tensor = self.outer.clip_grad_norm_(parameters, max_norm)
            return norm
        nn.utils.clip_grads_with_norm_(parameters, max_norm, self._norm)
        return self._norm


class Trackers(HostLogger):
    """A logger that writes rows to the accelerator's trackers."""
