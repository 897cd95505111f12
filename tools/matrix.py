"""Run the core tests on every supported Python and torch that can be installed here, one line for each.

Run it through `python3 dev.py matrix`. Each cell, a Python and a torch, gets an environment of its own in a
temporary directory, which is removed afterwards. `--list` only shows the cells, and why one cannot be
installed. For a Python that has no torch here, the source is compiled and the tests that need no torch run.
This file uses the standard library only.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""From `requires-python` of pyproject.toml to the newest."""
TORCHES = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""From the lower bound of pyproject.toml to the newest, the last patch release of each."""

CORE = (
    "tests/engine",
    "tests/run",
    "tests/training",
    "tests/checkpoint",
    "tests/data",
    "tests/hooks",
    "tests/cli",
)
"""What every cell runs: the engine, the loops, checkpoints, data, built-in hooks and the command line."""
LEFT_OUT = {
    "tests/training/ranks": "several processes each, and torch's collectives rather than the interpreter",
    "tests/data/test_libraries.py": "torchdata and webdataset",
    "tests/hooks/test_open_telemetry.py": "opentelemetry",
    "tests/hooks/test_instruments.py": "opentelemetry",
    "tests/hooks/test_otlp.py": "opentelemetry",
    "tests/hooks/test_span_sample.py": "opentelemetry",
    "tests/hooks/test_spans.py": "opentelemetry",
    "tests/hooks/test_optuna_pruning.py": "optuna",
    "tests/cli/test_mcp_server.py": "mcp",
}
"""Parts of these folders that the core does not run, and what they need."""
PACKAGES = (
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "sybil",
    "pyyaml",
    "fsspec",
    "psutil",
    "httpx",
    "matplotlib",
)
"""What the core tests need besides Hookline's own requirements."""
WITHOUT_TORCH = (
    "tests/engine/test_changes.py",
    "tests/util/test_limited_json.py",
    "tests/util/test_processes.py",
    "tests/util/test_redaction.py",
    "tests/util/test_snapshot.py",
    "tests/util/test_terminal.py",
    "tests/util/test_text.py",
)
"""The tests that run where torch is missing."""
COMPILED = ("src/hookline", "tools", "examples", "dev.py")
"""What must compile without a warning on every Python."""
IMPORTED = """
import importlib, pkgutil, hookline.engine, hookline.util
for package in (hookline.engine, hookline.util):
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
"""
NEEDS_CUDA = (
    "a build for CUDA only, with several GB of other packages (--cuda installs them; docs/versions.md)"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A Python and a torch; "" is a Python without torch."""

    python: str
    torch: str

    def __str__(self) -> str:
        return (
            f"Python {self.python}, torch {self.torch}"
            if self.torch
            else f"Python {self.python} without torch"
        )


# --- What can be installed here ---


def interpreters(version: str) -> Iterator[str]:
    """Yield commands that may be this Python: this one, those on the path, those of pyenv and uv."""
    yield sys.executable
    if found := shutil.which(f"python{version}"):
        yield found
    roots = (
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions"),
        Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local/share/uv/python")),
    )
    for root in roots:
        yield from map(str, sorted(root.glob(f"*{version}.*/bin/python{version}")))


@functools.cache
def find_python(version: str) -> str | None:
    """Return a command that starts this Python, or None."""
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    for command in interpreters(version):
        try:
            done = subprocess.run([command, "-c", code], capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.stdout.strip() == version:  # what pyenv puts on the path fails unless a version is chosen
            return command
    return None


@functools.cache
def offered(command: str) -> frozenset[str]:
    """Return the versions of torch that pip finds for a Python."""
    done = subprocess.run(
        [command, "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        check=False,
    )
    listed = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    return frozenset(listed[1].split(", ")) if listed else frozenset()


def obstacle(cell: Cell, *, cuda: bool = False) -> str:
    """Return why a cell cannot be installed here, or ""."""
    command = find_python(cell.python)
    if command is None:
        return f"there is no Python {cell.python} here"
    if not cell.torch:
        return ""
    versions = offered(command)
    if not versions:
        return "pip finds no torch: is there a network, or a mirror in pip's configuration?"
    if f"{cell.torch}+cpu" in versions:
        return ""
    if cell.torch not in versions:
        return f"pip finds no torch {cell.torch} for Python {cell.python}"
    return "" if cuda or sys.platform != "linux" else NEEDS_CUDA


def chosen_cells(
    pythons: Sequence[str], torches: Sequence[str], *, cuda: bool = False
) -> list[tuple[Cell, str]]:
    """Return the cells and their obstacles. A Python that is here without torch gets a cell without it."""
    cells = []
    for python in pythons:
        found = [(cell, obstacle(cell, cuda=cuda)) for cell in (Cell(python, torch) for torch in torches)]
        cells += found
        if find_python(python) and all(why for _, why in found):
            cells.append((Cell(python, ""), ""))
    return cells


# --- Running a cell ---


def constraints_without_torch(folder: Path) -> Path:
    """Write the pinned versions, for another torch than the pinned one."""
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    path = folder / "constraints.txt"
    path.write_text("".join(line for line in lines if not line.startswith("torch==")))
    return path


def commands(cell: Cell, folder: Path, processes: int, more: Sequence[str]) -> Iterator[list[str | Path]]:
    """Yield what installs a cell and what runs in it; the last command is pytest."""
    command = find_python(cell.python)
    assert command is not None
    python = folder / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip: list[str | Path] = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    pinned: list[str | Path] = [*pip, "--constraint", constraints_without_torch(folder)]
    yield [command, "-m", "venv", folder / "env"]
    if not cell.torch:
        yield [*pinned, "pytest", "pytest-timeout", "hypothesis", "rich"]
        yield [python, "-W", "error", "-c", COMPILE, *COMPILED]
        yield [python, "-c", IMPORTED]
        yield [python, "-m", "pytest", "--noconftest", *WITHOUT_TORCH, *more]
        return
    yield [*pip, f"torch=={cell.torch}"]
    yield [*pinned, f"torch=={cell.torch}", "--editable", ".", *PACKAGES]
    left_out = [f"--ignore={path}" for path in LEFT_OUT]
    # a process that crashes fails the cell; xdist would wait for ever for the tests that it had left
    several = ["--numprocesses", str(processes), "--dist", "loadfile", "--max-worker-restart", "0"]
    side_by_side = several if processes > 1 else []
    yield [python, "-m", "pytest", *side_by_side, *CORE, *left_out, *more]


COMPILE = """
import pathlib, sys
for each in map(pathlib.Path, sys.argv[1:]):
    for path in [each] if each.is_file() else sorted(each.rglob("*.py")):
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
"""
"""Compiles without writing; a warning is an error."""


def run_cell(cell: Cell, log: Path, processes: int, more: Sequence[str]) -> tuple[bool, str]:
    """Install a cell, run its tests into a log, and return whether they passed and what pytest counted."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
    }
    environment["PYTHONPATH"] = str(ROOT / "src")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    folder, code = Path(tempfile.mkdtemp(prefix="hookline-matrix-")), 0
    try:
        with log.open("w") as output:
            for command in commands(cell, folder, processes, more):
                print("$", *command, file=output, flush=True)
                # through a pipe: a test limits the size of the files that its process may write
                with subprocess.Popen(
                    list(map(str, command)),
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                ) as process:
                    assert process.stdout is not None
                    for line in process.stdout:
                        output.write(line.decode(errors="replace"))
                        output.flush()
                if code := process.returncode:
                    break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    totals = re.findall(
        r"^(?:=+ )?(\d+ (?:passed|failed|error).*?) in [\d.]+s", log.read_text(), re.MULTILINE
    )
    return not code, totals[-1] if totals else "the tests did not begin"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or list the cells."""
    parser = argparse.ArgumentParser(prog="dev.py matrix", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="show the cells, and why one cannot be installed")
    parser.add_argument("--python", action="append", metavar="3.X", help="only this Python; may be repeated")
    parser.add_argument("--torch", action="append", metavar="2.X.Y", help="only this torch; may be repeated")
    parser.add_argument(
        "--cuda", action="store_true", help="install builds for CUDA where there is no CPU build"
    )
    parser.add_argument(
        "--processes", type=int, default=min(4, os.cpu_count() or 1), help="test files side by side"
    )
    parser.add_argument("more", nargs="*", help="passed on to pytest, after --")
    given = parser.parse_args(arguments)
    cells = chosen_cells(given.python or PYTHONS, given.torch or TORCHES, cuda=given.cuda)
    named = bool(given.python and given.torch)
    listed, failed = given.list or all(why for _, why in cells), 0
    logs = Path() if listed else Path(tempfile.mkdtemp(prefix="hookline-matrix-logs-"))
    for cell, why in cells:
        if given.list or why:
            print(f"{'not here' if why else 'can run '}  {cell}{f': {why}' if why else ''}", flush=True)
            failed += bool(why) and named and not given.list  # a cell that was named must run
            continue
        log, began = logs / f"python-{cell.python}-torch-{cell.torch or 'none'}.txt", time.monotonic()
        passed, totals = run_cell(cell, log, given.processes, given.more)
        failed += not passed
        seconds = time.monotonic() - began
        print(
            f"{'passed' if passed else 'FAILED'}    {cell}: {totals}, in {seconds:.0f} s, {log}", flush=True
        )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
