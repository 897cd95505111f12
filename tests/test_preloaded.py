"""A process that begins with torch imported is otherwise the one that Python would start."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest

LOOK = """
import json, os, random, sys
main = sys.modules["__main__"]
print(json.dumps({
    "arguments": sys.argv, "all": sys.orig_argv, "path": sys.path, "directory": os.getcwd(), "name": __name__,
    "file": getattr(main, "__file__", None), "same": main.__dict__ is globals(), "value": os.environ.get("A_VALUE"),
    "leads": os.getsid(0) == os.getpid(), "input": sys.stdin.read(), "encoding": sys.stdout.encoding,
    "signals": [str(__import__("signal").getsignal(n)) for n in (2, 15, 17)],
}))
"""


def both(command: list[str], **options: Any) -> list[subprocess.CompletedProcess[str]]:
    """From nothing, and preloaded."""
    environment = {**os.environ, "A_VALUE": "given", "PYTHONPATH": str(Path("here").absolute())}
    return [
        start(
            [sys.executable, *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            **options,
        )
        for start in (subprocess.run, preloaded.run)
    ]


@pytest.mark.parametrize("how", ["file", "code", "module"])
@pytest.mark.parametrize("new_session", [False, True])
def test_it_finds_what_any_process_finds(how: str, new_session: bool) -> None:
    Path("look.py").write_text(LOOK)
    command = {"file": ["look.py"], "code": ["-c", LOOK], "module": ["-m", "look"]}[how]
    (Path("other")).mkdir()
    given = {"input": "typed", "start_new_session": new_session}
    if how == "file":
        given["cwd"], command = "other", [str(Path("look.py").absolute())]
    one, two = [json.loads(each.stdout) for each in both([*command, "a", "-b"], **given)]
    assert one == two
    assert two["input"] == "typed" and two["value"] == "given" and two["leads"] == new_session


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit('said')",
        "def f():\n    raise ValueError('on purpose')\nf()",
        "import atexit, threading; atexit.register(print, 'at exit')\nthreading.Timer(0.1, print, ['thread']).start()",
        "import os; os._exit(4)",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.kill(os.getpid(), 15)",
        "import sys; print('out'); print('error', file=sys.stderr); print(end='no newline')",
        "import sys; print('out'); sys.exit()",
        "import threading, time; print('out')\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "file = open(1, 'w', closefd=False); file.write('buffered')",
        "class Made:\n    def __del__(self): print('destroyed')\nmade = Made()",
        "import atexit; atexit.register(lambda value: int(value), 'on purpose')",
    ],
)
def test_it_ends_as_any_process_ends(code: str) -> None:
    one, two = [
        (each.returncode, each.stdout, re.sub("0x[0-9a-f]+", "", each.stderr)) for each in both(["-c", code])
    ]
    assert one == two


def test_it_can_be_waited_for_and_signalled() -> None:
    code = "import time; print('here', flush=True); time.sleep(600)"
    with preloaded.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(300) == -signal.SIGTERM == process.poll()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    with pytest.raises(subprocess.TimeoutExpired):
        preloaded.run([sys.executable, "-c", code], timeout=0.05)
    with pytest.raises(subprocess.CalledProcessError):
        preloaded.run([sys.executable, "-c", "exit(1)"], check=True)


def test_servers_of_different_numbers_hash_strings_differently() -> None:
    class Second(preloaded.Popen):
        def address(self, environment: Any) -> str:
            return preloaded.server(environment, 1)

    command = [sys.executable, "-c", "print(hash('a'))"]
    found = []
    for start in (preloaded.Popen, Second):
        with start(command, stdout=subprocess.PIPE, text=True) as process:
            found.append(process.communicate(timeout=300)[0])
    assert found[0] != found[1]
