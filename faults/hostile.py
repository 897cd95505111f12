"""Mutations of a checkpoint that keep its checksums right: their author knows the format,
and means harm.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hookline.checkpoint.manifest import signature

ESCAPE = "\x1b[2J\x1b]0;owned\x07"
"""Clears a terminal and renames its window."""
TRAVERSAL = (
    "../../../etc/passwd",
    "/etc/passwd",
    "a/b.json",
    "..",
    "",
    "rank--1.json",
    "rank-99999999999999999999.json",
    "CON",
)


def odd_values(rng: random.Random) -> list[Any]:
    """Return what a value may be replaced with."""
    return [
        None,
        True,
        False,
        0,
        -1,
        1,
        3,
        2**31,
        2**63,
        -(2**63),
        2**200,
        -(10**300),
        1.5,
        -0.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "nan",
        "1",
        ESCAPE,
        "\u202e\ud800",
        "9999-99-99T99:99:99",
        "x" * 100_000,
        [],
        {},
        [[]],
        [None],
        {"a": 1},
        [1, 2, 3],
        {"$": "tensor", "key": "layers.0.weight"},
        {"$": "tensor", "key": "nowhere"},
        {"$": "tuple", "value": 3},
        {"$": "int", "value": "0x" + "f" * 999},
        {"$": "int", "value": "no"},
        {"$": "set", "value": [[]]},
        {"$": "sharded", "key": "x", "shape": [2**40, 2**40], "dtype": "float32"},
        {"$": "sharded", "key": "x", "shape": "ab", "dtype": "load"},
        {"$": "what"},
        {"$": None},
        {"$": "dict", "value": [[1]]},
        {"$": "float", "value": []},
        nested(rng.choice((30, 300, 700, 5000))),
    ]


def nested(levels: int) -> Any:
    """Return a list in a list in a list."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def mutate(rng: random.Random, checkpoint: Path) -> str:
    """Change something in a checkpoint and sign it again. Returns what was changed, in words."""
    way = rng.choice(
        (_in_manifest, _in_manifest, _in_state, _in_state, _in_state, _in_state, _in_text, _in_header)
    )
    return way(rng, checkpoint)


def _in_manifest(rng: random.Random, checkpoint: Path) -> str:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    if rng.random() < 0.15:
        name = rng.choice(TRAVERSAL)
        manifest["files"][name] = dict(manifest["files"]["state.json"])
        said = f"files has {name!r}"
    else:
        said = _change(rng, manifest)
    sign(checkpoint, manifest)
    return f"manifest.json: {said}"


def _in_state(rng: random.Random, checkpoint: Path) -> str:
    state = json.loads((checkpoint / "state.json").read_text())
    said = "; ".join(_change(rng, state) for _ in range(rng.choice((1, 1, 2))))
    write_state(checkpoint, dump(state))
    return f"state.json: {said}"


def _in_text(rng: random.Random, checkpoint: Path) -> str:
    """Change the text to JSON that Python's writer never produces."""
    file = rng.choice(("manifest.json", "state.json"))
    text = (checkpoint / file).read_text()
    changes: dict[str, Callable[[], str]] = {
        "a key twice": lambda: text.replace("{", '{"step": 1, "step": 2, "run": "a", "run": "b", ', 1),
        "not text": lambda: text.replace("{", '{"\x00": 1,', 1),
        "half of it": lambda: text[: rng.randrange(len(text))],
        "something after it": lambda: text + text,
        "deep brackets": lambda: "[" * 200_000,
        "deep tables": lambda: '{"a":' * 50_000,
        "a list": lambda: "[]",
        "null": lambda: "null",
        "a long number": lambda: text.replace(": 0", ": " + "9" * 5000, 1),
        "gigabytes": lambda: "",
    }
    said = rng.choice(sorted(changes))
    if file == "state.json":
        write_state(checkpoint, changes[said](), grown=3 << 30 if said == "gigabytes" else 0)
    else:
        (checkpoint / file).write_text(changes[said]())
        if said == "gigabytes":
            with (checkpoint / file).open("r+b") as opened:
                opened.truncate(3 << 30)  # takes no room on the disk
    return f"{file}: {said}"


def _in_header(rng: random.Random, checkpoint: Path) -> str:
    """Change the header of a file of tensors: its length, or its contents."""
    name = rng.choice(("model.safetensors", "state.safetensors"))
    data = bytearray((checkpoint / name).read_bytes())
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.4:
        made = rng.choice((0, 1, length - 1, length + 1, len(data), 2**31, 2**40, 2**63, 2**64 - 1))
        data[:8] = made.to_bytes(8, "little")
        said = f"a head of {made} bytes"
    else:
        head = json.loads(bytes(data[8 : 8 + length]))
        said = _change(rng, head)
        text = dump(head).encode("utf-8", "surrogatepass")
        data = bytearray(len(text).to_bytes(8, "little") + text + data[8 + length :])
    (checkpoint / name).write_bytes(data)
    sign(checkpoint, list_file(checkpoint, name, bytes(data)))
    return f"{name}: {said}"


# ---- changing ----------------------------------------------------------------------------------------------


def _change(rng: random.Random, value: Any) -> str:
    """Change one entry somewhere in a table, in place. Every level is as likely as the others, however much
    is in it.
    """
    where, owner, key = "", value, rng.choice(list(value))
    while isinstance(owner[key], dict | list) and owner[key] and rng.random() < 0.7:
        owner, where = owner[key], f"{where}.{key}"
        key = rng.choice(list(owner)) if isinstance(owner, dict) else rng.randrange(len(owner))
    where = f"{where}.{key}".lstrip(".")[:80]
    way = rng.random()
    if way < 0.15:
        del owner[key]
        return f"{where} is removed"
    if way < 0.25 and isinstance(owner, dict):
        owner[rng.choice(("x", "step", "optimizer", "__class__", ESCAPE, "", "$", "params"))] = owner.pop(key)
        return f"{where} has another name"
    if way < 0.35 and len(owner) > 1:
        other = rng.choice(list(owner)) if isinstance(owner, dict) else rng.randrange(len(owner))
        owner[key], owner[other] = owner[other], owner[key]
        return f"{where} and {str(other)[:40]!r} are swapped"
    owner[key] = rng.choice(odd_values(rng))
    return f"{where} is {dump(owner[key])[:60]}"


def dump(value: Any) -> str:
    """Return JSON of any depth: Python's own writer fails at the depth of its stack."""
    pieces: list[str] = []
    stack: list[Any] = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, _Raw):
            pieces.append(each)
        elif isinstance(each, dict):
            inner = [
                part
                for key, inside in each.items()
                for part in (_Raw(f"{json.dumps(key)}: "), inside, _Raw(", "))
            ]
            stack += reversed([_Raw("{"), *inner[:-1], _Raw("}")])
        elif isinstance(each, list):
            inner = [part for inside in each for part in (inside, _Raw(", "))]
            stack += reversed([_Raw("["), *inner[:-1], _Raw("]")])
        else:
            pieces.append(json.dumps(each))
    return "".join(pieces)


class _Raw(str):
    """A piece that is JSON already."""


# ---- signing -----------------------------------------------------------------------------------------------


def write_state(checkpoint: Path, text: str, grown: int = 0) -> None:
    """Put another state.json into a checkpoint, with a manifest that says so."""
    data = text.encode("utf-8", "surrogatepass")
    with (checkpoint / "state.json").open("wb") as file:
        file.write(data)
        if grown:
            file.truncate(grown)
    manifest = list_file(checkpoint, "state.json", data)
    if grown:  # its sum would take minutes, and is not needed to refuse it
        manifest["files"]["state.json"]["bytes"] = grown
    sign(checkpoint, manifest)


def list_file(checkpoint: Path, name: str, data: bytes) -> dict[str, Any]:
    """Return the manifest of a checkpoint with the size and the checksum of these bytes."""
    manifest: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return manifest


def sign(checkpoint: Path, manifest: Any) -> None:
    """Write a manifest whose own sum is right."""
    try:
        if isinstance(manifest, dict):
            manifest["sha256"] = signature(manifest)
        text = json.dumps(manifest, indent=1) + "\n"
    except RecursionError:  # too deep to be signed, so what is in it does not matter
        text = dump(manifest)
    (checkpoint / "manifest.json").write_text(text)
