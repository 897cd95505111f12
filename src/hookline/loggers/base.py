"""The base of loggers, several loggers as one, and conversions of logged values."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import itertools
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hookline.engine.checks import check_path, refused
from hookline.util.errors import AdvisesOnNames, HooklineError, OptionError, missing_package

if TYPE_CHECKING:
    from hookline.loggers.run_artifacts import RunArtifacts

log = logging.getLogger("hookline")


class BadValue(HooklineError, ValueError):
    """A value that cannot be logged, raised to the caller that passed it."""


class Logger:
    """Base of loggers: scalars, histograms, text, images, figures and hyper-parameters.

    Every method does nothing, so a logger overrides those that it supports.
    """

    queued: bool | None = None
    """How the trainer calls it. None: in a thread, and waits for each call until the logger is slow or hangs;
    then the run continues without waiting. True: in a thread, without waiting. False: directly, for a logger
    that is fast and local.
    """
    tells_rows_apart = False
    """Whether `log_metrics` takes a fourth argument, the scope: 'step', 'epoch' or 'evaluation'.
    """
    artifacts: Sequence[str] = ()
    """What the run passes to `log_artifact`: 'config', 'best_checkpoint', 'last_checkpoint' or 'checkpoints'.
    Trackers also take 'figures'.
    """

    @property
    def label(self) -> str:
        """Return the name for messages."""
        return type(self).__name__

    @property
    def client(self) -> Any:
        """Return the underlying client, such as a SummaryWriter or a W&B run, or None."""
        return None

    def open(self, run_dir: Callable[[], Path]) -> None:
        """Start a run. run_dir: a function that makes the run's directory and returns it, for a logger that
        writes there.
        """

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        """Log a row of metrics. metrics: numbers by name. step, epoch: when they were logged."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log the hyper-parameters of the run. params: values by name."""

    def log_event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Log an event as plain data. Few loggers support it. kind: 'skip', 'failure', 'cost', ... data: its
        record.
        """

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        """Log a number. tag: its name. scalar_value: the number. global_step: the step, or None."""

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        """Log a distribution of values. tag: its name. values: a tensor. global_step: the step, or None."""

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        """Log text. tag: its name. text_string: the text. global_step: the step, or None."""

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        """Log an image. tag: its name. img_tensor: of shape (channels, height, width). global_step: the step,
        or None.
        """

    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None:
        """Log a figure. tag: its name. figure: of matplotlib. global_step: the step, or None."""

    def log_artifact(
        self,
        path: Path | str,
        name: str,
        kind: str = "file",
        metadata: Mapping[str, Any] | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        """Log a file or a directory, which stays as it is until this call returns.

        path: the file or directory. name: the name of the artifact. kind: 'config' and 'checkpoint' for those
        of the run, and any word for others. metadata: plain data about it. aliases: further names of this
        version, such as 'best'.
        """

    def has_logged(self, checkpoint: str, run_dir: Path) -> bool:
        """Return whether an earlier process has logged a checkpoint.

        If it has not, because it was killed, a run that resumes logs the checkpoint. It is called before the
        first record. checkpoint: its id (`metadata["checkpoint"]`). run_dir: the run's directory.
        """
        return True

    def position(self) -> Any:
        """Return the position in the log as plain data for a checkpoint, or None."""
        return None

    def resume(self, position: Any, step: int, epoch: int, path: Path | str) -> None:
        """Continue from a checkpoint: records after `position` are superseded.

        This run may have logged something already, which stays valid. A later call in the same run is a
        rollback: then all records after `position` are superseded.

        position: the result of `position()`, or None if the checkpoint has none. step, epoch: those of the
        checkpoint. path: the checkpoint.
        """

    def begin_afresh(self) -> None:
        """Start a new training. Records of an earlier run in the same directory are superseded."""

    def discard(self) -> None:
        """Remove what this run has written: it was refused before its first batch. `close` follows."""

    def close(self) -> None:
        """End the run and write everything to disk."""


SLOW_CALL = 1.0
"""Seconds after which a call of a direct logger is reported as slow."""


RUN_METHODS = ("open", "position", "resume", "begin_afresh", "has_logged", "discard", "close")
"""Methods that the run itself calls, without values of the user."""
ARTIFACTS_POSITION = "artifacts of the run"
"""The key of `RunArtifacts.position()` among the positions of the loggers."""


class Loggers(Logger, AdvisesOnNames):
    """Several loggers as one, or none: `self.experiment` always exists.

    A member that fails is reported once and disabled for the rest of the run. The others and the training
    continue.

    loggers: the members. called: what is called for each of them, if it is not the member itself.
    """

    def __init__(self, loggers: Iterable[Logger] = (), called: Iterable[Logger] | None = None) -> None:
        self.members = list(loggers)
        self._called = list(called) if called is not None else self.members
        """The object to call for each member: itself, or its wrapper with a thread."""
        self._failed: list[Logger] = []
        self._slow: set[str] = set()
        self.calling: dict[int, tuple[Logger, str]] = {}
        """The member and the method that each thread is calling, for the watchdog."""
        self._artifacts: RunArtifacts | None = None
        """Set during a run in which a member takes artifacts."""
        self._held: list[tuple[str, tuple[Any, ...]]] | None = None
        """Calls that wait for `release`; None: members are called at once."""

    def __bool__(self) -> bool:
        return bool(self.members)

    def __repr__(self) -> str:
        return f"<loggers: {', '.join(type(each).__name__ for each in self.members) or 'none'}>"

    def add(self, logger: Logger) -> None:
        """Add a member for a part of a run, such as a hook that takes rows; it is called directly."""
        self.members.append(logger)
        if self._called is not self.members:
            self._called.append(logger)

    def remove(self, logger: Logger) -> None:
        """Remove a member that `add` has added."""
        for members in (self.members, self._called, self._failed):
            members[:] = [each for each in members if each is not logger]

    def hold(self) -> None:
        """Keep what is logged until `release`, or drop it at `close`: the run may not write there yet."""
        self._held = []

    def release(self) -> None:
        """Log what was kept since `hold`, in order."""
        held, self._held = self._held or [], None
        for method, given in held:
            getattr(self, method)(*given)

    def _is_held(self, method: str, given: tuple[Any, ...]) -> bool:
        """Keep a call and return True if records are held, except a call of the run itself."""
        if self._held is None or method in RUN_METHODS:
            return False
        self._held.append((method, copy_values(given)))
        return True

    def _call_all(self, method: str, *given: Any) -> None:
        if self._is_held(method, given):
            return
        for logger in self._called:
            self._call(logger, method, *given)

    def _call(self, each: Logger, method: str, *given: Any) -> Any:
        if self._failed and any(each is failed for failed in self._failed):
            return None
        began, thread = time.monotonic(), threading.get_ident()
        self.calling[thread] = (each, method)
        try:
            answer = getattr(each, method)(*given)
            took = time.monotonic() - began
            if (
                took > SLOW_CALL
                and each.queued is False
                and method != "close"
                and each.label not in self._slow
            ):
                self._slow.add(each.label)
                log.warning(
                    "%s took %.1f s in %s and holds up the training; without `queued = False` it would not.",
                    each.label,
                    took,
                    method,
                )
            if method == "position":
                json.dumps(answer)  # a value that a checkpoint cannot hold would fail the save
            return answer
        except Exception as error:
            if isinstance(error, BadValue) and method not in RUN_METHODS:
                raise
            self._failed.append(each)
            log.warning("%s failed in %s and is switched off for this run", each.label, method, exc_info=True)
            return None
        finally:
            self.calling.pop(thread, None)

    def _by_name(self) -> Iterator[tuple[str, Logger]]:
        """Yield the members by stable names: `CSV`, and `CSV 2` for the second of its kind."""
        seen: dict[str, int] = {}
        for logger in self._called:
            count = seen[logger.label] = seen.get(logger.label, 0) + 1
            yield (logger.label if count == 1 else f"{logger.label} {count}"), logger

    @property
    def client(self) -> Any:
        """Return the client of the first member that has one."""
        working = [each for each in self._called if not any(each is failed for failed in self._failed)]
        return next((client for client in (each.client for each in working) if client is not None), None)

    @property
    def experiment(self) -> Loggers:
        """Return this object, which modules have as `self.experiment`."""
        return self

    def log_row(self, metrics: Mapping[str, float], step: int, epoch: int, over: str) -> None:
        """Log a row of the run, with the scope of its metrics for loggers that take it."""
        if self._is_held("log_row", (metrics, step, epoch, over)):
            return
        for logger in self._called:
            scope = (over,) if logger.tells_rows_apart else ()
            self._call(logger, "log_metrics", metrics, step, epoch, *scope)

    def log_config(self, path: Path, run: str) -> None:
        """Log the record of a run, with its configuration, to members that take it. run: the run's id."""
        if self._artifacts is not None:
            self._artifacts.log_config(path, run)

    def log_checkpoint(self, path: Path | str, reason: str, step: int) -> None:
        """Log a durable checkpoint of the run to members that take it."""
        if self._artifacts is not None:
            self._artifacts.log_checkpoint(path, reason, step)

    def log_event(self, kind: str, data: Mapping[str, Any]) -> None:
        if kind == "end" and self._artifacts is not None:
            self._artifacts.status = str(data.get("status"))
        self._call_all("log_event", kind, data)

    def open(self, run_dir: Callable[[], Path]) -> None:
        self._failed, self._artifacts, self._held = [], None, None
        if takers := [each for each in self._called if each.artifacts]:
            from hookline.loggers.run_artifacts import RunArtifacts

            self._artifacts = RunArtifacts(takers, self._call, run_dir)
        self._call_all("open", run_dir)

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        self._call_all("log_metrics", metrics, step, epoch)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._call_all("log_hyperparams", params)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        self._call_all("add_scalar", tag, scalar_value, global_step)

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        self._call_all("add_histogram", tag, values, global_step)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        self._call_all("add_text", tag, text_string, global_step)

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        if self.members:
            check_image(tag, img_tensor)
        self._call_all("add_image", tag, img_tensor, global_step)

    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None:
        self._call_all("add_figure", tag, figure, global_step)

    def log_artifact(
        self,
        path: Path | str,
        name: str,
        kind: str = "file",
        metadata: Mapping[str, Any] | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        """Log a file or a directory of your own to every member, whatever artifacts it takes from the run."""
        if self.members and not Path(path).exists():
            raise BadValue(f"log_artifact({str(path)!r}, {name!r}): there is no such file or directory.")
        self._call_all("log_artifact", Path(path), name, kind, metadata, aliases)

    def has_logged(self, checkpoint: str, run_dir: Path) -> bool:
        answers = [self._call(each, "has_logged", checkpoint, run_dir) for each in self._called]
        return bool(answers) and all(answers)

    def position(self) -> dict[str, Any]:
        """Return the positions of the members by name, and of the artifacts of the run."""
        positions = {name: self._call(each, "position") for name, each in self._by_name()}
        positions[ARTIFACTS_POSITION] = None if self._artifacts is None else self._artifacts.position()
        return {name: position for name, position in positions.items() if position is not None}

    def resume(self, position: Any, step: int, epoch: int, path: Path | str) -> None:
        from hookline.util.urls import is_url, shown  # only a resume needs it

        path = shown(path) if is_url(path) else path  # members write it, so a URL must not hold its secrets
        for name, logger in self._by_name():
            self._call(logger, "resume", (position or {}).get(name), step, epoch, path)
        if self._artifacts is not None:
            self._artifacts.resume((position or {}).get(ARTIFACTS_POSITION), path)

    def begin_afresh(self) -> None:
        self._call_all("begin_afresh")

    def discard(self) -> None:
        self._call_all("discard")

    def close(self) -> None:
        if self._artifacts is not None:
            self._artifacts.finish()
        self._artifacts = self._held = None
        for logger in self._failed:  # a failed member may still hold a file or a connection
            with contextlib.suppress(Exception):
                logger.close()
        self._call_all("close")


class ClientLogger(Logger):
    """Base of loggers that use the client of another package, made at the first record.

    queued: call the client in a thread, without waiting; False: directly.
    """

    package = ""
    extra = ""

    def __init__(self, queued: bool = True) -> None:
        if not isinstance(queued, bool):
            raise refused("queued", queued, "True or False")
        if importlib.util.find_spec(self.package) is None:
            raise OptionError(missing_package(self.label, self.package, self.extra))
        self.queued = queued
        self._run_dir: Callable[[], Path] | None = None
        self._client: Any = None
        self._newest_step = 0

    def open(self, run_dir: Callable[[], Path]) -> None:
        self._run_dir, self._newest_step = run_dir, 0

    @property
    def client(self) -> Any:
        """Return the client of the other package. It exists during a run."""
        if self._client is None:
            if self._run_dir is None:
                raise HooklineError(f"{self.label} has a client only during a run.")
            self._client = self._connect(self._run_dir())
        return self._client

    def _connect(self, run_dir: Path) -> Any:
        """Make the client."""
        raise NotImplementedError

    def _disconnect(self) -> None:
        """Write or send everything and close the client."""
        raise NotImplementedError

    def _write(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a row of metrics."""
        raise NotImplementedError

    def _step(self, given: int | None) -> int:
        """Return the given step, or the newest one."""
        if given is not None:
            self._newest_step = max(self._newest_step, int(given))
        return self._newest_step if given is None else int(given)

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        self._write({"epoch": float(epoch), **metrics}, self._step(step))

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        self._write({tag: number(tag, scalar_value)}, self._step(global_step))

    def add_figure(self, tag: str, figure: Any, global_step: int | None = None) -> None:
        self.add_drawn_figure(tag, figure_png(tag, figure), global_step)

    def add_drawn_figure(self, tag: str, png: bytes, global_step: int | None = None) -> None:
        """Log a figure that was drawn as the bytes of a PNG file."""
        self.add_image(tag, png_pixels(png), global_step)

    def close(self) -> None:
        self._run_dir = None
        if self._client is not None:
            try:
                self._disconnect()
            finally:
                self._client = None


# ---- conversions of values ---------------------------------------------------------------------------------


def number(tag: str, value: Any) -> float:
    """Return a number as a float. Reads the device for a tensor."""
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadValue(f"{tag!r} takes one number, not {_describe_kind(value)}.") from error


def numbers(tag: str, values: Any) -> np.ndarray[Any, Any]:
    """Return all values as a flat array."""
    try:
        tensor = _as_tensor(values)
        return (
            tensor.to("cpu", torch.float64 if tensor.dtype == torch.float64 else torch.float32)
            .flatten()
            .numpy()
        )
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise BadValue(f"{tag!r} takes a tensor of numbers, not {_describe_kind(values)}.") from error


def finite_values(tag: str, values: Any) -> tuple[np.ndarray[Any, Any], int]:
    """Return the finite values, and the number of others."""
    every = numbers(tag, values)
    shown = every[np.isfinite(every)]
    return shown, every.size - shown.size


def histogram(values: np.ndarray[Any, Any], bins: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return counts and edges of bins over finite values, or one bin if their range is too small."""
    if not values.size:
        return np.array([]), np.array([])
    wide = values.astype(np.float64)  # float32 has no room for thirty bins between 1.0 and the next number
    try:
        with np.errstate(all="ignore"):
            return np.histogram(wide, bins=bins)
    except ValueError:
        return np.array([values.size]), np.array([wide.min(), wide.max()])


def histogram_row(tag: str, values: Any, make: Callable[..., Any]) -> dict[str, Any]:
    """Return the records of a histogram: a client's object of its finite values, and the number of others."""
    shown, others = finite_values(tag, values)
    row = {tag: make(np_histogram=histogram(shown, 64))} if shown.size else {}
    return row | ({f"{tag}/nonfinite": others} if others else {})


def check_image(tag: str, image: Any) -> None:
    """Refuse a value without the shape of an image. Does not read the device."""
    shape = tuple(getattr(image, "shape", ()))
    if len(shape) != 2 and (len(shape) != 3 or shape[0] not in (1, 3, 4)):
        raise BadValue(
            f"{tag!r} takes an image of shape (1, 3 or 4, height, width) or (height, width), not "
            f"{_describe_kind(image)}."
        )


def pixels(tag: str, image: Any) -> np.ndarray[Any, Any]:
    """Return an image (bytes, or floats from 0 to 1) as bytes of shape (height, width, channels)."""
    check_image(tag, image)
    try:
        data = _as_tensor(image).cpu()
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise BadValue(f"{tag!r} takes an image of numbers, not {_describe_kind(image)}.") from error
    data = data.unsqueeze(0) if data.ndim == 2 else data
    if data.is_floating_point():
        data = data.float().nan_to_num(0.0).clamp(0, 1) * 255
    elif data.dtype == torch.bool:
        data = data.to(torch.uint8) * 255
    return np.ascontiguousarray(data.clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy())


def flat_pixels(tag: str, image: Any) -> np.ndarray[Any, Any]:
    """Return an image as `pixels` does, without the dimension of the channels if it has one channel."""
    data = pixels(tag, image)
    return data[:, :, 0] if data.shape[2] == 1 else data


def figure_png(tag: str, figure: Any) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    if not hasattr(figure, "savefig"):
        raise BadValue(f"{tag!r} takes a matplotlib figure, not {_describe_kind(figure)}.")
    file = io.BytesIO()
    try:
        figure.savefig(file, format="png")
    except Exception as error:
        raise BadValue(f"{tag!r}: the figure cannot be drawn: {error}") from error
    return file.getvalue()


def png_pixels(png: bytes) -> np.ndarray[Any, Any]:
    """Return a drawn figure as an image of shape (4, height, width)."""
    from PIL import Image  # comes with matplotlib

    return np.array(Image.open(io.BytesIO(png)).convert("RGBA")).transpose(2, 0, 1)


def flat_params(params: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return nested parameters flattened (`options/max_epochs`), each of a type that every client accepts."""
    from hookline.util.text import encodable, flatten  # the loggers of a plain run do not need it

    return {
        encodable(name): value
        if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**53)
        else encodable(str(value))
        for name, value in flatten(params, "/").items()
        if not isinstance(value, Mapping) or value
    }


def file_name(tag: str, step: int | None, ending: str) -> str:
    """Return a unique, readable file name for a tag, which cannot leave its folder."""
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", tag)[:60]
    unique = hashlib.sha256(tag.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{readable}-{unique}-{step}.{ending}"


def copy_values(value: Any) -> Any:
    """Return a copy of containers, tensors and arrays, and any other value itself."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: copy_values(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_values(each) for each in value)
    return value


def remove_files(paths: Iterable[Path], run_dir: Path) -> None:
    """Remove files of a refused run, and the folders below the run's directory that are empty then."""
    for path in paths:
        path.unlink(missing_ok=True)
        for folder in itertools.takewhile(lambda each: each != run_dir, path.parents):
            with contextlib.suppress(OSError):  # it has other files
                folder.rmdir()


def check_folder(name: str, folder: str | Path) -> str:
    """Return a folder, or raise if it is not below the run's directory."""
    check_path(name, folder, "a folder inside the run's directory")
    path = PurePath(folder)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise refused(name, str(folder), "a folder inside the run's directory: no '..', no absolute path")
    return str(path)


def _as_tensor(value: Any) -> torch.Tensor:
    """Return a value as a tensor. Copy arrays, because torch rejects read-only and reversed ones."""
    return torch.as_tensor(np.array(value) if isinstance(value, np.ndarray) else value).detach()


def _describe_kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
