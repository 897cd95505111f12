"""Two machines on one: network namespaces joined by a cable, each with its own torchrun."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import preloaded
import pytest
from ranks.torchrun import command, environment


class Node:
    """A namespace with one end of the cable."""

    def __init__(self, name: str, link: str, address: str) -> None:
        self.name, self.link, self.address = name, link, address
        self.job: subprocess.Popen[str] | None = None
        self.log = Path()

    def start(self, script: Path, number: int, meeting: str, attempt: str) -> None:
        """One rank under a torchrun of its own; what it says goes to a file."""
        launcher = (
            "--nnodes",
            "2",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            meeting,
            "--rdzv-id",
            attempt,
            "--rdzv-conf",
            f"is_host={int(number == 0)}",
            "--local-addr",
            self.address,
        )
        self.log = script.parent / f"{attempt}-{number}.log"
        with self.log.open("w") as out:
            variables = environment(**{"GLOO_SOCKET_IFNAME": self.link, preloaded.NETWORK: self.name})
            python, module, _, *words = command(script, str(script.parent), ranks=1, launcher=launcher)
            self.job = preloaded.Popen(
                [python, module, "ranks.launcher", preloaded.server(variables, number), *words],
                cwd=script.parent,
                env=variables,
                start_new_session=True,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def wait(self, deadline: float) -> int:
        """Its exit code; past the deadline it is killed and the test fails."""
        assert self.job is not None
        try:
            return self.job.wait(deadline)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"{self.name} was not over after {deadline} s:\n{self.log.read_text()}"
            ) from None

    def kill(self) -> None:
        """Everything that runs there, at once."""
        for number in _ip("netns", "pids", self.name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
        if self.job is not None:
            self.job.wait()

    def unplug(self) -> None:
        """Pull the cable: the other end gets no answer any more, not even a refused connection."""
        _ip("-n", self.name, "link", "set", self.link, "down")

    def plug(self) -> None:
        """Put it back."""
        _ip("-n", self.name, "link", "set", self.link, "up")


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Skip the test where network namespaces cannot be made. HOOKLINE_NODES_REQUIRED=1 makes that a failure."""
    if missing := _missing():
        assert os.environ.get("HOOKLINE_NODES_REQUIRED") != "1", missing
        pytest.skip(missing)
    tag, net = uuid.uuid4().hex[:6], 1 + os.getpid() % 250
    nodes = (
        Node(f"hookline-{tag}-a", f"hl{tag}a", f"10.77.{net}.1"),
        Node(f"hookline-{tag}-b", f"hl{tag}b", f"10.77.{net}.2"),
    )
    try:
        for node in nodes:
            _ip("netns", "add", node.name)
        _ip("link", "add", nodes[0].link, "type", "veth", "peer", "name", nodes[1].link)
        for node in nodes:
            _ip("link", "set", node.link, "netns", node.name)
            _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", node.link)
            _ip("-n", node.name, "link", "set", "lo", "up")
            node.plug()
        yield nodes
    finally:
        for node in nodes:
            with contextlib.suppress(AssertionError):
                node.kill()
                _ip("netns", "delete", node.name)


def _missing() -> str:
    if os.geteuid() != 0:
        return "needs root, which alone can make network namespaces"
    if shutil.which("ip") is None:
        return "needs the command `ip` (Debian: apt-get install iproute2)"
    trial = f"hookline-{uuid.uuid4().hex[:6]}"
    try:
        _ip("netns", "add", trial)
    except AssertionError as error:
        return f"needs the right to make network namespaces, which a container may lack ({error})"
    _ip("netns", "delete", trial)
    return ""


def write(source: str, folder: Path) -> Path:
    """The script that both nodes run."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    return script


def until(happened: Path, deadline: float, *nodes: Node) -> None:
    """Wait for a path to be there."""
    end = time.monotonic() + deadline
    while not happened.exists():
        told = "\n".join(node.log.read_text() for node in nodes)
        assert time.monotonic() < end, f"{happened} is not there after {deadline} s:\n{told}"
        assert all(node.job is not None and node.job.poll() is None for node in nodes), told
        time.sleep(0.05)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"
    return done.stdout
