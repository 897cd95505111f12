"""These tests need the other trainers' packages: one that is missing is an error, and no reason to skip."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # read when Keras is imported
