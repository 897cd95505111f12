"""What a running job can be asked for. Checked in the thread that listens, carried out on every rank's main
thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline.checkpoint.saves import Saved
from hookline.control.attaching import MARK, attached, check_name, make_hook, read_file, replaced_by
from hookline.control.intervals import change_interval, check_interval, interval_of
from hookline.errors import HookError, closest
from hookline.loops.run import Run
from hookline.state import progress
from hookline.urls import is_url, shown

Plain = dict[str, Any]
log = logging.getLogger("hookline")


@dataclass(frozen=True, slots=True)
class Command:
    """Something that can be asked for."""

    check: Callable[[Run, Plain], Plain]
    """In the thread that listens: what all ranks need to know to do it. Refuses what cannot be done."""
    do: Callable[[Run, Plain], Plain]
    """On the main thread of every rank, at the same step: what is answered and logged."""
    answered: str = "at once"
    """When the caller gets the answer: 'at once', when a checkpoint is 'saved', or when the run has 'ended'.
    """


# ---- switching hooks on and off ----------------------------------------------------------------------------


def _named(run: Run, asked: Plain) -> Plain:
    name = _text(asked, "hook")
    run.state.hooks.entry(name)
    return {"hook": name}


def _enable(run: Run, asked: Plain) -> Plain:
    run.state.hooks.enable(asked["hook"])
    return {"hook": asked["hook"]}


def _disable(run: Run, asked: Plain) -> Plain:
    run.state.hooks.disable(asked["hook"])
    return {"hook": asked["hook"]}


def _check_every(run: Run, asked: Plain) -> Plain:
    interval = asked.get("interval")
    if isinstance(interval, str) and interval.strip().isdecimal():
        interval = int(interval)
    entry = run.state.hooks.entry(_text(asked, "hook"))
    check_interval(entry, interval)  # type: ignore[arg-type]  # it refuses whatever is no interval
    return {"hook": entry.name, "interval": interval}


def _every(run: Run, asked: Plain) -> Plain:
    entry = run.state.hooks.entry(asked["hook"])
    change_interval(run.plan, entry, asked["interval"], run.state)
    return {"hook": asked["hook"], "interval": asked["interval"]}


# ---- checkpoints, stopping, a hook from a file -------------------------------------------------------------


def _nothing(run: Run, asked: Plain) -> Plain:
    return {}


def _checkpoint(run: Run, asked: Plain) -> Plain:
    # written at the next save point: at this step, or at the first of a new epoch
    run.trainer.save_checkpoint()
    return {}


def _stop(run: Run, asked: Plain) -> Plain:
    run.state.request_stop("asked for by hookline control")
    return {}


def _check_file(run: Run, asked: Plain) -> Plain:
    name = asked.get("name")
    if name is not None:
        check_name(name)
        hooks = run.state.hooks
        if name in hooks and name not in [each.name for each in attached(hooks)]:
            raise HookError(
                f"attach: name={name!r} must be a text that no hook is called by yet, or the name of one "
                f"that was attached before. Hooks: {', '.join(each.name for each in hooks.entries())}."
            )
    return {**read_file(_text(asked, "file")), "name": name}


def _attach(run: Run, asked: Plain) -> Plain:
    """Add the hook on all ranks or on none, in place of what the same file was attached as before.

    A rank that cannot make it must not leave the others with another plan.
    """
    ranks, hooks = run.strategy.ranks, run.state.hooks
    hook: Any = None
    problem = ""
    try:
        hook = make_hook(asked)
    except (Exception, SystemExit) as error:  # a script that ends itself must not end the run
        problem = _problem(error)
    _agree(ranks.gather(problem))
    handle, earlier = None, replaced_by(hook, asked["name"], hooks)
    put_back = hooks.set_aside(earlier)
    _tear_down_removed(run)  # before the new one is set up: both may want the same file or port
    try:
        handle = run.trainer.add_hook(hook, asked["name"])
    except (Exception, SystemExit) as error:
        problem = _problem(error)
    problems = ranks.gather(problem)
    if any(problems):
        if handle is not None:
            handle.remove()
        put_back()
    _agree(problems)
    assert handle is not None
    return {
        "hook": handle.name,
        "file": asked["file"],
        "class": type(hook).__name__,
        "sha256": asked["sha256"],
    }


def _check_attached(run: Run, asked: Plain) -> Plain:
    name, hooks = _text(asked, "hook"), run.state.hooks
    there = [each.name for each in attached(hooks)]
    if hooks.entry(name).name not in there:
        raise HookError(
            f"detach: {name!r} is a hook of the program, and was not attached from outside; disable "
            f"switches it off. Attached: {', '.join(there) or 'none'}."
        )
    return {"hook": name}


def _detach(run: Run, asked: Plain) -> Plain:
    run.state.hooks.remove(asked["hook"])
    _tear_down_removed(run)
    return {"hook": asked["hook"]}


def _tear_down_removed(run: Run) -> None:
    """Call the teardown of hooks that were removed; what fails there is of no consequence for the run."""
    try:
        run.participants.teardown_removed()
    except Exception as error:
        log.warning("a hook that was removed from outside failed in its teardown: %s", _problem(error))


def _problem(error: BaseException) -> str:
    return str(error) if isinstance(error, HookError) else f"{type(error).__name__}: {error}"


def _agree(problems: list[str]) -> None:
    """The first problem that a rank has."""
    for rank, problem in enumerate(problems):
        if problem:
            raise HookError(f"on rank {rank}: {problem}" if len(problems) > 1 else problem)


COMMANDS: dict[str, Command] = {
    "enable": Command(_named, _enable),
    "disable": Command(_named, _disable),
    "every": Command(_check_every, _every),
    "checkpoint": Command(_nothing, _checkpoint, answered="saved"),
    "stop": Command(_nothing, _stop, answered="ended"),
    "attach": Command(_check_file, _attach),
    "detach": Command(_check_attached, _detach),
}


def check(run: Run, asked: Plain) -> Plain:
    """What every rank needs to know; an error that teaches if it cannot be done."""
    name = _text(asked, "command")
    if name not in COMMANDS:
        known = ["status", *COMMANDS]
        raise HookError(
            f"A job cannot be asked for {name!r}.{closest(name, known)} It can: {', '.join(known)}."
        )
    return {"command": name, **COMMANDS[name].check(run, asked)}


def carry_out(run: Run, asked: Plain) -> Plain:
    """Do it, here and at the same step on all ranks; what is answered. Whatever goes wrong is told, never
    raised.
    """
    s = run.state
    done: Plain = {"command": asked["command"], "step": s.step, "epoch": s.epoch}
    try:
        done |= COMMANDS[asked["command"]].do(run, asked)
    except Exception as error:
        done["error"] = _problem(error)
    if s.rank == 0:
        s.logger.log_event("control", done)
    return done


# ---- what is on disk ---------------------------------------------------------------------------------------


def saved_answer(done: Plain, saved: Saved) -> Plain:
    """Return the answer to a request for a checkpoint, now that it is durable, or why it is not."""
    if saved.error is not None:
        return {**done, "error": str(saved.error)}
    path = _named_path(saved.path)
    return {**done, "path": path, "saved_step": saved.step, "said": f"step {saved.step} is saved in {path}"}


def ended_answer(run: Run, done: Plain) -> Plain:
    """Return the answer to a request to stop, now that the run is over: where it ended, and what of it is on
    disk.
    """
    s, saved = run.state, run.saves.newest
    is_saved = run.saves.on_disk == run.stamp
    path = saved.path if saved is not None else run.resume.path
    newest = _named_path(path) if path is not None else ""
    if is_saved:
        said = f"its last state is saved in {newest}"
    elif newest:
        of_step = f" of step {saved.step}" if saved is not None else ""
        said = f"its last state is not saved; the newest checkpoint is {newest}{of_step}"
    else:
        said = "its last state is not saved, and there is no checkpoint of it"
    answer = {
        **done,
        "step": s.step,
        "epoch": s.epoch,
        "status": s.status,
        "saved": is_saved,
        "path": newest or None,
        "saved_step": s.step if is_saved else saved.step if saved is not None else None,
    }
    if s.status == "error":
        return {**answer, "error": f"The run failed at step {s.step}: {said}."}
    return {**answer, "said": f"{s.status} at step {s.step}; {said}"}


def _named_path(path: Path | str) -> str:
    """Return a checkpoint's name for another process: whole, because that may be in another directory; a URL
    without secrets.
    """
    return shown(path) if is_url(path) else os.path.abspath(path)


# ---- looking -----------------------------------------------------------------------------------------------


def status(run: Run) -> Plain:
    """Where the job is and what its hooks have cost so far; read while it trains, so numbers may be a call
    apart.
    """
    s = run.state
    elapsed = max(1e-9, time.monotonic() - run.traits.started)
    batches = (
        run.progress.position if s.epoch == s.epochs_seen else 0
    )  # an epoch that has just ended counts as a whole
    return {
        "pid": os.getpid(),
        "status": s.status,
        "step": s.step,
        "epoch": s.epoch,
        "batch_idx": s.batch_idx,
        "position": s.position,
        "progress": progress(s.step, s.epochs_seen, batches),
        "max_steps": run.options.max_steps,
        "max_epochs": run.options.max_epochs,
        "world_size": s.world_size,
        "elapsed": elapsed,
        "stopping": s.should_stop,
        "hooks": [_about(entry, elapsed) for entry in s.hooks.entries()],
    }


def _about(entry: Any, elapsed: float) -> Plain:
    accounts = [each.account for each in entry.listeners]
    spent = sum(each.total for each in accounts) / 1e9
    return {
        "name": entry.name,
        "class": type(entry.given).__name__,
        "enabled": entry.enabled,
        "every": interval_of(entry),
        "attached": hasattr(entry.hook, MARK),
        "events": [each.event.name for each in entry.listeners],
        "calls": sum(each.calls for each in accounts),
        "total": spent,
        "worst": max((each.worst for each in accounts), default=0) / 1e9,
        "share": spent / elapsed,
    }


def _text(asked: Plain, key: str) -> str:
    value = asked.get(key)
    if not isinstance(value, str) or not value:
        raise HookError(f"{asked.get('command', 'a request')} needs {key!r}, a text; got {value!r}.")
    return value
