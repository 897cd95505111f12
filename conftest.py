"""Runs every code block of the README and the docs; a `text` block must be what the `python` block before it
printed.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from sybil import Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

HALF_PRECISION = "import torch; torch.nn.Linear(64, 64).bfloat16()(torch.ones(64, 64).bfloat16())"


def limit_onednn() -> None:
    """Leave out the matrix instructions (AMX) of a processor that lists them and does not have them, as some
    virtual machines do: half precision would end the process. Tests are about Hookline, not about that.
    """
    listed = Path("/proc/cpuinfo")
    if "HOOKLINE_TEST_AMX" in os.environ or not listed.exists() or "amx_tile" not in listed.read_text():
        return
    ended = subprocess.run([sys.executable, "-c", HALF_PRECISION], capture_output=True, check=False)
    os.environ["HOOKLINE_TEST_AMX"] = str(ended.returncode)  # the processes of this run do not try it again
    if ended.returncode == -signal.SIGILL:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


limit_onednn()  # oneDNN reads the variable when it first computes

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # so a shell starts what it puts in the background; Ctrl-C is tested, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:  # for tests/preloaded.py
    os.environ.setdefault("HOOKLINE_TEST_CONTROLLER", str(os.getppid()))

# torch looks up the name of each address that it connects to: 5 s each time that the name server does not
# answer
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

if os.environ.get("HOOKLINE_TEST_ONEDNN") == "0":  # a variation: CONTRIBUTING.md
    torch.backends.mkldnn.enabled = False
    # the processes that tests start
    switch = str(Path(__file__).parent / "tests" / "without_onednn")
    os.environ["PYTHONPATH"] = os.pathsep.join([switch, *filter(None, [os.environ.get("PYTHONPATH")])])


gc.disable()  # a million objects are made while tests are collected, and none of them is garbage


def pytest_collection_finish() -> None:
    """Keep what is imported out of later collections of garbage, which visit a million objects otherwise."""
    gc.collect()
    gc.freeze()
    gc.enable()


run_python = PythonEvaluator()


def python_block(example: Any) -> None:
    """Run a block and keep what it printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        run_python(example)
    example.namespace["printed_by_block"] = output.getvalue()


def text_block(example: Any) -> None:
    """Compare with what the block before it printed; trailing spaces and line numbers of our source do not
    matter.
    """
    printed, expected = (
        [re.sub(r"\.py:\d+", ".py", line.rstrip()) for line in text.strip().splitlines()]
        for text in (example.namespace["printed_by_block"], example.parsed)
    )
    assert printed == expected, "\n".join(["the block printed:", *printed])


COMMAND = """#!{python}
import sys

sys.path.insert(0, {tests!r})
import preloaded

class Process(preloaded.Popen):
    def address(self, environment):
        return {address!r}

sys.exit(Process([sys.executable, "-m", "hookline", *sys.argv[1:]]).wait())
"""
"""The command `hookline` in a document: a process that has imported torch already (`tests/preloaded.py`)."""


def shell_block(example: Any) -> None:
    """Run the commands in the document's directory, with the environment that runs the tests.

    The README starts the installed command, as a newcomer does.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.dirname(sys.executable), os.environ["PATH"]]
        if Path(example.path).name != "README.md":
            import preloaded  # type: ignore[import-not-found]  # pytest adds `tests` to the path

            command = Path(folder, "hookline")
            command.write_text(
                COMMAND.format(
                    python=sys.executable,
                    tests=str(Path(__file__).parent / "tests"),
                    address=preloaded.server(),
                )
            )
            command.chmod(0o755)
            paths.insert(0, folder)
        done = subprocess.run(
            ["sh", "-e", "-c", example.parsed],
            env={**os.environ, "PATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert done.returncode == 0, done.stdout + done.stderr


def enter(namespace: dict[str, Any]) -> None:
    """Each document runs in a directory of its own."""
    namespace["home"], namespace["scratch"] = os.getcwd(), tempfile.TemporaryDirectory()
    os.chdir(namespace["scratch"].name)


def leave(namespace: dict[str, Any]) -> None:
    """Back to where the tests were started."""
    os.chdir(namespace["home"])
    namespace["scratch"].cleanup()


pytest_collect_file = Sybil(
    parsers=[
        CodeBlockParser("python", python_block),
        CodeBlockParser("text", text_block),
        CodeBlockParser("sh", shell_block),
    ],
    patterns=["README.md", "docs/*.md", "docs/*/*.md"],
    setup=enter,
    teardown=leave,
).pytest()
