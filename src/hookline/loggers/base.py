"""What a logger can take. Every method does nothing here, so a logger overrides what it supports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hookline.errors import OptionError


class Logger:
    """Base of loggers: scalars, histograms, text, images, figures and hyper-parameters."""

    def open(self, run_dir: Callable[[], Path]) -> None:
        """A run begins; `run_dir()` makes its directory if something is to be written there."""

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        """A row of numbers."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """What the run was started with."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        """One number."""

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        """The distribution of a tensor's values."""

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        """A piece of text."""

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        """An image of shape (channels, height, width)."""

    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None:
        """A matplotlib figure."""

    def close(self) -> None:
        """The run is over: everything must be on disk."""


class Loggers(Logger):
    """Several loggers as one, or none: `self.experiment` always exists."""

    def __init__(self, loggers: Iterable[Logger] = ()) -> None:
        self.members = list(loggers)

    def __bool__(self) -> bool:
        return bool(self.members)

    def open(self, run_dir: Callable[[], Path]) -> None:
        for each in self.members:
            each.open(run_dir)

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        for each in self.members:
            each.log_metrics(metrics, step, epoch)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        for each in self.members:
            each.log_hyperparams(params)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        for each in self.members:
            each.add_scalar(tag, scalar_value, global_step)

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        for each in self.members:
            each.add_histogram(tag, values, global_step)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        for each in self.members:
            each.add_text(tag, text_string, global_step)

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        for each in self.members:
            each.add_image(tag, img_tensor, global_step)

    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None:
        for each in self.members:
            each.add_figure(tag, figure, global_step)

    def close(self) -> None:
        for each in self.members:
            each.close()


def make_loggers(given: Any, default: Callable[[], Logger]) -> Loggers:
    """From `Trainer(logger=...)`: True, False, one logger or several."""
    if given is True:
        return Loggers([default()])
    if given is False or given is None:
        return Loggers()
    members: list[Any] = [given] if isinstance(given, Logger | str) or not isinstance(given, Iterable) else list(given)
    for each in members:
        if not isinstance(each, Logger):
            raise OptionError(f"logger={each!r} must be True, False, a Logger, or a list of them.")
    return Loggers(members)
