"""The trainer's options: names people know, checked together before anything runs."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import math
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from hookline.errors import HookError, OptionError, closest
from hookline.filters import SECONDS, parse_interval

PRECISIONS = {
    "32": "32", "32-true": "32", "bf16": "bf16-mixed", "bf16-mixed": "bf16-mixed", "16": "16-mixed", "16-mixed": "16-mixed",
}  # fmt: skip
ACCUMULATE_BY = ("batches", "samples", "tokens")
LARGEST_SEED = 2**64 - 1
"""What torch.manual_seed takes."""
LONGEST_NAME = 255
"""Bytes in the name of a file or directory, on nearly every file system."""


class OptionArguments(TypedDict, total=False):
    """`Options` as keyword arguments of `Trainer`, for type checkers and editors."""

    max_epochs: int | None
    min_epochs: int
    max_steps: int
    max_time: str | float | datetime.timedelta | None
    accumulate_grad_batches: int
    accumulate_by: str
    count_tokens: Callable[[Any], int] | None
    gradient_clip_val: float | None
    gradient_clip_algorithm: str
    nonfinite: str
    val_check_interval: int | float
    check_val_every_n_epoch: int
    num_sanity_val_steps: int
    val_aggregation: str | Callable[[dict[str, dict[str, float]]], Mapping[str, float]]
    limit_train_batches: int | float
    limit_val_batches: int | float
    limit_test_batches: int | float
    limit_predict_batches: int | float
    overfit_batches: int | float
    fast_dev_run: bool | int
    prefetch_batches: int
    log_every_n_steps: int
    enable_progress_bar: bool
    trace: bool | str | Path
    control: bool
    seed: int | None
    deterministic: bool
    compile: bool | Literal["step"] | dict[str, Any]
    default_root_dir: str | Path
    run_dir: str | Path | None
    checkpoint: bool | str | dict[str, Any]
    grace_period: str | float | datetime.timedelta | None
    hang_after: str | float | datetime.timedelta | None
    hang_action: str


@dataclass(frozen=True, slots=True)
class Saving:
    """How a run saves: what `Trainer(checkpoint=...)` means."""

    last: bool = True
    """Keep `checkpoints/last` without being asked by a hook."""
    every: float = 300.0
    """Seconds between two writes of it while the run trains."""
    write: str = "sync"
    """'sync', or 'async': in the background, training waits only for a copy of the tensors."""
    on_error: str = "raise"
    """A checkpoint that a hook or a signal asked for cannot be written: 'raise' ends the run, 'warn' continues without it."""


CHOICES = {"write": ("sync", "async"), "on_error": ("raise", "warn")}
OLD_NAMES = {"save": "write", "on_save_error": "on_error"}
"""Options that are keys of `checkpoint` now. They are still accepted."""


def parse_checkpoint(given: Any) -> Saving:
    """Return the settings that `checkpoint=` asks for; what it does not name has its default."""
    if isinstance(given, bool):
        return Saving(last=given)
    if isinstance(given, str):
        _check_choice(f"checkpoint={given!r}", given, CHOICES["write"], "True, False or a table are allowed, too.")
        return Saving(write=given)
    known = [each.name for each in fields(Saving)]
    if not isinstance(given, Mapping):
        raise OptionError(f"checkpoint={given!r} must be True, False, 'sync', 'async' or a table of {', '.join(known)}.")
    for name, value in given.items():
        if name not in known:
            raise OptionError(f"checkpoint has no setting {name!r}.{closest(str(name), known)} Settings: {', '.join(known)}.")
        if name in CHOICES:
            _check_choice(f"checkpoint: {name}={value!r}", value, CHOICES[name])
    settings = dict(given)
    check_bool("checkpoint: last", settings.get("last", True))
    if "every" in settings:
        seconds = parse_time(settings["every"], "checkpoint: every")
        if seconds is None:
            raise OptionError("checkpoint: every=None: pass a time such as '5 minutes', or last=False to write no checkpoint.")
        settings["every"] = seconds
    return Saving(**settings)


def with_new_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return these options with `save` and `on_save_error` as keys of `checkpoint`. Errors use the name that was given."""
    old = {name: value for name, value in given.items() if name in OLD_NAMES}
    if not old:
        return dict(given)
    if "checkpoint" in given:
        raise OptionError(f"checkpoint and {' and '.join(old)} cannot be combined: {next(iter(old))} is an older name for a part "
                          f"of it. Pass checkpoint={ {OLD_NAMES[name]: value for name, value in old.items()} }.")  # fmt: skip
    for name, value in old.items():
        _check_choice(f"{name}={value!r}", value, CHOICES[OLD_NAMES[name]])
    kept = {name: value for name, value in given.items() if name not in OLD_NAMES}
    return {**kept, "checkpoint": {OLD_NAMES[name]: value for name, value in old.items()}}


def _check_choice(text: str, value: Any, allowed: tuple[str, ...], more: str = "") -> None:
    if value not in allowed:
        raise OptionError(f"{text}, allowed: {', '.join(map(repr, allowed))}.{closest(str(value), allowed)} {more}".rstrip())


@dataclass(slots=True)
class Options:
    """How long to train, when to validate, what to limit, where to write."""

    # how long
    max_epochs: int | None = None
    """Epochs to train; without max_steps and max_time: 1000. -1: no limit."""
    min_epochs: int = 0
    """Requests to stop are not honoured before so many epochs."""
    max_steps: int = -1
    """Optimizer updates to make; -1: no limit."""
    max_time: str | float | datetime.timedelta | None = None
    """Seconds, '2 hours', 'DD:HH:MM:SS' or a timedelta."""
    # the update
    accumulate_grad_batches: int = 1
    """Batches whose gradients make one update."""
    accumulate_by: str = "batches"
    """What each of them counts by in the update: 'batches' (all count alike), 'samples' or 'tokens' (the update is that of one
    large batch, over all ranks, if the loss is a mean over samples or tokens)."""
    count_tokens: Callable[[Any], int] | None = None
    """From a batch to its number of tokens; None: the elements of `input_ids`, or of the first tensor."""
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    """'norm' or 'value'."""
    nonfinite: str = "stop"
    """A loss that is NaN or infinite: 'stop' (noticed one step late, no sync) or 'skip' (one read per update)."""
    # validation
    val_check_interval: int | float = 1.0
    """Validate every so many batches, or after such a fraction of an epoch."""
    check_val_every_n_epoch: int = 1
    num_sanity_val_steps: int = 2
    """Validation batches before training; -1: all."""
    val_aggregation: str | Callable[[dict[str, dict[str, float]]], Mapping[str, float]] = "micro"
    """Several evaluation loaders: 'micro' (the mean over all samples), 'macro' (over loaders), 'primary' (the first loader's),
    'primary:NAME', or a function from {loader: {metric: value}} to {metric: value}."""
    # less than everything
    limit_train_batches: int | float = 1.0
    limit_val_batches: int | float = 1.0
    limit_test_batches: int | float = 1.0
    limit_predict_batches: int | float = 1.0
    overfit_batches: int | float = 0.0
    """Train on the same few batches again and again, without shuffling, and without validation data of their own."""
    fast_dev_run: bool | int = False
    """Run n batches of everything once, without logging and without checkpoints: does it work at all?"""
    prefetch_batches: int = 0
    """Batches that a thread fetches and moves to the device in advance; for loaders with workers, and lists."""
    # around it
    log_every_n_steps: int = 50
    enable_progress_bar: bool = True
    """A progress bar, and at the end of a fit a table of what the hooks cost."""
    trace: bool | str | Path = False
    """Write every event and call as a timeline for Perfetto: True for trace.json in the run's directory, or a file."""
    control: bool = True
    """Listen on a socket in the run's directory, through which this user can look at a fit and control it."""
    seed: int | None = None
    """Seeds Python, numpy and torch when a run begins."""
    deterministic: bool = False
    """Only deterministic kernels, during runs."""
    compile: bool | Literal["step"] | dict[str, Any] = False
    """torch.compile the model, with these arguments; 'step', or a table with step=True: the whole training step."""
    default_root_dir: str | Path = "."
    run_dir: str | Path | None = None
    """Where everything of a run is written; by default default_root_dir/runs/NAME."""
    # when something goes wrong
    checkpoint: bool | str | dict[str, Any] = True
    """Keep the newest state of a fit as `checkpoints/last`; False: only hooks save. 'async' writes checkpoints in the background.
    Or a table: `last` (True), `every` ("5 minutes"), `write` ('sync', 'async'), `on_error` ('raise', 'warn')."""
    grace_period: str | float | datetime.timedelta | None = "5 minutes"
    """After SIGTERM, SIGUSR1 or Ctrl-C: how long the step that is going on and the save may take. None: no limit."""
    hang_after: str | float | datetime.timedelta | None = "10 minutes"
    """A hook, step, loader, logger or save that takes longer is named, with where it stands. None: nobody watches."""
    hang_action: str = "warn"
    """'abort' also ends the run."""

    def __post_init__(self) -> None:
        self._whole("max_epochs", -1, none=True)
        self._whole("min_epochs", 0)
        self._whole("max_steps", -1)
        self._whole("accumulate_grad_batches", 1)
        self._whole("check_val_every_n_epoch", 1)
        self._whole("num_sanity_val_steps", -1)
        self._whole("log_every_n_steps", 1)
        self._whole("prefetch_batches", 0)
        self._choice("accumulate_by", ACCUMULATE_BY)
        self._choice("gradient_clip_algorithm", ("norm", "value"))
        self._choice("nonfinite", ("stop", "skip"))
        if not callable(self.val_aggregation) and not re.fullmatch("primary:.+", str(self.val_aggregation), re.DOTALL):
            self._choice("val_aggregation", ("micro", "macro", "primary", "primary:NAME"))
        parse_checkpoint(self.checkpoint)
        self._choice("hang_action", ("warn", "abort"))
        for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"):
            self._amount(name)
        self._amount("overfit_batches")
        self._amount("val_check_interval", zero=False)
        if self.gradient_clip_val is not None and not (_is_number(self.gradient_clip_val) and self.gradient_clip_val > 0):
            raise OptionError(f"gradient_clip_val={self.gradient_clip_val!r} must be a number above 0, or None for no clipping.")
        if self.seed is not None:
            check_seed("seed", self.seed)
        if not isinstance(self.fast_dev_run, int) or self.fast_dev_run < 0:
            raise OptionError(f"fast_dev_run={self.fast_dev_run!r} must be True, False or a number of batches.")
        for name in ("enable_progress_bar", "deterministic", "control"):
            check_bool(name, getattr(self, name))
        if self.count_tokens is not None and not callable(self.count_tokens):
            raise OptionError(f"count_tokens={self.count_tokens!r} must be a function from a batch to its number of tokens.")
        is_table = isinstance(self.compile, dict) and _is_named(self.compile)
        if not is_table and self.compile != "step" and not isinstance(self.compile, bool):
            raise OptionError(f"compile={self.compile!r} must be True, False, 'step' (the whole training step) or a dictionary "
                              "of arguments for torch.compile, with step=True for the whole training step.")  # fmt: skip
        if not isinstance(self.trace, bool):
            check_path("trace", self.trace, "True, False or the path of a file")
        check_path("default_root_dir", self.default_root_dir)
        if self.run_dir is not None:
            check_path("run_dir", self.run_dir)
        self.max_time = parse_time(self.max_time)
        self.grace_period = parse_time(self.grace_period, "grace_period")
        self.hang_after = parse_time(self.hang_after, "hang_after")
        self._combine()

    def _combine(self) -> None:
        if self.fast_dev_run:
            batches = int(self.fast_dev_run)
            self.max_epochs, self.max_steps, self.num_sanity_val_steps = 1, batches, 0
            self.limit_train_batches = self.limit_val_batches = batches
            self.limit_test_batches = self.limit_predict_batches = batches
            self.accumulate_grad_batches, self.val_check_interval, self.check_val_every_n_epoch = 1, 1.0, 1
        if self.overfit_batches:
            self.limit_train_batches = self.overfit_batches
        if self.max_epochs is None:
            self.max_epochs = -1 if self.max_steps >= 0 or self.max_time is not None else 1000
        if 0 <= self.max_epochs < self.min_epochs:
            raise OptionError(f"min_epochs={self.min_epochs} is more than max_epochs={self.max_epochs}.")

    @property
    def saving(self) -> Saving:
        """`checkpoint` as settings."""
        return parse_checkpoint(self.checkpoint)

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds."""
        return _seconds(self.max_time)

    @property
    def grace_seconds(self) -> float | None:
        """`grace_period` in seconds."""
        return _seconds(self.grace_period)

    @property
    def hang_seconds(self) -> float | None:
        """`hang_after` in seconds."""
        return _seconds(self.hang_after)

    def _whole(self, name: str, least: int, none: bool = False) -> None:
        value = getattr(self, name)
        if none and value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            extra = " (-1: no limit)" if least == -1 else ""
            raise OptionError(f"{name}={value!r} must be a whole number from {least}{extra}.")

    def _choice(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        _check_choice(f"{name}={value!r}", value, allowed)

    def _amount(self, name: str, zero: bool = True) -> None:
        value = getattr(self, name)
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= (0 if zero else 1)
        fraction = isinstance(value, float) and (0.0 if zero else 1e-12) <= value <= 1.0
        if not (whole or fraction):
            raise OptionError(f"{name}={value!r} must be a number of batches (a whole number) or a fraction of them "
                              "(a float from 0.0 to 1.0).")  # fmt: skip


def check_bool(name: str, value: Any) -> None:
    """Only True and False: the text 'false' would count as true."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} must be True or False.")


def check_whole(name: str, value: Any, least: int) -> None:
    """A whole number from `least` on, as far as a machine counts."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < sys.maxsize:
        most = f" to {sys.maxsize - 1}" if isinstance(value, int) and value >= sys.maxsize else ""
        raise OptionError(f"{name}={value!r} must be a whole number from {least}{most}.")


def check_number(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> None:
    """A finite number within limits."""
    if not _is_number(value) or not math.isfinite(value) or not least <= value <= most:
        limits = f" from {least:g}" * (least > -math.inf) + f" to {most:g}" * (most < math.inf)
        raise OptionError(f"{name}={value!r} must be a number{limits}.")


def check_timeout(name: str, seconds: Any, least: float = 0.0) -> None:
    """Seconds that a thread can wait."""
    check_number(name, seconds, least, threading.TIMEOUT_MAX)


def check_seed(name: str, seed: Any) -> None:
    """A seed that Python, numpy and torch take."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
        raise OptionError(f"{name}={seed!r} must be a whole number from 0 to {LARGEST_SEED} (2**64 - 1), which is what torch "
                          "takes; numpy is seeded with its lower 32 bits.")  # fmt: skip


def members(name: str, given: Any, of: str) -> tuple[Any, ...]:
    """What was given as one text or as a list; anything that is neither is refused."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise OptionError(f"{name}={given!r} must be a list of {of}.")
    return tuple(given)


def check_path(name: str, path: Any, wanted: str = "a path") -> None:
    """Text or a Path that can name something on a disk."""
    if not isinstance(path, str | os.PathLike) or not (text := os.fspath(path)) or not str(text).strip():
        raise OptionError(f"{name}={path!r} must be {wanted}{', and is empty' if isinstance(path, str) else ''}.")
    if "\0" in str(text):
        raise OptionError(f"{name}={path!r} must be {wanted}; it has a NUL character, which no file system takes.")
    for each in Path(os.fsdecode(text)).parts:
        if len(os.fsencode(each)) > LONGEST_NAME:
            raise OptionError(f"{name}={str(path)[:60] + '...'!r}: {each[:20] + '...'!r} has {len(os.fsencode(each))} bytes, and "
                              f"a name may have {LONGEST_NAME}.")  # fmt: skip


def longest_name(path: Path) -> int:
    """Bytes that a name may have in this directory, or in the nearest one above it that exists."""
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    try:
        return os.pathconf(there, "PC_NAME_MAX")
    except (AttributeError, OSError, ValueError):  # a system that does not tell
        return LONGEST_NAME


def check_place(name: str, path: Path) -> None:
    """Refuse a directory that cannot be made or written to, before anything is trained for it.

    A directory of that name is made beside it and removed again, because permissions alone do not tell.
    """
    whole = path.absolute()
    there = next(each for each in (whole, *whole.parents) if each.exists())
    if not there.is_dir():
        raise OptionError(f"{name}={str(path)!r} cannot be a directory: {there} is a file.")
    try:
        with tempfile.TemporaryDirectory(prefix=".hookline-", dir=there) as probe:
            Path(probe, *whole.relative_to(there).parts).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{name}={str(path)!r} cannot be written to: nothing can be created in {there} "
                          f"({error.strerror or error}).") from None  # fmt: skip


def check_file(name: str, path: Any) -> None:
    """The path of a file that a run writes."""
    check_path(name, path, "the path of a file")
    if ".." in Path(path).parts or not Path(path).name:
        raise OptionError(f"{name}={path!r} must be the path of a file, without '..'; "
                          "a relative one is below the run's directory.")  # fmt: skip


def make_options(given: dict[str, Any]) -> Options:
    """Options from keyword arguments; an unknown one is an error with the closest right name."""
    known = [field.name for field in fields(Options)]
    given = with_new_names(given)
    for name in given:
        if name not in known:
            names = [*known, "hooks", "callbacks", "logger", "strategy", "device", "precision", "config", "accounting"]
            raise OptionError(f"Trainer has no option {name!r}.{closest(name, names)} Options: {', '.join(names)}.")
    return Options(**given)


def refuse_unknown(call: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Arguments that a call does not have, as other systems' trainers do, with the closest right name."""
    for name in given:
        known = [each.name for each in inspect.signature(call).parameters.values() if each.kind is not each.VAR_KEYWORD][1:]
        raise OptionError(f"{call.__name__}() has no argument {name!r}.{closest(name, known)} Arguments: {', '.join(known)}.")


def parse_precision(precision: str | int) -> str:
    """32, 'bf16-mixed' or '16-mixed'."""
    name = PRECISIONS.get(str(precision))
    if name is None:
        plain = re.sub(r"^(?:fp|float)(?=\d)", "", str(precision).lower().replace("bfloat", "bf"))  # fp16, float32, bfloat16
        near = "" if plain.isdigit() else closest(plain, PRECISIONS).partition("'")[2].partition("'")[0]
        meant = PRECISIONS.get(plain) or PRECISIONS.get(near)
        hint = f" Did you mean {meant!r}?" if meant else ""
        raise OptionError(f"precision={precision!r}, allowed: 32, 'bf16-mixed', '16-mixed'.{hint}")
    return name


def parse_time(given: str | float | datetime.timedelta | None, name: str = "max_time") -> float | None:
    """Seconds from a number, a timedelta, 'DD:HH:MM:SS' or '2 hours'."""
    if given is None:
        return None
    seconds = 0.0
    if isinstance(given, datetime.timedelta):
        seconds = given.total_seconds()
    elif _is_number(given):
        seconds = float(given)
    elif isinstance(given, str) and re.fullmatch(r"\d+:\d+:\d+:\d+", given):
        days, hours, minutes, rest = map(int, given.split(":"))
        seconds = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    elif isinstance(given, str):
        with contextlib.suppress(HookError):
            number, unit = parse_interval(given, name)
            seconds = number * SECONDS.get(unit, 0.0)
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise OptionError(f"{name}={given!r}: use seconds, '2 hours', 'DD:HH:MM:SS' or a timedelta, above 0.")
    return seconds


def _seconds(parsed: Any) -> float | None:
    assert parsed is None or isinstance(parsed, float)
    return parsed


def _is_named(arguments: dict[Any, Any]) -> bool:
    return all(isinstance(name, str) for name in arguments)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
