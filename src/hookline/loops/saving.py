"""The loop's save points: what a checkpoint holds, when it is written, and what is told of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from hookline.checkpoint.background import BackgroundSaver
from hookline.checkpoint.files import write
from hookline.checkpoint.saves import COUNTERS, Saved, SaveRequest
from hookline.errors import CheckpointError
from hookline.events import Event
from hookline.loops.record import note_training
from hookline.loops.run import Run
from hookline.metrics import Metrics
from hookline.seeding import rng_state
from hookline.state import State

log = logging.getLogger("hookline")


def save_due(run: Run) -> None:
    """Write every checkpoint that was asked for; everyone has heard what they had to by now."""
    for _ in range(len(run.save_requests)):  # popped, not swapped: news may be added by another thread at any moment
        request = run.save_requests.pop(0)
        if request is not None and not run.sealed:
            save(run, request)
    announce(run)


def save(run: Run, request: SaveRequest) -> None:
    """Put a checkpoint together, and write it or have it written in the background."""
    plan, s = run.plan, run.state
    run.watch.settle()  # a loss that is not finite never replaces a good checkpoint
    path = request.path or run.run_dir() / "checkpoints" / f"step-{s.step}"
    s.checkpoint, s.path, s.reason = collect(run), path, request.reason
    plan.on_save_checkpoint(s)
    contents, s.checkpoint = s.checkpoint, None
    about = describe(run, request)
    saved = Saved(path, request.reason, s.step)
    if run.options.save == "async" and run.stage == "fit" and request.reason not in ("signal", "exception"):
        save_in_background(run, contents, about, saved)
        return
    finish_saving(run)  # one that is still being written is older, and may have the same name
    try:
        write(contents, path, about, staging=run.run_dir)
    except CheckpointError as error:
        saved = replace(saved, error=error)
    run.news.append(saved)
    run.sealed = run.sealed or (request.reason == "signal" and saved.error is None)
    announce(run)


def save_in_background(run: Run, contents: dict[str, Any], about: dict[str, Any], saved: Saved) -> None:
    """Training goes on as soon as everything is copied. At most one is being written at a time."""
    if run.saver is None:
        run.saver = BackgroundSaver()

    def tell(error: CheckpointError | None) -> None:
        run.news.append(saved if error is None else replace(saved, error=error))
        run.save_requests.append(None)

    run.saver.start(contents, saved.path, about, tell, staging=run.run_dir)


def finish_saving(run: Run) -> None:
    """Wait for what is being written in the background, and tell what became of it."""
    if run.saver is not None:
        run.saver.wait()
        announce(run)


def announce(run: Run) -> None:
    """Tell everyone of checkpoints that are durable by now, and do as chosen about those that are not."""
    s = run.state
    while run.news:
        saved = run.news.pop(0)
        s.path, s.reason, s.saved_step = saved.path, saved.reason, saved.step
        if saved.error is None:
            note_training(run, saved.path)
            run.plan.on_checkpoint_save(s)
        elif run.options.on_save_error == "raise":
            raise saved.error
        else:
            log.warning("%s The run goes on without it.", saved.error)
            s.exception = saved.error
            run.plan.on_checkpoint_failed(s)
            s.exception = None


def describe(run: Run, request: SaveRequest) -> dict[str, Any]:
    """What the manifest says of a checkpoint, so that it can be judged without being read."""
    s = run.state
    return {
        "run": run.run_id, "step": s.step, "epoch": s.epoch, "epochs_seen": s.epochs_seen, "batches_seen": s.batches_seen,
        "reason": request.reason, "monitor": request.monitor, "metrics": dict(s.metrics.read()), "status": s.status,
        "world_size": s.world_size,
    }  # fmt: skip


def collect(run: Run) -> dict[str, Any]:
    """Everything a run needs to go on."""
    s = run.state
    entries = [*s.hooks.entries(), *run.brought]
    whole = {
        "run": run.run_id,
        "module": run.module.state_dict(),
        "hooks": {each.name: each.hook.state_dict() for each in entries if hasattr(each.hook, "state_dict")},
        "datamodule": run.datamodule.state_dict() if run.datamodule is not None else {},
        "optimizers": [each.state_dict() for each in s.optimizers],
        "schedulers": [each.state_dict() for each in s.schedulers],
        "kinds": kinds(s),
        "precision": run.strategy.precision.state_dict(),
        "counters": {name: getattr(s, name) for name in COUNTERS},
        "position": {
            "batches": run.position, "validated_at": run.validated_at, "epoch_advanced": run.epoch_advanced,
            "owes_validation": run.owes_validation,
        },
        "window": open_window(run),
        "log": s.log.state_dict(),
        "filters": {each.name: [counts_of(x) for x in each.listeners] for each in entries},
        "metrics": dict(s.metrics.read()),
        "loggers": s.logger.position(),
        # a resumed run whose data is not open yet: what it has drawn since is drawn again after the next resume
        "rng": run.restored["rng"] if "rng" in run.restored else rng_state(),
        "loader": run.restored["loader"] if "loader" in run.restored
        else run.train.state_dict(s.epochs_seen, run.position) if run.train is not None else None,
        "feeding": run.feeds.state_dict() if run.feeds is not None else {},
    }  # fmt: skip
    for name, before in run.before_validation.items() if run.owes_validation else ():
        # as if the validation that was cut short had never begun
        if name == "module":
            before = {key: each for key, each in before.items() if key in whole[name]}  # not all buffers are saved
        whole[name].update(Metrics(before).read() if name == "metrics" else before)
    return whole


def kinds(s: State) -> list[str]:
    """The classes of the optimizers and schedulers: the state of one kind means nothing to another."""
    return [type(each).__name__ for each in (*s.optimizers, *s.schedulers)]


def counts_of(listener: Any) -> list[dict[str, Any]]:
    """How far a listener's filters have counted, with what each was asked for: `every 2 steps`."""
    return [{"of": f"{listener.event.name} {each.text}", **each.state_dict()} for each in listener.filters]


SMALL = 1_000_000
"""Tensors of more elements are too large to be copied before every validation; hooks do not change them during one."""


def what_validation_may_change(run: Run) -> dict[str, Any]:
    """The state of everyone who hears it, and the random streams: a validation that is cut short must leave no trace."""
    s = run.state
    hearers = [each for each in s.hooks.entries() if any(hears_it_begin(x.event) for x in each.listeners)]
    return {
        "hooks": {each.name: frozen(each.hook.state_dict()) for each in hearers if hasattr(each.hook, "state_dict")},
        "filters": {each.name: [counts_of(x) for x in each.listeners] for each in hearers},
        "module": frozen(dict(run.module.named_buffers())),
        "log": frozen(s.log.state_dict()), "metrics": dict(s.metrics.raw()), "rng": rng_state(),
        "loggers": s.logger.position(),
    }  # fmt: skip


def hears_it_begin(event: Event) -> bool:
    """Whether an event of a validation comes before its end, which one that is cut short does not have."""
    return event.inside == "validation batch" or event.name in ("on_validation_start", "on_validation_epoch_start")


def frozen(value: Any) -> Any:
    """A copy that later changes do not reach."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() <= SMALL else value
    if isinstance(value, dict):
        return {key: frozen(each) for key, each in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(frozen(each) for each in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def open_window(run: Run) -> dict[str, Any]:
    """An accumulation window that is not complete yet, with its gradients."""
    window = run.window
    if not window.batches:
        return {}
    grads = {name: p.grad for name, p in run.module.named_parameters() if p.grad is not None} if window.count else {}
    facts = {name: getattr(window, name) for name in window.__slots__}
    return {**facts, "gradients": grads}
