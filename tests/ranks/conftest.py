"""Launches whose results more than one file reads."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.torchrun import cases


@pytest.fixture(scope="session")
def from_hook_cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each case of hook_cases.py and start_cases.py found, by rank, from one launch."""
    return cases("ranks.hook_cases", tmp_path_factory.mktemp("job"), 300)
