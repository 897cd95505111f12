"""Errors of a configuration: values in words, no secrets, and limits that a file cannot exceed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from config.configured import BASIC, trainer_of
from torch import nn

from hookline.config import ConfigError, load_config
from hookline.config.problems import Override, describe_type


@pytest.mark.parametrize(
    "lines",
    [
        'url = "https://hooks.example/T0P-S3CRET"\ntimout = 3\n',
        'url = ["https://hooks.example/T0P-S3CRET"]\n',
        'clas_path = "x"\nurl = "https://hooks.example/T0P-S3CRET"\n',
        'url = "https://hooks.example/T0P-S3CRET"\ntimeout = -1\n',
        'url = "T0P-S3CRET"\n',
    ],
)
def test_a_secret_is_never_in_an_error(project: Path, lines: str) -> None:
    path = "" if "clas_path" in lines else 'class_path = "hookline.hooks.webhook.Webhook"\n'
    with pytest.raises(ConfigError) as caught:
        trainer_of(project, f"{BASIC}[hooks.h]\n{path}{lines}")
    assert "S3CRET" not in str(caught.value) + json.dumps(caught.value.data())


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ("None", None),
        ("[1, x]", [1, "x"]),
        ("00:01:00:00", "00:01:00:00"),
        ("text", "text"),
        ("[broken", "[broken"),
    ],
)
def test_what_a_typed_value_means(typed: str, meant: Any) -> None:
    assert Override(typed).guess == meant


def test_types_are_spelled_in_words() -> None:
    assert describe_type(int | None) == "a whole number or nothing (null)"
    assert describe_type(list[str]) == "a list of text"
    assert describe_type(dict[str, int]) == "a table"
    assert describe_type(nn.Module).startswith("a Module")
    assert describe_type(bool | None) == "true, false or nothing (null)"
    assert describe_type(str | list[float] | None) == "text, a list of numbers or nothing (null)"
    assert describe_type(list[nn.Module]) == "a list of Modules (a table with class_path and init_args)"
    assert describe_type(Literal["a", "b"] | int) == '"a", "b" or a whole number'
    for anything in (Any, object, int | Any, dict[str, Any] | Any | None):
        assert describe_type(anything) == "anything"


def bomb(kind: str, levels: int = 30) -> str:
    """Nine of the level below at every level."""
    made = ["config:", "  a0: &a0 [x]" if kind == "list" else "  a0: &a0 {x: 1}"]
    for level in range(1, levels):
        inner = ", ".join(
            f"*a{level - 1}" if kind == "list" else f"k{each}: *a{level - 1}" for each in range(9)
        )
        made.append(f"  a{level}: &a{level} " + (f"[{inner}]" if kind == "list" else f"{{{inner}}}"))
    return "\n".join(made)


HUGE = {
    "aliases of lists": ("yaml", bomb("list"), "100000 values"),
    "aliases of tables": ("yaml", bomb("table"), "100000 values"),
    "merged tables": ("yaml", bomb("table").replace("k0: *", "<<: *"), "100000 values"),
    "an alias of itself": ("yaml", "config: &a {b: *a}", "inside of the value"),
    "a list in itself": ("yaml", "config: &a [*a]", "inside of the value"),
    "many aliases": ("yaml", "config:\n  x: &x 1\n  y: [" + "*x, " * 2000 + "]", "1000 aliases"),
    "deep lists": ("yaml", "config: " + "[" * 3000 + "]" * 3000, "50 levels"),
    "deep tables": (
        "yaml",
        "config:\n" + "".join(" " * (each + 1) + f"k{each}:\n" for each in range(500)),
        "50 levels",
    ),
    "deep lists in TOML": ("toml", "config.x = " + "[" * 3000 + "]" * 3000, "50 levels"),
    "less deep lists in TOML": ("toml", "config.x = " + "[" * 100 + "]" * 100, "50 levels"),
    "deep tables in TOML": ("toml", "config." + ".".join("a" * 3000) + " = 1", "50 levels"),
    "very deep tables in TOML": ("toml", "a" + " .a" * 20_000 + " = 1", "50 levels"),
    "a deep header": ("toml", "[a" + '."a"' * 20_000 + "]", "50 levels"),
    "a deep key in a table": ("toml", "config.x = {a" + ".a" * 20_000 + " = 1}", "50 levels"),
    "a long number": ("yaml", "config: {x: " + "9" * 500_000 + "}", "1000 digits"),
    "in TOML": ("toml", "config.x = " + "9" * 5000, "1000 digits"),
    "a long number that is tagged": ("yaml", 'config: {x: !!int "' + "9" * 5000 + '"}', "1000 digits"),
    "a long hexadecimal number": ("yaml", "config: {x: 0x" + "f" * 500_000 + "}", "1000 digits"),
    "so in TOML": ("toml", "config.x = 0x" + "f" * 50_000, "1000 digits"),
    "a number in base 60": ("yaml", "config: {x: " + ":".join(["59"] * 100_000) + "}", "1000 digits"),
    "megabytes": ("yaml", "config:\n" + "".join(f"  k{each}: 1\n" for each in range(150_000)), "1 MB"),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_file_that_would_exhaust_the_machine_is_refused_at_once(name: str, tmp_path: Path) -> None:
    suffix, text, said = HUGE[name]
    (tmp_path / f"run.{suffix}").write_text(text)
    began = time.process_time()
    with pytest.raises(ConfigError, match=said):
        load_config(tmp_path / f"run.{suffix}")
    assert time.process_time() - began < 20  # it was hours


def test_what_is_typed_has_the_same_limits() -> None:
    typed = "[" + bomb("list").partition("\n")[2].replace("\n", ", ").replace("  a", "a") + "]"
    for text in (typed, "[" * 3000, "[" * 3000 + "]" * 3000, '{"a": ' * 3000):
        began = time.process_time()
        assert (
            load_config({}, [f"--config.x={text}"]).values["config"]["x"] == text
        )  # it is text, and stays so
        assert time.process_time() - began < 20
    with pytest.raises(ConfigError, match="levels|not valid YAML"):
        load_config({}, ["--module=" + '{"a": ' * 3000 + "1" + "}" * 3000])


def test_long_texts_of_digits_and_dots_are_fine(tmp_path: Path) -> None:
    digits, dots = "1" * 5000, "One. " * 200
    (tmp_path / "run.yaml").write_text(f"config: {{x: '{digits}', y: {dots}}}")
    assert load_config(tmp_path / "run.yaml").values["config"] == {"x": digits, "y": dots.strip()}
    (tmp_path / "run.toml").write_text(f'# {dots}\nconfig.x = "{digits}"\nconfig.y = "{dots}"\n')
    assert load_config(tmp_path / "run.toml").values["config"] == {"x": digits, "y": dots}


def test_aliases_as_people_use_them_and_many_keys_are_fine(tmp_path: Path) -> None:
    shared = "".join(f"    k{each}: {each}\n" for each in range(500))
    used = "".join(f"    u{each}: {{<<: *shared, own: {each}}}\n" for each in range(50))
    (tmp_path / "run.yaml").write_text(f"config:\n  shared: &shared\n{shared}  all:\n{used}")
    values = load_config(tmp_path / "run.yaml").values["config"]
    assert values["all"]["u49"]["k499"] == 499 and values["all"]["u49"]["own"] == 49
