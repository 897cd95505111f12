"""A progress bar draws no random numbers; a notebook gets notices where it does not mark them as errors."""

from __future__ import annotations

import builtins
import random
import subprocess
import sys

import pytest

from hookline.util.terminal import notice_file

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


@pytest.mark.parametrize(
    ("shell", "stream"),
    [("ZMQInteractiveShell", "stdout"), ("TerminalInteractiveShell", "stderr"), ("", "stderr")],
)
def test_notices_go_to_stderr_but_in_a_notebook_to_stdout(
    shell: str, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shell:
        monkeypatch.setattr(builtins, "get_ipython", type(shell, (), {}), raising=False)
    assert notice_file() is getattr(sys, stream)
