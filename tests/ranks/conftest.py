"""Launches whose results more than one file reads."""

from __future__ import annotations

import fcntl
import json
import os
from typing import Any

import pytest
from ranks.torchrun import cases


@pytest.fixture(scope="session")
def from_hook_cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each case of hook_cases.py and start_cases.py found, by rank, from one launch, also if several processes run tests."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / "hook_cases.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if not (text := file.read()):
            text = json.dumps(cases("ranks.hook_cases", tmp_path_factory.mktemp("job"), 300))
            file.write(text)
        found: dict[str, list[Any]] = json.loads(text)
        return found
