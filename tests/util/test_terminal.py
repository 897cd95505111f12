"""A progress bar draws no random numbers; a notebook gets notices where it does not mark them as errors."""

from __future__ import annotations

import builtins
import logging
import random
import subprocess
import sys

import pytest

from hookline.util.terminal import log_notice, notice_file, place

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


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """Pretend that a notebook runs this, and return a logger without handlers."""
    monkeypatch.setattr(builtins, "get_ipython", type("ZMQInteractiveShell", (), {}), raising=False)
    log = logging.Logger("alone")  # without the handlers of pytest
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler())
    return log


def test_a_notebook_prints_notices_on_stdout_unless_logging_is_configured(
    notebook: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log_notice(notebook, "loaded: %s", "best")
    assert capsys.readouterr() == ("loaded: best\n", "")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    notebook.addHandler(handler)
    log_notice(notebook, "loaded: %s", "best")
    assert capsys.readouterr() == ("", "")
    assert [(each.levelname, each.getMessage(), each.funcName) for each in records] == [
        ("WARNING", "loaded: best", "test_a_notebook_prints_notices_on_stdout_unless_logging_is_configured")
    ]


def test_a_level_above_warning_also_silences_notices_in_a_notebook(
    notebook: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook.setLevel(logging.ERROR)
    log_notice(notebook, "loaded")
    assert capsys.readouterr() == ("", "")


def test_code_of_a_cell_has_the_name_of_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place("/tmp/ipykernel_1/2.py", 5) == "/tmp/ipykernel_1/2.py:5"  # without IPython

    class Shell:
        class compile:  # noqa: N801
            @staticmethod
            def format_code_name(name: str) -> tuple[str, str] | None:
                return ("Cell", "In[3]") if name == "/tmp/ipykernel_1/2.py" else None

    monkeypatch.setattr(builtins, "get_ipython", Shell, raising=False)
    assert place("/tmp/ipykernel_1/2.py", 5) == "Cell In[3], line 5"
    assert place(__file__, 5) == f"{__file__}:5"
