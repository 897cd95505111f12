"""The project that tests of configurations share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from config.configured import PARTS


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a module beside the configurations."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "parts_here.py").write_text(PARTS)
    path, modules = list(sys.path), set(sys.modules)
    yield folder
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("parts_here"):
            del sys.modules[name]
