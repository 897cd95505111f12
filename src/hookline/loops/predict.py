"""Prediction: collect what predict_step returns."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

from hookline.errors import StopTraining
from hookline.loops.evaluate import Interlude, make_pass
from hookline.loops.run import Run
from hookline.plan import Plan
from hookline.state import State


def predict(run: Run, keep: bool = True) -> list[Any]:
    """One pass over every loader; a list of predictions, or one such list per loader if there are several.

    With several ranks each has those of its own batches.
    """
    plan, s = run.plan, run.state
    s.predictions = [[] for _ in run.data.loaders["predict"]]
    with Interlude(s), torch.no_grad():  # hooks around the batches often try out the model, and keep what comes out
        s.modes = [(module, module.training) for module in run.module.modules()]
        plan.on_predict_model_eval(s)
        run.strategy.begin_evaluation(run.module)
        plan.on_predict_start(s)
        plan.on_predict_epoch_start(s)
        data = make_pass(run, can_be_cut=False)
        for s.dataloader_idx, loader in enumerate(run.data.loaders["predict"]):
            s.dataloader_name = loader.name
            fetcher = data.open(loader)
            while fetcher.fetch():
                s.cache.clear()
                data.take(loader, lambda: predict_batch(run, plan, s, keep), attrgetter("predict_step"))
                if data.is_over():
                    break
            if data.was_over:
                break
        plan.on_predict_epoch_end(s)
        plan.on_predict_end(s)
        plan.on_predict_model_train(s)
    return s.predictions[0] if len(s.predictions) == 1 else s.predictions


def predict_batch(run: Run, plan: Plan, s: State, keep: bool) -> None:
    """One batch: move, predict, tell."""
    plan.on_before_batch_transfer(s)
    for move in run.traits.transfers:
        s.batch = move(s)
    plan.on_after_batch_transfer(s)
    plan.on_predict_batch_start(s)
    try:
        s.returned = plan.predict_step(s)
    except StopTraining as stop:
        s.request_stop(stop.reason)
        return
    plan.on_predict_batch_end(s)
    if keep:
        s.predictions[s.dataloader_idx].append(s.returned)
