"""These tests need the other trainers' packages: one that is missing is an error, and no reason to skip."""

import functools
import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # read when Keras is imported

from lightning.fabric.utilities import registry  # noqa: E402

# each of Lightning's trainers reads the metadata of all installed packages: 0.05 s
registry.entry_points = functools.cache(registry.entry_points)
