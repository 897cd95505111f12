"""A SLURM cluster on this machine, with two nodes: its own munged, slurmctld and slurmd, and nothing of the machine's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel")
LIMIT = 240.0
CONFIGURATION = """
ClusterName=hookline
SlurmctldHost={controller}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8"


class Cluster:
    """Two nodes and what is asked of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons and wait until both nodes are idle."""
        host, ports = socket.gethostname(), free_ports(3)
        nodes = [
            NODE.format(name=name, host=host, port=port)
            for name, port in zip((host, "localhost"), ports[1:], strict=True)
        ]
        for each in (host, "localhost", "state"):
            (self.folder / each).mkdir()
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(controller=host, port=ports[0], folder=self.folder, nodes="\n".join(nodes))
        )
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        places = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        options = [f"--{option}={self.folder}/munge.{ending}" for option, ending in places.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        wait_for(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._daemon("slurmctld", "-D", "-f", self.environment["SLURM_CONF"])
        for name in (host, "localhost"):
            self._daemon("slurmd", "-D", "-f", self.environment["SLURM_CONF"], "-N", name)
        wait_for(
            lambda: self.ask("sinfo", "--noheader", "--format=%D %t").strip() == "2 idle", "two idle nodes"
        )

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}-{len(self.daemons)}.txt").open("wb") as said:
            self.daemons.append(
                subprocess.Popen(
                    command, env=self.environment, stdout=said, stderr=said, start_new_session=True
                )
            )

    def ask(self, *command: str) -> str:
        """Return what a command of SLURM prints; empty if it fails."""
        asked = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        return asked.stdout if asked.returncode == 0 else ""

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        self.ask("scancel", "--state=RUNNING", "--signal=KILL")
        self.ask("scancel", "--user=root")
        for daemon in reversed(self.daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in opened:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in opened]


def wait_for(condition: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
    """Wait until the condition holds; fail after the limit."""
    until = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {limit:g} s"
        time.sleep(0.2)


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster, or skip where that is not possible. HOOKLINE_SLURM_REQUIRED=1 makes that a failure."""
    missing = [each for each in PROGRAMS if shutil.which(each) is None]
    reason = (
        f"needs {', '.join(missing)} (packages slurmctld, slurmd, slurm-client, munge)" if missing else ""
    )
    reason = reason or ("" if os.geteuid() == 0 else "needs root, as slurmd does")
    if reason:
        assert os.environ.get("HOOKLINE_SLURM_REQUIRED") != "1", reason
        pytest.skip(reason)
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
