"""Places that a schedule writes to, by a path: a hyper-parameter of optimizers, an attribute, a buffer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from hookline.hooks._settings import as_patterns, is_match
from hookline.util.errors import HookError, OptionError, closest, described
from hookline.util.text import list_some

ROOTS = ("optimizer", "module", "hooks")
EXAMPLES = "'optimizer.weight_decay', 'optimizer.betas[0]', 'module.dropout.p' or 'hooks.NAME.attribute'"
_PART = re.compile(r"(?:^|\.)([\w*?]+)|\[(\d+|'[^'\]]*'|\"[^\"\]]*\")\]")

Part = str | int
"""A name, or the index of an item."""
Value = float | bool | str


class Target:
    """One place: an attribute of an object or an entry of a parameter group, or an item of these."""

    __slots__ = ("index", "label", "name", "owner")

    def __init__(self, label: str, owner: Any, name: str, index: Part | None = None) -> None:
        self.label, self.owner, self.name, self.index = label, owner, name, index

    def held(self) -> Any:
        """Return the object at this place: a number, a text or a tensor."""
        held = self.owner[self.name] if isinstance(self.owner, dict) else getattr(self.owner, self.name)
        return held if self.index is None else held[self.index]

    def read(self) -> Value:
        """Return the value. Reading a tensor waits for its device."""
        held = self.held()
        return held.item() if isinstance(held, Tensor) else held

    def write(self, value: Value) -> None:
        """Set the value; a tensor is filled in place, so that graphs and capturable optimizers see it."""
        held = self.held()
        if isinstance(held, Tensor):
            with torch.no_grad():
                held.fill_(value)  # type: ignore[arg-type]  # `check` refuses text for a tensor
            return
        if self.index is not None:
            value = self._with_item(value)
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)

    def _with_item(self, value: Value) -> Any:
        """Return the list, tuple or dictionary at this place with the item replaced."""
        held = self.owner[self.name] if isinstance(self.owner, dict) else getattr(self.owner, self.name)
        if isinstance(held, tuple):
            items = list(held)
            items[self.index] = value  # type: ignore[index]  # the item was read with this index
            return type(held)(*items) if hasattr(held, "_fields") else tuple(items)
        held[self.index] = value
        return held

    def overlaps(self, other: Target) -> bool:
        """Return whether writing to one place changes the other."""
        return (
            self.owner is other.owner
            and self.name == other.name
            and (self.index == other.index or None in (self.index, other.index))
        )

    def check(self, value: Any, what: str) -> Value:
        """Return a value for this place; raise if it is of another kind than what is there."""
        kind = kind_of(self.held())
        if kind == "number" and not isinstance(value, bool | str):
            try:
                number = value if isinstance(value, int | float) else float(value)
            except (TypeError, ValueError):
                number = math.nan
            if math.isfinite(number):
                return number
        elif kind_of(value) == kind:
            return value  # type: ignore[no-any-return]
        wanted = {"number": "a finite number", "bool": "True or False", "text": "text"}[kind]
        raise OptionError(f"{what}: {self.label} must be {wanted}; the schedule gives {described(value)}.")


def kind_of(value: Any) -> str:
    """Return 'number', 'bool' or 'text'; an empty string for anything else."""
    if isinstance(value, Tensor):
        is_number = value.numel() == 1 and not isinstance(value, nn.Parameter) and value.dtype != torch.bool
        return "number" if is_number else ""
    if isinstance(value, bool):
        return "bool"
    return "number" if isinstance(value, int | float) else "text" if isinstance(value, str) else ""


def parse_path(path: Any, what: str) -> list[Part]:
    """Return the parts of a path: 'optimizer.betas[0]' -> ['optimizer', 'betas', 0]."""
    parts: list[Part] = []
    end = 0
    while isinstance(path, str) and (found := _PART.match(path, end)):
        name, item = found.groups()
        parts.append(name if item is None else int(item) if item.isdecimal() else item[1:-1])
        end = found.end()
    if not isinstance(path, str) or end != len(path) or len(parts) < 2:
        raise OptionError(
            f"{what}={path!r} must be the path of a value, such as {EXAMPLES}.", option="target", value=path
        )
    root = "optimizer" if parts[0] == "optimizers" else parts[0]
    if root not in ROOTS:
        raise OptionError(
            f"{what}={path!r} must begin with {', '.join(ROOTS[:-1])} or {ROOTS[-1]}."
            f"{closest(str(root), ROOTS)} Examples: {EXAMPLES}.",
            option="target",
            value=path,
            allowed=ROOTS,
        )
    return [root, *parts[1:]]


def find_targets(
    path: str, module: nn.Module, optimizers: Sequence[Any], hooks: Any, groups: Any, what: str
) -> list[Target]:
    """Return the places of a path; raise with the closest name if there are none.

    groups: patterns of the names of parameter groups, or None for all groups.
    """
    root, *parts = parse_path(path, what)
    what = f"{what}={path!r}"
    if root == "optimizer":
        found = _in_optimizers(parts, optimizers, groups, what)
    elif groups is not None:
        raise HookError(f"{what}: groups= is for the parameter groups of an optimizer.")
    elif root == "hooks":
        name = str(parts[0])
        if name not in hooks:
            known = [each.name for each in hooks.entries()]
            raise HookError(
                f"{what}: there is no hook {name!r}.{closest(name, known)} Hooks: {_some(known)}."
            )
        found = [_in_object(hooks[name], parts[1:], f"hooks.{name}", what)]
    else:
        found = _in_module(parts, module, what)
    for target in found:
        _check_kind(target, what)
    return found


def _in_optimizers(parts: list[Part], optimizers: Sequence[Any], groups: Any, what: str) -> list[Target]:
    index, given = 0, isinstance(parts[0], int)
    if isinstance(parts[0], int):
        index, parts = parts[0], parts[1:]
    elif len(optimizers) > 1:
        names = ", ".join(f"[{n}] {type(each).__name__}" for n, each in enumerate(optimizers))
        raise HookError(f"{what}: the run has several optimizers; write optimizer[0]. They are: {names}.")
    if index >= len(optimizers):
        raise HookError(f"{what}: the run has {len(optimizers)} optimizers, counted from 0.")
    root = f"optimizer[{index}]" if given else "optimizer"
    chosen = dict(enumerate(optimizers[index].param_groups))
    if parts and parts[0] == "param_groups":
        number = parts[1] if len(parts) > 1 else None
        if not isinstance(number, int) or number not in chosen or groups is not None:
            raise HookError(
                f"{what}: write param_groups[0] up to param_groups[{len(chosen) - 1}] and a hyper-parameter, "
                "or leave param_groups out and choose groups by groups=."
            )
        chosen, parts = {number: chosen[number]}, parts[2:]
    elif groups is not None:
        chosen = _named_groups(chosen, groups, what)
    if not parts or len(parts) > 2 or not isinstance(parts[0], str):
        raise HookError(f"{what} must end with one hyper-parameter, such as weight_decay or betas[0].")
    name = parts[0]
    for group in chosen.values():
        if name not in group or name == "params":
            known = [key for key in group if key not in ("params", "param_names", "name")]
            raise HookError(
                f"{what}: {type(optimizers[index]).__name__} has no {name!r}.{closest(name, known)} "
                f"It has: {_some(known)}."
            )
    return [
        _with_index(Target(f"{root}.param_groups[{number}].{name}", group, name), parts[1:], what)
        for number, group in chosen.items()
    ]


def _named_groups(groups: dict[int, Any], patterns: Any, what: str) -> dict[int, Any]:
    """Return the parameter groups whose name matches a pattern."""
    names = {number: str(group.get("name", "")) for number, group in groups.items()}
    for pattern in as_patterns("ParameterSchedule: groups", patterns):
        if not any(name and is_match(name, pattern) for name in names.values()):
            known = [name for name in names.values() if name]
            hint = "" if known else ' Give each group a name: {"params": ..., "name": "decay"}.'
            raise HookError(
                f"{what}: groups={pattern!r} matches no parameter group.{closest(pattern, known)} Names: "
                f"{_some(known)}.{hint}"
            )
    return {
        number: groups[number]
        for number, name in names.items()
        if name and any(is_match(name, pattern) for pattern in as_patterns("groups", patterns))
    }


def _in_module(parts: list[Part], module: nn.Module, what: str) -> list[Target]:
    *way, name = parts if not isinstance(parts[-1], int) else parts[:-1]
    if not any(isinstance(part, str) and ("*" in part or "?" in part) for part in way):
        return [_in_object(module, parts, "module", what)]
    pattern = ".".join(map(str, way))
    known = {path: each for path, each in module.named_modules() if path}
    found = [
        path
        for path in known
        if fnmatchcase(path, pattern) and kind_of(getattr(known[path], str(name), None))
    ]
    if not found:
        raise HookError(
            f"{what}: no submodule {pattern!r} with a value {name!r}.{closest(pattern, known)} Submodules: "
            f"{_some(known)}."
        )
    rest = parts[len(way) :]
    return [_in_object(known[path], rest, f"module.{path}", what) for path in found]


def _in_object(owner: Any, parts: list[Part], label: str, what: str) -> Target:
    """Follow attributes and items from an object to the place."""
    for place, part in enumerate(parts):
        rest = parts[place + 1 :]
        if isinstance(part, int) or (isinstance(owner, dict) and not hasattr(owner, str(part))):
            try:
                owner = owner[part]
            except (LookupError, TypeError):
                raise HookError(f"{what}: {label} has no item {part!r}.") from None
            label = f"{label}[{part!r}]"
            continue
        if not hasattr(owner, part):
            known = _values_of(owner)
            raise HookError(
                f"{what}: {label} ({type(owner).__name__}) has no {part!r}.{closest(part, known)} It has: "
                f"{_some(known)}."
            )
        if not rest:
            return Target(f"{label}.{part}", owner, part)
        value = getattr(owner, part)
        if len(rest) == 1 and isinstance(value, list | tuple | dict):
            return _with_index(Target(f"{label}.{part}", owner, part), rest, what)
        owner, label = value, f"{label}.{part}"
    raise HookError(f"{what} must end with an attribute.")


def _with_index(target: Target, rest: list[Part], what: str) -> Target:
    """Return the place of an item, if the path has one."""
    if not rest:
        return target
    made = Target(f"{target.label}[{rest[0]!r}]", target.owner, target.name, rest[0])
    try:
        made.held()
    except (LookupError, TypeError):
        raise HookError(f"{what}: {target.label} has no item {rest[0]!r}; it is {target.held()!r}.") from None
    return made


def _values_of(owner: Any) -> list[str]:
    """Return the names that a path may continue with: submodules, and attributes that are values."""
    inside = [name for name, _ in owner.named_children()] if isinstance(owner, nn.Module) else []
    buffers = [name for name, _ in owner.named_buffers(recurse=False)] if isinstance(owner, nn.Module) else []
    values = [name for name, each in getattr(owner, "__dict__", {}).items() if kind_of(each)]
    return [*inside, *buffers, *(name for name in values if not name.startswith("_") and name != "training")]


def _check_kind(target: Target, what: str) -> None:
    held = target.held()
    if kind_of(held):
        return
    if isinstance(held, nn.Parameter):
        raise HookError(
            f"{what}: {target.label} is a parameter, which an optimizer trains. Make it a buffer: "
            "self.register_buffer('temperature', torch.tensor(1.0))."
        )
    if isinstance(held, Tensor):
        raise HookError(
            f"{what}: {target.label} is a tensor of shape {tuple(held.shape)}, not a single number."
        )
    inside = _values_of(held)
    hint = f" It has: {_some(inside)}." if inside else ""
    raise HookError(f"{what}: {target.label} is {described(held)}, not a number, True, False or text.{hint}")


def _some(names: Iterable[str]) -> str:
    return list_some(list(names), 8) or "none"
