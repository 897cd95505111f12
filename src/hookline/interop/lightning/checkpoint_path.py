"""`ckpt_path` of fit, validate, test and predict: a path, or 'best', 'last' and 'hpc', as in Lightning."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from hookline.interop.lightning.checkpoint_file import LIGHTNING
from hookline.interop.lightning.package import refusal
from hookline.util.errors import CheckpointError
from hookline.util.urls import is_url

log = logging.getLogger("hookline")
CHOSEN = "_chosen_ckpt_path"
"""The attribute of the trainer that `trainer.ckpt_path = ...` sets."""
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
        log.warning(
            "trainer.ckpt_path = %r was set, but %s(ckpt_path=%r) was passed, which is used.",
            str(chosen),
            stage,
            str(ckpt_path),
        )
        trainer.__dict__.pop(CHOSEN)
    elif chosen is not None:
        return chosen  # type: ignore[no-any-return]
    if ckpt_path is None:
        if has_model or trainer._own._last is None:
            return None
        ckpt_path = "best"
        log.warning(
            "%s() without a model and without ckpt_path uses the best model of the last fit; pass "
            "ckpt_path='best' or 'last' to choose.",
            stage,
        )
    if ckpt_path == "best":
        return _best(trainer, stage)
    if ckpt_path == "last":
        return _last(trainer, stage)
    if ckpt_path == "hpc":
        return _newest_of_cluster(trainer, stage)
    if str(ckpt_path).startswith("registry"):
        raise NoCheckpoint(
            f"{stage}(ckpt_path={str(ckpt_path)!r}): Hookline has no model registry. Download the checkpoint "
            "and pass its path."
        )
    if not str(ckpt_path):
        raise NoCheckpoint(f"{stage}(ckpt_path=''): pass the path of a checkpoint, 'best', 'last' or 'hpc'.")
    if not is_url(ckpt_path) and not Path(ckpt_path).exists():
        raise NoSuchFile(f"{stage}(ckpt_path={str(ckpt_path)!r}): Checkpoint file not found.")
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
        log.warning(
            "%s: of several ModelCheckpoint callbacks, the best checkpoint of the first is used.", asked
        )
    path = str(callbacks[0].best_model_path or "")
    if path:
        return path
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
    log.warning(
        '.%s(ckpt_path="last"): there is no last checkpoint, so nothing is loaded. '
        "ModelCheckpoint(save_last=True) keeps one.",
        stage,
    )
    return None


def _newest_of_cluster(trainer: Any, stage: str) -> str:
    folder = Path(trainer.default_root_dir)
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    numbered = [(int(found[1]), found[0]) for found in map(HPC.fullmatch, names) if found]
    if not numbered:
        raise NoCheckpoint(
            f'`.{stage}(ckpt_path="hpc")`: {folder} has no hpc_ckpt_N.ckpt. Pass the path of a checkpoint.'
        )
    return str(folder / max(numbered)[1])


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
