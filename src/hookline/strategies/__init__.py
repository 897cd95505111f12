"""Where a run happens: devices, precision, processes."""

from hookline.strategies.accelerated import Accelerated
from hookline.strategies.base import Strategy
from hookline.strategies.ddp import DDP
from hookline.strategies.fsdp import FSDP
from hookline.strategies.making import make_strategy
from hookline.strategies.single import SingleDevice

__all__ = ["DDP", "FSDP", "Accelerated", "SingleDevice", "Strategy", "make_strategy"]
