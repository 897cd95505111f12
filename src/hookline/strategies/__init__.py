"""Where a run happens: devices, precision, processes."""

from hookline.strategies.base import Strategy
from hookline.strategies.single import SingleDevice, make_strategy

__all__ = ["SingleDevice", "Strategy", "make_strategy"]
