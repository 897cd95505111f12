"""What must not reach a file that people pass on: passwords, tokens, signed URLs, wherever a setting or a command line has them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hookline.util.text import (
    DEEPEST_VALUE,
    HIDDEN_VALUE,
    MOST_ITEMS,
    command_line,
    is_secret,
    mask,
    mask_text,
    mask_words,
)

SECRET = "s3cr3tvalue"


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apiKey",
        "APIKey",
        "API_KEY",
        "token",
        "hf_token",
        "accessToken",
        "password",
        "dbpassword",
        "db.passwd",
        "client_secret",
        "credentials",
        "auth",
        "Authorization",
        "X-Api-Key",
        "dsn",
        "cookie",
        "aws_secret_access_key",
        "api_key2",
        "--logger.api_key",
        "pwd",
        "keys",
        "tokens",
    ],
)
def test_a_name_of_a_secret_is_recognized(name: str) -> None:
    assert is_secret(name, SECRET)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "monitor",
        "lr",
        "author",
        "keyboard_layout",
        "patience",
        "url",
        "signal",
        "compass",
        "num_workers",
        "path",
    ],
)
def test_other_names_are_not(name: str) -> None:
    assert not is_secret(name, SECRET)


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 100), ("key_dim", 64), ("token", None), ("use_auth_token", True)]
)
def test_numbers_and_flags_stay_readable_under_a_weak_name(name: str, value: Any) -> None:
    assert mask({name: value}) == {name: value}


def test_a_number_under_a_strong_name_is_hidden() -> None:
    assert mask({"password": 1234}) == {"password": HIDDEN_VALUE}


@pytest.mark.parametrize(
    "words",
    [
        ["--logger.api_key", SECRET],
        [f"--logger.api_key={SECRET}"],
        [f"api_key={SECRET}"],
        ["--token", SECRET],
        ["-H", f"Authorization: Bearer {SECRET}"],
        ["--config", json.dumps({"a": {"api_key": SECRET}})],
        ["--config", f"{{password: {SECRET}}}"],
        ["--config", f"{{a: 1, 'token': '{SECRET}'}}"],
        [f"--url=https://user:{SECRET}@host/path"],
        [f"https://hooks.slack.com/services/T0/B0/{SECRET}"],
        [f"https://bucket.s3.amazonaws.com/x?X-Amz-Signature={SECRET}&X-Amz-Date=1"],
        [f"--out=s3://bucket/run?sig={SECRET}"],
        [f"--db=postgresql://user:{SECRET}@host:5432/db"],
        ["-c", f"import os; os.environ['WANDB_API_KEY'] = '{SECRET}'"],
        ["-c", f"login(token='{SECRET}')"],
        [f"--hooks.beat.init_args={{url: https://hc-ping.com/{SECRET}}}"],
        [f"sk-{SECRET}{SECRET}"],
        [f"hf_{SECRET}{SECRET}"],
        [f"ghp_{SECRET}{SECRET}"],
        ["--password", "--verbose", "--password", SECRET],
    ],
    ids=range(20),
)
def test_a_command_line_is_shown_without_secrets(words: list[str]) -> None:
    text = command_line(["python", "train.py", *words, "--lr", "0.1"])
    assert SECRET not in text and text.startswith("python train.py") and text.endswith("--lr 0.1")


def test_what_is_no_secret_is_shown_as_it_is() -> None:
    words = [
        "hookline",
        "fit",
        "run.toml",
        "--trainer.max_epochs",
        "3",
        "--max-tokens",
        "100",
        "--out",
        "s3://bucket/run",
        "--data=https://host",
    ]
    assert mask_words(words) == words


@pytest.mark.parametrize(
    "value",
    [
        {"logger": {"init_args": {"api_key": SECRET}}},
        {"a": [{"b": {"password": SECRET}}]},
        {"credentials": {"user": SECRET}},
        {"tokens": [SECRET]},
        {"storage_options": {"key": SECRET, "secret": SECRET}},
        {"headers": {"Authorization": f"Bearer {SECRET}"}},
        {"url": f"https://u:{SECRET}@h/x"},
        {"hook": {"url": f"https://hooks.slack.com/services/{SECRET}"}},
        {"args": ["--api_key", SECRET]},
        {"note": f"token={SECRET}"},
        {"x": f"https://h/p?sig={SECRET}"},
        {"where": Path(f"/data/token={SECRET}")},
        {f"https://u:{SECRET}@h/": 1},
    ],
    ids=range(13),
)
def test_nested_settings_are_kept_without_secrets(value: Any) -> None:
    assert SECRET not in json.dumps(mask(value))


def test_a_password_that_the_cut_would_halve_is_not_shown() -> None:
    for before in range(980, 1001):
        assert "s3cr" not in mask_text("x" * before + f" https://user:{SECRET}@host/ " + "y" * 5000)


def test_everything_becomes_a_value_of_json() -> None:
    class Thing:
        pass

    nested: Any = 1
    for _ in range(DEEPEST_VALUE + 5):
        nested = {"in": nested}
    given = {
        "nan": float("nan"),
        "big": 10**6000,
        "set": {1},
        "none": None,
        "thing": Thing(),
        "kind": Thing,
        "call": len,
        "deep": nested,
        "long": "x" * 10**6,
        "many": list(range(MOST_ITEMS + 5)),
        3: "\ud800\x1b[31m",
        "bytes": b"x",
    }
    text = json.dumps(mask(given), allow_nan=False)
    assert len(text) < 20_000
    known = json.loads(text)
    assert (known["nan"], known["big"], known["call"], known["many"][-1]) == (
        "nan",
        "a number of 19932 bits",
        "builtins.len",
        "5 more",
    )
    assert known["thing"] == known["kind"] and known["kind"].endswith("Thing")


def test_long_text_without_spaces_takes_no_time() -> None:
    began = time.process_time()
    for text in (
        "a" * 10**6,
        "a=" * 500_000,
        "'\"" * 500_000,
        "https://" * 100_000,
        "-." * 500_000,
        "key: " * 200_000,
    ):
        mask_text(text)
        command_line([text, text])
    assert time.process_time() - began < 5
