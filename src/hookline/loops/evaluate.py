"""Validation and test: the same loop under two sets of names."""

from __future__ import annotations

import torch

from hookline.data.loaders import Loader
from hookline.errors import OptionError, StopTraining
from hookline.loops.aggregating import aggregated
from hookline.loops.batch_events import transfer
from hookline.loops.data_pass import DataPass
from hookline.loops.pass_events import EvaluationEvents, Interlude, Names, PassEvents
from hookline.loops.run import Run
from hookline.loops.timer import timed
from hookline.metrics import Metrics


@timed("validation")
def evaluate(run: Run, names: Names, limit: int | None = None, *, can_be_cut: bool = False) -> Metrics:
    """One pass over every loader. The training it may interrupt finds everything as it left it."""
    s, log = run.state, run.state.log
    loaders = run.data.loaders[names.kind]
    events = EvaluationEvents(run, names, several=len(loaders) > 1)
    with (
        Interlude(s),
        torch.no_grad(),
    ):  # hooks around the batches often try out the model, and keep what comes out
        begin_pass(run, events)
        data = make_pass(run, can_be_cut)
        for index, loader in enumerate(loaders):
            events.enter_loader(index, loader.name)
            if not go_through(run, events, loader, limit, data):
                break
        results = events.finish()
        if len(loaders) > 1:
            results |= aggregated(
                results, names.kind, [each.name for each in loaders], run.options.val_aggregation
            )
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
    """Return the pass that this run needs."""
    if run.strategy.ranks.alone:
        return DataPass(run, can_be_cut)
    from hookline.loops.rank_pass import RankPass

    return RankPass(run, can_be_cut)


def go_through(run: Run, events: EvaluationEvents, loader: Loader, limit: int | None, data: DataPass) -> bool:
    """Evaluate one loader's batches; return whether the pass continues with the next loader."""
    is_empty = True
    fetcher = data.open(loader, limit)
    while fetcher.fetch():
        is_empty = False
        data.take(loader, lambda: evaluate_batch(run, events), events.names.step)
        if data.is_over():
            return False
    if is_empty:
        raise OptionError(
            f"The {events.names.kind} loader {loader.name!r} yielded no batch; a generator can be "
            "iterated over only once, pass a list or a DataLoader."
        )
    return True


def evaluate_batch(run: Run, events: EvaluationEvents) -> None:
    """One batch: move, start, step, end."""
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
