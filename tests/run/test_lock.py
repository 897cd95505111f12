"""The lock of a run's directory: one job at a time, whatever becomes of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
from tiny import Net, batches, quiet

from hookline import Hook, HooklineError, RunLockedError
from hookline.cli import main
from hookline.hooks import ModelCheckpoint
from hookline.run import lock as runlock
from hookline.run.lock import LOCK_FILE, RunLock

TESTS = Path(__file__).parents[1]
LOCK = Path("run", LOCK_FILE)
pytestmark = pytest.mark.timeout(300)  # other processes import torch first

TRAINING = """
    import os, sys, time
    sys.path.insert(0, {tests!r})
    from tiny import Net, batches, quiet
    from hookline import Hook
    from hookline.hooks import ModelCheckpoint

    class Waits(Hook):
        def on_train_start(self):
            worker = os.fork() if {forks} else -1
            if worker == 0:
                time.sleep(600)
            print("training", worker, flush=True)

        def on_train_batch_end(self):
            while not os.path.exists("go on"):
                time.sleep(0.01)

    quiet(run_dir="run", hooks=[Waits(), ModelCheckpoint()], max_epochs={epochs}).fit(Net(), batches(), resume="auto")
    print("over", flush=True)
"""


@contextlib.contextmanager
def job(forks: bool = False, epochs: int = 1) -> Iterator[Any]:
    """Another process that trains in `run` until there is a file `go on`."""
    Path("job.py").write_text(textwrap.dedent(TRAINING.format(tests=str(TESTS), forks=forks, epochs=epochs)))
    with preloaded.Popen(
        [sys.executable, "job.py"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            told, worker = process.stdout.readline().split()
            assert told == "training"
            process.worker = int(worker)  # type: ignore[attr-defined]
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlock, "WAITING", 0.1)


def fit(**options: Any) -> Any:
    trainer = quiet(**{"run_dir": "run", "hooks": [ModelCheckpoint()], **options})
    trainer.fit(Net(), batches(), resume="auto")
    return trainer


def theirs(**facts: Any) -> str:
    """The lock file of a process of another machine."""
    return json.dumps(
        {**runlock._own_record(), "token": "theirs", "boot": "another", "host": "far", "pid": 77, **facts}
    )


# ---- two jobs ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
def test_a_second_job_is_refused_with_the_name_of_the_first_and_changes_nothing() -> None:
    with job() as other:
        before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*") if path.name != LOCK_FILE}
        with pytest.raises(RunLockedError) as refused:
            fit()
        said = str(refused.value)
        assert f"process {other.pid} on {socket.gethostname()}" in said and "job.py" in said
        assert "run is in use" in said and "hookline control run stop" in said and "another run_dir" in said
        assert {
            path: path.stat().st_mtime_ns for path in Path("run").rglob("*") if path.name != LOCK_FILE
        } == before
        Path("go on").touch()
        assert other.stdout.readline() == "over\n" and other.wait(60) == 0
    assert not LOCK.exists()
    assert fit(max_epochs=2).global_step == 8, "and now it is free"


def test_a_job_that_is_just_ending_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlock, "WAITING", 200.0)
    with job() as other:
        threading.Timer(0.5, Path("go on").touch).start()
        assert fit(max_epochs=2).global_step == 8
        assert other.wait(60) == 0


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("forks", [False, True], ids=["alone", "a worker lives on"])
def test_a_job_that_was_killed_does_not_keep_the_directory(forks: bool) -> None:
    with job(forks) as other:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        if forks:
            os.kill(other.worker, 0)  # it is there
        assert LOCK.exists(), "nobody was there to remove it"
        assert fit().global_step == 4
    assert not LOCK.exists()


def test_of_jobs_that_start_in_the_same_instant_one_gets_the_directory(tmp_path: Path) -> None:
    rounds, racers = 20, 4
    script = tmp_path / "race.py"
    script.write_text(
        textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from hookline.run.lock import RunLock
        from hookline.util.errors import RunLockedError
        name, rounds, racers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        for number in range(rounds):
            Path(f"ready-{number}-{name}").touch()
            while len(list(Path().glob(f"ready-{number}-*"))) < racers:
                pass
            lock = RunLock(Path(f"raced-{number}"))
            try:
                lock.take(patience=0.0)
                Path(f"won-{number}-{name}").touch()
            except RunLockedError:
                Path(f"lost-{number}-{name}").touch()
            while len([*Path().glob(f"won-{number}-*"), *Path().glob(f"lost-{number}-*")]) < racers:
                time.sleep(0.001)
            lock.release()
    """)
    )
    started = [
        preloaded.Popen([sys.executable, script, str(name), str(rounds), str(racers)])
        for name in range(racers)
    ]
    assert [each.wait(100) for each in started] == [0] * racers
    assert [len(list(Path().glob(f"won-{number}-*"))) for number in range(rounds)] == [1] * rounds
    assert not list(Path().glob("raced-*/*")), (
        "and nothing is left in it; the directory itself may have been made by one that lost"
    )


# ---- in one process ----------------------------------------------------------------------------------------------


def test_a_fit_inside_a_fit_in_the_same_directory_is_refused() -> None:
    class Nested(Hook):
        def on_step_end(self) -> None:
            quiet(run_dir="./run").fit(Net(), batches())

    with pytest.raises(RunLockedError, match="another fit of this process"):
        quiet(run_dir="run", hooks=[Nested()]).fit(Net(), batches())
    quiet(run_dir="run").fit(Net(), batches())  # the one that failed has let go of it


def test_one_fit_after_the_other_whatever_became_of_the_first() -> None:
    class Fails(Hook):
        def on_step_end(self) -> None:
            raise ValueError("on purpose")

    class Told(Hook):
        def on_step_end(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    for hook, error in ((Fails(), ValueError), (Told(), SystemExit)):
        with pytest.raises(error):
            fit(hooks=[hook])
        assert not LOCK.exists()
    trainer = fit()
    trainer.fit(Net(), batches())
    assert fit().global_step == 4


def test_a_run_with_a_new_name_holds_one_too_and_leaves_nothing_of_it() -> None:
    seen: list[bool] = []

    class Looks(Hook):
        def on_train_end(self, trainer: Any) -> None:
            seen.append((trainer.run_dir / LOCK_FILE).is_file())

    trainer = quiet(hooks=[Looks()], logger=True)
    trainer.fit(Net(), batches())
    assert seen == [True] and not (trainer.run_dir / LOCK_FILE).exists()
    assert not [each for each in threading.enumerate() if each.name == "hookline lock"]


def test_a_run_that_writes_nothing_leaves_no_directory() -> None:
    quiet(run_dir="some/where/run").fit(Net(), batches())
    assert list(Path().iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_neither_holds_nor_releases_the_lock_of_its_parent() -> None:
    lock = RunLock(Path("run"))
    lock.take()
    child = os.fork()
    if child == 0:
        try:
            RunLock(Path("run")).take(patience=0.0)
        except RunLockedError:
            lock.release()
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert LOCK.exists()
    lock.release()


# ---- what it does not keep out -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
def test_who_only_reads_is_not_kept_out(capsys: pytest.CaptureFixture[str]) -> None:
    fit(max_epochs=1)
    lock = RunLock(Path("run"))
    lock.take()
    assert main(["checkpoint", "show", "run"]) == 0
    assert main(["checkpoint", "verify", "run"]) == 0
    assert main(["report", "run"]) == 0
    quiet(run_dir="run").validate(Net(), batches(), checkpoint="auto")
    assert quiet(run_dir="elsewhere", max_epochs=2).fit(Net(), batches(), resume="run") is not None
    lock.release()


@pytest.mark.usefixtures("impatient")
def test_a_checkpoint_that_is_saved_after_the_run_is_refused_if_another_job_is_there() -> None:
    trainer = fit()
    trainer.save_checkpoint()
    assert not LOCK.exists()
    with job(epochs=2):
        with pytest.raises(RunLockedError, match="run is in use"):
            trainer.save_checkpoint()
        trainer.save_checkpoint("elsewhere/c")
    assert Path("elsewhere", "c", "manifest.json").exists()


@pytest.mark.usefixtures("impatient")
def test_the_newest_of_many_runs_is_locked_before_it_continues(caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(hooks=[ModelCheckpoint()])
    trainer.fit(Net(), batches())
    run_dir = trainer.run_dir
    left = run_dir / "checkpoints" / ".last.00000000-1.new"
    left.mkdir()
    lock = RunLock(run_dir)
    lock.take()
    with pytest.raises(RunLockedError, match="in use"):
        quiet(max_epochs=2).fit(Net(), batches(), resume="auto")
    assert left.exists(), "what may be another job's is not put in order"
    lock.release()
    again = quiet(max_epochs=2)
    again.fit(Net(), batches(), resume="auto")
    assert again.run_dir == run_dir and again.global_step == 8 and not left.exists()


def test_what_a_killed_job_left_on_another_machine_is_put_in_order_at_once(tmp_path: Path) -> None:
    """Its process cannot be asked for, but nobody else can be in a directory whose lock is held."""
    fit()
    (kept,) = Path("run", "checkpoints").iterdir()
    kept.rename(
        kept.with_name(f".{kept.name}.0000abcd-{os.getpid()}.old")
    )  # killed between the two renames of a replacement
    assert fit(max_epochs=2).global_step == 8
    assert kept.exists() or len(list(Path("run", "checkpoints").iterdir())) == 1


# ---- other machines, and file systems without locks --------------------------------------------------------------


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch, impatient: None) -> None:
    """Seconds are tenths of seconds."""
    monkeypatch.setattr(runlock, "HEARTBEAT_TIMEOUT", 1.0)
    monkeypatch.setattr(runlock, "BEAT", 0.05)
    monkeypatch.setattr(runlock, "SETTLING", 0.5)


@pytest.fixture
def lockless(monkeypatch: pytest.MonkeyPatch, brisk: None) -> None:
    """As Lustre answers where it is mounted without locks."""

    def refuse(file: Any, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("brisk")
def test_a_job_of_another_machine_that_gives_signs_of_life_is_not_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runlock, "HEARTBEAT_TIMEOUT", 200.0)
    Path("run").mkdir()
    LOCK.write_text(theirs(command="python \x1b[31mfar.py"))
    over = threading.Event()

    def live() -> None:
        while not over.wait(0.05):
            os.utime(LOCK)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(RunLockedError) as refused:
            fit()
    finally:
        over.set()
        thread.join()
    assert "process 77 on far" in str(refused.value) and "\x1b" not in str(refused.value)
    assert f"delete {LOCK}" in str(refused.value), "what to do if that machine is gone"
    assert json.loads(LOCK.read_text())["token"] == "theirs", "and its file is as it was"


@pytest.mark.usefixtures("brisk")
def test_a_job_of_another_machine_that_gives_none_is_taken_over(caplog: pytest.LogCaptureFixture) -> None:
    Path("run").mkdir()
    LOCK.write_text(theirs())
    assert fit().global_step == 4
    assert "process 77 on far" in caplog.text and "Waiting up to" in caplog.text


def test_one_that_has_given_none_for_long_is_taken_over_at_once_by_the_clock_of_the_file_system(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Path("run").mkdir()
    LOCK.write_text(theirs())
    long_ago = time.time() - 3600
    os.utime(LOCK, (long_ago, long_ago))
    monkeypatch.setattr(time, "time", lambda: 0.0)  # this machine's clock has nothing to do with it
    assert fit().global_step == 4
    assert "Waiting" not in caplog.text


@pytest.mark.usefixtures("brisk")
@pytest.mark.parametrize("text", ["", "{", "[]", '{"token": 3}', "\0" * 100, '{"token": "x"}'])
def test_a_lock_file_without_a_process_keeps_no_run_out(text: str) -> None:
    Path("run").mkdir()
    LOCK.write_text(text)
    assert fit().global_step == 4


@pytest.mark.usefixtures("brisk")
def test_a_run_whose_directory_was_taken_over_nevertheless_ends() -> None:
    class Sleeps(Hook):
        def on_step_end(self, step: int, trainer: Any) -> None:
            if step == 1:
                LOCK.write_text(theirs())
                while not trainer._run.participants.commands.waiting:
                    time.sleep(0.01)

    with pytest.raises(RunLockedError, match=r"another job has taken over its directory.*process 77 on far"):
        quiet(run_dir="run", hooks=[Sleeps()], max_steps=1000, max_epochs=-1).fit(Net(), batches())
    assert json.loads(LOCK.read_text())["token"] == "theirs", "and its file is as it was"


@pytest.mark.usefixtures("lockless")
def test_a_file_system_without_locks_is_said_and_the_file_alone_keeps_others_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with job() as other:
        with pytest.raises(RunLockedError, match=f"process {other.pid} on "):
            fit()
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        assert fit().global_step == 4, "a process of this machine that is dead is known to be"
    assert "has no file locks" in caplog.text and not LOCK.exists()


@pytest.mark.usefixtures("lockless")
def test_a_process_number_that_was_used_again_is_not_the_job(caplog: pytest.LogCaptureFixture) -> None:
    Path("run").mkdir()
    here = {"boot": runlock._boot(), "host": socket.gethostname()}
    for pid in (os.getppid(), os.getpid()):  # there is a process of that number, started at another time
        LOCK.write_text(theirs(**here, pid=pid, started="1"))
        assert fit(max_epochs=1).global_step == 4
    assert "Waiting" not in caplog.text
    LOCK.write_text(theirs(**here, pid=os.getppid(), started=runlock._started(os.getppid())))
    with pytest.raises(RunLockedError, match=f"process {os.getppid()}"):
        fit()
    LOCK.write_text(theirs(**here, namespace="pid:[1]"))  # in another container: its number says nothing here
    assert fit().global_step == 4
    assert "Waiting" in caplog.text


@pytest.mark.usefixtures("lockless")
def test_without_locks_one_of_those_that_start_in_the_same_instant_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runlock, "SETTLING", 3.0)
    starting, outcomes = threading.Barrier(4), list[str]()

    def start(number: int) -> None:
        lock = RunLock(Path("run"))
        lock._real += str(number)  # as if each were a process of its own
        starting.wait()
        try:
            lock.take(patience=0.1)
            outcomes.append("won")
        except RunLockedError:
            outcomes.append("lost")

    threads = [threading.Thread(target=start, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(outcomes) == ["lost", "lost", "lost", "won"]
    for lock in list(runlock._held.values()):
        lock.release()


def test_a_directory_that_cannot_be_locked_is_said_and_the_run_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    LOCK.mkdir(parents=True)
    assert fit().global_step == 4
    assert "run cannot be locked: Is a directory. Make sure that no other job trains in it." in caplog.text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_a_pipe_of_its_name_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    LOCK.parent.mkdir()
    os.mkfifo(LOCK)
    assert fit().global_step == 4
    assert "run cannot be locked: run.lock in it is not a plain file." in caplog.text


# ---- what it says ------------------------------------------------------------------------------------------------


def test_secrets_of_the_command_line_are_not_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    line = [
        "python",
        "train.py",
        "--api-key",
        "abc",
        "--logger.token=def",
        "--url=https://user:ghi@host/?sig=jkl",
        "--lr",
        "0.1",
    ]
    monkeypatch.setattr(sys, "orig_argv", line)
    with runlock.hold_lock(Path("run")):
        assert json.loads(LOCK.read_text())["command"] == (
            "python train.py --api-key ... --logger.token=... --url=https://host/... --lr 0.1"
        )
    monkeypatch.setattr(sys, "orig_argv", ["python", "x" * 1000])
    with runlock.hold_lock(Path("run")):
        assert len(json.loads(LOCK.read_text())["command"]) < 300


def test_the_error_is_one_of_hooklines() -> None:
    assert issubclass(RunLockedError, HooklineError)
