"""Facts of the current run, or of the last one, as attributes of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.run.module import PlainSteps
from hookline.run.save_request import make_rollback_request
from hookline.run.view import View
from hookline.util.errors import HooklineError

if TYPE_CHECKING:
    from hookline.distributed.base import Strategy
    from hookline.distributed.comm import Ranks
    from hookline.run.optimizers import Schedule
    from hookline.run.run import Run
    from hookline.run.timings import Timings


class RunView(View):
    """Facts of a run as attributes of the trainer, and the way to stop it."""

    strategy: Strategy
    _run: Run | None
    _last: Run | None
    _fitted: Run | None

    @property
    def run_id(self) -> str:
        """The id of this or the last fit, which a resumed fit keeps; empty before the first fit."""
        return self._fitted.identity.id if self._fitted is not None else ""

    @property
    def ranks(self) -> Ranks:
        """The communication between the ranks of the run."""
        return self.strategy.ranks

    @property
    def loss(self) -> Any:
        """The loss function given to fit for a plain nn.Module; a hook may replace it during a run."""
        return getattr(self._last.steps, "loss", None) if self._last is not None else None

    @loss.setter
    def loss(self, loss: Callable[..., Any]) -> None:
        if self._last is None or not isinstance(self._last.steps, PlainSteps):
            raise HooklineError(
                "trainer.loss can be replaced in a run of a plain nn.Module; a hookline.Module computes "
                "its own: replace it in on_before_backward."
            )
        self._last.steps.loss = loss

    def num_batches(self, kind: str = "train") -> dict[str, int | None]:
        """Return the batches per pass of each loader of a kind ('train', 'val', 'test', 'predict') by name.

        None: the loader has no length.
        """
        loaders = self._last.data.loaders.get(kind, []) if self._last is not None else []
        return {each.name: each.length for each in loaders}

    @property
    def loaders(self) -> Any:
        """The training loaders of the run: their `names`, and of a mixture `set_weights`, `add`, `remove`."""
        run = self._last
        if run is not None and run.data.is_mixture:
            return run.data.train
        from hookline.data.mixture import OneLoader

        return OneLoader([each.name for each in run.data.loaders.get("train", [])] if run is not None else [])

    @property
    def num_training_batches(self) -> int | None:
        """Batches per training epoch; None if there is no training loader yet, or it has no length."""
        return (
            self._last.data.train.length
            if self._last is not None and self._last.data.train is not None
            else None
        )

    @property
    def timings(self) -> Timings | None:
        """Where the time of this or the last fit went, since its resume; None before the first fit."""
        return self._fitted.state.timings if self._fitted is not None else None

    @property
    def schedules(self) -> list[Schedule]:
        """The learning-rate schedulers of the run, and when they advance."""
        return self._last.schedules if self._last is not None else []

    def roll_back(
        self,
        to: str | Path | None = None,
        *,
        before: int | None = None,
        reason: str = "",
        on_missing: str = "raise",
    ) -> None:
        """Request that the running fit goes back to a checkpoint and continues from there.

        The loop does it at the next batch boundary of all ranks; if several requests are made by then, the
        first counts. The run is then as in a new process that resumes from that checkpoint.
        on_checkpoint_load is emitted, but not `setup` and on_train_start.

        to: None: the newest checkpoint of this run; 'best': the best one that a monitor kept; or the path or
        URL of a checkpoint. before: with None, only checkpoints of this step or an earlier one. reason: text
        for the log. on_missing: 'raise', or 'continue' the training with a warning if there is no such
        checkpoint.
        """
        from hookline.training.rollback import check_can_roll_back

        if self._run is None or self._run.stage != "fit" or self._run.state.status != "training":
            raise HooklineError("roll_back() works in a fit that is training: hooks call it.")
        request = make_rollback_request(to, before, reason, on_missing)
        check_can_roll_back(self._run)
        self._run.boundary.request_rollback(request)

    def export_folder(
        self, path: str | Path, folder: Path, write: Callable[[Mapping[str, Any], Path], None]
    ) -> bool:
        """Write a directory for another program from a durable checkpoint; return whether it was written.

        write: called with the weights that evaluations used, by name, and an empty directory, which then
        replaces `folder` as a whole. Nothing is written if `folder` is of this checkpoint already, or on
        another rank than zero.
        """
        if self._run is None:
            raise HooklineError("export_folder() works during a run: hooks call it.")
        from hookline.training.saving import export

        return export(self._run, path, folder, write)

    @property
    def estimated_stepping_batches(self) -> float:
        """The number of optimizer updates of the run, for schedulers; infinite if it is not known."""
        if self._run is None:
            raise HooklineError(
                "estimated_stepping_batches is known during a run, from configure_optimizers on."
            )
        from hookline.training.loading import estimated_steps

        return estimated_steps(self._run)
