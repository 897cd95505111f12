"""A program that trains once for each kind of process that can outlive a run, and prints what was left when the run was over."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from tiny import Net, quiet
from torch.utils.data import DataLoader, Dataset

from hookline import Hook


class Pairs(Dataset[Any]):
    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if index == self.fails_at:
            raise ValueError("on purpose")
        return torch.ones(4), torch.ones(2)


class Fails(Hook):
    def on_step_end(self, step: int) -> None:
        if step == 3:
            raise ValueError("on purpose")


class Starts(Hook):
    """Starts a process of the user's own that is still there when the run is over."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.pid = 0

    def on_train_start(self) -> None:
        if self.how == "os.fork":
            self.pid = os.fork()
            if self.pid == 0:
                time.sleep(600)
                os._exit(0)
        elif self.how == "subprocess":
            self.process = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False
            )
            self.pid = self.process.pid
        else:
            context: Any = multiprocessing.get_context("fork")
            self.child = context.Process(target=time.sleep, args=(600,), daemon=True)
            self.child.start()
            self.pid = self.child.pid


def stateful(**options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(options.pop("dataset", Pairs()), batch_size=2, num_workers=1, **options)


def plain(**options: Any) -> Any:
    return DataLoader(options.pop("dataset", Pairs()), batch_size=2, num_workers=1, **options)


KINDS: dict[str, tuple[Any, list[Hook]]] = {
    "torchdata, a step fails": (lambda: stateful(), [Fails()]),
    "torchdata, the dataset fails": (lambda: stateful(dataset=Pairs(15)), []),
    "torchdata, persistent workers": (lambda: stateful(persistent_workers=True), []),
    "torchdata, persistent workers, spawn": (
        lambda: stateful(persistent_workers=True, multiprocessing_context="spawn"),
        [],
    ),
    "torchdata, persistent workers, forkserver": (
        lambda: stateful(persistent_workers=True, multiprocessing_context="forkserver"),
        [],
    ),
    "DataLoader, a step fails": (lambda: plain(), [Fails()]),
    "DataLoader, persistent workers": (lambda: plain(persistent_workers=True), []),
    "a fork of the user's": (lambda: [(torch.ones(2, 4), torch.ones(2, 2))] * 4, [Starts("os.fork")]),
    "a multiprocessing child of the user's": (
        lambda: [(torch.ones(2, 4), torch.ones(2, 2))] * 4,
        [Starts("multiprocessing")],
    ),
    "a subprocess that inherits descriptors": (
        lambda: [(torch.ones(2, 4), torch.ones(2, 2))] * 4,
        [Starts("subprocess")],
    ),
}


class Listen(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def is_heard(path: Path) -> bool:
    """Whether some process still listens on a socket whose run is over."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        try:
            caller.connect(str(path))
        except OSError:
            return False
        return True


class KeepsSocket(Hook):
    """Gives the run's socket a second name, by which it can be called after the run has removed the first."""

    def on_train_start(self, trainer: Any) -> None:
        os.link(trainer.run_dir / "control.sock", trainer.run_dir / "second.sock")


def train(number: int, kind: str) -> dict[str, Any]:
    make, hooks = KINDS[kind]
    loader, listen, folder = make(), Listen(), Path(f"run-{number}")
    logging.getLogger("hookline").addHandler(listen)
    error = None
    try:
        quiet(run_dir=folder, logger=True, hooks=[KeepsSocket(), *hooks]).fit(Net(), loader)
    except ValueError as raised:
        error = raised  # it holds the frames, and with them the iterator and its workers
    logging.getLogger("hookline").removeHandler(listen)
    threads = [each.name for each in threading.enumerate() if each.name.startswith("hookline")]
    found = {
        "kind": kind,
        "failed": error is not None,
        "threads": threads,
        "said": listen.lines,
        "socket": (folder / "control.sock").exists(),
        "heard": is_heard(folder / "second.sock"),
    }
    for each in hooks:
        if isinstance(each, Starts):
            os.kill(each.pid, signal.SIGKILL)
    return found


if __name__ == "__main__":
    for number, kind in enumerate(KINDS):
        print(json.dumps(train(number, kind)), flush=True)
