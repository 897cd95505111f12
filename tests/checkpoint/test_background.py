"""Saving while the training continues: what is written is what was there when it was asked for."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookline import CheckpointError
from hookline.checkpoint import writer
from hookline.checkpoint.background import BackgroundSaver, Buffer
from hookline.checkpoint.files import read, read_manifest, write


class Gate:
    """Holds the first flush back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        real = os.fsync

        def held(handle: int) -> None:
            self.reached.set()
            assert self.open.wait(120)
            real(handle)

        monkeypatch.setattr(os, "fsync", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_training_that_continues_does_not_change_what_is_written(tmp_path: Path, gate: Gate) -> None:
    weight, facts, told = torch.ones(1000), {"seen": [1]}, list[Any]()
    saver = BackgroundSaver()
    saver.start(
        {"module": {"w": weight, "view": weight[::2]}, "hooks": facts},
        tmp_path / "c",
        {"reason": "interval"},
        told.append,
    )
    assert gate.reached.wait(120)
    weight.zero_()
    facts["seen"].append(2)
    assert told == [] and not (tmp_path / "c").exists() and not saver.wait(0.01)
    gate.open.set()
    assert saver.wait() and told == [None]
    restored = read(tmp_path / "c")
    assert restored["hooks"] == {"seen": [1]}
    assert float(restored["module"]["w"].sum()) == 1000.0 and float(restored["module"]["view"].sum()) == 500.0
    assert read_manifest(tmp_path / "c")["reason"] == "interval"


def test_one_at_a_time_in_the_order_asked_for(tmp_path: Path) -> None:
    saver, order = BackgroundSaver(), list[int]()
    weight = torch.zeros(100)
    for step in range(4):
        weight.fill_(step)
        saver.start(
            {"module": {"w": weight}},
            tmp_path / f"step-{step}",
            {},
            lambda error, step=step: order.append(step),
        )
    saver.close()
    assert order == [0, 1, 2, 3]
    assert [float(read(tmp_path / f"step-{step}")["module"]["w"][0]) for step in range(4)] == [
        0.0,
        1.0,
        2.0,
        3.0,
    ]


def test_a_second_one_waits_for_the_first(tmp_path: Path, gate: Gate) -> None:
    saver, told = BackgroundSaver(), list[Any]()
    saver.start({"a": 1}, tmp_path / "first", {}, told.append)
    assert gate.reached.wait(120)
    second = threading.Thread(target=lambda: saver.start({"a": 2}, tmp_path / "second", {}, told.append))
    second.start()
    second.join(0.05)
    assert second.is_alive() and told == []
    gate.open.set()
    second.join(30)
    saver.close()
    assert told == [None, None]


def test_what_goes_wrong_is_told_not_lost(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saver, told = BackgroundSaver(), list[Any]()
    saver.start({"a": 1}, tmp_path / "file" / "c", {}, told.append)
    saver.wait()
    saver.start({"hooks": {"mine": object()}}, tmp_path / "c", {}, told.append)
    saver.wait()
    assert [type(each) for each in told] == [CheckpointError, CheckpointError]
    assert "file" in str(told[0]) and "hooks.mine is a builtins.object" in str(told[1])
    saver.start({"a": 1}, tmp_path / "c", {}, told.append)
    saver.close()
    assert told[2] is None and read(tmp_path / "c") == {"a": 1}


def test_tied_weights_and_rare_types_survive_the_copy(tmp_path: Path) -> None:
    embedding, head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
    head.weight = embedding.weight
    state = nn.ModuleDict({"embedding": embedding, "head": head}).state_dict()
    rest = {
        "c": torch.randn(3, dtype=torch.complex128),
        "f": torch.randn(5).to(torch.float8_e5m2fnuz),
        "e": torch.empty(0, 3),
    }
    write(Buffer().snapshot({"module": state, "rest": rest}), tmp_path / "c")
    restored = read(tmp_path / "c")
    assert restored["module"]["head.weight"] is restored["module"]["embedding.weight"]
    assert read_manifest(tmp_path / "c")["shared"] == {"head.weight": "embedding.weight"}
    assert torch.equal(restored["rest"]["c"], rest["c"]) and restored["rest"]["e"].shape == (0, 3)
    assert torch.equal(restored["rest"]["f"].view(torch.uint8), rest["f"].view(torch.uint8))


def test_the_memory_of_the_last_copy_is_used_again(tmp_path: Path) -> None:
    buffer = Buffer()
    first = buffer.snapshot({"module": {"w": torch.ones(1000)}}).model["w"]
    again = buffer.snapshot({"module": {"w": torch.zeros(1000)}}).model["w"]
    assert again.data_ptr() == first.data_ptr()
    assert float(again.sum()) == 0.0


def test_a_disk_that_hangs_is_waited_for_so_long_and_no_longer(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "FLUSH_TIMEOUT", 0.2)
    saver, told = BackgroundSaver(), list[Any]()
    saver.start({"a": 1}, tmp_path / "first", {}, told.append)
    assert not saver.wait()
    assert "first could not be written: it was still not on the disk after 0 s" in str(told[0])
    saver.start({"a": 2}, tmp_path / "second", {}, told.append)  # not waited for once more
    assert "second was not written" in str(told[1]) and "first is still being written" in str(told[1])
    gate.open.set()  # the disk is back
    assert saver.wait(30) and told[2:] == [None]
    assert "first was written after its time limit" in caplog.text
    saver.start({"a": 3}, tmp_path / "third", {}, told.append)
    saver.close()
    assert (
        told[3:] == [None] and read(tmp_path / "first") == {"a": 1} and read(tmp_path / "third") == {"a": 3}
    )


def test_files_that_are_written_side_by_side_are_waited_for_so_long_and_no_longer(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "FLUSH_TIMEOUT", 0.2)
    held, mine = os.fsync, threading.get_ident()
    monkeypatch.setattr(os, "fsync", lambda handle: None if threading.get_ident() == mine else held(handle))
    with pytest.raises(
        CheckpointError, match="c could not be written: model.safetensors: still not on the disk after 0 s"
    ):
        write({"module": {"w": torch.ones(3)}, "optimizers": [{"m": torch.ones(3)}]}, tmp_path / "c")
    gate.open.set()
    assert not (tmp_path / "c").exists()
