"""JSON from elsewhere is read within limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hookline.util.limited_json import TooLarge, is_count, parse_json, read_within


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def test_the_limits_of_json() -> None:
    assert parse_json(b'{"a": [1, 2.5, null, "x"]}') == {"a": [1, 2.5, None, "x"]}
    assert parse_json(nested(400))
    for text, why in (
        (b"NaN", "NaN is not JSON"),
        (b'{"a": 1, "a": 1}', "'a' appears twice"),
        (nested(600), "500 levels|too deeply"),
        (b"[" * 10**6, "too deeply"),
        (b"\xff", "decode"),
    ):
        with pytest.raises(ValueError, match=why):
            parse_json(text)


def test_the_number_of_levels_can_be_limited_further() -> None:
    assert parse_json(b'{"a": {"b": [1]}}', levels=3) == {"a": {"b": [1]}}
    with pytest.raises(ValueError, match="more than 2 levels deep"):
        parse_json(b'{"a": {"b": [1]}}', levels=2)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    with file.open("wb") as sparse:
        sparse.truncate(2**40)  # a terabyte that takes no room; reading it would fail
    with pytest.raises(TooLarge, match="larger than 3 MB"):
        read_within(file, 3 * 2**20)
    file.write_bytes(b"12345")
    assert read_within(file, 5) == b"12345"
    with pytest.raises(TooLarge):
        read_within(file, 4)


@pytest.mark.parametrize(
    ("value", "limits", "is_one"),
    [
        (0, (), True),
        (-1, (), False),
        (2**63 - 1, (), True),
        (2**63, (), False),
        (True, (), False),
        (1.0, (), False),
    ]
    + [("1", (), False), (5, (5, 6), True), (4, (5, 6), False), (7, (5, 6), False)],
)
def test_a_count_is_a_plain_integer_within_limits(value: Any, limits: tuple[int, ...], is_one: bool) -> None:
    assert is_count(value, *limits) is is_one
