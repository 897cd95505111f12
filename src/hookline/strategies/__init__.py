"""Where a run happens: devices, precision, processes. `from hookline.strategies import DDP` loads just that
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookline.registry import lazy_names

if TYPE_CHECKING:
    from hookline.strategies.accelerated import Accelerated
    from hookline.strategies.base import Strategy
    from hookline.strategies.ddp import DDP
    from hookline.strategies.fsdp import FSDP
    from hookline.strategies.making import make_strategy
    from hookline.strategies.single import SingleDevice

__all__ = ["DDP", "FSDP", "Accelerated", "SingleDevice", "Strategy", "make_strategy"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Accelerated": "accelerated",
        "DDP": "ddp",
        "FSDP": "fsdp",
        "make_strategy": "making",
        "SingleDevice": "single",
        "Strategy": "base",
    },
)
