"""Mixed precision: what wraps a step, and what scales a loss."""

from __future__ import annotations

from typing import Any

import torch

from hookline.engine.binding import Caller


class Precision:
    """32, bf16-mixed (autocast) or 16-mixed (autocast and a gradient scaler)."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(name)
        self.scaler = torch.amp.GradScaler(device.type) if name == "16-mixed" else None
        self._first: tuple[torch.amp.GradScaler, dict[str, Any]] | None = None

    def begin(self) -> torch.amp.GradScaler | None:
        """A run begins with the scale that the scaler was made with, not where the run before it got to."""
        if self.scaler is not None and (self._first is None or self._first[0] is not self.scaler):
            self._first = (self.scaler, self.scaler.state_dict())
        elif self.scaler is not None and self._first is not None:
            self.scaler.load_state_dict(self._first[1])
        return self.scaler

    def around(self, call: Caller) -> Caller:
        """Run a step under autocast; the call itself if nothing is needed."""
        if self.dtype is None:
            return call
        device, dtype = self.device.type, self.dtype

        def under_autocast(s: Any) -> Any:
            with torch.autocast(device, dtype):
                return call(s)

        return under_autocast

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state, for a checkpoint."""
        return self.scaler.state_dict() if self.scaler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
            self.scaler.scale(
                torch.zeros((), device=self.device)
            )  # makes the scale, which an open window needs at once
