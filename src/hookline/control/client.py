"""The control socket in a run's directory, and the client that sends commands to a running job."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hookline.util.errors import HooklineError, OptionError, closest, folders_beside, folders_with

SOCKET = "control.sock"
LONGEST_PATH = 100
"""Bytes. The path of a socket may have 107 on Linux and 103 on macOS."""


@contextlib.contextmanager
def short_path(run_dir: Path) -> Iterator[str]:
    """Yield the socket's path; if it is too long, a path through `/proc/self/fd`, which works on Linux."""
    path = run_dir / SOCKET
    if len(os.fsencode(path)) <= LONGEST_PATH:
        yield str(path)
        return
    opened = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/{SOCKET}"
    finally:
        os.close(opened)


def listen(run_dir: Path) -> socket.socket:
    """Return a listening socket that only this user can open, or raise an OSError."""
    # in a directory that all users can write, another user could replace the socket
    if os.stat(run_dir).st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
        raise PermissionError(f"{run_dir} is writable by all users")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(run_dir) as path:
            _remove_stale(path)
            listener.bind(path)
            os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
        listener.listen(8)  # after chmod, so that no other user can connect in between
    except BaseException:
        listener.close()
        raise
    return listener


def connect(run_dir: Path, seconds: float) -> socket.socket:
    """Connect to the job that trains in this directory."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(seconds)
    try:
        with short_path(run_dir) as path:
            connection.connect(path)
        if not is_same_user(connection):
            raise PermissionError("it belongs to another user")
    except BaseException:
        connection.close()
        raise
    return connection


def is_answered(run_dir: Path) -> bool | None:
    """Return whether a job of this user listens here; None if that is not known.

    False: a job was killed and left its socket, or it runs on another machine.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(run_dir / SOCKET).st_mode):
            return None
        connect(run_dir, 1.0).close()
        return True
    except ConnectionRefusedError:
        return False
    except (OSError, AttributeError):  # no socket, another user's socket, or a system without AF_UNIX
        return None


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as this user.

    The file's mode ensures it too, but a file can be replaced.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True  # this system cannot say; the file's mode decides
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return bool(user == os.geteuid())


def _remove_stale(path: str) -> None:
    """Remove the socket of a job that was killed; raise if a running job answers."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(f"{SOCKET} exists and is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise FileExistsError("another job is running in this directory")


# ---- The client


COMMAND_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "status": (),
    "enable": ("hook",),
    "disable": ("hook",),
    "every": ("hook", "interval"),
    "checkpoint": (),
    "stop": (),
    "attach": ("file", "name"),
    "detach": ("hook",),
    "validate": (),
    "lr": ("value", "group"),
}
"""The commands of a job, and the arguments of each."""
OPTIONAL_ARGUMENTS = ("name", "group")
"""Arguments that may be left out: the name of an attached hook, and the parameter group of a rate."""
ANSWER_TIMEOUT = 60.0
"""Seconds to wait for an answer, because a step, a validation or a save must end first."""
LONGEST_ANSWER = 16_000_000


class NotRunning(HooklineError):
    """No job trains in this directory on this machine."""


class Refused(HooklineError):
    """The job refused the command."""


def ask(
    run_dir: Path | str, command: str, *, patience: float = ANSWER_TIMEOUT, **given: Any
) -> dict[str, Any]:
    """Send a command to the job that trains in this directory and return its answer.

    Raise `Refused` if the job refuses it, and `NotRunning` if there is no job.

    run_dir: the directory that the job writes into. command: an action of `hookline control`, such as
    'status'. patience: seconds to wait for the answer. given: the arguments of the action.
    """
    path = Path(run_dir)
    check_directory(path)
    request = json.dumps({"command": command, "patience": patience, **given}) + "\n"
    try:
        # a job answers within `patience`, unless it is suspended or swapped out
        with connect(path, patience + 10.0) as connection:
            connection.sendall(request.encode())
            line = connection.makefile("rb").readline(LONGEST_ANSWER)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NotRunning(_no_server(path, error)) from None
    except PermissionError as error:
        raise Refused(
            f"{path / SOCKET} cannot be opened: {error.strerror or error}. Only the user who runs the job "
            "can open it."
        ) from None
    except TimeoutError:
        raise Refused(f"The job in {path} accepts connections but does not answer.") from None
    except OSError as error:
        raise NotRunning(f"The job in {path} cannot be reached: {error.strerror or error}.") from None
    if not line.endswith(b"\n"):
        raise NotRunning(f"The job in {path} ended before it answered.")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise Refused(str(answer["error"]))
    return answer


def check_directory(path: Path) -> None:
    """Raise if the path is not a directory, and suggest the nearest name."""
    if not path.exists():
        raise OptionError(f"{path} does not exist.{closest(path.name, folders_beside(path))}")
    if not path.is_dir():
        raise OptionError(f"{path} is a file; give the directory of a run, such as {path.parent}.")


def _no_server(path: Path, error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return (
            f"No job answers in {path}: it was killed, or it runs on another machine. "
            "Run this command on the machine of rank zero."
        )
    below = folders_with(path, SOCKET)
    hint = f" Running jobs below it: {', '.join(below)}." if below else ""
    return f"No job is training in {path}, or it runs with control=False: there is no {SOCKET}.{hint}"
