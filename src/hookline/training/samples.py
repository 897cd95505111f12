"""The samples behind an update, and samples to leave out, during a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from hookline.data.loaders import Loader
from hookline.data.samples import Sample
from hookline.run.commands import handles_command
from hookline.run.record import record_exclusion
from hookline.run.run import Run
from hookline.run.sample_order import SampleOrder
from hookline.util.errors import HooklineError, OptionError, UnknownSamples, closest

log = logging.getLogger("hookline")
MOST_LOGGED = 100
"""The number of excluded samples that are written to the log."""


# ---- the order ---------------------------------------------------------------------------------------------


def order_of(run: Run) -> SampleOrder:
    """Return the order of the run's training data; make it on first use."""
    if run.data.order is None:
        run.data.order = SampleOrder(run.progress.windows)
    order: SampleOrder = run.data.order
    return order


def describe_order(run: Run) -> None:
    """Describe the training data that was just opened, and offer `sample_ids` to hooks."""
    s, train = run.state, run.data.train
    order = order_of(run)
    _describe(run, order, run.progress.position)
    if run.data.is_mixture:
        train.turned = lambda position: _describe(run, order, position)

    def sample_ids(batch: int) -> list[Any] | None:
        loader = train.loaders[s.current.dataloader_name] if run.data.is_mixture else train
        supplied: Callable[[Any], Iterable[Any]] | None = getattr(loader.source, "sample_ids", None)
        if supplied is not None:
            return list(supplied(s.current.batch))
        drawn: list[Any] | None = train.sample_ids(batch)
        if drawn is not None:
            return drawn
        try:  # a listener that was added during the pass
            found = order.of_batches(s.epoch, [batch], _live(run))
        except UnknownSamples:
            return None
        return [each.id for each in found if each.rank == run.strategy.ranks.data_rank]

    s.current.indices_of = sample_ids


def _describe(run: Run, order: SampleOrder, position: int) -> None:
    s, train = run.state, run.data.train
    is_certain = not train.may_change if run.data.is_mixture else train.is_exact
    length = train.length if is_certain and train.length is not None else 0
    order.windows.begin_epoch(s.step, s.epoch, position, length, run.traits.accumulate)
    try:
        mixture = train if run.data.is_mixture else None
        order.describe(s.epoch, position, [train] if mixture is None else [*train.loaders.values()], mixture)
    except Exception:  # samplers are user code; an error there must not end the run
        log.debug("The order of the training data cannot be described", exc_info=True)


def _live(run: Run) -> dict[str, Loader]:
    return {each.name: each for each in run.data.loaders["train"]}


# ---- samples -----------------------------------------------------------------------------------------------


def samples_of(run: Run, step: int | None) -> list[Sample]:
    """Return the samples behind an update of this run; None: the update that is being made."""
    order, s = order_of(run), run.state
    if step is None:
        newest = order.windows.find(s.step)
        is_made = newest is not None and (newest.epoch, newest.last) == (s.epoch, s.batch_idx)
        batches = order.windows.open_batches(s.step - is_made, s.epoch, s.batch_idx)
        return order.of_batches(s.epoch, batches, _live(run))
    opened = order.windows.open_window(s.step, *run.reached)
    if opened is not None and step == s.step + 1:
        return order.of_batches(opened.epoch, order.windows.trained(opened), _live(run))
    if not 1 <= step <= s.step:
        last = s.step if opened is None else f"{s.step + 1}, which is the update that was begun and not made"
        raise OptionError(
            f"samples({step!r}): the run has made {s.step} updates, so the step is from 1 to {last}.",
            option="step",
            value=step,
        )
    return order.samples(step, _live(run))


# ---- exclusions --------------------------------------------------------------------------------------------


def exclude_samples(run: Run, samples: Iterable[int], loader: str | None, reason: str) -> None:
    """Leave samples out from where the data is opened next, on all ranks."""
    named = _live(run) if "train" in run.data.loaders else {}
    if not named:
        raise HooklineError(
            "exclude_samples() works from on_train_start on, when the training data is loaded."
        )
    if loader is None and len(named) > 1:
        raise OptionError(
            f"exclude_samples(): this run has several training loaders: {', '.join(named)}. Pass loader=..."
        )
    name = next(iter(named)) if loader is None else loader
    if name not in named:
        raise OptionError(
            f"exclude_samples(loader={name!r}): there is no such training loader.{closest(name, named)} "
            f"Loaders: {', '.join(named)}.",
            option="loader",
            value=name,
        )
    indices = named[name].check_exclusion(samples)
    if run.strategy.ranks.alone:
        exclude(run, 0, name, indices, reason)
    else:
        run.participants.commands.send("exclude", loader=name, samples=indices, reason=reason)


@handles_command("exclude")
def exclude(run: Run, sender: int, loader: str, samples: list[int], reason: str) -> None:
    """Leave samples out, and write it to the log and the record."""
    new = sorted(_live(run)[loader].exclusions.add(samples))
    if not new:
        return
    s = run.state
    done = {
        "step": s.step,
        "epoch": s.epoch,
        "loader": loader,
        "count": len(new),
        "samples": new[:MOST_LOGGED],
        "reason": reason,
    }
    s.logger.log_event("exclusion", done)
    record_exclusion(run, done)
