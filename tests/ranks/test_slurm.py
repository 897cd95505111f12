"""Jobs of a real SLURM: a signal saves the run, the job is requeued, and the next start resumes it to the same end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks.slurm import Cluster, slurm_cluster, wait_for
from ranks.torchrun import environment
from thorough import some

PROGRAM = """
import sys, time
from tiny import Net, batches, quiet
from hookline import Hook
from hookline.hooks import SlurmRequeue


class Slowly(Hook):
    def on_step_end(self, step, resumed):
        if step == 3:
            print("trained", step, flush=True)
        if not resumed:
            time.sleep(0.1)


run_dir, signal = sys.argv[1:]
trainer = quiet(hooks=[Slowly(), SlurmRequeue(on=signal)], run_dir=run_dir, seed=5, max_epochs=1)
trainer.fit(Net(), batches(2000), resume="auto")
"""
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:30:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={folder}/output.txt

{start}
"""
BY_SRUN = "srun {python} program.py {folder}/run SIGUSR1"
BY_TORCHRUN = """HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PORT=$((20000 + SLURM_JOB_ID % 12000))
srun {python} -m torch.distributed.run --nnodes "$SLURM_NNODES" --nproc-per-node 1 \\
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:$PORT" --rdzv-id "$SLURM_JOB_ID" program.py {folder}/run SIGTERM"""
STARTS = {"srun": (BY_SRUN, "USR1"), "torchrun": (BY_TORCHRUN, "TERM")}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def record(folder: Path) -> dict[str, Any]:
    """What the run's directory says, or nothing yet."""
    file = folder / "run" / "run.json"
    return json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.parametrize("how", some(["srun"], ["torchrun"]))
def test_a_signal_saves_and_requeues_the_job_which_resumes_to_its_end(
    cluster: Cluster, tmp_path: Path, how: str
) -> None:
    start, signal = STARTS[how]
    (tmp_path / "program.py").write_text(PROGRAM)
    script = SCRIPT.format(folder=tmp_path, start=start.format(python=sys.executable, folder=tmp_path))
    (tmp_path / "job.sh").write_text(script)
    submitted = subprocess.run(
        ["sbatch", "--parsable", "job.sh"],
        cwd=tmp_path,
        env={**environment(), "SLURM_CONF": cluster.environment["SLURM_CONF"]},
        capture_output=True,
        text=True,
        check=True,
    )
    job, output = submitted.stdout.strip(), tmp_path / "output.txt"

    wait_for(lambda: output.exists() and output.read_text().count("trained 3") == 2, "a few steps")
    cluster.ask("scancel", f"--signal={signal}", job)
    wait_for(lambda: "SlurmRequeue: job" in output.read_text(), "the requeue")
    saved = re.findall(r"continues from the checkpoint of step (\d+)", output.read_text())
    assert len(saved) == 1, output.read_text()
    wait_for(lambda: record(tmp_path).get("status") == "preempted", "the record of the end")
    ended = record(tmp_path)
    assert (ended["error"], ended["step"]) == (None, int(saved[0]))
    assert "has failed" not in output.read_text()

    wait_for(lambda: f"{job} PENDING" in cluster.ask("squeue", "--noheader", "--format=%i %T"), "the queue")
    # a requeued job waits two minutes; SLURM compares whole seconds and refuses one that starts in the second
    # in which it was ended ("Job credential revoked")
    time.sleep(2)
    cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for(lambda: record(tmp_path).get("status") == "completed", "the end of the resumed run")
    completed = record(tmp_path)
    assert [each["first_step"] for each in completed["sessions"]] == [0, int(saved[0])]
    assert completed["step"] == 1000  # two ranks
    wait_for(lambda: not cluster.ask("squeue", "--noheader").strip(), "the end of the job")
    assert "JobState=COMPLETED" in cluster.ask("scontrol", "show", "job", job)
