"""Tests here may read the results of launches that several files share."""

from ranks.launched import from_strategy_cases

__all__ = ["from_strategy_cases"]
