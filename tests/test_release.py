"""What a release states about itself: versions, workflows, forms and policies agree with each other and with the code."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import preloaded
import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from hookline import __version__
from hookline.checkpoint.manifest import CHECKPOINT_FORMAT
from hookline.run.option_tables import OLD_NAMES

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = (ROOT / "docs" / "versions.md").read_text()
POLICIES = [ROOT / name for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", "docs/versions.md")]


def loaded(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    return loaded("tools/matrix.py")


def workflow(name: str) -> Any:
    return yaml.safe_load((GITHUB / "workflows" / f"{name}.yml").read_text())


# ---- files that GitHub and others read --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", ".github/workflows/*.yml"),
        ("custom.github-workflows-require-timeout", ".github/workflows/*.yml"),
        ("vendor.github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("vendor.github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("vendor.dependabot", ".github/dependabot.yml"),
        ("vendor.citation-file-format", "CITATION.cff"),
    ],
)
def test_files_follow_their_schemas(schema: str, files: str) -> None:
    found = [str(path) for path in sorted(ROOT.glob(files))]
    assert found
    options = ["--builtin-schema", schema, "--default-filetype", "yaml"]
    result = CliRunner().invoke(check_jsonschema, [*options, *found])
    assert result.exit_code == 0, result.output


def test_there_is_a_form_for_each_kind_of_issue() -> None:
    assert {path.stem for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml")} == {
        "bug",
        "feature",
        "question",
        "config",
    }
    assert (GITHUB / "pull_request_template.md").exists()


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading
    assert citation["version"] == heading[1] == __version__


def test_the_project_has_one_home() -> None:
    home = PROJECT["urls"]["Source"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["repository-code"] == home and citation["url"] == PROJECT["urls"]["Documentation"]
    texts = [*POLICIES, *GITHUB.rglob("*.yml"), ROOT / "pyproject.toml"]
    found = {
        each for path in texts for each in re.findall(r"https://github\.com/[\w-]+/[\w-]+", path.read_text())
    }
    assert found == {home}


def test_no_registry_is_named() -> None:
    hosts = r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|anaconda\.org|npmjs\.(com|org)"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    texts = [
        ROOT / name for name in tracked if name.endswith((".md", ".yml", ".toml", ".txt", ".cff", "dev.py"))
    ]
    assert len(texts) > 30
    assert [str(path) for path in texts if path.exists() and re.search(hosts, path.read_text())] == []


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_links_of_the_policies_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert all((path.parent / link).exists() for link in links), links


# ---- workflows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_few_rights_and_no_secrets(path: Path) -> None:
    text, found = path.read_text(), yaml.safe_load(path.read_text())
    assert found["permissions"] == {"contents": "read"}
    assert "secrets." not in text and "password" not in text and "pull_request_target" not in text
    for name, job in found["jobs"].items():
        wanted = job.get("permissions", {})
        assert set(wanted) <= {"id-token", "pages"}, name
        # a job with more rights runs nothing of the checkout, and only in an environment that can be guarded
        assert not wanted or ("environment" in job and not any("run" in step for step in job["steps"]))
        for step in job["steps"]:
            if "actions/checkout@" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_commands_that_exist_and_actions_of_a_version(path: Path) -> None:
    steps = [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
    called = {name for step in steps for name in re.findall(r"python3 dev\.py ([\w-]+)", step.get("run", ""))}
    assert called and called <= set(loaded("dev.py").COMMANDS)
    for step in steps:
        assert "run" in step or re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})", step["uses"])


def test_a_release_is_built_from_a_tag_and_published_without_a_token() -> None:
    found = workflow("release")
    assert found[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    publish = found["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
    *_, upload = publish["steps"]
    assert upload["uses"].startswith("pypa/gh-action-pypi-publish@") and upload["with"] == {
        "attestations": True
    }
    (tag,) = [
        step["run"] for step in found["jobs"]["build"]["steps"] if "GITHUB_REF_NAME" in step.get("run", "")
    ]
    for name, code in ((f"v{__version__}", 0), ("v99.0", 1)):
        ran = subprocess.run(
            ["sh", "-c", tag], cwd=ROOT, env={"GITHUB_REF_NAME": name, "PATH": PATH}, check=False
        )
        assert ran.returncode == code


PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"


# ---- supported versions -------------------------------------------------------------------------------------------------


def cells_of_table(first: str) -> list[list[str]]:
    """A row of the table of versions, each cell as a list."""
    (row,) = re.findall(rf"^\| {first} \|(.*)\|$", VERSIONS, re.MULTILINE)
    return [[each for each in cell.strip().split(", ") if each] for cell in row.split("|")]


def test_the_page_of_versions_says_what_the_project_requires_and_the_matrix_runs(matrix: ModuleType) -> None:
    (lowest,), tested, expected = cells_of_table("Python")
    assert f">={lowest}" == PROJECT["requires-python"]
    assert sorted(tested + expected) == sorted(matrix.PYTHONS) and matrix.PYTHONS[0] == lowest
    classified = [
        each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)
    ]
    assert classified == tested, "a classifier claims what was tested"
    (lowest,), tested, expected = cells_of_table("PyTorch")
    assert f"torch>={lowest}" in PROJECT["dependencies"]
    assert sorted(tested + expected) == sorted(matrix.TORCHES) and matrix.TORCHES[0] == f"{lowest}.0"
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned in tested


def test_the_workflow_runs_the_whole_matrix(matrix: ModuleType) -> None:
    core = workflow("test")["jobs"]["core"]["strategy"]["matrix"]
    assert (tuple(core["python"]), tuple(core["torch"])) == (matrix.PYTHONS, matrix.TORCHES)


def test_the_page_of_versions_lists_old_names_and_the_format_of_checkpoints() -> None:
    rows = re.findall(r'^\| `(\w+)` \| `(\w+)=\{"(\w+)": \.\.\.\}` \|$', VERSIONS, re.MULTILINE)
    assert {old: (option, key) for old, option, key in rows} == OLD_NAMES
    assert f"the number of its format, {CHECKPOINT_FORMAT} now" in VERSIONS


def test_the_matrix_is_made_of_tests_that_exist(matrix: ModuleType) -> None:
    assert all((ROOT / path).exists() for path in (*matrix.CORE, *matrix.LEFT_OUT, *matrix.WITHOUT_TORCH))
    assert all(path.startswith(matrix.CORE) for path in matrix.LEFT_OUT)


def test_the_matrix_says_why_a_cell_cannot_be_installed(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(matrix.tempfile, "tempdir", str(tmp_path))
    here = {"3.11": "python3.11", "3.12": "python3.12"}
    offers = {"python3.11": {"2.13.0", "2.13.0+cpu", "2.12.1"}, "python3.12": {"2.13.0"}}
    monkeypatch.setattr(matrix, "find_python", here.get)
    monkeypatch.setattr(matrix, "offered", lambda command: frozenset(offers[command]))
    monkeypatch.setattr(matrix.sys, "platform", "linux")
    cell = matrix.Cell
    assert matrix.obstacle(cell("3.14", "2.13.0")) == "there is no Python 3.14 here"
    assert matrix.obstacle(cell("3.11", "2.13.0")) == ""
    assert matrix.obstacle(cell("3.11", "2.12.1")) == matrix.NEEDS_CUDA
    assert matrix.obstacle(cell("3.11", "2.12.1"), cuda=True) == ""
    assert "no torch 2.10.0" in matrix.obstacle(cell("3.11", "2.10.0"))
    ran: list[tuple[str, str]] = []

    def run_cell(cell: Any, log: Path, processes: int, more: list[str]) -> tuple[bool, str]:
        ran.append((cell.python, cell.torch))
        return cell.torch != "", "3 passed"

    monkeypatch.setattr(matrix, "run_cell", run_cell)
    chosen = ["--python", "3.11", "--python", "3.12", "--python", "3.13"]
    assert matrix.main(["--list", *chosen]) == 0 and not ran and not [*tmp_path.iterdir()]
    listed = capsys.readouterr().out.splitlines()
    assert "can run   Python 3.11, torch 2.13.0" in listed and "can run   Python 3.12 without torch" in listed
    assert not any("Python 3.13 without torch" in line for line in listed)
    assert matrix.main(chosen) == 1, "a cell has failed"
    assert ran == [("3.11", "2.13.0"), ("3.12", "")]
    assert re.search(r"^passed    Python 3.11, torch 2.13.0: 3 passed, in 0 s", capsys.readouterr().out, re.M)
    assert matrix.main(["--python", "3.11", "--torch", "2.13.0"]) == 0
    assert matrix.main(["--python", "3.11", "--torch", "2.12.1"]) == 1, "a cell that was named must run"


def test_a_cell_is_installed_and_run_and_its_environment_removed(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real thing without the network: the environment is made, and what would install packages is left out."""
    real = matrix.commands

    def offline(*given: Any) -> Any:
        for each in real(*given):
            if "install" not in each:
                yield [*each, "--without-pip"] if "venv" in each else each

    folders: list[str] = []
    make = matrix.tempfile.mkdtemp
    monkeypatch.setattr(
        matrix.tempfile, "mkdtemp", lambda prefix: folders.append(make(prefix=prefix)) or folders[-1]
    )
    monkeypatch.setattr(matrix, "find_python", lambda version: sys.executable)
    monkeypatch.setattr(matrix, "commands", offline)
    log = tmp_path / "log.txt"
    assert matrix.run_cell(matrix.Cell("3.11", ""), log, 1, []) == (False, "the tests did not begin")
    text = log.read_text()
    assert "No module named pytest" in text and "SyntaxWarning" not in text, "it compiles and imports before"
    (folder,) = folders
    assert not Path(folder).exists()


# ---- tests for GPUs -----------------------------------------------------------------------------------------------------


def test_the_tests_for_gpus_are_not_part_of_the_suite_and_run_on_a_cpu_in_a_dry_run() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "gpu" in settings["norecursedirs"]
    quiet = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    command = [sys.executable, "-m", "pytest", *quiet, "tests/gpu/test_one_device.py"]
    environment = {**os.environ, "HOOKLINE_TEST_DEVICE": "cpu", "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests"}
    done = preloaded.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"14 passed, 1 skipped", done.stdout), done.stdout


def test_without_a_gpu_the_command_lists_the_tests_and_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dev, done = loaded("dev.py"), []
    monkeypatch.setattr(dev, "prepare", lambda *extras: None)
    monkeypatch.setattr(dev, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(dev, "HAS_GPU", "print(False)")
    monkeypatch.setattr(dev, "run", lambda *command, under=None: done.append((command[1:], under)))
    dev.gpu([])
    assert done == [(("-m", "pytest", "tests/gpu", "--collect-only", "--quiet"), None)]
    assert "Nothing was run: torch finds no GPU here." in capsys.readouterr().out
    done.clear()
    dev.gpu(["--dry", "-x"])
    assert done == [(("-m", "pytest", "tests/gpu", "-x"), {"HOOKLINE_TEST_DEVICE": "cpu"})]
    done.clear()
    monkeypatch.setattr(dev, "HAS_GPU", "print(True)")
    dev.gpu([])
    assert done == [(("-m", "pytest", "tests/gpu"), {})] and capsys.readouterr().out == ""
