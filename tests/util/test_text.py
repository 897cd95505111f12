"""Text for people: secrets of URLs and control characters do not get into it."""

from __future__ import annotations

import time

import pytest
from torch.utils.data import DataLoader, Dataset

from hookline.util.text import (
    DEEPEST_VALUE,
    WIDEST,
    align_columns,
    error_text,
    flatten,
    format_number,
    format_size,
    format_table,
    holds_secret,
    list_some,
    map_texts,
    printable,
    printable_lines,
    redact,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://acct.blob.core/run/step-1?sv=1&sig=a%2Fb", "https://acct.blob.core/run/step-1?..."),
        ("cannot read 'https://h/x?token' now", "cannot read 'https://h/x?...' now"),
        (
            "404, message='Not Found', url='https://h/y?a=b'",
            "404, message='Not Found', url='https://h/y?...'",
        ),
        (
            "Max retries exceeded with url: /p/manifest.json?sig=abc (Caused by x)",
            "Max retries exceeded with url: /p/manifest.json?... (Caused by x)",
        ),
        ("sftp://me:secret@host/x", "sftp://host/x"),
        ("sftp://me:pa/ss?w@rd@host/x", "sftp://host/x"),
        ("sftp://me@host/x", "sftp://host/x"),
        ("https://h/x#access_token=abc", "https://h/x#..."),
        ("https://h/x?a=1#b=2", "https://h/x?..."),
        ("hf://user/repo@main/x", "hf://user/repo@main/x"),
        ("sftp://host:22/a@b", "sftp://host:22/a@b"),
        ("s3://bucket/run#1", "s3://bucket/run#1"),
        ("Is it in s3://bucket/x? No.", "Is it in s3://bucket/x? No."),
        ("Did you mean 'x'? a=b", "Did you mean 'x'? a=b"),
    ],
)
def test_a_url_is_shown_without_its_query_and_credentials(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_the_secrets_of_a_known_url_are_found_by_themselves_and_spelled_otherwise() -> None:
    url = "https://host/x?sv=2020&sig=ab%2Fcd"
    assert (
        redact("the signature ab/cd, or ab%2Fcd, is not valid", url)
        == "the signature ..., or ..., is not valid"
    )
    assert (
        redact("login of me with hunter2 failed", "sftp://me:hunter2@host/x") == "login of me with ... failed"
    )


def test_a_cause_that_holds_a_secret_is_known() -> None:
    url = "https://host/x?sig=abcdef"
    try:
        try:
            raise OSError(f"cannot get {url}")
        except OSError as error:
            raise ValueError("it failed") from error
    except ValueError as error:
        assert holds_secret(error, url)
    assert holds_secret(ValueError("abcdef"), url) and not holds_secret(ValueError("it failed"), url)


@pytest.mark.parametrize("text", ["a", "?", "://", "x://a:", "://#", "a?b=", "a:@"])
def test_a_message_of_megabytes_is_redacted_at_once(text: str) -> None:
    began = time.process_time()
    redact(text * 300_000, "https://host/x?sig=abcdef")
    assert time.process_time() - began < 10


def test_control_characters_are_spelled_out() -> None:
    assert printable("a\x1b[31mb\nc\u202e\ud800ü") == "a\\x1b[31mb\\nc\\u202e\\ud800ü"
    assert printable_lines("a\x1b\n\tb\r") == "a\\x1b\n\tb\\r"


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    rows = [("hook", "calls"), ("a", "1,000"), ("longer", "2")]
    assert align_columns(rows) == ["hook    calls", "a       1,000", "longer  2"]
    assert align_columns(rows, left=1) == ["hook    calls", "a       1,000", "longer      2"]


def test_a_long_list_is_cut() -> None:
    assert list_some("abc") == "a, b, c" and list_some("abcdefg") == "a, b, c, d, e and 2 more"
    assert list_some("abc", most=2) == "a, b and 1 more"


def test_every_text_of_nested_values_is_converted() -> None:
    assert map_texts({"a": ["b", 1, {"c": None}]}, str.upper) == {"A": ["B", 1, {"C": None}]}


def test_nested_tables_become_one_with_dotted_names() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
    assert flatten({"a": {"b": 1}}, "/") == {"a/b": 1}
    endless: dict[str, object] = {}
    endless["x"] = endless
    assert list(flatten(endless)) == [".".join("x" * DEEPEST_VALUE)]


def test_numbers_sizes_and_long_values_are_shortened() -> None:
    assert [format_number(value) for value in (0.123456, 12, None, float("inf"), "x")] == [
        "0.1235",
        "12",
        "",
        "inf",
        "x",
    ]
    assert [format_size(count) for count in (5, 5_000, 5_000_000, 5_000_000_000)] == [
        "5 B",
        "5.0 kB",
        "5.0 MB",
        "5.0 GB",
    ]
    assert format_table([("a", "b"), ("x" * 100, "\x1b")]).splitlines()[1].endswith("x  \\x1b")
    assert len(format_table([("x" * 100,)])) == WIDEST


class Odd(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Fails(Dataset[int]):
    def __init__(self, error: Exception, cause: Exception | None = None) -> None:
        self.error, self.cause = error, cause

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise self.error from self.cause


@pytest.mark.parametrize(
    ("error", "cause", "expected"),
    [
        (ValueError("file no. 77"), None, ("ValueError", "file no. 77 (in a worker of the loader)")),
        (ValueError("a: b\n  c"), KeyError("x"), ("ValueError", "a: b\n  c (in a worker of the loader)")),
        (KeyError("x"), None, ("KeyError", "'x' (in a worker of the loader)")),
        (Odd(1, 2), None, ("Odd", "1 and 2 (in a worker of the loader)")),
        (StopAsyncIteration(), None, ("StopAsyncIteration", "(in a worker of the loader)")),
    ],
    ids=["plain", "cause", "key", "odd", "empty"],
)
def test_an_error_in_a_worker_of_a_loader_is_the_original_one(
    error: Exception, cause: Exception | None, expected: tuple[str, str]
) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        list(DataLoader(Fails(error, cause), num_workers=1))
    assert error_text(caught.value) == expected
    assert error_text(error) == (type(error).__name__, str(error))


def test_an_error_that_only_looks_like_one_of_a_worker_is_left_as_it_is() -> None:
    text = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (lost)"
    assert error_text(RuntimeError(text)) == ("RuntimeError", text)
