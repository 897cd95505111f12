"""The socket in a run's directory: who can use it, when it is there, and that it never stands in the way of a run."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from control.asking import Counts, Steps, asked
from tiny import Net, batches, quiet

from hookline.control.client import SOCKET, NotRunning, Refused, ask, connect, listen
from hookline.util.errors import HookError, OptionError


def talk(*lines: bytes, run: str = "run") -> list[dict[str, Any]]:
    """Say these lines and hear what is answered to each."""
    with connect(Path(run), 20.0) as connection:
        heard = connection.makefile("rb")
        answers = []
        for each in lines:
            connection.sendall(each)
            answers.append(json.loads(heard.readline()))
        return answers


def test_the_socket_is_this_users_alone_and_gone_when_the_run_is_over() -> None:
    seen: list[int] = []
    asked(lambda: seen.append(os.lstat(f"run/{SOCKET}").st_mode))
    assert stat.S_ISSOCK(seen[0]) and stat.S_IMODE(seen[0]) == 0o600
    assert not Path("run", SOCKET).exists()
    with pytest.raises(NotRunning, match=r"No job is training in run, .*there is no control\.sock"):
        ask("run", "status")


def test_the_socket_is_gone_after_a_run_that_failed() -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert Path("run", SOCKET).exists()
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        quiet(run_dir="run", logger=True).fit(Fails(), batches())
    assert not Path("run", SOCKET).exists()
    assert not [each for each in threading.enumerate() if each.name.startswith("hookline control")]


def test_a_run_without_a_directory_makes_none_to_be_controlled() -> None:
    quiet().fit(Net(), batches())
    assert list(Path().iterdir()) == []


def test_a_run_that_fails_before_it_begins_leaves_no_directory() -> None:
    class Wrong(Net):
        def on_trian_start(self) -> None: ...

    with pytest.raises(HookError, match="on_train_start"):
        quiet(logger=True).fit(Wrong(), batches())
    assert list(Path().iterdir()) == []


def test_until_a_client_connects_one_thread_sleeps_without_a_timeout() -> None:
    def where() -> list[str]:
        threads = [each for each in threading.enumerate() if each.name.startswith("hookline control")]
        frames = sys._current_frames()
        return [frames[each.ident].f_code.co_name for each in threads if each.ident is not None]

    def there() -> list[str]:
        end = time.monotonic() + 60
        while where() != ["_listen"] and time.monotonic() < end:  # it may only just have been started
            time.sleep(0.01)
        return where()

    answers, _ = asked(there, Steps(12), where)
    assert answers[0] == answers[2] == ["_listen"]


def test_a_path_that_is_too_long_for_a_socket_works_all_the_same() -> None:
    deep = Path("a" * 90, "b" * 90, "run")
    deep.parent.mkdir(parents=True)
    assert len(os.fsencode(deep / SOCKET)) > 108
    answers, _ = asked(("disable", {"hook": "counts"}), hooks=[Counts()], run_dir=str(deep))
    assert answers[0]["hook"] == "counts"


def test_what_a_killed_job_has_left_is_replaced_and_who_asks_before_that_is_told() -> None:
    Path("run").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(f"run/{SOCKET}")
    with pytest.raises(NotRunning, match="was killed, or it runs on another machine"):
        ask("run", "status")
    answers, _ = asked(("status", {}))
    assert answers[0]["pid"] == os.getpid()


def test_a_second_job_in_a_directory_leaves_the_first_ones_socket_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Path("run").mkdir()
    with listen(Path("run")) as first, caplog.at_level(logging.DEBUG, "hookline"):
        quiet(run_dir="run", logger=True).fit(Net(), batches())
        assert Path("run", SOCKET).exists() and first.fileno() >= 0
    assert "cannot be controlled from outside: another job is running in this directory" in caplog.text


@pytest.mark.parametrize(
    "what", ["everybody can write there", "something else has the name", "no sockets here"]
)
def test_where_no_socket_can_be_made_a_run_continues_with_one_quiet_line(
    what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run").mkdir()
    if what == "everybody can write there":
        Path("run").chmod(0o777)
    elif what == "something else has the name":
        Path("run", SOCKET).write_text("mine")
    else:  # a file system that has none, which a test cannot mount

        def refuse(self: socket.socket, address: Any) -> None:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(socket.socket, "bind", refuse)
    with caplog.at_level(logging.DEBUG, "hookline"):
        trainer = quiet(run_dir="run", logger=True)
        trainer.fit(Net(), batches())
    assert trainer.status == "completed"
    said = [each for each in caplog.records if "controlled" in each.message]
    assert [each.levelname for each in said] == ["DEBUG"]
    assert what != "something else has the name" or Path("run", SOCKET).read_text() == "mine"


def test_whatever_is_said_on_the_socket_is_answered_in_words() -> None:
    answers, trainer = asked(
        lambda: talk(
            b"hello\n",
            b"[1]\n",
            b'{"command": 3}\n',
            b'{"command": "every", "hook": "asks", "interval": [1]}\n',
            b'{"command": "status"}\n',
            b"{" * 200_000 + b"\n",
        )
    )
    told = answers[0]
    assert all("error" in each for each in (*told[:4], told[5])) and told[4]["status"] == "training"
    assert "one JSON object in a line" in told[1]["error"] and trainer.status == "stopped"


def test_who_has_no_patience_is_told_that_it_will_be_done() -> None:
    answers, _ = asked(
        ("disable", {"hook": "counts", "patience": 0.0}), Steps(12), ("status", {}), hooks=[Counts()]
    )
    told = {each["name"]: each["enabled"] for each in answers[2]["hooks"]}
    assert told["counts"] is False and (answers[0].get("waiting") or answers[0]["hook"] == "counts")


def test_what_comes_too_late_is_answered_and_not_left_waiting() -> None:
    answers: list[Any] = []

    class Late(Net):
        def on_train_end(self) -> None:
            def last() -> None:
                try:
                    answers.append(ask("run", "stop"))
                except Refused as error:
                    answers.append(error)

            self.thread = threading.Thread(target=last)
            self.thread.start()
            time.sleep(0.2)

    module = Late()
    quiet(run_dir="run", logger=True).fit(module, batches())
    module.thread.join(60)
    assert len(answers) == 1 and (isinstance(answers[0], Refused) or answers[0]["command"] == "stop")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("opened_up", [False, True])
def test_another_user_cannot_ask_not_even_if_the_file_lets_them(opened_up: bool) -> None:
    folder = Path(
        f"/tmp/hookline-control-{os.getpid()}-{opened_up}"
    )  # which, unlike the tests' own, others can look into
    folder.mkdir(mode=0o755)

    def as_somebody_else() -> int:
        if opened_up:
            os.chmod(folder / SOCKET, 0o666)
        child = os.fork()
        if child == 0:
            code = 9
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                    other.settimeout(10)
                    other.connect(str(folder / SOCKET))
                    other.sendall(b'{"command": "stop"}\n')
                    code = 1 if other.recv(100) else 2  # 2: hung up on
            except PermissionError:
                code = 3
            except ConnectionError:
                code = 2
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    try:
        answers, trainer = asked(as_somebody_else, run_dir=str(folder))
    finally:
        for each in sorted(folder.rglob("*"), reverse=True):
            each.unlink() if not each.is_dir() else each.rmdir()
        folder.rmdir()
    assert answers == [2 if opened_up else 3]
    assert trainer.state.stop_reason == "all was asked"


def test_a_directory_that_is_none_is_named_with_what_may_be_meant() -> None:
    Path("runs").mkdir()
    Path("runs/first").mkdir()
    Path("file").write_text("")
    with pytest.raises(OptionError, match="Did you mean 'first'"):
        ask("runs/frst", "status")
    with pytest.raises(OptionError, match="is a file"):
        ask("file", "status")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(f"runs/first/{SOCKET}")
        with pytest.raises(NotRunning, match="Running jobs below it: runs/first"):
            ask("runs", "status")


def test_a_run_can_be_told_not_to_listen() -> None:
    answers, trainer = asked(lambda: Path("run/control.sock").exists(), ("status", {}), control=False)
    assert answers[0] is False and isinstance(answers[1], NotRunning) and "control=False" in str(answers[1])
