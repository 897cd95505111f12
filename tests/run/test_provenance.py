"""Which code a run was started from: asked of a real git, in real repositories, whatever the environment is like."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import preloaded
import pytest
from tiny import Net, batches, quiet

from hookline.run import provenance
from hookline.run.provenance import git_state, versions
from hookline.util.text import command_line

pytestmark = [
    pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed"),
    pytest.mark.timeout(120),
]


def git(folder: Path, *arguments: str) -> str:
    command = [
        "git",
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@example.com",
        "-c",
        "commit.gpgsign=false",
        *arguments,
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "train.py").write_text("print(1)\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def test_a_commit_is_named_and_whether_files_have_changed(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert git_state(repository) == {"commit": commit, "dirty": False}
    (repository / "new.txt").write_text("not under version control")
    assert git_state(repository) == {"commit": commit, "dirty": False}
    (repository / "train.py").write_text("print(2)\n")
    assert git_state(repository) == {"commit": commit, "dirty": True}
    git(repository, "add", ".")
    assert git_state(repository) == {"commit": commit, "dirty": True}


def test_a_folder_inside_the_repository_will_do(repository: Path) -> None:
    (repository / "deep" / "er").mkdir(parents=True)
    assert git_state(repository / "deep" / "er")["commit"] == git(repository, "rev-parse", "HEAD")


def test_a_repository_without_a_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == {"commit": None, "dirty": False}


def test_no_repository_and_no_folder_are_no_errors(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {"commit": None, "dirty": None, "problem": "not a git repository"}
    assert git_state(tmp_path / "missing")["commit"] is None


def test_no_git_is_no_error(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repository))
    assert git_state(repository) == {"commit": None, "dirty": None, "problem": "git is not installed"}


def test_the_environment_does_not_choose_another_repository(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    expected = git_state(repository)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / "index"))
    assert git_state(repository) == expected


def test_a_damaged_repository_says_why(repository: Path) -> None:
    (repository / ".git" / "HEAD").write_text("\x1b[31mnonsense")
    state = git_state(repository)
    assert state["commit"] is None and state["problem"] and "\x1b" not in state["problem"]


def test_a_git_that_hangs_is_not_waited_for(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nsleep 30\n")
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{slow.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "GIT_SECONDS", 0.2)
    began = time.monotonic()
    assert git_state(repository) == {
        "commit": None,
        "dirty": None,
        "problem": "git did not answer within 0.2 s",
    }
    assert time.monotonic() - began < 15


def test_a_repository_that_is_slow_to_search_has_its_commit_still(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, slow = shutil.which("git"), tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(
        f'#!/bin/sh\nfor a in "$@"; do if [ "$a" = status ]; then exec sleep 30; fi; done\nexec {real} "$@"\n'
    )
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    commit = git(repository, "rev-parse", "HEAD")
    monkeypatch.setenv("PATH", f"{slow.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "GIT_SECONDS", 3.0)
    assert git_state(repository) == {
        "commit": commit,
        "dirty": None,
        "problem": "git did not answer within 3 s",
    }


def test_nothing_in_the_repository_is_run_or_written(repository: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    program = repository / "monitor.sh"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(program))
    git(repository, "config", "core.hooksPath", str(repository))
    before = {each: each.stat().st_mtime_ns for each in (repository / ".git").rglob("*")}
    assert git_state(repository)["commit"]
    assert not mark.exists()
    assert {each: each.stat().st_mtime_ns for each in (repository / ".git").rglob("*")} == before


def test_a_script_is_known_by_its_own_repository_wherever_it_is_started(
    repository: Path, tmp_path: Path
) -> None:
    (repository / "train.py").write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from tiny import Net, batches, quiet
        quiet(run_dir="run", logger=True).fit(Net(), batches())
    """)
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    preloaded.run(
        [sys.executable, str(repository / "train.py"), "--api_key", "s3cr3tvalue"], cwd=elsewhere, check=True
    )
    record = json.loads((elsewhere / "run" / "run.json").read_text())
    assert record["git"] == {"commit": git(repository, "rev-parse", "HEAD"), "dirty": True}
    assert record["command"].endswith("train.py --api_key ...") and record["directory"] == str(elsewhere)


def test_versions_are_those_of_what_is_imported() -> None:
    found = versions()
    assert found["python"] == sys.version.split()[0] and "numpy" in found
    assert "lightning" not in found or "lightning" in sys.modules


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("https://me:pw@host/data/a.csv?sig=1", "https://host/..."),
        ("--data=http://host:80/a#b", "--data=http://host:80/..."),
        ("s3://bucket/data/a.csv?sig=1", "'s3://bucket/data/a.csv?...'"),
        ("sftp://me:pw@host/run", "sftp://host/run"),
    ],
)
def test_a_web_address_on_the_command_line_has_its_host_alone_and_other_urls_keep_their_path(
    given: str, said: str
) -> None:
    assert command_line(["fit", given]) == f"fit {said}"


def test_the_filters_of_a_function_hook_are_recorded_in_words(tmp_path: Path) -> None:
    trainer = quiet(run_dir=tmp_path, logger=True)
    trainer.on("step_end", every="5 steps", once=True)(lambda step: None)
    trainer.fit(Net(), batches(2))
    recorded = json.loads((tmp_path / "run.json").read_text())["hooks"]["function"]["params"]
    assert recorded["when"] == "every 5 steps, once"
