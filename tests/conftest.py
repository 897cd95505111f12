"""What every test gets: a directory of its own, so that nothing is written into the checkout, and fixed seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

with contextlib.suppress(ImportError):  # not there where other trainers' packages are
    from hypothesis import HealthCheck, settings

    # no example fails because the machine is busy
    settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("unhurried")


OF_OLDER_TORCH = (
    "ignore:TypedStorage is deprecated:UserWarning",  # a save with torch.distributed.checkpoint
    "ignore:The given buffer is not writable:UserWarning",  # torch.export.load
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
    "ignore:Warning. Profiler clears events at the end of each cycle:UserWarning",
)
"""Warnings of torch 2.10 to 2.12 about its own code."""


def pytest_configure(config: pytest.Config) -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        for each in OF_OLDER_TORCH:
            config.addinivalue_line("filterwarnings", each)


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # not torch.manual_seed: where CUDA is not initialized, it formats the stack three times
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def memory_urls(memory_urls: None) -> Iterator[None]:
    """memory:// may be used, and is empty."""
    from fsspec.implementations.memory import MemoryFileSystem

    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
