"""A hook from a file, for a job that is running: read once, the same text on every rank."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import stat
import sys
import types
from pathlib import Path
from typing import Any

from hookline.errors import HookError, closest
from hookline.hook import Hook, snake_case
from hookline.hooklist import Entry, HookList

LARGEST_FILE = 1_000_000
LONGEST_NAME = 200
MARK = "__hookline_attached__"
"""On a hook that was attached from outside: the file and the class that it was made of, and the name that it
was given.
"""
_serial = itertools.count(1)


def read_file(asked: str) -> dict[str, Any]:
    """`FILE.py:Class` as plain data that every rank can make the hook of; nothing of the file is run yet."""
    path, _, name = asked.rpartition(":") if ":" in asked else (asked, "", "")
    file = Path(path)
    if file.suffix != ".py" or (name and not name.isidentifier()):
        raise HookError(f"attach {asked!r}: give a file and a class in it, such as probe.py:Probe.")
    try:
        about = file.stat()
        if not stat.S_ISREG(about.st_mode):  # reading a pipe would wait for ever
            raise HookError(f"attach {asked!r}: {file} is no regular file.")
        if about.st_size > LARGEST_FILE:
            raise HookError(f"attach {asked!r}: a file of {about.st_size:,} bytes is no hook.")
        source = file.read_text(encoding="utf-8")
        compile(source, str(file), "exec")
    except FileNotFoundError:
        near = [each.name for each in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise HookError(f"attach {asked!r}: there is no file {file}.{closest(file.name, near)}") from None
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise HookError(f"attach {asked!r}: {type(error).__name__}: {error}") from None
    return {
        "file": str(file),
        "class": name,
        "source": source,
        "sha256": hashlib.sha256(source.encode()).hexdigest(),
    }


def check_name(name: Any) -> None:
    """Refuse what no table, and no command line, could show as a name."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > LONGEST_NAME:
        shown = repr(name)
        shown = shown if len(shown) <= LONGEST_NAME else f"{shown[:LONGEST_NAME]}…"
        raise HookError(
            f"attach: the name {shown} must be a text of one line, of at most {LONGEST_NAME} characters."
        )


def make_hook(about: dict[str, Any]) -> Hook:
    """Run the file's text in a module of its own, and make the hook."""
    file = Path(about["file"])
    module = types.ModuleType(f"hookline_attached_{next(_serial)}_{snake_case(file.stem)}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses look there for their own module
    exec(compile(about["source"], str(file), "exec"), vars(module))
    cls = _choose(module, file.name, str(about["class"]))
    try:
        hook = cls()
    except TypeError as error:
        raise HookError(
            f"{cls.__name__} cannot be made without arguments ({error}); give them defaults."
        ) from error
    check_name(about["name"] or hook.name)
    setattr(hook, MARK, (str(file), cls.__name__, about["name"]))
    return hook


def attached(hooks: HookList) -> list[Entry]:
    """Return the hooks that were attached from outside."""
    return [entry for entry in hooks.entries() if hasattr(entry.hook, MARK)]


def replaced_by(hook: Hook, name: str | None, hooks: HookList) -> list[Entry]:
    """Return what a hook takes the place of: the attached one of its name, or without a name that of the same
    file and class.
    """
    if name:
        return [entry for entry in attached(hooks) if entry.name == name]
    return [entry for entry in attached(hooks) if getattr(entry.hook, MARK) == getattr(hook, MARK)]


def _choose(module: types.ModuleType, file: str, wanted: str) -> type[Hook]:
    """The class that was asked for; without a name the only hook there is."""
    own = {
        name: each
        for name, each in vars(module).items()
        if inspect.isclass(each) and each.__module__ == module.__name__
    }
    hooks = {name: each for name, each in own.items() if issubclass(each, Hook)}
    if not hooks:
        raise HookError(f"{file} has no class that derives from hookline.Hook.")
    if not wanted and len(hooks) > 1:
        raise HookError(
            f"{file} has several hooks, say which: {', '.join(f'{file}:{name}' for name in hooks)}."
        )
    if wanted in own and wanted not in hooks:
        raise HookError(
            f"{wanted} in {file} does not derive from hookline.Hook. Hooks there: {', '.join(hooks)}."
        )
    if wanted and wanted not in hooks:
        raise HookError(
            f"{file} has no hook {wanted!r}.{closest(wanted, hooks)} Hooks there: {', '.join(hooks)}."
        )
    return hooks[wanted or next(iter(hooks))]
