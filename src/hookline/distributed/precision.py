"""The precision of a run: 32, mixed (autocast), or one type for parameters, batches and new tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine.binding import Caller
from hookline.engine.checks import parse_precision

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
TRUE = {"64": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
COMPLEX = {torch.float64: torch.complex128}
"""The complex type that goes with a type. bfloat16 has none, and torch computes little in complex32."""


def make_precision(name: str | int, device: torch.device) -> Precision:
    """Return the precision of this name."""
    name = parse_precision(name)
    return TruePrecision(name, device) if name in TRUE else Precision(name, device)


class Precision:
    """The precision of a run: 32, bf16-mixed (autocast) or 16-mixed (autocast and a gradient scaler)."""

    convert_tensor: Callable[[Tensor], Tensor] | None = None
    """Return a tensor of a batch in the type of the run. None: batches keep their types."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.dtype = MIXED.get(name)
        """The type of autocast; None without autocast."""
        self.scaler = torch.amp.GradScaler(device.type) if name == "16-mixed" else None
        self._first: tuple[torch.amp.GradScaler, dict[str, Any]] | None = None

    def begin(self) -> torch.amp.GradScaler | None:
        """Return the scaler, reset to its first scale, because an earlier run may have changed it."""
        if self.scaler is not None and (self._first is None or self._first[0] is not self.scaler):
            self._first = (self.scaler, self.scaler.state_dict())
        elif self.scaler is not None and self._first is not None:
            self.scaler.load_state_dict(self._first[1])
        return self.scaler

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return (
            contextlib.nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)
        )

    def creation_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which new parameters have the type of the run."""
        return contextlib.nullcontext()

    def convert_module(self, module: nn.Module) -> None:
        """Convert the parameters and buffers to the type of the run, in place. Here they stay as they are."""

    def around_step(self, call: Caller) -> Caller:
        """Return the step under autocast; without mixed precision, the step itself."""
        if self.dtype is None:
            return call
        device, dtype = self.device.type, self.dtype

        def under_autocast(s: Any) -> Any:
            with torch.autocast(device, dtype):
                return call(s)

        return under_autocast

    def with_default_type(self, call: Caller) -> Caller:
        """Return a call with the run's type as torch's default for new tensors; here, the call itself."""
        return call

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state for a checkpoint."""
        return self.scaler.state_dict() if self.scaler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scaler's state from a checkpoint."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
            # this makes the scale tensor, which a resume in the middle of a window reads at once
            self.scaler.scale(torch.zeros((), device=self.device))


class TruePrecision(Precision):
    """One type for floating-point parameters, buffers, batches and new tensors: 64, bf16-true or 16-true.

    Integers keep their types. With 64, complex numbers become complex128. There is no autocast and no scaler.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, device)
        self.type = TRUE[name]
        self.convert_tensor = self._convert

    def _convert(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._type_for(tensor))

    def _type_for(self, tensor: Tensor) -> torch.dtype:
        if tensor.is_floating_point():
            return self.type
        return COMPLEX.get(self.type, tensor.dtype) if tensor.is_complex() else tensor.dtype

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this type is torch's default for new tensors."""
        return default_type(self.type)

    def creation_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which new parameters have this type."""
        return default_type(self.type)

    def convert_module(self, module: nn.Module) -> None:
        """Convert parameters and buffers in place. Parameters stay the same objects, for their optimizers."""
        if any(each.dtype != self._type_for(each) for each in (*module.parameters(), *module.buffers())):
            module._apply(self._convert)  # type: ignore[no-untyped-call]

    def around_step(self, call: Caller) -> Caller:
        """Return the step with this type as torch's default for new tensors."""
        return self.with_default_type(call)

    def with_default_type(self, call: Caller) -> Caller:
        """Return a call with this type as torch's default for new tensors.

        The backward pass needs it too, because activation checkpointing runs layers again in it.
        """
        dtype = self.type

        def in_type(s: Any) -> Any:
            with default_type(dtype):
                return call(s)

        return in_type


@contextlib.contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """Make this torch's default type for new tensors inside the `with`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
