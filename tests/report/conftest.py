"""Tests here may ask for a browser."""

from browsing import browser

__all__ = ["browser"]
