"""The file-system calls of a save: written down, or ended by SIGKILL at the n-th of them.

Python's own functions are replaced in the process that trains, so no privileges and no other program are
needed.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hookline.checkpoint import writer

Call = tuple[str, str]
"""What was called, and on which path below the watched folder."""
BY_PATH = ("mkdir", "unlink", "remove", "rmdir", "truncate", "symlink", "link", "rename", "replace", "open")
BY_NUMBER = ("write", "fsync", "fdatasync", "ftruncate")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Calls:
    """Watches the calls below a folder from `install` on."""

    def __init__(self, folder: Path, kill_at: int = -1, torn: bool = False, log: Path | None = None) -> None:
        """`kill_at` counts from 0; `torn` lets half of a write get to the disk before the kill."""
        self.folder = os.path.realpath(folder)
        self.kill_at, self.torn = kill_at, torn
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if log is not None else -1
        self.count = 0
        self._lock = threading.Lock()
        self._real_write = os.write

    def install(self) -> None:
        """Replace the functions for the rest of the process."""
        for name in BY_PATH:
            setattr(os, name, self._by_path(name, getattr(os, name)))
        for name in BY_NUMBER:
            setattr(os, name, self._by_number(name, getattr(os, name)))
        builtins.open = io.open = self._open(io.open)
        writer.exchange = self._exchange(writer.exchange)

    def on_call(self, name: str, path: str, half: Callable[[], Any] | None = None) -> None:
        """Record a call that is about to be made, and end the process at the chosen one."""
        if not path.startswith(self.folder):
            return
        with self._lock:
            number, self.count = self.count, self.count + 1
            if self.log >= 0:
                self._real_write(self.log, f"{name}\t{os.path.relpath(path, self.folder)}\n".encode())
            if number == self.kill_at:
                if self.torn and half is not None:
                    half()
                os.kill(os.getpid(), signal.SIGKILL)

    def _by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *arguments: Any, **named: Any) -> Any:
            reading = name == "open" and not (arguments[0] if arguments else named.get("flags", 0)) & WRITING
            if not isinstance(path, int) and not reading:
                # what counts for a rename is the new name
                folder = named.get("src_dir_fd", named.get("dir_fd"))
                shown = (
                    arguments[0] if name in ("rename", "replace", "link", "symlink") and arguments else path
                )
                self.on_call(name, _whole_path(shown, folder))
            return real(path, *arguments, **named)

        return called

    def _exchange(self, real: Callable[..., bool]) -> Callable[..., bool]:
        """Record that a new checkpoint replaces an old one in one call, which is not one of Python's own
        functions.
        """

        def called(aside: Path, path: Path) -> bool:
            self.on_call("exchange", os.path.abspath(path))
            return real(aside, path)

        return called

    def _by_number(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(number: Any, *arguments: Any) -> Any:
            handle = number if isinstance(number, int) else number.fileno()
            half = functools.partial(real, handle, _half(arguments[0])) if name == "write" else None
            self.on_call(name, _path_of(handle), half)
            return real(number, *arguments)

        return called

    def _open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Give files that Python opens for writing a raw file that records its writes."""
        calls = self

        class Raw(io.FileIO):
            def write(self, data: Any, /) -> int | None:  # type: ignore[override]
                calls.on_call("write", _path_of(self.fileno()), functools.partial(super().write, _half(data)))
                return super().write(data)

        def called(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: Any = None,
            errors: Any = None,
            newline: Any = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            if not set(mode) & set("wax+"):
                return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
            if not isinstance(file, int):
                calls.on_call("open", _whole_path(file, None))
            raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

        return called


def _half(data: Any) -> memoryview:
    return memoryview(data).cast("B")[: memoryview(data).nbytes // 2]


def _whole_path(path: Any, folder: int | None) -> str:
    name = os.fsdecode(path)
    return os.path.abspath(os.path.join(_path_of(folder), name) if folder is not None else name)


def _path_of(handle: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{handle}")
    except OSError:
        return ""


def read_log(path: Path) -> list[Call]:
    """Return the calls that a process has recorded."""
    return [
        (name, where) for name, _, where in (line.partition("\t") for line in path.read_text().splitlines())
    ]


def wrong_order(calls: list[Call]) -> str:
    """Return an empty string if in every save the flushes come before the rename, and the rename, flushed
    too, before anything is removed.

    SIGKILL cannot show a missing flush, because the system's own buffers outlive the process. Only the order
    of calls can.
    """
    unflushed: set[str] = set()
    renamed: set[str] = set()
    for index, (name, path) in enumerate(calls):
        if name in ("open", "write", "mkdir", "truncate", "ftruncate"):
            unflushed.add(path)
        elif name in ("fsync", "fdatasync"):
            unflushed.discard(path)
            renamed = {each for each in renamed if (os.path.dirname(each) or ".") != path}
        elif name in ("rename", "replace", "exchange"):
            hidden = os.path.basename(path).startswith(".")
            late = sorted(each for each in unflushed if os.path.basename(path) in each and each != path)
            if late and not hidden:
                return f"call {index}: {path} gets its name before {late[0]} is flushed"
            unflushed = {each for each in unflushed if os.path.basename(path) not in each}
            if not hidden:
                renamed.add(path)
        elif name in ("unlink", "remove", "rmdir") and renamed and not path.endswith(".new"):
            return f"call {index}: {path} is removed before the rename of {sorted(renamed)[0]} is flushed"
    return ""
