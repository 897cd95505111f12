"""Run a script on several ranks with the real torchrun, under a deadline: a hang is a failure. The launcher and the ranks
begin with torch imported (preloaded.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import preloaded

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    code: int
    output: str
    seconds: float

    def lines(self, beginning: str) -> list[str]:
        """What the ranks printed after this word, sorted."""
        return sorted(
            each.partition(beginning)[2].strip() for each in self.output.splitlines() if beginning in each
        )


def environment(**more: str) -> dict[str, str]:
    """One thread a rank: several ranks share the machine's cores."""
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCHELASTIC_ERROR_FILE": "", **more}


def command(
    script: Path, *arguments: str, ranks: int = 2, launcher: tuple[str, ...] = ("--standalone",)
) -> list[str]:
    """The launch line."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *launcher,
        "--nproc-per-node",
        str(ranks),
        str(script),
        *arguments,
    ]


def torchrun(
    source: str,
    folder: Path,
    *arguments: str,
    ranks: int = 2,
    deadline: float = 300,
    launcher: tuple[str, ...] = ("--standalone",),
    **env: str,
) -> Outcome:
    """Run this source on so many ranks and wait for it; past the deadline the whole job is killed and the test fails.

    Every rank speaks into files of its own: in one pipe, what two of them say at the same moment would mix within a line.
    """
    script, said = folder / "script.py", Path(tempfile.mkdtemp(dir=folder, prefix="said-"))
    script.write_text(textwrap.dedent(source))
    launcher = (*launcher, "--log-dir", str(said), "--redirects", "3")
    variables = environment(**env)
    python, module, _, *words = command(script, *arguments, ranks=ranks, launcher=launcher)
    servers = ",".join(preloaded.server(variables, number % 2) for number in range(ranks))
    began = time.monotonic()
    with preloaded.Popen(
        [python, module, "ranks.launcher", servers, *words],
        cwd=folder,
        env=variables,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            output, _ = job.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            output, _ = job.communicate()
            raise AssertionError(
                f"the job hung: it was not over after {deadline} s. Its output:\n{_all(output, said)}"
            ) from None
    return Outcome(job.returncode, _all(output, said), time.monotonic() - began)


def by_torchrun(*words: str, ranks: int = 2, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command on so many ranks of this machine, and wait for it."""
    variables = environment()
    servers = ",".join(preloaded.server(variables, number % 2) for number in range(ranks))
    launcher = ("ranks.launcher", servers, "--standalone", "--nproc-per-node", str(ranks))
    return preloaded.run(
        [sys.executable, "-m", *launcher, *words],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )


def cases(module: str, folder: Path, deadline: float, ranks: int = 2, **env: str) -> dict[str, list[Any]]:
    """Run this module's `main` on so many ranks: what each case found (`worlds.report`), rank zero's first."""
    source = f"from {module} import main\nmain()\n"
    outcome = torchrun(source, folder, deadline=deadline, ranks=ranks, **env)
    assert outcome.code == 0, outcome.output
    results: dict[str, list[Any]] = {}
    for name, rank, value in sorted(map(json.loads, outcome.lines("CASE ")), key=lambda each: each[1]):
        results.setdefault(name, []).append(value)
        assert len(results[name]) == rank + 1, name
    return results


def _all(output: str, said: Path) -> str:
    """What the launcher has said, then the ranks, one after the other."""
    return "\n".join([output, *(each.read_text(errors="replace") for each in sorted(said.rglob("*.log")))])
