"""Files that a hook or a person puts into a checkpoint's directory: left alone, and removed with the checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import preloaded
import pytest
import torch
from tiny import Net, batches, quiet

from hookline import CheckpointError, Hook, load_weights
from hookline.checkpoint.catalog import find_checkpoints
from hookline.checkpoint.files import clean_up, read, remove, verify, write
from hookline.checkpoint.remote import list_urls
from hookline.checkpoint.writer import machine_id
from hookline.cli import main
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.hooks.upload_checkpoint import UploadCheckpoint


class Exports(Hook):
    """Writes what another tool needs next to our files, under names that we use too."""

    def on_checkpoint_save(self, path: Path, step: int) -> None:
        (path / "hf").mkdir()
        for name in ("config.json", "manifest.json", "model.safetensors"):
            (path / "hf" / name).write_text(f"of step {step}")
        (path / "notes.txt").write_text(f"step {step}")


class Fails(Hook):
    def on_train_batch_start(self, step: int) -> None:
        if step == 5:
            raise RuntimeError("killed")


def contents(step: int = 1) -> dict[str, Any]:
    return {"module": {"w": torch.full((3,), float(step))}, "counters": {"step": step}}


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    """A checkpoint with files of others."""
    write(contents(), tmp_path / "step-1")
    Exports().on_checkpoint_save(tmp_path / "step-1", 1)
    return tmp_path / "step-1"


@pytest.fixture
def dead() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def train(*hooks: Any, resume: Any = None, **options: Any) -> Any:
    keep = ModelCheckpoint(
        every_n_train_steps=2, save_top_k=2, save_last=True, filename="s{step}", auto_insert_metric_name=False
    )
    torch.manual_seed(1)
    trainer = quiet(run_dir="run", hooks=[keep, *hooks], max_epochs=2, **options)
    trainer.fit(Net(), batches(4), resume=resume)
    return trainer


@pytest.mark.parametrize("save", ["sync", "async"])
def test_a_run_resumes_from_checkpoints_that_a_hook_has_added_files_to(
    save: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = train(Exports(), save=save)
    shutil.rmtree("run")
    with pytest.raises(RuntimeError, match="killed"):
        train(Exports(), Fails(), save=save)
    caplog.clear()
    again = train(Exports(), resume="auto", save=save)
    assert " skips " not in caplog.text and "step 4" in caplog.text
    assert torch.equal(again.module.layer.weight, whole.module.layer.weight)
    assert load_weights(Net(), "run").complete


def test_files_of_others_are_left_as_they_are(extended: Path) -> None:
    verify(extended)
    assert read(extended)["counters"]["step"] == 1
    found, broken = find_checkpoints(extended.parent)
    assert [each.path for each in found] == [extended] and not broken  # what lies in hf/ is not a checkpoint
    assert names(extended / "hf") == ["config.json", "manifest.json", "model.safetensors"]


def test_links_pipes_and_odd_names_beside_our_files_are_not_touched(extended: Path) -> None:
    os.mkfifo(extended / "pipe")  # reading it would wait for ever
    (extended / "dangling").symlink_to(extended / "nowhere")
    (extended / "rank-one.json").write_text("{")
    (extended / "rank-00.safetensors").write_text("")
    verify(extended)
    assert read(extended)["counters"]["step"] == 1


@pytest.mark.parametrize("name", ["rank-1.safetensors", "rank-1.json"])
def test_one_more_file_of_ours_is_damage(extended: Path, name: str) -> None:
    (extended / name).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"step-1 is damaged: {name} .*not in its manifest"):
        verify(extended)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_our_own_files_stay_verified_beside_others(extended: Path, name: str) -> None:
    (extended / name).write_bytes((extended / name).read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=name):
        read(extended)


def test_a_checkpoint_is_removed_with_everything_in_its_directory() -> None:
    train(Exports())
    assert names(Path("run/checkpoints")) == ["last", "s6", "s8"]  # s2 and s4 went, and what was in them


def test_a_checkpoint_that_is_replaced_takes_the_files_of_others_with_it() -> None:
    class Once(Hook):
        def on_checkpoint_save(self, path: Path, step: int) -> None:
            if step == 2:
                (path / "only-once.txt").write_text("of step 2")

    train(Exports(), Once())
    assert names(Path("run/checkpoints/last")) == [
        "hf",
        "manifest.json",
        "model.safetensors",
        "notes.txt",
        "state.json",
        "state.safetensors",
    ]
    assert Path("run/checkpoints/last/notes.txt").read_text() == "step 8"


def test_a_directory_that_is_no_checkpoint_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("mine")
    with pytest.raises(
        CheckpointError, match="thesis was not removed: it does not contain a file of a checkpoint"
    ):
        quiet().remove_checkpoint(tmp_path / "thesis")
    assert names(tmp_path) == ["thesis"]


def test_a_file_written_before_the_checkpoint_exists_is_refused_with_the_event_to_use() -> None:
    class TooEarly(Hook):
        def on_save_checkpoint(self, path: Any) -> None:
            (Path(path) / "hf").mkdir(parents=True)

    with pytest.raises(CheckpointError, match=r"exists and is not a checkpoint(.|\n)*on_checkpoint_save"):
        train(TooEarly())


# ---- clean-up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gone", "old"])
def test_a_removal_that_was_interrupted_is_finished_with_the_files_of_others(
    extended: Path, dead: int, kind: str
) -> None:
    write(contents(2), extended.with_name("other"))
    left = extended.with_name(".other.gone" if kind == "gone" else f".other.{machine_id()}-{dead}.old")
    extended.rename(left)
    (left / "hf" / "config.json").unlink()  # it had begun
    clean_up(left.parent)
    assert names(left.parent) == ["other"]


KILLED = """
import os, shutil, sys
from pathlib import Path
from hookline.checkpoint.files import remove
whole, folder = Path(sys.argv[1]), Path(sys.argv[2])
def dying(real, nth):
    def call(*given, **named):
        nth[0] -= 1
        if nth[0] == 0:
            os.kill(os.getpid(), 9)
        return real(*given, **named)
    return call
for nth in range(1, 15):
    path = folder / str(nth) / "step-1"
    shutil.copytree(whole, path)
    child = os.fork()
    if child == 0:
        left = [nth]
        for name in ("rename", "unlink", "rmdir"):
            setattr(os, name, dying(getattr(os, name), left))
        remove(path)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_removal_killed_at_any_call_leaves_nothing_behind_after_the_next_start(
    extended: Path, tmp_path: Path
) -> None:
    done = preloaded.run(
        [sys.executable, "-c", KILLED, str(extended), str(tmp_path / "killed")],
        check=True,
        capture_output=True,
    )
    assert set(done.stdout.split()) == {b"-9", b"0"}  # the last ones had no such call any more
    for folder in (tmp_path / "killed").iterdir():
        clean_up(folder)
        assert names(folder) in (["step-1"], []), folder.name
        if names(folder):
            verify(folder / "step-1")


def test_one_that_was_being_replaced_gets_its_name_back_with_the_files_of_others(
    extended: Path, dead: int
) -> None:
    extended.rename(extended.with_name(f".step-1.{machine_id()}-{dead}.old"))
    assert clean_up(extended.parent) == [extended]
    assert (extended / "hf" / "config.json").read_text() == "of step 1"


def test_what_only_looks_like_a_removed_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".thesis.gone").mkdir()
    (tmp_path / ".thesis.gone" / "manifest.json").write_text('{"kind": "of another tool"}')
    (tmp_path / ".thesis.gone" / "thesis.txt").write_text("mine")
    clean_up(tmp_path)
    assert names(tmp_path / ".thesis.gone") == ["manifest.json", "thesis.txt"]


# ---- the command line --------------------------------------------------------------------------------------------


def test_verify_and_show_name_them(capsys: pytest.CaptureFixture[str]) -> None:
    train(Exports())
    assert main(["checkpoint", "verify", "run/checkpoints/last"]) == 0
    assert (
        capsys.readouterr().out == "whole  run/checkpoints/last (not of Hookline, ignored: hf, notes.txt)\n"
    )
    assert main(["checkpoint", "verify", "run/checkpoints/last", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["extra"] == ["hf", "notes.txt"]
    assert main(["checkpoint", "show", "run/checkpoints/last"]) == 0
    assert "  other files hf, notes.txt" in capsys.readouterr().out
    assert main(["checkpoint", "show", "run"]) == 0
    assert all("whole, with hf, notes.txt" in line for line in capsys.readouterr().out.splitlines()[2:])


# ---- other places ------------------------------------------------------------------------------------------------


def uploaded(tmp_path: Path, *hooks: Any) -> Path:
    keep = ModelCheckpoint(save_top_k=0, save_last=True)
    hook = UploadCheckpoint(f"file://{tmp_path}/backup")
    quiet(run_dir="run", max_epochs=2, hooks=[keep, *hooks, hook]).fit(Net(), batches(2))
    assert hook.failed == []
    return tmp_path / "backup" / "last"


def test_an_upload_takes_them_along_and_replaces_them_with_the_checkpoint(tmp_path: Path) -> None:
    class ByStep(Exports):
        def on_checkpoint_save(self, path: Path, step: int) -> None:
            super().on_checkpoint_save(path, step)
            (path / f"only-{step}.txt").write_text("")

    there = uploaded(tmp_path, ByStep())
    assert read(there)["counters"]["step"] == 4
    assert (there / "hf" / "manifest.json").read_text() == "of step 4"
    assert (there / "only-4.txt").exists() and not (there / "only-2.txt").exists()


def test_what_cannot_be_uploaded_of_them_is_named_and_the_checkpoint_arrives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Hook):
        def on_checkpoint_save(self, path: Path) -> None:
            (path / "dangling").symlink_to("nowhere")
            os.mkfifo(path / "pipe")
            (path / "notes.txt").write_text("mine")

    there = uploaded(tmp_path, Odd())
    assert read(there)["counters"]["step"] == 4 and (there / "notes.txt").read_text() == "mine"
    assert "last is uploaded without dangling, pipe" in caplog.text


def test_what_was_changed_after_the_save_is_uploaded_as_it_was(tmp_path: Path) -> None:
    import threading

    gate = threading.Event()

    class Changes(Hook):
        def on_checkpoint_save(self, path: Path, step: int) -> None:
            (path / "notes.txt").write_text(f"step {step}")

        def on_train_end(self, trainer: Any) -> None:
            with open(trainer.run_dir / "checkpoints" / "last" / "notes.txt", "r+") as file:
                file.write("changed")
            gate.set()

    hook = UploadCheckpoint(f"file://{tmp_path}/backup")
    real = hook._try
    hook._try = lambda *given: (gate.wait(20), real(*given))[1]  # type: ignore[method-assign]
    keep = ModelCheckpoint(save_top_k=0, save_last=True)
    quiet(run_dir="run", max_epochs=1, hooks=[keep, Changes(), hook]).fit(Net(), batches(2))
    assert (tmp_path / "backup" / "last" / "notes.txt").read_text() == "step 2"


def test_at_a_url_too_they_are_left_alone_and_go_with_the_checkpoint(tmp_path: Path) -> None:
    url, there = f"file://{tmp_path}/there", tmp_path / "there" / "last"
    write(contents(1), f"{url}/last")
    ours = names(there)
    Exports().on_checkpoint_save(there, 1)
    assert list_urls(url) == [f"{url}/last"]  # not hf/, although it has a manifest.json
    verify(f"{url}/last")
    assert read(f"{url}/last")["counters"]["step"] == 1
    (there / "rank-1.json").write_text("{}")
    with pytest.raises(CheckpointError, match="rank-1.json"):
        verify(f"{url}/last")
    write(contents(2), f"{url}/last")
    assert read(f"{url}/last")["counters"]["step"] == 2
    fs, root = fsspec.core.url_to_fs(f"{url}/last")
    assert sorted(each[len(root) + 1 :] for each in fs.find(root)) == ours
    remove(f"{url}/last")
    assert not there.exists()


def test_files_in_a_folder_that_is_no_checkpoint_are_not_removed_by_an_upload(tmp_path: Path) -> None:
    (tmp_path / "there" / "last").mkdir(parents=True)
    (tmp_path / "there" / "last" / "thesis.txt").write_text("mine")
    write(contents(1), f"file://{tmp_path}/there/last")
    assert (tmp_path / "there" / "last" / "thesis.txt").read_text() == "mine"
