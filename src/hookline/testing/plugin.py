"""pytest fixtures, available once Hookline is installed. Heavy modules are imported when a fixture is
used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def hook_player(tmp_path: Path) -> Callable[..., Any]:
    """Return `hookline.testing.play`, writing into a directory of the test's own."""
    from hookline.testing import play

    def play_here(*hooks: Any, **options: Any) -> Any:
        options.setdefault("default_root_dir", tmp_path)
        return play(*hooks, **options)

    return play_here


@pytest.fixture
def fire_event() -> Callable[..., Any]:
    """Return `hookline.testing.fire`."""
    from hookline.testing import fire

    return fire


@pytest.fixture
def memory_urls() -> Iterator[None]:
    """Allow checkpoints at `memory://` URLs in this test (`hookline.testing.memory_urls`)."""
    from hookline.testing import memory_urls

    with memory_urls():
        yield
