"""These tests need the other trainers' packages: one that is missing is an error, and no reason to skip."""

import functools
import os

import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")  # read when Keras is imported

from lightning.fabric.utilities import registry  # noqa: E402

# each of Lightning's trainers reads the metadata of all installed packages: 0.05 s
registry.entry_points = functools.cache(registry.entry_points)


def pytest_configure(config: pytest.Config) -> None:
    # Lightning warns on every machine that has SLURM
    config.addinivalue_line(
        "filterwarnings", "ignore:The `srun` command is available on your system:UserWarning"
    )
