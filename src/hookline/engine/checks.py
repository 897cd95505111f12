"""Checks of options, with the same wording for the trainer, hooks, loggers and strategies.

`name` is the option, which may have its owner in front: `"EarlyStopping: patience"`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import math
import os
import re
import sys
import tempfile
import threading
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from hookline.engine.filters import SECONDS, parse_interval
from hookline.engine.init_arguments import RECORD, record_arguments
from hookline.util.errors import ArgumentError, HookError, OptionError, closest

LARGEST_SEED = 2**64 - 1
"""The largest seed of torch.manual_seed."""
LONGEST_FILE_NAME = 255
"""Bytes in the name of a file or directory, on nearly every file system."""

Init = TypeVar("Init", bound=Callable[..., None])
Rule = Callable[[str, Any], Any]
"""A check of an option's value: returns the value to keep, or raises OptionError."""


def refused(name: str, value: Any, allowed: str, more: str = "") -> OptionError:
    """Return the error about a value that is not what it must be."""
    return OptionError(
        f"{name}={value!r} must be {allowed}.{more}", option=_option_of(name), value=value, allowed=allowed
    )


def _option_of(name: str) -> str:
    """Return the option without its owner."""
    return name.rpartition(": ")[2]


# ---- rules, and how annotations declare them ---------------------------------------------------------------


def rule_of(kind: Any) -> Rule | None:
    """Return the check that an annotation declares, or None.

    `bool` and `Literal` are checks by themselves; `Annotated[type, rule]` has its rule. A union accepts
    values of its plain classes and literals, and checks all others by the member that has a rule:
    `Annotated[int, AtLeast(1)] | None`.
    """
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if kind is bool:
        return check_bool
    if origin is Literal:
        return lambda name, value: check_choice(name, value, members)
    if origin is Annotated:
        return next((each for each in kind.__metadata__ if callable(each)), None) or rule_of(members[0])
    if origin in (typing.Union, types.UnionType):
        rules = [rule for each in members if each is not bool and (rule := rule_of(each)) is not None]
        if set(members) == {bool, type(None)}:
            rules = [check_bool]
        classes = tuple(each for each in members if isinstance(each, type))
        literals = [
            value for each in members if typing.get_origin(each) is Literal for value in typing.get_args(each)
        ]
        if rules:
            return lambda name, value: (
                value if isinstance(value, classes) or value in literals else rules[-1](name, value)
            )
    return None


def check_fields(made: Any) -> None:
    """Check the fields of a dataclass by the rules of their annotations, and keep the values that the rules
    return.
    """
    for field in fields(made):
        if (rule := rule_of(field.type)) is not None:
            object.__setattr__(made, field.name, apply_rule(field.name, rule, getattr(made, field.name)))


def checked_parameters(init: Init) -> Init:
    """Check the arguments of an `__init__` by the rules of its annotations and pass on what they return.

    The object keeps a record of the given arguments, for run.json (`init_arguments`).
    Annotations are resolved at the first call. Defaults are not checked. Not for arguments that are secrets:
    a traceback that shows variables would show them.
    """
    owner = init.__qualname__.split(".")[-2]

    @functools.cache
    def read() -> tuple[inspect.Signature, dict[str, Rule]]:
        hints = typing.get_type_hints(init, include_extras=True)
        rules = {name: rule for name, hint in hints.items() if (rule := rule_of(hint)) is not None}
        return inspect.signature(init), rules

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        signature, rules = read()
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:  # Python's own error names the class and all that is missing
            unknown = [name for name in kwargs if name not in signature.parameters]
            try:
                init(self, *args, **kwargs)
            except TypeError as error:
                if not unknown:
                    raise
                known = list(signature.parameters)[1:]
                near = closest(unknown[0], known) or f" Arguments: {', '.join(known)}."
                raise ArgumentError(f"{error}.{near}") from None
            return
        record = record_arguments(init, self, args, kwargs)
        for name, rule in rules.items():
            if name in bound.arguments:
                bound.arguments[name] = rule(f"{owner}: {name}", bound.arguments[name])
        init(*bound.args, **bound.kwargs)
        self.__dict__[RECORD] = record  # after it, so that a subclass's record replaces that of its base

    return typing.cast("Init", __init__)


def apply_rule(name: str, rule: Rule, value: Any) -> Any:
    """Return a value after its rule. An error about a key of a table gets the full path of the key."""
    try:
        return rule(name, value)
    except OptionError as error:
        if error.option != name:
            error.option = f"{name}.{error.option}" if error.option else name
        raise


class Check:
    """A check of one value. wanted: the allowed values in words."""

    def __init__(self, wanted: str) -> None:
        self.wanted = wanted

    def allows(self, value: Any) -> bool:
        """Return whether the value is allowed."""
        raise NotImplementedError

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value, or raise."""
        if not self.allows(value):
            raise refused(name, value, self.wanted)
        return value


class AtLeast(Check):
    """A whole number of at least `least`. wanted: other words for the allowed values."""

    def __init__(self, least: int, wanted: str = "") -> None:
        super().__init__(wanted or f"a whole number from {least}{' (-1: no limit)' * (least == -1)}")
        self.least, self.schema = least, {"minimum": least}

    def allows(self, value: Any) -> bool:
        """Return whether the value is a whole number that is large enough."""
        return isinstance(value, int) and not isinstance(value, bool) and value >= self.least


class Count(AtLeast):
    """A whole number from `least` on that fits a machine integer, such as the length of a queue."""

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value, or raise."""
        if isinstance(value, int) and value >= sys.maxsize:
            raise refused(name, value, f"{self.wanted} to {sys.maxsize - 1}")
        return super().__call__(name, value)


class Number(Check):
    """A finite number within limits."""

    def __init__(self, least: float = -math.inf, most: float = math.inf) -> None:
        self.least, self.most = least, most
        limits = f" from {least:g}" * (least > -math.inf) + f" to {most:g}" * (most < math.inf)
        super().__init__(f"a number{limits}")
        self.schema = {"minimum": least} if least > -math.inf else {}
        self.schema |= {"maximum": most} if most < math.inf else {}

    def allows(self, value: Any) -> bool:
        """Return whether the value is a finite number within the limits."""
        return is_number(value) and math.isfinite(value) and self.least <= value <= self.most


class Timeout(Number):
    """Seconds that a thread can wait."""

    def __init__(self, least: float = 0.0) -> None:
        super().__init__(least, threading.TIMEOUT_MAX)


class OneOf:
    """One of these texts, where the type should also admit a variable of type `str`."""

    def __init__(self, *allowed: str) -> None:
        self.allowed, self.schema = allowed, {"enum": list(allowed)}

    def __call__(self, name: str, value: Any) -> str:
        """Return the value, or raise."""
        return check_choice(name, value, self.allowed)  # type: ignore[no-any-return]


class Several:
    """Some of the allowed names, given as one text or a list, kept as a tuple."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self.allowed = tuple(allowed)

    def __call__(self, name: str, value: Any) -> tuple[str, ...]:
        """Return the names, or raise."""
        names = as_tuple(name, value, f"these: {', '.join(self.allowed)}")
        for member in names:
            check_choice(name, member, self.allowed)
        return names


class Above(Check):
    """A number above a limit, up to `most`. otherwise: what else is allowed."""

    def __init__(self, limit: float, otherwise: str = "", most: float = math.inf) -> None:
        super().__init__(f"a number above {limit:g}{otherwise}")
        self.limit, self.most, self.schema = limit, most, {"exclusiveMinimum": limit}

    def allows(self, value: Any) -> bool:
        """Return whether the value is a number within the limits."""
        return is_number(value) and self.limit < value <= self.most


class Portion(Check):
    """A number of batches, or a fraction of them. zero: whether 0 is allowed."""

    def __init__(self, zero: bool = True) -> None:
        super().__init__(
            "a number of batches (a whole number) or a fraction of them (a float from 0.0 to 1.0)"
        )
        self.zero, self.schema = zero, {"minimum" if zero else "exclusiveMinimum": 0}

    def allows(self, value: Any) -> bool:
        """Return whether the value is such a number or fraction."""
        is_large_enough = is_number(value) and (value >= 0 if self.zero else value >= 1e-12)
        return is_large_enough and (isinstance(value, int) or value <= 1.0)


class Duration:
    """A length of time, kept as seconds. hint: a sentence to add to the error."""

    def __init__(self, hint: str = "") -> None:
        self.hint = hint

    def __call__(self, name: str, value: Any) -> float:
        """Return the value, or raise."""
        seconds = parse_time(value, name, self.hint) if value is not None else None
        if seconds is None:
            raise _no_time(name, value, self.hint)
        return seconds


class Function(Check):
    """A callable."""

    def allows(self, value: Any) -> bool:
        """Return whether the value can be called."""
        return callable(value)


class Table(Check):
    """A dictionary of named values."""

    def allows(self, value: Any) -> bool:
        """Return whether the value is a dictionary whose keys are texts."""
        return isinstance(value, dict) and all(isinstance(each, str) for each in value)


class OnDisk:
    """The path of a file or directory; `~` is the home directory."""

    def __init__(self, wanted: str = "a path") -> None:
        self.wanted = wanted

    def __call__(self, name: str, value: Any) -> Any:
        """Return the path, or raise."""
        check_path(name, value, self.wanted)
        return at_home(value)


# ---- checks of one value -----------------------------------------------------------------------------------


def check_bool(name: str, value: Any) -> bool:
    """Return the value if it is True or False. Other types are refused, because the text 'false' would count
    as true.
    """
    if not isinstance(value, bool):
        raise refused(name, value, "True or False")
    return value


def check_choice(name: str, value: Any, allowed: Iterable[Any], more: str = "") -> Any:
    """Return the value if it is one of the allowed values."""
    known = tuple(allowed)
    if value not in known:
        near = closest(str(value), [each for each in known if isinstance(each, str)])
        raise OptionError(
            f"{name}={value!r}, allowed: {', '.join(map(repr, known))}.{near} {more}".rstrip(),
            option=_option_of(name),
            value=value,
            allowed=known,
        )
    return value


def check_seed(name: str, seed: Any) -> int:
    """Return the seed if Python, NumPy and torch accept it."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
        raise refused(
            name,
            seed,
            f"a whole number from 0 to {LARGEST_SEED} (2**64 - 1), the range of torch.manual_seed; NumPy is "
            "seeded with its lower 32 bits",
        )
    return seed


def as_tuple(name: str, given: Any, of: str) -> tuple[Any, ...]:
    """Return a tuple of one string or of the items of a list; refuse anything else."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise refused(name, given, f"a list of {of}")
    return tuple(given)


def check_layers(name: str, given: Any) -> tuple[Any, ...]:
    """Return choices of layers of a model: name patterns, class names, classes, or functions."""
    choices = tuple(given) if isinstance(given, list | tuple | set | frozenset) else (given,)
    for choice in choices:
        if not isinstance(choice, str | type) and not _takes_two(choice):
            raise refused(
                name,
                choice,
                "a pattern of names such as 'layers.*', a class of modules or its name, a function of name "
                "and module, or a list of them",
            )
    return choices


def _takes_two(function: Any) -> bool:
    """Return whether a value is a function that can be called with two arguments."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # Python does not know the signature
        pass
    return True


def is_number(value: Any) -> bool:
    """Return whether the value is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- time --------------------------------------------------------------------------------------------------


def parse_time(
    given: str | float | datetime.timedelta | None, name: str = "max_time", hint: str = ""
) -> float | None:
    """Return the seconds of a number, a timedelta, 'DD:HH:MM:SS' or '2 hours'."""
    if given is None:
        return None
    seconds = 0.0
    if isinstance(given, datetime.timedelta):
        seconds = given.total_seconds()
    elif is_number(given):
        seconds = float(given)
    elif isinstance(given, str) and re.fullmatch(r"\d+:\d+:\d+:\d+", given):
        days, hours, minutes, rest = map(int, given.split(":"))
        seconds = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    elif isinstance(given, str):
        with contextlib.suppress(HookError):
            number, unit = parse_interval(given, name)
            seconds = number * SECONDS.get(unit, 0.0)
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise _no_time(name, given, hint)
    return seconds


def _no_time(name: str, given: Any, hint: str) -> OptionError:
    allowed = "seconds, '2 hours', 'DD:HH:MM:SS' or a timedelta, above 0"
    return OptionError(
        f"{name}={given!r}: use {allowed}.{hint}", option=_option_of(name), value=given, allowed=allowed
    )


# ---- paths -------------------------------------------------------------------------------------------------


def at_home(path: Any) -> Any:
    """Return a path with `~` replaced by the home directory, as the type that was given."""
    text = os.fspath(path)
    return type(path)(os.path.expanduser(text)) if str(text).startswith("~") else path


def check_path(name: str, path: Any, wanted: str = "a path") -> None:
    """Raise unless the value is text or a Path that can name a file."""
    if not isinstance(path, str | os.PathLike) or not (text := os.fspath(path)) or not str(text).strip():
        raise OptionError(
            f"{name}={path!r} must be {wanted}{', and is empty' if isinstance(path, str) else ''}.",
            option=_option_of(name),
            value=path,
            allowed=wanted,
        )
    if "\0" in str(text):
        raise OptionError(
            f"{name}={path!r} must be {wanted}; it has a NUL character, which file systems do not allow.",
            option=_option_of(name),
            value=path,
            allowed=wanted,
        )
    for part in Path(os.fsdecode(text)).parts:
        if len(os.fsencode(part)) > LONGEST_FILE_NAME:
            raise OptionError(
                f"{name}={str(path)[:60] + '...'!r}: {part[:20] + '...'!r} has {len(os.fsencode(part))} "
                f"bytes, and a name may have {LONGEST_FILE_NAME}.",
                option=_option_of(name),
                value=path,
                allowed=wanted,
            )


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    # Path.exists raises for a path that is too long or below a directory without permission
    return next(each for each in (path, *path.parents) if os.path.exists(each))


def longest_name(path: Path) -> int:
    """Return the most bytes of a file name in this directory, or in its nearest parent that exists."""
    there = _nearest(path.absolute())
    try:
        return os.pathconf(there, "PC_NAME_MAX")
    except (AttributeError, OSError, ValueError):  # the system does not report it
        return LONGEST_FILE_NAME


def check_writable_directory(name: str, path: Path) -> None:
    """Refuse a directory that cannot be created or written to, before training begins.

    A temporary directory is created and removed, because permissions alone do not decide it.
    """
    whole = path.absolute()
    there = _nearest(whole)
    if not there.is_dir():
        raise OptionError(
            f"{name}={str(path)!r} cannot be a directory: {there} is a file.",
            option=_option_of(name),
            value=path,
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".hookline-", dir=there) as probe:
            Path(probe, *whole.relative_to(there).parts).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        shown = str(path) if len(str(path)) < 200 else f"{str(path)[:60]}..."
        raise OptionError(
            f"{name}={shown!r} cannot be written to: nothing can be created in {there} "
            f"({error.strerror or error}).",
            option=_option_of(name),
            value=path,
        ) from None


def check_file(name: str, path: Any) -> Any:
    """The path of a file that a run writes."""
    check_path(name, path, "the path of a file")
    if ".." in Path(path).parts or not Path(path).name:
        raise refused(
            name, path, "the path of a file, without '..'; a relative one is below the run's directory"
        )
    return path


PRECISION_SPELLINGS = {
    "32": "32",
    "32-true": "32",
    "bf16": "bf16-mixed",
    "bf16-mixed": "bf16-mixed",
    "16": "16-mixed",
    "16-mixed": "16-mixed",
    "64": "64",
    "64-true": "64",
    "bf16-true": "bf16-true",
    "16-true": "16-true",
}


def check_precision(name: str, value: Any) -> Any:
    """Return a precision as it is written. Raise for one that does not exist."""
    parse_precision(value)
    return value


def parse_precision(precision: str | int) -> str:
    """Return '32', 'bf16-mixed', '16-mixed', '64', 'bf16-true' or '16-true' for any accepted spelling."""
    name = PRECISION_SPELLINGS.get(str(precision))
    if name is None:
        plain = re.sub(
            r"^(?:fp|float)(?=\d)", "", str(precision).lower().replace("bfloat", "bf")
        )  # fp16, float32, bfloat16
        near = (
            "" if plain.isdigit() else closest(plain, PRECISION_SPELLINGS).partition("'")[2].partition("'")[0]
        )
        meant = PRECISION_SPELLINGS.get(plain) or PRECISION_SPELLINGS.get(near)
        hint = f" Did you mean {meant!r}?" if meant else ""
        raise OptionError(
            f"precision={precision!r}, allowed: 32, 'bf16-mixed', '16-mixed', 64, 'bf16-true', '16-true'."
            f"{hint}",
            option="precision",
            value=precision,
            allowed=tuple(dict.fromkeys(PRECISION_SPELLINGS.values())),
        )
    return name
