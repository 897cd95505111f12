"""Generated from the table in engine/events.py by tools/generate.py; edit the rows there, not this file."""

from __future__ import annotations

from typing import Any, ClassVar


class HookMethods:
    """Every event a hook can hear. Override with any subset of an event's facts as parameters."""

    __hookline_base__: ClassVar[bool] = True

    def setup(self, *args: Any, **kwargs: Any) -> Any:
        """A run begins: build what needs the data or the trainer. Facts: stage."""

    def on_load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Module and data module are restored, the hooks are next; the contents may be edited before they are used.
        Facts: checkpoint.
        """

    def on_checkpoint_load(self, *args: Any, **kwargs: Any) -> Any:
        """Everything a checkpoint holds, optimizers and data position included, is in place. Facts: path."""

    def on_fit_start(self, *args: Any, **kwargs: Any) -> Any:
        """Set-up is complete; nothing has been run yet."""

    def on_sanity_check_start(self, *args: Any, **kwargs: Any) -> Any:
        """A few validation batches run before any training."""

    def on_sanity_check_end(self, *args: Any, **kwargs: Any) -> Any:
        """The sanity check is over; its metrics are thrown away."""

    def on_train_start(self, *args: Any, **kwargs: Any) -> Any:
        """Training begins, fresh or resumed."""

    def on_train_epoch_start(self, *args: Any, **kwargs: Any) -> Any:
        """An epoch begins, or goes on after a resume (`resumed` is true). Facts: epoch."""

    def on_before_batch_fetch(self, *args: Any, **kwargs: Any) -> Any:
        """The loop is about to fetch a batch from the loader. If the loader has no more, on_after_batch_fetch does not
        follow. Facts: batch_idx.
        """

    def on_after_batch_fetch(self, *args: Any, **kwargs: Any) -> Any:
        """The loader has returned a batch, after `fetch_seconds` of waiting. Facts: batch, batch_idx, dataloader_idx,
        dataloader_name, fetch_seconds.
        """

    def on_before_batch_transfer(self, *args: Any, **kwargs: Any) -> Any:
        """The batch is about to be moved to the device. Facts: batch, dataloader_idx. A returned value replaces the
        batch.
        """

    def on_after_batch_transfer(self, *args: Any, **kwargs: Any) -> Any:
        """The batch is on the device. Facts: batch, dataloader_idx. A returned value replaces the batch."""

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        """A batch is ready, before anything is done with it. SKIP_BATCH leaves it out, END_EPOCH (or -1) ends the
        epoch. Facts: batch, batch_idx, dataloader_idx, dataloader_name. May return SKIP_BATCH or END_EPOCH.
        """

    def on_before_zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """The gradients of the finished step are about to be cleared and are still there; the weights are the new
        ones. Facts: optimizer, optimizer_idx.
        """

    def on_before_backward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss is about to be differentiated; a returned loss replaces it. Facts: loss, batch, batch_idx. A
        returned value replaces the loss.
        """

    def on_after_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Gradients have been added; every micro-batch. Facts: batch, batch_idx."""

    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Gradients are complete: synced and unscaled, not yet clipped. SKIP_STEP leaves the update out, STEP_DONE
        says that the hook has made it. Facts: optimizer, optimizer_idx. May return SKIP_STEP or STEP_DONE.
        """

    def on_gradient_clip(self, *args: Any, **kwargs: Any) -> Any:
        """Gradients have been clipped; only if clipping is on. Facts: grad_norm."""

    def on_after_optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """The weights are new, the gradients still there; `step` has advanced. Facts: optimizer, optimizer_idx."""

    def on_step_skipped(self, *args: Any, **kwargs: Any) -> Any:
        """No update was made: 'no_loss', 'nonfinite' or 'hook'. Facts: reason, optimizer, optimizer_idx."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The batch is done; every micro-batch. Facts: outputs, batch, batch_idx, dataloader_idx, dataloader_name,
        loss, metrics.
        """

    def on_train_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Metrics are about to be logged; edit them in place or return the dictionary to log instead. Facts: metrics.
        A returned value replaces the metrics.
        """

    def on_step_end(self, *args: Any, **kwargs: Any) -> Any:
        """An optimizer update is complete and its metrics are out under the same step number; gradients can still be
        read. Facts: ctx, loss, grad_norm, lr, tokens_seen.
        """

    def on_validation_start(self, *args: Any, **kwargs: Any) -> Any:
        """Validation begins."""

    def on_validation_epoch_start(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the validation data begins."""

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        """A validation batch is ready. Facts: batch, batch_idx, dataloader_idx, dataloader_name."""

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> Any:
        """A validation batch is done. Facts: outputs, batch, batch_idx, dataloader_idx, dataloader_name, metrics."""

    def on_validation_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the validation data is complete. Facts: metrics."""

    def on_validation_end(self, *args: Any, **kwargs: Any) -> Any:
        """Validation is over; `metrics` has its results. Facts: metrics."""

    def on_validation_abandoned(self, *args: Any, **kwargs: Any) -> Any:
        """A signal has cut the validation short, so it has no end: undo what its start did. It is done again after the
        resume.
        """

    def on_save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint is being put together and may be edited. Facts: checkpoint, path, reason."""

    def on_checkpoint_save(self, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint is complete and durable at `path`; why: 'interval', 'best', 'last', 'signal', 'exception',
        'manual'. Facts: path, step, reason.
        """

    def on_checkpoint_failed(self, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint could not be written, and the run continues: `checkpoints/last`, or `checkpoint={'on_error':
        'warn'}`. Facts: path, step, reason, exception.
        """

    def on_train_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The epoch is over, its validation included. Monitors hear it after the module. Facts: epoch, metrics."""

    def on_train_end(self, *args: Any, **kwargs: Any) -> Any:
        """Training ended as meant: completed, stopped or preempted. Facts: step, tokens_seen, metrics, status."""

    def on_test_start(self, *args: Any, **kwargs: Any) -> Any:
        """Testing begins."""

    def on_test_epoch_start(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the test data begins."""

    def on_test_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        """A test batch is ready. Facts: batch, batch_idx, dataloader_idx, dataloader_name."""

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> Any:
        """A test batch is done. Facts: outputs, batch, batch_idx, dataloader_idx, dataloader_name, metrics."""

    def on_test_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the test data is complete. Facts: metrics."""

    def on_test_end(self, *args: Any, **kwargs: Any) -> Any:
        """Testing is over; `metrics` has its results. Facts: metrics."""

    def on_predict_start(self, *args: Any, **kwargs: Any) -> Any:
        """Prediction begins."""

    def on_predict_epoch_start(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the data begins."""

    def on_predict_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        """A batch to predict on is ready. Facts: batch, batch_idx, dataloader_idx, dataloader_name."""

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> Any:
        """Predictions for the batch are there. Facts: outputs, batch, batch_idx, dataloader_idx, dataloader_name."""

    def on_predict_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the data is complete; `outputs` has all predictions. Facts: outputs."""

    def on_predict_end(self, *args: Any, **kwargs: Any) -> Any:
        """Prediction is over."""

    def on_exception(self, *args: Any, **kwargs: Any) -> Any:
        """The run failed; each listener is shielded from the others' failures. Facts: exception."""

    def on_fit_end(self, *args: Any, **kwargs: Any) -> Any:
        """The run ended as meant and the strategy is down; not after a failure."""

    def teardown(self, *args: Any, **kwargs: Any) -> Any:
        """Always, once, for everyone whose set-up began, whatever happened. Facts: stage."""


class ModuleMethods:
    """Every event the user's module can hear."""

    __hookline_base__: ClassVar[bool] = True

    def prepare_data(self, *args: Any, **kwargs: Any) -> Any:
        """Download or write data to disk; once per machine."""

    def setup(self, *args: Any, **kwargs: Any) -> Any:
        """A run begins: build what needs the data or the trainer. Facts: stage."""

    def on_load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint is about to be restored into the module; its contents may be edited before they are used.
        Facts: checkpoint.
        """

    def on_checkpoint_load(self, *args: Any, **kwargs: Any) -> Any:
        """Everything a checkpoint holds, optimizers and data position included, is in place. Facts: path."""

    def on_fit_start(self, *args: Any, **kwargs: Any) -> Any:
        """Set-up is complete; nothing has been run yet."""

    def on_sanity_check_start(self, *args: Any, **kwargs: Any) -> Any:
        """A few validation batches run before any training."""

    def on_sanity_check_end(self, *args: Any, **kwargs: Any) -> Any:
        """The sanity check is over; its metrics are thrown away."""

    def on_train_start(self, *args: Any, **kwargs: Any) -> Any:
        """Training begins, fresh or resumed."""

    def on_train_epoch_start(self, *args: Any, **kwargs: Any) -> Any:
        """An epoch begins, or goes on after a resume (`resumed` is true). Facts: epoch."""

    def on_before_batch_fetch(self, *args: Any, **kwargs: Any) -> Any:
        """The loop is about to fetch a batch from the loader. If the loader has no more, on_after_batch_fetch does not
        follow. Facts: batch_idx.
        """

    def on_after_batch_fetch(self, *args: Any, **kwargs: Any) -> Any:
        """The loader has returned a batch, after `fetch_seconds` of waiting. Facts: batch, batch_idx, dataloader_idx,
        dataloader_name, fetch_seconds.
        """

    def on_before_batch_transfer(self, *args: Any, **kwargs: Any) -> Any:
        """The batch is about to be moved to the device. Facts: batch, dataloader_idx. A returned value replaces the
        batch.
        """

    def on_after_batch_transfer(self, *args: Any, **kwargs: Any) -> Any:
        """The batch is on the device. Facts: batch, dataloader_idx. A returned value replaces the batch."""

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        """A batch is ready, before anything is done with it. SKIP_BATCH leaves it out, END_EPOCH (or -1) ends the
        epoch. Facts: batch, batch_idx, dataloader_idx, dataloader_name. May return SKIP_BATCH or END_EPOCH.
        """

    def on_before_zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """The gradients of the finished step are about to be cleared and are still there; the weights are the new
        ones. Facts: optimizer, optimizer_idx.
        """

    def on_before_backward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss is about to be differentiated; a returned loss replaces it. Facts: loss, batch, batch_idx. A
        returned value replaces the loss.
        """

    def on_after_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Gradients have been added; every micro-batch. Facts: batch, batch_idx."""

    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Gradients are complete: synced and unscaled, not yet clipped. SKIP_STEP leaves the update out, STEP_DONE
        says that the hook has made it. Facts: optimizer, optimizer_idx. May return SKIP_STEP or STEP_DONE.
        """

    def on_gradient_clip(self, *args: Any, **kwargs: Any) -> Any:
        """Gradients have been clipped; only if clipping is on. Facts: grad_norm."""

    def on_after_optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """The weights are new, the gradients still there; `step` has advanced. Facts: optimizer, optimizer_idx."""

    def on_step_skipped(self, *args: Any, **kwargs: Any) -> Any:
        """No update was made: 'no_loss', 'nonfinite' or 'hook'. Facts: reason, optimizer, optimizer_idx."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The batch is done; every micro-batch. Facts: outputs, batch, batch_idx, dataloader_idx, dataloader_name,
        loss, metrics.
        """

    def on_train_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Metrics are about to be logged; edit them in place or return the dictionary to log instead. Facts: metrics.
        A returned value replaces the metrics.
        """

    def on_step_end(self, *args: Any, **kwargs: Any) -> Any:
        """An optimizer update is complete and its metrics are out under the same step number; gradients can still be
        read. Facts: ctx, loss, grad_norm, lr, tokens_seen.
        """

    def on_validation_start(self, *args: Any, **kwargs: Any) -> Any:
        """Validation begins."""

    def on_validation_epoch_start(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the validation data begins."""

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        """A validation batch is ready. Facts: batch, batch_idx, dataloader_idx, dataloader_name."""

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> Any:
        """A validation batch is done. Facts: outputs, batch, batch_idx, dataloader_idx, dataloader_name, metrics."""

    def on_validation_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the validation data is complete. Facts: metrics."""

    def on_validation_end(self, *args: Any, **kwargs: Any) -> Any:
        """Validation is over; `metrics` has its results. Facts: metrics."""

    def on_validation_abandoned(self, *args: Any, **kwargs: Any) -> Any:
        """A signal has cut the validation short, so it has no end: undo what its start did. It is done again after the
        resume.
        """

    def on_save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint is being put together and may be edited. Facts: checkpoint, path, reason."""

    def on_checkpoint_save(self, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint is complete and durable at `path`; why: 'interval', 'best', 'last', 'signal', 'exception',
        'manual'. Facts: path, step, reason.
        """

    def on_checkpoint_failed(self, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint could not be written, and the run continues: `checkpoints/last`, or `checkpoint={'on_error':
        'warn'}`. Facts: path, step, reason, exception.
        """

    def on_train_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The epoch is over, its validation included. Monitors hear it after the module. Facts: epoch, metrics."""

    def on_train_end(self, *args: Any, **kwargs: Any) -> Any:
        """Training ended as meant: completed, stopped or preempted. Facts: step, tokens_seen, metrics, status."""

    def on_test_start(self, *args: Any, **kwargs: Any) -> Any:
        """Testing begins."""

    def on_test_epoch_start(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the test data begins."""

    def on_test_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        """A test batch is ready. Facts: batch, batch_idx, dataloader_idx, dataloader_name."""

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> Any:
        """A test batch is done. Facts: outputs, batch, batch_idx, dataloader_idx, dataloader_name, metrics."""

    def on_test_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the test data is complete. Facts: metrics."""

    def on_test_end(self, *args: Any, **kwargs: Any) -> Any:
        """Testing is over; `metrics` has its results. Facts: metrics."""

    def on_predict_start(self, *args: Any, **kwargs: Any) -> Any:
        """Prediction begins."""

    def on_predict_epoch_start(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the data begins."""

    def on_predict_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        """A batch to predict on is ready. Facts: batch, batch_idx, dataloader_idx, dataloader_name."""

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> Any:
        """Predictions for the batch are there. Facts: outputs, batch, batch_idx, dataloader_idx, dataloader_name."""

    def on_predict_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the data is complete; `outputs` has all predictions. Facts: outputs."""

    def on_predict_end(self, *args: Any, **kwargs: Any) -> Any:
        """Prediction is over."""

    def on_exception(self, *args: Any, **kwargs: Any) -> Any:
        """The run failed; each listener is shielded from the others' failures. Facts: exception."""

    def on_fit_end(self, *args: Any, **kwargs: Any) -> Any:
        """The run ended as meant and the strategy is down; not after a failure."""

    def teardown(self, *args: Any, **kwargs: Any) -> Any:
        """Always, once, for everyone whose set-up began, whatever happened. Facts: stage."""


class DataMethods:
    """Every event a data module can hear."""

    __hookline_base__: ClassVar[bool] = True

    def prepare_data(self, *args: Any, **kwargs: Any) -> Any:
        """Download or write data to disk; once per machine."""

    def setup(self, *args: Any, **kwargs: Any) -> Any:
        """A run begins: build what needs the data or the trainer. Facts: stage."""

    def on_before_batch_transfer(self, *args: Any, **kwargs: Any) -> Any:
        """The batch is about to be moved to the device. Facts: batch, dataloader_idx. A returned value replaces the
        batch.
        """

    def on_after_batch_transfer(self, *args: Any, **kwargs: Any) -> Any:
        """The batch is on the device. Facts: batch, dataloader_idx. A returned value replaces the batch."""

    def on_exception(self, *args: Any, **kwargs: Any) -> Any:
        """The run failed; each listener is shielded from the others' failures. Facts: exception."""

    def teardown(self, *args: Any, **kwargs: Any) -> Any:
        """Always, once, for everyone whose set-up began, whatever happened. Facts: stage."""


class StrategyMethods:
    """Every event a strategy can hear."""

    __hookline_base__: ClassVar[bool] = True

    def setup(self, *args: Any, **kwargs: Any) -> Any:
        """The strategy moves and wraps the module. Facts: stage."""

    def on_sanity_check_start(self, *args: Any, **kwargs: Any) -> Any:
        """A few validation batches run before any training."""

    def on_sanity_check_end(self, *args: Any, **kwargs: Any) -> Any:
        """The sanity check is over; its metrics are thrown away."""

    def on_train_start(self, *args: Any, **kwargs: Any) -> Any:
        """Training begins, fresh or resumed."""

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        """A batch is ready, before anything is done with it. SKIP_BATCH leaves it out, END_EPOCH (or -1) ends the
        epoch. Facts: batch, batch_idx, dataloader_idx, dataloader_name. May return SKIP_BATCH or END_EPOCH.
        """

    def on_validation_start(self, *args: Any, **kwargs: Any) -> Any:
        """Validation begins."""

    def on_validation_epoch_start(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the validation data begins."""

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        """A validation batch is ready. Facts: batch, batch_idx, dataloader_idx, dataloader_name."""

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> Any:
        """A validation batch is done. Facts: outputs, batch, batch_idx, dataloader_idx, dataloader_name, metrics."""

    def on_validation_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the validation data is complete. Facts: metrics."""

    def on_validation_end(self, *args: Any, **kwargs: Any) -> Any:
        """Validation is over; `metrics` has its results. Facts: metrics."""

    def on_validation_abandoned(self, *args: Any, **kwargs: Any) -> Any:
        """A signal has cut the validation short, so it has no end: undo what its start did. It is done again after the
        resume.
        """

    def on_train_end(self, *args: Any, **kwargs: Any) -> Any:
        """Training ended as meant: completed, stopped or preempted. Facts: step, tokens_seen, metrics, status."""

    def on_test_start(self, *args: Any, **kwargs: Any) -> Any:
        """Testing begins."""

    def on_test_epoch_start(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the test data begins."""

    def on_test_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        """A test batch is ready. Facts: batch, batch_idx, dataloader_idx, dataloader_name."""

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> Any:
        """A test batch is done. Facts: outputs, batch, batch_idx, dataloader_idx, dataloader_name, metrics."""

    def on_test_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the test data is complete. Facts: metrics."""

    def on_test_end(self, *args: Any, **kwargs: Any) -> Any:
        """Testing is over; `metrics` has its results. Facts: metrics."""

    def on_predict_start(self, *args: Any, **kwargs: Any) -> Any:
        """Prediction begins."""

    def on_predict_end(self, *args: Any, **kwargs: Any) -> Any:
        """Prediction is over."""

    def on_exception(self, *args: Any, **kwargs: Any) -> Any:
        """The run failed; each listener is shielded from the others' failures. Facts: exception."""

    def teardown(self, *args: Any, **kwargs: Any) -> Any:
        """The strategy lets go of what it holds. Facts: stage."""
