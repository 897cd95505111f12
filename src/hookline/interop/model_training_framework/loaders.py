"""Several loaders: the framework's settings as Hookline's `Mixture`, and the manager that changes it in a
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from hookline.data.mixing import Mixture
from hookline.interop.model_training_framework.settings import (
    EpochLengthPolicy,
    MultiDataLoaderConfig,
    SamplingStrategy,
    ValAggregation,
    ValidationConfig,
)
from hookline.util.errors import OptionError, closest


def loaders_by_name(loaders: Any, names: Sequence[str], what: str) -> dict[str, Any]:
    """Return loaders by name, from a list as the framework takes it, a dictionary, or a single loader."""
    if isinstance(loaders, Mapping):
        if names and list(names) != list(loaders):
            raise OptionError(
                f"{what} are named {', '.join(loaders)}, but dataloader_names says {', '.join(names)}."
            )
        return dict(loaders)
    members = list(loaders) if isinstance(loaders, list | tuple) else [loaders]
    if not members:
        raise OptionError(f"{what} is an empty list; it needs at least one loader.")
    if names and len(names) != len(members):
        raise OptionError(
            f"{what}: there are {len(members)} loaders and {len(names)} dataloader_names "
            f"({', '.join(names)})."
        )
    if len(set(names)) != len(names):
        raise OptionError(
            f"{what}: dataloader_names={list(names)} has a name twice; each loader needs its own."
        )
    return dict(zip(names or [f"dl{index}" for index in range(len(members))], members, strict=True))


def configured_mixture(
    config: MultiDataLoaderConfig,
    names: Sequence[str],
    loss_weights: Sequence[float] | None = None,
    optimizers: Sequence[int] | None = None,
) -> Mixture:
    """Return the settings as a `Mixture`, which rejects contradictions."""
    return Mixture(
        **mixing_settings(config, names),
        loss_weights=_per_loader(loss_weights, names, "loss_weights_per_loader"),
        optimizers=_per_loader(optimizers, names, "per_loader_optimizer_id"),
    )


def mixing_settings(config: MultiDataLoaderConfig, names: Sequence[str]) -> dict[str, Any]:
    """Return the settings that decide which batch is next, under Hookline's names."""
    strategy = _member(SamplingStrategy, config.sampling_strategy, "sampling_strategy")
    policy = _member(EpochLengthPolicy, config.epoch_length_policy, "epoch_length_policy")
    fixed = policy is EpochLengthPolicy.FIXED_NUM_STEPS
    if fixed != (config.steps_per_epoch is not None):
        raise OptionError(
            f"epoch_length_policy={policy.name} with steps_per_epoch={config.steps_per_epoch}: "
            "FIXED_NUM_STEPS needs steps_per_epoch, and the other policies do not take it."
        )
    cycle = config.cycle_short_loaders
    return {
        "order": strategy.value,
        "weights": _per_loader(config.dataloader_weights, names, "dataloader_weights"),
        "pattern": [_loader_at(names, each) for each in config.alternating_pattern or ()],
        "burst": config.burst_size,
        "epoch_length": config.steps_per_epoch if fixed else policy.value.partition("_")[0],
        "when_exhausted": None if cycle is None else "cycle" if cycle else "end",
        "seed": config.choice_rng_seed or 0,
    }


def _loader_at(names: Sequence[str], index: int) -> str:
    if not isinstance(index, int) or not 0 <= index < len(names):
        raise OptionError(
            f"alternating_pattern has {index!r}; loaders are numbered from 0 to {len(names) - 1}."
        )
    return names[index]


def _per_loader(values: Sequence[Any] | None, names: Sequence[str], what: str) -> dict[str, Any]:
    if values is None:
        return {}
    if len(values) != len(names):
        raise OptionError(
            f"{what}={list(values)} has {len(values)} entries for {len(names)} loaders ({', '.join(names)})."
        )
    return dict(zip(names, values, strict=True))


def _member(kind: type[Enum], value: Any, what: str) -> Any:
    """Return a member of an enumeration, from itself or from its value as text."""
    words = [each.value for each in kind]
    if isinstance(value, kind):
        return value
    if value not in words:
        raise OptionError(
            f"{what}={value!r}, allowed: {', '.join(f'{kind.__name__}.{each.name}' for each in kind)}."
            f"{closest(str(value), words)}",
            option=what,
            value=value,
            allowed=tuple(words),
        )
    return kind(value)


def aggregation_of(config: ValidationConfig, names: Sequence[str]) -> Any:
    """Return how results of several loaders are combined."""
    how = _member(ValAggregation, config.aggregation, "aggregation")
    if config.aggregation_fn is not None and config.validation_weights is not None:
        raise OptionError("ValidationConfig: aggregation_fn and validation_weights cannot be combined.")
    if how is ValAggregation.CUSTOM and config.aggregation_fn is None:
        raise OptionError(
            "ValidationConfig: aggregation=CUSTOM needs aggregation_fn, from {loader: {metric: value}} to "
            "{metric: value}."
        )
    if config.aggregation_fn is not None:
        return config.aggregation_fn
    if config.validation_weights is not None:
        return _weighted(_per_loader(config.validation_weights, names, "validation_weights"))
    return how.value.partition("_")[0]


def _weighted(weights: dict[str, float]) -> Callable[[dict[str, dict[str, float]]], dict[str, float]]:
    def aggregate(results: dict[str, dict[str, float]]) -> dict[str, float]:
        made: dict[str, float] = {}
        for key in dict.fromkeys(key for values in results.values() for key in values):
            having = [name for name, values in results.items() if key in values]
            made[key] = sum(weights[name] * results[name][key] for name in having) / sum(
                weights[name] for name in having
            )
        return made

    return aggregate


class LoaderManager:
    """`trainer.multi_loader_manager`: changes the mixture during a run; saved in checkpoints and written to
    the log.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def names(self) -> list[str]:
        """Return the names of the loaders."""
        return list(self._trainer.loaders.names)

    def update_weights(self, weights: Sequence[float] | Mapping[str, float]) -> int:
        """Set weights, by the loaders' order or by name; return the position in the epoch from which they
        hold.
        """
        given = dict(weights) if isinstance(weights, Mapping) else _per_loader(weights, self.names, "weights")
        return int(self._trainer.loaders.set_weights(given))

    def rebuild_schedule(self) -> int:
        """Apply the changes of `trainer.multi_loader_config`."""
        return int(
            self._trainer.loaders.rebuild_schedule(
                **mixing_settings(self._trainer.multi_loader_config, self.names)
            )
        )
