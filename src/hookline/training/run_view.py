"""Facts of the current run, or of the last one, as attributes of the trainer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.engine.checks import AtLeast
from hookline.run.module import PlainSteps
from hookline.run.options import OPTION_NAMES, Options
from hookline.run.view import View
from hookline.util.errors import HooklineError, OptionError, misspelling_of

if TYPE_CHECKING:
    from hookline.audit.session import Auditing
    from hookline.data.samples import Sample
    from hookline.digests.session import Digesting
    from hookline.distributed.base import Strategy
    from hookline.distributed.comm import Ranks
    from hookline.engine.hook_list import HookList
    from hookline.engine.plan import Plan
    from hookline.run.optimizers import Schedule
    from hookline.run.option_tables import Audit
    from hookline.run.run import Run
    from hookline.run.timings import Timings
    from hookline.tracing.session import Tracing
    from hookline.training.trial import BatchSizes


SETTABLE = ("accumulate_grad_batches", "max_epochs", "max_steps", "max_time")
"""The options that can be set after the trainer was made, also during a run."""
STEERING = (*OPTION_NAMES, "should_stop")
"""The attributes whose misspelling is refused: an attribute of that name would have no effect."""


class OptionAttribute:
    """An option of the trainer as an attribute: `trainer.max_epochs`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, trainer: RunView | None, owner: type) -> Any:
        return self if trainer is None else getattr(trainer.options, self.name)

    def __set__(self, trainer: RunView, value: Any) -> None:
        if self.name not in SETTABLE:
            raise OptionError(
                f"{self.name} is chosen when the trainer is made: Trainer({self.name}=...). Options that can "
                f"be set later: {', '.join(SETTABLE)}.",
                option=self.name,
                value=value,
                allowed=SETTABLE,
            )
        checked = dataclasses.replace(trainer.options, **{self.name: value})
        setattr(trainer.options, self.name, getattr(checked, self.name))


@functools.cache
def meant_option(name: str) -> str:
    """Return the option that a name is a misspelling of, such as `max_epochs` for `max_epoch`; else an empty
    string. A plural such as `seeds`, or a name with an underscore in front, is a name of its own.
    """
    if name.startswith("_"):
        return ""
    plural = next((each for each in STEERING if each in (f"{name}s", f"{name}es")), "")
    return plural or misspelling_of(name, STEERING)


class RunView(View):
    """Facts of a run as attributes of the trainer, and the way to stop it."""

    options: Options
    audit: Audit
    plan: Plan
    hooks: HookList
    strategy: Strategy
    _run: Run | None
    _last: Run | None
    _fitted: Run | None
    max_epochs: int | None
    max_steps: int
    max_time: Any

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute. Hooks may add attributes of their own, but not a misspelled option."""
            if name not in self.__dict__ and not hasattr(type(self), name) and (meant := meant_option(name)):
                raise OptionError(
                    f"{type(self).__name__} has no option {name!r}. Did you mean {meant!r}? An attribute of "
                    "your own needs a name that is less similar to an option.",
                    option=name,
                    value=value,
                    allowed=(meant,),
                )
            object.__setattr__(self, name, value)

    @functools.cached_property  # both are loaded when the first run begins
    def tracing(self) -> Tracing:
        """The traces of the runs, which a hook can start and stop."""
        from hookline.tracing.session import Tracing

        return Tracing(self.plan, self.audit.trace)

    @functools.cached_property
    def auditing(self) -> Auditing:
        """The audit of the hooks of the runs."""
        from hookline.audit.session import Auditing

        return Auditing(self.plan, self.hooks, self.audit.changes)

    @functools.cached_property
    def digesting(self) -> Digesting:
        """The digests of the fits."""
        from hookline.digests.session import Digesting

        return Digesting(self.options.digests)

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

    @property
    def accumulate_grad_batches(self) -> int:
        """The batches that make one update. Set in a run, a new value holds from the next window on."""
        return self.options.accumulate_grad_batches if self._run is None else self._run.traits.accumulate

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, batches: int) -> None:
        self.check_accumulation(batches)
        if self._run is None:
            self.options.accumulate_grad_batches = batches
            return
        from hookline.training.composition import set_accumulation

        set_accumulation(self._run, batches)

    def check_accumulation(self, batches: int) -> None:
        """Raise if `accumulate_grad_batches` cannot be set to this number, in this run if there is one.

        batches: the number to check.
        """
        AtLeast(1)("accumulate_grad_batches", batches)
        if self._run is not None:
            from hookline.training.composition import check_accumulation

            check_accumulation(self._run, batches)

    def _current(self, why_not: str, *, in_fit: bool = False) -> Run:
        """Return the current run. Raise with this text if there is none, or if it has to be a fit."""
        if self._run is None or (in_fit and self._run.stage != "fit"):
            raise HooklineError(why_not)
        return self._run

    # ---- trials, for hooks that search a setting -----------------------------------------------------------

    def fit_aside(
        self, hook: Any, options: Mapping[str, Any], module: Any, train: Any = None, **arguments: Any
    ) -> None:
        """Run a short fit with a trainer like this one and this hook only, also in `setup` of a run.

        hook: the hook that searches. options: replace those of this trainer. module, train, arguments: as in
        `fit`. The random streams are restored; the hook restores the rest.
        """
        from hookline.training.trial import fit_aside

        fit_aside(self, hook, options, module, train, **arguments)

    @property
    def is_resuming(self) -> bool:
        """Whether the run continues from a checkpoint, from `setup` on."""
        return self._run is not None and self._run.resume.path is not None

    @property
    def batch_sizes(self) -> BatchSizes:
        """The batch size of the training loader of the run: find out, try and set it."""
        from hookline.training.trial import BatchSizes

        return BatchSizes(self._current("trainer.batch_sizes works during a run: hooks use it."))

    def num_batches(self, kind: str = "train") -> dict[str, int | None]:
        """Return the batches per pass of each loader by name. None: the loader has no length.

        kind: 'train', 'val', 'test' or 'predict'.
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
        from hookline.run.save_request import make_rollback_request

        request = make_rollback_request(to, before, reason, on_missing)
        check_can_roll_back(self._run)
        self._run.boundary.request_rollback(request)

    def samples(self, step: int | None = None) -> list[Sample]:
        """Return every sample behind an update of this or the last fit: loader, rank, batch and index.

        The samples are computed from what determines the order, on every rank for all ranks. Raise
        `UnknownSamples` if a loader is not read by index.

        step: the step that the update makes, as rows of metrics have it. One more than the run has made: the
        update that was begun and not made, because the run ended in it or skipped it. None: the update that
        is being made, up to the current batch.
        """
        from hookline.training.samples import samples_of

        if self._fitted is None:
            raise HooklineError("samples() works during a fit and after it; there was none yet.")
        return samples_of(self._fitted, step)

    def exclude_samples(self, samples: Iterable[int], loader: str | None = None, reason: str = "") -> None:
        """Leave samples out of the training: hooks call it, from on_train_start on.

        It takes effect where the data is opened next: before the first batch, after `roll_back` at once, or
        in the next epoch. Batches stay full; an epoch becomes shorter. Checkpoints and the run record have
        the list. One rank may call it for all.

        samples: indices of the dataset of a training loader. loader: its name, if there are several. reason:
        text for the log and the run record.
        """
        from hookline.training.samples import exclude_samples

        exclude_samples(
            self._current("exclude_samples() works in a fit: hooks call it.", in_fit=True),
            samples,
            loader,
            reason,
        )

    def export_folder(
        self, path: str | Path, folder: Path, write: Callable[[Mapping[str, Any], Path], None]
    ) -> bool:
        """Write a directory for another program from a durable checkpoint; return whether it was written.

        Nothing is written if `folder` is of this checkpoint already, or on another rank than zero.

        path: the checkpoint. folder: the directory to write. write: called with the weights that evaluations
        used, by name, and an empty directory, which then replaces `folder` as a whole.
        """
        from hookline.training.saving import export

        return export(
            self._current("export_folder() works during a run: hooks call it."), path, folder, write
        )

    @property
    def estimated_stepping_batches(self) -> float:
        """The number of optimizer updates of the run, for schedulers; infinite if it is not known."""
        from hookline.training.loading import estimated_steps

        return estimated_steps(
            self._current("estimated_stepping_batches is known during a run, from configure_optimizers on.")
        )

    @property
    def remaining_steps(self) -> float:
        """The number of optimizer updates from here to the end of the run; infinite if it is not known."""
        from hookline.training.loading import remaining_steps

        return remaining_steps(self._current("remaining_steps is known during a run, from on_fit_start on."))


for _name in OPTION_NAMES:
    if not hasattr(RunView, _name):
        setattr(RunView, _name, OptionAttribute(_name))
