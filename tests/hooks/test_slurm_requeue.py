"""A SLURM job whose time runs out is put back into the queue, once its checkpoint is durable."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tiny import Net, batches, quiet

from hookline import Hook, OptionError, Preempted
from hookline.hooks.slurm_requeue import SlurmRequeue


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name which notes what it was asked, and what was saved by then."""
    program, notes = tmp_path / "bin" / "scontrol", tmp_path / "notes"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" "$(ls {tmp_path}/run/checkpoints)" >> {notes}\nexit ${{SCONTROL_CODE:-0}}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    return notes


class Kill(Hook):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def on_step_end(self, step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), self.number)


def run(tmp_path: Path, number: int, **settings: Any) -> None:
    trainer = quiet(run_dir=tmp_path / "run", hooks=[Kill(number), SlurmRequeue(**settings)])
    with pytest.raises((Preempted, KeyboardInterrupt)):
        trainer.fit(Net(), batches(4))


def test_after_sigusr1_the_job_is_requeued_when_its_checkpoint_is_there(
    tmp_path: Path, scontrol: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, signal.SIGUSR1)
    assert scontrol.read_text() == "requeue 77 step-2\n"
    assert "job 77 is requeued" in caplog.text


def test_a_task_of_an_array_is_requeued_by_itself(
    tmp_path: Path, scontrol: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    run(tmp_path, signal.SIGUSR1)
    assert scontrol.read_text().startswith("requeue 70_3")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_other_signals_do_not_requeue(tmp_path: Path, scontrol: Path, number: int) -> None:
    run(tmp_path, number)
    assert not scontrol.exists()


def test_sigterm_does_if_asked_to(tmp_path: Path, scontrol: Path) -> None:
    run(tmp_path, signal.SIGTERM, on="SIGTERM")
    assert scontrol.exists()


def test_a_refusal_is_reported_and_the_run_ends_as_it_would(
    tmp_path: Path, scontrol: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SCONTROL_CODE", "1")
    run(tmp_path, signal.SIGUSR1)
    assert "scontrol refused to requeue job 77 (exit code 1)" in caplog.text


def test_outside_slurm_nothing_happens(
    tmp_path: Path, scontrol: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    run(tmp_path, signal.SIGUSR1)
    assert not scontrol.exists()


def test_an_unknown_signal_is_refused() -> None:
    with pytest.raises(OptionError, match="Did you mean 'SIGUSR1'"):
        SlurmRequeue(on="SIGUSR")
