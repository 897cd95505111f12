"""What runs have left: one HTML page (`hookline report`), a list (`hookline runs`), numbers (`hookline
summary`).
"""

from __future__ import annotations

from hookline.report.page import write_report

__all__ = ["write_report"]
