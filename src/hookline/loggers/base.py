"""What a logger can take, several loggers as one, and the values loggers are given, made plain."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from hookline.engine.checks import check_path, refused
from hookline.util.errors import HooklineError, OptionError

log = logging.getLogger("hookline")


class BadValue(HooklineError, ValueError):
    """Something that cannot be logged: the caller's mistake, so it is raised where it was made."""


class Logger:
    """Base of loggers: scalars, histograms, text, images, figures and hyper-parameters.

    Every method does nothing here, so a logger overrides what it supports.
    """

    queued: bool | None = None
    """How the trainer calls it. None: in a thread of its own, and waits for it as long as it is quick; once
    it is slow or hangs, the run goes on without it. True: behind a queue from the start. False: directly, for
    what is quick and local.
    """
    tells_rows_apart = False
    """Whether `log_metrics` takes a fourth argument, what the row's numbers are over: 'step', 'epoch' or
    'evaluation'.
    """

    @property
    def label(self) -> str:
        """What messages call it."""
        return type(self).__name__

    @property
    def client(self) -> Any:
        """The client underneath, for what only that one can do: a SummaryWriter, a W&B run... None if there
        is none.
        """
        return None

    def open(self, run_dir: Callable[[], Path]) -> None:
        """A run begins; `run_dir()` makes its directory if something is to be written there."""

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        """A row of numbers."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """What the run was started with."""

    def log_event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Something that happened, as plain data: 'skip', 'failure', 'cost'. Few loggers have
        a place for it.
        """

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

    def position(self) -> Any:
        """How far it has written, as plain data to be kept in a checkpoint; None if it cannot say."""
        return None

    def resume(self, position: Any, step: int, epoch: int, path: Path | str) -> None:
        """The run goes on from the checkpoint `path`, where `position()` was `position`: what was logged
        after it is superseded.

        None if there was no such logger then, or it could not say. This run may have logged something
        already.
        """

    def begin_afresh(self) -> None:
        """A new run is trained, perhaps where another has logged before: what is there is of another course
        of events.
        """

    def close(self) -> None:
        """The run is over: everything must be on disk."""


SLOW = 1.0
"""Seconds after which a logger that is called directly is said to hold up the training."""


OF_THE_RUN = ("open", "position", "resume", "begin_afresh", "close")
"""What the run itself asks of a logger: no value of the user's is in it."""


class Loggers(Logger):
    """Several loggers as one, or none: `self.experiment` always exists.

    A member that fails is reported once and left alone for the rest of the run; the others and the training
    go on.
    """

    def __init__(
        self, loggers: Iterable[Logger] = (), through: Callable[[Logger], Logger] | None = None
    ) -> None:
        self.members = list(loggers)
        self._called = [through(each) for each in self.members] if through is not None else self.members
        """How each member is reached: itself, or through what keeps it off the training."""
        self._failed: list[Logger] = []
        self._slow: set[str] = set()
        self.calling: dict[int, tuple[Logger, str]] = {}
        """The member and its method that each thread calls now, for the watchdog."""

    def __bool__(self) -> bool:
        return bool(self.members)

    def __repr__(self) -> str:
        return f"<loggers: {', '.join(type(each).__name__ for each in self.members) or 'none'}>"

    def _tell_all(self, method: str, *given: Any) -> None:
        for each in self._called:
            self._tell(each, method, *given)

    def _tell(self, each: Logger, method: str, *given: Any) -> Any:
        if self._failed and any(each is failed for failed in self._failed):
            return None
        began, thread = time.monotonic(), threading.get_ident()
        self.calling[thread] = (each, method)
        try:
            answer = getattr(each, method)(*given)
            took = time.monotonic() - began
            if took > SLOW and each.queued is False and method != "close" and each.label not in self._slow:
                self._slow.add(each.label)
                log.warning(
                    "%s took %.1f s in %s and holds up the training; without `queued = False` it would not.",
                    each.label,
                    took,
                    method,
                )
            if method == "position":
                json.dumps(answer)  # what a checkpoint cannot hold would fail the whole of it
            return answer
        except Exception as error:
            if isinstance(error, BadValue) and method not in OF_THE_RUN:
                raise
            self._failed.append(each)
            log.warning("%s failed in %s and is switched off for this run", each.label, method, exc_info=True)
            return None
        finally:
            self.calling.pop(thread, None)

    def _by_name(self) -> Iterator[tuple[str, Logger]]:
        """Everyone under a name that stays the same when others come or go: `CSV`, and `CSV 2` for the second
        of its kind.
        """
        seen: dict[str, int] = {}
        for each in self._called:
            number = seen[each.label] = seen.get(each.label, 0) + 1
            yield (each.label if number == 1 else f"{each.label} {number}"), each

    @property
    def client(self) -> Any:
        """The first client that a member has; with several, use the `client` of the one you mean."""
        working = [each for each in self._called if not any(each is failed for failed in self._failed)]
        return next((client for client in (each.client for each in working) if client is not None), None)

    def log_row(self, metrics: Mapping[str, float], step: int, epoch: int, over: str) -> None:
        """A row of the run's own, with what its numbers are over; for loggers that can tell rows apart."""
        for each in self._called:
            if each.tells_rows_apart:
                self._tell(each, "log_metrics", metrics, step, epoch, over)
            else:
                self._tell(each, "log_metrics", metrics, step, epoch)

    def log_event(self, kind: str, data: Mapping[str, Any]) -> None:
        self._tell_all("log_event", kind, data)

    def open(self, run_dir: Callable[[], Path]) -> None:
        self._failed = []
        self._tell_all("open", run_dir)

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        self._tell_all("log_metrics", metrics, step, epoch)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._tell_all("log_hyperparams", params)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        self._tell_all("add_scalar", tag, scalar_value, global_step)

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        self._tell_all("add_histogram", tag, values, global_step)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        self._tell_all("add_text", tag, text_string, global_step)

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        if self.members:
            check_image(tag, img_tensor)
        self._tell_all("add_image", tag, img_tensor, global_step)

    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None:
        self._tell_all("add_figure", tag, figure, global_step)

    def position(self) -> dict[str, Any]:
        """Those of the members that can say, by name."""
        positions = {name: self._tell(each, "position") for name, each in self._by_name()}
        return {name: position for name, position in positions.items() if position is not None}

    def resume(self, position: Any, step: int, epoch: int, path: Path | str) -> None:
        for name, each in self._by_name():
            self._tell(each, "resume", (position or {}).get(name), step, epoch, path)

    def begin_afresh(self) -> None:
        self._tell_all("begin_afresh")

    def close(self) -> None:
        for each in self._failed:  # it may still hold a file or a connection
            with contextlib.suppress(Exception):
                each.close()
        self._tell_all("close")


class ClientLogger(Logger):
    """Base of loggers that hand everything to another package's client, made when the first record comes."""

    package = ""
    extra = ""

    def __init__(self, queued: bool = True) -> None:
        if not isinstance(queued, bool):
            raise refused("queued", queued, "True or False")
        if importlib.util.find_spec(self.package) is None:
            raise OptionError(
                f"{self.label} needs the package {self.package!r}: pip install hookline[{self.extra}]"
            )
        self.queued = queued
        self._run_dir: Callable[[], Path] | None = None
        self._client: Any = None
        self._newest_step = 0

    def open(self, run_dir: Callable[[], Path]) -> None:
        self._run_dir, self._newest_step = run_dir, 0

    @property
    def client(self) -> Any:
        """The other package's own object. It exists during a run."""
        if self._client is None:
            if self._run_dir is None:
                raise HooklineError(f"{self.label} has a client only during a run.")
            self._client = self._connect(self._run_dir())
        return self._client

    def _connect(self, run_dir: Path) -> Any:
        """Make the client."""
        raise NotImplementedError

    def _disconnect(self) -> None:
        """Everything must be on disk, or sent."""
        raise NotImplementedError

    def _write(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand over a row of numbers."""
        raise NotImplementedError

    def _step(self, given: int | None) -> int:
        """Without a step, a record belongs to the newest one there was."""
        if given is not None:
            self._newest_step = max(self._newest_step, int(given))
        return self._newest_step if given is None else int(given)

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        self._write({"epoch": float(epoch), **metrics}, self._step(step))

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        self._write({tag: number(tag, scalar_value)}, self._step(global_step))

    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None:
        self.add_image(tag, picture(tag, figure), global_step)

    def close(self) -> None:
        self._run_dir = None
        if self._client is not None:
            try:
                self._disconnect()
            finally:
                self._client = None


# ---- values, as loggers need them --------------------------------------------------------------------------


def number(tag: str, value: Any) -> float:
    """A float, read from its device if need be."""
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadValue(f"{tag!r} takes one number, not {_kind(value)}.") from error


def numbers(tag: str, values: Any) -> np.ndarray[Any, Any]:
    """All values in a row, on the host."""
    try:
        tensor = _tensor(values)
        return (
            tensor.to("cpu", torch.float64 if tensor.dtype == torch.float64 else torch.float32)
            .flatten()
            .numpy()
        )
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise BadValue(f"{tag!r} takes a tensor of numbers, not {_kind(values)}.") from error


def finite(tag: str, values: Any) -> tuple[np.ndarray[Any, Any], int]:
    """The values that a histogram can show, and how many it cannot."""
    every = numbers(tag, values)
    shown = every[np.isfinite(every)]
    return shown, every.size - shown.size


def histogram(values: np.ndarray[Any, Any], bins: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Counts and edges of bins over finite values; one bin for all of them, where no more fit in between."""
    if not values.size:
        return np.array([]), np.array([])
    wide = values.astype(np.float64)  # in float32, no thirty bins fit between 1.0 and the number after it
    try:
        with np.errstate(all="ignore"):
            return np.histogram(wide, bins=bins)
    except ValueError:
        return np.array([values.size]), np.array([wide.min(), wide.max()])


def check_image(tag: str, image: Any) -> None:
    """Refuse what has not the shape of an image; reads nothing from a device."""
    shape = tuple(getattr(image, "shape", ()))
    if len(shape) != 2 and (len(shape) != 3 or shape[0] not in (1, 3, 4)):
        raise BadValue(
            f"{tag!r} takes an image of shape (1, 3 or 4, height, width) or (height, width), not "
            f"{_kind(image)}."
        )


def pixels(tag: str, image: Any) -> np.ndarray[Any, Any]:
    """An image, bytes or floats from 0 to 1, as bytes of shape (height, width, channels)."""
    check_image(tag, image)
    try:
        data = _tensor(image).cpu()
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise BadValue(f"{tag!r} takes an image of numbers, not {_kind(image)}.") from error
    data = data.unsqueeze(0) if data.ndim == 2 else data
    if data.is_floating_point():
        data = data.float().nan_to_num(0.0).clamp(0, 1) * 255
    elif data.dtype == torch.bool:
        data = data.to(torch.uint8) * 255
    return np.ascontiguousarray(data.clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy())


def drawn(tag: str, figure: Any) -> bytes:
    """A figure as a PNG file."""
    if not hasattr(figure, "savefig"):
        raise BadValue(f"{tag!r} takes a matplotlib figure, not {_kind(figure)}.")
    file = io.BytesIO()
    try:
        figure.savefig(file, format="png")
    except Exception as error:
        raise BadValue(f"{tag!r}: the figure cannot be drawn: {error}") from error
    return file.getvalue()


def picture(tag: str, figure: Any) -> np.ndarray[Any, Any]:
    """A figure drawn as an image of shape (4, height, width)."""
    from PIL import Image  # comes with matplotlib

    return np.array(Image.open(io.BytesIO(drawn(tag, figure))).convert("RGBA")).transpose(2, 0, 1)


def flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Nested parameters side by side (`options/max_epochs`), each something that every client can keep."""
    side_by_side: dict[str, bool | int | float | str] = {}
    for key, value in params.items():
        name = printable(f"{prefix}{key}")
        if isinstance(value, Mapping):
            side_by_side.update(flat(value, f"{name}/"))
        elif isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**53):
            side_by_side[name] = value
        else:
            side_by_side[name] = printable(str(value))
    return side_by_side


def file_name(tag: str, step: int | None, ending: str) -> str:
    """A readable file name for any tag, its own for each, that cannot leave its folder."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", tag)[:60]
    unique = hashlib.sha256(tag.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{readable}-{unique}-{step}.{ending}"


def printable(text: str) -> str:
    """Text that any encoding can hold: half a character (a lone surrogate) is shown by its number."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def check_folder(name: str, folder: str | Path) -> str:
    """A folder below the run's directory, and nowhere else."""
    check_path(name, folder, "a folder inside the run's directory")
    path = PurePath(folder)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise refused(name, str(folder), "a folder inside the run's directory: no '..', no absolute path")
    return str(path)


def _tensor(value: Any) -> torch.Tensor:
    """As a tensor; an array is copied, because torch takes neither read-only nor reversed ones."""
    return torch.as_tensor(np.array(value) if isinstance(value, np.ndarray) else value).detach()


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
