"""The lock of a run's directory where a job has several ranks: rank zero holds it, and all are refused together."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ranks.torchrun import torchrun

from hookline.run.lock import RunLock

SCRIPT = """
import json, os
from hookline import Hook, HooklineError, Trainer
from hookline.run import lock
from ranks.checkpointed import train

lock.WAITING = 0.1
rank = int(os.environ["RANK"])
found = {"pid": os.getpid()}

class Looks(Hook):
    def on_train_start(self, trainer):
        found["locked"] = trainer._directory.is_locked
        found["owner"] = json.load(open("free/run.lock"))["pid"]

try:
    train("taken", "ddp")
except HooklineError as error:
    found["refused"] = f"{type(error).__name__}: {error}"
train("free", "ddp", Looks(), max_epochs=1)
json.dump(found, open(f"found-{rank}.json", "w"))
"""


def test_rank_zero_holds_the_lock_and_all_ranks_are_refused_together(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "taken")
    lock.take()
    try:
        job = torchrun(SCRIPT, tmp_path)
    finally:
        lock.release()
    assert job.code == 0, job.output
    zero, one = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    assert (zero["locked"], one["locked"]) == (True, False)
    assert zero["owner"] == one["owner"] == zero["pid"]
    assert zero["refused"].startswith("RunLockedError") and f"process {os.getpid()} on " in zero["refused"]
    assert one["refused"] == zero["refused"]
    assert not (tmp_path / "free" / "run.lock").exists()
