"""Write records as JSON, one object per line. Every line is complete and valid."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from hookline.engine.checks import check_path
from hookline.loggers.base import (
    Logger,
    figure_png,
    file_name,
    finite_values,
    histogram,
    number,
    pixels,
    remove_files,
)

_encode_record = json.JSONEncoder(allow_nan=False).encode

LOOKED_AT = 4096
"""Bytes before a position that identify a log. Every line in them has its own time."""
OF_A_JOB = re.compile(rb'\{"type": "(end|hyperparams|resume)"')
"""The first and the last records of a fit."""


class JSONLines(Logger):
    """Writes `log.jsonl` in the run's directory. Images and figures become files beside it.

    A run in the same directory continues the file after a `resume` record, which has the superseded bytes.
    `hookline.loggers.read_log` leaves them out.

    path: the file; None: `log.jsonl` in the run's directory.
    """

    queued = False
    tells_rows_apart = True

    def __init__(self, path: str | Path | None = None) -> None:
        if path is not None:
            check_path("path", path, "the path of a file")
        self._given = Path(path).expanduser() if path is not None else None
        self._run_dir: Callable[[], Path] = Path
        self._file: IO[str] | None = None
        self._found = 0
        """Length of the file at the start of this run, or at its newest rollback."""
        self._has_begun = False
        """Whether this run has marked what is superseded when it began."""
        self._media: list[Path] = []
        """The images that this run has written."""

    def open(self, run_dir: Callable[[], Path]) -> None:
        """Set the path. The first record makes the file."""
        self._run_dir, self._has_begun, self._media = run_dir, False, []

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return self._given or self._run_dir() / "log.jsonl"

    def write(self, kind: str, **record: Any) -> None:
        """Write one record in a single call, so that a line is complete or absent."""
        if self._file is None:
            self._file = self._opened()
        whole = {"type": kind, "time": round(time.time(), 3), **record}
        try:
            line = _encode_record(whole)
        except (TypeError, ValueError):  # a value that JSON cannot hold
            line = _encode_record(jsonable(whole))
        self._file.write(line + "\n")

    def _opened(self) -> IO[str]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _end_torn_line(self.path)
        file = self.path.open("a", encoding="utf-8", buffering=1)
        self._found = os.fstat(file.fileno()).st_size
        return file

    def position(self) -> dict[str, Any] | None:
        """Return the length of the file, or None if it is empty. Also valid after the run."""
        length = self.path.stat().st_size if self.path.exists() else 0
        return {"bytes": length, "sha256": _fingerprint(self.path, length)} if length else None

    def resume(self, position: Any, step: int, epoch: int, path: Path | str) -> None:
        """Write the superseded bytes: from the position to the start of this run, or none in another file."""
        if self._file is None:
            self._file = self._opened()
        marked: dict[str, Any] = {}
        if self._has_begun:  # a rollback: what this run has logged is superseded too
            self._found, marked = self.path.stat().st_size, {"in_run": True}
        self._has_begun = True
        if (
            position
            and position["bytes"] < self._found
            and _fingerprint(self.path, position["bytes"]) == position["sha256"]
        ):
            marked |= self._from(position["bytes"], -1 if marked else step)
        self.write("resume", step=step, epoch=epoch, checkpoint=str(path), **marked)

    def begin_afresh(self) -> None:
        """Mark everything before this run as superseded."""
        self._has_begun = True
        if self._file is None and self.path.exists():
            self._file = self._opened()
        if self._found:
            self.write("resume", step=0, epoch=0, **self._from(0))

    def _from(self, first: int, step: int = -1) -> dict[str, Any]:
        """Return the superseded bytes from this one to the start of this run.

        step: that of the checkpoint. If the last fit ended there, the records after it are of its weights,
        such as those of a test: they stay valid.
        """
        at, records = first, 0
        end: tuple[int, int] | None = None
        for line in _lines(self.path, first, self._found):
            at += len(line)
            records += line.endswith(b"}\n")
            if kind := OF_A_JOB.match(line):
                ends_here = kind[1] == b"end" and re.search(rb'"step": %d\b' % step, line)
                end = (at, records) if ends_here else None
        last, count = end or (self._found, records)
        return {"superseded": {"from": first, "to": last, "records": count}}

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int, over: str = "") -> None:
        if over:
            self.write("metrics", step=step, epoch=epoch, over=over, metrics=dict(metrics))
        else:
            self.write("metrics", step=step, epoch=epoch, metrics=dict(metrics))

    def log_event(self, kind: str, data: Mapping[str, Any]) -> None:
        self.write(kind, **data)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.write("hyperparams", params=dict(params))

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        self.write("metrics", step=global_step, metrics={tag: number(tag, scalar_value)})

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        shown, others = finite_values(tag, values)
        counts, edges = histogram(shown, 30)
        self.write(
            "histogram",
            step=global_step,
            tag=tag,
            counts=counts.tolist(),
            edges=edges.tolist(),
            nonfinite=others,
        )

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        self.write("text", step=global_step, tag=tag, text=str(text_string))

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        self._keep(tag, image_png(tag, img_tensor), global_step)

    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None:
        self._keep(tag, figure_png(tag, figure), global_step)

    def _keep(self, tag: str, image: bytes, step: int | None) -> None:
        path = self.path.parent / "media" / file_name(tag, step, "png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
        self._media.append(path)
        self.write("image", step=step, tag=tag, path=path.relative_to(self.path.parent))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def discard(self) -> None:
        if self._file is not None:
            remove_files(self._media, self.path.parent)
            self.close()
            if self._found:
                os.truncate(self.path, self._found)
            else:
                self.path.unlink()


def _end_torn_line(path: Path) -> None:
    """End an incomplete last line, which a kill may leave, so that the next record is on its own line."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _fingerprint(path: Path, length: int) -> str:
    """Return a hash of the bytes before a position."""
    with path.open("rb") as file:
        file.seek(max(0, length - LOOKED_AT))
        return hashlib.sha256(file.read(min(length, LOOKED_AT))).hexdigest()


def _lines(path: Path, first: int, last: int) -> Iterator[bytes]:
    """Yield the lines of a part of a log."""
    with path.open("rb") as file:
        file.seek(first)
        while first < last:
            line = file.readline()
            first += len(line)
            yield line


def jsonable(value: Any) -> Any:
    """Return a value that JSON can hold: NaN and infinity as text, tensors as numbers, others as text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(each) for each in value]
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        try:
            return jsonable(value.tolist())
        except (RuntimeError, TypeError, ValueError, NotImplementedError):  # no numbers in it: meta, sparse
            return f"{type(value).__name__} of shape {tuple(value.shape)}"
    return str(value)


def image_png(tag: str, image: Any) -> bytes:
    """Return an image (1, 3 or 4, height, width) or (height, width), bytes or floats from 0 to 1, as PNG."""
    rows = pixels(tag, image)
    height, width, channels = rows.shape
    raw = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(raw))
        + chunk(b"IEND", b"")
    )
