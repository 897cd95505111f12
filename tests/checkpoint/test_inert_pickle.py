"""A pickle is read as plain data: nothing in it is imported, called or trusted."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from hookline.checkpoint.inert_pickle import Name, Record, RefusedName, read_records


class Point:
    """An object with a state, as dataclasses have."""

    def __init__(self, x: int) -> None:
        self.x = x


class Runs:
    """Unpickling it writes a file."""

    def __reduce__(self) -> Any:
        return Path.write_text, (Path("written"), "by the pickle")


def anything(name: str) -> bool:
    return True


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_plain_values_come_back_as_they_are(protocol: int) -> None:
    value = {
        "a": [1, -7, 2**40, 1.5, None, True, False],
        "b": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "c": "é",
    }
    value["again"] = value["a"]
    found = read_records(pickle.dumps(value, protocol), anything)
    assert found == value and found["again"] is found["a"]


@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_become_records_of_their_names(protocol: int) -> None:
    found = read_records(pickle.dumps([Point(3), PurePosixPath("a/b"), dict], protocol), anything)
    point, path, name = found
    assert isinstance(point, Record) and point.name.endswith(".Point") and point.state == {"x": 3}
    assert isinstance(path, Record) and path.name.endswith("PurePosixPath")
    assert isinstance(name, Name) and name.text.endswith(".dict")


def test_a_call_in_a_pickle_is_not_made() -> None:
    data = pickle.dumps(Runs())
    found = read_records(data, anything)
    assert isinstance(found, Record) and not Path("written").exists()
    pickle.loads(data)  # which shows that the pickle does what it is for
    assert Path("written").read_text() == "by the pickle"


def test_a_name_that_is_not_expected_is_refused() -> None:
    with pytest.raises(RefusedName, match=r"it requests pathlib\.\S+") as caught:
        read_records(pickle.dumps(Runs()), lambda name: name.startswith("torch."))
    assert "Path" in caught.value.name and not Path("written").exists()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "exhausted"),
        (pickle.dumps([1, 2, 3])[:-1], "exhausted"),
        (b"cos\nsystem\n(S'true'\ntR.", "opcode STRING"),
        (b"\x80\x04(.", "middle of a value"),
        (b"\x80\x04K\x01K\x02.", "middle of a value"),
        (b"\x80\x04\x85.", "a value that is not there"),
        (b"\x80\x04t.", "values that are not there"),
        (b"\x80\x04h\x07.", "refers to a value that is not there"),
        (b"\x80\x04K\x01K\x02a.", "not a list"),
        (b"\x80\x04})K\x01s.", "keys that are not text"),
        (b"\x80\x04K\x01)R.", "not a class"),
        (b"\x80\x04K\x01}b.", "not an object"),
        (b"\x80\x04K\x01K\x02\x93.", "not text"),
        (b"\x80\x04\x82\x01.", "opcode EXT1"),
        (b"\x80\x04Q.", "opcode BINPERSID"),
    ],
)  # fmt: skip
def test_other_streams_are_refused_with_the_reason(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_records(data, anything)


def test_deep_nesting_does_not_overflow_the_stack() -> None:
    found = read_records(b"\x80\x04)" + b"\x85" * 200_000 + b".", anything)
    assert isinstance(found, tuple)
    with pytest.raises(ValueError, match="keys"):
        read_records(b"\x80\x04})" + b"\x85" * 200_000 + b"K\x01s.", anything)


def test_changed_bytes_raise_nothing_but_value_errors() -> None:
    data = bytearray(pickle.dumps({"a": [Point(1), (1, 2)], "b": "text"}))
    for position in range(len(data)):
        for value in (0, 0x28, 0x52, 0x74, 0x93, 0xFF):
            changed = bytes(data[:position]) + bytes([value]) + bytes(data[position + 1 :])
            with contextlib.suppress(ValueError):
                read_records(changed, anything)
