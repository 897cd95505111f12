"""A run's page, live: served on this machine only, pushed what is new, with the switches of
the running job.
"""

from __future__ import annotations

from hookline.watch.server import Watch

__all__ = ["Watch"]
