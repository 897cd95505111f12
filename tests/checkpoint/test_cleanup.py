"""What killed processes leave behind is put in order; what living ones write is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch

from hookline.checkpoint import writer
from hookline.checkpoint.files import clean_up, read, remove, verify, write
from hookline.checkpoint.writer import machine_id


def contents(step: int = 1) -> dict[str, Any]:
    return {"module": {"w": torch.full((3,), float(step))}, "counters": {"step": step}}


@pytest.fixture
def dead() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_a_half_written_one_of_a_dead_process_goes(tmp_path: Path, dead: int) -> None:
    write(contents(), tmp_path / "step-1")
    (tmp_path / f".step-2.{machine_id()}-{dead}.new").mkdir()
    (tmp_path / f".step-2.{machine_id()}-{dead}.new" / "model.safetensors").write_text("half")
    (tmp_path / ".step-0.gone").mkdir()
    assert clean_up(tmp_path) == []
    assert names(tmp_path) == ["step-1"]


def test_one_that_was_being_replaced_gets_its_name_back(tmp_path: Path, dead: int) -> None:
    write(contents(), tmp_path / "best.v1")
    (tmp_path / "best.v1").rename(tmp_path / f".best.v1.{machine_id()}-{dead}.old")
    (tmp_path / f".best.v1.{machine_id()}-{dead}.new").mkdir()
    assert clean_up(tmp_path) == [tmp_path / "best.v1"]
    verify(tmp_path / "best.v1")
    assert names(tmp_path) == ["best.v1"]


def test_one_that_was_replaced_goes(tmp_path: Path, dead: int) -> None:
    write(contents(1), tmp_path / f".best.{machine_id()}-{dead}.old")
    write(contents(2), tmp_path / "best")
    assert clean_up(tmp_path) == []
    assert names(tmp_path) == ["best"]
    assert read(tmp_path / "best")["counters"]["step"] == 2


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for kind in ("new", "old"):
            (tmp_path / f".step-1.{machine_id()}-{living.pid}.{kind}").mkdir()
        before = names(tmp_path)
        clean_up(tmp_path)
        assert names(tmp_path) == before
    finally:
        living.communicate(b"\n")
    clean_up(tmp_path)
    assert not [each for each in names(tmp_path) if each.endswith(".new")]


def test_a_predecessor_of_the_same_number_is_dead_but_ones_own_saves_are_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / f".step-1.{machine_id()}-{os.getpid()}.new"
    mine.mkdir()
    clean_up(tmp_path)
    assert names(tmp_path) == []
    seen: list[list[str]] = []
    real = os.rename

    def meanwhile(old: Any, new: Any) -> None:
        clean_up(tmp_path)
        seen.append(names(tmp_path))
        real(old, new)

    write(contents(), tmp_path / "step-1")
    monkeypatch.setattr(writer, "exchange", lambda aside, path: False)
    monkeypatch.setattr(os, "rename", meanwhile)
    write(contents(), tmp_path / "step-1")
    assert mine.name in seen[0] and mine.with_suffix(".old").name in seen[1]
    assert names(tmp_path) == ["step-1"]
    assert not writer.writing


def test_other_hidden_things_and_folders_that_are_not_there_are_no_concern(tmp_path: Path) -> None:
    for each in (".git", ".step-1.new", ".step-1.12x.old", "step-1.99999.new"):
        (tmp_path / each).mkdir()
    before = names(tmp_path)
    clean_up(tmp_path)
    assert names(tmp_path) == before
    assert clean_up(tmp_path / "nowhere") == []


KILLED = """
import os, sys
from pathlib import Path
import torch
from hookline.checkpoint import writer
from hookline.checkpoint.files import write
path, nth, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
contents = lambda step: {"module": {"w": torch.ones(3)}, "counters": {"step": step}}
write(contents(1), path)
seen = 0
def dying(real):
    def call(*given, **named):
        global seen
        seen += 1
        if seen == nth:
            os.kill(os.getpid(), 9)
        return real(*given, **named)
    return call
for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
    setattr(os, name, dying(getattr(os, name)))
writer.exchange = dying(writer.exchange) if how == "exchange" else lambda aside, path: False
write(contents(2), path)
"""


@pytest.mark.parametrize(
    ("how", "nth"),
    [
        *(("rename", nth) for nth in (1, 4, 8, 9, 10, 11, 13)),
        *(("exchange", nth) for nth in (6, 7, 8, 9, 10)),
    ],
)
def test_a_process_killed_while_it_replaces_a_checkpoint_leaves_a_whole_one(
    tmp_path: Path, how: str, nth: int
) -> None:
    path = tmp_path / "best"
    code = preloaded.run([sys.executable, "-c", KILLED, str(path), str(nth), how], check=False).returncode
    assert code == -9
    clean_up(tmp_path)
    assert read(path)["counters"]["step"] in (1, 2)
    assert names(tmp_path) == ["best"]


def test_what_a_process_on_another_machine_writes_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".step-9.0badcafe-99999999.new").mkdir()
    assert clean_up(tmp_path) == [] and names(tmp_path) == [".step-9.0badcafe-99999999.new"]


def test_what_is_no_checkpoint_is_left_alone_whatever_its_name(tmp_path: Path, dead: int) -> None:
    for name in (".notes.gone", f".step-1.{machine_id()}-{dead}.new", f".step-1.{machine_id()}-{dead}.old"):
        (tmp_path / name / "inside").mkdir(parents=True)
        (tmp_path / name / "model.safetensors").write_text("half")
        (tmp_path / name / "inside" / "thesis.txt").write_text("mine")
    (tmp_path / ".file.gone").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".link.gone").symlink_to(tmp_path / "elsewhere")
    before = names(tmp_path)
    assert clean_up(tmp_path) == [] and names(tmp_path) == before


def test_a_checkpoint_that_is_gone_already_does_not_fail_its_removal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remove(tmp_path / "gone")
    assert "is gone already" in caplog.text


def test_a_removal_that_was_interrupted_is_finished(tmp_path: Path) -> None:
    write(contents(), tmp_path / ".step-0.gone")
    (tmp_path / ".step-0.gone" / "manifest.json").unlink()
    (tmp_path / ".step-0.gone" / "rank-1.json").write_text("{}")
    clean_up(tmp_path)
    assert names(tmp_path) == []
