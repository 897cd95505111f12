"""The position of a hand-written loop in its data: what a checkpoint holds of it, and what a resume does with
it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hookline.checkpoint.contents import put_gradients, window_gradients
from hookline.data.seeding import find_generators, rng_state, set_rng_state
from hookline.interop.hosted.batch import LoopRun
from hookline.run.state import count_noun
from hookline.util.errors import CheckpointError

log = logging.getLogger("hookline")

PLACES = ("sampler", "batch_sampler", "dataset")
"""Attributes of a loader that may have a generator of their own."""


def save_streams() -> dict[str, Any]:
    """Return the random streams as numbers and tensors, which `torch.load` reads without pickles."""
    streams = rng_state()
    kind, keys, *rest = streams["numpy"]
    return {**streams, "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest)}


def restore_streams(saved: dict[str, Any]) -> None:
    """Restore what `save_streams` returned."""
    kind, keys, *rest = saved["numpy"]
    set_rng_state({**saved, "numpy": (kind, np.asarray(keys).astype(np.uint32), *rest)})


def generators_of(loader: Any) -> dict[str, torch.Generator]:
    """Return torch's generators of a loader, its samplers and its dataset. A progress bar is unwrapped."""
    inner = getattr(loader, "iterable", loader)
    found = find_generators(loader=inner, **{name: getattr(inner, name, None) for name in PLACES})
    return {name: each for name, each in found.items() if isinstance(each, torch.Generator)}


def _states(generators: dict[str, torch.Generator]) -> dict[str, Any]:
    return {name: [each.initial_seed(), each.get_state()] for name, each in generators.items()}


def stop_in(states: list[dict[str, Any]] | None) -> tuple[str, str] | None:
    """Return why and with which status a hook had stopped the loop of a checkpoint; None if none had.

    states: the positions of all ranks, some of which may have left the loop without a hook.
    """
    return states[0]["stop"] if states and all(each.get("stop") for each in states) else None


class LoopPosition:
    """The batches of the current epoch that are done, and the random streams at its start."""

    def __init__(self, run: LoopRun) -> None:
        self.run = run
        self.pending: dict[str, Any] | None = None
        """The position of a loaded checkpoint, until the loop is there."""
        self.is_in_epochs = False
        """Whether the loop is in the body of `line.epochs`."""
        self.has_batches = False
        """Whether `line.epoch` or `start_epoch` was called in this body."""
        self.unread_epochs = 0
        """How many bodies of `line.epochs` had no batches of the line."""
        self.epochs = 0
        """The number of epochs that `line.epochs` was called with, also before the resume; 0: it was not."""
        self.is_left = False
        """Whether the loop itself has called `line.stop`: it continues when it is started again."""
        self.is_finished = False
        """Whether the loop stays stopped, because a hook had stopped it before it was started again."""
        self._streams: dict[str, Any] | None = None
        self._first_step = 0
        self._generators: dict[str, torch.Generator] = {}
        self._generator_states: dict[str, Any] = {}

    # ---- a checkpoint --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the position for a checkpoint."""
        s, batch = self.run.state, self.run.batch
        if self.pending is not None:  # nothing was trained since it was loaded
            return self.pending
        is_inside = s.counts.epochs_seen == s.counts.epoch
        batches = self.run.progress.position - batch.is_open if is_inside else 0
        updates = s.step - self._first_step if self.is_in_epochs and not self.has_batches else 0
        is_unfinished = batches > 0 or updates > 0
        states = self._generator_states if is_unfinished else _states(self._generators)
        window = {}
        is_counted = batches > 0 or self.has_batches or not self.is_in_epochs
        if is_counted and not batch.is_open and batch.window_losses():  # also between two epochs
            window = {
                "gradients": window_gradients(s.module, s.setup.wrapped_model),
                "losses": [float(each) for each in batch.window_losses()],
            }
        return {
            "batches": batches,
            "updates": updates,
            "world_size": s.world_size,
            "epochs": self.epochs,
            "stop": (s.stop_reason, s.stop_status) if self.run.should_stop and not self.is_left else None,
            "streams": save_streams(),
            "epoch_streams": self._streams if is_unfinished else None,
            "generators": states,
            "window": window,
        }

    def load(self, states: list[dict[str, Any]] | None, inside: bool) -> None:
        """Take the positions that a checkpoint holds, one of each rank. inside: the loop is in an epoch."""
        s = self.run.state
        self.pending = None
        if states is None:
            log.warning(
                "This checkpoint of an older version of Hookline has neither the random streams nor the "
                "position in the epoch. The loop continues with the first batch of epoch %d.",
                s.counts.epochs_seen,
            )
            return
        if not states or not all(isinstance(each, dict) and "batches" in each for each in states):
            raise CheckpointError("The position of the loop in this checkpoint cannot be read.")
        self.epochs = states[0].get("epochs", 0)
        is_own = len(states) == s.world_size
        kept = states[s.rank] if is_own else states[0]
        if kept["world_size"] != s.world_size:
            log.warning(
                "This checkpoint is of %d ranks, and there are %d here. The random streams are not "
                "restored%s.",
                kept["world_size"],
                s.world_size,
                f", and the {kept['batches']} batches of epoch {s.counts.epochs_seen} that are done are "
                "trained again, because the ranks share the data in another way"
                if kept["batches"]
                else "",
            )
            return
        if not is_own:  # saved by one of several ranks: its streams are not those of the others
            kept = {**kept, "streams": None, "epoch_streams": None, "generators": {}, "window": {}}
        if kept["streams"] is not None:
            restore_streams(kept["streams"])
        if not inside:
            self.pending = kept

    # ---- the loop ------------------------------------------------------------------------------------------

    def start_body(self) -> None:
        """Begin the body of an epoch: restore the random streams that it began with, or keep them."""
        self.is_in_epochs, self.has_batches = True, False
        self._begin()
        kept = self.pending
        if kept is not None and not kept["batches"] and not kept["updates"] and not kept["generators"]:
            self.pending = None  # between two epochs: nothing else is left to restore

    def _begin(self) -> None:
        kept = self.pending
        if kept is not None and (streams := kept["epoch_streams"] or kept["streams"]) is not None:
            restore_streams(streams)
            self._streams = streams
        else:
            self._streams = save_streams()
        if kept is not None and not (kept["batches"] or kept["updates"]):
            self._reopen_window(kept)  # it stayed open over the end of the epoch before
        self._first_step = self.run.state.step - (kept["updates"] if kept is not None else 0)

    def start_batches(self, loader: Any) -> int:
        """Begin the batches of an epoch. Return how many of them the loaded checkpoint has done."""
        if not self.is_in_epochs:
            self._begin()
            self.warn_of_repeated_epochs()
        kept = self.pending
        self._generators = generators_of(loader)
        if kept is not None:
            self._restore_generators(kept)
        self._generator_states = _states(self._generators)
        return int(kept["batches"]) if kept is not None else 0

    def _restore_generators(self, kept: dict[str, Any]) -> None:
        for name, (seed, state) in kept["generators"].items():
            generator = self._generators.get(name)
            # between two epochs, a generator with another seed was seeded by the loop for this epoch
            if generator is not None and (kept["batches"] or generator.initial_seed() == seed):
                generator.set_state(state)

    def skip(self, batches: Iterator[Any], count: int, reads: bool) -> None:
        """Drop the first batches, which are done, and restore the random streams after them.

        reads: whether the loader begins with the first batch of the epoch.
        """
        kept, self.pending = self.pending, None
        if kept is None or not count:
            return
        for number in range(count if reads else 0):
            try:
                next(batches)
            except StopIteration:
                raise CheckpointError(
                    f"The loaded checkpoint was made after {count} batches of epoch "
                    f"{self.run.state.epoch}, and the loader has only {number}. Resume with the same data, "
                    "or call line.epoch(loader, skip=False) if the loader itself begins after them."
                ) from None
        self._restore_inside(kept)

    def _restore_inside(self, kept: dict[str, Any]) -> None:
        """Restore the gradients and the random streams in the middle of an epoch."""
        self._reopen_window(kept)
        if kept["streams"] is not None:
            restore_streams(kept["streams"])

    def _reopen_window(self, kept: dict[str, Any]) -> None:
        """Restore the gradients that waited for their update."""
        if kept["window"]:
            s = self.run.state
            put_gradients(s.module, s.setup.wrapped_model, kept["window"]["gradients"])
            self.run.batch.reopen_window(kept["window"]["losses"])

    def warn_of_window(self) -> None:
        """Warn if a state is taken while gradients of the current batch wait for their update."""
        batch = self.run.batch
        if batch.is_open and batch.window_losses():
            log.warning(
                "line.state_dict() was called inside an accumulation window, in batch %d: it does not have "
                "the gradients that wait for the update. Call it after the update, or use "
                "line.save_checkpoint(), which keeps them.",
                self.run.state.batch_idx,
            )

    # ---- a loop that starts its batches itself -------------------------------------------------------------

    @property
    def first_batch(self) -> int:
        """Return the number of the batch with which the epoch continues; 0: it begins."""
        return int(self.pending["batches"]) if self.pending is not None else 0

    def continue_at_batch(self) -> None:
        """Restore what the loaded checkpoint has in the middle of an epoch. The next batch is its next
        one.
        """
        kept, self.pending = self.pending, None
        if kept is not None and kept["batches"]:
            self._restore_inside(kept)

    def report_finished(self, path: str) -> None:
        """Warn that a hook had stopped the loop of the loaded checkpoint, so that nothing is trained."""
        s, epochs = self.run.state, self.epochs
        if s.rank == 0:
            log.warning(
                "Nothing to train: this loop was %s at step %d (%s). To train on, pass its checkpoint: "
                "line.load_checkpoint(%r)%s. To start over, choose another run_dir.",
                s.stop_status,
                s.step,
                s.stop_reason,
                path,
                f", or train longer: line.epochs(n) with n above {epochs}" if epochs else "",
            )

    # ---- what cannot be skipped ----------------------------------------------------------------------------

    def warn_of_repeated_epochs(self) -> None:
        """Warn that a loop without `line.epochs` counts its epochs itself."""
        done = self.run.state.counts.epochs_seen
        if self.pending is not None and done:
            log.warning(
                "The loaded checkpoint has %s. This loop counts its epochs without the line, so it trains "
                "them again if it starts at 0: use `for epoch in line.epochs(n)`, or `range(%d, n)`.",
                count_noun(done, "complete epoch", "complete epochs"),
                done,
            )

    def warn_of_repeated_batches(self, remedy: str) -> None:
        """Warn that the batches of the current epoch that are done are trained again."""
        kept, self.pending = self.pending, None
        if kept is None or not (kept["batches"] or kept["updates"]):
            return
        done = (
            count_noun(kept["batches"], "batch", "batches")
            if kept["batches"]
            else count_noun(kept["updates"], "update", "updates")
        )
        log.warning(
            "The loaded checkpoint was made after %s of epoch %d, and they are trained again: the line "
            "cannot skip them, because the loop does not read its batches from line.epoch(loader). %s",
            done,
            self.run.state.counts.epochs_seen,
            remedy,
        )
