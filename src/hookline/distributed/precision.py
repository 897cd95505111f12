"""Mixed precision: autocast around a step, and the gradient scaler."""

from __future__ import annotations

from typing import Any

import torch

from hookline.engine.binding import Caller


class Precision:
    """The precision of a run: 32, bf16-mixed (autocast) or 16-mixed (autocast and a gradient scaler)."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(name)
        self.scaler = torch.amp.GradScaler(device.type) if name == "16-mixed" else None
        self._first: tuple[torch.amp.GradScaler, dict[str, Any]] | None = None

    def begin(self) -> torch.amp.GradScaler | None:
        """Return the scaler, reset to its first scale, because an earlier run may have changed it."""
        if self.scaler is not None and (self._first is None or self._first[0] is not self.scaler):
            self._first = (self.scaler, self.scaler.state_dict())
        elif self.scaler is not None and self._first is not None:
            self.scaler.load_state_dict(self._first[1])
        return self.scaler

    def around(self, call: Caller) -> Caller:
        """Return the step under autocast; without mixed precision, the step itself."""
        if self.dtype is None:
            return call
        device, dtype = self.device.type, self.dtype

        def under_autocast(s: Any) -> Any:
            with torch.autocast(device, dtype):
                return call(s)

        return under_autocast

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state for a checkpoint."""
        return self.scaler.state_dict() if self.scaler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scaler's state from a checkpoint."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
            # this makes the scale tensor, which a resume in the middle of a window reads at once
            self.scaler.scale(torch.zeros((), device=self.device))
