"""The commands of dev.py: what they say of skipped tests, what they find in the checkout, and how variations reach the tests."""

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


@pytest.fixture
def dev() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dev", ROOT / "dev.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    assert [each for each in capfd.readouterr().out.splitlines() if each[0] != "$"] == ["two", "three"]


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
