"""The final checkpoint: a run that can be resumed ends with its last state on disk, or the log says that it is not there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from hookline.checkpoint.files import read_manifest
from hookline.checkpoint.finding import find
from hookline.checkpoint.saves import SaveRequest
from hookline.errors import CheckpointError
from hookline.loops.finite import state_tensors
from hookline.loops.run import Run
from hookline.loops.saving import finish_saving, save
from hookline.strategies.sharded import held
from hookline.urls import is_url, shown

log = logging.getLogger("hookline")
NAME = "last"
OTHER_NAME = "last-state"
"""Used where a hook, or the user, has something else of the first name."""


def save_final_state(run: Run) -> None:
    """Write the state that a fit ends with, unless a checkpoint holds it already. It is durable when this returns.

    Called before on_train_end, and again after it. on_fit_end is not part of this state: a run that is started again calls it.
    """
    if run.sealed or run.finished_before or run.options.fast_dev_run:
        return
    finish_saving(run)
    if not _differs_from_disk(run):
        return
    path = final_path(run)
    if path is not None:
        save(run, SaveRequest(path, "last"))
        finish_saving(run)
    if path is None or run.on_disk != run.progress:
        _report_unsaved(run)


@contextlib.contextmanager
def noticing_changes(run: Run) -> Iterator[None]:
    """Count it as progress if listeners change weights or optimizer state meanwhile: averages are often swapped in at the end."""
    own_code = [each for each in run.plan.listeners("on_train_end")
                if not type(each.owner).__module__.startswith(("hookline.hooks.", "hookline.strategies."))]  # fmt: skip
    before = fingerprint(run) if own_code else []
    yield
    if own_code and (before is None or fingerprint(run) != before):
        run.revision += 1


def fingerprint(run: Run) -> list[int] | None:
    """Return a sum over the bits of each tensor that is trained with: another value of one number gives another sum.

    None if there are tensors of another kind, whose bits cannot be had.
    """
    tensors = [held(each.detach()) for each in (*run.module.parameters(), *run.module.buffers())]
    tensors += [held(each) for optimizer in run.state.optimizers for each in state_tensors(optimizer)]
    sums = []
    try:
        for each in tensors:
            plain = torch.view_as_real(each) if each.is_complex() else each
            if plain.numel() and plain.device.type != "meta":
                sums.append(plain.view(_INTEGERS[plain.element_size()]).sum(dtype=torch.int64))
    except (RuntimeError, NotImplementedError, TypeError):  # sparse, quantized, or of a class of its own
        return None
    return [int(each) for device in {each.device for each in sums}
            for each in torch.stack([one for one in sums if one.device == device]).tolist()]  # fmt: skip


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _differs_from_disk(run: Run) -> bool:
    """Return whether the state is not on disk. One rank on which it is not is enough: all ranks write together."""
    return any(run.strategy.ranks.gather(run.on_disk != run.progress))


def final_path(run: Run) -> Path | str | None:
    """Return where the final checkpoint goes, as rank zero chooses it; None for a run that has no place for checkpoints.

    That is `checkpoints/last` of a run that resume="auto" finds. Where hooks save to a URL only, it is beside their checkpoints.
    """
    chosen, is_remote = run.strategy.ranks.decide(lambda: _choose_path(run))
    return chosen if chosen is None or is_remote else Path(chosen)


def _choose_path(run: Run) -> tuple[str | None, bool]:
    run_dir = run.directory.existing()
    if run_dir is not None and any(each.run == run.run_id for each in find(run_dir)[0]):
        folder = run_dir / "checkpoints"
        return str(folder / (NAME if _is_free(folder / NAME, run) else OTHER_NAME)), False
    newest = run.saved
    if newest is not None and is_url(newest.path) and newest.reason != "manual":
        return f"{str(newest.path).rpartition('/')[0]}/{NAME}", True
    return None, False


def _is_free(path: Path, run: Run) -> bool:
    """Return whether the final checkpoint may take this name: nothing has it, an older final one, or one of another run."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        return False
    if not path.exists():
        return True
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return True  # a damaged one is of no use to anybody; what is no checkpoint at all is refused by the writer
    return manifest["reason"] == "last" or manifest.get("run") != run.run_id


def _report_unsaved(run: Run) -> None:
    s = run.state
    if run.saved is None or s.rank or run.saved.step == s.step:  # of the same step: the weights are the same
        return
    log.warning("This run was %s at step %d, but its last state, of step %d, is not saved. The newest checkpoint is %s, of step "
                "%d.", s.status, s.step, s.step, shown(run.saved.path), run.saved.step)  # fmt: skip
