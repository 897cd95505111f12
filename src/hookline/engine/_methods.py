"""Generated from the table in engine/events.py by tools/generate.py; edit the rows there, not this file."""

from __future__ import annotations

from typing import Any, ClassVar


class CommonMethods:
    """Every event that hooks, modules and strategies can listen to."""

    __hookline_base__: ClassVar[bool] = True

    def on_sanity_check_start(self, *args: Any, **kwargs: Any) -> Any:
        """The sanity check begins: a few validation batches before training."""

    def on_sanity_check_end(self, *args: Any, **kwargs: Any) -> Any:
        """The sanity check is over; its metrics are discarded."""

    def on_train_start(self, *args: Any, **kwargs: Any) -> Any:
        """Training begins, from the start or resumed."""

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        """A batch is ready and not used yet. Return SKIP_BATCH to skip it, END_EPOCH (or -1) to end the epoch. Facts:
        batch, batch_idx, dataloader_idx, dataloader_name, sample_ids. May return SKIP_BATCH or END_EPOCH.
        """

    def on_validation_start(self, *args: Any, **kwargs: Any) -> Any:
        """Validation begins."""

    def on_validation_epoch_start(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the validation data begins."""

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        """A validation batch is ready. Facts: batch, batch_idx, dataloader_idx, dataloader_name, sample_ids."""

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> Any:
        """A validation batch is done. Facts: outputs, batch, batch_idx, dataloader_idx, dataloader_name, metrics,
        sample_ids.
        """

    def on_validation_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the validation data is complete. Facts: metrics."""

    def on_validation_end(self, *args: Any, **kwargs: Any) -> Any:
        """Validation is over; `metrics` has its results. Facts: metrics."""

    def on_validation_abandoned(self, *args: Any, **kwargs: Any) -> Any:
        """A signal has interrupted the validation, and its end events are not fired: undo what its start did. The
        validation runs again after the resume.
        """

    def on_train_end(self, *args: Any, **kwargs: Any) -> Any:
        """Training ended without an error; `status` is completed, stopped, pruned, preempted or interrupted. Facts:
        step, tokens_seen, metrics, status.
        """

    def on_test_start(self, *args: Any, **kwargs: Any) -> Any:
        """Testing begins."""

    def on_test_epoch_start(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the test data begins."""

    def on_test_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        """A test batch is ready. Facts: batch, batch_idx, dataloader_idx, dataloader_name, sample_ids."""

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> Any:
        """A test batch is done. Facts: outputs, batch, batch_idx, dataloader_idx, dataloader_name, metrics,
        sample_ids.
        """

    def on_test_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the test data is complete. Facts: metrics."""

    def on_test_end(self, *args: Any, **kwargs: Any) -> Any:
        """Testing is over; `metrics` has its results. Facts: metrics."""

    def on_predict_start(self, *args: Any, **kwargs: Any) -> Any:
        """Prediction begins."""

    def on_predict_end(self, *args: Any, **kwargs: Any) -> Any:
        """Prediction is over."""

    def on_exception(self, *args: Any, **kwargs: Any) -> Any:
        """The run failed. Every listener is called, even if another one raises. Facts: exception."""


class EventMethods(CommonMethods):
    """Every event that hooks and modules can listen to."""

    __hookline_base__: ClassVar[bool] = True

    def setup(self, *args: Any, **kwargs: Any) -> Any:
        """A run begins. Create what needs the data or the trainer. Facts: stage."""

    def on_checkpoint_load(self, *args: Any, **kwargs: Any) -> Any:
        """The whole checkpoint is restored, including optimizers and the position in the data: when a run resumes, and
        after `trainer.roll_back`. Facts: path.
        """

    def on_fit_start(self, *args: Any, **kwargs: Any) -> Any:
        """Set-up is complete; no batch has been run yet."""

    def on_train_epoch_start(self, *args: Any, **kwargs: Any) -> Any:
        """An epoch begins, or continues after a resume (`resumed` is true). Facts: epoch."""

    def on_before_batch_fetch(self, *args: Any, **kwargs: Any) -> Any:
        """The loop is about to fetch a batch. If the loader has no more batches, on_after_batch_fetch does not follow.
        Facts: batch_idx.
        """

    def on_after_batch_fetch(self, *args: Any, **kwargs: Any) -> Any:
        """The loader has returned a batch, for which the loop waited `fetch_seconds`. Facts: batch, batch_idx,
        dataloader_idx, dataloader_name, fetch_seconds.
        """

    def on_before_batch_transfer(self, *args: Any, **kwargs: Any) -> Any:
        """The batch is about to be moved to the device. Facts: batch, dataloader_idx. A returned value replaces the
        batch.
        """

    def on_after_batch_transfer(self, *args: Any, **kwargs: Any) -> Any:
        """The batch is on the device. Facts: batch, dataloader_idx. A returned value replaces the batch."""

    def on_before_zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """The gradients of the last update are about to be cleared and can still be read; the weights are already
        updated. Facts: optimizer, optimizer_idx.
        """

    def on_before_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Backward is about to run; a returned loss replaces the loss. Facts: loss, batch, batch_idx. A returned value
        replaces the loss.
        """

    def on_after_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Backward has added its gradients; fired for every micro-batch. Facts: batch, batch_idx."""

    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Gradients are complete: synchronized and unscaled, not yet clipped. Return SKIP_STEP to skip the update,
        STEP_DONE if the hook has made it. Facts: optimizer, optimizer_idx, loss, grad_norm. May return SKIP_STEP or
        STEP_DONE.
        """

    def on_gradient_clip(self, *args: Any, **kwargs: Any) -> Any:
        """Gradients have been clipped; fired only if gradient clipping is on. Facts: grad_norm."""

    def on_after_optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """The weights are updated and `step` has advanced; gradients can still be read. Facts: optimizer,
        optimizer_idx.
        """

    def on_step_skipped(self, *args: Any, **kwargs: Any) -> Any:
        """No update was made; `reason` is 'no_loss', 'nonfinite' or 'hook'. Facts: reason, optimizer, optimizer_idx."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> Any:
        """A training batch is done; fired for every micro-batch. Facts: outputs, batch, batch_idx, dataloader_idx,
        dataloader_name, loss, metrics, sample_ids.
        """

    def on_train_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Metrics are about to be logged; edit them in place, or return the dictionary to log instead. Facts: metrics.
        A returned value replaces the metrics.
        """

    def on_step_end(self, *args: Any, **kwargs: Any) -> Any:
        """An optimizer update is complete and its metrics are logged under this step; gradients can still be read.
        Facts: ctx, loss, grad_norm, lr, tokens_seen.
        """

    def on_save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint is about to be written; its contents may be edited. Facts: checkpoint, path, reason."""

    def on_checkpoint_save(self, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint is complete and on disk at `path`; `reason` is 'interval', 'best', 'last', 'signal',
        'exception' or 'manual'. Facts: path, step, reason.
        """

    def on_checkpoint_failed(self, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint could not be written and the run continues, because it was `checkpoints/last` or
        `checkpoint={'on_error': 'warn'}` is set. Facts: path, step, reason, exception.
        """

    def on_train_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The epoch is over, including its validation. Monitors are called after the module. Facts: epoch, metrics."""

    def on_predict_epoch_start(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the prediction data begins."""

    def on_predict_batch_start(self, *args: Any, **kwargs: Any) -> Any:
        """A prediction batch is ready. Facts: batch, batch_idx, dataloader_idx, dataloader_name, sample_ids."""

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The predictions for a batch are complete. Facts: outputs, batch, batch_idx, dataloader_idx, dataloader_name,
        sample_ids.
        """

    def on_predict_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """The pass over the prediction data is complete; `outputs` has all predictions. Facts: outputs."""

    def on_fit_end(self, *args: Any, **kwargs: Any) -> Any:
        """The fit ended without an error, after the strategy's teardown; not fired after a failure."""

    def teardown(self, *args: Any, **kwargs: Any) -> Any:
        """Clean up. Called once, also after a failure, for every listener whose `setup` began. Facts: stage."""


class HookMethods(EventMethods):
    """Every event that a hook can listen to. Override with any subset of an event's facts as parameters."""

    __hookline_base__: ClassVar[bool] = True

    def on_load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Module and data module are restored, the hooks are next; the contents may be edited first. Facts:
        checkpoint.
        """


class ModuleMethods(EventMethods):
    """Every event that a module can listen to."""

    __hookline_base__: ClassVar[bool] = True

    def prepare_data(self, *args: Any, **kwargs: Any) -> Any:
        """Download data or write it to disk; called once per machine."""

    def on_load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint is about to be restored into the module; its contents may be edited first. Facts: checkpoint."""


class DataMethods:
    """Every event that a data module can listen to."""

    __hookline_base__: ClassVar[bool] = True

    def prepare_data(self, *args: Any, **kwargs: Any) -> Any:
        """Download data or write it to disk; called once per machine."""

    def setup(self, *args: Any, **kwargs: Any) -> Any:
        """A run begins. Create what needs the data or the trainer. Facts: stage."""

    def on_before_batch_transfer(self, *args: Any, **kwargs: Any) -> Any:
        """The batch is about to be moved to the device. Facts: batch, dataloader_idx. A returned value replaces the
        batch.
        """

    def on_after_batch_transfer(self, *args: Any, **kwargs: Any) -> Any:
        """The batch is on the device. Facts: batch, dataloader_idx. A returned value replaces the batch."""

    def on_exception(self, *args: Any, **kwargs: Any) -> Any:
        """The run failed. Every listener is called, even if another one raises. Facts: exception."""

    def teardown(self, *args: Any, **kwargs: Any) -> Any:
        """Clean up. Called once, also after a failure, for every listener whose `setup` began. Facts: stage."""


class StrategyMethods(CommonMethods):
    """Every event that a strategy can listen to."""

    __hookline_base__: ClassVar[bool] = True

    def setup(self, *args: Any, **kwargs: Any) -> Any:
        """The strategy moves the module to its device and wraps it. Facts: stage."""

    def teardown(self, *args: Any, **kwargs: Any) -> Any:
        """The strategy releases its resources. Facts: stage."""
