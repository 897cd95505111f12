"""Everything a developer or a newcomer runs: `python3 dev.py demo`, `python3 dev.py test`.

Needs Python 3.11 and pip, nothing else: each command sets up a virtual environment in `.venv`, and is quick the second
time. This file uses the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
INTEROP = ROOT / ".venv-interop"
"""Where the other trainers' packages are, so that they weigh on nothing else."""


def python(venv: Path = VENV) -> Path:
    """An environment's Python."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


PYTHON = python()


class Trouble(Exception):
    """Something the user has to do something about."""


def run(*command: str | Path, quiet: bool = False) -> None:
    """Say what is run, run it, and stop if it fails."""
    shown = " ".join(shlex.quote(str(each).replace(f"{ROOT}/", "")) for each in command)
    print(f"$ {shown}", flush=True)
    # threads that wait for each other actively would slow everything down on a machine that does something else as well
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONUNBUFFERED": "1"}
    try:
        subprocess.run([str(each) for each in command], cwd=ROOT, env=environment, check=True, capture_output=quiet, text=True)
    except subprocess.CalledProcessError as error:
        if quiet:
            print(error.stdout, error.stderr, sep="\n")
        raise Trouble(f"`{shown}` failed with exit code {error.returncode}.") from None


def prepare(*extras: str, venv: Path = VENV) -> None:
    """Make an environment and install the project with these extras, unless that is done already."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this file is what people start with the wrong Python
        raise Trouble(f"Hookline needs Python 3.11 or newer; this is {sys.version.split()[0]}.")
    source = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    stamp = hashlib.sha256(source + sys.version.encode() + str(ROOT).encode()).hexdigest()
    marks = {extra: venv / f"installed-{extra}" for extra in ("base", *extras)}
    if python(venv).exists() and all(mark.exists() and mark.read_text() == stamp for mark in marks.values()):
        return
    print(f"Setting up {venv.name} (a few minutes the first time; later runs skip this).", flush=True)
    if not python(venv).exists():
        try:
            run(sys.executable, "-m", "venv", venv)
        except Trouble:
            raise Trouble("Python's venv module does not work here. On Debian or Ubuntu: apt-get install python3-venv.") from None
    # what an earlier command installed stays: one environment serves all commands
    kept = {mark.name.removeprefix("installed-") for mark in venv.glob("installed-*")} | {*extras} - {"base"}
    wanted = f"[{','.join(sorted(kept - {'base'}))}]" if kept - {"base"} else ""
    try:
        run(python(venv), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--constraint", "constraints.txt", "--editable", f".{wanted}", quiet=True)  # fmt: skip
    except Trouble as trouble:
        raise Trouble(f"{trouble}\npip could not install what Hookline needs (its output is above). Is there a network, or a "
                      f"mirror in your pip configuration? If {venv.name} is broken, delete it and try again."
                      ) from None  # fmt: skip
    for extra in {"base", *kept, *extras}:
        (venv / f"installed-{extra}").write_text(stamp)


def demo(arguments: list[str]) -> None:
    """Train a small GPT on English text and show what its hooks did."""
    prepare()
    run(PYTHON, "-m", "hookline", "fit", "examples/gpt.toml", *arguments)


def test(arguments: list[str]) -> None:
    """Lint, types and all tests; with arguments, only pytest with them."""
    prepare("dev")
    if arguments:
        run(PYTHON, "-m", "pytest", *arguments)
        return
    lint([])
    types([])
    # files side by side, each by one process: what it has set up serves all its tests; those that take long are not left for last
    processes = str(min(4, os.cpu_count() or 1))
    run(PYTHON, "-m", "pytest", "--numprocesses", processes, "--dist", "loadfile", "--no-loadscope-reorder")
    interop([])


def interop(arguments: list[str]) -> None:
    """Test with the real Lightning, transformers, Keras and Accelerate, in an environment of their own."""
    prepare("interop", venv=INTEROP)
    run(python(INTEROP), "-m", "pytest", "tests/interop", *arguments)


def lint(arguments: list[str]) -> None:
    """Check style, and that generated files are up to date."""
    prepare("dev")
    run(PYTHON, "-m", "ruff", "check", *arguments)
    run(PYTHON, "tools/generate.py", "--check")


def types(arguments: list[str]) -> None:
    """Check types with mypy and pyright."""
    prepare("dev")
    run(PYTHON, "-m", "mypy", *arguments)
    run(PYTHON, "-m", "pyright", *arguments)


def generate(arguments: list[str]) -> None:
    """Write what is derived from the table of events."""
    prepare()
    run(PYTHON, "tools/generate.py", *arguments)


def bench(arguments: list[str]) -> None:
    """Time a bare loop, Hookline and Lightning side by side."""
    prepare("bench")
    run(PYTHON, "benchmarks/overhead.py", *arguments)


def bench_hooks(arguments: list[str]) -> None:
    """Time what built-in hooks add to a step."""
    prepare("bench")
    run(PYTHON, "benchmarks/hooks.py", *arguments)
    run(PYTHON, "benchmarks/within.py")


def bench_checkpoint(arguments: list[str]) -> None:
    """Time how long saving a checkpoint holds the training up."""
    prepare("bench")
    run(PYTHON, "benchmarks/checkpoint.py", *arguments)


def bench_loaders(arguments: list[str]) -> None:
    """Time what drawing from several loaders costs."""
    prepare()
    run(PYTHON, "benchmarks/loaders.py", *arguments)


def bench_distributed(arguments: list[str]) -> None:
    """Time what Hookline adds to a step of two ranks, over loops written by hand."""
    prepare()
    run(PYTHON, "benchmarks/distributed.py", *arguments)


def faults(arguments: list[str]) -> None:
    """Kill, damage and interrupt real trainings, and check that none is lost or goes on wrongly."""
    prepare()
    run(PYTHON, "faults/run.py", *arguments)


EVERYTHING = (demo, test, lint, types, interop, generate, bench, bench_hooks, bench_checkpoint, bench_loaders, bench_distributed,
              faults)  # fmt: skip
COMMANDS = {each.__name__.replace("_", "-"): each for each in EVERYTHING}


def main() -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(description="Set up and run Hookline's own commands.", add_help=True)
    listing = "; ".join(f"{name}: {(command.__doc__ or '').strip()}" for name, command in COMMANDS.items())
    parser.add_argument("command", choices=COMMANDS, help=listing)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the command")
    chosen = parser.parse_args()
    try:
        COMMANDS[chosen.command](chosen.arguments)
    except Trouble as trouble:
        print(f"\n{trouble}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
