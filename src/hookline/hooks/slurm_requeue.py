"""Requeue a SLURM job when its time limit is near."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from typing import Annotated, Any

from hookline.engine.checks import Timeout, check_choice, checked_parameters
from hookline.engine.hook import Hook

log = logging.getLogger("hookline")
SIGNALS = ("SIGUSR1", "SIGTERM")


class SlurmRequeue(Hook):
    """Requeues the job after a signal has ended the run and its checkpoint is durable.

    Submit with `sbatch --requeue --signal=USR1@120`, so that the signal comes two minutes before the time
    limit, and train with `fit(resume="auto")` and a `run_dir`, so that the job resumes. Outside SLURM it does
    nothing.
    """

    tier = "builtin"
    rewinds = False
    ranks = "zero"
    on_error = "warn"

    @checked_parameters
    def __init__(
        self, on: str = "SIGUSR1", timeout: Annotated[float, Timeout()] = 30.0, name: str | None = None
    ) -> None:
        """on: the signal to requeue after; SIGTERM is also what `scancel` sends. timeout: seconds for
        `scontrol` to answer.
        """
        super().__init__(name)
        check_choice("SlurmRequeue: on", on, [each for each in SIGNALS if hasattr(signal, each)])
        self.on, self.timeout = on, timeout

    def on_train_end(self, state: Any) -> None:
        job = self.job_id()
        if state.status != "preempted" or state.stop_reason != self.on or job is None:
            return
        try:
            done = subprocess.run(
                ["scontrol", "requeue", job],
                timeout=self.timeout,
                capture_output=True,
                text=True,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("SlurmRequeue: job %s could not be requeued: %s", job, error)
            return
        if done.returncode:
            log.warning(
                "SlurmRequeue: scontrol refused to requeue job %s (exit code %d): %s",
                job,
                done.returncode,
                (done.stderr or done.stdout).strip(),
            )
        else:
            log.warning(
                "SlurmRequeue: job %s is requeued and continues from the checkpoint of step %d.",
                job,
                state.step,
            )

    @staticmethod
    def job_id() -> str | None:
        """Return the id of this job, or of this task of a job array; None outside SLURM."""
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
