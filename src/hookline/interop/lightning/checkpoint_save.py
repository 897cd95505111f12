"""`trainer.save_checkpoint`: when it returns, the file exists, also inside a hook.

Hookline saves between events, where a resume is bit-exact. At the end of a batch, of a validation and of an
epoch the checkpoint callbacks are called last, so the state there is that of the next save point, except for
what the loop does in between. `as_saved_next` accounts for that.
"""

from __future__ import annotations

import contextlib
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
from hookline.interop.lightning.package import find
from hookline.interop.lightning.progress import BATCH_ENDS, current_event, loops
from hookline.run.record import record_checkpoint
from hookline.run.run import Run
from hookline.run.save_request import SaveRequest
from hookline.training.resume import Start
from hookline.training.saving import manifest_facts, save
from hookline.util.errors import HookError
from hookline.util.urls import is_url


class NothingToSave(HookError, AttributeError):
    """A checkpoint was requested before a module was passed to the trainer."""


def complete_io(plugin: Any) -> Any:
    """Return a `CheckpointIO` of the user; Lightning gives one that wraps another its base."""
    if plugin is None:
        return None
    strategy = find("strategies", "SingleDeviceStrategy")(checkpoint_io=plugin)
    return strategy.checkpoint_io


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
                facts = {**manifest_facts(run.state, request, run.identity.id), "saves": run.saves.count}
                record_checkpoint(run, path, facts)
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
        file = file_of(contents, self.run)
        self._write(file, path)

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


def forget_logged(saved: dict[str, Any]) -> None:
    """Remove the metrics of a training epoch that is over: they are reset after its last hook."""
    for value in saved.pop("lightning").values():
        if value is not None:
            saved["states"].pop(value["metric"], None)


# ---- the next save point -----------------------------------------------------------------------------------


@contextlib.contextmanager
def as_saved_next(run: Run) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show the progress of the run as the loop has it at its next save point.

    Yield a function that completes the collected contents.
    """
    s, progress = run.state, run.progress
    fields: dict[str, Any] = {}
    logged: dict[str, Any] | None = None
    owed: dict[str, bool] = {}
    event = current_event(run)
    is_epoch_over = event == "on_train_epoch_end" and s.epochs_seen > s.epoch
    now = (s.epoch, s.batches_seen)
    if event == "on_validation_end" and progress.validation_pending and not s.sanity_checking:
        logged = progress.before_validation.get("log", {}).get("pending", {})
        fields = {"validated_at": now, "validation_pending": False, "before_validation": {}}
    elif is_epoch_over:
        fields, logged = {"position": 0}, {}
        if any(each.needs_metric and each.interval == "epoch" for each in run.schedules):
            owed["owes_schedulers"] = True
    elif event in BATCH_ENDS:
        every = run.traits.rules.validation_interval(run)
        if every and progress.position % every == 0 and progress.validated_at != now:
            owed["owes_validation"] = True
    if event == "on_train_epoch_end":
        fields["revision"] = progress.revision + 1  # the loop counts the hooks of this event as a change

    def complete(contents: dict[str, Any]) -> None:
        contents["position"] |= owed
        if logged is not None:
            contents["log"]["pending"] = logged
        if is_epoch_over:
            forget_logged(contents["metric_objects"])

    with progress.shown_as(**fields):
        yield complete
