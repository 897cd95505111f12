"""What every test of a logger gets: time enough for the clients of other packages to start and to write, on a busy machine too."""

from __future__ import annotations

import pytest

from hookline.loggers.queued import Queued


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    size, _ = Queued.__init__.__defaults__ or ()
    monkeypatch.setattr(Queued.__init__, "__defaults__", (size, 300.0))
