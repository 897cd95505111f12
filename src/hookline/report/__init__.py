"""Views of recorded runs: an HTML page (`hookline report`), a list (`hookline runs`), numbers (`hookline
summary`).

It reads files only and never changes a run. May import: util, metrics, loggers, run, checkpoint,
reliability, digests, control.
"""

from __future__ import annotations

from hookline.report.cell import Report
from hookline.report.page import write_report

__all__ = ["Report", "write_report"]
