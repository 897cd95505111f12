"""A run, or several, as one HTML page that needs nothing else: `hookline report`."""

from __future__ import annotations

from hookline.report.page import write_report

__all__ = ["write_report"]
