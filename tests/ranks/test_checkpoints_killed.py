"""Ranks that die while they write a checkpoint, disks that they do not share, and stores that they copy to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks.torchrun import torchrun

from hookline.checkpoint.files import read, verify

# Three lives: rank 1 is killed while it writes its shards; they resume; then rank 0 just before it gives a checkpoint its name.
KILLED = """
import json, os, signal
from pathlib import Path
from hookline.checkpoint.catalog import find_checkpoints, first_whole
from ranks.checkpointed import SaveAt, digest, train

life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])

def dies_at(call, part):
    real = getattr(os, call)
    def dying(target, *more):
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
        if ".batch-5." in path and part in path:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(target, *more)
    setattr(os, call, dying)

def whole_ones(run_dir):
    found, broken = find_checkpoints(Path(run_dir) / "checkpoints")
    return [sorted(each.path.name for each in found), len(broken), first_whole(found)[0].path.name]

def run(name, strategy):
    done = Path(f"{name}-{rank}.json")
    if not done.exists():
        before = whole_ones(name) if Path(name).exists() else None
        found = digest(*train(name, strategy, SaveAt(3, 5), resume="auto", accumulate_grad_batches=3, max_epochs=1))
        done.write_text(json.dumps({"before": before, "digest": found}))

if life == 0 and rank == 1:
    dies_at("fsync", "rank-1.safetensors")
run("shards", "fsdp")
if life == 1 and rank == 0:
    dies_at("rename", ".new")
run("names", "ddp")
for name, strategy in (("shards", "fsdp"), ("names", "ddp")):
    found = digest(*train(f"whole-{name}", strategy, SaveAt(3, 5), accumulate_grad_batches=3, max_epochs=1))
    Path(f"whole-{name}-{rank}.json").write_text(json.dumps(found))
"""

# In the same job, once it has got to its end.
APART = """
import ctypes, errno, hashlib, shutil
import torch
import hookline.training.resume
from hookline.checkpoint import rank_writer
from hookline.checkpoint.manifest import load_manifest as read_manifest, render_manifest, signature

def problem(act, *arguments):
    try:
        act(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""

found = {}
trainer, record = train("copied", "fsdp", max_epochs=1)
found["digest"] = digest(trainer)
trainer.save_checkpoint(Path("remote").absolute().as_uri() + "/step")
resumed = train("fetched", "fsdp", resume=Path("remote").absolute().as_uri() + "/step", max_epochs=1)
found["fetched"] = digest(resumed[0])

found["different"] = problem(trainer.save_checkpoint, f"copied/of-{rank}")
trainer.save_checkpoint("copied/full")
written, flush = os.stat("copied/full/manifest.json").st_mtime_ns, os.fsync

def is_full(handle):
    if rank == 1 and ".full." in os.readlink(f"/proc/self/fd/{handle}"):
        raise OSError(errno.ENOSPC, "No space left on device")
    flush(handle)

os.fsync = is_full
found["full"] = problem(trainer.save_checkpoint, "copied/full")
os.fsync = flush
found["kept"] = os.stat("copied/full/manifest.json").st_mtime_ns == written

def surprised(*arguments):
    raise MemoryError("no room")

write_parts, rank_writer.write_parts = rank_writer.write_parts, surprised if rank else rank_writer.write_parts
found["surprised"] = problem(trainer.save_checkpoint, "copied/full")
rank_writer.write_parts = write_parts
if rank == 0:  # whole by its sums, and yet nothing that rank 1 can read
    path = Path("copied/forged")
    shutil.copytree("copied/full", path)
    (path / "rank-1.json").write_text("{")
    manifest = read_manifest(path)
    manifest["files"]["rank-1.json"] = {"bytes": 1, "sha256": hashlib.sha256(b"{").hexdigest()}
    (path / "manifest.json").write_text(render_manifest({**manifest, "sha256": signature(manifest)}))
torch.distributed.barrier()
found["forged"] = problem(lambda: train("forged", "fsdp", resume="copied/forged"))
found["left"] = [each for each in os.listdir("copied") if each.startswith(".")]

os.makedirs("hidden", exist_ok=True)
system = ctypes.CDLL(None, use_errno=True)
if rank == 1:  # a disk of its own in the place of the shared one
    NEW_NAMESPACE, PRIVATE = 0x20000, 0x44000
    failed = system.unshare(NEW_NAMESPACE) or system.mount(b"none", b"/", None, PRIVATE, None)
    failed = failed or system.mount(b"none", b"hidden", b"tmpfs", 0, None)
    found["apart"] = not failed
hookline.training.resume.WRITE_TIMEOUT = 0.5
found["refused"] = problem(lambda: train("hidden/run", "fsdp", max_epochs=1))
Path(f"apart-{rank}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    done = torchrun(KILLED + APART, folder, deadline=300, launcher=("--standalone", "--max-restarts", "2"))
    assert done.code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def apart(killed: Path) -> tuple[Path, list[dict[str, Any]]]:
    return killed, [json.loads((killed / f"apart-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", ["shards", "names"])
def test_a_rank_killed_in_a_save_leaves_the_older_checkpoint_whole_and_nothing_that_looks_like_a_newer(
    killed: Path, name: str
) -> None:
    told = json.loads((killed / f"{name}-0.json").read_text())
    assert told["before"] == [["batch-3"], 0, "batch-3"]
    verify(killed / name / "checkpoints" / "batch-5")  # written again after the resume
    assert not list((killed / name / "checkpoints").glob(".*"))  # what was left of the other is gone


@pytest.mark.parametrize("name", ["shards", "names"])
def test_a_relaunched_job_ends_with_the_same_bits_on_each_rank(killed: Path, name: str) -> None:
    for rank in range(2):
        told = json.loads((killed / f"{name}-{rank}.json").read_text())
        assert told["digest"] == json.loads((killed / f"whole-{name}-{rank}.json").read_text())


def test_ranks_write_to_a_url_together_and_read_from_it(apart: Any) -> None:
    folder, ranks = apart
    url = (folder / "remote").as_uri() + "/step"
    verify(url)
    assert read(url)["module"]["layers.0.weight"].shape == (7, 8)
    for rank in ranks:
        for part in ("weights", "buffers", "optimizer", "counters"):
            assert rank["fetched"][part] == rank["digest"][part], part
    assert not list((folder / "copied").glob(".staging*"))


def test_a_disk_that_is_full_for_one_rank_is_an_error_on_all_and_the_older_one_stays(apart: Any) -> None:
    folder, ranks = apart
    for rank in ranks:
        assert (
            "rank 1: The checkpoint copied/full could not be written: rank-1.safetensors: No space left"
            in rank["full"]
        )
        assert rank["kept"]
    assert ranks[0]["left"] == []  # rank zero has tidied up before it was told
    verify(folder / "copied" / "full")


def test_whatever_fails_on_one_rank_is_an_error_on_all(apart: Any) -> None:
    for rank in apart[1]:
        assert "rank 1: MemoryError: no room" in rank["surprised"]
        assert (
            "copied/forged cannot be read: rank-1.json: " in rank["forged"]
            and "(found by rank 1)" in rank["forged"]
        )


def test_ranks_that_ask_for_different_checkpoints_are_told_instead_of_waiting_for_each_other(
    apart: Any,
) -> None:
    for rank in apart[1]:
        assert "rank 0 copied/of-0 (manual, step 6), rank 1 copied/of-1 (manual, step 6)" in rank["different"]


def test_a_run_directory_that_not_all_ranks_see_is_refused_before_it_trains(apart: Any) -> None:
    _, ranks = apart
    if not ranks[1]["apart"]:
        pytest.skip("this machine does not let a process have mounts of its own")
    for rank in ranks:
        assert (
            "OptionError" in rank["refused"]
            and "rank 1 cannot see what rank 0 writes there" in rank["refused"]
        )
        assert "a disk that all machines share" in rank["refused"]
