"""What Keras callbacks see as `self.model` in a Hookline run, and metrics under Keras' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hookline.errors import HookError


class ModelView:
    """The module of the run, with what callbacks do to a Keras model."""

    def __init__(self) -> None:
        self._state: Any = None
        self.optimizer: OptimizerView | None = None

    def _attach(self, state: Any) -> None:
        self._state = state
        self.optimizer = OptimizerView(state)

    @property
    def stop_training(self) -> bool:
        """Set to True, the run ends at the next batch boundary."""
        return bool(self._state.should_stop)

    @stop_training.setter
    def stop_training(self, stop: bool) -> None:
        if stop:
            self._state.request_stop("a Keras callback set model.stop_training")

    def get_weights(self) -> list[Any]:
        """Copies of all weights and buffers, as arrays."""
        return [_array(each.detach().cpu()) for each in self._state.module.state_dict().values()]

    def set_weights(self, weights: list[Any]) -> None:
        """Put such copies back."""
        with torch.no_grad():
            for tensor, values in zip(self._state.module.state_dict().values(), weights, strict=True):
                tensor.copy_(torch.as_tensor(values))

    def __getattr__(self, name: str) -> Any:
        """Anything else is the module's own."""
        if name.startswith("_") or self._state is None:
            raise AttributeError(name)
        return getattr(self._state.module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module itself."""
        return self._state.module(*args, **kwargs)


class Rate(float):
    """A learning rate, with what callbacks do to a variable of Keras."""

    owner: OptimizerView

    def assign(self, rate: Any) -> None:
        """Set it."""
        self.owner.learning_rate = rate

    def numpy(self) -> float:
        """The number."""
        return float(self)


class OptimizerView:
    """The first optimizer, by its learning rate."""

    def __init__(self, state: Any) -> None:
        object.__setattr__(self, "_state", state)

    @property
    def learning_rate(self) -> Rate:
        """Of the first parameter group; setting it sets all groups."""
        rate = Rate(self._state.optimizers[0].param_groups[0]["lr"])
        rate.owner = self
        return rate

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        for group in self._state.optimizers[0].param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = float(rate)

    lr = learning_rate

    @property
    def iterations(self) -> int:
        """Updates so far."""
        return int(self._state.step)

    def __getattr__(self, name: str) -> Any:
        """Only reached for what is not there. Keras itself looks for `optimizers` and `inner_optimizer`."""
        if name.startswith("_") or name in ("optimizers", "inner_optimizer"):
            raise AttributeError(name)
        raise HookError(
            f"A Keras callback asks for model.optimizer.{name}. In a Hookline run there are learning_rate "
            "and iterations; torch's own optimizers are in `trainer.optimizers`."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("learning_rate", "lr"):
            raise HookError(
                f"A Keras callback sets model.optimizer.{name}, which would change nothing in a Hookline run."
            )
        object.__setattr__(self, name, value)


def _array(tensor: torch.Tensor) -> Any:
    """A copy; numbers that numpy has not, in ones that hold them exactly."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy().copy()


def epoch_logs(metrics: Mapping[str, float]) -> dict[str, Any]:
    """`train/loss` -> `loss`, `val/loss` -> `val_loss`; all others as they are."""
    return {
        key.replace("val/", "val_", 1) if key.startswith("val/") else key.removeprefix("train/"): value
        for key, value in metrics.items()
    }


def test_logs(metrics: Mapping[str, float], prefix: str) -> dict[str, Any]:
    """The results of an evaluation by itself, without its prefix."""
    return {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
