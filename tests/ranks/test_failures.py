"""A rank that fails takes all of them down within seconds, and every log says which rank it was, in which hook and event."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

from ranks.torchrun import Outcome, environment, torchrun

from hookline.report.reader import read_run

ALL_DOWN = 25.0
"""Seconds from the failure to the end of the last rank, and of the launcher after it: a few, and on a busy machine not the
30 that the launcher itself would wait, nor the 60 that a rank would sleep."""

SCRIPT = '''
import ctypes, os, signal, sys, time
from tiny import Net, batches, quiet
from hookline import Hook
from hookline.hooks import HealthCheck

FOLDER, CASE = sys.argv[1:3]
OPTIONS = {}
if CASE != "raises on zero":  # which is ended by force
    import ranks.patient


def fail(how):
    sys.stdout.write(f"FAILED_AT {time.time()}\\n")
    sys.stdout.flush()
    how()


def raise_it():
    raise ValueError("the disk is full")


class Careful(Hook):
    """Says on which ranks the ending was heard of."""

    def on_exception(self, rank, exception):
        sys.stdout.write(f"EXCEPTION {rank} {type(exception).__name__}\\n")
        sys.stdout.flush()

    def teardown(self, rank):
        sys.stdout.write(f"TEARDOWN {rank}\\n")
        sys.stdout.flush()


class Fails(Hook):
    def on_step_end(self, rank, step):
        if step == 3 and rank == 1 and CASE == "raises":
            fail(raise_it)
        if step == 3 and CASE == "killed":
            if rank == 1:
                fail(lambda: os.kill(os.getpid(), signal.SIGKILL))
            time.sleep(60)
        if step == 3 and rank == 1 and CASE == "killed in a collective":
            fail(lambda: os.kill(os.getpid(), signal.SIGKILL))
        if step == 3 and rank == 1 and CASE in ("hangs", "hangs before a check"):
            fail(lambda: time.sleep(60))
        if step == 3 and rank == 1 and CASE == "hangs for good":
            fail(lambda: [ctypes.PyDLL(None).sleep(60) for _ in range(9)])  # keeps the interpreter's lock all the time


class OnZero(Hook):
    ranks = "zero"

    def on_train_batch_end(self, batch_idx):
        if batch_idx == 2 and CASE == "raises on zero":
            fail(raise_it)


class Stubborn(Hook):
    """Is in the middle of something, and does not react to what the launcher sends."""

    ranks = {1}

    def on_train_batch_end(self, batch_idx):
        if batch_idx == 2 and CASE == "raises on zero":
            signal.signal(signal.SIGTERM, lambda *given: None)
            time.sleep(60)


if CASE.startswith("hangs"):
    quiet().fit(Net(), batches(2))  # whatever takes long the first time
    OPTIONS = {"hang_after": 6, "hang_action": "abort"}
CHECKS = [HealthCheck(every_n_steps=3, patience=2)] if CASE == "hangs before a check" else []
quiet(hooks=[Fails(), OnZero(), Stubborn(), Careful(), *CHECKS], logger=True, default_root_dir=FOLDER, **OPTIONS).fit(Net(), batches(400))
'''


def fail(folder: Path, case: str) -> tuple[Outcome, float]:
    """Run it; how it ended, and the seconds from the failure until everything was over."""
    outcome = torchrun(SCRIPT, folder, str(folder), case, deadline=300)
    over = time.time()
    assert outcome.code != 0, outcome.output
    (failed,) = outcome.lines("FAILED_AT")
    return outcome, over - float(failed)


def said_by(rank: int, outcome: Outcome) -> str:
    """What one rank has logged, or shown as its traceback."""
    return "\n".join(
        each for each in outcome.output.splitlines() if each.startswith((f"[rank {rank}]", f"[rank{rank}]:"))
    )


def test_a_hook_that_raises_on_one_rank_ends_all_and_is_named_everywhere(tmp_path: Path) -> None:
    outcome, seconds = fail(tmp_path, "raises")
    assert seconds < ALL_DOWN
    where = r"raised by hook 'fails' in on_step_end \(.*script\.py:\d+\) at epoch 0, batch 2, step 3"
    assert re.search(rf"Rank 1 has failed: ValueError: the disk is full \({where}\)", said_by(0, outcome)), (
        outcome.output
    )
    assert re.search(where, said_by(1, outcome))
    assert "Failed with rank 1, at epoch 0, batch" in said_by(0, outcome)
    (log,) = tmp_path.glob("runs/*/log.jsonl")
    (failure,) = [each for each in map(json.loads, log.read_text().splitlines()) if each["type"] == "failure"]
    assert (failure["rank"], failure["exception"]) == (1, "ValueError") and failure["message"].startswith(
        "the disk is full (raised by"
    )
    assert outcome.lines("TEARDOWN") == ["0", "1"]
    assert "1 ValueError" in outcome.lines("EXCEPTION")


def test_a_rank_zero_hook_that_raises_ends_one_that_is_busy_and_hears_no_signal(tmp_path: Path) -> None:
    outcome, seconds = fail(tmp_path, "raises on zero")
    assert seconds < ALL_DOWN  # the launcher itself would wait 30 s for it
    assert (
        "Rank 0 has failed: ValueError: the disk is full (raised by hook 'on_zero' in on_train_batch_end"
        in said_by(1, outcome)
    )
    assert "This rank did not end by itself, so its process is ended" in said_by(1, outcome)


def test_a_rank_that_is_killed_is_named_and_the_others_end_in_good_order(tmp_path: Path) -> None:
    outcome, seconds = fail(tmp_path, "killed")
    assert seconds < ALL_DOWN
    assert "Rank 1 has failed: it died without a message" in said_by(0, outcome)
    assert outcome.lines("EXCEPTION") == ["0 PeerError"]  # it was asleep in a hook, and was woken
    (run,) = tmp_path.glob("runs/*")
    assert read_run(run).failed["text"].startswith("on rank 1: it died without a message")
    assert outcome.lines("TEARDOWN") == ["0"]


def test_the_record_of_a_run_names_the_rank_that_was_killed_not_the_broken_connection(tmp_path: Path) -> None:
    outcome, _ = fail(tmp_path, "killed in a collective")
    assert outcome.lines("EXCEPTION") == ["0 PeerError"], outcome.output
    (run,) = tmp_path.glob("runs/*")
    error = json.loads((run / "run.json").read_text())["error"]
    assert error["type"] == "PeerError"
    assert error["message"].startswith("Rank 1 has failed: it died without a message: it was killed, or")
    assert "gloo" not in error["message"]
    assert "rank 1" in said_by(0, outcome).casefold()  # with the error of the connection above it


def test_a_rank_that_hangs_in_a_hook_is_named_and_the_job_ends(tmp_path: Path) -> None:
    outcome, seconds = fail(tmp_path, "hangs")
    assert seconds < 6 + ALL_DOWN  # hang_after=6
    named = r"Rank 1 has failed: (HangError: )?hook 'fails' in on_step_end \(.*script\.py:\d+\) did not return within 6 s"
    assert re.search(named, said_by(0, outcome)), outcome.output
    assert re.search(
        r"has not moved for at least .* hook 'fails' in on_step_end .*rank 1", said_by(1, outcome)
    )


def test_a_rank_that_waits_in_a_health_check_is_not_the_one_that_hangs(tmp_path: Path) -> None:
    outcome, _ = fail(tmp_path, "hangs before a check")
    assert "HealthCheck: no answer at step 3 for" in said_by(0, outcome), outcome.output
    assert not re.search(r"hook 'health_check' .*did not return", outcome.output), outcome.output
    (log,) = tmp_path.glob("runs/*/log.jsonl")
    (failure,) = [each for each in map(json.loads, log.read_text().splitlines()) if each["type"] == "failure"]
    assert failure["rank"] == 1 and "hook 'fails' in on_step_end" in json.dumps(failure)


def test_a_rank_that_no_longer_lets_python_run_ends_all_the_same(tmp_path: Path) -> None:
    outcome, seconds = fail(tmp_path, "hangs for good")
    assert seconds < 6 * 1.5 + ALL_DOWN  # hang_after=6, and half of it again
    assert "Rank 1 has failed: it died without a message" in said_by(0, outcome)
    assert re.search(r'script\.py", line \d+ in on_step_end', outcome.output), outcome.output  # where it was


RESTARTED = """
import json, os, signal, sys
from tiny import Net, batches, quiet
from hookline import Hook

ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Saves(Hook):
    def on_step_end(self, trainer, step):
        if step % 4 == 0:
            trainer.save_checkpoint()


class Dies(Hook):
    def on_train_start(self, step, resumed):
        self.began = [step, resumed]

    def on_step_end(self, rank, step):
        if step == 6 and rank == 1 and ATTEMPT == 0:
            os.kill(os.getpid(), signal.SIGKILL)


hook = Dies()
trainer = quiet(hooks=[Saves(), hook], run_dir=sys.argv[1], seed=3)
trainer.fit(Net(), batches(24), resume="auto")
sys.stdout.write(f"RESULT {json.dumps([trainer.state.rank, ATTEMPT, hook.began, trainer.state.step, trainer.status])}\\n")
sys.stdout.flush()
"""


def test_torchrun_starts_the_job_again_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    outcome = torchrun(
        RESTARTED,
        tmp_path,
        str(tmp_path / "run"),
        deadline=300,
        launcher=("--standalone", "--max-restarts", "1"),
    )
    assert outcome.code == 0, outcome.output
    assert [json.loads(each) for each in outcome.lines("RESULT")] == [
        [rank, 1, [4, True], 12, "completed"] for rank in (0, 1)
    ]


ELSEWHERE = """
import os, signal, sys, time
import ranks.patient
from tiny import Net, batches, quiet
from hookline import Hook, HooklineError


class FallsApart(Hook):
    def on_step_end(self, rank, step):
        if rank == 1 and step == 3:
            raise ValueError("in a hook")

    def on_before_backward(self, rank, step):
        if rank == 0 and step == 3:
            time.sleep(60)


trainer = quiet()
trainer.fit(Net(), batches(4))
try:
    quiet(hooks=[FallsApart()]).fit(Net(), batches(12))
except Exception as error:
    sys.stdout.write(f"CAUGHT {os.environ['RANK']} {type(error).__name__}\\n")
try:
    trainer.fit(Net(), batches(4))
except HooklineError as error:
    sys.stdout.write(f"REFUSED {os.environ['RANK']} {error}\\n")
sys.stdout.flush()
if os.environ["RANK"] == "1":
    raise ValueError("in the user's own lines")
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends it as soon as rank 1 is gone, whatever this one was about to say
trainer.fit(Net(), batches(4))
"""


def test_after_a_failure_that_was_caught_the_next_run_is_refused_and_one_outside_is_named_to_those_who_wait(
    tmp_path: Path,
) -> None:
    outcome = torchrun(ELSEWHERE, tmp_path, deadline=300)
    assert outcome.code != 0
    assert outcome.lines("CAUGHT") == ["0 PeerError", "1 ValueError"]
    for rank, line in enumerate(outcome.lines("REFUSED")):
        assert line.startswith(
            f"{rank} An earlier run failed on rank 1 (ValueError: in a hook (raised by hook 'falls_apart'"
        )
    assert len(outcome.lines("REFUSED")) == 2
    assert "Processes of this job have ended: rank 1 by ValueError: in the user's own lines." in said_by(
        0, outcome
    )


LATE = """
import threading, time
from torch.distributed import TCPStore
from hookline.training.ranks.failure_monitor import wait_at_exit

store, over = TCPStore("127.0.0.1", 0, 1, True), time.monotonic() + 1

def ask():
    while time.monotonic() < over:
        store.add("notes", 0)

late = threading.Thread(target=ask, daemon=True)
late.start()
wait_at_exit(late)
"""


def test_a_process_whose_thread_still_asks_the_store_ends_as_it_should(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    ended = subprocess.run(
        [sys.executable, "late.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr  # it would be aborted while the interpreter ends
