"""Programs that are started with Python, or with `hookline run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import preloaded


def python(*words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def hookline_run(*words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "hookline", "run", *words, cwd=cwd, **variables)


def preloaded_run(*words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program with `hookline run` in a process that has imported torch already, and nothing of `hookline.interop`."""
    command = [sys.executable, "-m", "hookline", "run", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return preloaded.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
