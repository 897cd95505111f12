"""A SLURM job whose time runs out is put back into the queue, once its checkpoint is durable."""

from __future__ import annotations

import json
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
    """A program of that name which notes what it was asked, and what was saved by then. As SLURM does, it ends the
    processes of the job.
    """
    program, notes = tmp_path / "bin" / "scontrol", tmp_path / "notes"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" $(ls {tmp_path}/run/checkpoints) >> {notes}\n'
        "[ ${SCONTROL_CODE:-0} = 0 ] && kill -TERM $PPID\nexit ${SCONTROL_CODE:-0}\n"
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


class Early(Hook):
    def on_fit_start(self) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)


class Last(Hook):
    """Notes whether the job was requeued before the teardown of this hook."""

    def __init__(self) -> None:
        super().__init__()
        self.torn_down_before: list[bool] = []

    def teardown(self, trainer: Any) -> None:
        self.torn_down_before.append((Path(trainer.run_dir).parent / "notes").exists())


def run(tmp_path: Path, number: int, **settings: Any) -> None:
    trainer = quiet(run_dir=tmp_path / "run", hooks=[Kill(number), SlurmRequeue(**settings)])
    with pytest.raises((Preempted, KeyboardInterrupt)):
        trainer.fit(Net(), batches(4), resume="auto")


def test_after_sigusr1_the_job_is_requeued_when_its_checkpoint_is_there(
    tmp_path: Path, scontrol: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, signal.SIGUSR1)
    assert "To resume: the job is in SLURM's queue again" in capfd.readouterr().err
    assert scontrol.read_text() == "requeue 77 step-2\n"
    assert "job 77 is requeued and continues from the checkpoint of step 2" in caplog.text


def test_slurm_ends_a_requeued_job_which_is_not_a_failure(tmp_path: Path, scontrol: Path) -> None:
    last = Last()
    trainer = quiet(run_dir=tmp_path / "run", hooks=[SlurmRequeue(), Kill(signal.SIGUSR1), last])
    with pytest.raises(Preempted) as raised:
        trainer.fit(Net(), batches(4))
    ended = json.loads((tmp_path / "run" / "run.json").read_text())
    assert raised.value.code == 128 + signal.SIGUSR1
    assert (ended["status"], ended["reason"], ended["error"]) == ("preempted", "SIGUSR1", None)
    assert last.torn_down_before == [False]  # the requeue is the last act of the run


def test_a_job_that_gets_the_signal_before_its_first_step_is_requeued(
    tmp_path: Path, scontrol: Path, caplog: pytest.LogCaptureFixture
) -> None:
    early = Early()
    with pytest.raises(Preempted):
        quiet(run_dir=tmp_path / "run", hooks=[early, SlurmRequeue()]).fit(Net(), batches(4))
    assert scontrol.read_text() == "requeue 77\n"
    assert "job 77 is requeued and starts again" in caplog.text


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
