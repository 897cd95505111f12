"""The live page of a run, served on this machine only.

It follows the run's files and sends commands through the control socket. May import: util, control, report.
"""

from __future__ import annotations

from hookline.watch.server import Watch

__all__ = ["Watch"]
