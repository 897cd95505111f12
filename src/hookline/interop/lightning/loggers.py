"""Lightning's loggers among Hookline's, unchanged, and by name:
`from hookline.interop.lightning.loggers import CSVLogger`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookline.interop.lightning.package import find, installed, missing
from hookline.loggers import base  # not its Logger: here that name is Lightning's
from hookline.loggers.jsonl import JSONLines
from hookline.util.errors import closest
from hookline.util.urls import is_url

PLACE = "writes into the run's directory and takes no save_dir"
INSTEAD = {
    "CSVLogger": f"hookline.loggers.CSV: `CSV()` {PLACE}",
    "CometLogger": "hookline.loggers.Comet",
    "LitLogger": "a logger of hookline.loggers",
    "Logger": "hookline.loggers.Logger",
    "MLFlowLogger": "hookline.loggers.MLflow",
    "TensorBoardLogger": f"hookline.loggers.TensorBoard: `TensorBoard()` {PLACE}",
    "WandbLogger": "hookline.loggers.WandB",
}
"""Loggers of the package, and what to use without it."""


class AdoptedLogger(base.Logger):
    """Represents one of Lightning's loggers in `hookline.Trainer`."""

    queued = False

    def __init__(self, original: Any) -> None:
        self.original = original
        self._status = "success"

    @property
    def label(self) -> str:
        """Return the class of the original."""
        return type(self.original).__name__

    @property
    def client(self) -> Any:
        """Return the original's own client, if it has one."""
        return getattr(self.original, "experiment", None)

    def open(self, run_dir: Callable[[], Path]) -> None:
        """Let the original create its client before the first event, as Lightning does."""
        self._status = "success"
        _ = self.client

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        """Log a row, with the epoch in it."""
        self.original.log_metrics({"epoch": epoch, **metrics}, step)
        self.original.save()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log the hyper-parameters."""
        self.original.log_hyperparams(dict(params))
        self.original.save()

    def log_event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Record a failure, with which the original is finalized."""
        if kind == "failure" or (kind == "end" and data["status"] in ("error", "interrupted")):
            self._status = "failed"

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        """Log a number."""
        self.original.log_metrics({tag: base.number(tag, scalar_value)}, global_step)

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        """Log a distribution, if the client can."""
        self._add("add_histogram", tag, values, global_step)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        """Log text, if the client can."""
        self._add("add_text", tag, text_string, global_step)

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        """Log an image, if the client can."""
        self._add("add_image", tag, img_tensor, global_step)

    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None:
        """Log a figure, if the client can."""
        self._add("add_figure", tag, figure, global_step)

    def _add(self, method: str, *given: Any) -> None:
        if (add := getattr(self.client, method, None)) is not None:
            add(*given)

    def close(self) -> None:
        """Write what the original has collected."""
        self.original.save()
        self.original.finalize(self._status)


def split(given: list[Any]) -> tuple[list[Any], list[base.Logger]]:
    """Return the loggers that Lightning's trainer calls as Lightning does, and those of Hookline.

    Lightning's are accompanied by a log that Hookline's commands read.
    """
    own = [each for each in given if isinstance(each, base.Logger)]
    theirs = [each for each in given if not isinstance(each, base.Logger)]
    if theirs and not any(isinstance(each, JSONLines) for each in own):
        own.append(JSONLines())
    return theirs, own


def default_logger(directory: str) -> Any:
    """Return the logger for `Trainer(logger=True)`: the default of the imported package, or Hookline's."""
    tensorboard = find("loggers.tensorboard", "_TENSORBOARD_AVAILABLE")
    made = find("loggers", "TensorBoardLogger" if tensorboard else "CSVLogger")
    return JSONLines() if made is None else made(save_dir=directory)


def directory_of_logs(loggers: list[Any], root: str) -> str | Path | None:
    """Return the directory of the first logger that has one; else the one that contains the `checkpoints`
    of Lightning's ModelCheckpoint, if the first logger has a name and a version.

    root: the directory for a logger without a `save_dir`.
    """
    found = (getattr(each, "log_dir", None) for each in loggers)
    directory = next((each for each in found if isinstance(each, str | Path)), None)
    first = next(iter(loggers), None)
    name, version = getattr(first, "name", None), getattr(first, "version", None)
    if directory is None and name is not None and version is not None:
        folder = version if isinstance(version, str) else f"version_{version}"
        directory = os.path.join(getattr(first, "save_dir", None) or root, str(name), folder)
    return None if directory is None or is_url(directory) else directory


def __getattr__(name: str) -> Any:
    """Return the logger of the installed package."""
    if name == "__all__":  # of `from ... import *`
        return installed("loggers", name) or []
    if not name[:1].isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if (theirs := installed("loggers", name)) is not None:
        return theirs
    if name in INSTEAD:
        raise missing(name, INSTEAD[name])
    raise AttributeError(
        f"There is no logger {name!r}.{closest(name, INSTEAD)} There are: {', '.join(INSTEAD)}."
    )


def __dir__() -> list[str]:
    """Return the names of all loggers: Python compares a name that it cannot import with them."""
    return sorted({*globals(), *INSTEAD})
