"""The manifest of a checkpoint: its description and the checksums of its files. It is written last and
contains its own checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import safetensors
import torch

from hookline._version import __version__
from hookline.util.errors import CheckpointError, described, missing_checkpoint
from hookline.util.limited_json import (
    MANIFEST_BYTES,
    MANIFEST_LEVELS,
    STRUCTURE_BYTES,
    TooLarge,
    is_count,
    is_table,
    is_text,
    parse_json,
    read_within,
)
from hookline.util.urls import CHECKPOINT_FILES, MANIFEST, is_checkpoint_file

CHECKPOINT_FORMAT = 2
CHECKPOINT_KIND = "hookline checkpoint"
TRAINABLE_KIND = "hookline checkpoint of trainable weights"
"""The kind of a checkpoint that leaves out the weights of its base model. Versions that would miss these
weights refuse it by its kind.
"""
MANIFEST_COUNTERS = ("step", "epoch", "epochs_seen", "batches_seen")
COMPUTED_ENTRIES = ("format", "kind", "saved_at", "versions", "shared", "files", "sha256")
"""Entries that the writer computes."""

Manifest: TypeAlias = dict[str, Any]


SAVED_AT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)?", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}")
FINGERPRINT = re.compile(r"[0-9a-f]{32}")


def is_listed_file(name: str) -> bool:
    """Return whether a checkpoint may have a file of this name beside its manifest."""
    return name != MANIFEST and is_checkpoint_file(name)


def make_manifest(
    about: Mapping[str, Any], counters: Mapping[str, Any], shared: dict[str, str], files: dict[str, Any]
) -> Manifest:
    """Return a manifest for these files. `about` has further entries and overrides the counters."""
    for name in COMPUTED_ENTRIES:
        if name in about:
            raise CheckpointError(f"{name!r} is computed when a checkpoint is written; it cannot be passed.")
    manifest = {
        "format": CHECKPOINT_FORMAT,
        "kind": TRAINABLE_KIND if about.get("base") else CHECKPOINT_KIND,
        **{name: counters.get(name, 0) for name in MANIFEST_COUNTERS},
        "reason": "manual",
        "saved_at": datetime.now(UTC).isoformat(timespec="microseconds"),
        "world_size": 1,
        "metrics": {},
        "monitor": None,
        "status": "training",
        **{name: _as_portable(value, name) for name, value in about.items()},
        "versions": {
            "hookline": __version__,
            "torch": str(torch.__version__),
            "safetensors": safetensors.__version__,
            "python": platform.python_version(),
        },
        "shared": shared,
        "files": files,
    }
    if wrong := _find_problem(manifest):
        raise CheckpointError(f"A manifest cannot hold {wrong}.")
    return {**manifest, "sha256": signature(manifest)}


def render_manifest(manifest: Manifest) -> str:
    """Return the text of the file."""
    text = json.dumps(manifest, indent=1) + "\n"
    if len(text) > MANIFEST_BYTES:
        raise CheckpointError(
            f"The manifest would have {len(text)} bytes, and at most {MANIFEST_BYTES} can be read."
        )
    return text


def signature(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of all entries except the sha256 itself."""
    signed = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load_manifest(path: Path) -> Manifest:
    """Read and verify the manifest of the checkpoint at this path."""
    file = path / MANIFEST
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file; a checkpoint of a run is a directory. To load weights from a file of another "
            f"tool: load_weights(module, hookline.import_checkpoint({str(path)!r}))."
        )
    if not path.exists():
        raise CheckpointError(missing_checkpoint(path))
    if not file.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}.{_neighbors(path)}")
    try:
        return parse_manifest(read_within(file, MANIFEST_BYTES), str(path))
    except TooLarge as error:
        raise CheckpointError(f"The checkpoint {path} is damaged: {MANIFEST}: {error}.") from None
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint {path} cannot be read: {MANIFEST}: {error.strerror or error}"
        ) from error


def parse_manifest(data: bytes, path: str) -> Manifest:
    """Return a verified manifest from its bytes. path: named in errors."""
    damaged = f"The checkpoint {path} is damaged: {MANIFEST}"
    if len(data) > MANIFEST_BYTES:
        raise CheckpointError(
            f"{damaged} is larger than {MANIFEST_BYTES // 2**20} MB, the limit for a manifest."
        )
    try:
        manifest = parse_json(data, MANIFEST_LEVELS)
    except ValueError as error:
        raise CheckpointError(
            f"{damaged} is not valid JSON ({error})." if data else f"{damaged} is empty."
        ) from None
    if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
        raise CheckpointError(f"{damaged} does not say which format it has.")
    if manifest["format"] != CHECKPOINT_FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}; this version reads only format {CHECKPOINT_FORMAT}."
        )
    if manifest.get("sha256") != signature(manifest) or render_manifest(manifest).encode() != data:
        raise CheckpointError(
            f"{damaged} was changed after it was written: its sha256 does not match its text."
        )
    if manifest.get("kind") not in (CHECKPOINT_KIND, TRAINABLE_KIND):
        raise CheckpointError(
            f"{path} is not a checkpoint of a run: it is a {described(manifest.get('kind'))}."
        )
    if wrong := _find_problem(manifest):  # possible in a forged manifest with a valid sha256
        raise CheckpointError(f"{damaged} has {wrong}.")
    return manifest


# ---- types of the entries ----------------------------------------------------------------------------------


def _find_problem(manifest: Mapping[str, Any]) -> str:
    """Return a description of the first missing or wrong entry, or an empty string."""
    for name, (is_valid, wanted) in TYPES.items():
        if name not in manifest:
            return f"no {name!r}"
        if not is_valid(manifest[name]):
            return f"{name}={described(manifest[name])}, which is not {wanted}"
    for name in ("run", "mesh"):
        if not is_text(manifest.get(name, "")):
            return f"a {name} that is not text"
    base = manifest.get("base")
    if manifest.get("kind") == TRAINABLE_KIND and not (isinstance(base, str) and FINGERPRINT.fullmatch(base)):
        return f"base={described(base)}, which is not the fingerprint of a base model"
    missing = [name for name in CHECKPOINT_FILES if name not in manifest["files"]]
    return f"files without {missing[0]}" if missing else ""


def has_valid(entries: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return whether these entries are there, each of its type."""
    return all(name in entries and TYPES[name][0](entries[name]) for name in names)


def _is_table_of_text(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_text, value.values()))


def _is_json_number(value: Any) -> bool:
    """Return whether it is a number; NaN and infinity are text in JSON."""
    return type(value) is float or is_count(value, -(2**63)) or value in ("nan", "inf", "-inf")


def _is_monitor(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and is_text(value.get("name"))
        and value.get("mode") in ("min", "max")
        and _is_json_number(value.get("score"))
    )


def _are_files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        is_listed_file(name) and _is_file_entry(name, facts) for name, facts in value.items()
    )


def _is_file_entry(name: str, facts: Any) -> bool:
    most = STRUCTURE_BYTES if name.endswith(".json") else 2**63 - 1
    return (
        isinstance(facts, dict)
        and is_count(facts.get("bytes"), most=most)
        and is_text(facts.get("sha256"))
        and SHA256.fullmatch(facts["sha256"]) is not None
    )


TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(MANIFEST_COUNTERS, (is_count, "a whole number from 0 on")),
    "reason": (is_text, "text"),
    "status": (is_text, "text"),
    "saved_at": (
        lambda value: is_text(value) and SAVED_AT.fullmatch(value) is not None,
        "a time such as 2026-01-31T12:00:00",
    ),
    "world_size": (lambda value: is_count(value, 1), "a whole number from 1 on"),
    "metrics": (is_table, "a table"),
    "versions": (_is_table_of_text, "a table of text"),
    "shared": (_is_table_of_text, "a table of text"),
    "monitor": (_is_monitor, "a table of a name, a mode ('min' or 'max') and a score"),
    "files": (_are_files, "a table of files of a checkpoint, with the sha256 and an allowed size of each"),
}
"""Every entry that is read, with its check and its type in words; other entries are ignored."""


def _as_portable(value: Any, where: str) -> Any:
    """Return a value as portable JSON: NaN and infinity as text, tensors and NumPy scalars as floats."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _as_portable(each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_portable(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if type(value) is int:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise CheckpointError(
            f"A manifest cannot hold {where}={value!r}: it can hold only numbers, text and None."
        ) from None
    return number if math.isfinite(number) else repr(number)


def _neighbors(path: Path) -> str:
    near = sorted(each.name for each in path.parent.glob("step-*")) if path.parent.is_dir() else []
    return f" Its directory has: {', '.join(near)}." if near else ""
