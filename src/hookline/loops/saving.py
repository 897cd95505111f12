"""The loop's save points, and the way back in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hookline.checkpoint.files import read, write
from hookline.checkpoint.saves import COUNTERS, SaveRequest
from hookline.errors import CheckpointError
from hookline.loops.run import Run
from hookline.seeding import rng_state, set_rng_state
from hookline.state import State


def save_due(run: Run) -> None:
    """Write every checkpoint that was asked for; everyone has heard what they had to by now."""
    requests, run.save_requests = run.save_requests, []
    for request in requests:
        save(run, request)


def save(run: Run, request: SaveRequest) -> Path:
    """Put a checkpoint together, write it, and tell once it is durable."""
    plan, s = run.plan, run.state
    run.watch.settle()  # a loss that is not finite never replaces a good checkpoint
    s.checkpoint = collect(run)
    plan.on_save_checkpoint(s)
    path = request.path or run.run_dir() / "checkpoints" / f"step-{s.step}"
    write(s.checkpoint, path)
    s.checkpoint = None
    s.path, s.reason, s.saved_step = path, request.reason, s.step
    plan.on_checkpoint_save(s)
    return path


def collect(run: Run) -> dict[str, Any]:
    """Everything a run needs to go on."""
    s = run.state
    entries = [*s.hooks.entries(), *run.brought]
    return {
        "module": run.module.state_dict(),
        "hooks": {each.name: each.hook.state_dict() for each in entries if hasattr(each.hook, "state_dict")},
        "datamodule": run.datamodule.state_dict() if run.datamodule is not None else {},
        "optimizers": [each.state_dict() for each in s.optimizers],
        "schedulers": [each.state_dict() for each in s.schedulers],
        "precision": run.strategy.precision.state_dict(),
        "counters": {name: getattr(s, name) for name in COUNTERS},
        "position": {
            "batches": run.position, "validated_at": run.validated_at, "epoch_advanced": run.epoch_advanced,
        },
        "window": open_window(run),
        "log": s.log.state_dict(),
        "filters": {each.name: [[f.state_dict() for f in listener.filters] for listener in each.listeners] for each in entries},
        "metrics": dict(s.metrics.read()),
        "rng": {**rng_state(), "loader": [state for each in run.loaders.get("train", []) for state in each.generator_states()]},
        "epoch_rng": run.epoch_rng,
    }  # fmt: skip


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
    s.checkpoint = run.restored = read(run.resume_from)
    restore_counters(run)  # listeners may ask how far the run was from the very first event on
    plan.module_load_checkpoint(s)
    run.module.load_state_dict(s.checkpoint["module"])
    if run.datamodule is not None:
        run.datamodule.load_state_dict(s.checkpoint["datamodule"])
    plan.on_load_checkpoint(s)
    for entry in s.hooks.entries():
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
            each.load_state_dict(state)


def restore_progress(run: Run) -> None:
    """Second half, once the optimizers exist: then everything is in place, and on_checkpoint_load says so."""
    s, contents = run.state, run.restored
    if len(contents["optimizers"]) != len(s.optimizers):
        raise CheckpointError(f"{run.resume_from} holds {len(contents['optimizers'])} optimizers, "
                              f"but configure_optimizers returned {len(s.optimizers)}.")  # fmt: skip
    for optimizer, saved in zip(s.optimizers, contents["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for scheduler, saved in zip(s.schedulers, contents["schedulers"], strict=False):
        scheduler.load_state_dict(saved)
    run.strategy.precision.load_state_dict(contents["precision"])
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
    run.restored = {key: contents[key] for key in ("hooks", "filters", "rng", "epoch_rng")}


def restore_counters(run: Run) -> None:
    """How far the run was."""
    s, contents = run.state, run.restored
    for name in COUNTERS:
        setattr(s, name, contents["counters"][name])
    run.position = contents["position"]["batches"]
    run.validated_at = tuple(contents["position"]["validated_at"])
    run.epoch_advanced = contents["position"]["epoch_advanced"]
    s.resumed = True
