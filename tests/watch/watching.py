"""A served page, and a real job to watch, which runs in a process of its own."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import preloaded

from hookline.control.client import NotRunning, ask
from hookline.watch import Watch

JOB = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from tiny import Net, batches, quiet
from hookline import Hook
from hookline.hooks import GradientMonitor

class Naps(Hook):
    def on_train_batch_end(self):
        time.sleep(0.02)

class Markup(Hook):
    name = "<img src=x onerror='window.hacked = 1'>"
    def on_step_end(self): ...

trainer = quiet(run_dir="run", logger=True, max_epochs=-1, max_time="5 minutes", log_every_n_steps=1,
                hooks=[Naps(), GradientMonitor(log_frequency=1), Markup()], **json.loads(sys.argv[2]))
trainer.fit(Net(0.001), batches(8), batches(2))
"""


@contextmanager
def job(folder: Path, **options: Any) -> Iterator[Path]:
    """The directory of a job that trains until it is told to stop. options: of its trainer."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    tests = str(Path(__file__).parent.parent)
    with preloaded.Popen(
        [sys.executable, "-c", JOB, tests, json.dumps(options)],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        run = folder / "run"
        try:
            while not is_training(run):
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.05)
            yield run
        finally:
            process.terminate()
            process.communicate(timeout=300)


def is_training(run: Path) -> bool:
    """Whether the job has made its first steps."""
    try:
        return run.is_dir() and int(ask(run, "status")["step"]) > 2
    except NotRunning:
        return False


@contextmanager
def served(run: Path) -> Iterator[Watch]:
    """A server for the length of a block."""
    watch = Watch(run)
    thread = threading.Thread(target=watch.serve, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.close()
        thread.join(60)
        assert not thread.is_alive()


class Visitor:
    """Somebody with an HTTP client, who can say whatever they like."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.cookie = ""

    def get(self, path: str, **headers: str) -> http.client.HTTPResponse:
        return self.ask("GET", path, None, headers)

    def page(self, **headers: str) -> http.client.HTTPResponse:
        """Where the browser was sent."""
        return self.get(self.watch.room, **headers)

    def post(self, body: Any, path: str = "", **headers: str) -> http.client.HTTPResponse:
        path = path or f"{self.watch.room}control"
        own = {"Origin": f"http://127.0.0.1:{self.watch.port}", "Content-Type": "application/json", **headers}
        return self.ask("POST", path, body if isinstance(body, str) else json.dumps(body), own)

    def ask(
        self, method: str, path: str, body: str | None, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.watch.port, timeout=60)
        named = {name.replace("_", "-"): value for name, value in headers.items() if value}
        connection.request(method, path, body, {**({"Cookie": self.cookie} if self.cookie else {}), **named})
        return connection.getresponse()

    def come_in(self) -> http.client.HTTPResponse:
        """Use the address that was printed."""
        answer = self.get(self.watch.url.partition(str(self.watch.port))[2])
        self.cookie = (answer.getheader("Set-Cookie") or "").partition(";")[0]
        return answer
