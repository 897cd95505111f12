"""`self.log(...)` with Lightning's arguments, as Hookline's log takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hookline.accumulator import REDUCTIONS
from hookline.errors import OptionError, closest
from hookline.metrics import with_ending

Reduction = str | Callable[..., Any]


def log_value(
    run: Any,
    name: str,
    value: Any,
    *,
    prog_bar: bool = False,
    logger: bool | None = None,
    on_step: bool | None = None,
    on_epoch: bool | None = None,
    reduce_fx: Reduction = "mean",
    add_dataloader_idx: bool = True,
    batch_size: int | None = None,
) -> None:
    """Log one value. With several evaluation loaders its name ends in `/dataloader_idx_N`, unless told
    otherwise.
    """
    log, state = run.state.log, run.state
    loaders = run.data.loaders.get("test" if state.stage == "test" else "val", ())
    if log.mode == "eval" and add_dataloader_idx and len(loaders) > 1:
        name = f"{name}/dataloader_idx_{state.dataloader_idx}"
    reduce, in_batches = reduction(name, reduce_fx), log.mode != "now"
    on_step = log.mode == "train" if on_step is None else on_step
    on_epoch = log.mode == "eval" if on_epoch is None else on_epoch
    if in_batches and on_step and hasattr(value, "compute") and hasattr(value, "reset"):
        if on_epoch:  # the epoch's value is the object's own, not the mean of the batches'
            log.log(with_ending(name, "_epoch"), value, False, True, prog_bar, reduce, batch_size)
        value = value._forward_cache
        if value is None:
            return  # it was only updated, so it has no value for this batch
    log.log(name, value, on_step, on_epoch, prog_bar, reduce, batch_size)
    if in_batches and on_step and on_epoch:
        log.newest.raw()[with_ending(name, "_step")] = log.batch_values[name]
    if logger is False:  # known to callbacks and the progress bar, but not in this step's row
        log.pending.pop(name, None)
        log.pending.pop(with_ending(name, "_step"), None)


PLACES = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
    "metric_attribute",
    "rank_zero_only",
)
"""The arguments of Lightning's `log` after the name and the value, in their order."""
MEANT = {"prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "add_dataloader_idx", "batch_size"}
"""Those that change something here; ranks are brought together by themselves."""


def log_as_lightning(run: Any, name: str, value: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Log one value, with whatever Lightning's `log` takes."""
    given = {**dict(zip(PLACES, args, strict=False)), **options}
    if unknown := [each for each in given if each not in PLACES]:
        raise OptionError(
            f"log({name!r}, {unknown[0]}=...): there is no such option.{closest(unknown[0], PLACES)} "
            f"There are: {', '.join(PLACES)}."
        )
    log_value(run, name, value, **{key: each for key, each in given.items() if key in MEANT})


def reduction(name: str, asked: Reduction) -> str:
    """'mean', 'sum', 'min' or 'max', from its name or from torch's function."""
    word = asked if isinstance(asked, str) else getattr(asked, "__name__", repr(asked))
    word = {"amin": "min", "amax": "max", "avg": "mean"}.get(word, word)
    if word not in REDUCTIONS:
        raise OptionError(
            f"log({name!r}, reduce_fx={asked!r}): allowed are {', '.join(REDUCTIONS)} and torch's functions "
            "of these names. A torchmetrics.Metric can be logged as it is."
        )
    return word
