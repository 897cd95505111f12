"""The commands of dev.py and the tools behind them: skipped tests, variations, the quick check, mutants."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

ROOT = Path(__file__).parent.parent

TESTS = """
import pytest

pytest.importorskip("no_such_package")
"""
MORE = """
import pytest

@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.skipif(True, reason="needs an installed Chromium")
def test_skipped(n): ...

@pytest.mark.xfail(reason="known")
def test_fails(): assert False

def test_passes(): ...
"""


def loaded(path: str) -> ModuleType:
    """A file of the checkout that is not part of the package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def dev() -> ModuleType:
    return loaded("dev.py")


@pytest.fixture
def quick() -> ModuleType:
    return loaded("tools/quick.py")


@pytest.fixture
def mutants() -> ModuleType:
    return loaded("tools/mutants.py")


def test_one_line_names_what_was_skipped_and_what_it_needed(dev: ModuleType, tmp_path: Path) -> None:
    reports = []
    for name, source in (("test_one", TESTS), ("test_two", MORE)):
        (tmp_path / f"{name}.py").write_text(source)
        reports.append(tmp_path / f"{name}.xml")
        command = [sys.executable, "-m", "pytest", f"--junit-xml={reports[-1]}", f"{name}.py"]
        subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300, check=False)
    line = dev.skipped(*reports, reports[1])  # a test that is skipped in two runs is one test
    assert line == (
        "Skipped: 1 of test_one (could not import 'no_such_package': No module named 'no_such_package'); "
        "2 of test_two (needs an installed Chromium)."
    )
    assert dev.skipped() == "No test was skipped."


def test_of_what_runs_at_once_all_output_is_shown_and_every_failure_named(
    dev: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    def python(code: str) -> Callable[[Path | None], None]:
        return lambda log: dev.run(sys.executable, "-c", code, log=log)

    dev.at_once(python("print('one')"), python("print('two')"))
    assert [each for each in capfd.readouterr().out.splitlines() if each[0] != "$"] == ["one", "two"]
    with pytest.raises(dev.Trouble) as failed:
        dev.at_once(python("exit(3)"), python("print('two')"), python("print('three'); exit(4)"))
    assert "exit code 3" in str(failed.value) and "exit code 4" in str(failed.value)
    shown = [each for each in capfd.readouterr().out.splitlines() if each and each[0] != "$"]
    early = [each for each in shown if "failed with exit code 4. Its output comes at the end." in each]
    assert len(early) == 1 and [each for each in shown if each not in early] == ["two", "three"]


def test_what_it_starts_keeps_bytecode_so_that_no_process_compiles_the_source_again(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    dev.run(sys.executable, "-c", "import sys; sys.exit(sys.dont_write_bytecode)")


def test_what_is_written_into_the_checkout_is_found_and_caches_are_not(
    dev: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    (tmp_path / "kept.py").write_text("a")
    os.utime(tmp_path / "kept.py", (1, 1))
    before = dev.written()
    for each in ("__pycache__/x.pyc", ".pytest_cache/y", "tests/__pycache__/z.pyc"):
        (tmp_path / each).parent.mkdir(parents=True)
        (tmp_path / each).write_text("")
    assert {path for path, _ in dev.written() ^ before} == {"tests"}  # the folder is new
    before = dev.written()
    assert dev.written() == before
    (tmp_path / "kept.py").write_text("b")
    (tmp_path / "runs").mkdir()
    assert {path for path, _ in dev.written() ^ before} == {"kept.py", "runs"}


@pytest.mark.parametrize("value", ["0", "1"])
def test_onednn_can_be_switched_off_for_the_tests_and_for_what_they_start(value: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        (ROOT / "conftest.py").read_text().replace("__file__", repr(str(ROOT / "conftest.py")))
    )
    (tmp_path / "test_it.py").write_text("""
import subprocess, sys, torch

def test_here_and_in_a_process():
    code = "import torch; print(torch.backends.mkldnn.enabled)"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    print(f"FOUND {torch.backends.mkldnn.enabled} {started}")
""")
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "test_it.py"]
    environment = {**os.environ, "HOOKLINE_TEST_ONEDNN": value, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    expected = value == "1" and torch.backends.mkldnn.is_available()
    assert f"FOUND {expected} {expected}" in done.stdout, done.stdout + done.stderr


def test_every_variation_is_described_where_a_contributor_looks(dev: ModuleType) -> None:
    told = (ROOT / "CONTRIBUTING.md").read_text()
    for name, variables in dev.VARIATIONS.items():
        assert f"`{name}`" in told
        assert all(f"{each}={value}" in told for each, value in variables.items())
    assert all((ROOT / each).exists() for each in dev.NUMERIC)


def test_other_trainers_are_timed_in_the_environment_that_has_them(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[object, ...]] = []
    monkeypatch.setattr(dev, "prepare", lambda *extras, venv=dev.VENV: done.append((*extras, venv)))
    monkeypatch.setattr(dev, "run", lambda *command: done.append(command))
    dev.bench(["--quick"])
    dev.bench(["--peers"])
    assert done == [
        ("bench", dev.VENV),
        (dev.PYTHON, "benchmarks/overhead.py", "--quick"),
        ("bench-peers", dev.INTEROP),
        (dev.python(dev.INTEROP), "benchmarks/overhead.py", "--peers"),
    ]


def test_every_thorough_test_runs_in_the_environment_that_has_its_packages(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[object, ...]] = []
    monkeypatch.setattr(dev, "prepare", lambda *extras, venv=dev.VENV: done.append((*extras, venv)))
    monkeypatch.setattr(dev, "run", lambda *command, under: done.append((*command, *under)))
    dev.thorough(["-x"])
    assert done[:2] == [("dev", dev.VENV), ("interop", dev.INTEROP)]
    found = {python: files for python, *_, files in ((each[0], each[4:-3]) for each in done[2:])}
    assert found.keys() == {dev.PYTHON, dev.python(dev.INTEROP)}
    assert {*found[dev.PYTHON], *found[dev.python(dev.INTEROP)]} == {*dev.THOROUGH}
    for python, files in found.items():
        assert all(each.startswith("tests/interop/") is (python != dev.PYTHON) for each in files)
    assert all(each[-3:] == ("-x", "OMP_NUM_THREADS", "HOOKLINE_TEST_THOROUGH") for each in done[2:])
    using = {
        str(each.relative_to(ROOT))
        for each in (ROOT / "tests/interop").rglob("test_*.py")
        if "from thorough import" in each.read_text()
    }
    assert using == {*found[dev.python(dev.INTEROP)]}  # no case is left out


def test_the_site_is_built_where_its_packages_are(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[object, ...]] = []
    monkeypatch.setattr(dev, "prepare", lambda *extras: done.append(extras))
    monkeypatch.setattr(dev, "run", lambda *command: done.append(command))
    dev.COMMANDS["docs"](["--serve"])
    assert done == [("docs",), (dev.PYTHON, "tools/build_site.py", "--serve")]
    assert (ROOT / "tools/build_site.py").exists()


def test_everything_runs_at_once_and_other_trainers_in_a_process_for_each_core(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[tuple[str, ...], dict[str, str]]] = []

    def run(*command: object, log: Path | None = None, under: dict[str, str] | None = None) -> None:
        done.append((tuple(map(str, command)), under or {}))

    monkeypatch.setattr(dev, "prepare", lambda *extras, venv=dev.VENV: None)
    monkeypatch.setattr(dev, "run", run)
    monkeypatch.setattr(dev.os, "cpu_count", lambda: 2)
    dev.test([])
    lints, tests = done[: len(dev.LINTS)], done[len(dev.LINTS) :]
    assert [command[1:] for command, _ in lints] == [*dev.LINTS.values()]
    words = {" ".join(command): under for command, under in tests}
    assert len(words) == 5  # types twice; all tests, those of numbers again, those with other trainers
    assert {f"{dev.PYTHON} -m mypy", f"{dev.PYTHON} -m pyright"} <= words.keys()
    ((default, _),) = [each for each in words.items() if "all.xml" in each[0]]
    assert default.startswith(f"{dev.PYTHON} -m pytest --numprocesses 3 --dist loadfile")
    ((numeric, under),) = [each for each in words.items() if "numeric.xml" in each[0]]
    assert numeric.endswith(" ".join(dev.NUMERIC)) and under["ATEN_CPU_CAPABILITY"] == "default"
    ((others, _),) = [each for each in words.items() if "interop.xml" in each[0]]
    assert others.startswith(f"{dev.python(dev.INTEROP)} -m pytest --numprocesses 2 --dist loadfile")
    done.clear()
    dev.interop(["-k", "words"])
    ((command, _),) = done
    assert command[-3:] == ("tests/interop", "-k", "words")


def test_packages_whose_requirements_contradict_ours_are_installed_without_them(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[tuple[str, ...]] = []

    monkeypatch.setattr(dev, "run", lambda *command, quiet: done.append(tuple(map(str, command))))
    for name in ("env", "other"):
        dev.python(tmp_path / name).parent.mkdir(parents=True)
        dev.python(tmp_path / name).touch()
    dev.prepare("interop", venv=tmp_path / "env")
    first, second = done
    assert first[-1] == ".[interop]" and "--no-deps" not in first
    assert second[-3:] == ("--no-deps", "--requirement", "interop-no-deps.txt")
    dev.prepare("interop", venv=tmp_path / "env")
    assert len(done) == 2, "it is installed already"
    listed = tmp_path / "list.txt"
    listed.write_text("another-package")
    monkeypatch.setitem(dev.NO_DEPS, "interop", listed)
    dev.prepare("interop", venv=tmp_path / "env")
    assert len(done) == 4, "the list has changed"
    dev.prepare("bench", venv=tmp_path / "other")
    assert not any("--no-deps" in each for each in done[4:])


def test_the_packages_without_requirements_have_pinned_versions(dev: ModuleType) -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for path in dev.NO_DEPS.values():
        names = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert names and set(names) <= pinned


def test_each_hook_before_a_commit_is_one_of_the_lints_and_needs_no_network(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    hooks = repository["hooks"]
    assert all(hook["language"] == "system" and hook["pass_filenames"] is False for hook in hooks)
    entries = [hook["entry"].split() for hook in hooks]
    assert [entry[:3] for entry in entries] == [["python3", "dev.py", "lint"]] * len(dev.LINTS)
    done: list[tuple[object, ...]] = []
    monkeypatch.setattr(dev, "prepare", lambda *extras: None)
    monkeypatch.setattr(dev, "run", lambda *command: done.append(command))
    for entry in entries:
        dev.lint(entry[3:])
    one_by_one, done[:] = list(done), []
    dev.lint([])
    assert one_by_one == done == [(dev.PYTHON, *command) for command in dev.LINTS.values()]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small project with the layout of this one."""
    files = {
        "src/hookline/__init__.py": "if TYPE_CHECKING:\n    from hookline.engine.plan import Plan\n",
        "src/hookline/engine/plan.py": "from hookline.engine import rows\n",
        "src/hookline/engine/rows.py": "",
        "src/hookline/step.py": "from hookline.engine.plan import Plan\n",
        "tests/helper.py": "",
        "tests/engine/test_plan.py": "",
        "tests/dialects/kit/test_view.py": "",
        "tests/other/test_view.py": "",
        "tests/test_step.py": "import os, sys\nfrom hookline import step\n",
        "tests/test_public.py": "import helper\nimport torch\nimport sys\nfrom hookline import Plan\n",
        "tests/test_direct.py": "def test():\n    from hookline.engine.plan import Plan\n",
        "tests/ranks/test_two.py": "import hookline.engine.plan\n",
        "tests/test_structure.py": "import hookline.engine.plan\n",
        "tests/test_dev.py": "",
        "docs/page.md": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_quick_chooses_what_mirrors_and_what_imports_a_changed_module(
    quick: ModuleType, checkout: Path
) -> None:
    choice = quick.Choice(["src/hookline/engine/plan.py", "docs/page.md", "docs/gone.md"], checkout)
    assert list(choice.reasons.items()) == [
        ("docs/page.md", "changed"),
        ("tests/engine/test_plan.py", "mirrors src/hookline/engine/plan.py"),
        ("tests/test_direct.py", "imports hookline.engine.plan"),  # the fewest imports
        ("tests/test_public.py", "imports hookline.engine.plan"),
    ]
    assert choice.left_out() == {"tests/ranks/test_two.py": "slow, imports hookline.engine.plan"}
    assert "tests/engine/test_plan.py (mirrors src/hookline/engine/plan.py); " in choice.line()
    assert "\n" not in choice.line()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("tests/helper.py", {"tests/test_public.py": "imports helper"}),
        ("tests/test_step.py", {"tests/test_step.py": "changed"}),
        ("tools/any.py", {"tests/test_dev.py": "mirrors tools/any.py"}),
        # a module that moved still has its tests: there is one file with its name
        ("src/hookline/new/step.py", {"tests/test_step.py": "mirrors src/hookline/new/step.py"}),
        (
            "src/hookline/engine/rows.py",
            {
                "tests/engine/test_plan.py": "mirrors src/hookline/engine/plan.py, which imports hookline.engine.rows"
            },
        ),
        (
            "src/hookline/engine/_plan.py",
            {"tests/engine/test_plan.py": "mirrors src/hookline/engine/_plan.py"},
        ),
        (
            "src/hookline/interop/kit/view.py",
            {"tests/dialects/kit/test_view.py": "mirrors src/hookline/interop/kit/view.py"},
        ),
        ("pyproject.toml", {}),
    ],
)
def test_quick_finds_the_tests_of_a_file(
    quick: ModuleType, checkout: Path, path: str, expected: dict[str, str]
) -> None:
    assert quick.Choice([path], checkout).reasons == expected


def test_quick_says_how_to_run_what_it_left_out(
    quick: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "MOST", 1)
    left_out = quick.Choice(["src/hookline/engine/plan.py"], checkout).left_out()
    assert [*left_out] == ["tests/ranks/test_two.py", "tests/test_direct.py", "tests/test_public.py"]
    assert quick.advice([*left_out], "x") == "left out (x): 3 files; run `python3 dev.py test`"
    monkeypatch.setattr(quick, "MOST", 3)
    assert quick.advice(["tests/a.py", "tests/interop/b.py"], "x") == (
        "left out (x): 2 files; run `python3 dev.py test tests/a.py` and `python3 dev.py interop`"
    )


def test_quick_sees_committed_uncommitted_new_and_deleted_files(
    quick: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=checkout, check=True, capture_output=True)

    monkeypatch.setattr(quick, "ROOT", checkout)
    git("init", "--initial-branch=main")
    git("add", "--all")
    git("commit", "--message=first")
    assert quick.changed(quick.branch_point()) == []
    git("switch", "--create=topic")
    (checkout / "src/hookline/step.py").write_text("a = 1\n")
    git("commit", "--all", "--message=second")
    (checkout / "tests/helper.py").write_text("b = 1\n")
    (checkout / "tests/test_direct.py").unlink()
    (checkout / "tests/test_new.py").write_text("")
    late = ["tests/helper.py", "tests/test_direct.py", "tests/test_new.py"]
    assert quick.changed("HEAD") == late
    assert quick.changed(quick.branch_point()) == ["src/hookline/step.py", *late]


def test_quick_begins_no_test_after_the_deadline_and_names_the_command_for_the_rest(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_a(): ...\ndef test_b(): ...\n")
    results = []
    for deadline, least in (("1e12", "0"), ("0", "0"), ("0", "60")):
        command = [sys.executable, ROOT / "tools/quick.py", "--tests", deadline, least, "", "test_it.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        results.append((done.returncode, done.stdout))
    (code, output), (late_code, late_output), (busy_code, busy_output) = results
    assert code == late_code == busy_code == 0
    assert "2 passed" in output and "left out" not in output
    assert "2 passed" in busy_output, "collecting took longer than the deadline"
    assert "left out (2 tests, out of time): 1 files; run `python3 dev.py test test_it.py`" in late_output


def test_quick_runs_structure_tests_per_module_for_changed_modules_only(quick: ModuleType) -> None:
    limited = quick.Limited(0, 0, ["hookline.plan"])
    assert limited.unchanged("tests/test_structure.py::test_imports[hookline.state]")
    assert not limited.unchanged("tests/test_structure.py::test_imports[hookline.plan]")
    assert not limited.unchanged("tests/test_structure.py::test_no_cycles")
    assert not limited.unchanged("tests/test_plan.py::test_it[hookline.state]")


def test_slow_tests_and_the_structure_are_where_quick_looks_for_them(quick: ModuleType) -> None:
    assert (ROOT / quick.STRUCTURE).exists()
    assert all(any(ROOT.glob(pattern)) for pattern in quick.SLOW)


CHANGED = """\
def of(values: list[int], limit: int = 2) -> int | None:
    total = 0
    for value in values:
        if value < limit and not total:
            continue
        total += value
    print(f"{total + 1}: é", "é", total - 1)
    return total
"""


def test_each_mutant_changes_one_place_and_compiles(mutants: ModuleType) -> None:
    found = mutants.mutants("of", CHANGED)
    shown = {tuple(mutant.shown(CHANGED).splitlines()) for mutant in found}
    assert all(len(each) == 3 for each in shown)
    assert {(place.rpartition(":")[2], after.strip("+ ")) for place, _, after in shown} == {
        ("1", "def of(values: list[int], limit: int = 3) -> int | None:"),
        ("1", "def of(values: list[int], limit: int = (1)) -> int | None:"),
        ("2", "total = 1"),
        ("2", "total = (-1)"),
        ("4", "if value <= limit and not total:"),
        ("4", "if (value < limit or not total):"),
        ("4", "if value < limit and (total):"),
        ("4", "if (not (value < limit and (not total))):"),
        ("5", "break"),
        ("6", "pass"),
        ("7", "pass"),
        ("7", 'print(f"{total + 1}: é", "é", (total + 1))'),
        ("7", 'print(f"{total + 1}: é", "é", total - 2)'),
        ("7", 'print(f"{total + 1}: é", "é", total - (0))'),
        ("8", "return None"),
    }
    assert len(shown) == len(found)
    for mutant in found:
        compile(mutant.applied(CHANGED), "of", "exec")


def test_mutants_that_no_test_notices_are_listed_and_the_source_stays_as_it_is(
    mutants: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # what never ends waits: it would take a core until the limit
    endless = "def endless(n, wait=__import__('time').sleep):\n    while n > 0 and not wait(0.01):\n        n -= 1\n"
    source = f"def weak(a):\n    return a > 1\n\n\n{endless}"
    tests = "from hookline.it import endless, weak\n\ndef test():\n    assert weak(3) and not weak(0)\n    endless(1)\n"
    (tmp_path / "src/hookline").mkdir(parents=True)
    (tmp_path / "src/hookline/__init__.py").write_text("")
    (tmp_path / "src/hookline/it.py").write_text(source)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(tests)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "TARGETS", {"it": ("tests/test_it.py",)})
    monkeypatch.setattr(mutants, "LIMIT", (10, 5))
    # the plugins of other packages are slow to import
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    output = tmp_path / "build" / "survivors.txt"
    assert mutants.main(["it:2", "src/hookline/it.py:7", f"--output={output}"]) == 0
    assert output.read_text().split("src/hookline/it.py:")[1:] == [
        "2\n    - return a > 1\n    + return a > (0)\n",
        "2\n    - return a > 1\n    + return a > 2\n",
        "2\n    - return a > 1\n    + return a >= 1\n",
        "7\n    - n -= 1\n    + n -= 2\n",
    ]
    # return None; n -= 2, n -= 0 and the decrement dropped, of which two never end
    assert "it: 7 mutants" in (printed := capsys.readouterr().out)
    assert "3 of 7 mutants were noticed (2 by the time limit), 4 survived" in printed
    assert (tmp_path / "src/hookline/it.py").read_text() == source
    assert not (tmp_path / "src/hookline/__pycache__").exists()


def test_mutants_of_a_sample_are_the_same_for_the_same_seed(mutants: ModuleType) -> None:
    source = (ROOT / mutants.SOURCE / f"{next(iter(mutants.TARGETS))}.py").read_text()
    found = mutants.mutants("plan", source)
    assert mutants.sample(found, 5, seed=1) == mutants.sample(found, 5, seed=1) != mutants.sample(found, 5, 2)
    assert mutants.sample(found[:3], 5, seed=1) == found[:3]


def test_mutants_are_made_of_modules_and_tests_that_exist(mutants: ModuleType) -> None:
    for module, tests in mutants.TARGETS.items():
        assert (ROOT / mutants.SOURCE / f"{module}.py").exists(), module
        for file, _, name in (test.partition("::") for test in tests):
            assert f"def {name}" in (ROOT / file).read_text(), f"{module}: {file}::{name}"
    with pytest.raises(SystemExit, match="'plam' is not in the table"):
        mutants.main(["plam"])
