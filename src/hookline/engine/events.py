"""The table: every event that a hook can listen to, and every fact that a listener can request.

One row is one event. The plan, the checks at registration, `Hook`'s documented methods, `explain` and
`docs/lifecycle.md` are views of these rows; to add an event, add its row here and emit it in a loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hookline.engine.table import (
    EVERY_STAGE,
    NOTHING,
    RECEIVERS,
    REPLACE,
    SIGNAL,
    VALUE,
    Event,
    EventTable,
    Fact,
)

__all__ = [
    "BRANCHES",
    "EVENTS",
    "EVENTS_OF_THE_TABLE",
    "EVENT_ROWS",
    "EVERY_STAGE",
    "FACT_ROWS",
    "NOTHING",
    "RECEIVERS",
    "REPLACE",
    "SIGNAL",
    "VALUE",
    "Event",
    "EventTable",
    "Fact",
    "declare_event",
]

BRANCHES: Mapping[str, str] = MappingProxyType(
    {
        "run": "",
        "sanity": "run/sanity check",
        "epoch": "run/each epoch",
        "batch": "run/each epoch/each batch",
        "window": "run/each epoch/each batch/on the window's first micro-batch, once per optimizer",
        "update": "run/each epoch/each batch/on the window's last micro-batch, once per optimizer",
        "validation": "run/each epoch/validation, when due",
        "validation batch": "run/each epoch/validation, when due/each batch",
        "save": "run/each epoch/checkpoint, when asked for",
        "test": "run/test",
        "test batch": "run/test/each batch",
        "predict": "run/predict",
        "predict batch": "run/predict/each batch",
        "end": "run/end",
        "failure": "run/if the run fails",
        "own": "run/declared by the user",
    }
)


def _known(
    name: str, doc: str, *, reads: str = "", spellings: tuple[str, ...] = (), costly: bool = False
) -> Fact:
    """Return a fact that listeners can request at every event."""
    return Fact(name, doc, reads, spellings, everywhere=True, costly=costly)


# These are tables: an event or a fact is a row of two or three lines.
# fmt: off
FACT_ROWS: tuple[Fact, ...] = (
    # known at every event
    _known("trainer", "the trainer", reads="s.shown_trainer"),
    _known("module", "your module, without the wrapper of a strategy or of torch.compile",
           spellings=("pl_module", "model")),
    _known("wrapped_model",
           "the model that the strategy runs: the module, or its compiled or distributed wrapper"),
    _known("state", "the live state of the run, an object that also reads like a dictionary", reads="s"),
    _known("config", "the object that was passed as `Trainer(config=...)`"),
    _known("stage", "'fit' (its validations included), 'validate', 'test' or 'predict'"),
    _known("epoch", "the current epoch, from 0", spellings=("current_epoch",)),
    _known("batch_idx", "the number of the batch in this epoch, from 0"),
    _known("step", "optimizer updates made so far, one per accumulation window", spellings=("global_step",)),
    _known("batches_seen", "training batches finished so far, over all epochs"),
    _known("samples_seen", "training samples in those batches"),
    _known("tokens_seen", "training tokens in those batches, counted from the first request on", costly=True),
    _known("optimizers", "the list of optimizers"),
    _known("schedulers", "the list of learning-rate schedulers"),
    _known("device", "the device of the module"),
    _known("rank", "the rank of this process"),
    _known("local_rank", "the rank of this process on its machine"),
    _known("world_size", "the number of processes"),
    _known("lr", "the learning rate of the first parameter group now: at the end of an epoch, schedulers "
           "have advanced already, but for ReduceLROnPlateau, which advances after it. At on_step_end, the "
           "one that the update used"),
    _known("resumed", "whether this run continues from a checkpoint"),
    _known("sanity_checking", "whether the current validation is the sanity check"),
    _known("hooks", "the hooks of this run"),
    _known("logger", "the logger; several loggers are combined into one object"),
    _known("experiment", "another name for `logger`", reads="s.logger"),
    _known("fetch_seconds", "seconds that the loop waited for the newest batch"),
    _known("timings",
           "seconds that this fit has spent so far on training, data, validation, saving and hooks"),
    _known("status",
           "'training' (or 'running'), then 'completed', 'stopped', 'pruned', 'preempted', 'interrupted' or "
           "'error'"),
    # facts of some events only
    Fact("batch", "the batch as the loader returned it; on the device after the transfer",
         spellings=("data_batch",)),
    Fact("dataloader_idx", "the index of the loader that the batch came from", spellings=("loader_idx",)),
    Fact("dataloader_name", "the name of that loader", spellings=("loader_name",)),
    Fact("sample_ids",
         "the indices of the batch's samples in the dataset, or what `loader.sample_ids(batch)` returns, a "
         "list; None if they are not known",
         spellings=("batch_indices",), costly=True, only_named=True),
    Fact("loss", "the loss of your step: a live tensor before backward, a float after it", costly=True),
    Fact("outputs", "the value that the step returned, detached"),
    Fact("metrics", "a mapping of names to floats; a value is read from the device when it is accessed"),
    Fact("optimizer", "the optimizer of this event"),
    Fact("optimizer_idx", "the index of that optimizer"),
    Fact("optimizer_closure",
         "a function that returns the loss, and recomputes it for optimizers that need that"),
    Fact("grad_norm", "the total gradient norm before clipping, as a float. With manual optimization and in "
         "a Line: of the parameters of the optimizer that makes its step", costly=True),
    Fact("gradient_clip_val", "the limit for gradient clipping"),
    Fact("gradient_clip_algorithm", "'norm' or 'value'"),
    Fact("ctx", "a StepContext: step, loss, grad_norm, lr, tokens_seen, model, optimizer and more",
         costly=True, needs=("grad_norm", "tokens_seen")),
    Fact("reason", "why the event was fired; its row lists the values"),
    Fact("scheduler", "the scheduler to advance"),
    Fact("metric", "the monitored value for a scheduler that needs one, else None"),
    Fact("checkpoint", "the contents of the checkpoint, a dictionary that may be edited"),
    Fact("path", "the exact path of the checkpoint", spellings=("checkpoint_path",)),
    Fact("exception", "the exception that was raised"),
)

_BATCH = ("batch", "batch_idx", "dataloader_idx", "dataloader_name")
_WITH_IDS = (*_BATCH, "sample_ids")
_TRANSFER = ("batch", "dataloader_idx")
_OPTIMIZER = ("optimizer", "optimizer_idx")
_EVALS = ("fit", "validate")

EVENT_ROWS: tuple[Event, ...] = (
    # ---- set-up --------------------------------------------------------------------------------------------
    Event("configure_hooks", "M", (), "Return hooks to add for this run.", action=True,
          returns=VALUE, spellings=("configure_callbacks",), stages=EVERY_STAGE),
    Event("prepare_data", "DM", (), "Download data or write it to disk; called once per machine.",
          stages=EVERY_STAGE),
    Event("setup", "DHM", ("stage",), "A run begins. Create what needs the data or the trainer.",
          stages=EVERY_STAGE),
    Event("configure_model", "M", (), "Create layers after `setup`, for large or sharded models.",
          action=True, spellings=("configure_shared_model", "configure_sharded_model"), stages=EVERY_STAGE),
    Event("module_load_checkpoint", "M", ("checkpoint",),
          "A checkpoint is about to be restored into the module; its contents may be edited first.",
          spellings=("on_load_checkpoint",)),
    Event("on_load_checkpoint", "H", ("checkpoint",),
          "Module and data module are restored, the hooks are next; the contents may be edited first."),
    Event("strategy_setup", "S", ("stage",), "The strategy moves the module to its device and wraps it.",
          spellings=("setup",), stages=EVERY_STAGE),
    Event("configure_optimizers", "M", (), "Return the optimizers and learning-rate schedulers.", action=True,
          returns=VALUE),
    Event("on_checkpoint_load", "HM", ("path",),
          "The whole checkpoint is restored, including optimizers and the position in the data: when a run "
          "resumes, and after `trainer.roll_back`.", ends="on_load_checkpoint"),
    Event("on_fit_start", "HM", (), "Set-up is complete; no batch has been run yet."),
    Event("val_dataloader", "DM", (),
          "Return the validation loader, or several; called when they are first needed.", action=True,
          returns=VALUE, stages=_EVALS),
    Event("test_dataloader", "DM", (), "Return the test loader, or several.", action=True, returns=VALUE,
          stages=("test",)),
    Event("predict_dataloader", "DM", (), "Return the prediction loader, or several.", action=True,
          returns=VALUE, stages=("predict",)),
    Event("on_sanity_check_start", "HMS", (),
          "The sanity check begins: a few validation batches before training.", inside="sanity"),
    Event("on_sanity_check_end", "HMS", (), "The sanity check is over; its metrics are discarded.",
          inside="sanity"),
    # ---- training ------------------------------------------------------------------------------------------
    Event("train_dataloader", "DM", (),
          "Return the training loader, or several; called when they are first needed.", action=True,
          returns=VALUE),
    Event("on_train_start", "HMS", (), "Training begins, from the start or resumed.",
          spellings=("on_train_begin", "on_training_start")),
    Event("on_train_epoch_start", "HM", ("epoch",),
          "An epoch begins, or continues after a resume (`resumed` is true).", inside="epoch",
          spellings=("on_epoch_start", "on_epoch_begin")),
    Event("on_before_batch_fetch", "HM", ("batch_idx",),
          "The loop is about to fetch a batch. If the loader has no more batches, on_after_batch_fetch does "
          "not follow.",
          inside="batch", stages=EVERY_STAGE),
    Event("on_after_batch_fetch", "HM",
          ("batch", "batch_idx", "dataloader_idx", "dataloader_name", "fetch_seconds"),
          "The loader has returned a batch, for which the loop waited `fetch_seconds`.", inside="batch",
          stages=EVERY_STAGE),
    Event("on_before_batch_transfer", "HDM", _TRANSFER, "The batch is about to be moved to the device.",
          inside="batch", returns=REPLACE, replaces="batch", either=True, stages=EVERY_STAGE),
    Event("transfer_batch_to_device", "DM", ("batch", "device", "dataloader_idx"),
          "Move the batch to the device.", inside="batch", action=True, returns=VALUE, stages=EVERY_STAGE),
    Event("on_after_batch_transfer", "HDM", _TRANSFER, "The batch is on the device.", inside="batch",
          returns=REPLACE, replaces="batch", either=True, stages=EVERY_STAGE),
    Event("on_train_batch_start", "HMS", _WITH_IDS,
          "A batch is ready and not used yet. Return SKIP_BATCH to skip it, END_EPOCH (or -1) to end "
          "the epoch.",
          inside="batch", returns=SIGNAL, signals=("SKIP_BATCH", "END_EPOCH"),
          spellings=("on_batch_start", "on_batch_begin")),
    Event("training_step", "SM", _BATCH,
          "Return the loss: a tensor, a dictionary with 'loss', or None to skip the batch.", inside="batch",
          action=True, returns=VALUE),
    Event("on_before_zero_grad", "HM", _OPTIMIZER,
          "The gradients of the last update are about to be cleared and can still be read; the weights are "
          "already updated.",
          inside="window"),
    Event("optimizer_zero_grad", "M", ("epoch", "batch_idx", "optimizer"), "Clear the gradients.",
          inside="window", action=True),
    Event("on_before_backward", "HM", ("loss", "batch", "batch_idx"),
          "Backward is about to run; a returned loss replaces the loss.", inside="batch",
          returns=REPLACE, replaces="live_loss", live={"loss": "s.live_loss"}),
    Event("backward", "SM", ("loss",), "Compute the gradients of the loss.", inside="batch", action=True,
          live={"loss": "s.scaled_loss"}),
    Event("on_after_backward", "HM", ("batch", "batch_idx"),
          "Backward has added its gradients; fired for every micro-batch.", inside="batch"),
    Event("on_before_optimizer_step", "HM", (*_OPTIMIZER, "loss", "grad_norm"),
          "Gradients are complete: synchronized and unscaled, not yet clipped. Return SKIP_STEP to skip the "
          "update, STEP_DONE if the hook has made it.",
          inside="update", returns=SIGNAL, signals=("SKIP_STEP", "STEP_DONE"),
          live={"loss": "s.window_loss"}),
    Event("configure_gradient_clipping", "M", ("optimizer", "gradient_clip_val", "gradient_clip_algorithm"),
          "Clip the gradients.", inside="update", action=True),
    Event("on_gradient_clip", "HM", ("grad_norm",),
          "Gradients have been clipped; fired only if gradient clipping is on.", inside="update"),
    Event("optimizer_step", "SM", ("epoch", "batch_idx", "optimizer", "optimizer_closure"),
          "Update the weights.", inside="update", action=True),
    Event("on_after_optimizer_step", "HM", _OPTIMIZER,
          "The weights are updated and `step` has advanced; gradients can still be read.", inside="update"),
    Event("on_step_skipped", "HM", ("reason", *_OPTIMIZER),
          "No update was made; `reason` is 'no_loss', 'nonfinite' or 'hook'.", inside="batch"),
    Event("lr_scheduler_step", "M", ("scheduler", "metric"), "Advance a learning-rate scheduler.",
          inside="batch", action=True),
    Event("on_train_batch_end", "HM", ("outputs", *_BATCH, "loss", "metrics", "sample_ids"),
          "A training batch is done; fired for every micro-batch.", live={"metrics": "s.batch_metrics"},
          inside="batch", spellings=("on_batch_end",), nested_validate=True),
    Event("on_train_metrics", "HM", ("metrics",),
          "Metrics are about to be logged; edit them in place, or return the dictionary to log instead.",
          inside="batch", returns=REPLACE, replaces="row", live={"metrics": "s.row"},
          spellings=("on_tng_metrics",)),
    Event("on_step_end", "HM", ("ctx", "loss", "grad_norm", "lr", "tokens_seen"),
          "An optimizer update is complete and its metrics are logged under this step; gradients can still "
          "be read.",
          inside="batch", live={"loss": "s.window_loss", "lr": "s.used_lr"}, nested_validate=True),
    # ---- validation ----------------------------------------------------------------------------------------
    Event("on_validation_model_eval", "M", (),
          "Put the module into eval mode.", inside="validation", action=True,
          stages=_EVALS),
    Event("on_validation_start", "HMS", (), "Validation begins.", inside="validation", stages=_EVALS,
          spellings=("on_pre_performance_check", "on_eval_start", "on_eval_begin")),
    Event("on_validation_epoch_start", "HMS", (), "The pass over the validation data begins.",
          inside="validation", stages=_EVALS),
    Event("on_validation_batch_start", "HMS", _WITH_IDS, "A validation batch is ready.",
          inside="validation batch", stages=_EVALS),
    Event("validation_step", "SM", _BATCH,
          "Compute and log metrics; a returned loss becomes `val/loss`.", inside="validation batch",
          action=True, returns=VALUE, stages=_EVALS),
    Event("on_validation_batch_end", "HMS", ("outputs", *_BATCH, "metrics", "sample_ids"),
          "A validation batch is done.", live={"metrics": "s.batch_metrics"}, inside="validation batch",
          stages=_EVALS),
    Event("on_validation_epoch_end", "HMS", ("metrics",), "The pass over the validation data is complete.",
          inside="validation", stages=_EVALS),
    Event("on_validation_end", "HMS", ("metrics",), "Validation is over; `metrics` has its results.",
          inside="validation", stages=_EVALS, spellings=("on_post_performance_check", "on_eval_end")),
    Event("on_validation_abandoned", "HMS", (),
          "A signal has interrupted the validation, and its end events are not fired: undo what its start "
          "did. The validation runs again after the resume.",
          inside="validation", ends="on_validation_start"),
    Event("on_validation_model_train", "M", (),
          "Restore the mode (train or eval) that each submodule had.", inside="validation",
          action=True, stages=_EVALS),
    # ---- saving --------------------------------------------------------------------------------------------
    Event("on_save_checkpoint", "HM", ("checkpoint", "path", "reason"),
          "A checkpoint is about to be written; its contents may be edited.", inside="save"),
    Event("on_checkpoint_save", "HM", ("path", "step", "reason"),
          "A checkpoint is complete and on disk at `path`; `reason` is 'interval', 'best', 'last', 'signal', "
          "'exception' or 'manual'.",
          inside="save", live={"step": "s.saved_step"}, ends="on_save_checkpoint"),
    Event("on_checkpoint_failed", "HM", ("path", "step", "reason", "exception"),
          "A checkpoint could not be written and the run continues, because it was `checkpoints/last` or "
          "`checkpoint={'on_error': 'warn'}` is set.",
          inside="save", live={"step": "s.saved_step"}, ends="on_save_checkpoint"),
    # ---- endings -------------------------------------------------------------------------------------------
    Event("on_train_epoch_end", "HM", ("epoch", "metrics"),
          "The epoch is over, including its validation. Monitors are called after the module.",
          inside="epoch", spellings=("on_epoch_end",), nested_validate=True),
    Event("on_train_end", "HMS", ("step", "tokens_seen", "metrics", "status"),
          "Training ended without an error; `status` is completed, stopped, pruned, preempted or "
          "interrupted.",
          inside="end", spellings=("on_training_end",)),
    # ---- test ----------------------------------------------------------------------------------------------
    Event("on_test_model_eval", "M", (), "Put the module into eval mode.",
          inside="test", action=True, stages=("test",)),
    Event("on_test_start", "HMS", (), "Testing begins.", inside="test", stages=("test",)),
    Event("on_test_epoch_start", "HMS", (), "The pass over the test data begins.", inside="test",
          stages=("test",)),
    Event("on_test_batch_start", "HMS", _WITH_IDS, "A test batch is ready.", inside="test batch",
          stages=("test",)),
    Event("test_step", "SM", _BATCH, "Compute and log metrics; a returned loss becomes `test/loss`.",
          inside="test batch", action=True, returns=VALUE, stages=("test",)),
    Event("on_test_batch_end", "HMS", ("outputs", *_BATCH, "metrics", "sample_ids"),
          "A test batch is done.", live={"metrics": "s.batch_metrics"}, inside="test batch",
          stages=("test",)),
    Event("on_test_epoch_end", "HMS", ("metrics",), "The pass over the test data is complete.", inside="test",
          stages=("test",)),
    Event("on_test_end", "HMS", ("metrics",), "Testing is over; `metrics` has its results.", inside="test",
          stages=("test",)),
    Event("on_test_model_train", "M", (),
          "Restore the mode (train or eval) that each submodule had.", inside="test", action=True,
          stages=("test",)),
    # ---- predict -------------------------------------------------------------------------------------------
    Event("on_predict_model_eval", "M", (), "Put the module into eval mode.",
          inside="predict", action=True, stages=("predict",)),
    Event("on_predict_start", "HMS", (), "Prediction begins.", inside="predict", stages=("predict",)),
    Event("on_predict_epoch_start", "HM", (), "The pass over the prediction data begins.", inside="predict",
          stages=("predict",)),
    Event("on_predict_batch_start", "HM", _WITH_IDS, "A prediction batch is ready.",
          inside="predict batch", stages=("predict",)),
    Event("predict_step", "SM", _BATCH, "Return the predictions for the batch.", inside="predict batch",
          action=True, returns=VALUE, stages=("predict",)),
    Event("on_predict_batch_end", "HM", ("outputs", *_WITH_IDS),
          "The predictions for a batch are complete.", inside="predict batch", stages=("predict",)),
    Event("on_predict_epoch_end", "HM", ("outputs",),
          "The pass over the prediction data is complete; `outputs` has all predictions.", inside="predict",
          stages=("predict",), live={"outputs": "s.predictions"}),
    Event("on_predict_end", "HMS", (), "Prediction is over.", inside="predict", stages=("predict",)),
    Event("on_predict_model_train", "M", (),
          "Restore the mode (train or eval) that each submodule had.", inside="predict",
          action=True, stages=("predict",)),
    # ---- the end of every run ------------------------------------------------------------------------------
    Event("on_exception", "HMDS", ("exception",),
          "The run failed. Every listener is called, even if another one raises.", inside="failure",
          isolated=True, stages=EVERY_STAGE),
    Event("strategy_teardown", "S", ("stage",), "The strategy releases its resources.", inside="end",
          spellings=("teardown",), isolated=True, stages=EVERY_STAGE),
    Event("on_fit_end", "HM", (),
          "The fit ended without an error, after the strategy's teardown; not fired after a failure.",
          inside="end"),
    Event("teardown", "DHM", ("stage",),
          "Clean up. Called once, also after a failure, for every listener whose `setup` began.",
          inside="end", isolated=True, stages=EVERY_STAGE),
)
# fmt: on

EVENTS_OF_THE_TABLE = frozenset(event.name for event in EVENT_ROWS)
EVENTS = EventTable(EVENT_ROWS, FACT_ROWS)
"""The table of this process."""


def declare_event(name: str, facts: tuple[str, ...] = (), doc: str = "", *, replaces: str = "") -> Event:
    """Declare an event of your own, which hooks can listen to and `trainer.emit(name, fact=value)` fires.

    name: its name, `on_...`. facts: the names of its facts. doc: a sentence for `explain`. replaces: a fact
    that a value returned by a listener replaces; `emit` returns the last one.
    """
    return EVENTS.declare(name, facts, doc, replaces=replaces)
