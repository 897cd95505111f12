"""The lock of a run's directory: only one job at a time writes into it.

The lock is the operating system's lock (flock) on the file `run.lock`. It ends with the process, also when
the process is killed. Most shared file systems apply it across machines. Some apply it on one machine only,
or have no locks. So the file also names its owner, and the owner updates its time every few seconds. A file
of a process on another machine counts as locked while its time changes. This compares neither the clocks of
two machines nor process ids of another machine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shlex
import socket
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from hookline.util.errors import RunLockedError
from hookline.util.processes import close_in_children, join
from hookline.util.text import command_line, printable

if sys.platform != "win32":
    import fcntl

log = logging.getLogger("hookline")
LOCK_FILE = "run.lock"
WAITING = 5.0
"""Seconds to wait for a job that is ending."""
BEAT = 5.0
"""Seconds between two heartbeats: updates of the file's time."""
HEARTBEAT_TIMEOUT = 30.0
"""Seconds without a heartbeat after which an owner on another machine counts as dead."""
SETTLING = 2.0
"""Seconds to wait, without file locks, for other jobs to write their name; the last name has the lock."""
LOCK_BYTES = 10_000
"""The largest number of bytes to read from a lock file."""
MOST_CHARACTERS = 200
"""Characters of a command line that are shown."""
LockOwner = dict[str, Any]

_held: dict[str, RunLock] = {}
"""The locks of this process, by the real path of the directory."""
_changing = threading.Lock()


def _forget() -> None:
    """Clear the locks in a forked child, because they belong to its parent."""
    global _changing
    _held.clear()
    _changing = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class RunLock:
    """The lock of one directory, held from `take` until `release` or the end of the process."""

    def __init__(self, folder: Path, on_lost: Callable[[str], None] | None = None) -> None:
        """Prepare the lock. on_lost: called from a thread if another job takes the directory."""
        self.folder = folder
        self.is_held = False
        """False also if the directory cannot be locked and the run continues without a lock."""
        self._path = folder / LOCK_FILE
        self._real = os.path.realpath(folder)
        self._on_lost = on_lost
        self._file: Any = None
        self._made: list[Path] = []
        self._pid = os.getpid()
        self._record: LockOwner = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def made_folder(self) -> bool:
        """Whether this lock created the directory."""
        return self.folder in self._made

    # ---- take ----------------------------------------------------------------------------------------------

    def take(self, patience: float | None = None) -> None:
        """Take the lock and create the directory if it is missing. A `RunLockedError` names the owner.

        patience: seconds to wait for a job that is ending, by default `WAITING`. 0: also do not wait for a
        heartbeat from another machine.
        """
        with _changing:
            if self._real in _held:
                raise RunLockedError(_in_use_message(self.folder, _held[self._real]._record))
            _held[self._real] = self
        try:
            self._record = _own_record()
            self._take(WAITING if patience is None else patience)
        except OSError as error:
            self.release()
            log.warning(
                "The directory %s cannot be locked: %s. Make sure that no other job trains in it.",
                self.folder,
                error.strerror or error,
            )
        except BaseException:
            self.release()
            raise

    def _take(self, patience: float) -> None:
        until = time.monotonic() + patience
        while True:
            self._make_folder()
            try:
                file = _open_lock_file(self._path)
            except FileNotFoundError:  # the last owner has just removed the directory
                continue
            try:
                has_locks = _lock(file)
                other = _read_owner(self._path)
                if other is not None and _is_alive(other, has_locks, self._path, patience):
                    raise RunLockedError(_in_use_message(self.folder, other))
                if _is_same(file, self._path):  # else the last owner has just removed the file
                    break
                file.close()
            except BlockingIOError:
                file.close()
                if time.monotonic() > until:
                    raise RunLockedError(
                        _in_use_message(self.folder, _read_owner(self._path) or {})
                    ) from None
                time.sleep(0.05)
            except BaseException:
                file.close()
                raise
        close_in_children(file)
        self._file, self.is_held = file, True
        self._write_owner(has_locks)
        self._thread = threading.Thread(target=self._beat, name="hookline lock", daemon=True)
        self._thread.start()

    def _make_folder(self) -> None:
        missing = [each for each in (self.folder, *self.folder.parents) if not each.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._made = self._made or missing

    def _write_owner(self, has_locks: bool) -> None:
        """Write the owner into the file. Without file locks, the last job that writes has the lock."""
        data = json.dumps(self._record, indent=1).encode()
        try:
            self._file.truncate(0)
            self._file.seek(0)
            self._file.write(data)
        except OSError as error:  # a full disk; the lock is held nevertheless
            if not has_locks:
                raise
            log.debug("%s does not name its owner: %s", self._path, error)
        if has_locks:
            return
        log.warning(
            "The file system of %s has no file locks. Only the file %s keeps other jobs out of this "
            "directory; the check takes %g s.",
            self.folder,
            LOCK_FILE,
            SETTLING,
        )
        os.fsync(self._file.fileno())
        time.sleep(SETTLING)
        other = _read_owner(self._path) or {}
        if other.get("token") != self._record["token"]:
            raise RunLockedError(_in_use_message(self.folder, other))

    # ---- hold and release ----------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Update the file's time, and check the owner: a suspended machine may have lost the lock."""
        while not self._over.wait(BEAT):
            with contextlib.suppress(OSError):
                other = _read_owner(self._path)
                if other is None:
                    continue  # removed by hand, or the disk does not respond
                if other["token"] != self._record["token"]:
                    if self._on_lost is not None:
                        self._on_lost(_in_use_message(self.folder, other))
                    return
                os.utime(self._path)

    def release(self) -> None:
        """Release the lock. Remove the file, and the directories that `take` created if they are empty."""
        if os.getpid() != self._pid:
            return  # a forked child has closed its copies already
        self._over.set()
        if self._thread is not None:
            join(self._thread, 1.0)
            self._thread = None
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                if self.is_held and (_read_owner(self._path) or {}).get("token") == self._record["token"]:
                    self._path.unlink()
            file.close()
        with contextlib.suppress(OSError):
            for directory in self._made:
                directory.rmdir()
        self.is_held = False
        with _changing:
            if _held.get(self._real) is self:
                del _held[self._real]


@contextlib.contextmanager
def hold_lock(folder: Path) -> Iterator[RunLock]:
    """Hold a directory's lock inside the `with`, without waiting for it."""
    lock = RunLock(folder)
    lock.take(patience=0.0)
    try:
        yield lock
    finally:
        lock.release()


def is_running(folder: Path) -> bool | None:
    """Return whether a job trains in a directory; False if it was killed, None if that is not known.

    It locks and writes nothing. A job of this machine is found by its process. A job of another machine runs
    if its last heartbeat is recent by this machine's clock; otherwise it was killed, or the clocks differ.
    """
    path = folder / LOCK_FILE
    try:
        about = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(about.st_mode):
        return None
    record = _read_owner(path) or {}
    is_here = record.get("boot") == _boot()
    if is_here and record.get("namespace") == _namespace() != "":
        return _started(record.get("pid")) == record.get("started") != ""
    if time.time() - about.st_mtime < 3 * HEARTBEAT_TIMEOUT:
        return True
    return False if is_here else None


# ---- the file ----------------------------------------------------------------------------------------------


def _open_lock_file(path: Path) -> Any:
    """Open the file unbuffered. Child programs do not inherit it, and links are not followed."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    number = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path.name} in it is not a plain file")  # reading a pipe would wait for ever
    return os.fdopen(number, "r+b", buffering=0)


def _lock(file: Any) -> bool:
    """Take the system's lock; raise BlockingIOError if another process has it. False: no locks here."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # ENOSYS, EOPNOTSUPP, ENOLCK and others, depending on the file system
        return False
    return True


def _is_same(file: Any, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _read_owner(path: Path) -> LockOwner | None:
    """Return the owner from the file. A new open makes a network file system show changes of others."""
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(LOCK_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("token"), str) else None


def _stamp(path: Path) -> tuple[Any, ...] | None:
    """Return what every heartbeat changes; None if the file is gone."""
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            return about.st_ino, about.st_mtime_ns, file.read(LOCK_BYTES)
    except OSError:
        return None


# ---- the owner ---------------------------------------------------------------------------------------------


def _own_record() -> LockOwner:
    return {
        "token": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "boot": _boot(),
        "namespace": _namespace(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command_line(sys.orig_argv, MOST_CHARACTERS),
    }


def _is_alive(record: LockOwner, has_locks: bool, path: Path, patience: float) -> bool:
    """Return whether the owner may still be running, although the system's lock is free or missing."""
    if record.get("boot") == _boot():
        if record.get("namespace") == _namespace() != "":
            if record.get("pid") == os.getpid() or _started(record.get("pid")) != record.get("started"):
                return False
            if not has_locks:
                return True
        elif has_locks:
            return False  # in another container of this machine, whose lock would be visible
    return _has_heartbeat(path, record, patience)


def _has_heartbeat(path: Path, record: LockOwner, patience: float) -> bool:
    before = _stamp(path)
    if before is None or _seconds_since_heartbeat(path, before[1]) > 3 * HEARTBEAT_TIMEOUT:
        return False
    if not patience:
        return True
    log.warning(
        "%s: %s may still be running. Waiting up to %g s for a heartbeat.",
        path.parent,
        _describe_owner(record),
        HEARTBEAT_TIMEOUT,
    )
    until = time.monotonic() + HEARTBEAT_TIMEOUT
    while time.monotonic() < until:
        time.sleep(min(0.5, HEARTBEAT_TIMEOUT / 10))
        now = _stamp(path)
        if now != before:
            return now is not None
    return False


def _seconds_since_heartbeat(path: Path, changed: int) -> float:
    """Return the seconds since the last heartbeat, by the clock of the file system, which set both times."""
    probe = path.with_name(f".{LOCK_FILE}.{uuid.uuid4().hex}")
    try:
        file = _open_lock_file(probe)
        now = os.fstat(file.fileno()).st_mtime_ns
        file.close()
        probe.unlink()
    except OSError:
        return 0.0
    return (now - changed) / 1e9


@functools.cache
def _boot() -> str:
    """Return the boot id or network card of this system, because host names need not be unique."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}-{uuid.getnode():x}"


def _namespace() -> str:
    """Return the namespace of process ids; empty if it is not known."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: Any) -> str:
    """Return when a process started, in ticks since boot; empty if there is no such process.

    It distinguishes a process from a later one with the same id.
    """
    try:
        fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError, TypeError):
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


# ---- messages ----------------------------------------------------------------------------------------------


def _in_use_message(folder: Path, record: LockOwner) -> str:
    if not record:
        who, stop = "another job", "stop it"
    elif (
        record["pid"] == os.getpid()
        and record.get("boot") == _boot()
        and record.get("namespace") == _namespace()
    ):
        who, stop = f"another fit of this process, {_describe_owner(record)},", "let that fit end first"
    else:
        who, where = (
            _describe_owner(record),
            f"kill {_field_text(record, 'pid')} on {_field_text(record, 'host')}",
        )
        stop = f"stop it (`hookline control {shlex.quote(str(folder))} stop`, or {where})"
    gone = (
        ""
        if not record or record.get("boot") == _boot()
        else (f" If that machine is gone and its lock remains, delete {folder / LOCK_FILE}.")
    )
    return (
        f"{folder} is in use: {who} trains in it. Two jobs in one directory would overwrite each other's "
        f"checkpoints. Wait until it has ended, {stop}, or give this job another run_dir.{gone}"
    )


def _describe_owner(record: LockOwner) -> str:
    pid, host, since, command = (_field_text(record, name) for name in ("pid", "host", "since", "command"))
    return f"process {pid} on {host} (since {since}: {command})"


def _field_text(record: LockOwner, name: str) -> str:
    """Return a field with only printable characters, because any user may have written the file."""
    return printable(str(record.get(name, "?"))[: MOST_CHARACTERS + 1])
