"""The control commands: checked in the server's thread, executed on the main thread of every rank."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
import math
import os
import stat
import sys
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookline.control.learning_rate import RateChange
from hookline.engine.filters import SECONDS, Filter, FilterSettings, parse_interval
from hookline.engine.hook import Hook, snake_case
from hookline.engine.hook_list import Entry, HookList
from hookline.engine.listener import Listener
from hookline.run.run import Run
from hookline.run.save_request import Saved
from hookline.run.state import progress
from hookline.util.errors import HookError, closest
from hookline.util.urls import is_url, shown

# ---- Attach a hook from a file


LARGEST_FILE = 1_000_000
LONGEST_HOOK_NAME = 200
MARKED = "__hookline_attached__"
"""The attribute of an attached hook: its file, its class and the name that was given."""
_module_numbers = itertools.count(1)


def read_hook_file(asked: str, option: str = "attach") -> dict[str, Any]:
    """Read `FILE.py:Class` as plain data from which every rank makes the hook. This does not run the file.

    option: what the user passed it to, for messages.
    """
    path, _, name = asked.rpartition(":") if ":" in asked else (asked, "", "")
    file = Path(path)
    if file.suffix != ".py" or (name and not name.isidentifier()):
        raise HookError(f"{option} {asked!r}: give a file and a class in it, such as probe.py:Probe.")
    try:
        about = file.stat()
        if not stat.S_ISREG(about.st_mode):  # reading a pipe would wait for ever
            raise HookError(f"{option} {asked!r}: {file} is not a regular file.")
        if about.st_size > LARGEST_FILE:
            raise HookError(
                f"{option} {asked!r}: the file has {about.st_size:,} bytes; allowed: at most "
                f"{LARGEST_FILE:,}."
            )
        source = file.read_text(encoding="utf-8")
        compile(source, str(file), "exec")
    except FileNotFoundError:
        near = [each.name for each in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise HookError(f"{option} {asked!r}: {file} does not exist.{closest(file.name, near)}") from None
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise HookError(f"{option} {asked!r}: {type(error).__name__}: {error}") from None
    return {
        "file": str(file),
        "class": name,
        "source": source,
        "sha256": hashlib.sha256(source.encode()).hexdigest(),
    }


def check_name(name: Any) -> None:
    """Raise for a name that a table or a command line could not show."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > LONGEST_HOOK_NAME:
        shown = repr(name)
        shown = shown if len(shown) <= LONGEST_HOOK_NAME else f"{shown[:LONGEST_HOOK_NAME]}…"
        raise HookError(
            f"attach: the name {shown} must be one line of text with at most {LONGEST_HOOK_NAME} characters."
        )


def make_hook(about: dict[str, Any]) -> Hook:
    """Run the file's source in a new module, and make the hook."""
    file = Path(about["file"])
    module = types.ModuleType(f"hookline_attached_{next(_module_numbers)}_{snake_case(file.stem)}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses look there for their own module
    exec(compile(about["source"], str(file), "exec"), vars(module))
    cls = _choose(module, file.name, str(about["class"]))
    try:
        hook = cls()
    except TypeError as error:
        raise HookError(
            f"{cls.__name__} cannot be created without arguments ({error}); give them defaults."
        ) from error
    check_name(about["name"] or hook.name)
    setattr(hook, MARKED, (str(file), cls.__name__, about["name"]))
    return hook


def attached_hooks(hooks: HookList) -> list[Entry]:
    """Return the hooks that were attached from outside."""
    return [entry for entry in hooks.entries() if hasattr(entry.hook, MARKED)]


def earlier_attached(hook: Hook, name: str | None, hooks: HookList) -> list[Entry]:
    """Return the attached hooks that this one replaces: by name if it has one, else by file and class."""
    if name:
        return [entry for entry in attached_hooks(hooks) if entry.name == name]
    return [entry for entry in attached_hooks(hooks) if getattr(entry.hook, MARKED) == getattr(hook, MARKED)]


def _choose(module: types.ModuleType, file: str, wanted: str) -> type[Hook]:
    """Return the requested class; without a name, the only hook class in the module."""
    own = {
        name: each
        for name, each in vars(module).items()
        if inspect.isclass(each) and each.__module__ == module.__name__
    }
    hooks = {name: each for name, each in own.items() if issubclass(each, Hook)}
    if not hooks:
        raise HookError(f"{file} has no class that derives from hookline.Hook.")
    if not wanted and len(hooks) > 1:
        raise HookError(
            f"{file} has several hooks; name one: {', '.join(f'{file}:{name}' for name in hooks)}."
        )
    if wanted in own and wanted not in hooks:
        raise HookError(
            f"{wanted} in {file} does not derive from hookline.Hook. Hooks in it: {', '.join(hooks)}."
        )
    if wanted and wanted not in hooks:
        raise HookError(
            f"{file} has no hook {wanted!r}.{closest(wanted, hooks)} Hooks in it: {', '.join(hooks)}."
        )
    return hooks[wanted or next(iter(hooks))]


# ---- Change how often a hook is called


INTERVAL_ATTRIBUTES = ("every", "log_frequency")
"""Attributes in which a hook, built-in or the user's, keeps an interval that it counts itself."""
REPEATED = ("batch", "window", "update")
"""The parts of the lifecycle whose events repeat, so that an interval makes sense."""


def interval_of(entry: Entry) -> str:
    """Return the interval of a hook, such as `every 200 steps`; empty if it is always called."""
    texts = [each.text for listener in entry.listeners for each in listener.filters if _is_interval(each)]
    if texts:
        return ", ".join(dict.fromkeys(texts))
    name = _own_interval(entry.hook)
    if not name:
        return ""
    value = getattr(entry.hook, name)
    return f"every {value:g} seconds" if isinstance(value, float) else f"every {value}"


def check_interval(entry: Entry, interval: int | str) -> None:
    """Raise for an interval that `change_interval` could not set, before the ranks receive the command."""
    _, unit = parse_interval(interval, "every")
    if any(_is_interval(each) for listener in entry.listeners for each in listener.filters):
        return
    if own := _own_interval(entry.hook):
        in_seconds = isinstance(getattr(entry.hook, own), float)
        if in_seconds is not (unit in SECONDS) or (not in_seconds and unit not in ("call", "step", "batch")):
            right = "'30 seconds'" if in_seconds else "200, or '200 steps'"
            raise HookError(
                f"hook {entry.name!r} counts by itself ({own}={getattr(entry.hook, own)!r}): "
                f"every={interval!r} does not fit; use for example {right}."
            )
    elif not _repeated_listeners(entry):
        events = ", ".join(each.event.name for each in entry.listeners) or "no events"
        raise HookError(
            f"hook {entry.name!r} listens to {events}, which do not repeat with every batch, so "
            f"every={interval!r} would change nothing. Use disable to switch it off."
        )


def change_interval(plan: Any, entry: Entry, interval: int | str, s: Any) -> None:
    """Set how often a hook is called, counted from now.

    It replaces the hook's own intervals (`@every`, or an attribute that it counts by). A hook without one
    gets the interval at each event that repeats with every batch; its start and end events stay as they are.
    """
    check_interval(entry, interval)
    number, unit = parse_interval(interval, "every")
    filtered = [each for each in entry.listeners if any(_is_interval(one) for one in each.filters)]
    if not filtered and (own := _own_interval(entry.hook)):
        setattr(entry.hook, own, number * SECONDS[unit] if unit in SECONDS else int(number))
        return
    for listener in filtered or _repeated_listeners(entry):
        kept = [each for each in listener.filters if not _is_interval(each)]
        made = FilterSettings(every=interval).filters()
        for new_filter in made:
            new_filter.begin(s)
        listener.filters = [*kept, *made]
        if listener in plan:  # a disabled listener is composed again when it is enabled
            plan.remove([listener])
            plan.add([listener])


def _is_interval(each: Filter) -> bool:
    return each.text.startswith("every ")


def _repeated_listeners(entry: Entry) -> list[Listener]:
    return [each for each in entry.listeners if each.event.inside in REPEATED]


def _own_interval(hook: Any) -> str:
    """Return the name of the attribute that holds the hook's own interval; empty if it has none."""
    numbers = (name for name in INTERVAL_ATTRIBUTES if type(getattr(hook, name, None)) in (int, float))
    return next(numbers, "")


PlainData = dict[str, Any]
log = logging.getLogger("hookline")


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the control socket."""

    check: Callable[[Run, PlainData], PlainData]
    """Runs in the server's thread: returns what all ranks need to execute it, or raises."""
    do: Callable[[Run, PlainData], PlainData]
    """Runs on the main thread of every rank, at the same step: returns the answer, which is logged too."""
    answered: str = "at once"
    """When the client gets the answer: 'at once', when a checkpoint is 'saved', a validation is over
    ('validated'), or the run has 'ended'.
    """


# ---- enable, disable, every --------------------------------------------------------------------------------


def _check_hook(run: Run, asked: PlainData) -> PlainData:
    name = _required_text(asked, "hook")
    run.state.hooks.entry(name)
    return {"hook": name}


def _enable(run: Run, asked: PlainData) -> PlainData:
    run.state.hooks.enable(asked["hook"])
    return {"hook": asked["hook"]}


def _disable(run: Run, asked: PlainData) -> PlainData:
    run.state.hooks.disable(asked["hook"])
    return {"hook": asked["hook"]}


def _check_every(run: Run, asked: PlainData) -> PlainData:
    interval = asked.get("interval")
    if isinstance(interval, str) and interval.strip().isdecimal():
        interval = int(interval)
    entry = run.state.hooks.entry(_required_text(asked, "hook"))
    check_interval(entry, interval)  # type: ignore[arg-type]  # it raises if this is not an interval
    return {"hook": entry.name, "interval": interval}


def _every(run: Run, asked: PlainData) -> PlainData:
    entry = run.state.hooks.entry(asked["hook"])
    change_interval(run.plan, entry, asked["interval"], run.state)
    return {"hook": asked["hook"], "interval": asked["interval"]}


# ---- checkpoint, stop, attach, detach ----------------------------------------------------------------------


def _check_nothing(run: Run, asked: PlainData) -> PlainData:
    return {}


def _save_checkpoint(run: Run, asked: PlainData) -> PlainData:
    # written at the next save point: at this step, or at the first of a new epoch
    run.trainer.save_checkpoint()
    return {}


def _stop(run: Run, asked: PlainData) -> PlainData:
    run.state.request_stop("requested by hookline control")
    return {}


def _check_file(run: Run, asked: PlainData) -> PlainData:
    name = asked.get("name")
    if name is not None:
        check_name(name)
        hooks = run.state.hooks
        if name in hooks and name not in [each.name for each in attached_hooks(hooks)]:
            raise HookError(
                f"attach: name={name!r} is the name of a hook of the program. Use a new name, or that of a "
                f"hook that was attached before. Hooks: {', '.join(each.name for each in hooks.entries())}."
            )
    return {**read_hook_file(_required_text(asked, "file")), "name": name}


def _attach(run: Run, asked: PlainData) -> PlainData:
    """Add the hook on all ranks or on none, because all ranks must have the same plan.

    It replaces the hook that was attached from the same file before.
    """
    ranks, hooks = run.strategy.ranks, run.state.hooks
    hook: Any = None
    problem = ""
    try:
        hook = make_hook(asked)
    except (Exception, SystemExit) as error:  # a script that ends itself must not end the run
        problem = _problem(error)
    _raise_first(ranks.gather(problem))
    handle, earlier = None, earlier_attached(hook, asked["name"], hooks)
    put_back = hooks.set_aside(earlier)
    _tear_down_removed(run)  # before the new hook is set up, because both may need the same file or port
    try:
        handle = run.trainer.add_hook(hook, asked["name"])
    except (Exception, SystemExit) as error:
        problem = _problem(error)
    problems = ranks.gather(problem)
    if any(problems):
        if handle is not None:
            handle.remove()
        put_back()
    _raise_first(problems)
    assert handle is not None
    run.trainer.auditing.watch(handle.entry)
    return {
        "hook": handle.name,
        "file": asked["file"],
        "class": type(hook).__name__,
        "sha256": asked["sha256"],
    }


def _check_attached(run: Run, asked: PlainData) -> PlainData:
    name, hooks = _required_text(asked, "hook"), run.state.hooks
    names = [each.name for each in attached_hooks(hooks)]
    if hooks.entry(name).name not in names:
        raise HookError(
            f"detach: {name!r} is a hook of the program and was not attached from outside; use disable to "
            f"switch it off. Attached: {', '.join(names) or 'none'}."
        )
    return {"hook": name}


def _detach(run: Run, asked: PlainData) -> PlainData:
    run.state.hooks.remove(asked["hook"])
    _tear_down_removed(run)
    return {"hook": asked["hook"]}


# ---- validate, lr ------------------------------------------------------------------------------------------


def _check_validation(run: Run, asked: PlainData) -> PlainData:
    # before the data is loaded it is not known; the command is checked again when it is executed
    if "val" in run.data.loaders and not run.traits.rules.has_validation(run):
        if run.options.limit_val_batches == 0:
            why = "limit_val_batches=0 switches validation off"
        elif getattr(run.steps, "validation_step", None) is None:
            why = "the module has no validation_step"
        else:
            why = "pass val= to fit, or add val_dataloader to the module or the data module"
        raise HookError(f"validate: this run has no validation data: {why}.")
    return {}


def _request_validation(run: Run, asked: PlainData) -> PlainData:
    _check_validation(run, asked)
    run.progress.validation_requested = True
    return {}


def _check_rate(run: Run, asked: PlainData) -> PlainData:
    change = RateChange.parse(asked.get("value"), asked.get("group"))
    if run.state.optimizers:  # before they are made, nothing is known about them
        change.check(run)
    return {"value": change.text, "group": asked.get("group")}


def _set_rate(run: Run, asked: PlainData) -> PlainData:
    groups = RateChange.parse(asked["value"], asked["group"]).apply(run)
    run.progress.mark_changed()  # a checkpoint of this step that was saved before does not have it
    changes = dict.fromkeys(f"{each['before']:.6g} to {each['lr']:.6g}" for each in groups)
    said = f"from {', '.join(changes)}, from step {run.state.step + 1} on"
    return {"value": asked["value"], "group": asked["group"], "groups": groups, "said": said}


def _tear_down_removed(run: Run) -> None:
    """Call the teardown of hooks that were removed. A failure there is logged and does not end the run."""
    try:
        run.participants.teardown_removed()
    except Exception as error:
        log.warning("a hook that was detached failed in its teardown: %s", _problem(error))


def _problem(error: BaseException) -> str:
    return str(error) if isinstance(error, HookError) else f"{type(error).__name__}: {error}"


def _raise_first(problems: list[str]) -> None:
    """Raise the first problem of any rank."""
    for rank, problem in enumerate(problems):
        if problem:
            raise HookError(f"on rank {rank}: {problem}" if len(problems) > 1 else problem)


COMMANDS: dict[str, Command] = {
    "enable": Command(_check_hook, _enable),
    "disable": Command(_check_hook, _disable),
    "every": Command(_check_every, _every),
    "checkpoint": Command(_check_nothing, _save_checkpoint, answered="saved"),
    "stop": Command(_check_nothing, _stop, answered="ended"),
    "attach": Command(_check_file, _attach),
    "detach": Command(_check_attached, _detach),
    "validate": Command(_check_validation, _request_validation, answered="validated"),
    "lr": Command(_check_rate, _set_rate),
}


def check_request(run: Run, asked: PlainData) -> PlainData:
    """Return what every rank needs to execute the request, or raise a HookError that says why it cannot."""
    name = _required_text(asked, "command")
    if name not in COMMANDS:
        known = ["status", *COMMANDS]
        raise HookError(
            f"{name!r} is not a control command.{closest(name, known)} Commands: {', '.join(known)}."
        )
    return {"command": name, **COMMANDS[name].check(run, asked)}


def execute(run: Run, asked: PlainData) -> PlainData:
    """Execute a command at the same step on all ranks, and return the answer. Errors go into the answer."""
    s = run.state
    done: PlainData = {"command": asked["command"], "step": s.step, "epoch": s.epoch}
    try:
        done |= COMMANDS[asked["command"]].do(run, asked)
    except Exception as error:
        done["error"] = _problem(error)
    if s.rank == 0:
        s.logger.log_event("control", done)
    return done


# ---- answers that say what is saved ------------------------------------------------------------------------


def saved_answer(done: PlainData, saved: Saved) -> PlainData:
    """Return the answer to `checkpoint`: the path of the durable checkpoint, or the error."""
    if saved.error is not None:
        return {**done, "error": str(saved.error)}
    path = _named_path(saved.path)
    return {**done, "path": path, "saved_step": saved.step, "said": f"step {saved.step} is saved in {path}"}


def validated_answer(done: PlainData, metrics: Mapping[str, float] | None) -> PlainData:
    """Return the answer to `validate`: the metrics of the validation. None: there was no data for it."""
    if metrics is None:
        return {**done, "error": "validate: there is no validation data."}
    values = {name: float(value) for name, value in metrics.items()}
    shown = ", ".join(f"{name} {value:.6g}" for name, value in values.items()) or "no metrics"
    return {
        **done,
        # JSON has no NaN; the log has text in its place too
        "metrics": {name: value if math.isfinite(value) else str(value) for name, value in values.items()},
        "said": f"{shown} at step {done['step']}",
    }


def ended_answer(run: Run, done: PlainData) -> PlainData:
    """Return the answer to `stop` after the run has ended: the last step, and the newest checkpoint."""
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
    """Return an absolute path, because the client may run in another directory; a URL without secrets."""
    return shown(path) if is_url(path) else os.path.abspath(path)


# ---- status ------------------------------------------------------------------------------------------------


def job_status(run: Run) -> PlainData:
    """Return the progress of the job and the cost of its hooks.

    It is read from another thread while the job trains, so the numbers may differ by one call.
    """
    s = run.state
    elapsed = max(1e-9, time.monotonic() - run.traits.started)
    # an epoch that has just ended counts as a whole
    batches = run.progress.position if s.epoch == s.epochs_seen else 0
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
        "hooks": [
            _hook_status(entry, elapsed, run.plan.accounting)
            for entry in s.hooks.entries()
            if not getattr(entry.hook, "is_internal", False)  # of the command line, which needs it
        ],
    }


def _hook_status(entry: Any, elapsed: float, is_measured: bool) -> PlainData:
    accounts = [each.account for each in entry.listeners if is_measured or each.allowance is not None]
    spent = sum(each.total for each in accounts) / 1e9
    costs = {
        "calls": sum(each.calls for each in accounts),
        "total": spent,
        "worst": max((each.worst for each in accounts), default=0) / 1e9,
        "share": spent / elapsed,
    }
    return {
        "name": entry.name,
        "class": type(entry.given).__name__,
        "enabled": entry.enabled,
        "every": interval_of(entry),
        "attached": hasattr(entry.hook, MARKED),
        "events": [each.event.name for each in entry.listeners],
        # None: not measured, because of audit={"costs": False}; a hook with a budget is measured nevertheless
        **(costs if is_measured or accounts else dict.fromkeys(costs)),
    }


def _required_text(asked: PlainData, key: str) -> str:
    value = asked.get(key)
    if not isinstance(value, str) or not value:
        raise HookError(f"{asked.get('command', 'a request')} needs {key!r}, a string; got {value!r}.")
    return value
