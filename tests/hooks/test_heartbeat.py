"""Heartbeat: a sign of life that is whole whenever it is read, and never harms the run."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import servers
from servers import nobody_at, serving
from tiny import Net, batches, quiet

from hookline.hooks.heartbeat import Heartbeat
from hookline.util.errors import OptionError


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in servers.PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def beat(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_file_says_how_far_the_run_is(tmp_path: Path) -> None:
    trainer = quiet(run_dir=tmp_path, hooks=[Heartbeat(every=0)])
    seen: list[tuple[str, int]] = []

    @trainer.on("train_batch_start")
    def look() -> None:
        found = beat(tmp_path / "heartbeat.json")
        seen.append((found["status"], found["step"]))

    trainer.fit(Net(), batches(3))
    assert seen == [("training", 0), ("training", 1), ("training", 2)]
    last = beat(tmp_path / "heartbeat.json")
    assert (last["status"], last["step"], last["batches_seen"], last["samples_seen"], last["pid"]) == (
        "completed",
        3,
        3,
        9,
        os.getpid(),
    )
    assert [path.name for path in tmp_path.iterdir()] == ["heartbeat.json"]  # nothing is left beside it


def test_between_two_beats_nothing_is_written(tmp_path: Path) -> None:
    trainer = quiet(run_dir=tmp_path, hooks=[Heartbeat(every="1 hour")])
    seen: set[int] = set()
    trainer.on("train_batch_start")(lambda: seen.add((tmp_path / "heartbeat.json").stat().st_mtime_ns))
    trainer.fit(Net(), batches(20))
    assert len(seen) == 1


def test_a_failed_run_leaves_its_status(tmp_path: Path) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        quiet(run_dir=tmp_path, hooks=[Heartbeat()]).fit(Fails(), batches(1))
    assert beat(tmp_path / "heartbeat.json")["status"] == "error"


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_it_beats_in_every_verb(tmp_path: Path, verb: str) -> None:
    trainer = quiet(run_dir=tmp_path, hooks=[Heartbeat(every=0)])
    kind = {"validate": "validation"}.get(verb, verb)
    times: list[float] = []
    trainer.on(f"{kind}_batch_start")(lambda: times.append((tmp_path / "heartbeat.json").stat().st_ino))
    getattr(trainer, verb)(Net(), batches(3))
    assert len(set(times)) > 1
    assert beat(tmp_path / "heartbeat.json")["stage"] == verb


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path, over, read = tmp_path / "heartbeat.json", threading.Event(), []

    def watch() -> None:
        while not over.is_set():
            if path.exists():
                read.append(path.read_text())

    reader = threading.Thread(target=watch)
    reader.start()
    try:
        quiet(run_dir=tmp_path, hooks=[Heartbeat(every=0)]).fit(Net(), batches(100))
    finally:
        over.set()
        reader.join()
    assert len(set(read)) > 1
    assert all(json.loads(text)["stage"] == "fit" for text in read)


def test_a_file_that_cannot_be_written_is_reported_once_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("a file where a folder is needed")
    trainer = quiet(run_dir=tmp_path, hooks=[Heartbeat("taken/heartbeat.json", every=0)])
    trainer.fit(Net(), batches(4))
    assert trainer.status == "completed"
    (record,) = caplog.records
    assert "cannot be written" in record.getMessage() and record.exc_info is None


def test_the_path_is_below_the_run_directory_unless_it_is_absolute(tmp_path: Path) -> None:
    quiet(run_dir=tmp_path / "run", hooks=[Heartbeat("live/beat.json")]).fit(Net(), batches(1))
    assert beat(tmp_path / "run/live/beat.json")["step"] == 1
    quiet(run_dir=tmp_path / "run", hooks=[Heartbeat(tmp_path / "beat.json")]).fit(Net(), batches(1))
    assert beat(tmp_path / "beat.json")["step"] == 1


def test_an_address_is_called_and_no_file_is_written(tmp_path: Path) -> None:
    with serving() as server:
        trainer = quiet(run_dir=tmp_path, hooks=[Heartbeat(url=server.url("/ping/1234"), every=0)])
        trainer.on("train_start")(lambda: server.busy.wait(60))
        trainer.fit(Net(), batches(3))
    assert set(server.got) == {("GET", "/ping/1234", b"")}
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_does_not_call_to_say_that_it_is_well() -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("broken")

    with serving() as server, pytest.raises(RuntimeError):
        quiet(hooks=[Heartbeat(url=server.url("/ping"))]).fit(Fails(), batches(1))
    assert len(server.got) == 1  # when it began


@pytest.mark.parametrize("down", [True, False], ids=["down", "hangs"])
def test_an_address_that_does_not_answer_does_not_matter(
    down: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(hangs=True) as server:
        url = nobody_at("/s3cr3t") if down else server.url("/s3cr3t")
        hook = Heartbeat(url=url, every=0, timeout=0.3)
        trainer = quiet(hooks=[hook])
        trainer.fit(Net(), batches(50))
    assert trainer.status == "completed"
    assert "s3cr3t" not in caplog.text + repr(vars(hook))
    assert 1 <= len(caplog.records) <= 3  # not once per beat


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"every": "5 steps"}, "every='5 steps' must be a time"),
        ({"every": "often"}, "every='often'"),
        ({"every": -1}, "every=-1 must be a time"),
        ({"every": True}, "every=True must be a time"),
        ({"path": "../beat.json"}, "path='../beat.json' must be the path of a file"),
        ({"url": "ftp://x/s3cr3t"}, "url .not shown"),
        ({"url": "https://x/", "timeout": -1}, "timeout=-1"),
    ],
    ids=str,
)
def test_wrong_parameters_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=f"Heartbeat: {says}") as caught:
        Heartbeat(**wrong)
    assert "s3cr3t" not in str(caught.value)
