"""`checkpoint show | verify`: describe and verify checkpoints."""

from __future__ import annotations

import argparse
import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hookline.checkpoint import files, remote
from hookline.checkpoint.averages import scored_hook
from hookline.checkpoint.catalog import (
    FoundCheckpoint,
    best_first,
    find_checkpoints,
    find_with_files,
    newest_first,
    without_abandoned,
)
from hookline.checkpoint.format import TAG
from hookline.checkpoint.tensors import DTYPE_NAMES, LONGEST_HEADER
from hookline.cli.output import FAILED, OK, print_result
from hookline.report.runs import recorded_status, status_word
from hookline.run.record import read_record, unsaved_end
from hookline.util.errors import CheckpointError, folders_beside, missing_checkpoint
from hookline.util.limited_json import parse_json
from hookline.util.text import (
    align_columns,
    format_number,
    format_size,
    holds_secret,
    map_texts,
    printable,
    redact,
)
from hookline.util.urls import MANIFEST, is_url, open_url, url_below

KEPT = ("id", "status", "reason", "step", "epochs", "limits", "noted_at")
"""The keys of run.json that `show` prints."""


@dataclass(slots=True)
class ListedCheckpoint:
    """A checkpoint by its path or URL, with its manifest or its problem."""

    place: Path | str
    manifest: dict[str, Any] | None = None
    problem: str = ""
    extra: list[str] = field(default_factory=list)
    """Files and folders in it that are not Hookline's, once it was verified."""

    @property
    def name(self) -> str:
        """Return the path or URL without secrets."""
        return redact(self.place) if isinstance(self.place, str) else str(self.place)

    def verify(self) -> None:
        """Verify all of its files."""
        if not self.problem:
            try:
                files.verify(self.place)
                self.extra = files.extra_names(self.place)
            except CheckpointError as error:
                self.problem = str(error)


def list_checkpoints(path: str) -> tuple[list[ListedCheckpoint], bool]:
    """Return a checkpoint, or all below a directory or URL, the newest first; and whether the path itself is
    one.
    """
    if is_url(path):
        found = newest_first(
            [_at_url(each) for each in remote.list_urls(path)], lambda each: each.manifest or {}
        )
        if not found:
            raise CheckpointError(
                f"There is no checkpoint at {redact(path)} or below it: nothing there has a {MANIFEST}."
            )
        return found, [each.place for each in found] == [path.rstrip("/")]
    folder = Path(path)
    if not folder.exists():
        raise CheckpointError(missing_checkpoint(folder))
    if not folder.is_dir():
        beside = sorted(folders_beside(folder))
        there = f" {folder.parent} has: {', '.join(beside[:20])}." if beside else ""
        raise CheckpointError(
            f"{folder} is a file, but a checkpoint is a directory. `hookline checkpoint import {folder}` "
            f"converts a file of Lightning.{there}"
        )
    whole, broken = find_checkpoints(folder)
    listed = [
        *(ListedCheckpoint(each.path, each.manifest) for each in whole),
        *(ListedCheckpoint(each, None, why) for each, why in broken.items()),
    ]
    if not listed and (files := find_with_files(folder, read_record(folder))[0]):
        names = ", ".join(str(each.path) for each in files[:6])
        raise CheckpointError(
            f"The checkpoints of {folder} are files of Lightning: {names}. `hookline summary {folder}` lists "
            f"them with their scores, and `hookline checkpoint import FILE` converts one."
        )
    if not listed:
        raise CheckpointError(
            f"There is no checkpoint in {folder} or below it. A fit writes checkpoints/last, unless it has "
            "made no update, checkpoint=False or fast_dev_run; hooks write others: "
            "hooks=[ModelCheckpoint()]."
        )
    return listed, [each.place for each in listed] == [folder]


def _at_url(url: str) -> ListedCheckpoint:
    try:
        return ListedCheckpoint(url, files.read_manifest(url))
    except CheckpointError as error:
        return ListedCheckpoint(url, None, str(error))


# ---- verify ------------------------------------------------------------------------------------------------


def verify_checkpoints(chosen: argparse.Namespace) -> int:
    """Read and verify every file of checkpoints."""
    checked: list[ListedCheckpoint] = []
    for path in chosen.paths:
        try:
            found, _ = list_checkpoints(path)
        except CheckpointError as error:
            found = [ListedCheckpoint(path if is_url(path) else Path(path), None, str(error))]
        for checkpoint in found:
            checkpoint.verify()
        checked += found
    data = [
        {"path": each.name, "whole": not each.problem, "problem": each.problem or None, "extra": each.extra}
        for each in checked
    ]
    print_result(chosen, data, "\n".join(map(_verdict, checked)))
    return FAILED if any(each.problem for each in checked) else OK


def _verdict(checkpoint: ListedCheckpoint) -> str:
    if checkpoint.problem:
        return printable(f"wrong  {checkpoint.problem}")
    others = f" (not of Hookline, ignored: {', '.join(checkpoint.extra)})" if checkpoint.extra else ""
    return printable(f"whole  {checkpoint.name}{others}")


# ---- show --------------------------------------------------------------------------------------------------


def show_checkpoints(chosen: argparse.Namespace) -> int:
    """Describe a checkpoint, or list those of a run."""
    found, single = list_checkpoints(chosen.path)
    if single:
        data = _describe_checkpoint(found[0], chosen.tensors)
        return print_result(chosen, data, _describe_text(map_texts(data, printable)))
    data = _table_data(found, chosen.path)
    return print_result(chosen, data, _table_text(map_texts(data, printable)))


def _describe_checkpoint(listed: ListedCheckpoint, with_tensors: bool) -> dict[str, Any]:
    if listed.manifest is None:
        raise CheckpointError(listed.problem)
    structure, tensors = _look_inside(listed)
    stored = {each["stored"]: each["numbers"] for each in tensors}
    data = {
        "path": listed.name,
        **listed.manifest,
        "bytes": _total_bytes(listed.manifest),
        "tensors": len(tensors),
        "scored_hook": scored_hook(structure),
        "numbers": sum(stored.values()),
        "base": listed.manifest.get("base"),
        "left_out": _count_left_out(structure),
        "hooks": _hooks_in(structure),
        "extra": files.extra_names(listed.place),
    }
    return {**data, "tensors_by_name": tensors} if with_tensors else data


def _count_left_out(structure: dict[str, Any]) -> int:
    """Return the number of weights that the checkpoint leaves out, because its base model has them."""
    module = structure["module"]
    entries = (module["value"] if TAG in module else module).values()
    return sum(isinstance(each, dict) and each.get(TAG) == "left_out" for each in entries)


def _hooks_in(structure: dict[str, Any]) -> list[str]:
    hooks = structure.get("hooks")
    return [name for name, state in hooks.items() if state] if isinstance(hooks, dict) else []


def _look_inside(listed: ListedCheckpoint) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the structure of the contents, and the weights by name, from the small files and the header of
    the large one.
    """
    assert listed.manifest is not None
    text = _piece(listed, "state.json", listed.manifest["files"]["state.json"]["bytes"] + 1)
    damaged = f"The checkpoint {listed.name} is damaged"
    if hashlib.sha256(text).hexdigest() != listed.manifest["files"]["state.json"]["sha256"]:
        raise CheckpointError(f"{damaged}: state.json is not what its manifest says.")
    length = int.from_bytes(_piece(listed, "model.safetensors", 8), "little")
    file = "state.json"
    try:
        structure = parse_json(text)
        module = structure["module"]
        file = "model.safetensors"
        if length > min(LONGEST_HEADER, listed.manifest["files"][file]["bytes"]):
            raise ValueError("its header is longer than the file, or than the limit")
        head = parse_json(_piece(listed, file, 8 + length)[8:])
        types = {short: str(dtype).removeprefix("torch.") for dtype, short in DTYPE_NAMES.items()}
        tensors = []
        for name, packed in (module["value"] if TAG in module else module).items():
            if not isinstance(packed, dict) or packed.get(TAG) not in ("tensor", "sharded"):
                continue
            if packed[TAG] == "sharded":  # split over the files of several ranks
                own = packed["key"].removeprefix("module.")
                stored, entry = listed.manifest["shared"].get(own, own), packed
            else:
                stored = packed["key"]
                entry = {**head[stored], "dtype": types[head[stored]["dtype"]], **packed}
            tensors.append(
                {
                    "name": name,
                    "shape": list(entry["shape"]),
                    "dtype": str(entry["dtype"]),
                    "numbers": math.prod(map(int, entry["shape"])),
                    "stored": str(stored),
                }
            )
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{damaged}: {file}: {type(error).__name__}: {error}") from error
    return structure, tensors


def _piece(listed: ListedCheckpoint, name: str, size: int) -> bytes:
    """Return the first bytes of a file."""
    url = listed.place if isinstance(listed.place, str) else ""
    try:
        if isinstance(listed.place, str):
            fs, root = open_url(listed.place)
            return bytes(fs.cat_file(url_below(root, name), 0, size))
        with (listed.place / name).open("rb") as file:
            return file.read(size)
    except FileNotFoundError:
        raise CheckpointError(f"The checkpoint {listed.name} is damaged: {name} is missing.") from None
    except Exception as error:  # every file system has its own errors
        why = redact(f"{type(error).__name__}: {error}", url)
        cause = None if holds_secret(error, url) else error
        raise CheckpointError(f"The checkpoint {listed.name} cannot be read: {name}: {why}") from cause


def _describe_text(data: dict[str, Any]) -> str:
    monitor = data["monitor"]
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    sizes = ", ".join(f"{name} {format_size(each['bytes'])}" for name, each in data["files"].items())
    tied = (
        f"; tied: {', '.join(f'{name} = {first}' for name, first in data['shared'].items())}"
        if data["shared"]
        else ""
    )
    rows = [
        (
            "",
            f"step {data['step']}, epoch {data['epoch']}, {data['epochs_seen']} epochs and "
            f"{data['batches_seen']} batches done",
        ),
        ("saved", f"{_time(data['saved_at'])} UTC, reason: {data['reason']}, the run was {data['status']}"),
        ("kept for", f"{_score(monitor)} ({monitor['mode']} is better)" if monitor else ""),
        ("run", data.get("run", "")),
        ("metrics", ", ".join(f"{name} {format_number(value)}" for name, value in data["metrics"].items())),
        ("weights", f"{data['tensors']} tensors, {data['numbers']:,} numbers, buffers included{tied}"),
        (
            "base model",
            f"{data['base']}: {data['left_out']} of its weights are left out" if data["base"] else "",
        ),
        ("scored", f"the weights averaged by hook {data['scored_hook']!r}" if data["scored_hook"] else ""),
        ("hooks", ", ".join(data["hooks"])),
        ("world size", str(data["world_size"])),
        ("mesh", data.get("mesh", "")),
        ("written by", versions),
        ("files", f"{sizes}; {format_size(data['bytes'])} in all"),
        ("other files", ", ".join(data["extra"])),
    ]
    lines = [data["path"], *(f"  {label:<12}{text}" for label, text in rows if text)]
    named = data.get("tensors_by_name", [])
    wide = max((len(each["name"]) for each in named), default=0) + 2
    lines += [f"  {each['name']:<{wide}}{each['dtype']:<12}{each['shape']}" for each in named]
    return "\n".join(lines)


def _table_data(found: list[ListedCheckpoint], path: str) -> dict[str, Any]:
    """Return every checkpoint of a run, and which of them a resume would use. At a URL only manifests are
    read.
    """
    is_remote = is_url(path)
    record = {} if is_remote else read_record(Path(path))
    if not is_remote:
        for checkpoint in found:
            checkpoint.verify()
    usable = [
        FoundCheckpoint(each.place, each.manifest)
        for each in found
        if isinstance(each.place, Path) and each.manifest and not each.problem
    ]
    own = [each for each in usable if record and record["id"] == each.run]
    mine = without_abandoned(own)
    abandoned = {each.path for each in own if each not in mine}
    taken = {"auto": mine[:1], "best": best_first(mine)[:1]}
    rows = []
    for checkpoint in found:
        facts = checkpoint.manifest or {}
        rows.append(
            {
                "path": checkpoint.name,
                **{
                    key: facts.get(key)
                    for key in ("step", "epoch", "reason", "monitor", "saved_at", "status", "base")
                },
                "bytes": _total_bytes(facts) if facts else None,
                "whole": False if checkpoint.problem else None if is_remote else True,
                "problem": checkpoint.problem or None,
                "extra": checkpoint.extra,
                "abandoned": checkpoint.place in abandoned,
                "resume": [word for word, one in taken.items() if one and one[0].path == checkpoint.place],
            }
        )
    about = None
    if record:
        status, is_certain = recorded_status(Path(path), record)
        about = {
            **{name: record[name] for name in KEPT if name in record},
            "status": status,
            "is_certain": is_certain,
        }
    return {
        "path": redact(path) if is_remote else path,
        "run": about,
        "checkpoints": rows,
        "unsaved": unsaved_end(record, mine[0].manifest) if mine else "",
    }


def _table_text(data: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [
        ("checkpoint", "step", "epoch", "reason", "score", "size", "saved (UTC)", "")
    ]
    for row in data["checkpoints"]:
        if row["problem"]:
            state = (
                row["problem"]
                .removeprefix(f"The checkpoint {row['path']} is ")
                .removeprefix(f"{row['path']} is ")
            )
        else:
            state = "whole" if row["whole"] else "not verified"
            state += ", trainable weights only" if row["base"] else ""
            state += ", abandoned by a rollback" if row["abandoned"] else ""
            state += f", with {', '.join(row['extra'])}" if row["extra"] else ""
        resume = "".join(f', resume="{word}"' for word in row["resume"])
        name = row["path"].removeprefix(data["path"].rstrip("/")).lstrip("/")
        if row["saved_at"] is None:
            rows.append((name, "?", "?", "?", "", "?", "?", state))
        else:
            rows.append(
                (
                    name,
                    str(row["step"]),
                    str(row["epoch"]),
                    row["reason"],
                    _score(row["monitor"]),
                    format_size(row["bytes"]),
                    _time(row["saved_at"]),
                    state + resume,
                )
            )
    lines = align_columns(rows)
    record = data["run"]
    if record:
        why = f" ({record['reason']})" if record["reason"] else ""
        status = status_word(record["status"], record["is_certain"])
        lines.insert(0, f"{data['path']}: run {record['id']}, {status} at step {record['step']}{why}")
        if data["unsaved"]:
            lines.insert(1, f"Its last state is not on disk: it was {data['unsaved']}.")
    return "\n".join(lines)


# ---- in words ----------------------------------------------------------------------------------------------


def _total_bytes(facts: dict[str, Any]) -> int:
    return sum(each["bytes"] for each in facts["files"].values())


def _time(saved_at: str) -> str:
    return saved_at[:19].replace("T", " ")


def _score(monitor: dict[str, Any] | None) -> str:
    return f"{monitor['name']} {format_number(monitor['score'])}" if monitor else ""
