"""The thread of a running fit that listens on the control socket. It sleeps until a request comes."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import queue
import select
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.control.client import SOCKET, is_same_user, listen
from hookline.control.commands import (
    COMMANDS,
    check_request,
    ended_answer,
    execute,
    job_status,
    saved_answer,
    validated_answer,
)
from hookline.run.commands import handles_command
from hookline.run.run import Run
from hookline.run.save_request import Saved
from hookline.util.errors import HookError
from hookline.util.processes import close_in_children, join

log = logging.getLogger("hookline")
LONGEST_REQUEST = 100_000
IDLE = 30.0
"""Seconds after which a silent connection is closed."""
LONGEST_TIMEOUT = 3600.0
LISTENER_TIMEOUT = 5.0
"""Seconds that the listening thread may take to end when the run ends."""
ANSWER_SEND_TIMEOUT = 1.0
"""Seconds that an answer may take to be sent when the run ends."""
TOO_LATE = {"error": "The run ended before it carried out the command."}

_answers: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
"""The queues of the threads that wait for an answer from the main thread, by the number of the request."""
_request_numbers = itertools.count()


@handles_command("control")
def do_control(run: Run, sender: int, number: str, asked: dict[str, Any]) -> None:
    """Execute a command on the main thread of every rank, and answer it on the rank that received it."""
    done = execute(run, asked)
    if run.state.rank != sender:
        return
    if "error" in done or COMMANDS[asked["command"]].answered == "at once":
        _answer(number, done)
    else:
        assert run.participants.control is not None
        run.participants.control.defer(number, done)


def _answer(number: str, answer: dict[str, Any]) -> None:
    """Send an answer to the thread that waits for it, if it still waits."""
    if (waiting := _answers.get(number)) is not None:
        waiting.put(answer)


class Control:
    """The control server of a fit, on rank zero. If the socket cannot be made, the run continues."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._listener: socket.socket | None = None
        self._waiting: set[str] = set()
        self._open: dict[threading.Thread, socket.socket] = {}
        self._deferred: dict[str, dict[str, Any]] = {}
        """Commands that were executed and are answered later, after a save, a validation or the end."""
        self._validated: tuple[int, Mapping[str, float] | None] = (-1, None)
        """The batches seen before the newest validation, and its metrics."""
        self._pid = os.getpid()

    def __enter__(self) -> Control:
        self.run.participants.control = self
        return self

    def open(self) -> None:
        """Start to listen, unless control=False or the run has no directory. It does not make one."""
        folder = self.run.directory.existing()
        if self.run.state.rank != 0 or folder is None or not self.run.options.control:
            return
        try:
            self._folder = folder
            self._listener = listen(folder)
            self._file = os.lstat(folder / SOCKET).st_ino
        except (OSError, AttributeError) as error:  # no AF_UNIX on this system
            log.debug("This run cannot be controlled from outside: %s", error)
            return
        self._wake, self._woken = socket.socketpair()
        close_in_children(self._listener, self._wake, self._woken)
        self._thread = threading.Thread(target=self._listen, name="hookline control", daemon=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        if self._listener is None or os.getpid() != self._pid:
            return
        self._remove(self._folder / SOCKET)
        # close() would not wake the thread while a forked process has a copy of the socket
        with contextlib.suppress(OSError):
            self._wake.shutdown(socket.SHUT_RDWR)
        if join(self._thread, LISTENER_TIMEOUT):
            for opened in (self._listener, self._wake, self._woken):
                opened.close()
        for number in list(self._waiting):
            _answer(number, self._last_answer(number))
        for thread, connection in list(self._open.items()):
            _hang_up(connection)
            join(thread, ANSWER_SEND_TIMEOUT, "the client gets no answer")

    def defer(self, number: str, done: dict[str, Any]) -> None:
        """Answer later: after the checkpoint is durable, or the run has ended."""
        self._deferred[number] = done

    def report_saved(self, saved: Saved) -> None:
        """Answer the requests for a checkpoint, after it is durable or failed to be written."""
        for number, done in list(self._deferred.items()):
            if (
                COMMANDS[done["command"]].answered == "saved"
                and saved.reason == "manual"
                and saved.step >= done["step"]
            ):
                del self._deferred[number]
                _answer(number, saved_answer(done, saved))

    def report_validated(self, metrics: Mapping[str, float] | None) -> None:
        """Answer the requests for a validation, and keep its metrics. None: there was no data."""
        s = self.run.state
        self._validated = (s.batches_seen, metrics)
        for number, done in list(self._deferred.items()):
            if COMMANDS[done["command"]].answered == "validated":
                del self._deferred[number]
                # a rollback may have come between the request and the validation
                _answer(number, validated_answer({**done, "step": s.step, "epoch": s.epoch}, metrics))

    def repeat_validated(self) -> bool:
        """Answer the requests for a validation with the newest metrics; return False if there are none."""
        seen, metrics = self._validated
        if metrics is None or seen != self.run.state.batches_seen:  # of steps that a rollback has undone
            return False
        self.report_validated(metrics)
        return True

    def _last_answer(self, number: str) -> dict[str, Any]:
        """Return the answer at the end of the run: for `stop` where it ended, for others an error."""
        done = self._deferred.pop(number, None)
        answered = COMMANDS[done["command"]].answered if done is not None else ""
        if done is not None and answered == "ended":
            return ended_answer(self.run, done)
        if answered == "validated" and self.run.state.status == "error":
            return {"error": "The run failed before the validation was over."}
        return TOO_LATE

    def _remove(self, path: Path) -> None:
        """Remove the socket, unless another job has replaced it."""
        with contextlib.suppress(OSError):  # the directory may be gone
            if os.lstat(path).st_ino == self._file:
                path.unlink()

    def _listen(self) -> None:
        assert self._listener is not None
        while True:
            ready, _, _ = select.select([self._listener, self._woken], [], [])
            if self._woken in ready:
                return
            try:
                connection, _ = self._listener.accept()
            except OSError:
                continue  # the client has disconnected
            close_in_children(connection)
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="hookline control answer", daemon=True
            )
            self._open[thread] = connection
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer every request, a line of JSON each, until the client disconnects."""
        try:
            with connection:
                connection.settimeout(IDLE)
                if not is_same_user(connection):
                    return
                lines = connection.makefile("rb")
                while line := lines.readline(LONGEST_REQUEST):
                    connection.sendall(json.dumps(self._answer(line)).encode() + b"\n")
        except OSError:
            pass  # the client has disconnected
        finally:
            self._open.pop(threading.current_thread(), None)

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            asked = json.loads(line)
            if not isinstance(asked, dict):
                raise HookError("A request is one JSON object in a line.")
            if asked.get("command") == "status":
                return job_status(self.run)
            return self._wait_for(check_request(self.run, asked), asked.get("patience"))
        except HookError as error:
            return {"error": str(error)}
        except Exception as error:  # otherwise the thread would die and the client would get no answer
            return {"error": f"{type(error).__name__}: {error}"}

    def _wait_for(self, asked: dict[str, Any], patience: Any) -> dict[str, Any]:
        """Have the command executed at the next boundary, and wait at most `patience` seconds for it."""
        seconds = min(float(patience), LONGEST_TIMEOUT) if isinstance(patience, int | float) else IDLE
        number = f"{self._pid}-{next(_request_numbers)}"
        answer = _answers[number] = queue.SimpleQueue()
        self._waiting.add(number)
        try:
            self.run.participants.commands.send("control", number=number, asked=asked)
            return answer.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return {"command": asked["command"], "waiting": True}
        finally:
            self._waiting.discard(number)
            del _answers[number]


def _hang_up(connection: socket.socket) -> None:
    """Stop receiving; an answer that is being sent still goes out."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RD)
