"""Lint, types and the tests that matter for a change, in less than a minute on two cores.

Run it through `python3 dev.py quick [REVISION]`. What changed is what differs from the point where the branch
left the main one (or from the revision), with what is not committed yet. Two lanes run side by side: lint,
types and the structure of the source in one, the chosen tests in the other. When the time is over no further
test begins, and the command that runs the rest is printed.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = PurePosixPath("src/hookline")
STRUCTURE = "tests/test_structure.py"
SLOW = (
    "tests/ranks/*",
    "tests/training/ranks/*",
    "tests/distributed/test_ddp.py",
    "tests/distributed/test_fsdp.py",
    "tests/gpu/*",
    "tests/interop/*",
    "tests/interop/*/*",
    "tests/watch/*",
    "tests/test_benchmarks.py",
    "tests/test_examples.py",
    "tests/test_example_programs.py",
    "tests/test_faults.py",
    "tests/dialects/hosted/test_rank_sync.py",
    "tests/test_typing.py",
)
"""Tests that start many processes or take long each; also the ones that run in another environment."""
SECONDS = 40
"""After this many seconds no further test begins; the structure has 10 more."""
LEAST = 15
"""Seconds for tests after they are collected, also on a busy machine; otherwise none would begin."""
MOST = 20
"""How many files of tests are chosen at most."""


# --- What changed ---


def git(*arguments: str) -> list[str]:
    """Return the entries that git prints, separated by a zero byte."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return [each for each in done.stdout.split("\0") if each]


def branch_point() -> str:
    """Return the commit where this branch left the main one."""
    for main in ("origin/HEAD", "origin/main", "main"):
        done = subprocess.run(
            ["git", "merge-base", "HEAD", main], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return done.stdout.strip()
    return "HEAD"


def changed(revision: str) -> list[str]:
    """Return the paths that differ from a revision, deleted and new ones too."""
    tracked = git("diff", "--name-only", "--no-renames", "-z", revision)
    return sorted({*tracked, *git("ls-files", "--others", "--exclude-standard", "-z")})


# --- Which tests matter for it ---


def module_name(path: PurePosixPath) -> str | None:
    """Return the name of a module: `src/hookline/training/step.py` -> `hookline.training.step`,
    `tests/tiny.py` -> `tiny`.
    """
    for folder in ("src", "tests"):
        if path.suffix == ".py" and path.is_relative_to(folder):
            parts = path.relative_to(folder).with_suffix("").parts
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return None


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Return the modules that a file imports, in functions too; both `a` and `a.b` for `from a import b`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


class Choice:
    """The files of tests to run and why, the most telling ones first; and what was left out."""

    def __init__(self, paths: Iterable[str], root: Path = ROOT) -> None:
        self.root, self.reasons, self.slow = root, dict[str, str](), dict[str, str]()
        self.files = {
            path.relative_to(root).as_posix(): path for path in sorted(root.glob("tests/**/test_*.py"))
        }
        self.public = self.public_names()
        given = [PurePosixPath(each) for each in paths]
        self.modules = {name: path for path in given if (name := module_name(path))}
        for path in given:
            if str(path) in self.files or (path.suffix == ".md" and (root / path).exists()):
                self.add(str(path), "changed")
        for path in given:
            for test in self.mirrors(path):
                self.add(test, f"mirrors {path}")
        importers = {module: self.importers(module) for module in self.modules}
        for _, module, test in sorted(each for found in importers.values() for each in found):
            self.add(test, f"imports {module}")
        for module, path in self.modules.items():
            if path.is_relative_to(PACKAGE) and not self.mirrors(path):
                self.add_tests_of_users(module)
        self.late = dict(list(self.reasons.items())[MOST:])
        self.reasons = dict(list(self.reasons.items())[:MOST])

    def add(self, test: str, reason: str) -> None:
        """Choose a file of tests, unless it is slow."""
        if test == STRUCTURE:  # always runs, in the other lane
            return
        slow = any(PurePosixPath(test).match(pattern) for pattern in SLOW)
        (self.slow if slow else self.reasons).setdefault(test, reason)

    def mirrors(self, path: PurePosixPath) -> list[str]:
        """Return the tests with a file's name: at its place below `tests`, else anywhere if there is one."""
        if path.suffix != ".py" or path.is_relative_to("tests"):
            return []
        if path.is_relative_to("tools") or len(path.parts) == 1:
            return [each for each in ("tests/test_dev.py",) if each in self.files]
        if not path.is_relative_to(PACKAGE):  # examples, benchmarks
            return [each for each in (f"tests/test_{path.parts[0]}.py",) if each in self.files]
        name = f"test_{path.parent.name if path.stem == '__init__' else path.stem.strip('_')}.py"
        exact = "tests" / path.relative_to(PACKAGE).with_name(name)
        # tests of interop that need no other package
        places = [str(exact), str(exact).replace("tests/interop/", "tests/dialects/", 1)]
        same_name = [each for each in self.files if each.endswith(f"/{name}")]
        found = [each for each in dict.fromkeys(places) if each in self.files]
        return found or (same_name if len(same_name) == 1 else [])

    def importers(self, module: str) -> list[tuple[int, str, str]]:
        """Return the tests that import a module, each with its number of imports: the fewer, the closer."""
        found = []
        for test, path in self.files.items():
            names = imports(path)
            names |= {self.public[name] for name in names if name in self.public}
            if module in names:
                found.append((len(names), module, test))
        return found

    def public_names(self) -> dict[str, str]:
        """Return the module of each public name: `hookline.Trainer` -> `hookline.trainer`."""
        package = self.root / PACKAGE / "__init__.py"
        if not package.exists():
            return {}
        return {
            f"hookline.{alias.name}": node.module
            for node in ast.walk(ast.parse(package.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }

    def add_tests_of_users(self, module: str) -> None:
        """Choose the tests of the modules that import one which has no mirrored tests."""
        for path in sorted((self.root / PACKAGE).rglob("*.py")):
            if module in imports(path):
                user = PurePosixPath(path.relative_to(self.root).as_posix())
                for test in self.mirrors(user):
                    self.add(test, f"mirrors {user}, which imports {module}")

    def line(self) -> str:
        """Return what runs and why, in one line."""
        tests = "; ".join(f"{test} ({reason})" for test, reason in self.reasons.items())
        return f"quick: ruff, generated files, mypy, {STRUCTURE}; {tests or 'no tests match the change'}"

    def left_out(self) -> dict[str, str]:
        """Return the files of tests that matter too, with the reason why they do not run."""
        slow = {test: f"slow, {reason}" for test, reason in self.slow.items()}
        return slow | {test: f"more than {MOST} files, {reason}" for test, reason in self.late.items()}


def advice(tests: Sequence[str], why: str) -> str:
    """Return a line that says how to run these tests."""
    inside = [each for each in tests if each.startswith("tests/interop/")]
    rest = [each for each in tests if each not in inside]
    commands = [f"python3 dev.py test {' '.join(rest) if len(rest) <= MOST else ''}".strip()] if rest else []
    commands += ["python3 dev.py interop"] if inside and len(rest) <= MOST else []
    return f"left out ({why}): {len(tests)} files; run `{'` and `'.join(commands)}`"


# --- Running them ---


class Limited:
    """A pytest plugin: no test begins after the deadline; structure tests per module run for changed ones."""

    def __init__(self, deadline: float, least: float, modules: Iterable[str]) -> None:
        self.deadline, self.least, self.modules = deadline, least, frozenset(modules)
        self.late: dict[str, int] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the structure's tests of modules that did not change. The others have `least` seconds."""
        self.deadline = max(self.deadline, time.time() + self.least)
        items[:] = [item for item in items if not self.unchanged(item.nodeid)]

    def unchanged(self, test: str) -> bool:
        """Return whether this is a structure test with the parameter of another module or name."""
        name, bracket, parameter = test.partition("[")
        return bool(bracket) and name.startswith(STRUCTURE) and parameter[:-1] not in self.modules

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Pass over a test that would begin too late."""
        if time.time() < self.deadline:
            return None
        file = item.nodeid.partition("::")[0]
        self.late[file] = self.late.get(file, 0) + 1
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what there was no time for."""
        if self.late:
            terminalreporter.write_line(advice([*self.late], f"{sum(self.late.values())} tests, out of time"))


def run_tests(deadline: str, least: str, modules: str, *files: str) -> int:
    """Run files of tests in this process until the deadline, and for `least` seconds after collection."""
    limited = Limited(float(deadline), float(least), modules.split(","))
    code = pytest.main(["-q", "-rN", "--no-header", *files], plugins=[limited])
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


def lane(*commands: Sequence[str]) -> int:
    """Run commands one after the other; print each one's output in one piece, and how long it took."""
    failed = 0
    for command in commands:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        shown = " ".join(("pytest", *command[5:]) if command[0] == __file__ else command)
        result = "FAILED" if done.returncode else "passed"
        tail = done.stdout if done.returncode else "\n".join(done.stdout.strip().splitlines()[-2:])
        print(f"{result}  {shown} ({time.monotonic() - began:.0f} s)\n{tail}", flush=True)
        failed += bool(done.returncode)
    return failed


def main(arguments: Sequence[str]) -> int:
    """Choose and run."""
    began, deadline = time.monotonic(), time.time() + SECONDS
    choice = Choice(changed(arguments[0] if arguments else branch_point()))
    print(choice.line(), flush=True)
    modules = ",".join(choice.modules)
    chosen = (
        [(__file__, "--tests", str(deadline), str(LEAST), modules, *choice.reasons)] if choice.reasons else []
    )
    checks = (
        ("-m", "ruff", "check", "--quiet"),
        ("-m", "ruff", "format", "--check", "--quiet"),
        ("tools/generate.py", "--check"),
        ("-m", "mypy"),
        (__file__, "--tests", str(deadline + 10), str(LEAST), modules, STRUCTURE),
    )
    with ThreadPoolExecutor(2) as pool:
        failed = sum(pool.map(lambda commands: lane(*commands), (checks, chosen)))
    if left_out := choice.left_out():
        print(advice([*left_out], "slow or too many"))
    print(f"{f'{failed} FAILED' if failed else 'All passed'}, in {time.monotonic() - began:.0f} s.")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(run_tests(*sys.argv[2:]) if sys.argv[1:2] == ["--tests"] else main(sys.argv[1:]))
