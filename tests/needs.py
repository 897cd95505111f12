"""Packages that not every installation has."""

from __future__ import annotations

import importlib.util

import pytest


def needs(*packages: str) -> None:
    """Skip the module that calls it if one of these packages is not installed.

    Unlike `pytest.importorskip`, it imports none of them: that takes seconds, and every process that collects
    the tests would pay for it, though only one of them runs these.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"could not import {package!r}: it is not installed", allow_module_level=True)
