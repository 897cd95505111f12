"""One result from those of several evaluation loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hookline.errors import OptionError, closest
from hookline.metrics import Metrics
from hookline.state import is_scalar

Aggregate = Callable[[dict[str, dict[str, float]]], Mapping[str, float]]
"""From the results of each loader, by its name, to the results overall."""


def aggregated(
    results: dict[str, Any], prefix: str, loaders: list[str], how: str | Aggregate
) -> dict[str, Any]:
    """What to put in place of the results overall, which are means over all samples ('micro') so far."""
    if how == "micro":
        return {}
    by_loader = {name: _of_loader(results, f"{prefix}/dl_{name}/") for name in loaders}
    if callable(how):
        made = how({name: dict(Metrics(values).read()) for name, values in by_loader.items()})
        if not isinstance(made, Mapping) or not all(is_scalar(value) for value in made.values()):
            raise OptionError(
                f"val_aggregation must return a dictionary of numbers by the metrics' names, not "
                f"{str(made)[:80]}."
            )
        return {_overall(key, prefix, results): value for key, value in made.items()}
    if how == "macro":
        keys = dict.fromkeys(key for values in by_loader.values() for key in values)
        means = {key: [values[key] for values in by_loader.values() if key in values] for key in keys}
        return {_overall(key, prefix, results): sum(each) / len(each) for key, each in means.items()}
    chosen = by_loader[how.partition(":")[2] or loaders[0]]
    return {_overall(key, prefix, results): value for key, value in chosen.items()}


def check_aggregation(how: str | Aggregate, loaders: list[str], stage: str) -> None:
    """Refuse a primary loader that does not exist, before anything is measured.

    A trainer that was made for several loaders may still validate or test on a single one of another name.
    """
    primary = how.partition(":")[2] if isinstance(how, str) else ""
    if primary and loaders and primary not in loaders and (len(loaders) > 1 or stage == "fit"):
        raise OptionError(
            f"val_aggregation={how!r}: there is no loader named {primary!r}.{closest(primary, loaders)} "
            f"Loaders: {', '.join(loaders)}."
        )


def _of_loader(results: dict[str, Any], start: str) -> dict[str, Any]:
    return {name.removeprefix(start): value for name, value in results.items() if name.startswith(start)}


def _overall(key: str, prefix: str, results: dict[str, Any]) -> str:
    """The name under which a result is known overall: the user may have logged it without the prefix."""
    return key if key in results else f"{prefix}/{key}"
