"""Write the predictions of every rank to disk while `trainer.predict` runs."""

from __future__ import annotations

import itertools
import logging
import math
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from hookline.engine.checks import Above, Count, check_path, checked_parameters
from hookline.engine.hook import Hook
from hookline.run.predictions import COMPLETE, PredictionShards
from hookline.util.errors import HooklineError, OptionError

log = logging.getLogger("hookline")
WHO = "PredictionWriter"
FOLDER = "predictions"
VISIBLE_SECONDS = 30.0
"""Seconds until a rank must see the folder that rank zero has made; network file systems are slow."""


class PredictionWriter(Hook):
    """Writes what `predict_step` returns into shards, a part of the predictions at a time.

    Each rank writes its own shards: tensors as safetensors, other values as JSON lines, with the indices of
    the samples. `hookline.read_predictions(hook.folder)` returns the predictions of all ranks in the order of
    the dataset. `trainer.predict` then returns [] unless `return_predictions=True` is passed, so that
    the memory it needs does not grow.
    """

    tier = "builtin"
    observes = True
    writes_predictions = True

    @checked_parameters
    def __init__(
        self,
        dirpath: str | Path | None = None,
        per: Literal["sample", "batch"] = "sample",
        shard_mb: Annotated[float, Above(0)] = 64.0,
        shard_batches: Annotated[int, Count(1)] | None = None,
        name: str | None = None,
    ) -> None:
        """Choose the folder and the size of the shards.

        dirpath: a new or empty folder, relative to the run's directory; None: `predictions` there, or
        `predictions-2` and so on if it exists. per: 'sample' splits the output of a batch, so that each
        sample has a prediction of its own; 'batch' writes the output as it is.
        shard_mb: megabytes that are kept in memory before a shard is written. shard_batches: the most batches
        in a shard. A process that is killed loses the shard in memory only.
        """
        super().__init__(name)
        if dirpath is not None:
            check_path(f"{WHO}: dirpath", dirpath, "a folder for the predictions")
        self.dirpath = None if dirpath is None else Path(dirpath).expanduser()
        self.per, self.shard_mb, self.shard_batches = per, shard_mb, shard_batches
        self.folder: Path | None = None
        """The folder of the newest predictions."""
        self._shards: PredictionShards | None = None

    def setup(self, stage: str) -> None:
        if stage == "predict" and self.ranks != "all":
            raise OptionError(
                f"{WHO}: ranks={self.ranks!r}, but every rank writes its predictions; leave it at 'all'.",
                option="ranks",
                value=self.ranks,
            )

    def on_predict_start(self, state: Any) -> None:
        ranks = state.trainer.ranks
        folder = Path(ranks.decide(lambda: str(self._make_folder(state.trainer))))
        _wait_until_visible(folder, ranks.rank)
        self.folder = folder
        if self.dirpath is None and folder.name != FOLDER and ranks.rank == 0:
            log.warning(
                "%s has the predictions of an earlier run, which are kept: these are written to %s. Read "
                "them by read_predictions(writer.folder), or read_predictions(trainer.run_dir).",
                folder.with_name(FOLDER),
                folder,
            )
        if ranks.is_reader:  # the other ranks of a tensor-parallel group have the same predictions
            self._shards = PredictionShards(
                folder,
                ranks.rank,
                ranks.readers,
                self.per,
                self.shard_mb * 1e6,
                math.inf if self.shard_batches is None else self.shard_batches,
            )

    def _make_folder(self, trainer: Any) -> Path:
        """Make the folder, so that no other run writes into it."""
        is_absolute = self.dirpath is not None and self.dirpath.is_absolute()
        base = Path() if is_absolute else Path(trainer.run_dir)  # reading run_dir makes it
        wanted = base / (self.dirpath or FOLDER)
        further = itertools.count(2) if self.dirpath is None else ()
        candidates = itertools.chain([wanted], (base / f"{FOLDER}-{number}" for number in further))
        try:
            for folder in candidates:
                folder.parent.mkdir(parents=True, exist_ok=True)
                try:
                    folder.mkdir()
                except FileExistsError:
                    if self.dirpath is None or not folder.is_dir() or any(folder.iterdir()):
                        continue
                return folder.absolute()
        except OSError as error:
            raise OptionError(f"{WHO}: {wanted} cannot be made: {error}") from error
        raise OptionError(
            f"{WHO}: dirpath={str(self.dirpath)!r} is not an empty folder ({wanted}), and the predictions of "
            "two runs are not mixed. Choose a new folder, or leave dirpath out.",
            option="dirpath",
            value=str(self.dirpath),
        )

    def on_predict_batch_end(
        self, outputs: Any, batch_idx: int, dataloader_name: str, sample_ids: list[int] | None
    ) -> None:
        shards = self._shards
        if shards is not None:
            try:
                shards.add(dataloader_name, batch_idx, sample_ids, outputs)
            except Exception as error:
                # with on_error='warn' the pass continues, and predictions with a gap must not look complete
                self._shards = None
                self._end(shards, "failed", str(error))
                raise

    def on_predict_end(self, state: Any) -> None:
        shards, self._shards = self._shards, None
        if shards is not None:
            stopped = state.should_stop
            shards.finish("stopped" if stopped else COMPLETE, state.stop_reason if stopped else "")

    def on_exception(self, exception: BaseException) -> None:
        shards, self._shards = self._shards, None
        if shards is not None:
            self._end(shards, "failed", f"{type(exception).__name__}: {exception}")

    def teardown(self) -> None:
        self._shards = None

    def _end(self, shards: PredictionShards, status: str, reason: str) -> None:
        """Write what there is. If that fails too, the folder lacks its manifest and is not complete."""
        try:
            shards.finish(status, reason)
        except HooklineError as error:
            log.warning("%s", error)


def _wait_until_visible(folder: Path, rank: int) -> None:
    until = time.monotonic() + VISIBLE_SECONDS
    while not folder.is_dir():
        if time.monotonic() > until:
            raise HooklineError(
                f"{WHO}: rank {rank} does not see {folder}, which rank 0 has made. Every rank writes its "
                "predictions there, so choose a folder on a disk that all machines share."
            )
        time.sleep(0.05)
