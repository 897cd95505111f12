"""Hooks inside Lightning's Trainer: a Lightning callback that emits Hookline's events."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from hookline.interop.hosted.batch import Pass
from hookline.interop.hosted.host import LIGHTNING_HOST
from hookline.interop.hosted.objects import HostLogger, refuse_other_options
from hookline.interop.hosted.run import HostedRun
from hookline.run.optimizers import bare
from hookline.run.state_parts import fact
from hookline.training.pass_events import PREDICTION, TEST, VALIDATION, PassEvents, SanityCheck
from hookline.training.run_events import end_as
from hookline.util.errors import END_EPOCH, HookError


def lightning_callback(hooks: Iterable[Any], options: dict[str, Any]) -> Any:
    """Return the callback; hooks that Lightning cannot serve are rejected now."""
    kind = type("HooklineCallback", (CallbackInLightning, _base()), {"__doc__": CallbackInLightning.__doc__})
    return kind(hooks, options)


def _base() -> Any:
    """Return the callback class of whichever of Lightning's two packages is in use."""
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
        from pytorch_lightning import Callback as Older  # type: ignore[import-not-found,unused-ignore]

        return Older
    from lightning.pytorch import Callback  # type: ignore[import-not-found,unused-ignore]

    return Callback


class CallbackInLightning:
    """Hookline's hooks as one Lightning callback. `line` is the object that hooks see as `trainer`; its
    `outer` is Lightning's.
    """

    def __init__(self, hooks: Iterable[Any], options: dict[str, Any]) -> None:
        super().__init__()
        refuse_other_options(LIGHTNING_HOST, options)
        own = "logger" not in options
        self.line = HostedRun(
            LIGHTNING_HOST,
            hooks=hooks,
            announces_steps=False,
            host_logs=own,
            **{**options, "logger": [LightningLoggers(self._log_row)] if own else options["logger"]},
        )
        self._check = SanityCheck(self.line)
        self._prediction = PassEvents(self.line, PREDICTION)
        self._has_own_log_interval = "log_every_n_steps" in options
        self._has_begun = False
        """Whether on_fit_start was emitted: Lightning's own comes before the optimizers exist."""
        self._scaler: Any = None
        """The gradient scaler of Lightning, if it has one."""

    @property
    def state_key(self) -> str:
        """Return the key under which Lightning saves the state of the hooks."""
        return "HooklineCallback"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the hooks for a Lightning checkpoint."""
        return self.line.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the hooks from a Lightning checkpoint."""
        self.line.load_state_dict(state_dict)

    # ---- from set-up to teardown ---------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin a run."""
        line, options, stage = self.line, self.line.options, str(getattr(stage, "value", stage))
        line.outer = trainer
        line.attach(pl_module)
        line.set_device(pl_module.device, pl_module)
        line.set_rank(trainer.global_rank, trainer.local_rank, trainer.world_size)
        options.max_epochs, options.max_steps = (
            trainer.max_epochs if trainer.max_epochs is not None else -1,
            trainer.max_steps,
        )
        options.check_val_every_n_epoch = trainer.check_val_every_n_epoch or 1
        if not self._has_own_log_interval:
            options.log_every_n_steps = max(1, trainer.log_every_n_steps)
        self._has_begun = False
        if stage == "fit":
            line.start_new()
        line.begin(stage)

    def _begin_fit(self, trainer: Any, pl_module: Any) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        line, s = self.line, self.line.state
        line.attach(pl_module, trainer.optimizers, [each.scheduler for each in trainer.lr_scheduler_configs])
        line.set_device(pl_module.device, trainer.strategy.model)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if trainer.global_step and not s.resumed:  # from a checkpoint without these hooks
            s.counts.continue_at(
                trainer.global_step // max(1, len(trainer.optimizers)), trainer.current_epoch
            )
        line.start_fit()

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Emit on_fit_start, then on_sanity_check_start."""
        self._begin_fit(trainer, pl_module)
        self._check.start()

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        """Emit on_sanity_check_end and drop the results."""
        self._check.end()
        self._check.forget()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Emit on_fit_start if it was not emitted, then on_train_start."""
        self._begin_fit(trainer, pl_module)
        self.line.start_training()
        self._apply_stop(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Emit on_train_end, with the reason if Lightning was stopped."""
        if trainer.should_stop and not self.line.should_stop:
            self.line.stop("Lightning's trainer.should_stop was set")
        self.line.end_training()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Emit on_fit_end."""
        if not self._has_begun:  # there was nothing to train
            self._begin_fit(trainer, pl_module)
            end_as(self.line, "completed")
        self.line.end_fit()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Tear the hooks down after a run that did not fail."""
        if self.line.status == "running":  # a validation, a test or a prediction by itself
            end_as(self.line, "completed")
        if self.line.is_running:
            self.line.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Emit on_exception and tear the hooks down, because Lightning does not after a failure."""
        if self.line.is_running:
            self.line.fail(exception)

    # ---- training ------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any, first: int = 0) -> None:
        """Start an epoch under Lightning's number. first: the number of its first batch, in a resumed one."""
        counts = self.line.state.counts
        counts.continue_at(counts.step, trainer.current_epoch, counts.resumed)
        batches = trainer.num_training_batches
        self.line.start_epoch(int(batches) if batches != float("inf") else None, first)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start a batch. StopIteration ends the epoch in Lightning."""
        if (
            not self.line.epoch_is_open
        ):  # Lightning does not call on_train_epoch_start when it resumes inside an epoch
            self.on_train_epoch_start(trainer, pl_module, batch_idx)
        signal = self.line.start_batch(batch)
        if signal is END_EPOCH:
            raise StopIteration
        if signal is not None:
            raise HookError(
                f"A hook returned {signal!r} from on_train_batch_start. {LIGHTNING_HOST.name} cannot skip a "
                "batch; it can end the epoch, by END_EPOCH."
            )

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Emit on_before_zero_grad."""
        self.line.updates.clear(self._index(optimizer), optimizer)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Emit on_before_backward with the user's loss: Lightning has divided it by the accumulation and
        scaled it.
        """
        windows = trainer.accumulate_grad_batches
        whole = loss if windows == 1 else loss * windows
        if self._scaler is not None:
            whole = whole / self._scaler._scale  # the public get_scale() would synchronize the device
        if self.line.before_backward(whole) is not whole:
            raise HookError(
                f"A hook returned another loss from on_before_backward, but {LIGHTNING_HOST.name} does not "
                "allow it to be replaced."
            )

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Emit on_after_backward."""
        self.line.after_backward()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Emit on_before_optimizer_step before Lightning clips, unless training_step returned None and there
        are no gradients.
        """
        updates, index = self.line.updates, self._index(optimizer)
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            updates.before(index)
            updates.recomputing = self._scaler is None  # LBFGS computes the loss again inside its step
        elif self._scaler is not None:
            updates.skip(index, "no_loss")  # else the optimizer makes an empty step, which is observed

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the batch, and the update if there was one."""
        if isinstance(outputs, dict) and "loss" in outputs and trainer.accumulate_grad_batches > 1:
            outputs = {**outputs, "loss": outputs["loss"] * trainer.accumulate_grad_batches}
        if self._scaler is not None and self.line.updates.announced:
            self.line.updates.skip_missing()
        self.line.end_batch(outputs)
        self._apply_stop(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the epoch with the metrics that Lightning has reduced."""
        self.line.end_epoch(trainer.callback_metrics)
        self._apply_stop(trainer)

    # ---- validation, test, prediction ----------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Start a validation and its epoch."""
        self.line.start_validation(VALIDATION)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Start a test and its epoch."""
        self.line.start_validation(TEST)

    def _eval_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._pass.start_batch(batch, batch_idx, dataloader_idx)

    def _eval_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._pass.end_batch(outputs)

    def _eval_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._pass.end_data(trainer.callback_metrics)

    def _eval_end(self, trainer: Any, pl_module: Any) -> None:
        self.line.update_metrics(trainer.callback_metrics)  # what the module has logged at the very end of it
        self.line.end_validation()
        self._apply_stop(trainer)

    on_validation_batch_start = on_test_batch_start = _eval_batch_start
    on_validation_batch_end = on_test_batch_end = _eval_batch_end
    on_validation_epoch_end = on_test_epoch_end = _eval_epoch_end
    on_validation_end = on_test_end = _eval_end

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Start a prediction and its epoch."""
        self._prediction.start()

    def on_predict_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Start a prediction batch."""
        self._prediction.take(batch, batch_idx, dataloader_idx)
        self._prediction.start_batch()

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """End a prediction batch."""
        self._prediction.end_batch(outputs)

    def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Emit the end of the data with all predictions."""
        self._prediction.collect(trainer.predict_loop.predictions)
        self._prediction.end_data({})

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """End the prediction."""
        self._prediction.end({})

    # ---- inside --------------------------------------------------------------------------------------------

    def _log_row(self, row: dict[str, float], step: int) -> None:
        for logger in self.line.outer.loggers:
            logger.log_metrics(row, step)

    def _apply_stop(self, trainer: Any) -> None:
        if self.line.should_stop:
            trainer.should_stop = True

    _pass: Pass = fact("line.current_pass")

    def _index(self, optimizer: Any) -> int:
        meant = bare(optimizer)  # in manual optimization it has Lightning's wrapper
        return next(index for index, each in enumerate(self.line.state.optimizers) if each is meant)


class LightningLoggers(HostLogger):
    """A logger that writes rows to Lightning's own loggers."""
