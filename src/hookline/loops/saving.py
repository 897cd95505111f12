"""The loop's save points, and the way back in."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from torch import Tensor

from hookline.checkpoint.background import BackgroundSaver
from hookline.checkpoint.files import write
from hookline.checkpoint.saves import COUNTERS, Saved, SaveRequest
from hookline.errors import CheckpointError
from hookline.events import Event
from hookline.loops.record import note_training
from hookline.loops.run import Run
from hookline.metrics import Metrics
from hookline.seeding import rng_state, set_rng_state
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
    return value.copy() if type(value).__module__ == "numpy" and hasattr(value, "copy") else value


def open_window(run: Run) -> dict[str, Any]:
    """An accumulation window that is not complete yet, with its gradients."""
    window = run.window
    if not window.batches:
        return {}
    grads = {name: p.grad for name, p in run.module.named_parameters() if p.grad is not None} if window.count else {}
    facts = {name: getattr(window, name) for name in window.__slots__}
    return {**facts, "gradients": grads}


def restore_module(run: Run) -> None:
    """First half, before or after the strategy's set-up as it asks: module, data module and hooks."""
    plan, s = run.plan, run.state
    assert run.resume_from is not None
    s.checkpoint = run.restored
    restore_counters(run)  # listeners may ask how far the run was from the very first event on
    plan.module_load_checkpoint(s)
    try:
        run.module.load_state_dict(s.checkpoint["module"])
    except RuntimeError as error:
        raise CheckpointError(f"The weights in {run.resume_from} do not fit {type(run.module).__name__}: {error}") from error
    if run.datamodule is not None:
        run.datamodule.load_state_dict(s.checkpoint["datamodule"])
    plan.on_load_checkpoint(s)
    for entry in s.hooks.entries():
        if run.stage == "fit" or getattr(entry.hook, "tier", "user") != "monitor":  # what a monitor found in its run stays
            restore_hook(entry, run.restored, s)


def restore_hook(entry: Any, contents: dict[str, Any], s: State) -> None:
    """A hook's own state, and how far its filters have counted, by its name; one that is new begins to count now."""
    for listener in entry.listeners:
        for each in listener.filters:
            each.begin(s)
    if entry.name in contents.get("hooks", {}) and hasattr(entry.hook, "load_state_dict"):
        entry.hook.load_state_dict(contents["hooks"][entry.name])
    saved = contents.get("filters", {}).get(entry.name, [])
    for listener, states in zip(entry.listeners, saved, strict=False):
        for each, state in zip(listener.filters, states, strict=False):
            if state["of"] == f"{listener.event.name} {each.text}":  # another interval counts in other numbers: it begins now
                each.load_state_dict(state)


def restore_progress(run: Run) -> None:
    """Second half, once the optimizers exist: then everything is in place, and on_checkpoint_load says so."""
    s, contents = run.state, run.restored
    if len(contents["optimizers"]) != len(s.optimizers):
        raise CheckpointError(f"{run.resume_from} holds {len(contents['optimizers'])} optimizers, "
                              f"but configure_optimizers returned {len(s.optimizers)}.")  # fmt: skip
    if contents["kinds"] != kinds(s):
        was, now = (", ".join(map(str, each)) or "none" for each in (contents["kinds"], kinds(s)))
        raise CheckpointError(f"{run.resume_from} is of a run with other optimizers or schedulers. There: {was}. Here: {now}. "
                              "Resume with the same ones, or take its weights alone: "
                              "hookline.load_weights(module, path).")  # fmt: skip
    for optimizer, saved in zip(s.optimizers, contents["optimizers"], strict=True):
        load_optimizer(optimizer, saved)
    for scheduler, saved in zip(s.schedulers, contents["schedulers"], strict=False):
        scheduler.load_state_dict(saved)
    run.strategy.precision.load_state_dict(contents["precision"])
    if run.feeds is not None:
        run.feeds.load_state_dict(contents["feeding"])
    for name, value in contents["window"].items():
        if name != "gradients":
            setattr(run.window, name, value)
    gradients = contents["window"].get("gradients", {})
    for name, parameter in run.module.named_parameters():
        if name in gradients:
            parameter.grad = gradients[name].to(parameter.device)
    s.log.newest.raw().update(contents["metrics"])
    s.log.load_state_dict(contents["log"])
    s.checkpoint = None
    s.path = run.resume_from
    set_rng_state(contents["rng"])
    # what hooks that come late, and the first epoch, still need; the rest would stay in memory for the whole run
    run.restored = {key: contents[key] for key in ("hooks", "filters", "rng", "loader", "loggers")}


def kinds(s: State) -> list[str]:
    """The classes of the optimizers and schedulers: the state of one kind means nothing to another."""
    return [type(each).__name__ for each in (*s.optimizers, *s.schedulers)]


def load_optimizer(optimizer: Any, saved: dict[str, Any]) -> None:
    """Torch gives floating state the type of its parameter; an optimizer that keeps more digits gets them back."""
    optimizer.load_state_dict(saved)
    names = [name for group in saved["param_groups"] for name in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        held = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(name, {}).items():
            if isinstance(value, Tensor) and isinstance(held.get(key), Tensor) and held[key].dtype != value.dtype:
                held[key] = value.to(held[key].device, copy=True)


def restore_counters(run: Run) -> None:
    """How far the run was."""
    s, contents = run.state, run.restored
    for name in COUNTERS:
        setattr(s, name, contents["counters"][name])
    run.position = contents["position"]["batches"]
    run.validated_at = tuple(contents["position"]["validated_at"])
    run.epoch_advanced = contents["position"]["epoch_advanced"]
    run.owes_validation = contents["position"]["owes_validation"]
    s.resumed = True
