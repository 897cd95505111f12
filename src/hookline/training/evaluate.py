"""Validation and test: the same loop with two sets of event names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hookline.data.loaders import Loader
from hookline.metrics.metric_log import Metrics
from hookline.run.run import Run
from hookline.run.state import is_scalar
from hookline.run.timer import timed
from hookline.training.batch_events import transfer
from hookline.training.data_pass import DataPass
from hookline.training.inference import evaluation_mode
from hookline.training.pass_events import EvaluationEvents, Names, PassEvents, PausedBatch
from hookline.util.errors import OptionError, StopTraining, closest

Aggregate = Callable[[dict[str, dict[str, float]]], Mapping[str, float]]
"""Computes the overall results from those of each loader, by the loader's name."""


def aggregate(
    results: dict[str, Any], prefix: str, loaders: list[str], how: str | Aggregate
) -> dict[str, Any]:
    """Return what replaces the overall results, which are means over all samples ('micro') by default."""
    if how == "micro":
        return {}
    by_loader: dict[str, dict[str, Any]] = {}
    for name in loaders:
        start = f"{prefix}/dl_{name}/"
        by_loader[name] = {
            key.removeprefix(start): value for key, value in results.items() if key.startswith(start)
        }
    if callable(how):
        overall = how({name: dict(Metrics(values).read()) for name, values in by_loader.items()})
        if not isinstance(overall, Mapping) or not all(is_scalar(value) for value in overall.values()):
            raise OptionError(
                f"evaluation: aggregation must return a dictionary of numbers by the metrics' names, not "
                f"{str(overall)[:80]}."
            )
    elif how == "macro":
        keys = dict.fromkeys(key for values in by_loader.values() for key in values)
        found = {key: [values[key] for values in by_loader.values() if key in values] for key in keys}
        overall = {key: sum(each) / len(each) for key, each in found.items()}
    else:
        overall = by_loader[how.partition(":")[2] or loaders[0]]
    # the user may have logged a result without the prefix
    return {key if key in results else f"{prefix}/{key}": value for key, value in overall.items()}


def check_aggregation(how: str | Aggregate, loaders: list[str], stage: str) -> None:
    """Refuse a primary loader that does not exist, before anything is measured.

    Outside fit a single loader may have another name: the trainer may have been made for several loaders.
    """
    primary = how.partition(":")[2] if isinstance(how, str) else ""
    if primary and loaders and primary not in loaders and (len(loaders) > 1 or stage == "fit"):
        raise OptionError(
            f"evaluation: aggregation={how!r}: there is no loader named {primary!r}."
            f"{closest(primary, loaders)} Loaders: {', '.join(loaders)}."
        )


@timed("validation")
def evaluate(run: Run, names: Names, limit: int | None = None, *, can_be_cut: bool = False) -> Metrics:
    """Make one pass over every loader, and restore the facts of a training batch that it interrupts."""
    s, log = run.state, run.state.log
    loaders = run.data.loaders[names.kind]
    events = EvaluationEvents(run, names, several=len(loaders) > 1)
    with (
        PausedBatch(s),
        evaluation_mode(run),
    ):  # also around hooks, which often call the model and keep its outputs
        begin_pass(run, events)
        data = make_pass(run, can_be_cut)
        for index, loader in enumerate(loaders):
            events.enter_loader(index, loader.name)
            if not evaluate_loader(run, events, loader, limit, data):
                break
        pooled, how = log.evaluated_objects(), run.options.evaluating.aggregation
        results = events.finish()
        if len(loaders) > 1:
            if pooled and how != "micro":
                raise OptionError(
                    f"evaluation: aggregation={how!r} needs a result of each loader, and a "
                    f"{type(pooled[0]).__name__} has one result of all batches. Log one object per loader, "
                    "under names of their own, and monitor one of them; or use aggregation='micro'."
                )
            results |= aggregate(results, names.kind, [each.name for each in loaders], how)
        events.end_data(results)
        events.end(results)
        results.update(run.rows.reduce(log.pending, "evaluation"))
    if not s.sanity_checking:
        run.rows.write(results, "evaluation")
    return Metrics(results)


def begin_pass(run: Run, events: PassEvents) -> None:
    """Put the module into eval mode and emit the start of the pass."""
    events.to_eval()
    run.strategy.begin_evaluation(run.module)
    events.start()


def make_pass(run: Run, can_be_cut: bool) -> DataPass:
    """Return the pass over data for one process, or for one rank among several."""
    if run.strategy.ranks.alone:
        return DataPass(run, can_be_cut)
    from hookline.training.ranks.data_pass import RankPass

    return RankPass(run, can_be_cut)


def evaluate_loader(
    run: Run, events: EvaluationEvents, loader: Loader, limit: int | None, data: DataPass
) -> bool:
    """Evaluate one loader's batches; return whether the pass continues with the next loader."""
    is_empty = True
    fetcher = data.open(loader, limit)
    while fetcher.fetch():
        is_empty = False
        data.take(loader, lambda: evaluate_batch(run, events), events.names.step)
        if data.is_over():
            return False
    if is_empty and run.traits.rules.refuses_empty_data:
        raise OptionError(
            f"The {events.names.kind} loader {loader.name!r} yielded no batch; a generator can be "
            "iterated over only once, pass a list or a DataLoader."
        )
    return True


def evaluate_batch(run: Run, events: EvaluationEvents) -> None:
    """Evaluate one batch: move, start, step, end."""
    s = run.state
    events.open_batch()
    transfer(run.plan, s, run.traits.transfers)
    events.start_batch()
    try:
        outputs = events.names.step(run.plan)(s)
    except StopTraining as stop:
        outputs = None
        s.request_stop(stop.reason)
    events.end_batch(outputs)
