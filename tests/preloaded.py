"""Start Python processes that have imported torch and Hookline already, which saves 5 s of a core for each.

`Popen` and `run` take what those of `subprocess` take, if the command is this Python with `-m`, `-c` or a file. A server
that has imported them forks the process; from then on it is a process like any other, with an id, a session, signals, files,
environment, arguments and an ending of its own. The first start of a server takes as long as the import.

What differs from a process that begins from nothing: what `load` imports is in sys.modules, and the parent is the server.
A test about what is imported, or about the start itself, uses `subprocess`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

READ_WHEN_STARTED = ("ATEN_", "KMP_", "LD_", "MKL_", "OMP_", "PRELOAD", "PYTHON", "TORCH")
"""Variables that Python or torch reads only once: a process gets a server that was started with the same values."""

READ_LATER = (
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONIOENCODING",
    "TORCHELASTIC_",
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it in a process that compiles something, and reads it each time
)
"""Those of them that `become` sees to, or that are read when they are needed."""

NETWORK = "HOOKLINE_TEST_NETWORK"
"""The variable that names the network namespace of a process, if it is not that of the tests."""

STATUS = struct.Struct("i")


# ---- in a test ------------------------------------------------------------------------------------------------------


def server(environment: Mapping[str, str] | None = None, number: int = 0) -> str:
    """Return the address of a server for this environment. Those of different numbers hash strings differently, as
    processes do that begin from nothing.
    """
    found = os.environ if environment is None else environment
    before = {
        name: value
        for name, value in found.items()
        if name.startswith(READ_WHEN_STARTED) and not name.startswith(READ_LATER)
    }
    return _started(tuple(sorted(before.items())), number)


@functools.cache
def _started(before: tuple[tuple[str, str], ...], number: int) -> str:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None or not hasattr(os, "pidfd_open"):
        address = os.path.join(tempfile.mkdtemp(prefix="preloaded-"), "socket")
        process = _start(address, before)
        atexit.register(process.communicate)  # its input ends, and so does it
        return address
    # the processes of one run of tests share servers, which end with the process that started them all
    name = hashlib.sha256(repr((before, number)).encode()).hexdigest()[:8]
    folder = Path(tempfile.gettempdir(), f"preloaded-{run[:16]}-{name}")
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not lock.read():
            process = _start(str(folder / "socket"), before, os.environ["HOOKLINE_TEST_CONTROLLER"])
            assert process.stdout is not None
            process.stdout.close()
            process.returncode = 0  # it outlives this process, and is not waited for
            lock.write("started")
    return str(folder / "socket")


def _start(address: str, before: tuple[tuple[str, str], ...], *until: str) -> subprocess.Popen[bytes]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(READ_WHEN_STARTED) or name.startswith(READ_LATER)
    }
    process = subprocess.Popen(
        [sys.executable, "-u", __file__, address, *until],
        env={**kept, **dict(before)},
        stdin=subprocess.DEVNULL if until else subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        start_new_session=bool(until),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", "the server for preloaded processes does not start"
    return process


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A process that a server forks."""

    def address(self, environment: Mapping[str, str] | None) -> str:
        """Return where to ask for it."""
        return server(environment)

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
        words = [os.fspath(each) for each in asked["args"]]
        assert words[0] == sys.executable, words
        assert not (asked["shell"] or asked["preexec_fn"] or asked["pass_fds"] or asked["executable"])
        environment = os.environ if asked["env"] is None else asked["env"]
        request = {
            "arguments": words,
            "environment": dict(environment),
            "directory": os.path.abspath(asked["cwd"] or os.getcwd()),
            "new_session": asked["start_new_session"],
        }
        theirs = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        text = json.dumps(request).encode()
        self.asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.asked.connect(self.address(environment))
        files = array.array(
            "i", [standard if each == -1 else each for standard, each in enumerate(theirs)]
        ).tobytes()
        self.asked.sendmsg([struct.pack("I", len(text))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        self.asked.sendall(text)
        self.pid = STATUS.unpack(_exactly(self.asked, STATUS.size))[0]
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if flags & os.WNOHANG:
            with selectors.DefaultSelector() as selector:
                selector.register(self.asked, selectors.EVENT_READ)
                if not selector.select(0):
                    return 0, 0
        status = STATUS.unpack(_exactly(self.asked, STATUS.size))[0]
        self.asked.close()
        return self.pid, status

    def _internal_poll(self, _deadstate: Any = None, **given: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    input: str | None = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Start it and wait for it, as `subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    ended = subprocess.CompletedProcess(process.args, process.returncode, out, errors)
    if check:
        ended.check_returncode()
    return ended


def _exactly(connection: socket.socket, size: int) -> bytes:
    text = b""
    while len(text) < size:
        more = connection.recv(size - len(text))
        if not more:
            raise ConnectionError("the server for preloaded processes has ended")
        text += more
    return text


# ---- the server -----------------------------------------------------------------------------------------------------


def serve(address: str, until: str | None = None) -> dict[str, Any]:
    """Fork a process for every request and report how it ended, until the input ends, or the process `until`. Returns in the
    forked process.
    """
    last = sys.stdin.fileno() if until is None else os.pidfd_open(int(until))
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(address)
    listening.listen(64)
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *given: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    print("ready", flush=True)
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for each in (listening, woken, last):
            selector.register(each, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == last:
                    shutil.rmtree(os.path.dirname(address))
                    os._exit(0)
                elif key.fileobj is woken:
                    woken.recv(4096)
                    _reap(running)
                else:
                    connection, _ = listening.accept()
                    request, files = _request(connection)
                    pid = os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        for standard, each in enumerate(files):
                            os.dup2(each, standard)
                        for each in {*files} - {0, 1, 2}:
                            os.close(each)
                        for each in (listening, woken, wakes, connection, *running.values()):
                            each.close()
                        if until is not None:
                            os.close(last)
                        return request
                    for each in files:
                        os.close(each)
                    running[pid] = connection
                    connection.sendall(STATUS.pack(pid))


def _reap(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with running.pop(pid) as connection, contextlib.suppress(OSError):  # the one that asked may be gone
            connection.sendall(STATUS.pack(status))


def _request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    files = array.array("i")
    size, given, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(3 * files.itemsize))
    for _, _, each in given:
        files.frombytes(each)
    request: dict[str, Any] = json.loads(_exactly(connection, struct.unpack("I", size)[0]))
    return request, list(files)


# ---- the process ----------------------------------------------------------------------------------------------------


def become(request: dict[str, Any], paths: list[str]) -> Callable[[], object]:
    """Make this process what `exec` would, and return what it runs."""
    import numpy

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["new_session"]:
        os.setsid()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if NETWORK in os.environ:
        enter_network(os.environ[NETWORK])
    numpy.random.seed()
    python, *words = request["arguments"]
    sys.orig_argv = [python, *words]
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    if words[0] == "-u":
        unbuffered, words = True, words[1:]
    _open_standard_files(unbuffered)
    option, sys.argv = words[0], words
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    first = (
        "" if option == "-c" else os.getcwd() if option == "-m" else os.path.dirname(os.path.abspath(option))
    )
    given = [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [first, *given, *paths]
    sys.path_importer_cache.clear()
    if option == "-c":
        sys.argv = ["-c", *words[2:]]
        return functools.partial(exec, compile(words[1], "<string>", "exec"), main.__dict__)
    if option == "-m":
        sys.argv = ["-m", *words[2:]]
        return functools.partial(runpy._run_module_as_main, words[1])  # type: ignore[attr-defined]
    assert not option.startswith("-"), option
    main.__file__ = option
    return functools.partial(exec, compile(Path(option).read_bytes(), option, "exec"), main.__dict__)


def enter_network(name: str) -> None:
    """Enter a network namespace, as `ip netns exec` does."""
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as namespace:
        if library.setns(namespace.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _open_standard_files(unbuffered: bool) -> None:
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    for number, (name, mode) in enumerate((("stdin", "rb"), ("stdout", "wb"), ("stderr", "wb"))):
        before = getattr(sys, name)
        raw = open(number, mode, 0 if unbuffered and mode == "wb" else -1, closefd=False)  # noqa: SIM115
        file = io.TextIOWrapper(
            raw,
            encoding=encoding or before.encoding,
            errors="backslashreplace" if name == "stderr" else errors or before.errors,
            line_buffering=name == "stderr" or raw.isatty(),
            write_through=unbuffered,
        )
        file.mode = mode[0]
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def carry_out(program: Callable[[], object]) -> None:
    """Run it; a traceback shows only frames of the program."""
    try:
        program()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename in (
            __file__,
            runpy.__file__,
            "<frozen runpy>",
        ):
            shown = shown.tb_next
        error.__traceback__ = shown
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, shown
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        sys.excepthook(type(error), error, shown)
        raise SystemExit(1) from None


def end(code: object, before: set[str]) -> None:
    """End as Python does, but destroy only what the program has made: to destroy what the server had imported copies the
    memory that processes share, which takes 0.3 s. A process that has threads or a process group still when its exit functions
    have run ends in Python's way, because there an end can fail.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if threading.active_count() > 1 or torch.distributed.is_initialized():
        sys.exit(code)  # type: ignore[arg-type]
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    for name in [each for each in sys.modules if each not in before] + ["__main__"]:
        vars(sys.modules[name]).clear()
    gc.collect()
    for each in (sys.stdout, sys.stderr):
        each.flush()
    os._exit(code or 0)


def load() -> None:
    """Import what nearly every process imports, and torch._dynamo, which every optimizer imports."""
    import jsonargparse  # noqa: F401
    import rich.progress  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.run  # noqa: F401

    import hookline

    for each in pkgutil.walk_packages(hookline.__path__, "hookline."):
        if not each.name.startswith(("hookline.__main__", "hookline.interop", "hookline.testing")):
            importlib.import_module(each.name)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; it ends with them
    before_torch = {
        os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each
    }
    ours = [each for each in sys.path[1:] if each not in before_torch]

    load()
    import torch

    if "PRELOAD" in os.environ:  # a module that takes long to import
        importlib.import_module(os.environ["PRELOAD"])
    gc.freeze()  # a collection in a process would copy what it visits
    here = sys.modules["__main__"]  # its names stay
    theirs = {*sys.modules}
    program = become(serve(*sys.argv[1:]), ours)
    try:
        carry_out(program)
    except SystemExit as ended:
        code = ended.code
    else:
        code = 0
    del program
    end(code, theirs)
