"""Rows and records of a loop written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from dialects.looped import Counts, net_and_sgd, train
from tiny import batches
from torch import nn

import hookline
from hookline import Hook, Line
from hookline.hooks import GradientMonitor, JSONLog, LRMonitor, ModelCheckpoint


def test_model_checkpoint_keeps_the_best(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    hook = ModelCheckpoint(monitor="val/loss", save_top_k=1)
    line = Line(net, sgd, hooks=[hook], run_dir=tmp_path)
    train(line, net, sgd, batches(3), epochs=3, val=batches(1))
    assert Path(hook.best_model_path).is_dir()
    best = nn.Linear(4, 2)
    hookline.load_weights(best, hook.best_model_path)
    assert torch.equal(best.weight, net.weight)  # it got better every time


def test_rows_go_to_loggers_and_hooks_may_edit_them(tmp_path: Path) -> None:
    class Adds(Hook):
        def on_train_metrics(self, metrics: Any) -> None:
            if "train/loss" in metrics:  # what hooks log at on_step_end is a row of its own
                metrics["twice"] = 2 * metrics["train/loss"]

    net, sgd = net_and_sgd()
    line = Line(
        net,
        sgd,
        hooks=[Adds(), LRMonitor(), GradientMonitor(log_frequency=1), JSONLog()],
        logger=True,
        run_dir=tmp_path,
        log_every_n_steps=1,
    )
    train(line, net, sgd, batches(2), val=batches(1))
    rows = [json.loads(each) for each in next(tmp_path.glob("*.jsonl")).read_text().splitlines()]
    seen = {key for row in rows for key in (row.get("metrics") or row)}
    assert {"train/loss", "twice", "lr", "lr-SGD", "grad_norm", "val/loss"} <= seen
    assert list((tmp_path / "logs").glob("*.jsonl"))


def test_a_line_s_log_says_what_each_row_is_over(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    line = Line(net, sgd, logger=True, run_dir=tmp_path, log_every_n_steps=1)
    train(line, net, sgd, batches(2), val=batches(1))
    rows = [json.loads(each) for each in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["over"] for row in rows if row["type"] == "metrics"] == [
        "step",
        "step",
        "evaluation",
        "epoch",
    ]


def test_what_hooks_cost_is_accounted_for() -> None:
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[Counts()])
    train(line, net, sgd, batches(6))
    assert [(row.hook, row.event, row.calls) for row in line.cost()] == [("counts", "on_step_end", 2)]
    assert "counts" in str(line.explain())
