"""checklist.toml is whole: every id is there, and leads to tests that exist."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHECKLIST: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "tests" / "checklist.toml").read_text())

IDS = {
    "000-": "1-18",
    "001-": "1-8 10-14 15a-f 16-28 29a-f 30-32 40a-b 41a-f 42a-b 43a-b 44a-d 45a-c",
    "002-": "1-6 10-41 50-57 60-67 68a-b 69a-b 70-78 80-95",
    "003-": "1-23",
    "004-": "1-27",
    "C": "1-19",
    "N": "1-17",
    "M": "1-15",
    "T": "1-20",
    "K": "1-14",
    "S": "1-11",
    "L": "1-9",
}


def spelled_out(ranges: dict[str, str]) -> list[str]:
    """`{"001-": "1-2 15a-b"}` -> 001-1, 001-2, 001-15a, 001-15b."""
    return [
        prefix + each for prefix, text in ranges.items() for part in text.split() for each in one_range(part)
    ]


def one_range(part: str) -> list[str]:
    match = re.fullmatch(r"(?P<number>\d+)(?:(?P<first>[a-z])-(?P<last>[a-z])|-(?P<to>\d+))?", part)
    assert match, part
    number = match["number"]
    if match["first"]:
        return [number + chr(letter) for letter in range(ord(match["first"]), ord(match["last"]) + 1)]
    return [str(each) for each in range(int(number), int(match["to"] or number) + 1)]


@functools.cache
def functions_of(file: str) -> frozenset[str]:
    """The test functions of a file."""
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    functions = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return frozenset(name for name in functions if name.startswith("test_"))


def test_ranges_are_spelled_out() -> None:
    assert spelled_out({"X-": "1-3 5a-c 9"}) == ["X-1", "X-2", "X-3", "X-5a", "X-5b", "X-5c", "X-9"]


def test_every_id_is_there_once_and_in_order() -> None:
    assert list(CHECKLIST) == spelled_out(IDS)


def test_every_entry_says_what_is_asked_and_shows_it() -> None:
    for id, entry in CHECKLIST.items():
        assert set(entry) == {"asks", "tests"}, id
        assert 0 < len(entry["asks"]) < 100, id
        assert entry["tests"] != [], id


def test_every_test_named_exists() -> None:
    for id, entry in CHECKLIST.items():
        nodes = entry.get("tests", [])
        assert len(set(nodes)) == len(nodes), id
        assert [
            node for node in nodes if node.partition("::")[2] not in functions_of(node.partition("::")[0])
        ] == [], id


def test_every_test_about_the_documents_is_in_the_checklist() -> None:
    cited = {node for entry in CHECKLIST.values() for node in entry.get("tests", ())}
    files = ("tests/test_seeds.py", "tests/test_seeds_builtins.py")
    assert {f"{file}::{name}" for file in files for name in functions_of(file)} - cited == set()
