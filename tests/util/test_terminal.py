"""A progress bar draws no random numbers."""

from __future__ import annotations

import random
import subprocess
import sys

PROGRAM = """
import random, sys
random.seed(0)
from hookline.util.terminal import load_rich
load_rich()
assert "rich.style" in sys.modules
print(random.random())
"""


def test_the_first_use_of_rich_draws_nothing_from_python_s_random_stream() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert float(done.stdout) == random.Random(0).random()
