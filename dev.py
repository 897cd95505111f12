"""Everything a developer or a newcomer runs: `python3 dev.py demo`, `python3 dev.py test`.

Needs Python 3.11 and pip, nothing else: each command sets up a virtual environment in `.venv`, and is quick
the second time. This file uses the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
INTEROP = ROOT / ".venv-interop"
"""Where the other trainers' packages are, so that they weigh on nothing else."""
NO_DEPS = {"interop": ROOT / "interop-no-deps.txt"}
"""By extra: a list of packages that are installed without their own requirements, which contradict ours."""

CACHES = {
    ".git",
    ".venv",
    ".venv-interop",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
}
"""What tools may leave in the checkout."""

VARIATIONS: dict[str, dict[str, str]] = {
    # MKL_CBWR: the code that MKL runs on processors of other makers
    "oldest": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "4"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1", "HOOKLINE_TEST_ONEDNN": "0"},
    "busy": {},
}
"""What the tests must not depend on. `busy` also runs a process for every core that does nothing but compute.
"""

NUMERIC = (
    "README.md",
    "tests/training/test_step.py",
    "tests/training/test_accumulation.py",
    "tests/training/test_backward.py",
    "tests/training/test_update.py",
    "tests/run/test_optimizer_router.py",
    "tests/hooks/test_gradient_monitor.py",
    "tests/hooks/test_weight_averaging.py",
    "tests/distributed/test_base.py",
    "tests/checkpoint/test_older.py",
    "tests/ranks/test_equal.py",
    "tests/ranks/test_strategies.py",
    "tests/training/ranks/test_step.py",
)
"""The tests that compare results of computations of different shapes. `dev.py test` runs them again as on
another processor.
"""

THOROUGH = (
    "tests/diverge/test_planted.py",
    "tests/ranks/test_checkpoints.py",
    "tests/ranks/test_equal.py",
    "tests/ranks/test_meshes.py",
    "tests/ranks/test_rollbacks.py",
    "tests/ranks/test_slurm.py",
    "tests/ranks/test_strategies.py",
    "tests/ranks/test_strategies_launched.py",
    "tests/ranks/test_weighted.py",
    "tests/report/test_in_browser.py",
    "tests/test_many_hooks.py",
    "tests/training/ranks/test_step.py",
    "tests/training/test_samples.py",
    "tests/training/test_several_loaders.py",
    "tests/interop/test_data_libraries.py",
)
"""The tests with cases that only `dev.py thorough` tries (`tests/thorough.py`)."""

LINTS = {
    "check": ("-m", "ruff", "check"),
    "format": ("-m", "ruff", "format", "--check"),
    "generated": ("tools/generate.py", "--check"),
}
"""What `dev.py lint` runs, and each hook of `.pre-commit-config.yaml` by its name here."""


def python(venv: Path = VENV) -> Path:
    """Return an environment's Python."""
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


PYTHON = python()


class Trouble(Exception):
    """Something the user has to do something about."""


def run(
    *command: str | Path, quiet: bool = False, log: Path | None = None, under: Mapping[str, str] | None = None
) -> None:
    """Print a command, run it under these variables, and stop if it fails. A log gets all of its output."""
    shown = " ".join(
        [*_assignments(under or {}), *(shlex.quote(str(each).replace(f"{ROOT}/", "")) for each in command)]
    )
    # threads that wait for each other actively would slow everything down on a machine that does something
    # else as well
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **(under or {}), "PYTHONUNBUFFERED": "1"}
    # without bytecode, every process that a test starts would compile the source again
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with log.open("a") if log else contextlib.nullcontext() as output:
        print(f"$ {shown}", file=output, flush=True)
        kept = subprocess.PIPE if quiet else output
        ended = subprocess.run(
            [str(each) for each in command],
            cwd=ROOT,
            env=environment,
            check=False,
            text=True,
            stdout=kept,
            stderr=subprocess.STDOUT if kept else None,
        )
    if ended.returncode:
        if quiet:
            print(ended.stdout)
        raise Trouble(f"`{shown}` failed with exit code {ended.returncode}.")


def _assignments(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in variables.items()]


def prepare(*extras: str, venv: Path = VENV) -> None:
    """Make an environment and install the project with these extras, unless that is done already."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this file is what people start with the wrong Python
        raise Trouble(f"Hookline needs Python 3.11 or newer; this is {sys.version.split()[0]}.")
    files = (ROOT / "pyproject.toml", ROOT / "constraints.txt", *NO_DEPS.values())
    source = b"".join(each.read_bytes() for each in files)
    stamp = hashlib.sha256(source + sys.version.encode() + str(ROOT).encode()).hexdigest()
    marks = {extra: venv / f"installed-{extra}" for extra in ("base", *extras)}
    if python(venv).exists() and all(mark.exists() and mark.read_text() == stamp for mark in marks.values()):
        return
    print(f"Setting up {venv.name} (a few minutes the first time; later runs skip this).", flush=True)
    if not python(venv).exists():
        try:
            run(sys.executable, "-m", "venv", venv)
        except Trouble:
            raise Trouble(
                "Python's venv module does not work here. On Debian or Ubuntu: apt-get install python3-venv."
            ) from None
    # what an earlier command installed stays: one environment serves all commands
    kept = {mark.name.removeprefix("installed-") for mark in venv.glob("installed-*")} | {*extras} - {"base"}
    wanted = f"[{','.join(sorted(kept - {'base'}))}]" if kept - {"base"} else ""
    pip = (python(venv), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    pinned = (*pip, "--constraint", "constraints.txt")
    try:
        run(*pinned, "--editable", f".{wanted}", quiet=True)
        for extra in sorted(kept & NO_DEPS.keys()):
            run(*pinned, "--no-deps", "--requirement", NO_DEPS[extra].name, quiet=True)
    except Trouble as trouble:
        raise Trouble(
            f"{trouble}\n"
            "pip could not install what Hookline needs (its output is above). Is there a network, or a "
            f"mirror in your pip configuration? If {venv.name} is broken, delete it and try again."
        ) from None
    for extra in {"base", *kept, *extras}:
        (venv / f"installed-{extra}").write_text(stamp)


def demo(arguments: list[str]) -> None:
    """Train a small GPT on English text and show what its hooks did."""
    prepare()
    run(PYTHON, "-m", "hookline", "fit", "examples/gpt/gpt.toml", *arguments)


def examples(arguments: list[str]) -> None:
    """Run all examples in full, or those that are named; print name, seconds, passed or failed for each."""
    prepare("examples", venv=INTEROP)
    run(python(INTEROP), "tools/examples.py", *arguments)


def test(arguments: list[str]) -> None:
    """Lint, types and all tests; with arguments, only pytest with them."""
    prepare("dev")
    if arguments:
        run(PYTHON, "-m", "pytest", *arguments)
        return
    prepare("interop", venv=INTEROP)
    lint([])
    before = written()
    with tempfile.TemporaryDirectory() as folder:
        reports = Path(folder)

        def again(log: Path | None) -> None:
            """Run the tests that need other settings or packages."""
            under = {**VARIATIONS["oldest"], "HOOKLINE_TEST_ONEDNN": "0"}
            report = f"--junit-xml={reports}/numeric.xml"
            run(PYTHON, "-m", "pytest", report, *NUMERIC, log=log, under=under)
            with_other_trainers(f"--junit-xml={reports}/interop.xml", log=log)

        try:
            # everything at once, so that no core is idle while one of them waits or ends
            at_once(lambda log: pytest(f"--junit-xml={reports}/all.xml", log=log), again, *TYPES)
            if changed := sorted(each for each, _ in written() ^ before):
                raise Trouble(
                    f"While the tests ran, this was written in the checkout: "
                    f"{', '.join(dict.fromkeys(changed))}."
                )
        finally:
            print(skipped(*sorted(reports.glob("*.xml"))), flush=True)


def at_once(first: Callable[[Path | None], None], *others: Callable[[Path | None], None]) -> None:
    """Run several things side by side. The first shows its output as it comes; each of the others gets a log,
    which is shown afterwards. One that fails is named as soon as it does.
    """
    troubles: list[Trouble] = []

    def attempt(each: Callable[[Path | None], None], log: Path | None) -> None:
        try:
            each(log)
        except Trouble as trouble:
            troubles.append(trouble)
            if log is not None:
                print(f"\n{trouble} Its output comes at the end.", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(number)) for number, _ in enumerate(others)]
        threads = [threading.Thread(target=attempt, args=each) for each in zip(others, logs, strict=True)]
        for thread in threads:
            thread.start()
        try:
            attempt(first, None)
        finally:
            for thread, log in zip(threads, logs, strict=True):
                thread.join()
                if log.exists():
                    print(log.read_text(), end="", flush=True)
    if troubles:
        raise Trouble("\n".join(map(str, troubles)))


def pytest(
    *arguments: str | Path,
    venv: Path = VENV,
    more: int = 1,
    log: Path | None = None,
    under: Mapping[str, str] | None = None,
) -> None:
    """Run files of tests side by side. A process runs all tests of a file; the files that take long are not
    left for last. One process more than cores, because some tests wait; one thread in each.
    """
    run(
        python(venv),
        "-m",
        "pytest",
        "--numprocesses",
        str(min(4, os.cpu_count() or 1) + more),
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        *arguments,
        log=log,
        under={"OMP_NUM_THREADS": "1", **(under or {})},
    )


def written() -> set[tuple[str, int]]:
    """Return every path in the checkout, and when the files were written; without caches."""
    found = set()
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [each for each in folders if each not in CACHES]
        here = Path(folder).relative_to(ROOT)
        found |= {(str(here / each), 0) for each in folders}
        found |= {
            (str(here / each), (ROOT / here / each).lstat().st_mtime_ns)
            for each in files
            if each not in CACHES
        }
    return found


def skipped(*reports: Path) -> str:
    """Return one line that says which tests were skipped, and what they would have needed."""
    found: dict[str, set[tuple[str, str]]] = {}  # by reason: the places and names of the tests
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            for skip in case.iter("skipped"):
                if skip.get("type") != "pytest.xfail":
                    whole_file = (
                        skip.get("message") == "collection skipped"
                    )  # then the text is ('file', line, 'Skipped: reason')
                    reason = (
                        (skip.text or "").partition("Skipped: ")[2][:-2]
                        if whole_file
                        else skip.get("message", "")
                    )
                    name = case.get("name", "")
                    found.setdefault(reason, set()).add((case.get("classname", "") or name, name))
    if not found:
        return "No test was skipped."
    parts = []
    for reason, tests in sorted(found.items()):
        places = sorted({place for place, _ in tests})
        parts.append(f"{len(tests)} of {', '.join(places)} ({reason})")
    return f"Skipped: {'; '.join(parts)}."


def variations(arguments: list[str]) -> None:
    """Run the tests as on other processors and on a busy machine, and print a line for each. Arguments go to
    pytest.
    """
    prepare("dev")
    prepare("interop", venv=INTEROP)
    logs, failed = Path(tempfile.mkdtemp(prefix="hookline-variations-")), []
    for name, variables in VARIATIONS.items():
        log, began = logs / f"{name}.txt", time.monotonic()
        with busy() if name == "busy" else contextlib.nullcontext():
            try:
                pytest(*arguments, log=log, under=variables)
                if not arguments:
                    with_other_trainers(log=log, under=variables)
            except Trouble:
                failed.append(name)
        totals = "; ".join(re.findall(r"^=+ (.*) in [\d.]+s.* =+$", log.read_text(), re.MULTILINE))
        shown = " ".join(_assignments(variables)) or "a computing process for every core"
        result, seconds = "FAILED" if name in failed else "passed", time.monotonic() - began
        print(f"{result}  {name} ({shown}): {totals}, in {seconds:.0f} s, {log}", flush=True)
    if failed:
        raise Trouble(f"Tests fail in: {', '.join(failed)}.")


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Keep every core busy with something else."""
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def interop(arguments: list[str]) -> None:
    """Test with the real Lightning, transformers, Keras and Accelerate, in an environment of their own."""
    prepare("interop", venv=INTEROP)
    with_other_trainers(*arguments)


def with_other_trainers(
    *arguments: str, log: Path | None = None, under: Mapping[str, str] | None = None
) -> None:
    """Run the tests that need other trainers' packages, in as many processes as there are cores."""
    pytest("tests/interop", *arguments, venv=INTEROP, more=0, log=log, under=under)


def lint(arguments: list[str]) -> None:
    """Check style, and that generated files are current; `check`, `format` or `generated` runs one part."""
    prepare("dev")
    chosen = [arguments[0]] if arguments and arguments[0] in LINTS else [*LINTS]
    options = arguments[1:] if len(chosen) == 1 else arguments
    for name in chosen:
        run(PYTHON, *LINTS[name], *(options if name != "generated" else ()))


def types(arguments: list[str]) -> None:
    """Check types with mypy and pyright."""
    prepare("dev")
    at_once(*(functools.partial(check, arguments=arguments) for check in TYPES))


def mypy(log: Path | None, arguments: Sequence[str] = ()) -> None:
    """Check types with mypy."""
    run(PYTHON, "-m", "mypy", *arguments, log=log)


def pyright(log: Path | None, arguments: Sequence[str] = ()) -> None:
    """Check types with pyright."""
    run(PYTHON, "-m", "pyright", *arguments, log=log)


TYPES = (mypy, pyright)


def quick(arguments: list[str]) -> None:
    """Lint, types and the tests that matter for what changed (since a revision, if given), in a minute."""
    prepare("dev")
    run(PYTHON, "tools/quick.py", *arguments)


def mutants(arguments: list[str]) -> None:
    """Change the engine, the step and the checkpoint writer place by place; print what no test notices."""
    prepare("dev")
    run(PYTHON, "tools/mutants.py", *arguments)


def generate(arguments: list[str]) -> None:
    """Write what is derived from the code: typed methods, and pages of the docs."""
    prepare()
    run(PYTHON, "tools/generate.py", *arguments)


def docs(arguments: list[str]) -> None:
    """Build the documentation site into site/; with --serve, also serve it on this machine (--port 8000)."""
    prepare("docs")
    run(PYTHON, "tools/build_site.py", *arguments)


def bench(arguments: list[str]) -> None:
    """Time bare loops, Hookline and Lightning side by side; with --peers, other trainers too."""
    if "--peers" in arguments:
        prepare("bench-peers", venv=INTEROP)
        run(python(INTEROP), "benchmarks/overhead.py", *arguments)
    else:
        prepare("bench")
        run(PYTHON, "benchmarks/overhead.py", *arguments)


def bench_hooks(arguments: list[str]) -> None:
    """Time what built-in hooks add to a step."""
    prepare("bench")
    run(PYTHON, "benchmarks/hooks.py", *arguments)
    run(PYTHON, "benchmarks/within.py")
    run(PYTHON, "benchmarks/timing.py")


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


def bench_audit(arguments: list[str]) -> None:
    """Count the calls of an audit that is off, and time what one that is on adds to a GPT's step."""
    prepare()
    run(PYTHON, "benchmarks/audit.py", *arguments)


def matrix(arguments: list[str]) -> None:
    """Run the core tests on every Python and torch that can be installed here; --list shows them."""
    run(sys.executable, "tools/matrix.py", *arguments)


def gpu(arguments: list[str]) -> None:
    """Run the tests that need an accelerator; without one, list them. --dry tries them on the CPU."""
    prepare("dev")
    under = {"HOOKLINE_TEST_DEVICE": "cpu"} if "--dry" in arguments else {}
    arguments = [each for each in arguments if each != "--dry"]
    found = subprocess.run([PYTHON, "-c", HAS_GPU], capture_output=True, text=True, check=False)
    if found.stdout.strip() == "True" or under:
        run(PYTHON, "-m", "pytest", "tests/gpu", *arguments, under=under)
        return
    run(PYTHON, "-m", "pytest", "tests/gpu", "--collect-only", "--quiet", *arguments)
    print(
        "\nNothing was run: torch finds no GPU here. On a machine with one this command runs the tests above "
        "(those of several ranks on all of its GPUs). `python3 dev.py gpu --dry` tries them on the CPU."
    )


HAS_GPU = "import torch; print(torch.cuda.is_available())"


def bench_digest(arguments: list[str]) -> None:
    """Count the calls of digests that are off, and time what a digest adds to a GPT's step."""
    prepare()
    run(PYTHON, "benchmarks/digest.py", *arguments)


def faults(arguments: list[str]) -> None:
    """Kill, damage and interrupt real trainings, and check that none is lost or goes on wrongly."""
    prepare()
    run(PYTHON, "faults/run.py", *arguments)


def thorough(arguments: list[str]) -> None:
    """Test all combinations of ranks, meshes, sizes and other packages, of which the tests have some."""
    prepare("dev")
    prepare("interop", venv=INTEROP)
    under = {"OMP_NUM_THREADS": "1", "HOOKLINE_TEST_THOROUGH": "1"}
    theirs = [each for each in THOROUGH if each.startswith("tests/interop/")]
    ours = [each for each in THOROUGH if each not in theirs]
    for venv, files in ((VENV, ours), (INTEROP, theirs)):
        run(python(venv), "-m", "pytest", "-q", *files, *arguments, under=under)


def rewinds(arguments: list[str]) -> None:
    """Rewind real trainings to 100 random steps, and check that every bit is as it was."""
    prepare("dev")
    tests = "tests/rewind/test_random_steps.py"
    run(PYTHON, "-m", "pytest", "-q", tests, *arguments, under={"HOOKLINE_REWINDS": "100"})


EVERYTHING = (
    demo,
    examples,
    test,
    quick,
    mutants,
    variations,
    lint,
    types,
    interop,
    generate,
    docs,
    bench,
    bench_hooks,
    bench_checkpoint,
    bench_loaders,
    bench_distributed,
    bench_audit,
    matrix,
    gpu,
    bench_digest,
    faults,
    rewinds,
    thorough,
)
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
