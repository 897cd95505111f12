"""Child processes of the training: forked from a process that has torch already, or really fresh ones."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training import NOTES, OUTPUT, PHASE, PHASES, RESULT, Settings, prepare, train

LONGEST = 60.0
"""Seconds after which a child counts as hung."""


class Hung(Exception):
    """A child that did not end."""


class Child:
    """One process of a training, in a process group of its own, so that its workers can be
    reached with it.
    """

    def __init__(
        self, folder: Path, settings: Settings, *, body: Callable[[], Any] | None = None, fresh: bool = False
    ) -> None:
        """`body` replaces the training in a forked child."""
        self.folder = prepare(folder)
        self.output = folder / OUTPUT
        with self.output.open("ab") as output:
            if fresh:
                # it has a session of its own, and only `wait` waits for it: its id is all that is needed
                command = [sys.executable, str(Path(__file__).with_name("training.py")), str(folder)]
                self.pid = subprocess.Popen(
                    [*command, json.dumps(dataclasses.asdict(settings))],
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                ).pid
            else:
                self.pid = os.fork()
                if self.pid == 0:
                    become_child(output.fileno(), body or (lambda: train(folder, settings)))
        self.code: int | None = None

    @property
    def phase(self) -> tuple[str, int]:
        """Return the phase that the training has announced, and how many phases it has entered."""
        place, count = (self.folder / PHASE).read_bytes()[:2]
        return PHASES[place], count

    def kill(self, number: int = signal.SIGKILL, group: bool = False) -> None:
        """Send a signal, to its workers too if asked to; one that has ended already does not mind."""
        if self.is_over():
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number) if group else os.kill(self.pid, number)

    def is_over(self) -> bool:
        """Return whether it has ended; then `code` is its exit code, negative if a signal ended it."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait(self, seconds: float = LONGEST) -> int:
        """Wait for the end and return the exit code; end workers that are left."""
        until = time.monotonic() + seconds
        while not self.is_over():
            if time.monotonic() > until:
                self.kill(signal.SIGKILL, group=True)
                os.waitpid(self.pid, 0)
                raise Hung(f"a child did not end in {seconds:g} s, in phase {self.phase[0]}")
            time.sleep(0.002)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        assert self.code is not None
        return self.code

    @property
    def result(self) -> dict[str, Any] | None:
        """Return the result of the training, or None if it did not reach its end."""
        path = self.folder / RESULT
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return found

    @property
    def said(self) -> str:
        """Return what it and earlier processes in this folder have printed."""
        return self.output.read_text(errors="replace")


def become_child(output: int, body: Callable[[], Any]) -> None:
    """Behave as a program of its own in the forked process, and exit as Python would, without the parent's
    clean-up.
    """
    code = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        body()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def notes(folder: Path) -> list[list[str]]:
    """Return what the runs in a folder have announced, in order: `saved STEP NAME`, `resumed STEP NAME`."""
    path = folder / NOTES
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def lost_steps(folder: Path) -> str:
    """Return an empty string if every resume began at the newest checkpoint announced before it, else the
    first that did not.
    """
    newest = 0
    for kind, step, name in notes(folder):
        if kind == "resumed" and int(step) < newest:
            return f"resumed at step {step} ({name}), though step {newest} had been announced as durable"
        newest = int(step) if kind == "resumed" else max(newest, int(step))
    return ""
