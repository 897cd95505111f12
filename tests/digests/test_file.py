"""`digests.jsonl`: attempts, superseded steps, cut lines, ranks, and a file that cannot be written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hookline import OptionError, read_digests
from hookline.digests.file import DigestFile, file_of_rank, ranks_of


def run(rollbacks: int = 0, path: Any = None, name: str = "one") -> Any:
    return SimpleNamespace(
        resume=SimpleNamespace(path=path, rollbacks=rollbacks), identity=SimpleNamespace(id=name)
    )


def record(step: int, lr: float = 0.1, **more: Any) -> dict[str, Any]:
    return {"step": step, "batch": step - 1, "values": {"settings": {"lr": str(lr)}}, **more}


def written(folder: Path, *parts: Any, name: str = "one", rank: int = 0) -> DigestFile:
    """Write digests; a number begins another attempt at that step."""
    file = DigestFile(lambda: folder, rank, {"every": 2})
    for part in parts:
        if isinstance(part, int):
            file.restart(run(name=name), part)
        else:
            file.write(run(name=name), dict(part))
    file.close()
    return file


def test_a_resume_supersedes_later_steps_and_keeps_them_apart(tmp_path: Path) -> None:
    written(tmp_path, record(2, weights="a"), record(4, weights="b"), record(6, weights="c"))
    written(tmp_path, 3, record(4, weights="B"))
    found = read_digests(tmp_path)
    assert [(key[0], each["weights"]) for key, each in found.current.items()] == [(2, "a"), (4, "B")]
    assert [(each.number, each.from_step, len(each.digests)) for each in found.attempts] == [
        (1, 0, 3),
        (2, 3, 1),
    ]
    assert found.every == 2 and found.attempts[1].digests[4, 3]["weights"] == "B"
    written(tmp_path, 3)  # a resume that ends before its first digest
    assert [key[0] for key in read_digests(tmp_path).current] == [2]


def test_values_are_written_when_they_change_and_read_for_every_step(tmp_path: Path) -> None:
    written(tmp_path, record(1), record(2), record(3, lr=0.2), 2, record(3))
    lines = [json.loads(line) for line in (tmp_path / "digests.jsonl").read_text().splitlines()]
    assert ["values" in each for each in lines if each["type"] == "digest"] == [True, False, True, True]
    found = read_digests(tmp_path)
    rates = [each["values"]["settings"]["lr"] for each in found.attempts[0].digests.values()]
    assert rates == ["0.1", "0.1", "0.2"] and found.current[3, 2]["values"]["settings"]["lr"] == "0.1"


def test_a_line_that_was_cut_off_is_left_out_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    written(tmp_path, record(1), record(2))
    path = tmp_path / "digests.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    written(tmp_path, 1, record(2), record(3))
    found = read_digests(tmp_path)
    assert [key[0] for key in found.current] == [1, 2, 3] and len(found.attempts) == 2


def test_another_run_in_the_same_directory_begins_anew(tmp_path: Path) -> None:
    written(tmp_path, record(1), record(2))
    written(tmp_path, record(1, weights="new"), name="two")
    found = read_digests(tmp_path)
    assert len(found.attempts) == 1 and [key[0] for key in found.current] == [1]


def test_each_rank_has_its_file(tmp_path: Path) -> None:
    for rank in (0, 2):
        written(tmp_path, record(1, weights=str(rank)), rank=rank)
    assert ranks_of(tmp_path) == [0, 2]
    assert file_of_rank(tmp_path, 2).name == "digests.rank2.jsonl"
    assert read_digests(tmp_path, 2).current[1, 0]["weights"] == "2"
    assert read_digests(file_of_rank(tmp_path, 2)).current.keys() == {(1, 0)}


def test_odd_files_are_read_as_far_as_they_are_digests(tmp_path: Path) -> None:
    assert read_digests(tmp_path).current == {} and read_digests(tmp_path).every == 1
    lines = ["[]", '{"type": "digest", "step": 1, "batch": 0}', "[" * 9999, '{"type": "attempt", "run": 1}']
    odd = [
        *lines,
        '{"type": "digest", "step": "x", "batch": 0}',
        '{"type": "digest", "step": 3, "batch": 1, "values": 5}',
    ]
    (tmp_path / "digests.jsonl").write_text("\n".join(odd))
    assert list(read_digests(tmp_path).current) == [(3, 1)]
    (tmp_path / "digests.jsonl").write_text('{"type": "attempt", "format": 99}\n')
    with pytest.raises(OptionError, match="has digests of format 99, which this version does not read"):
        read_digests(tmp_path)


def test_a_file_that_cannot_be_written_ends_the_digests_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "digests.jsonl").mkdir()
    file = DigestFile(lambda: tmp_path, 0, {})
    for step in (1, 2):
        file.write(run(), record(step))
    assert caplog.text.count("cannot be written, and are switched off") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_digests_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "digests.jsonl").symlink_to("/dev/full")
    written(tmp_path, record(1), record(2))  # what was not written is tried again when the file is closed
    assert caplog.text.count("cannot be written, and are switched off") == 1
