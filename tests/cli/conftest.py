"""The projects that tests of the command line share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.configured import PARTS, RUN, TRACED_PARTS, TRACED_RUN

from hookline.cli import main


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("project")
    (folder / "cli_parts.py").write_text(PARTS)
    (folder / "run.toml").write_text(RUN)
    path = list(sys.path)
    yield folder
    sys.path[:] = path
    sys.modules.pop("cli_parts", None)


@pytest.fixture(scope="module")
def traced_project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with one traced run in it."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "trace_parts.py").write_text(TRACED_PARTS)
    (folder / "run.toml").write_text(TRACED_RUN)
    (folder / "other.toml").write_text(TRACED_RUN.replace("trace_parts.Leaves", "trace_parts.Look"))
    (folder / "fails.toml").write_text(
        TRACED_RUN + '[hooks.fails]\nclass_path = "trace_parts.Fails"\n'
        "[hooks.model_checkpoint]\nevery_n_train_steps = 2\n"
    )
    path, here = list(sys.path), os.getcwd()
    os.chdir(folder)
    assert main(["fit", "run.toml", "--trace", "--trainer.run_dir", "run"]) == 0
    os.chdir(here)
    yield folder
    sys.path[:] = path
    sys.modules.pop("trace_parts", None)


@pytest.fixture
def in_traced_project(traced_project: Path, monkeypatch: pytest.MonkeyPatch, own_directory: None) -> None:
    monkeypatch.chdir(traced_project)
