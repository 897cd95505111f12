"""`Line`: hooks for a training loop that you wrote yourself."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from hookline.data.sources import length_of
from hookline.interop.hosted.checkpoints import load
from hookline.interop.hosted.host import RAW_LOOP, Host
from hookline.interop.hosted.run import HostedRun
from hookline.run.optimizers import bare
from hookline.training.participants import attach_failures, raise_first
from hookline.util.errors import END_EPOCH, HooklineError, LossError, StopTraining

log = logging.getLogger("hookline")


class Line(HostedRun):
    """Lets hooks hear a hand-written loop.

    >>> line = Line(model, optimizer, hooks=[...])
    >>> with line:
    ...     for epoch in line.epochs(3):
    ...         for batch in line.epoch(loader):
    ...             loss = loss_function(model(batch))
    ...             optimizer.zero_grad()
    ...             line.backward(loss)
    ...             optimizer.step()
    ...         for batch in line.validation(val_loader):
    ...             line.log("val/loss", loss_function(model(batch)))

    Steps and `zero_grad` of the optimizers are heard by themselves. Any of the calls may be left out: then
    its events are missing, and nothing else changes. `start_batch`, `before_backward` and so on are there for
    loops of another shape.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        optimizers: Any = (),
        *,
        schedulers: Any = (),
        hooks: Iterable[Any] = (),
        host: Host = RAW_LOOP,
        **options: Any,
    ) -> None:
        """optimizers, schedulers: one, or a list of them. What does not exist yet can be said later, by
        `attach`.

        options: logger (True: a log below the run's directory; False, the default; a Logger, or several),
        run_dir, config, accounting, log_every_n_steps, count_tokens, on_save_error ('raise', or 'warn': go on
        without a checkpoint that cannot be written), and max_epochs and max_steps, which hooks are told; the
        loop decides.
        """
        super().__init__(host, hooks=hooks, **options)
        self._current_epoch: object = None
        if module is not None:
            self.attach(module, optimizers, schedulers)

    def __enter__(self) -> Line:
        if self.is_running:  # the run that is going on stays whole
            raise HooklineError(
                "This line is in a run already: a loop inside another one takes a line of its own."
            )
        try:
            self.begin()
            self.start_fit()
            self.start_training()
        except BaseException as error:
            self._abandon(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, StopTraining):  # what a hook may raise, the loop may raise too
            self.stop(error.reason)
        elif error is not None:
            self._abandon(error)
            return False
        try:
            self.end_training()
            self.end_fit()
        except BaseException as failure:
            self._abandon(failure)
            raise
        raise_first(self.tear_down())
        return True

    def _abandon(self, error: BaseException) -> None:
        self.fail(error)
        attach_failures(error, self.tear_down())

    # ---- epochs, batches, validation -----------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """The numbers of the epochs that are left, until a hook asks for the end. What is done in one belongs
        to it.
        """
        self.must_run()
        done = self.state.epochs_seen
        if done >= n:
            log.warning(
                "Nothing is left to train: %d epochs are done, and the loop asks for %d in all. A new "
                "training takes a new Line.",
                done,
                n,
            )
        for number in range(done, n):
            if self.should_stop:
                return
            yield number
            self.end_epoch()

    def epoch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of one epoch. It ends when the next one begins, with `epochs`, or with the line:
        validation is part of it.

        Batches that a hook leaves out are not seen; after a request to stop there are no more.
        """
        self.end_epoch()
        if self.should_stop:
            return
        self.start_epoch(length_of(loader))
        self._current_epoch = current = object()
        for batch in loader:
            if self._current_epoch is not current:
                raise HooklineError(
                    "Another epoch began inside this one. Zip the loaders, and give that to line.epoch: "
                    "`line.epoch(zip(one, two))`."
                )
            signal = self.start_batch(batch)
            if signal is END_EPOCH:
                break
            if signal is None:
                yield self.state.batch
                self.end_batch()
            if self.state.should_stop and self.should_stop:
                return
        self.epoch_is_whole = True

    def validation(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a validation; `line.log("val/loss", loss)` in it becomes a mean. Modes and gradients
        are the loop's.
        """
        current = self.start_validation()
        for batch in loader:
            if self.current_pass is not current:
                raise HooklineError(
                    "Another validation, or a training batch, began inside this validation. "
                    "Finish one before the other begins."
                )
            current.start_batch(batch)
            yield batch
            if self.current_pass is current:
                current.end_batch()
        self.end_validation()

    # ---- the update ----------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, divide_by: float = 1, **options: Any) -> None:
        """`loss.backward()` with its events.

        divide_by: the number of batches that make one update, so that hooks see the whole loss of each.
        """
        if not loss.requires_grad:
            raise LossError(
                "line.backward takes the loss with its graph; this one was detached, or gradients are "
                "switched off."
            )
        loss = self.before_backward(loss)
        self.differentiate(loss if divide_by == 1 else loss / divide_by, **options)
        self.after_backward()

    def differentiate(self, loss: Tensor, **options: Any) -> None:
        """What `backward` does between its events."""
        loss.backward(**options)  # type: ignore[no-untyped-call]

    def clip_gradients(self, max_norm: float, optimizer: Any = None) -> Tensor:
        """Clip by the total norm, which is returned. Hooks see the gradients before, and hear of it after."""
        self.must_run()
        s = self.state
        chosen = s.optimizers if optimizer is None else [bare(optimizer)]
        indices = [index for index, each in enumerate(s.optimizers) if any(each is one for one in chosen)]
        parameters = [p for each in chosen for group in each.param_groups for p in group["params"]]
        self.unscale(parameters)
        for index in indices:
            self.updates.before(index)
        if gradients := self.updates.left_out(indices):
            return nn.utils.get_total_norm(gradients)  # there will be no update: nothing to clip
        norm = self.clip(parameters, max_norm)
        self.updates.clip(indices, norm, max_norm)
        return norm

    def unscale(self, parameters: list[Any]) -> None:
        """What `clip_gradients` does first, so that hooks see the real gradients: a loop with a scaler does
        it itself.
        """

    def clip(self, parameters: list[Any], max_norm: float) -> Tensor:
        """What `clip_gradients` does between its events."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint should keep of the hooks and of how far the run is.

        A batch whose update is made ends now, if the loop asks for this in its body: its hooks have heard of
        it then.
        """
        if self.batch.has_updated:
            self.end_batch()
        return super().state_dict()

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on from a checkpoint that `save_checkpoint` wrote: module, optimizers, schedulers, hooks and
        counters.
        """
        self.must_run()
        load(self, path)
