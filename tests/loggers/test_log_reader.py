"""Reading a log: what still holds, each record once, whichever checkpoints a run continued from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.loggers import JSONLines, read_log


class Course:
    """A run that is killed and resumed at will, and what should be left of its log by common sense."""

    def __init__(self, path: Path) -> None:
        self.path, self.left, self.written = path, list[int](), 0
        self.saved: list[tuple[Any, list[int]]] = []
        self.begin()

    def begin(self) -> None:
        self.logger = JSONLines(self.path)
        self.logger.log_hyperparams({})

    def log(self) -> None:
        self.written += 1
        self.left.append(self.written)
        self.logger.log_metrics({"n": self.written}, self.written, 0)

    def save(self) -> None:
        self.saved.append((self.logger.position(), list(self.left)))

    def kill(self, torn: bytes = b"") -> None:
        self.logger.close()
        with self.path.open("ab") as file:
            file.write(torn)

    def resume(self, which: int) -> None:
        position, left = self.saved[which % len(self.saved)]
        self.begin()
        self.logger.resume(position, 1, 0, "checkpoint")
        self.left = list(left)


def numbers(path: Path) -> list[int]:
    return [int(each["metrics"]["n"]) for each in read_log(path) if each["type"] == "metrics"]


TORN = (
    b"",
    b"{",
    b'{"type": "metrics", "metrics": {}',
    b'{"type": "resume", "superseded": {"from": 0, "to": 1',
    b"\xff\0",
    b"[1]",
    b"7",
)
action = st.one_of(
    st.just(("log",)),
    st.just(("log",)),
    st.just(("save",)),
    st.tuples(st.just("die"), st.integers(0, 9), st.sampled_from(TORN)),
    st.tuples(st.just("die before the resume is noted"), st.integers(0, 9), st.sampled_from(TORN)),
)


@settings(deadline=None, max_examples=150, database=None)
@given(st.lists(action, max_size=30))
def test_after_any_kills_and_resumes_what_is_left_is_the_course_that_led_to_the_end(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[Any, ...]]
) -> None:
    course = Course(tmp_path_factory.mktemp("log") / "log.jsonl")
    course.save()
    for name, *how in actions:
        if name == "log":
            course.log()
        elif name == "save":
            course.save()
        else:
            course.kill(how[1])
            if name != "die":
                course.begin()
                course.kill(how[1])
            course.resume(how[0])
    course.logger.close()
    assert numbers(course.path) == course.left
    every = [each for each in read_log(course.path, superseded=True) if each["type"] == "metrics"]
    assert [each["step"] for each in every] == list(range(1, course.written + 1))
    assert [each["step"] for each in every if each.get("superseded") is not True] == course.left


def test_a_resume_says_what_it_supersedes(tmp_path: Path) -> None:
    course = Course(tmp_path / "log.jsonl")
    course.log()
    course.save()
    length = course.path.stat().st_size
    course.log()
    course.log()
    course.kill(b'{"type": "met')
    course.resume(0)
    course.kill()
    last = json.loads(course.path.read_text().splitlines()[-1])
    torn = len('{"type": "met\n')
    marked = course.path.read_bytes()[length : last["superseded"]["to"]]
    assert marked.endswith(b'\n{"type": "met\n') and len(marked) > torn
    assert {key: last[key] for key in ("type", "step", "epoch", "checkpoint")} == {
        "type": "resume",
        "step": 1,
        "epoch": 0,
        "checkpoint": "checkpoint",
    }
    assert last["superseded"] == {"from": length, "to": length + len(marked), "records": 2}
    course.begin()
    course.logger.resume(course.logger.position(), 1, 0, "checkpoint")  # nothing came after it
    course.kill()
    assert "superseded" not in json.loads(course.path.read_text().splitlines()[-1])


def test_a_resume_that_is_void_gives_back_what_it_had_superseded(tmp_path: Path) -> None:
    course = Course(tmp_path / "log.jsonl")
    for _ in range(3):
        course.log()
        course.save()
    course.kill()
    course.resume(0)  # back to the first record...
    course.log()
    course.kill()
    assert numbers(course.path) == [1, 4]
    course.resume(2)  # ...and then the other way round: from where the first process had come to
    course.log()
    course.kill()
    assert numbers(course.path) == [1, 2, 3, 5]
    marks = [
        each.get("superseded") for each in read_log(course.path, superseded=True) if each["type"] == "resume"
    ]
    assert marks[0] is True and isinstance(marks[1], dict)


@pytest.mark.parametrize("other", ["another log", "cut short", "changed", "gone"])
def test_nothing_of_another_file_is_marked(other: str, tmp_path: Path) -> None:
    course = Course(tmp_path / "log.jsonl")
    for _ in range(5):
        course.log()
    course.save()
    course.log()
    course.kill()
    position, whole = course.saved[0][0], course.path.read_bytes()
    cut = whole[: position["bytes"] - 10]
    course.path.unlink()
    if other == "another log":
        second = Course(course.path)
        second.written = 50
        for _ in range(9):
            second.log()
        second.kill()
        assert course.path.stat().st_size > position["bytes"]
    elif other != "gone":
        course.path.write_bytes(
            cut if other == "cut short" else cut.replace(b'"n": 4', b'"n": 9') + whole[len(cut) :]
        )
    before = numbers(course.path) if course.path.exists() else []
    course.resume(0)
    course.kill()
    assert numbers(course.path) == before
    assert [each for each in read_log(course.path) if each["type"] == "resume"][0].get("superseded") is None


def test_half_a_line_is_skipped_and_a_running_run_is_read_up_to_where_it_was(tmp_path: Path) -> None:
    course = Course(tmp_path / "log.jsonl")
    course.log()
    with course.path.open("ab") as file:
        file.write(b'{"type": "metrics", "metr')
    reading = read_log(course.path)
    assert next(reading)["type"] == "hyperparams"
    with course.path.open("ab") as file:
        file.write(b'ics": {"n": 2}}\n')
    course.log()
    assert len(list(reading)) == 2  # nothing that began after the reading did
    assert numbers(course.path) == [1, 2, 2]
    course.kill()


@pytest.mark.parametrize(
    "range_",
    [None, 7, {}, {"from": 0}, {"from": 9, "to": 3}, {"from": -1, "to": 10**9}, {"from": "0", "to": "9"}],
)
def test_a_record_that_only_looks_like_a_resume_supersedes_nothing(range_: Any, tmp_path: Path) -> None:
    logger = JSONLines(tmp_path / "log.jsonl")
    logger.log_metrics({"n": 1}, 1, 0)
    logger.write("resume", superseded=range_)
    logger.close()
    assert numbers(tmp_path / "log.jsonl") == [1]


def test_a_log_that_is_not_there_is_an_error_that_names_it() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list(read_log("nowhere"))
