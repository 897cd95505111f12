"""Change one place of a module at a time and run its tests: a change that no test notices is a survivor.

Run it through `python3 dev.py mutants`. The changes are made in copies of `src` in a temporary directory,
which the tests import through PYTHONPATH; the checkout is never changed. mutmut 3 and Cosmic Ray do not fit:
mutmut wraps each function, while our tests count calls and read signatures, and it forks processes that have
imported torch; Cosmic Ray changes files in place and needs a clone and a server for each process.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "src/hookline"
SURVIVORS = ROOT / "build" / "mutants.txt"

STEP = (
    "tests/training/test_step.py",
    "tests/training/test_accumulation.py",
    "tests/training/test_backward.py",
    "tests/training/test_batch_events.py",
    "tests/training/test_update.py",
    "tests/run/test_optimizer_router.py",
    "tests/training/test_actions.py",
)
FILES = (
    "tests/checkpoint/test_files.py",
    "tests/checkpoint/test_format.py",
    "tests/run/test_save_request.py",
    "tests/checkpoint/test_reader.py",
)
TARGETS: dict[str, tuple[str, ...]] = {
    # the hook engine
    "engine/plan": (
        "tests/engine/test_plan.py",
        "tests/engine/test_slots.py",
        "tests/engine/test_recorder.py",
        "tests/training/test_lifecycle.py",
    ),
    "engine/slots": (
        "tests/engine/test_slots.py",
        "tests/engine/test_plan.py",
        "tests/engine/test_hook.py",
        "tests/engine/test_cost.py",
    ),
    "engine/listener": (
        "tests/engine/test_listener.py",
        "tests/engine/test_hook.py",
        "tests/engine/test_plan.py",
    ),
    "engine/binding": ("tests/engine/test_binding.py", "tests/engine/test_plan.py"),
    "engine/filters": ("tests/engine/test_filters.py",),
    # one batch and one update
    "training/step": (
        *STEP,
        "tests/run/test_finite.py",
        "tests/training/test_several_loaders.py::test_metrics_come_for_each_loader_and_overall",
        "tests/training/test_final_checkpoint.py::test_a_failed_run_leaves_its_newest_state_and_continues_from_it",
        "tests/training/test_final_checkpoint.py::"
        "test_a_failure_after_a_scheduler_has_advanced_does_not_advance_it_again",
    ),
    "training/update": STEP,
    "training/backward": (*STEP, "tests/run/test_finite.py"),
    "training/accumulation": (*STEP, "tests/training/test_batch_totals.py"),
    # the checkpoint writer
    "checkpoint/writer": (
        "tests/checkpoint/test_writer.py",
        *FILES,
        "tests/checkpoint/test_failures.py",
        "tests/checkpoint/test_extra_files.py",
    ),
    "checkpoint/manifest": ("tests/checkpoint/test_manifest.py", *FILES),
    "checkpoint/tensors": ("tests/checkpoint/test_tensors.py", *FILES),
}
"""Which tests must notice a change of a module below `src/hookline`: files or single tests, fast ones first.
"""

LIMIT = (30, 3)
"""The time limit of a mutant's tests: seconds, and how many times as long as they take without a change."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
}
INVERTED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
"""Comparisons whose swap is their negation, so that `not` before them is the same mutant."""


@dataclass(frozen=True)
class Mutant:
    """One change: the lines from `first` to `last` (from 1) become `text`."""

    module: str
    first: int
    last: int
    text: str

    def applied(self, source: str) -> str:
        """Return the source with this change."""
        lines = source.splitlines(keepends=True)
        lines[self.first - 1 : self.last] = [self.text]
        return "".join(lines)

    def shown(self, source: str) -> str:
        """Return the place and the change, as the lines of a diff."""
        before = source.splitlines()[self.first - 1 : self.last]
        after = self.text.splitlines()
        pairs = [(a, b) for a, b in zip(before, after, strict=False) if a != b] or [(before[0], after[0])]
        diff = [f"    {sign} {line.strip()}" for pair in pairs for sign, line in zip("-+", pair, strict=True)]
        offset = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
        return "\n".join([f"{SOURCE}/{self.module}.py:{self.first + offset}", *diff])


def mutants(module: str, source: str) -> list[Mutant]:
    """Return every change of a module's source that still compiles, in the order of its lines."""
    found: dict[Mutant, None] = {}
    for node, text in changes(ast.parse(source)):
        mutant = replaced(module, source, node, text)
        try:
            compile(mutant.applied(source), module, "exec")
        except SyntaxError:  # a statement that was the reason for another one, like nonlocal
            continue
        found[mutant] = None
    return sorted(found, key=lambda mutant: (mutant.first, mutant.text))


def replaced(module: str, source: str, node: ast.stmt | ast.expr, text: str) -> Mutant:
    """Return the mutant that has this text where the node is."""
    first, last = node.lineno, node.end_lineno or node.lineno
    lines = [line.encode() for line in source.splitlines(keepends=True)[first - 1 : last]]
    start, end = lines[0][: node.col_offset], lines[-1][node.end_col_offset :]  # offsets count bytes
    return Mutant(module, first, last, (start + text.encode() + end).decode())


def changes(tree: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Yield each node to replace, with what replaces it. Annotations and text are left as they are."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.stmt):
            yield from of_statement(node)
        if isinstance(node, ast.expr):
            yield from of_expression(node)
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from changes(ast.Expression(node.value))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
            yield from changes(node)
        elif not isinstance(node, ast.arg | ast.JoinedStr):
            yield from changes(node)


def of_statement(node: ast.stmt) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Drop a call, an increment or an error; return None; swap break and continue; negate a condition."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            yield node, "pass"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) not in ("None", "True", "False"):
            yield node, "return None"
        case ast.Break():
            yield node, "continue"
        case ast.Continue():
            yield node, "break"
        case ast.If(test=test) | ast.While(test=test):
            yield from negated(test)


def of_expression(node: ast.expr) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Swap an operator, change a constant, add or drop a `not`."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            yield node, ast.unparse(ast.Compare(node.left, [SWAPS[type(op)]()], node.comparators))  # type: ignore[list-item]
        case ast.BoolOp(op=op):
            yield node, f"({ast.unparse(ast.BoolOp(SWAPS[type(op)](), node.values))})"  # type: ignore[arg-type]
        case ast.BinOp(op=op) if type(op) in SWAPS:
            yield node, f"({ast.unparse(ast.BinOp(node.left, SWAPS[type(op)](), node.right))})"  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.Not()):
            yield node, f"({ast.unparse(node.operand)})"
        case ast.IfExp(test=test):
            yield from negated(test)
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() | float() as value):
            yield node, str(value + 1)
            yield node, f"({value - 1})"


def negated(test: ast.expr) -> Iterator[tuple[ast.expr, str]]:
    """Negate a condition, unless another change does the same."""
    compared = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], INVERTED)
    if not compared and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
        yield test, f"(not ({ast.unparse(test)}))"


class Tests:
    """Run a module's tests on copies of the source, one copy for each process at a time."""

    def __init__(self, folder: Path, processes: int) -> None:
        self.copies: queue.Queue[Path] = queue.Queue()
        for number in range(processes):
            copy = folder / str(number)
            shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
            self.copies.put(copy)

    def noticed(self, mutant: Mutant, tests: Sequence[str], limit: float) -> str:
        """Return how the tests noticed a mutant: `failed`, `timed out`, or nothing if it survived."""
        copy = self.copies.get()
        path = copy / SOURCE / f"{mutant.module}.py"
        source = path.read_text()
        # compiled files are recognised by size and second: two mutants may have the same
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()
        try:
            path.write_text(mutant.applied(source))
            return self.run(copy, tests, limit, PYTHONDONTWRITEBYTECODE="1")
        finally:
            path.write_text(source)
            self.copies.put(copy)

    def clean(self, tests: Sequence[str]) -> float:
        """Return how long the tests take on the source as it is, in seconds. They must pass."""
        copy = self.copies.get()
        began = time.monotonic()
        try:
            if how := self.run(copy, tests, limit=900):
                print((copy / "output.txt").read_text()[-4000:])
                raise SystemExit(f"Without any change, {' '.join(tests)} {how}.")
        finally:
            self.copies.put(copy)
        return time.monotonic() - began

    def run(self, copy: Path, tests: Sequence[str], limit: float, **variables: str) -> str:
        """Run tests until the first fails."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += [f"--basetemp={copy / 'tmp'}", *tests]
        paths = [str(copy / "src"), str(ROOT / "tests")]
        environment = {
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": "1",
            **os.environ,
            **variables,
            "PYTHONPATH": os.pathsep.join(paths),
        }
        with (copy / "output.txt").open("w") as output:
            started = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                return "failed" if started.wait(limit) else ""
            except subprocess.TimeoutExpired:
                return "timed out"
            finally:
                end(started)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started."""
    if os.name == "nt":
        process.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def chosen(names: Sequence[str]) -> dict[str, set[int]]:
    """Return the modules to change, with the lines if names end with `:line`."""
    wanted: dict[str, set[int]] = {}
    for name in names or TARGETS:
        path, _, line = name.partition(":")
        module = path.removeprefix(f"{SOURCE}/").removesuffix(".py").replace(".", "/")
        if module not in TARGETS:
            raise SystemExit(f"mutants: {name!r} is not in the table. There are: {', '.join(TARGETS)}.")
        wanted.setdefault(module, set()).update({int(line)} if line else ())
    return wanted


def sample(found: list[Mutant], size: int | None, seed: int) -> list[Mutant]:
    """Return some of the mutants, in their order."""
    if size is None or size >= len(found):
        return found
    kept = random.Random(seed).sample(range(len(found)), size)
    return [found[index] for index in sorted(kept)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the mutants, run the tests and print the survivors."""
    parser = argparse.ArgumentParser(prog="dev.py mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "modules", nargs="*", metavar="MODULE", help="engine/plan, training/step, engine/plan:120 (one line)"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants of each module, at random")
    parser.add_argument("--seed", type=int, default=0, help="which sample; 0 unless given")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=SURVIVORS, help="where the survivors are written")
    options = parser.parse_args(arguments)
    began, survivors, total, timed_out = time.monotonic(), list[str](), 0, 0
    with tempfile.TemporaryDirectory(prefix="hookline-mutants-") as folder:
        tests = Tests(Path(folder), options.processes)
        for module, lines in chosen(options.modules).items():
            source = (ROOT / SOURCE / f"{module}.py").read_text()
            found = mutants(module, source)
            if lines:
                found = [each for each in found if lines & {*range(each.first, each.last + 1)}]
            found = sample(found, options.sample, options.seed)
            seconds = tests.clean(TARGETS[module])
            limit = LIMIT[0] + LIMIT[1] * seconds
            print(f"{module}: {len(found)} mutants; its tests take {seconds:.0f} s", flush=True)
            with ThreadPoolExecutor(options.processes) as pool:
                ends = pool.map(lambda each: tests.noticed(each, TARGETS[module], limit), found)  # noqa: B023
                for mutant, how in zip(found, ends, strict=True):
                    total, timed_out = total + 1, timed_out + (how == "timed out")
                    if not how:
                        survivors.append(mutant.shown(source))
                        print(survivors[-1], flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("".join(f"{each}\n" for each in survivors))
    print(
        f"{total - len(survivors)} of {total} mutants were noticed ({timed_out} by the time limit), "
        f"{len(survivors)} survived ({options.output}), in {time.monotonic() - began:.0f} s."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
