"""The settings of a mixture, and the checks that do not need the loaders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from hookline.engine.checks import is_number
from hookline.util.errors import OptionError, closest

ORDERS = ("sequential", "round_robin", "weighted", "random", "alternating")
LENGTHS = ("sum", "max", "min")
ENDS = ("cycle", "end")
WEIGHTED = ("weighted", "random")
Problem = tuple[str, str]
"""A wrong setting, and the reason."""


@dataclass(frozen=True)
class Mixture:
    """How an epoch is composed of several loaders.

    >>> Mixture("weighted", {"web": 0.7, "code": 0.3}, epoch_length=1000)  # doctest: +ELLIPSIS
    Mixture(order='weighted', weights={'web': 0.7, 'code': 0.3}, ...
    """

    order: Literal["sequential", "round_robin", "weighted", "random", "alternating"] = "round_robin"
    """`sequential`: one loader after the other. `round_robin`: each in turn. `alternating`: by `pattern`.
    `weighted`: in exact proportion, spread evenly over the epoch. `random`: drawn at random, from `seed` and
    the epoch.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    """For `weighted` and `random`: each loader's part of the batches. They need not sum to 1; 0 excludes a
    loader for now. `random` without weights draws from all loaders with equal probability.
    """

    pattern: Sequence[str] = ()
    """For `alternating`: the names in the order that is repeated: `["web", "web", "code"]`."""

    burst: int = 1
    """Batches in a row from one loader each time it is chosen."""

    epoch_length: Literal["sum", "max", "min"] | int = "sum"
    """Batches in an epoch, over all loaders: the sum, maximum or minimum of their lengths, or a number."""

    when_exhausted: Literal["cycle", "end"] | None = None
    """For a loader that ends before the epoch: `cycle` starts it again, `end` continues with the other
    loaders. None: `end` if `epoch_length` is `sum` and there are no weights, so that each batch is used once;
    else `cycle`.
    """

    seed: int = 0
    """The seed for `random`, combined with the number of the epoch."""

    loss_weights: Mapping[str, float] = field(default_factory=dict)
    """The factor of the losses of a loader's batches before backward; 1 by default. The logged loss is not
    multiplied.
    """

    optimizers: Mapping[str, int | Sequence[int]] = field(default_factory=dict)
    """The numbers of the optimizers that a loader's batches train; all optimizers by default."""

    window: int = 100
    """A change of the mixture takes effect at the next position in the epoch that is a multiple of this many
    batches. The picks before it are fixed, so that batches can be prefetched.
    """

    def __post_init__(self) -> None:
        problems = list(_shape_problems(self))
        if not problems:
            object.__setattr__(
                self, "weights", {str(name): float(weight) for name, weight in self.weights.items()}
            )
            object.__setattr__(self, "pattern", tuple(self.pattern))
            object.__setattr__(
                self, "loss_weights", {str(name): float(each) for name, each in self.loss_weights.items()}
            )
            object.__setattr__(
                self,
                "optimizers",
                {str(name): _optimizer_numbers(each) for name, each in self.optimizers.items()},
            )
            problems = [*_weight_problems(self), *_combination_problems(self)]
        refuse_problems(problems, vars(self))

    @property
    def cycles(self) -> bool:
        """Return whether an exhausted loader starts again."""
        if self.when_exhausted is None:
            return self.epoch_length != "sum" or (self.order in WEIGHTED and bool(self.weights))
        return self.when_exhausted == "cycle"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint or a log; `Mixture(**data)` restores it."""
        return {**asdict(self), "pattern": list(self.pattern)}


def make_mixture(given: Mixture | Mapping[str, Any]) -> Mixture:
    """Return a mixture, or create one from a table of its settings."""
    if isinstance(given, Mixture):
        return given
    if not isinstance(given, Mapping):
        raise OptionError(
            f"mixture= takes a hookline.Mixture or a table of its settings, not {type(given).__name__}."
        )
    known = [each.name for each in fields(Mixture)]
    for name in given:
        if name not in known:
            raise OptionError(
                f"Mixture has no setting {name!r}.{closest(str(name), known)} Settings: {', '.join(known)}.",
                option=str(name),
                value=given[name],
                allowed=tuple(known),
            )
    return Mixture(**given)


def refuse_problems(problems: Sequence[Problem], settings: Mapping[str, Any] | None = None) -> None:
    """Raise one OptionError with all problems."""
    if len(problems) == 1:
        option, text = problems[0]
        raise OptionError(f"Mixture: {text}", option=option, value=(settings or {}).get(option))
    if problems:
        raise OptionError(
            "\n  - ".join([f"Mixture: {len(problems)} problems.", *(text for _, text in problems)])
        )


def _shape_problems(mixture: Mixture) -> list[Problem]:
    """Return values of the wrong type, which must be fixed before anything else can be checked."""
    found: list[Problem] = []
    for name, allowed in (("order", ORDERS), ("when_exhausted", (*ENDS, None)), ("epoch_length", LENGTHS)):
        value = getattr(mixture, name)
        if name == "epoch_length" and not isinstance(value, str):
            continue
        if value not in allowed:
            hint = closest(value, [each for each in allowed if each]) if isinstance(value, str) else ""
            more = ", or a whole number of batches" if name == "epoch_length" else ""
            found.append(
                (name, f"{name}={value!r} is unknown.{hint} Allowed: {', '.join(map(repr, allowed))}{more}.")
            )
    for name in (
        ("burst", "window") if isinstance(mixture.epoch_length, str) else ("burst", "window", "epoch_length")
    ):
        value = getattr(mixture, name)
        if not _is_whole(value) or value < 1:
            found.append((name, f"{name}={value!r} must be a whole number of batches, 1 or more."))
    if not _is_whole(mixture.seed):
        found.append(("seed", f"seed={mixture.seed!r} must be a whole number."))
    if not isinstance(mixture.weights, Mapping):
        found.append(
            (
                "weights",
                f"weights={mixture.weights!r} must map names of loaders to numbers, as in {{'web': 0.7, "
                "'code': 0.3}.",
            )
        )
    if not isinstance(mixture.loss_weights, Mapping) or not all(
        is_number(weight) and math.isfinite(weight) for weight in mixture.loss_weights.values()
    ):
        found.append(
            (
                "loss_weights",
                f"loss_weights={mixture.loss_weights!r} must map names of loaders to finite numbers, as in "
                "{'code': 0.5}.",
            )
        )
    if not isinstance(mixture.optimizers, Mapping) or not all(
        _optimizer_numbers(each) for each in mixture.optimizers.values()
    ):
        found.append(
            (
                "optimizers",
                f"optimizers={mixture.optimizers!r} must map names of loaders to numbers of optimizers, as "
                "in {'web': 0, 'code': [0, 1]}.",
            )
        )
    if isinstance(mixture.pattern, str) or not isinstance(mixture.pattern, Sequence):
        found.append(
            (
                "pattern",
                f"pattern={mixture.pattern!r} must be a list of names of loaders, as in ['web', 'web', "
                "'code'].",
            )
        )
    return found


def _weight_problems(mixture: Mixture) -> list[Problem]:
    found = [
        ("weights", f"the weight of {name!r} is {weight}; it must be 0 or more, and finite.")
        for name, weight in mixture.weights.items()
        if not 0 <= weight < math.inf
    ]
    if mixture.weights and not found and not any(mixture.weights.values()):
        found.append(
            (
                "weights",
                f"all weights are 0 ({', '.join(mixture.weights)}), so there is nothing to draw; set one of "
                "them above 0.",
            )
        )
    return found


def _combination_problems(mixture: Mixture) -> list[Problem]:
    """Return settings that another setting makes meaningless, because ignoring one would hide a mistake."""
    order = mixture.order
    found: list[Problem] = []
    if mixture.weights and order not in WEIGHTED:
        found.append(
            (
                "order",
                f"order={order!r} does not use weights; use order='weighted' (exact shares) or 'random', or "
                "leave them out.",
            )
        )
    if order == "weighted" and not mixture.weights:
        found.append(("order", "order='weighted' needs weights, as in weights={'web': 0.7, 'code': 0.3}."))
    if mixture.pattern and order != "alternating":
        found.append(
            ("order", f"order={order!r} does not use a pattern; use order='alternating', or leave it out.")
        )
    if order == "alternating" and not mixture.pattern:
        found.append(("order", "order='alternating' needs a pattern, as in pattern=['web', 'web', 'code']."))
    if order == "sequential" and mixture.burst != 1:
        found.append(
            (
                "order",
                f"order='sequential' does not use burst (it is {mixture.burst}): each loader yields all its "
                "batches in a row.",
            )
        )
    return found


def _optimizer_numbers(given: Any) -> list[int]:
    """Return the numbers of optimizers; an empty list if they are invalid."""
    numbers = [given] if _is_whole(given) else list(given) if isinstance(given, list | tuple) else []
    return numbers if all(_is_whole(each) and each >= 0 for each in numbers) else []


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
