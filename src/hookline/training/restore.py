"""Restoring a checkpoint into a run: module and hooks first, the rest once the optimizers exist."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hookline.checkpoint.averages import choose_weights, scored_hook
from hookline.checkpoint.base_weights import (
    REMEDY,
    BaseWeights,
    chosen,
    digest_weights,
    left_out_in,
    other_base,
    with_base,
)
from hookline.checkpoint.contents import check_like, is_number, put_gradients
from hookline.checkpoint.sharded import (
    is_dtensor,
    materialize,
    materialize_gradients,
    materialize_optimizer,
    materialize_tensor,
    sharded_tensors,
)
from hookline.data.seeding import key_of, rng_state, seed_rank, set_rng_state
from hookline.distributed.precision import TRUE
from hookline.engine.foreign import HookAdapter, KeyedState
from hookline.engine.hook_list import Entry
from hookline.engine.listener import overrides
from hookline.run.run import Run
from hookline.run.state import State
from hookline.run.state_parts import Counts
from hookline.training.run_events import begin_loading, edit_loaded
from hookline.training.saving import kinds, naming
from hookline.training.schedulers import advance_on_metric
from hookline.training.settings import report_changes
from hookline.util.errors import CheckpointError, HooklineError, described
from hookline.util.urls import shown

log = logging.getLogger("hookline")


def begin_weights(run: Run) -> None:
    """Fingerprint the model as it was built, if checkpoints will leave out its base; then restore a resumed
    one. The strategy chooses whether before or after its set-up.
    """
    asks = any(getattr(each.hook, "needs_base", False) for each in run.state.hooks.entries())
    if run.stage == "fit" and (asks or run.options.saving.weights == "trainable"):
        run.saves.base = BaseWeights(run.module, run.strategy.ranks)
    if run.resume.path is not None:
        restore_module(run)
        if run.saves.base is not None:
            run.saves.base.hold_changed(run.module.state_dict(), run.strategy.ranks)


def restore_module(run: Run) -> None:
    """Restore module, data module and hooks."""
    plan, s = run.plan, run.state
    assert run.resume.path is not None
    begin_loading(run, run.resume.contents)
    if run.stage == "fit" or run.traits.rules.shows_counts_of_evaluated_file:
        restore_counters(run)  # listeners may request the counters from the first event on
    sharded = sharded_tensors(run.module)
    if run.stage != "fit" and scored_hook(run.resume.contents) not in {
        None,
        *(each.name for each in s.hooks.entries()),
    }:
        # this run lacks the hook that would put its averaged weights, which were scored, into the module
        run.resume.contents["module"] = choose_weights(
            run.resume.contents, "scored", str(run.resume.path)
        ).weights
    if reads_late(run, sharded):
        materialize_gradients(run.resume.contents.get("window", {}), sharded)
        # `restore_progress` does it for the optimizers, which do not exist yet
        for name in [each for each in run.resume.contents if each not in ("optimizers", "window")]:
            run.resume.contents[name] = materialize(run.resume.contents[name], sharded)
    add_base(run)
    plan.module_load_checkpoint(s)
    for name in sharded.keys() & s.checkpoint["module"].keys():  # a listener may have replaced tensors
        s.checkpoint["module"][name] = materialize_tensor(s.checkpoint["module"][name], sharded[name])
    try:
        options = {} if run.steps.strict_loading else {"strict": False}
        run.module.load_state_dict(s.checkpoint["module"], **options)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        anew = (
            "\nIf you have changed the module, begin a new run: pass resume=None (on the command line: "
            "hookline fit --fresh), or choose another run_dir, which keeps the old checkpoints."
            if run.stage == "fit"
            else ""
        )
        # torch's error about weights says it all; one of a module's own method needs its traceback
        cause = None if "Error(s) in loading state_dict" in str(error) else error
        raise CheckpointError(
            f"The weights in {shown(run.resume.path)} do not fit {type(run.module).__name__}: {error}{anew}"
        ) from cause
    if run.datamodule is not None and "datamodule" in s.checkpoint:  # one with weights only has none
        run.datamodule.load_state_dict(s.checkpoint["datamodule"])
    edit_loaded(run)
    if run.stage == "fit" and s.rank == 0:
        run.traits.rules.warn_of_other_hooks(run, functools.partial(warn_of_other_hooks, run))
    for entry in s.hooks.in_order():
        restore_hook(entry, run.resume.contents, s)


def add_base(run: Run) -> None:
    """Add the weights that the checkpoint leaves out, from the module; raise if its base is another one.

    In a fit, rank zero's base counts, because its weights reach all ranks. An evaluation uses those of each.
    """
    contents, base, ranks = run.resume.contents, run.saves.base, run.strategy.ranks
    left_out = left_out_in(contents.get("module"))
    if not left_out:
        return
    own = run.module.state_dict()
    decides = ranks.rank == 0 or run.stage != "fit"
    found = dict(base.known) if base else {}  # without those that are trainable in this run
    unknown = {name: each for name, each in chosen(own, left_out).items() if name not in found}
    found |= digest_weights(unknown, hashes=decides)
    problem = other_base(left_out, found, run.resume.path, type(run.module).__name__) if decides else ""
    if problem := next(filter(None, ranks.gather(problem)), ""):
        raise CheckpointError(f"{problem}\n  {REMEDY}")
    contents["module"] = with_base(contents["module"], own)


def keep_monitor_state(run: Run) -> None:
    """Restore the state of monitors to that of the trainer's own fit when this evaluation is over."""
    for entry in run.state.hooks.entries():
        if getattr(entry.hook, "tier", "user") == "monitor" and hasattr(entry.hook, "load_state_dict"):
            state = copy.deepcopy(entry.hook.state_dict())
            run.participants.on_close.append(functools.partial(entry.hook.load_state_dict, state))


def keep_counts(run: Run, fitted: Counts) -> None:
    """Show the counters of the trainer's own fit again when this evaluation of a checkpoint is over."""
    run.participants.on_close.append(
        lambda: run.state.counts.load_state_dict(fitted.state_dict(), resumed=False)
    )


def warn_of_other_hooks(run: Run) -> None:
    """Warn of saved state without a hook of its name, and of hooks without saved state."""
    saved, entries = run.resume.contents.get("hooks", {}), run.state.hooks.entries()
    here = {each.name for each in entries}
    found = {each.name: find_state(each, run.resume.contents) for each in entries}
    used = {id(each) for each in found.values()}
    lost = [name for name, state in saved.items() if state and name not in here and id(state) not in used]
    if lost:
        log.warning(
            "%s holds state of hooks that this run does not have, which is not used: %s. State is matched "
            "by the name of a hook (its attribute `name`; of a callback of Lightning, its state_key).",
            shown(run.resume.path),
            ", ".join(lost),
        )
    keeping = hooks_with_state(entries)
    if new := [each.name for each in keeping if each.name not in saved and found[each.name] is None]:
        log.warning(
            "%s holds no state of these hooks, which start without it: %s.",
            shown(run.resume.path),
            ", ".join(new),
        )


def hooks_with_state(entries: Iterable[Entry]) -> list[Entry]:
    """Return the hooks that have a state of their own to save."""
    return [
        each for each in entries if hasattr(each.given, "state_dict") and overrides(each.given, "state_dict")
    ]


def reads_late(run: Run, sharded: dict[str, Any]) -> bool:
    """Return whether tensors are still to be read, each rank its part; otherwise they are in memory."""
    return bool(sharded) or not run.strategy.ranks.alone


def restore_hook(entry: Any, contents: dict[str, Any], s: State) -> None:
    """Restore the state of a hook and the counts of its filters, by its name; a new hook starts at zero."""
    for listener in entry.listeners:
        for filter_ in listener.filters:
            filter_.begin(s)
    if (state := find_state(entry, contents)) is not None and hasattr(entry.hook, "load_state_dict"):
        with naming(entry, "load_state_dict", s):
            load_hook(entry, state)
    for listener, states in zip(
        entry.listeners, contents.get("filters", {}).get(entry.name, []), strict=False
    ):
        for filter_, state in zip(listener.filters, states, strict=False):
            # a filter with another interval starts at zero, because the saved count does not apply to it
            if state["of"] == f"{listener.event.name} {filter_.text}":
                filter_.load_state_dict(state)


def find_state(entry: Any, contents: dict[str, Any]) -> Any:
    """Return the saved state of a hook: by its name, or by the key that another package gives it."""
    states = contents.get("hooks", {})
    if isinstance(entry.hook, KeyedState):
        return entry.hook.find_state(states, entry.name)
    return states.get(entry.name)


def load_hook(entry: Any, saved: Any) -> None:
    """Load the state of a hook. For a built-in hook, first refuse state that it cannot have written."""
    hook = entry.hook
    if not type(hook).__module__.startswith("hookline.hooks."):
        hook.load_state_dict(saved)
        return
    try:
        check_like(saved, hook.state_dict(), f"the state of {entry.name!r}")
        hook.load_state_dict(saved)
    except HooklineError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"The state of {entry.name!r} cannot be restored: {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def restoring(path: Any, what: str) -> Iterator[None]:
    """Turn an error inside the context into a CheckpointError that names the checkpoint."""
    try:
        yield
    except CheckpointError as error:
        if shown(path) in str(error):
            raise
        raise CheckpointError(f"{shown(path)} cannot be restored: {error}") from error.__cause__
    except HooklineError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{shown(path)} cannot be restored, {what} in it does not fit this run: "
            f"{type(error).__name__}: {error}"
        ) from error


def restore_progress(run: Run) -> None:
    """Restore optimizers, schedulers, the accumulation window, the log and the random number state."""
    s, contents = run.state, run.resume.contents
    is_late = reads_late(run, sharded_tensors(run.module))
    if is_late:
        restore_buffers(run)
    for entry in s.hooks.in_order():
        if isinstance(entry.hook, HookAdapter):
            entry.hook.before_optimizers()
    run.traits.rules.match_optimizers(
        run, functools.partial(refuse_other_optimizers, contents["kinds"], kinds(s), run.resume.path)
    )
    with restoring(run.resume.path, "the state of an optimizer or a schedule"):
        for optimizer, saved in zip(s.optimizers, contents["optimizers"], strict=True):
            if is_late:
                materialize_optimizer(saved, optimizer)
            load_optimizer(optimizer, saved, keeps_types=not changes_types(run))
        for scheduler, saved in zip(s.schedulers, contents["schedulers"], strict=True):
            load_scheduler(scheduler, saved)
        run.strategy.precision.load_state_dict(contents["precision"])
        if run.data.router is not None:
            run.data.router.load_state_dict(contents["feeding"])
    with restoring(run.resume.path, "the accumulation window, or what was logged,"):
        if contents["window"].pop("is_lost", False):
            restart_window(run)
        restore_window(run, contents["window"])
        s.log.newest.raw().update(contents["metrics"])
        s.log.load_state_dict(contents["log"])
    with restoring(run.resume.path, "the state of a metric object"):
        restore_metric_objects(run)
    report_changes(run, contents.get("settings"))
    if contents["rng"] is None:  # a new rank gets random numbers that no other rank has
        seed_rank(key_of("joined", s.batches_seen), run.strategy.ranks.data_rank)
        contents["rng"] = rng_state()
    with restoring(run.resume.path, "the state of a random stream"):
        set_rng_state(contents["rng"])
    if contents["position"].get("owes_schedulers"):
        advance_on_metric(run)  # saved at the end of an epoch, before the schedulers that use its metrics
    run.resume.keep_needed()
    run.saves.on_disk = run.stamp


def refuse_other_optimizers(saved: list[str] | None, here: list[str], path: Any) -> None:
    """Raise if the checkpoint is of a run with other optimizers or schedulers.

    saved, here: what `kinds` returned there, None if it is not known, and what it returns here.
    """
    if saved is not None and saved != here:
        was, now = (", ".join(map(str, each)) or "none" for each in (saved, here))
        raise CheckpointError(
            f"{shown(path)} is of a run with other optimizers or schedulers. There: {was}. Here: {now}. "
            "Resume with the same ones, or load only its weights: hookline.load_weights(module, path)."
        )


def restore_window(run: Run, saved: dict[str, Any]) -> None:
    """Reopen the accumulation window that the run was in."""
    window, grads = run.window, saved.get("gradients", {})
    by = saved.get("by", "batches")  # older checkpoints do not have it
    if by != window.by:
        if saved.get("batches"):
            raise CheckpointError(
                f"{shown(run.resume.path)} was made inside an accumulation window with accumulate_by={by!r}, "
                f"and this run has {window.by!r}. Resume with {by!r}, or from a checkpoint between two "
                "windows, such as one of an epoch's end."
            )
        return
    for name, value in saved.items():
        if name != "gradients":
            setattr(window, name, value)
    if window.batches:
        run.strategy.reopen_window()
    put_gradients(run.module, run.state.wrapped_model, grads)
    if run.gradient_sync is not None:
        run.gradient_sync.is_clear = bool(grads)


def restart_window(run: Run) -> None:
    """Continue a window whose gradients the file does not hold, with an update after as many batches."""
    window, size = run.window, run.traits.accumulate
    window.batches = run.progress.position % size
    if window.batches:
        window.size = size
        log.warning(
            "%s was saved inside an accumulation window, without its gradients. Its update is made with the "
            "last %d of its %d batches, as in Lightning.",
            shown(run.resume.path),
            size - window.batches,
            size,
        )


def restore_metric_objects(run: Run) -> None:
    """Restore the metric objects (torchmetrics); warn of those whose values of this epoch are lost."""
    s, where = run.state, shown(run.resume.path)
    warn = log.warning if s.rank == 0 else log.debug
    saved = run.resume.contents.get("metric_objects", {})  # older checkpoints have none
    if saved is None:
        warn(
            "%s was written by another number of ranks, whose metric objects (torchmetrics) cannot be "
            "combined: their values of this epoch cover only the batches after it.",
            where,
        )
    elif lost := s.log.load_object_state(run.module, saved) if saved else []:
        warn(
            "%s does not hold the state of these metric objects, so their values of this epoch cover only "
            "the batches after it: %s. Objects of torchmetrics are restored if they are attributes of the "
            "module, others if they also have state_dict and load_state_dict.",
            where,
            ", ".join(lost),
        )


@torch.no_grad()
def restore_buffers(run: Run) -> None:
    """Restore each rank's own buffers again, because DDP has replaced them by those of rank zero."""
    for name, buffer in run.module.named_buffers():
        saved = run.resume.contents["module"].get(name)
        if isinstance(saved, Tensor) and not is_dtensor(saved) and saved.shape == buffer.shape:
            buffer.copy_(saved)


def changes_types(run: Run) -> bool:
    """Return whether parameters have other types than in the checkpoint, because the precision differs."""
    saved, now = run.resume.contents.get("settings"), run.strategy.precision.name
    was = str(saved.get("precision")) if isinstance(saved, dict) else ""  # a damaged file may hold anything
    return was != now and (was in TRUE or now in TRUE)


def load_optimizer(optimizer: Any, saved: dict[str, Any], *, keeps_types: bool = True) -> None:
    """Load the state of an optimizer. Torch casts state to the parameter's type.

    keeps_types: restore the types of the checkpoint, because an optimizer may keep state in another type.
    """
    check_groups(saved["param_groups"], optimizer.param_groups)
    # not strict: torch reports a different number of groups
    for theirs, ours in zip(saved["param_groups"], optimizer.param_groups, strict=False):
        check_like({**theirs, "params": []}, {**ours, "params": []}, "param_groups", loose=True)
    names = [name for group in saved["param_groups"] for name in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if type(optimizer).__module__.startswith("torch.optim."):
        for name, parameter in zip(names, parameters, strict=False):
            check_moments(saved["state"].get(name, {}), parameter)
    optimizer.load_state_dict(saved)
    if not keeps_types:
        return
    for name, parameter in zip(names, parameters, strict=True):
        held = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(name, {}).items():
            if (
                isinstance(value, Tensor)
                and isinstance(held.get(key), Tensor)
                and held[key].dtype != value.dtype
            ):
                held[key] = value.to(held[key].device, copy=True)


def check_groups(saved: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Refuse a checkpoint in which a named parameter is in another group, or at another place in it.

    Torch restores by position, so a parameter would get the moments and settings of another one.
    """
    there, here = (
        {
            name: (number, place, group.get("name") or number)
            for number, group in enumerate(each)
            for place, name in enumerate(group.get("param_names") or ())
        }
        for each in (saved, groups)
    )
    if not there or not here:  # one of them does not have names
        return
    for name in here | there:
        if there.get(name) != here.get(name):
            was, now = (
                f"group {each[name][2]!r}, at place {each[name][1]}" if name in each else "no group"
                for each in (there, here)
            )
            raise CheckpointError(
                f"its parameter groups differ from those of this run: {name} is in {was} in the checkpoint, "
                f"and in {now} here. Resume with the same parameters in the same groups and order, or load "
                "only its weights: hookline.load_weights(module, path)."
            )


MOMENT_KEYS = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_inf",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "sum",
    "prev",
    "step_size",
    "ax",
)
"""State of torch's own optimizers that has the shape of its parameter."""


def check_moments(state: dict[str, Any], parameter: Tensor) -> None:
    """Refuse moments of another shape, which torch would load and then fail at the next update."""
    for key in MOMENT_KEYS:
        if state.get(key) is not None and getattr(state[key], "shape", None) != parameter.shape:
            raise CheckpointError(
                f"its optimizer has {key} {described(state[key])} for a parameter {described(parameter)}. "
                "Pass the same parameters in the same order to the optimizer."
            )
    step = state.get("step", 0)
    if not (step.numel() == 1 if isinstance(step, Tensor) else is_number(step)):
        raise CheckpointError(f"its optimizer has a step {described(step)}, which is not one number.")


def load_scheduler(scheduler: Any, saved: Any) -> None:
    """Load the state of a scheduler. Refuse entries that would replace a method or the optimizer, because
    torch makes an attribute of every entry.
    """
    now = scheduler.state_dict()
    if isinstance(saved, dict) and isinstance(now, dict):
        for name in saved:
            if name not in now and (
                name == "optimizer" or callable(getattr(type(scheduler), str(name), None))
            ):
                raise CheckpointError(
                    f"the state of {type(scheduler).__name__} has an entry {name!r}, which would replace a "
                    "method or the optimizer."
                )
    check_like(saved, now, type(scheduler).__name__)
    scheduler.load_state_dict(saved)


def restore_counters(run: Run) -> None:
    """Restore the counters and the position of the run."""
    s, contents = run.state, run.resume.contents
    if "imported_from" in contents:
        if run.stage != "fit":
            return  # an evaluation needs the weights only
        raise CheckpointError(
            f"{shown(run.resume.path)} has only weights, imported from another tool: no run can be resumed "
            "from it. To start with them, call hookline.load_weights(module, path) before fit."
        )
    if "position" not in contents:
        raise CheckpointError(
            f"{shown(run.resume.path)} was written by a hookline.Line, for a loop of its own: "
            "line.load_checkpoint(path) resumes from it, hookline.load_weights(module, path) loads its "
            "weights."
        )
    s.counts.load_state_dict(contents["counters"])
    run.progress.load_state_dict(contents["position"])
    if run.stage == "fit" and "order" in contents["position"]:
        from hookline.training.samples import order_of

        order_of(run).load_state_dict(contents["position"]["order"])
