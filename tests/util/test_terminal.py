"""A progress bar draws no random numbers."""

from __future__ import annotations

PROGRAM = """
import random, sys
from hookline.hooks import ProgressBar
from tiny import Net, batches, quiet
assert "rich.style" not in sys.modules
random.seed(0)
quiet(hooks=[ProgressBar()]).fit(Net(), batches(2))
assert "rich.style" in sys.modules
print(random.random())
random.seed(0)
print(random.random())
"""


def test_the_first_use_of_rich_draws_nothing_from_python_s_random_stream() -> None: ...
