"""`ckpt_path` of fit, validate, test and predict: a path, or 'best', 'last' and 'hpc', as in Lightning."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hookline.interop.lightning.checkpoint_file import LIGHTNING
from hookline.interop.lightning.package import find, is_a, refusal, warn
from hookline.util.errors import CheckpointError, missing_checkpoint
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
