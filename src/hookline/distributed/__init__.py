"""Ranks and how they communicate; device meshes; precision; strategies: one device, DDP, FSDP, Accelerate.

`from hookline.distributed import DDP` loads only that strategy. May import: util, engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.engine.registry import lazy_names

if TYPE_CHECKING:
    from hookline.distributed.accelerate import Accelerated
    from hookline.distributed.base import SingleDevice, Strategy
    from hookline.distributed.build import make_strategy
    from hookline.distributed.ddp import DDP
    from hookline.distributed.fsdp import FSDP

__all__ = ["DDP", "FSDP", "Accelerated", "SingleDevice", "Strategy", "make_strategy"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Accelerated": "accelerate",
        "DDP": "ddp",
        "FSDP": "fsdp",
        "make_strategy": "build",
        "SingleDevice": "base",
        "Strategy": "base",
    },
)
