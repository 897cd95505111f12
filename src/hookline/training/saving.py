"""The loop's save points: what a checkpoint holds, when it is written, and what is told of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from hookline.checkpoint.background import BackgroundSaver
from hookline.checkpoint.contents import window_gradients
from hookline.checkpoint.files import write
from hookline.checkpoint.format import Packed
from hookline.checkpoint.rank_state import PerRankState, buffers_of
from hookline.data.seeding import rng_state
from hookline.engine.events import Event
from hookline.engine.hook_list import Entry
from hookline.engine.init_arguments import init_arguments
from hookline.engine.slots import Blame, accuse
from hookline.metrics.metric_log import Metrics
from hookline.run.commands import handles_command
from hookline.run.optimizers import bare
from hookline.run.record import note_saved
from hookline.run.run import Run, phase
from hookline.run.save_request import Saved, SaveRequest
from hookline.run.state import SAVING, State
from hookline.run.timer import timed
from hookline.training.first_batches import after_save, path_from
from hookline.training.run_events import edit_saved, report_saved
from hookline.util.errors import CheckpointError, HooklineError
from hookline.util.urls import shown

log = logging.getLogger("hookline")


@timed("saving")
def save_due(run: Run) -> None:
    """Write every checkpoint that was asked for; everyone has heard what they had to by now."""
    for _ in range(
        len(run.saves.requests)
    ):  # popped, not swapped: news may be added by another thread at any moment
        request = run.saves.requests.pop(0)
        if request is not None and not run.saves.is_final and _is_wanted(run, request):
            save(run, request)
    # else ranks know of it at different moments, and wait for the command
    if run.saves.background is None or run.strategy.ranks.alone:
        announce(run)


def _is_wanted(run: Run, request: SaveRequest) -> bool:
    """Return whether a request is honoured: a trial run leaves no checkpoint that a real one would resume
    from.
    """
    return not run.options.fast_dev_run or request.reason == "manual"


@phase(SAVING)
@timed("saving")
def save(run: Run, request: SaveRequest) -> None:
    """Put a checkpoint together, and write it or have it written in the background. All ranks do so at the
    same time.
    """
    s = run.state
    if request.reason == "exception" and not run.strategy.ranks.alone:
        log.warning(
            "%s is not saved after the failure: with several ranks a checkpoint needs all of them, and the "
            "others may not have failed. The newest checkpoint before it is whole.",
            shown(request.path),
        )
        return
    run.watch.settle(with_state=True)  # what is not finite never replaces a good checkpoint
    run.rows.reduce({}, "save")  # what hooks have logged and is waiting belongs to the time before
    try:
        path = path_of(run, request)
    except CheckpointError as error:
        run.saves.results.append(
            Saved("checkpoints/last", request.reason, s.step, error, run.stamp, request.is_automatic)
        )
        announce(run)
        return
    run.saves.count += 1
    contents = {**collect(run), "record": path_from(path, run)}
    after_save(run)
    whole = edit_saved(run, contents, path, request.reason)
    about = {
        **describe(s, request, run.identity.id),
        "saves": run.saves.count,
        "started_at": run.identity.started_at,
    }
    saved = Saved(path, request.reason, s.step, progress=run.stamp, is_automatic=request.is_automatic)
    in_background = (
        run.options.saving.write == "async"
        and run.stage == "fit"
        and request.reason not in ("signal", "exception")
    )
    finish_saving(
        run
    )  # one that is still being written is older: hooks hear of it before its name may be another's
    try:
        written = whole if run.strategy.ranks.alone else part_of_rank(run, whole, saved)
        if in_background:
            save_in_background(run, written, about, saved)
            return
        if isinstance(written, Packed):
            from hookline.checkpoint.rank_writer import write_on_all_ranks

            write_on_all_ranks(written, path, about, run.strategy.ranks, staging=run.run_dir)
        else:
            write(written, path, about, staging=run.run_dir)
    except CheckpointError as error:
        saved = replace(saved, error=error)
    run.saves.results.append(saved)
    run.saves.is_final = run.saves.is_final or (request.reason == "signal" and saved.error is None)
    announce(run)


def path_of(run: Run, request: SaveRequest) -> Path | str:
    """Return where a checkpoint goes that has no path of its own. That of a signal is the run's last: one
    write, not two.
    """
    if (
        run.saves.last is not None
        and request.path is None
        and (request.is_automatic or request.reason == "signal")
    ):
        return run.saves.last.path()  # type: ignore[no-any-return]
    return request.path or run.run_dir() / "checkpoints" / f"step-{run.state.step}"


def part_of_rank(run: Run, contents: dict[str, Any], saved: Saved) -> Packed:
    """What this rank writes of a checkpoint: its share, and what differs from rank zero's. All ranks must be
    at the same one.
    """
    ranks, parts, problem = run.strategy.ranks, None, ""
    try:
        parts = PerRankState(contents, buffers_of(run.module, contents["module"]))
    except CheckpointError as error:
        problem = str(error)
    sums = parts.sums if parts is not None and ranks.rank == 0 else None
    told = ranks.gather(
        {"asked": [str(saved.path), saved.reason, saved.step], "problem": problem, "sums": sums}
    )
    if any(each["asked"] != told[0]["asked"] for each in told):
        asked = ", ".join(
            f"rank {rank} {shown(path)} ({reason}, step {step})"
            for rank, (path, reason, step) in enumerate(each["asked"] for each in told)
        )
        raise HooklineError(
            f"The ranks are about to write different checkpoints: {asked}. Do they all have the same hooks?"
        )
    problems = [f"rank {rank}: {each['problem']}" for rank, each in enumerate(told) if each["problem"]]
    if problems or parts is None:
        raise CheckpointError(
            f"The checkpoint {shown(saved.path)} could not be put together: {'; '.join(problems)}"
        )
    return parts.for_rank(ranks.rank, told[0]["sums"])


def save_in_background(
    run: Run, contents: dict[str, Any] | Packed, about: dict[str, Any], saved: Saved
) -> None:
    """Training goes on as soon as everything is copied. At most one is being written at a time."""
    if run.saves.background is None:
        run.saves.background = BackgroundSaver(run.strategy.ranks)

    def tell(error: CheckpointError | None) -> None:
        run.saves.results.append(saved if error is None else replace(saved, error=error))
        if run.strategy.ranks.alone:
            run.saves.requests.append(None)
        elif run.state.rank == 0:  # all ranks tell their hooks at one and the same boundary
            run.participants.commands.send("announce")

    run.saves.background.start(contents, saved.path, about, tell, staging=run.run_dir)


@handles_command("announce")
def announce_together(run: Run, sender: int) -> None:
    """Rank zero has given a checkpoint its name; the others' threads are about to hear of it, if they have
    not.
    """
    finish_saving(run)


@timed("saving")
def finish_saving(run: Run) -> None:
    """Wait for what is being written in the background, and tell what became of it."""
    if run.saves.background is not None:
        run.saves.background.wait()
        announce(run)


def announce(run: Run) -> None:
    """Tell everyone of checkpoints that are durable by now, and do as chosen about those that are not."""
    while run.saves.results:
        saved = run.saves.results.pop(0)
        if run.participants.control is not None:
            run.participants.control.report_saved(saved)
        if run.saves.last is not None:
            run.saves.last.note(saved)
        if saved.error is None:
            run.saves.newest, run.saves.on_disk = saved, saved.progress
            note_saved(run, saved.path)
        report_saved(run, saved, run.options.saving.on_error)


def describe(s: State, request: SaveRequest, run: str) -> dict[str, Any]:
    """What the manifest says of a checkpoint, so that it can be judged without being read. run: what it is
    of.
    """
    return {
        "run": run,
        "step": s.step,
        "epoch": s.epoch,
        "epochs_seen": s.epochs_seen,
        "batches_seen": s.batches_seen,
        "reason": request.reason,
        "monitor": request.monitor,
        "metrics": dict(s.metrics.read()),
        "status": s.status,
        "world_size": s.world_size,
    }


def collect(run: Run) -> dict[str, Any]:
    """Everything a run needs to go on."""
    s = run.state
    entries = [*s.hooks.in_order(), *run.participants.module_hooks]
    whole = {
        "run": run.identity.id,
        "saves": run.saves.count,
        "world_size": s.world_size,
        "module": run.module.state_dict(),
        **made_with(run.module),
        "hooks": states_of(entries, s),
        "datamodule": run.datamodule.state_dict() if run.datamodule is not None else {},
        "optimizers": [each.state_dict() for each in s.optimizers],
        "schedulers": [each.state_dict() for each in s.schedulers],
        "kinds": kinds(s),
        "settings": run.identity.settings,
        "precision": run.strategy.precision.state_dict(),
        "counters": s.counts.state_dict(),
        "position": run.progress.state_dict(),
        "window": open_window(run),
        "log": s.log.state_dict(),
        "filters": {each.name: [counts_of(x) for x in each.listeners] for each in entries},
        "metrics": dict(s.metrics.read()),
        "loggers": s.logger.position(),
        # a resumed run whose data is not open yet: what it has drawn since is drawn again after the next
        # resume
        "rng": run.resume.contents["rng"] if "rng" in run.resume.contents else rng_state(),
        "loader": run.resume.contents["loader"]
        if "loader" in run.resume.contents
        else run.data.train.state_dict(s.epochs_seen, run.progress.position)
        if run.data.train is not None
        else None,
        "feeding": run.data.router.state_dict() if run.data.router is not None else {},
    }
    for name, before in run.progress.before_validation.items() if run.progress.validation_pending else ():
        # as if the validation that was cut short had never begun
        if name == "module":
            before = {
                key: each for key, each in before.items() if key in whole[name]
            }  # not all buffers are saved
        whole[name].update(Metrics(before).read() if name == "metrics" else before)
    return whole


def made_with(module: nn.Module) -> dict[str, Any]:
    """Return the constructor arguments that a `hookline.Module` records, so that `load_from_checkpoint` makes
    it again.
    """
    made = init_arguments(module)
    return {} if made is None else {"hparams": dict(made.recorded), "hparams_left_out": dict(made.left_out)}


def states_of(entries: Iterable[Entry], s: State) -> dict[str, Any]:
    """What hooks want to have kept, by their names; one that fails is named."""
    states = {}
    for each in entries:
        if hasattr(each.hook, "state_dict"):
            with naming(each, "state_dict", s):
                states[each.name] = each.hook.state_dict()
    return states


@contextlib.contextmanager
def naming(entry: Entry, method: str, s: State) -> Iterator[None]:
    """What fails meanwhile says whose method it was."""
    try:
        yield
    except Exception as error:
        accuse(
            error, Blame(f"hook {entry.name!r}", method), f"({type(entry.given).__name__}) at {s.position}"
        )
        raise


def kinds(s: State) -> list[str]:
    """The classes of the optimizers and schedulers: the state of one kind means nothing to another."""
    return [type(each).__name__ for each in (*map(bare, s.optimizers), *s.schedulers)]


def counts_of(listener: Any) -> list[dict[str, Any]]:
    """How far a listener's filters have counted, with what each was asked for: `every 2 steps`."""
    return [{"of": f"{listener.event.name} {each.text}", **each.state_dict()} for each in listener.filters]


SMALL = 1_000_000
"""Tensors of more elements are too large to be copied before every validation; hooks do not change them
during one.
"""


def state_before_validation(run: Run) -> dict[str, Any]:
    """The state of everyone who hears it, and the random streams: a validation that is cut short must leave
    no trace.
    """
    s = run.state
    hearers = [each for each in s.hooks.entries() if any(precedes_end(x.event) for x in each.listeners)]
    return {
        "hooks": frozen(states_of(hearers, s)),
        "filters": {each.name: [counts_of(x) for x in each.listeners] for each in hearers},
        "module": frozen(dict(run.module.named_buffers())),
        "log": frozen(s.log.state_dict()),
        "metrics": dict(s.metrics.raw()),
        "rng": rng_state(),
        "loggers": s.logger.position(),
    }


def precedes_end(event: Event) -> bool:
    """Whether an event of a validation comes before its end, which one that is cut short does not have."""
    return event.inside == "validation batch" or event.name in (
        "on_validation_start",
        "on_validation_epoch_start",
    )


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
        # the next window's unit comes from these; without them float16 could round otherwise after a resume
        return (
            {}
            if window.by == "batches"
            else {name: getattr(window, name) for name in ("by", "unit", "correction")}
        )
    has_gradients = window.count or (run.gradient_sync is not None and run.gradient_sync.is_clear)
    grads = window_gradients(run.module, run.state.wrapped_model) if has_gradients else {}
    facts = {name: getattr(window, name) for name in window.__slots__ if name != "weight"}
    return {**facts, "gradients": grads}
