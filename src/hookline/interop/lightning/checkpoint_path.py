"""`ckpt_path` of fit, validate, test and predict: a path, or 'best', 'last' and 'hpc', as in Lightning."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

from hookline.interop.lightning.callback_list import is_a
from hookline.interop.lightning.checkpoint_file import LIGHTNING
from hookline.interop.lightning.package import find, refusal
from hookline.util.errors import CheckpointError
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


def choose_path(trainer: Any, stage: str, ckpt_path: str | Path | None, has_model: bool) -> str | Path | None:
    """Return the checkpoint of a stage, or None. has_model: whether a model was passed to the stage."""
    chosen = trainer.__dict__.get(CHOSEN)
    if chosen is not None and ckpt_path is not None:
        _warn(
            trainer,
            f"trainer.ckpt_path = {str(chosen)!r} was set, but then you passed "
            f"{stage}(ckpt_path={str(ckpt_path)!r}), which is used.",
        )
        trainer.__dict__.pop(CHOSEN)
    elif chosen is not None:
        return chosen  # type: ignore[no-any-return]
    if ckpt_path is None and _is_slurm_job() and _newest_of_cluster(trainer) is not None:
        ckpt_path = "hpc"
    if ckpt_path is None:
        saved = [each for each in trainer.callbacks if is_a(each, "OnExceptionCheckpoint")]
        if saved and stage == "fit" and has_model:
            ckpt_path = "last"
        elif has_model or trainer._own._last is None:
            return None
        else:
            ckpt_path = "best"
            _warn(
                trainer,
                f"`.{stage}(ckpt_path=None)` without a model: the best model of the previous `fit` call will "
                "be used. Pass ckpt_path='best' or 'last' to choose one without this warning.",
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
        raise NoSuchFile(f"Checkpoint file not found: {ckpt_path}, in {stage}(ckpt_path=...).")
    return ckpt_path


def _best(trainer: Any, stage: str) -> str:
    callbacks = trainer.checkpoint_callbacks
    asked = f'`.{stage}(ckpt_path="best")`'
    if not callbacks:
        raise NoCheckpoint(
            f"{asked}: the trainer has no ModelCheckpoint. Pass callbacks=[ModelCheckpoint(...)] "
            "to the trainer, or the path of a checkpoint."
        )
    if len(callbacks) > 1:
        _warn(
            trainer,
            f"{asked} with multiple `ModelCheckpoint` callbacks: the best checkpoint of the first is used.",
        )
    if path := callbacks[0].best_model_path:
        return path  # type: ignore[no-any-return]
    if trainer.fast_dev_run:
        raise NoCheckpoint(f"{asked}: fast_dev_run=True saves nothing. Pass the path of a checkpoint.")
    raise NoCheckpoint(f"{asked}: the ModelCheckpoint has saved nothing yet, so it has no best_model_path.")


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
    _warn(
        trainer,
        f'.{stage}(ckpt_path="last"): there is no last checkpoint available, so nothing is loaded. '
        "ModelCheckpoint(save_last=True) keeps one.",
    )
    return None


def _warn(trainer: Any, message: str) -> None:
    """Warn on rank zero; programs filter Lightning's warnings by their category."""
    if trainer.is_global_zero:
        warnings.warn(message, UserWarning, stacklevel=5)


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

    def __str__(self) -> str:
        return str(self.args[0])


def refuse_start(run: Any) -> None:
    """Raise if a fit cannot resume from its file: it has only weights, or more epochs than are to be
    trained.
    """
    most, contents = run.options.max_epochs, run.resume.contents
    if run.stage != "fit" or LIGHTNING not in contents:
        return
    if "optimizer_states" not in contents[LIGHTNING]:
        raise OnlyWeights(
            f"{run.resume.path} has no optimizer state to resume from, because it was saved with "
            "save_weights_only=True. Load its weights with load_from_checkpoint, and fit without ckpt_path."
        )
    seen = contents["counters"]["epochs_seen"]
    if most is not None and 0 <= most < seen:
        raise refusal(
            f"max_epochs={most}: the checkpoint was saved after {seen} epochs. Pass a larger max_epochs.",
            "max_epochs",
            most,
        )
