"""User code passes mypy and pyright in their strictest modes, wrong options do not, and the code that passes also runs."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

USER_CODE = Path(__file__).parent / "user_code"
ROOT = USER_CODE.parent.parent
GOOD = ("many_hooks.py", "a_module.py", "a_run.py")
WRONG = "wrong_options.py"
Errors = Mapping[str, Mapping[int, str]]  # file -> line -> message


def run(*command: str, cwd: Path) -> str:
    """The output of a checker; 0 and 1 mean that it did its work."""
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True, timeout=500, check=False
    )
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def mypy() -> Errors:
    errors: dict[str, dict[int, str]] = {}
    # the cache in the checkout is what `python3 dev.py types` fills too, so that torch is not read twice
    cache = ROOT / ".mypy_cache"
    out = run(
        "mypy",
        "--strict",
        "--config-file=",
        "--no-error-summary",
        "--no-pretty",
        "--hide-error-context",
        f"--cache-dir={cache}",
        *GOOD,
        WRONG,
        cwd=USER_CODE,
    )
    for line in out.splitlines():
        found = re.match(r"(.+?):(\d+): error: (.*)", line)
        if found:
            errors.setdefault(Path(found[1]).name, {})[int(found[2])] = found[3]
    return errors


@pytest.fixture(scope="module")
def pyright(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    errors: dict[str, dict[int, str]] = {}
    project = tmp_path_factory.mktemp("pyright")  # its settings must lie beside the code
    shutil.copytree(USER_CODE, project, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (project / "pyrightconfig.json").write_text(json.dumps(settings))
    out = run(
        "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(project), cwd=project
    )
    report = json.loads(out)
    assert report["summary"]["filesAnalyzed"] >= len(GOOD) + 1
    for each in report["generalDiagnostics"]:
        if each["severity"] == "error":
            line = each["range"]["start"]["line"] + 1
            errors.setdefault(Path(each["file"]).name, {})[line] = f"{each['message']} [{each.get('rule')}]"
    return errors


@pytest.fixture(params=["mypy", "pyright"])
def errors(request: pytest.FixtureRequest) -> Errors:
    found: Errors = request.getfixturevalue(request.param)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", GOOD)
def test_right_user_code_passes_in_strict_mode(errors: Errors, name: str) -> None:
    assert not errors.get(name), "\n".join(f"{name}:{line}: {text}" for line, text in errors[name].items())


@pytest.mark.timeout(600)
def test_every_wrong_line_is_flagged_and_no_other(errors: Errors) -> None:
    lines = (USER_CODE / WRONG).read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(marked) > 20
    assert set(errors.get(WRONG, {})) == marked


def test_the_user_code_that_passes_also_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(USER_CODE))
    for name in ("a_module", "many_hooks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    names = runpy.run_path(str(USER_CODE / "a_run.py"))
    assert names["main"]()["train/loss"] >= 0.0
    assert Path("run/log.jsonl").is_file()


def test_events_of_ones_own_can_be_typed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from hookline import EVENTS

    monkeypatch.syspath_prepend(str(USER_CODE))
    try:
        assert runpy.run_path(str(USER_CODE / "a_run.py"))["own_event"]() == 3.0
    finally:
        EVENTS.forget("on_reward")
