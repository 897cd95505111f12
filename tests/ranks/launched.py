"""Launches whose results more than one file reads: each is done once, also if several processes run tests."""

from __future__ import annotations

import fcntl
import json
import os
from typing import Any

import pytest
from ranks.torchrun import cases


def launched(module: str, factory: pytest.TempPathFactory, deadline: float = 300) -> dict[str, list[Any]]:
    """Return what each case of a module found, by rank."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / f"{module}.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if not (text := file.read()):
            text = json.dumps(cases(module, factory.mktemp("job"), deadline))
            file.write(text)
        found: dict[str, list[Any]] = json.loads(text)
        return found


@pytest.fixture(scope="session")
def from_hook_cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each case of hook_cases.py and start_cases.py found, by rank."""
    return launched("ranks.hook_cases", tmp_path_factory)


@pytest.fixture(scope="session")
def from_strategy_cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each case of strategy_cases.py found, by rank."""
    return launched("ranks.strategy_cases", tmp_path_factory)
