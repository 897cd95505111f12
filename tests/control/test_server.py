"""The thread that listens ends with the run, whatever other processes have got a copy of its sockets."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
from control.outliving import KINDS

TESTS = Path(__file__).parent.parent
pytestmark = pytest.mark.timeout(300)  # one process starts several others, each of which imports torch


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was there after each run; a kind that is missing did not end."""
    folder = tmp_path_factory.mktemp("outliving")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    with (folder / "output").open("w") as output, (folder / "errors").open("w") as errors:
        program = preloaded.Popen(
            [sys.executable, TESTS / "control" / "outliving.py"],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            program.wait(250)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, 9)
            program.wait()
    found = [json.loads(line) for line in (folder / "output").read_text().splitlines()]
    return {each["kind"]: each for each in found}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_although_a_process_that_was_started_in_it_does_not(
    kind: str, left_behind: dict[str, Any]
) -> None:
    assert kind in left_behind, "the run did not end"
    assert left_behind[kind]["failed"] is ("fails" in kind)
    assert not [line for line in left_behind[kind]["said"] if "did not end" in line]


@pytest.mark.parametrize("kind", KINDS)
def test_no_thread_and_no_socket_of_a_run_that_is_over_is_left(
    kind: str, left_behind: dict[str, Any]
) -> None:
    found = left_behind[kind]
    assert found["threads"] == [] and not found["socket"]
    assert not found["heard"], "a process that outlives the run still listens on its socket"
