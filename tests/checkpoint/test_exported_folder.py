"""Exports for other programs: made of a durable checkpoint, whole or not there, and never of something else."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import Net, batches, quiet

from hookline import CheckpointError
from hookline.checkpoint.export import RECORD, export_folder
from hookline.hooks import WeightAveraging


def write(weights: Any, folder: Path) -> None:
    save_file(dict(weights), folder / "w.safetensors")
    (folder / "inside").mkdir()
    (folder / "inside" / "note.txt").write_text("whole")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Net, Path]:
    net, trainer = Net(), quiet(run_dir=tmp_path / "run")
    trainer.fit(net, batches(2))
    trainer.save_checkpoint(tmp_path / "run" / "one")
    return net, tmp_path / "run" / "one"


def test_an_export_has_the_weights_and_names_its_checkpoint(saved: tuple[Net, Path], tmp_path: Path) -> None:
    net, path = saved
    target = tmp_path / "run" / "exports" / "best"
    assert export_folder(path, target, write)
    assert torch.equal(load_file(target / "w.safetensors")["layer.weight"], net.layer.weight)
    record = json.loads((target / RECORD).read_text())
    assert (target / record["checkpoint"]).resolve() == path.resolve()
    assert (record["step"], record["weights"]) == (2, "raw")
    assert os.listdir(target.parent) == ["best"]


def test_an_export_of_the_same_checkpoint_is_not_written_again(
    saved: tuple[Net, Path], tmp_path: Path
) -> None:
    _, path = saved
    assert export_folder(path, tmp_path / "out", write)
    assert not export_folder(path, tmp_path / "out", write)


def test_the_weights_are_those_that_evaluations_use(tmp_path: Path) -> None:
    averaging = WeightAveraging(decay=0.5)
    trainer = quiet(run_dir=tmp_path / "run", hooks=[averaging])
    trainer.fit(Net(), batches(3))
    trainer.save_checkpoint(tmp_path / "run" / "one")
    export_folder(tmp_path / "run" / "one", tmp_path / "out", write)
    found = load_file(tmp_path / "out" / "w.safetensors")["layer.weight"]
    assert torch.equal(found, averaging.averages["layer.weight"])
    assert json.loads((tmp_path / "out" / RECORD).read_text())["weights"] == "averaged"


def test_a_failed_write_leaves_the_old_export_and_nothing_else(
    saved: tuple[Net, Path], tmp_path: Path
) -> None:
    _, path = saved
    folder = tmp_path / "exports"
    export_folder(path, folder / "best", write)
    (folder / "best" / RECORD).write_text("{}")  # of an older checkpoint

    def fail(weights: Any, target: Path) -> None:
        write(weights, target)
        raise RuntimeError("it is full")

    with pytest.raises(RuntimeError, match="it is full"):
        export_folder(path, folder / "best", fail)
    assert os.listdir(folder) == ["best"]
    assert (folder / "best" / "inside" / "note.txt").read_text() == "whole"


def test_a_directory_that_is_not_an_export_is_not_replaced(saved: tuple[Net, Path], tmp_path: Path) -> None:
    _, path = saved
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match=r"mine exists and is not an export of Hookline"):
        export_folder(path, tmp_path / "mine", write)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


# Each child is killed at another call that changes the disk; what it leaves is read before the next one.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from safetensors.torch import load_file, save_file
from hookline.checkpoint import writer
from hookline.checkpoint.export import export_folder

checkpoint, target, how = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
if how == "renames":
    writer.exchange = lambda first, second: False

def write(weights, folder):
    save_file(dict(weights), folder / "w.safetensors")
    (folder / "note.txt").write_text("whole")

def dying(real, nth, calls):
    def call(*arguments):
        calls.append(real)
        if len(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    return call

export_folder(checkpoint, target, write)
for nth in range(1, 30):
    if target.exists():
        (target / "hookline.json").write_text("{}")  # as of an older checkpoint
    child = os.fork()
    if child == 0:
        calls = []
        os.fsync, os.rename, writer.exchange = (dying(each, nth, calls) for each in (os.fsync, os.rename, writer.exchange))
        export_folder(checkpoint, target, write)
        os._exit(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    names = sorted(each.name for each in target.parent.iterdir())
    whole = [each for each in target.parent.iterdir() if each.name == "best" or each.suffix == ".old"]
    whole = [each.name for each in whole if load_file(each / "w.safetensors") and (each / "note.txt").read_text() == "whole"]
    print("KILL", json.dumps([killed, names, whole]), flush=True)
    if killed == 0:
        break
"""


@pytest.mark.parametrize("how", ["exchange", "renames"])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_export_whole(
    how: str, saved: tuple[Net, Path], tmp_path: Path
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    words = [sys.executable, str(script), str(saved[1]), str(tmp_path / "exports" / "best"), how]
    done = preloaded.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [
        json.loads(each.removeprefix("KILL ")) for each in done.stdout.splitlines() if each.startswith("KILL")
    ]
    *kills, last = lines
    assert [each[0] for each in kills] == [-signal.SIGKILL] * len(kills)
    assert len(kills) >= 5
    assert all(whole for _, _, whole in kills)
    if how == "exchange":
        assert all("best" in whole for _, _, whole in kills)
    assert last == [0, ["best"], ["best"]]  # it has cleaned up what the kills have left
