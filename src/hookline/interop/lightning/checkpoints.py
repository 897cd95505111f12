"""Checkpoints of Lightning's trainer: `trainer.save_checkpoint`, and `ckpt_path` of fit, validate, test and
predict.

When `save_checkpoint` returns, the file exists, also inside a hook. Hookline saves between events, where a
resume is bit-exact. At the end of a batch, of a validation and of an epoch the checkpoint callbacks are
called last, so the state there is that of the next save point, except for what the loop does in between.
`as_saved_next` accounts for that.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hookline.checkpoint.contents import check_contents
from hookline.checkpoint.sharded import sharded_tensors
from hookline.interop.lightning.checkpoint_file import (
    LIGHTNING,
    SHARED,
    VERSION,
    WRAPPED,
    contents_of_file,
    file_of,
    plain_file,
    write_file,
)
from hookline.interop.lightning.names import epoch_of
from hookline.interop.lightning.package import find, is_a, refusal, warn
from hookline.interop.lightning.progress import BATCH_ENDS, current_event, loops
from hookline.run.record import record_checkpoint
from hookline.run.run import Run
from hookline.run.save_request import SaveRequest
from hookline.training.resume import Start
from hookline.training.saving import manifest_facts, save
from hookline.util.errors import CheckpointError, HookError, missing_checkpoint
from hookline.util.urls import is_url

CHOSEN = "_chosen_ckpt_path"
"""The attribute of the trainer that `trainer.ckpt_path = ...` sets."""
FABRICS = ("lightning.fabric", "lightning_fabric")
"""Packages with the classes that recognise a cluster."""
HPC = re.compile(r"hpc_ckpt_(\d+)\.ckpt")
"""Files that Lightning writes when a cluster ends a job."""


class NoSuchFile(CheckpointError, FileNotFoundError):
    """The path of a checkpoint does not exist."""


class NoCheckpoint(CheckpointError, ValueError):
    """The requested checkpoint does not exist."""


def choose_path(
    trainer: Any, stage: str, ckpt_path: str | Path | None, has_model: bool, has_fitted: bool
) -> str | Path | None:
    """Return the checkpoint of a stage, or None.

    has_model: whether a model was passed to the stage. has_fitted: whether an earlier stage had one.
    """
    chosen = trainer.__dict__.get(CHOSEN)
    if chosen is not None and ckpt_path is not None:
        warn(
            f"`trainer.ckpt_path = {str(chosen)!r}` was set, but then you passed "
            f"{stage}(ckpt_path={str(ckpt_path)!r}), which is used."
        )
        trainer.__dict__.pop(CHOSEN)
    elif chosen is not None:
        return chosen  # type: ignore[no-any-return]
    if ckpt_path is None and _is_slurm_job() and _newest_of_cluster(trainer) is not None:
        ckpt_path = "hpc"
    after_failures = any(is_a(each, "OnExceptionCheckpoint") for each in trainer.callbacks)
    if ckpt_path is None and stage == "fit" and after_failures:
        ckpt_path = "last"
        warn("The last model of the previous `fit` call will be used, because of OnExceptionCheckpoint.")
    if ckpt_path is None:
        if has_model or not has_fitted:
            return None
        ckpt_path = "best"
        tip = (
            " There is also an on-exception checkpoint available, which only a fit uses by default."
            if after_failures
            else ""
        )
        warn(
            f"`.{stage}()` has no model and no ckpt_path. The best model of the previous `fit` call will be "
            f"used.{tip} Pass ckpt_path='best' or 'last' to choose."
        )
    if ckpt_path == "best":
        return _best(trainer, stage)
    if ckpt_path == "last":
        return _last(trainer, stage)
    if ckpt_path == "hpc":
        newest = _newest_of_cluster(trainer)
        if newest is None:
            raise NoCheckpoint(
                f'`.{stage}(ckpt_path="hpc")`: {trainer.default_root_dir} has no hpc_ckpt_N.ckpt. Pass the '
                "path of a checkpoint."
            )
        return newest
    if str(ckpt_path).startswith("registry"):
        raise NoCheckpoint(
            f"{stage}(ckpt_path={str(ckpt_path)!r}): Hookline has no model registry. Download the checkpoint "
            "and pass its path."
        )
    if not str(ckpt_path):
        raise NoCheckpoint(f"{stage}(ckpt_path=''): pass the path of a checkpoint, 'best', 'last' or 'hpc'.")
    if trainer._checkpoint_io is None and not is_url(ckpt_path) and not Path(ckpt_path).exists():
        raise NoSuchFile(
            f"Checkpoint file not found: {missing_checkpoint(Path(ckpt_path))} It is ckpt_path of {stage}()."
        )
    return ckpt_path


def _best(trainer: Any, stage: str) -> str:
    callbacks = trainer.checkpoint_callbacks
    asked = f'`.{stage}(ckpt_path="best")`'
    if not callbacks:
        raise NoCheckpoint(
            f"{asked}: `ModelCheckpoint` is not configured. Pass callbacks=[ModelCheckpoint(...)] "
            "to the trainer, or the path of a checkpoint."
        )
    if len(callbacks) > 1:
        warn(
            f"{asked} with multiple `ModelCheckpoint` callbacks: it uses the best checkpoint path from first "
            "checkpoint callback."
        )
    if path := callbacks[0].best_model_path:
        return path  # type: ignore[no-any-return]
    if trainer.fast_dev_run:
        raise NoCheckpoint(
            f"{asked} fails with `fast_dev_run=True`. It saves nothing: pass an exact checkpoint path."
        )
    raise NoCheckpoint(
        f"{asked}: `ModelCheckpoint` is not configured to save the best model, or has saved nothing yet."
    )


def _last(trainer: Any, stage: str) -> str | None:
    """Return the newest `last` of the checkpoint callbacks; None if there is none, so that a run begins."""
    found: set[str] = set()
    for callback in trainer.callbacks:
        if hasattr(callback, "_find_last_checkpoints"):  # Lightning's own
            found |= callback._find_last_checkpoints(trainer)
        elif path := str(
            getattr(callback, "last_model_path", "") or getattr(callback, "ckpt_path", "") or ""
        ):
            found.add(path)
    times = {path: os.path.getmtime(path) for path in found if os.path.exists(path)}
    if times:
        return max(times, key=lambda path: times[path])
    if any(not hasattr(each, "_find_last_checkpoints") for each in trainer.checkpoint_callbacks):
        return "auto"  # Hookline's own checkpoint hook
    warn(
        f'.{stage}(ckpt_path="last"): there is no last checkpoint available. No checkpoint will be loaded. '
        "ModelCheckpoint(save_last=True) keeps one."
    )
    return None


def _is_slurm_job() -> bool:
    clusters = [find("plugins.environments", "SLURMEnvironment", package) for package in FABRICS]
    return any(cluster is not None and cluster.detect() for cluster in clusters)


def _newest_of_cluster(trainer: Any) -> str | None:
    """Return the newest file that a cluster's job has left in `default_root_dir`; None without one."""
    folder = Path(trainer.default_root_dir)
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    numbered = [(int(found[1]), found[0]) for found in map(HPC.fullmatch, names) if found]
    return str(folder / max(numbered)[1]) if numbered else None


class OnlyWeights(CheckpointError, KeyError):
    """A fit cannot resume from a checkpoint without optimizers."""

    __str__ = Exception.__str__  # that of KeyError quotes the text


def refuse_start(run: Any) -> None:
    """Raise if a fit cannot resume from its file: it has only weights, or more epochs than are to be
    trained.
    """
    most, contents = run.options.max_epochs, run.resume.contents
    if run.stage != "fit" or LIGHTNING not in contents:
        return
    if "optimizer_states" not in contents[LIGHTNING]:
        raise OnlyWeights(
            f"{run.resume.path}: the checkpoint contains only the model, because it was saved with "
            "save_weights_only=True, and a fit resumes its optimizers too. Load its weights with "
            "load_from_checkpoint, and fit without ckpt_path."
        )
    seen = contents["counters"]["epochs_seen"]
    if most is not None and 0 <= most < seen:
        raise refusal(
            f"max_epochs={most}: the checkpoint was saved after {seen} epochs. Pass a larger max_epochs.",
            "max_epochs",
            most,
        )


# ---- saving ------------------------------------------------------------------------------------------------


class NothingToSave(HookError, AttributeError):
    """A checkpoint was requested before a module was passed to the trainer."""


def complete_io(plugin: Any) -> Any:
    """Return a `CheckpointIO` of the user; Lightning gives one that wraps another its base."""
    if plugin is None:
        return None
    return find("strategies", "SingleDeviceStrategy")(checkpoint_io=plugin).checkpoint_io


def read_here(plugin: Any, path: str | Path | None, weights_only: bool | None, ranks: Any) -> Any:
    """Return what the user's `CheckpointIO` reads on this rank; without one the path, which the run reads."""
    if path is None or plugin is None:
        return path
    contents = contents_of_file(
        plugin.load_checkpoint(path, weights_only=weights_only), path, ranks.rank, ranks.world_size
    )
    check_contents(contents, path)
    return Start(path, contents)


def save_file(
    trainer: Any, path: str | Path, weights_only: bool, request: SaveRequest, storage_options: Any = None
) -> None:
    """Write a checkpoint in Lightning's format at once. trainer: Lightning's names of the run.

    storage_options: for the `CheckpointIO` of the user.
    """
    own = trainer._own
    run: Run | None = own._run or own._fitted or own._last
    if run is None:
        raise NothingToSave(
            "There is nothing to save: call fit, validate, test or predict before save_checkpoint()."
        )
    if sharded_tensors(run.module) and not weights_only:
        own._save(SaveRequest(path if is_url(path) else Path(path), request.reason, request.monitor))
        return
    with as_saved_next(run) as complete:
        form = LightningFile(trainer, run, complete, storage_options)
        if weights_only or run.stage != "fit":
            form.write_weights(path)
            if own._run is not None:
                run.saves.count += 1
                record_checkpoint(
                    run,
                    path,
                    {**manifest_facts(run.state, request, run.identity.id), "saves": run.saves.count},
                )
        else:
            saved = SaveRequest(
                path if is_url(path) else Path(path), request.reason, request.monitor, format=form
            )
            if own._run is None:
                own._save(saved)
            else:
                save(run, saved)


class LightningFile:
    """The format of a request: one file with Lightning's entries and Hookline's."""

    def __init__(
        self, trainer: Any, run: Run, complete: Callable[[dict[str, Any]], None], storage_options: Any = None
    ) -> None:
        self.trainer, self.run, self.complete = trainer, run, complete
        self.storage_options = storage_options

    def prepare(self, contents: dict[str, Any]) -> None:
        """Add Lightning's entries, which Lightning's hooks edit."""
        self.complete(contents)
        entries = contents[LIGHTNING] = self._weights(contents)
        entries["callbacks"] = self._callbacks(contents["hooks"])
        entries |= {key: contents[name] for key, name in SHARED.items()}
        if contents["precision"]:
            entries["MixedPrecision"] = contents["precision"]
        entries |= self._arguments_and_data(contents["datamodule"])
        self._shared = {name: contents[name] for name in SHARED.values()}

    def write(self, contents: dict[str, Any], path: Path | str) -> None:
        """Write the file, on rank zero; the other ranks contribute their state."""
        for key, name in SHARED.items():  # a hook of Hookline may have replaced a part
            if contents[name] is not self._shared[name]:
                contents[LIGHTNING][key] = contents[name]
        self._write(file_of(contents, self.run), path)

    def write_weights(self, path: Path | str) -> None:
        """Write a file without optimizers and callbacks, from which a run cannot resume."""
        run = self.run
        state = run.datamodule.state_dict() if run.datamodule is not None else {}
        entries = self._weights({"module": run.module.state_dict()}) | self._arguments_and_data(state)
        subject = run.state.subject
        subject.checkpoint = {LIGHTNING: entries, "module": entries["state_dict"]}
        for listener in run.plan.listeners("on_save_checkpoint"):
            if listener.receiver == "M":
                listener.binding.call(run.state)
        subject.checkpoint = None
        self._write(plain_file(entries), path)

    def _write(self, file: dict[str, Any], path: Path | str) -> None:
        ranks = self.run.strategy.ranks
        plugin = self.trainer._checkpoint_io
        if ranks.rank == 0 and plugin is None:
            write_file(file, path)
        elif ranks.rank == 0:
            plugin.save_checkpoint(file, path, storage_options=self.storage_options)
        ranks.barrier()

    def _weights(self, contents: dict[str, Any]) -> dict[str, Any]:
        trainer, state = self.trainer, self.run.state
        package = sys.modules.get(trainer._package)
        is_shown = trainer._own.state is state  # else it has evaluated another checkpoint since
        return {
            "epoch": epoch_of(state),
            "global_step": trainer.global_step if is_shown else state.step,
            "pytorch-lightning_version": str(getattr(package, "__version__", VERSION)),
            "state_dict": contents["module"],
            "loops": loops(self.run, trainer._logger_connector.counts),
        }

    def _callbacks(self, states: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for entry in [*self.run.state.hooks.in_order(), *self.run.participants.module_hooks]:
            key, state = getattr(entry.given, "state_key", None), states.get(entry.name)
            if isinstance(state, dict) and state.keys() == {WRAPPED, "state"}:
                key, state = state[WRAPPED], state["state"]
            if isinstance(key, str) and state:
                found[key] = state
        return found

    def _arguments_and_data(self, data_state: Any) -> dict[str, Any]:
        data = getattr(self.run.datamodule, "original", self.run.datamodule)
        entries: dict[str, Any] = {}
        for prefix, owner in (("", self.run.module), ("datamodule_", data)):
            if hparams := getattr(owner, "hparams", None):
                entries[f"{prefix}hparams_name"] = getattr(owner, "_hparams_name", None)
                entries[f"{prefix}hyper_parameters"] = dict(hparams)
        if data is not None and data_state:
            entries[type(data).__qualname__] = data_state
        return entries


# ---- the next save point -----------------------------------------------------------------------------------


@contextlib.contextmanager
def as_saved_next(run: Run) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show the progress of the run as the loop has it at its next save point.

    Yield a function that completes the collected contents.
    """
    s, progress = run.state, run.progress
    fields: dict[str, Any] = {}
    logged: dict[str, Any] | None = None
    due: dict[str, bool] = {}
    event = current_event(run)
    is_epoch_over = event == "on_train_epoch_end" and s.epochs_seen > s.epoch
    now = (s.epoch, s.batches_seen)
    if event == "on_validation_end" and progress.validation_pending and not s.sanity_checking:
        logged = progress.before_validation.get("log", {}).get("pending", {})
        fields = {"validated_at": now, "validation_pending": False, "before_validation": {}}
    elif is_epoch_over:
        fields, logged = {"position": 0}, {}
        if any(each.needs_metric and each.interval == "epoch" for each in run.schedules):
            due["owes_schedulers"] = True
    elif event in BATCH_ENDS:
        every = run.traits.rules.validation_interval(run)
        if every and progress.position % every == 0 and progress.validated_at != now:
            due["owes_validation"] = True
    if event == "on_train_epoch_end":
        fields["revision"] = progress.revision + 1  # the loop counts the hooks of this event as a change

    def complete(contents: dict[str, Any]) -> None:
        contents["position"] |= due
        if logged is not None:
            contents["log"]["pending"] = logged
        saved = contents["metric_objects"]
        for value in saved.pop("lightning").values() if is_epoch_over else ():
            if value is not None:  # the metrics of the epoch are reset after its last hook
                saved["states"].pop(value["metric"], None)

    with progress.shown_as(**fields):
        yield complete
