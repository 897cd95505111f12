"""The device asked for, or the best there is."""

from __future__ import annotations

from typing import Any

import torch

from hookline.errors import OptionError


def pick_device(device: Any) -> torch.device:
    """The device asked for; 'auto' takes an accelerator if there is one."""
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise OptionError(
            f"device={device!r} is no device: {str(error).splitlines()[0]}", option="device", value=device
        ) from None
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise OptionError(
            f"device={device!r} is not available here: {str(error).splitlines()[0]}",
            option="device",
            value=device,
        ) from None
    return chosen
