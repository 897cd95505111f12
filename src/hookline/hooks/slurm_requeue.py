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
    """Requeues the job after a signal has ended the run, as the last act of the run: SLURM begins to end the
    processes of a job as soon as it is requeued.

    Submit with `sbatch --requeue --signal=USR1@120`, so that the signal comes two minutes before the time
    limit, and train with `fit(resume="auto")` and a `run_dir`, so that the job resumes. Outside SLURM it does
    nothing.
    """

    tier = "builtin"
    order = 1000  # after the teardown of the other hooks
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
        self.has_requeued = False
        """Whether SLURM starts this job again."""

    def teardown(self, state: Any) -> None:
        is_due = state.status == "preempted" and state.stop_reason == self.on
        if is_due and self.job_id() is not None:
            self.requeue(state.step)

    def requeue(self, step: int) -> None:
        """Put the job back into the queue; log a warning if SLURM refuses. step: the one that is saved."""
        job = str(self.job_id())
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
            self.has_requeued = True
            start = f"continues from the checkpoint of step {step}" if step else "starts again"
            log.warning("SlurmRequeue: job %s is requeued and %s.", job, start)

    @staticmethod
    def job_id() -> str | None:
        """Return the id of this job, or of this task of a job array; None outside SLURM."""
        array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
