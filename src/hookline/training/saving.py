"""The save points of the loop: what a checkpoint holds, when it is written, and the events about it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from hookline.checkpoint.background import BackgroundSaver
from hookline.checkpoint.base_weights import fingerprint, left_out_in
from hookline.checkpoint.contents import window_gradients
from hookline.checkpoint.files import write
from hookline.checkpoint.format import Packed
from hookline.checkpoint.rank_state import PerRankState, buffers_of
from hookline.data.seeding import rng_state
from hookline.engine.events import Event
from hookline.engine.hook_list import Entry
from hookline.engine.init_arguments import init_arguments
from hookline.engine.slots import FailureSource, record_failure
from hookline.metrics.metric_log import Metrics
from hookline.run.commands import handles_command
from hookline.run.optimizers import bare
from hookline.run.record import record_checkpoint
from hookline.run.run import Run, phase
from hookline.run.save_request import Saved, SaveRequest
from hookline.run.state import SAVING, State
from hookline.run.timer import timed
from hookline.training.first_batches import after_save, path_from
from hookline.training.run_events import edit_saved, report_saved
from hookline.util.errors import CheckpointError, HooklineError, OptionError
from hookline.util.urls import shown

log = logging.getLogger("hookline")


@timed("saving")
def save_due(run: Run) -> None:
    """Write every requested checkpoint. Called where no event is being emitted."""
    for _ in range(len(run.saves.requests)):  # popped, because another thread may append at any moment
        request = run.saves.requests.pop(0)
        if request is None or run.saves.is_final:
            continue
        # a trial run writes no checkpoint that a real run would resume from
        if not run.options.fast_dev_run or request.reason == "manual":
            save(run, request)
    # with a background save on several ranks, the command "announce" reaches all ranks at the same batch
    if run.saves.background is None or run.strategy.ranks.alone:
        announce(run)


@phase(SAVING)
@timed("saving")
def save(run: Run, request: SaveRequest) -> None:
    """Collect the contents of a checkpoint and write it, at once or in the background, on all ranks."""
    s = run.state
    if request.reason == "exception" and not run.strategy.ranks.alone:
        log.warning(
            "%s is not saved after the failure: with several ranks a checkpoint needs all of them, and the "
            "others may not have failed. The newest checkpoint before it is complete.",
            shown(request.path),
        )
        return
    run.watch.check_now(with_state=True)  # values that are not finite must not replace a good checkpoint
    run.rows.reduce({}, "save")  # metrics that wait for a reduction belong before this save
    try:
        path = path_of(run, request)
    except CheckpointError as error:
        run.saves.results.append(
            Saved("checkpoints/last", request.reason, s.step, error, run.stamp, request.is_automatic)
        )
        announce(run)
        return
    # emit the end of an older save first: this one may replace its path, and has the states of hooks after it
    finish_saving(run)
    run.saves.count += 1
    contents = {**collect(run), "record": path_from(path, run)}
    if request.format is not None:
        request.format.prepare(contents)
    else:
        if leaves_out_base(run, request):
            contents["module"] = run.saves.base.leave_out(contents["module"], run.module, run.strategy.ranks)
        after_save(run)
    whole = edit_saved(run, contents, path, request.reason)
    about = {
        **manifest_facts(s, request, run.identity.id),
        "saves": run.saves.count,
        **({"abandoned": run.saves.abandoned} if run.saves.abandoned else {}),
        "started_at": run.identity.started_at,
        **({"base": base} if (base := fingerprint(left_out_in(whole.get("module")))) else {}),
        **({"mesh": run.strategy.mesh_text} if run.strategy.mesh_text else {}),
    }
    saved = Saved(
        path,
        request.reason,
        s.step,
        None,
        run.stamp,
        request.is_automatic,
        facts=about if request.format is not None else None,
    )
    in_background = (
        run.options.saving.write == "async"
        and request.format is None
        and run.stage == "fit"
        and request.reason not in ("signal", "exception")
    )
    try:
        if in_background:
            written = whole if run.strategy.ranks.alone else part_of_rank(run, whole, saved)
            save_in_background(run, written, about, saved)
            return
        if request.format is not None:
            request.format.write(whole, path)
        elif run.strategy.ranks.alone:
            write(whole, path, about, staging=run.run_dir)
        else:
            from hookline.checkpoint.rank_writer import write_on_all_ranks

            write_on_all_ranks(
                part_of_rank(run, whole, saved), path, about, run.strategy.ranks, staging=run.run_dir
            )
    except CheckpointError as error:
        saved = replace(saved, error=error)
    run.saves.results.append(saved)
    run.saves.is_final = run.saves.is_final or (request.reason == "signal" and saved.error is None)
    announce(run)


def warn_of_loaded_weights(run: Run, evaluation: Run | None) -> None:
    """Warn if a checkpoint of `run` would get the weights of another one, which a later evaluation loaded."""
    if evaluation is None or evaluation is run or (loaded := evaluation.resume.path) is None:
        return
    if run.saves.newest is not None and shown(run.saves.newest.path) == shown(loaded):
        return
    log.warning(
        "The checkpoint gets the counters and optimizers of step %d, and the weights of %s, which %s() has "
        "loaded into the model. Save before an evaluation with checkpoint=.",
        run.state.step,
        shown(loaded),
        evaluation.stage,
    )


def leaves_out_base(run: Run, request: SaveRequest) -> bool:
    """Return whether a checkpoint holds only trainable weights. Raise if the run did not prepare for it."""
    if request.weights == "trainable" and run.saves.base is None:
        raise OptionError(
            "weights='trainable' needs the fingerprint of the model as it was built, which this run did not "
            "compute when it began: pass Trainer(checkpoint={'weights': 'trainable'}), or add "
            "ModelCheckpoint(weights='trainable') before fit."
        )
    return (request.weights or run.options.saving.weights) == "trainable" and run.saves.base is not None


@phase(SAVING)
@timed("saving")
def export(
    run: Run, checkpoint: Path | str, folder: Path, write: Callable[[Mapping[str, Any], Path], None]
) -> bool:
    """Write a directory for another program from a durable checkpoint, on rank zero; see `export_folder`."""
    from hookline.checkpoint.export import export_folder

    return run.state.rank == 0 and export_folder(checkpoint, folder, write)


def path_of(run: Run, request: SaveRequest) -> Path | str:
    """Return the path of a checkpoint; after a signal `checkpoints/last`, so that one write suffices."""
    if (
        run.saves.last is not None
        and request.path is None
        and (request.is_automatic or request.reason == "signal")
    ):
        return run.saves.last.path()  # type: ignore[no-any-return]
    return request.path or run.run_dir() / "checkpoints" / f"step-{run.state.step}"


def part_of_rank(run: Run, contents: dict[str, Any], saved: Saved) -> Packed:
    """Return what this rank writes: its shards, and what differs from rank zero.

    Raise if the ranks are not about to write the same checkpoint.
    """
    ranks, parts, problem = run.strategy.ranks, None, ""
    try:
        parts = PerRankState(contents, buffers_of(run.module, contents["module"]))
    except CheckpointError as error:
        problem = str(error)
    of_all = ranks.gather(
        {
            "asked": [str(saved.path), saved.reason, saved.step],
            "problem": problem,
            "sums": parts.sums if parts is not None and ranks.rank == 0 else None,
        }
    )
    if any(each["asked"] != of_all[0]["asked"] for each in of_all):
        asked = ", ".join(
            f"rank {rank} {shown(path)} ({reason}, step {step})"
            for rank, (path, reason, step) in enumerate(each["asked"] for each in of_all)
        )
        raise HooklineError(
            f"The ranks are about to write different checkpoints: {asked}. Do they all have the same hooks?"
        )
    problems = [f"rank {rank}: {each['problem']}" for rank, each in enumerate(of_all) if each["problem"]]
    if problems or parts is None:
        raise CheckpointError(
            f"The contents of the checkpoint {shown(saved.path)} could not be collected: "
            f"{'; '.join(problems)}"
        )
    return parts.for_rank(ranks.rank, of_all[0]["sums"])


def save_in_background(
    run: Run, contents: dict[str, Any] | Packed, about: dict[str, Any], saved: Saved
) -> None:
    """Copy the contents and write them in a thread, one checkpoint at a time; training continues."""
    if run.saves.background is None:
        run.saves.background = BackgroundSaver(run.strategy.ranks)

    def on_done(error: CheckpointError | None) -> None:
        run.saves.results.append(saved if error is None else replace(saved, error=error))
        if run.strategy.ranks.alone:
            run.saves.requests.append(None)  # makes the loop call `save_due`
        elif run.state.rank == 0:  # a command, so that all ranks emit the event after the same batch
            run.participants.commands.send("announce")

    run.saves.background.start(contents, saved.path, about, on_done, staging=run.run_dir)


@handles_command("announce")
def announce_together(run: Run, sender: int) -> None:
    """Emit the end of a background save on all ranks, after rank zero has renamed the checkpoint."""
    finish_saving(run)


@timed("saving")
def finish_saving(run: Run) -> None:
    """Wait for a save in the background, and emit whether it succeeded."""
    if run.saves.background is not None:
        run.saves.background.wait()
        announce(run)


def announce(run: Run) -> None:
    """Emit the events of finished saves. A failed save warns or raises, as the options choose."""
    while run.saves.results:
        saved = run.saves.results.pop(0)
        if run.participants.control is not None:
            run.participants.control.report_saved(saved)
        if run.saves.last is not None:
            run.saves.last.note(saved)
        if saved.error is None:
            run.saves.newest, run.saves.on_disk = saved, saved.progress
            record_checkpoint(run, saved.path, saved.facts)
        report_saved(run, saved, run.options.saving.on_error)


def manifest_facts(s: State, request: SaveRequest, run: str) -> dict[str, Any]:
    """Return the facts of a checkpoint for its manifest, which is read without the tensors. run: its id."""
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
    """Return everything that a run needs to resume."""
    s, ranks, order = run.state, run.strategy.ranks, run.data.order
    entries = [*s.hooks.in_order(), *run.participants.module_hooks]
    whole = {
        "run": run.identity.id,
        "saves": run.saves.count,
        "world_size": s.world_size,
        # with tensor parallelism not every rank reads batches of its own
        **({} if ranks.data_size == ranks.world_size else {"data_ranks": list(ranks.data_ranks)}),
        "module": run.module.state_dict(),
        **made_with(run.module),
        "hooks": hook_states(entries, s),
        "datamodule": run.datamodule.state_dict() if run.datamodule is not None else {},
        "optimizers": [each.state_dict() for each in s.optimizers],
        "schedulers": [each.state_dict() for each in s.schedulers],
        "kinds": kinds(s),
        "settings": run.identity.settings,
        "precision": run.strategy.precision.state_dict(),
        "counters": s.counts.state_dict(),
        # the order determines which samples are behind each update
        "position": {**run.progress.state_dict(), **({} if order is None else {"order": order.state_dict()})},
        "window": open_window(run),
        "log": s.log.state_dict(),
        "metric_objects": s.log.object_state(run.module),
        "filters": {each.name: [counts_of(x) for x in each.listeners] for each in entries},
        "metrics": dict(s.metrics.read()),
        "loggers": s.logger.position(),
        # if the data of a resumed run is not open yet, the next resume repeats what was drawn since
        "rng": run.resume.contents["rng"] if "rng" in run.resume.contents else rng_state(),
        "loader": run.resume.contents["loader"]
        if "loader" in run.resume.contents
        else run.data.train.state_dict(s.epochs_seen, run.progress.position)
        if run.data.train is not None
        else None,
        "feeding": run.data.router.state_dict() if run.data.router is not None else {},
    }
    for name, before in (run.progress.unfinished | run.progress.before_validation).items():
        # undo what the end of a stopped epoch and an abandoned validation have changed
        if name == "module":  # without the buffers that are not saved
            before = {key: each for key, each in before.items() if key in whole[name]}
        whole[name].update(Metrics(before).read() if name == "metrics" else before)
    return whole


def made_with(module: nn.Module) -> dict[str, Any]:
    """Return the constructor arguments of a `hookline.Module`, which `load_from_checkpoint` needs."""
    made = init_arguments(module)
    return {} if made is None else {"hparams": dict(made.recorded), "hparams_left_out": dict(made.left_out)}


def hook_states(entries: Iterable[Entry], s: State) -> dict[str, Any]:
    """Return the state of hooks by their names; the error of a hook that fails names it."""
    states = {}
    for entry in entries:
        if hasattr(entry.hook, "state_dict"):
            with naming(entry, "state_dict", s):
                states[entry.name] = entry.hook.state_dict()
    return states


@contextlib.contextmanager
def naming(entry: Entry, method: str, s: State) -> Iterator[None]:
    """Add the name of the hook and its method to an error inside the context."""
    try:
        yield
    except Exception as error:
        record_failure(
            error,
            FailureSource(f"hook {entry.name!r}", method),
            f"({type(entry.given).__name__}) at {s.position}",
        )
        raise


def kinds(s: State) -> list[str]:
    """Return the class names of the optimizers and schedulers: their state fits no other class."""
    return [type(each).__name__ for each in (*map(bare, s.optimizers), *s.schedulers)]


def counts_of(listener: Any) -> list[dict[str, Any]]:
    """Return the counts of a listener's filters, each with its text, such as `every 2 steps`."""
    return [{"of": f"{listener.event.name} {each.text}", **each.state_dict()} for each in listener.filters]


SMALL = 1_000_000
"""The most elements of a tensor that is copied before every validation; hooks do not change larger ones."""


def state_before_validation(run: Run) -> dict[str, Any]:
    """Return a copy of the state that a validation may change, to undo a validation that is abandoned."""
    s = run.state
    listening = [each for each in s.hooks.entries() if any(precedes_end(x.event) for x in each.listeners)]
    return {
        "hooks": copy_small(hook_states(listening, s)),
        "filters": {each.name: [counts_of(x) for x in each.listeners] for each in listening},
        "module": copy_small(dict(run.module.named_buffers())),
        "log": copy_small(s.log.state_dict()),
        "metric_objects": copy_small(s.log.object_state(run.module)),
        "metrics": dict(s.metrics.raw()),
        "rng": rng_state(),
        "loggers": s.logger.position(),
    }


def precedes_end(event: Event) -> bool:
    """Return whether an event of a validation comes before its end, so that an abandoned one emits it."""
    return event.inside == "validation batch" or event.name in (
        "on_validation_start",
        "on_validation_epoch_start",
    )


def copy_small(value: Any) -> Any:
    """Return a deep copy; tensors of more than SMALL elements are shared."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() <= SMALL else value
    if isinstance(value, dict):
        return {key: copy_small(each) for key, each in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(copy_small(each) for each in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def open_window(run: Run) -> dict[str, Any]:
    """Return the open accumulation window with its gradients."""
    window = run.window
    if run.traits.is_manual:  # the training step decides how long gradients accumulate, also over epochs
        grads = window_gradients(run.module, run.state.wrapped_model)
        return {"gradients": grads} if grads else {}
    if not window.batches:
        # the unit of the next window depends on these; without them float16 may round differently
        return (
            {}
            if window.by == "batches"
            else {name: getattr(window, name) for name in ("by", "unit", "correction")}
        )
    has_gradients = window.count or (run.gradient_sync is not None and run.gradient_sync.is_clear)
    grads = window_gradients(run.module, run.state.wrapped_model) if has_gradients else {}
    return {
        **{name: getattr(window, name) for name in window.__slots__ if name != "weight"},
        "gradients": grads,
    }
