"""Parameter groups of an optimizer by rules: weight decay, learning rates by pattern, layer-wise decay."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookline.util.errors import OptionError, closest, described
from hookline.util.text import align_columns, list_some

NO_DECAY: Mapping[str, Mapping[str, Any]] = {"norms": {"weight_decay": 0.0}, "biases": {"weight_decay": 0.0}}
"""The default rules: weight decay for neither norms nor biases."""
REST = "rest"
"""The name of the group of parameters that no rule matches."""
OWN_KEYS = ("params", "name", "param_names")
"""Entries of a group that are not settings."""
FIRST_NAMES = 2
"""The names that a table shows of each group."""
WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""Parts of a name that torch's wrappers insert."""
_NORM = re.compile(r"Norm(?![a-z])")
_BIAS = re.compile(r"(?:^|_)bias(?:_|$)")
_NOT_NORMS = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)

Rules = Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class NamedParameter:
    """A parameter with all its names, several if it is shared, and the modules that own it."""

    parameter: nn.Parameter
    names: list[str]
    owners: list[nn.Module]

    def matches(self, pattern: str) -> bool:
        """Return whether a pattern selects it; see `parameter_groups`."""
        if pattern == "norms":
            return any(map(_is_norm, self.owners))
        if pattern == "biases":
            return any(_BIAS.search(name.rpartition(".")[2]) for name in self.names)
        if pattern.startswith("class:"):
            wanted = pattern.removeprefix("class:")
            classes = (kind.__name__ for owner in self.owners for kind in type(owner).__mro__)
            return any(fnmatch.fnmatchcase(name, wanted) for name in classes)
        return any(fnmatch.fnmatchcase(name, pattern) for name in self.names)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group of a table."""

    name: str
    parameters: int
    numbers: int
    settings: dict[str, Any]
    names: list[str]

    def data(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return {
            "name": self.name,
            "parameters": self.parameters,
            "numbers": self.numbers,
            **{key: _as_number(value) for key, value in self.settings.items()},
            "names": list(self.names),
        }


class ParameterGroups(list[dict[str, Any]]):
    """The groups for an optimizer, as dictionaries; print it to see which rule matched which parameters."""

    def __init__(self, groups: Iterable[dict[str, Any]], frozen: Mapping[str, nn.Parameter]) -> None:
        super().__init__(groups)
        self.frozen = dict(frozen)
        """The parameters that do not require gradients, which are in no group."""

    def rows(self) -> list[GroupRow]:
        """Return the groups as a table: name, counts, settings and the names of the parameters."""
        return group_rows(self)

    def __str__(self) -> str:
        return render_groups(self.rows(), self.frozen)


def parameter_groups(
    module: nn.Module,
    rules: Rules | None = None,
    *,
    lr: float | None = None,
    layer_decay: float | None = None,
    layers: str | Sequence[str] | None = None,
) -> ParameterGroups:
    """Return parameter groups for an optimizer; every trainable parameter is in exactly one.

    rules: settings such as {"weight_decay": 0.0} by pattern. A pattern is 'norms' (layers with Norm in the
    name of their class), 'biases', 'class:Embedding' (a class of the layer, or a pattern of it), or a name
    with wildcards, 'head.*'. A parameter gets the settings of all patterns that match it; the first one wins
    where two have the same setting. By default norms and biases have no weight decay. lr: the learning rate
    of the other groups; None: the optimizer's. layer_decay: multiply the learning rate by this factor once
    for each layer that is further from the output. layers: the name of the container of the layers, or
    several in their order; by default the outermost nn.ModuleList.

    module: the model.
    """
    found = list(named_parameters(module))
    wanted = check_rules(NO_DECAY if rules is None else rules)
    trained = [each for each in found if each.parameter.requires_grad]
    frozen = {each.names[0]: each.parameter for each in found if not each.parameter.requires_grad}
    if not trained:
        raise OptionError(
            f"{type(module).__name__} has no trainable parameter: "
            f"{f'all {len(frozen)} are frozen' if frozen else 'it has none at all'}."
        )
    _check_rate("lr", lr)
    scales = _layer_scales(module, found, layer_decay, layers)
    chosen = _choose_settings(module, wanted, trained, found, tolerant=rules is None)
    groups: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}
    patterns = list(wanted)
    for each, (settings, used) in zip(trained, chosen, strict=True):
        depth, scale = scales.get(id(each.parameter), (0, 1.0))
        group = groups.get((-depth, used))
        if group is None:
            label = "+".join(patterns[index] for index in used) or REST
            group = groups[-depth, used] = {
                "params": [],
                "param_names": [],
                "name": f"{label}/depth_{depth}" if scales else label,
                **({} if lr is None else {"lr": lr}),
                **settings,
            }
            if scales:
                if "lr" not in group:
                    raise OptionError("layer_decay needs the learning rate that it scales: pass lr=...")
                group["lr"] *= scale
        group["params"].append(each.parameter)
        group["param_names"].append(each.names[0])
    return ParameterGroups((groups[key] for key in sorted(groups)), frozen)


def named_parameters(module: nn.Module) -> Iterator[NamedParameter]:
    """Yield every parameter once, in the order of `module.named_parameters()`, with all its names."""
    found: dict[int, NamedParameter] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for key, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = WRAPPERS.sub("", f"{path}.{key}" if path else key)
            each = found.setdefault(id(parameter), NamedParameter(parameter, [], []))
            each.names.append(name)
            each.owners.append(owner)
    yield from found.values()


def _is_norm(owner: nn.Module) -> bool:
    return not isinstance(owner, _NOT_NORMS) and any(
        _NORM.search(kind.__name__) for kind in type(owner).__mro__
    )


# ---- rules -------------------------------------------------------------------------------------------------


def check_rules(rules: Any) -> dict[str, dict[str, Any]]:
    """Return the rules as plain dictionaries, or raise."""
    if not isinstance(rules, Mapping):
        raise OptionError(
            f"The rules are {described(rules)}; they must be settings by pattern, such as "
            "{'norms': {'weight_decay': 0.0}, 'head.*': {'lr': 1e-3}}.",
            option="rules",
        )
    checked = {}
    for pattern, settings in rules.items():
        if not isinstance(pattern, str) or not pattern.strip():
            raise OptionError(f"{pattern!r} is not a pattern: it must be text.", option="rules")
        option = f"rules.{pattern}"
        if not isinstance(settings, Mapping) or not settings:
            raise OptionError(
                f"{pattern!r} has {described(settings)}; it must have settings, such as "
                "{'weight_decay': 0.0}.",
                option=option,
            )
        for key, value in settings.items():
            if not isinstance(key, str) or key in OWN_KEYS:
                raise OptionError(
                    f"{pattern!r} sets {key!r}, which is not a setting of an optimizer.", option=option
                )
            if key in ("lr", "weight_decay"):
                _check_rate(key, value, f"{pattern!r}: ", option)
        checked[pattern] = dict(settings)
    return checked


def _check_rate(name: str, value: Any, where: str = "", option: str = "") -> None:
    if isinstance(value, Tensor) or (value is None and not where):
        return
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if not 0 <= number < math.inf:
        raise OptionError(
            f"{where}{name}={value!r} must be a number from 0.", option=option or name, value=value
        )


def _choose_settings(
    module: nn.Module,
    rules: dict[str, dict[str, Any]],
    trained: list[NamedParameter],
    found: list[NamedParameter],
    tolerant: bool,
) -> list[tuple[dict[str, Any], tuple[int, ...]]]:
    """Return for each parameter its settings and the numbers of the rules that they come from.

    Raise for a rule without effect. tolerant: a rule need not match anything.
    """
    chosen = []
    matched: set[int] = set()
    effective: set[int] = set()
    for each in trained:
        settings: dict[str, Any] = {}
        used = []
        for index, (pattern, values) in enumerate(rules.items()):
            if not each.matches(pattern):
                continue
            matched.add(index)
            if new := {key: value for key, value in values.items() if key not in settings}:
                settings |= new
                used.append(index)
        effective.update(used)
        chosen.append((settings, tuple(used)))
    for index, pattern in enumerate(rules if not tolerant else ()):
        if index not in matched:
            raise _without_match(module, pattern, found)
        if index not in effective:
            first = next(other for other in rules if any(key in rules[other] for key in rules[pattern]))
            raise OptionError(
                f"{pattern!r} has no effect: every parameter that it matches has {', '.join(rules[pattern])} "
                f"from an earlier pattern, such as {first!r}. The first one wins: put {pattern!r} before it.",
                option=f"rules.{pattern}",
            )
    return chosen


def _without_match(module: nn.Module, pattern: str, found: list[NamedParameter]) -> OptionError:
    frozen = [each.names[0] for each in found if each.matches(pattern)]
    who, option = type(module).__name__, f"rules.{pattern}"
    if frozen:
        return OptionError(
            f"{pattern!r} matches only frozen parameters of {who}: {list_some(frozen)}; no group has them.",
            option=option,
        )
    if pattern.startswith("class:"):
        kinds = sorted({type(owner).__name__ for each in found for owner in each.owners})
        near = closest(pattern, [f"class:{kind}" for kind in kinds])
        return OptionError(
            f"{pattern!r} matches no layer of {who}.{near} Layers: {', '.join(kinds)}.", option=option
        )
    names = [name for each in found for name in each.names]
    parts = {".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 1)}
    if pattern in parts:
        near = f" Did you mean {f'{pattern}.*'!r}?"
    else:
        near = closest(pattern, ["norms", "biases", *names, *(f"{part}.*" for part in sorted(parts))])
    return OptionError(
        f"{pattern!r} matches no parameter of {who}.{near} Parameters: {list_some(names, 8)}.", option=option
    )


# ---- layer-wise decay --------------------------------------------------------------------------------------


def _layer_scales(
    module: nn.Module, found: list[NamedParameter], decay: float | None, layers: Any
) -> dict[int, tuple[int, float]]:
    """Return the depth and the factor of each parameter by its id; empty without a decay.

    Depth 0 is what comes before the first layer, such as embeddings; then each layer is one deeper; what
    comes after the last layer, such as a head, is the deepest and has the factor 1. Parameters between two
    stacks of layers have the depth of the layer before them.
    """
    if decay is None:
        if layers is not None:
            raise OptionError("layers= names the layers for layer_decay, which is not set.", option="layers")
        return {}
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
        raise OptionError(
            f"layer_decay={decay!r} must be a number above 0, up to 1.", option="layer_decay", value=decay
        )
    starts, last = {}, 0
    for path, length in _find_stacks(module, layers).items():
        starts[path], last = last + 1, last + length
    depths = [_depth_in(starts, each.names[0]) for each in found]
    final = max((index for index, depth in enumerate(depths) if depth), default=-1)
    scales, before = {}, 0
    for index, (each, depth) in enumerate(zip(found, depths, strict=True)):
        before = depth or (before if index < final else last + 1)
        scales[id(each.parameter)] = (before, decay ** (last + 1 - before))
    return scales


def _depth_in(starts: Mapping[str, int], name: str) -> int:
    """Return the depth of a parameter in a stack of layers; 0 if it is in none."""
    for path, start in starts.items():
        if name.startswith(f"{path}."):
            number = name.removeprefix(f"{path}.").partition(".")[0]
            return start + int(number) if number.isdigit() else 0
    return 0


def _find_stacks(module: nn.Module, layers: Any) -> dict[str, int]:
    """Return the containers of layers by name, each with its length."""
    containers = {WRAPPERS.sub("", path): each for path, each in module.named_modules()}
    if layers is not None:
        named: dict[str, int] = {}
        for path in [layers] if isinstance(layers, str) else list(layers):
            container = containers.get(path)
            if not isinstance(container, nn.ModuleList | nn.Sequential):
                known = [
                    name
                    for name, each in containers.items()
                    if isinstance(each, nn.ModuleList | nn.Sequential)
                ]
                raise OptionError(
                    f"layers={path!r} is not an nn.ModuleList or nn.Sequential of {type(module).__name__}."
                    f"{closest(str(path), known)} There are: {', '.join(known) or 'none'}.",
                    option="layers",
                    value=path,
                )
            named[path] = len(container)
        return named
    stacks: dict[str, int] = {}
    for path, each in containers.items():
        inside = any(path.startswith(f"{other}.") for other in stacks)
        if isinstance(each, nn.ModuleList) and len(each) > 1 and not inside:
            stacks[path] = len(each)
    if len(stacks) != 1:
        lists = ", ".join(f"{path} ({length} layers)" for path, length in stacks.items())
        example = [*stacks] or "blocks"
        raise OptionError(
            f"layer_decay needs one nn.ModuleList of layers, and {type(module).__name__} has "
            f"{lists or 'none'}. Name the layers in their order: layers={example!r}.",
            option="layers",
        )
    return stacks


# ---- tables ------------------------------------------------------------------------------------------------


def group_rows(groups: Iterable[Mapping[str, Any]], hidden: Sequence[str] = ()) -> list[GroupRow]:
    """Return a row for each group of an optimizer. hidden: further entries that are not settings."""
    return [
        GroupRow(
            str(group.get("name") or f"group {index}"),
            len(group["params"]),
            sum(each.numel() for each in group["params"]),
            {key: value for key, value in group.items() if key not in (*OWN_KEYS, *hidden)},
            list(group.get("param_names", ())),
        )
        for index, group in enumerate(groups)
    ]


def render_groups(rows: list[GroupRow], frozen: Mapping[str, Any]) -> str:
    """Return a table of the groups, and a line for frozen parameters."""
    keys = [
        key
        for key in dict.fromkeys(["lr", "weight_decay", *(key for row in rows for key in row.settings)])
        if key in ("lr", "weight_decay")
        or any(row.settings.get(key) != rows[0].settings.get(key) for row in rows)
    ]
    lines = [["group", "parameters", "numbers", *keys, "first names"]]
    for row in rows:
        values = [_shown(row.settings[key]) if key in row.settings else "optimizer's" for key in keys]
        lines.append(
            [row.name, str(row.parameters), f"{row.numbers:,}", *values, list_some(row.names, FIRST_NAMES)]
        )
    if frozen:
        total = sum(each.numel() for each in frozen.values())
        lines.append(
            ["(frozen)", str(len(frozen)), f"{total:,}", *("-" for _ in keys), list_some(frozen, FIRST_NAMES)]
        )
    aligned = align_columns([line[:-1] for line in lines], left=1)
    return "\n".join(f"{start}  {line[-1]}" for start, line in zip(aligned, lines, strict=True))


def _as_number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _shown(value: Any) -> str:
    value = _as_number(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- checks of an optimizer --------------------------------------------------------------------------------


def check_settings(settings: Iterable[str], optimizer: str, known: Iterable[str], where: str) -> None:
    """Refuse a setting that an optimizer does not have, which torch would silently ignore."""
    names = list(known)
    for key in settings:
        if key not in names:
            raise OptionError(
                f"{where} sets {key!r}, which {optimizer} does not have.{closest(key, names)} "
                f"It has: {', '.join(names)}."
            )
