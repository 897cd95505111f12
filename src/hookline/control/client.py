"""The socket in a run's directory: where it is, who may use it, and paths that are too long for a socket."""

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

from hookline.util.errors import HooklineError, OptionError, closest

SOCKET = "control.sock"
LONGEST_PATH = 100
"""Bytes: Linux has room for 107 in the name of a socket, macOS for 103."""


@contextlib.contextmanager
def short_path(run_dir: Path) -> Iterator[str]:
    """The socket's path, short enough for the system: if need be by way of the open directory, as Linux
    allows.
    """
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
    """A socket that only this user can open; an OSError says why there can be none."""
    if os.stat(run_dir).st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
        raise PermissionError(
            f"{run_dir} can be written by everybody"
        )  # who could put a socket of their own in its place
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(run_dir) as path:
            _remove_stale(path)
            listener.bind(path)
            os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
        listener.listen(8)  # not before its mode is set: until now everybody was turned away
    except BaseException:
        listener.close()
        raise
    return listener


def connect(run_dir: Path, seconds: float) -> socket.socket:
    """A connection to the job that trains in this directory."""
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
    """Whether a job of this user's listens here. False: one has left its socket, or is on another machine;
    None: not known.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(run_dir / SOCKET).st_mode):
            return None
        connect(run_dir, 1.0).close()
        return True
    except ConnectionRefusedError:
        return False
    except (
        OSError,
        AttributeError,
    ):  # there is none, it is another user's, or the system knows no such sockets
        return None


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user; the file's mode says so too, but a file can be
    replaced.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True  # no such question on this system: the file's mode alone decides
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return bool(user == os.geteuid())


def _remove_stale(path: str) -> None:
    """A job that was killed has left its socket; one that answers is somebody's, and stays."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(f"{SOCKET} is there and is no socket")
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


# ---- From a shell or a page to a running job


ANSWER_TIMEOUT = 60.0
"""Seconds to wait for an answer: a step, a validation or a save may be going on."""
LONGEST_ANSWER = 16_000_000


class NotRunning(HooklineError):
    """Nobody trains in this directory, or not on this machine."""


class Refused(HooklineError):
    """The job did not do what it was asked."""


def ask(
    run_dir: Path | str, command: str, *, patience: float = ANSWER_TIMEOUT, **given: Any
) -> dict[str, Any]:
    """What the job that trains in this directory answers; `Refused` if it says no, `NotRunning` if there is
    none.
    """
    path = Path(run_dir)
    check_directory(path)
    request = json.dumps({"command": command, "patience": patience, **given}) + "\n"
    try:
        # the job answers within `patience`; only one that is stopped or swapped out does not
        with connect(path, patience + 10.0) as connection:
            connection.sendall(request.encode())
            line = connection.makefile("rb").readline(LONGEST_ANSWER)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NotRunning(_no_server(path, error)) from None
    except PermissionError as error:
        raise Refused(
            f"{path / SOCKET} cannot be opened: {error.strerror or error}. Only the user who trains can."
        ) from None
    except TimeoutError:
        raise Refused(f"The job in {path} takes connections but does not answer.") from None
    except OSError as error:
        raise NotRunning(f"The job in {path} cannot be reached: {error.strerror or error}.") from None
    if not line.endswith(b"\n"):
        raise NotRunning(f"The job in {path} ended before it answered.")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise Refused(str(answer["error"]))
    return answer


def check_directory(path: Path) -> None:
    """Refuse what cannot be a run's directory, and say what may have been meant."""
    if not path.exists():
        near = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
        raise OptionError(f"{path} does not exist.{closest(path.name, near)}")
    if not path.is_dir():
        raise OptionError(f"{path} is a file; give the directory of a run, such as {path.parent}.")


def _no_server(path: Path, error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return (
            f"Nobody answers in {path}: the job was killed, or it runs on another machine. "
            "Ask on the machine that rank zero trains on."
        )
    below = sorted(
        str(each.parent) for pattern in (f"*/{SOCKET}", f"*/*/{SOCKET}") for each in path.glob(pattern)
    )
    hint = f" Below it there are: {', '.join(below[-5:])}." if below else ""
    return (
        f"No job is training in {path}, or it was told not to listen (control=False): there is no "
        f"{SOCKET}.{hint}"
    )
