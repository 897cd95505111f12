"""Prediction: collect the values that predict_step returns."""

from __future__ import annotations

from typing import Any

from hookline.run.run import Run
from hookline.training.batch_events import transfer
from hookline.training.evaluate import begin_pass, make_pass
from hookline.training.inference import evaluation_mode
from hookline.training.loading import writes_predictions
from hookline.training.pass_events import PREDICTION, PassEvents, PausedBatch
from hookline.util.errors import StopTraining


def predict(run: Run, keep: bool | None = None) -> list[Any]:
    """Predict in one pass over every loader; return a list of predictions, or one list per loader.

    Each rank returns the predictions of its own batches. keep: None: unless a hook writes them.
    """
    loaders = run.data.loaders["predict"]
    keeps = not writes_predictions(run) if keep is None else keep
    s, events = run.state, PassEvents(run, PREDICTION, several=len(loaders) > 1)
    events.collect([[] for _ in loaders])
    with (
        PausedBatch(s),
        evaluation_mode(run),
    ):  # also around hooks, which often call the model and keep its outputs
        begin_pass(run, events)
        data = make_pass(run, can_be_cut=False)
        for index, loader in enumerate(loaders):
            events.enter_loader(index, loader.name)
            fetcher = data.open(loader)
            while fetcher.fetch():
                events.open_batch()
                data.take(loader, lambda: predict_batch(run, events, keeps), PREDICTION.step)
                if data.is_over():
                    break
            if data.is_stopped:
                break
        events.end_data({})
        events.end({})
        if run.failure_monitor is not None:
            run.failure_monitor.wait_for_all_ranks("predictions")  # what their hooks have written can be read
    return s.predictions[0] if len(s.predictions) == 1 else s.predictions


def predict_batch(run: Run, events: PassEvents, keep: bool) -> None:
    """Predict on one batch: move, start, step, end."""
    s = run.state
    transfer(run.plan, s, run.traits.transfers)
    events.start_batch()
    try:
        outputs = PREDICTION.step(run.plan)(s)
    except StopTraining as stop:
        s.request_stop(stop.reason)
        return  # without on_predict_batch_end, because hooks would write a prediction that does not exist
    events.end_batch(outputs)
    if keep:
        s.predictions[s.dataloader_idx].append(outputs)
