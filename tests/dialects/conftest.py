"""Tests of the dialects run as on a machine without Lightning, whatever other tests of the process have imported."""

from __future__ import annotations

import pytest

from hookline.interop.lightning import package


@pytest.fixture(autouse=True)
def without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide an imported Lightning: its classes would be the defaults of the dialect's trainer."""
    monkeypatch.setattr(package, "ROOTS", ())
