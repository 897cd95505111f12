"""The samples behind an update, for the guards: name them, and leave them out."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch

from hookline.hooks._statistics import tensors_in
from hookline.run.record import RECORD
from hookline.util.errors import OptionError, UnknownSamples
from hookline.util.text import list_some

MOST_LOGGED = 100
Samples = dict[str, list[int]]
"""The indices of samples by the name of their loader."""


def find_samples(trainer: Any, step: int | None = None) -> Samples:
    """Return the samples behind an update on all ranks; empty if they are not known here.

    step: the step that the update has made; None: the update that is being made.
    """
    found: dict[str, set[int]] = {}
    try:
        for each in trainer.samples(step) if hasattr(trainer, "samples") else ():
            found.setdefault(each.loader, set()).add(each.id)
    except (UnknownSamples, OptionError):
        return {}
    return {name: sorted(ids) for name, ids in found.items()}


def find_bad_samples(state: Any) -> Samples:
    """Return the samples of this rank's batch that have a value that is not finite; empty if unknown."""
    ids = state.sample_ids
    if not ids or not all(type(each) is int for each in ids):
        return {}
    names = state.trainer.loaders.names
    bad = set[int]()
    for _, tensor in tensors_in("batch", state.batch, "{}{}"):
        if tensor.is_floating_point() and tensor.dim() and len(tensor) == len(ids) and not tensor.is_meta:
            rows = (~torch.isfinite(tensor)).reshape(len(ids), -1).any(1)
            bad.update(ids[row] for row in rows.nonzero().flatten().tolist())
    name = state.dataloader_name if state.dataloader_name in names else names[0]
    return {name: sorted(bad)} if bad else {}


def merge(parts: list[Samples]) -> Samples:
    """Return the samples of several updates."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sorted({each for part in parts for each in part.get(name, [])}) for name in names}


def name_samples(samples: Samples) -> str:
    """Return a sentence that names samples, after a space; empty without any."""
    if not samples:
        return ""
    of_loaders = [
        f"{list_some(map(str, ids))} of the loader {name!r}" if len(samples) > 1 else list_some(map(str, ids))
        for name, ids in samples.items()
    ]
    return f" Its samples: {'; '.join(of_loaders)}."


def name_command(trainer: Any, samples: Samples) -> str:
    """Return a sentence with the command that lists the update that is being made; empty if it is unknown,
    or if the run has no record that the command could read.

    It names the batches, because the number of an update that is skipped is that of the next one, too.
    """
    try:
        batches = [(each.epoch, each.batch) for each in trainer.samples()] if samples else []
    except (UnknownSamples, OptionError):
        return ""
    folder = _recorded_in(trainer) if batches else None
    if folder is None:
        return ""
    (epoch, first), (_, last) = min(batches), max(batches)
    several = f"{first}-{last}" if last > first else str(first)
    where = shlex.quote(str(folder))
    return f" All of this update: hookline samples {where} --epoch {epoch} --batch {several}."


def _recorded_in(trainer: Any) -> Path | None:
    """Return the run's directory, from the working directory if it is below it; None if it has no record."""
    options = trainer.options
    is_given = options.run_dir is not None and Path(options.run_dir).is_dir()
    if options.fast_dev_run or not (options.saving.last or is_given):
        return None  # reading run_dir would create it
    folder = Path(trainer.run_dir)
    if not (folder / RECORD).is_file():
        return None
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def for_log(samples: Samples) -> dict[str, Any]:
    """Return the field of a log event that names samples."""
    return {"samples": {name: ids[:MOST_LOGGED] for name, ids in samples.items()}} if samples else {}


def exclude(trainer: Any, samples: Samples, reason: str) -> None:
    """Leave samples out of the training."""
    for loader, ids in samples.items():
        trainer.exclude_samples(ids, loader, reason)


def go_back(trainer: Any, reason: str) -> None:
    """Go back to the last checkpoint. Without one, continue: the weights are those before the update."""
    trainer.roll_back(reason=reason, on_missing="continue")


def check_can_exclude(who: str, trainer: Any) -> None:
    """Raise in on_train_start if the samples of a training loader cannot be left out."""
    if not hasattr(trainer, "exclude_samples") or getattr(trainer, "rules", None) is not None:
        raise OptionError(
            f"{who}: exclude=True works in a fit of hookline.Trainer, which reads the data.",
            option="exclude",
            value=True,
        )
    for name in trainer.loaders.names:
        trainer.exclude_samples([], name)
