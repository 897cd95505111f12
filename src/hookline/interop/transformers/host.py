"""Hooks inside transformers' Trainer: a TrainerCallback, and an observer of the model for events without a
callback.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hookline.data.sources import length_of
from hookline.engine.plan import noop
from hookline.interop.hosted.checkpoints import state_as_json, state_from_json
from hookline.interop.hosted.host import TRANSFORMERS_HOST
from hookline.interop.hosted.objects import refuse_other_options
from hookline.interop.hosted.run import HostedRun
from hookline.metrics.metric_log import Metrics
from hookline.run.optimizers import total_norm
from hookline.run.rows import edit_row
from hookline.run.save_request import Saved
from hookline.training.run_events import report_saved
from hookline.util.errors import HookError

log = logging.getLogger("hookline")
CALLBACK_NAME = "HooklineCallback"
HOOKLINE_NAMES = {"loss": "train/loss", "learning_rate": "lr"}
"""Names under which transformers logs, and Hookline's names."""


def transformers_callback(hooks: Iterable[Any], options: dict[str, Any]) -> Any:
    """Return the callback; hooks that transformers cannot serve are rejected now."""
    from transformers.trainer_callback import ExportableState, TrainerCallback  # type: ignore[import-not-found,unused-ignore]

    made: list[Any] = []

    def the_one(
        cls: type,
    ) -> Any:  # transformers creates its callbacks again to restore them: return the same one
        return made[0] if made else object.__new__(cls)

    kind = type(
        CALLBACK_NAME,
        (CallbackInTransformers, TrainerCallback, ExportableState),
        {"__new__": the_one, "__doc__": CallbackInTransformers.__doc__},
    )
    made.append(kind())
    refuse_other_options(TRANSFORMERS_HOST, options)
    made[0].open(
        HostedRun(
            TRANSFORMERS_HOST, hooks=hooks, announces_steps=False, host_logs=True, holds_rows=True, **options
        )
    )
    return made[0]


class CallbackInTransformers:
    """Hookline's hooks as one TrainerCallback. `line` is the object that hooks see as `trainer`.

    `with callback: trainer.train()` also emits on_exception, which transformers does not report to callbacks.
    """

    line: HostedRun

    def open(self, line: HostedRun) -> None:
        """Attach the hooks."""
        self.line = line
        self._forward_observer = ForwardObserver(self)
        self._control: Any = None
        self._scaler: Any = None
        self._gathering: Any = None
        self._inside_with = self._has_emitted_backward = self._is_first_epoch = False
        self._forget()
        self._window = self._ranks_in_loss = 1
        self._batch_of_epoch = 0
        self._share = 1
        """The factor for a batch's loss where transformers has divided it by the tokens of the whole
        window.
        """

    # ---- the state in a checkpoint of transformers ---------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the hooks' state, as far as JSON can hold it."""
        return {"args": {}, "attributes": {"kept": self.kept}}

    @property
    def kept(self) -> dict[str, Any]:
        """Return the hooks' state as JSON values."""
        return state_as_json(self.line.state_dict())

    @kept.setter
    def kept(self, kept: dict[str, Any]) -> None:
        self.line.load_state_dict(state_from_json(kept))

    # ---- from set-up to teardown ---------------------------------------------------------------------------

    def __enter__(self) -> CallbackInTransformers:
        self._inside_with = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside_with = False
        if error is not None and self.line.is_running:
            self._release()
            self.line.fail(error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Start the run."""
        line = self.line
        if line.is_running:  # the previous run failed without a report
            self._release()
            line.tear_down()
        if isinstance(state.stateful_callbacks.get(CALLBACK_NAME), list):
            raise HookError(
                "There are several callbacks of hookline.hosts.transformers, but a checkpoint of "
                "transformers stores only one: pass all hooks to one callback."
            )
        self._warn_of_missing_with()
        self._control, self._scaler = control, getattr(given["optimizer"], "scaler", None)
        self._gathering = getattr(given["optimizer"], "gradient_state", None)
        line.attach(given["model"], given["optimizer"], given["lr_scheduler"])
        line.set_rank(args.process_index, args.local_process_index, args.world_size)
        line.options.max_steps = state.max_steps
        line.options.max_epochs = math.ceil(args.num_train_epochs) if args.max_steps <= 0 else -1
        line.options.log_every_n_steps = max(1, int(state.logging_steps or 1))
        self._window, self._evaluates_first, self._is_first_epoch = (
            args.gradient_accumulation_steps,
            args.eval_on_start,
            True,
        )
        self._ranks_in_loss = args.world_size if args.average_tokens_across_devices else 1
        self._resume(state)
        line.begin()
        self._forward_observer.listen(line.module)
        line.start_fit()
        line.start_training()
        self._apply_stop(control)

    def _resume(self, state: Any) -> None:
        s = self.line.state
        self.line.start_new()
        s.counts.continue_at(state.global_step, int((state.epoch or 0) + 1e-6), resumed=state.global_step > 0)
        found = state.stateful_callbacks.get(CALLBACK_NAME) if s.resumed else None
        if found is not None:
            self.kept = found["attributes"]["kept"]

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End a run that did not fail."""
        line = self.line
        self._end_evaluation(control)
        if state.global_step < state.max_steps and not line.should_stop:
            line.stop("transformers' control.should_training_stop was set")
        line.end_training()
        line.end_fit()
        if line.loggers and (last := line.state.log.pending):  # transformers does not log again
            line.loggers.log_row(Metrics(last).read(), line.state.step, line.state.epoch, "step")
        self._release()
        line.close()

    def _release(self) -> None:
        self._forward_observer.release()
        self._forget()

    def _forget(self) -> None:
        """Reset what belongs to the current batch, evaluation and run."""
        self._outputs: Any = None
        self._batch_is_open = self._epoch_end_is_pending = self._evaluates_first = False
        self._evaluation_batch_is_open = self._is_between_datasets = False
        self._observed_loss = ObservedLoss(self.line)
        self._datasets: dict[str, dict[str, float]] = {}
        """Results of an evaluation that may continue with another dataset."""
        self._last_dataset = ""

    def _warn_of_missing_with(self) -> None:
        names = sorted({each.name for each in self.line.plan.listeners("on_exception")})
        if names and not self._inside_with:
            log.warning(
                "transformers does not report exceptions to callbacks, but these hooks listen to "
                "on_exception: %s. Write `with callback: trainer.train()`, which also tears the hooks down "
                "after a failure.",
                ", ".join(names),
            )

    # ---- training ------------------------------------------------------------------------------------------

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Start an epoch under transformers' number. Only the first epoch of a run can start in the
        middle.
        """
        self._end_evaluation(control)
        self.line.end_epoch()
        self._evaluates_first = False
        batches = length_of(given["train_dataloader"])
        self._batch_of_epoch = 0
        if self._is_first_epoch:
            self._is_first_epoch = False
            whole, part = divmod((state.epoch or 0) + 1e-6, 1)
            counts = self.line.state.counts
            counts.continue_at(counts.step, int(whole), counts.resumed)
            self._batch_of_epoch = 0 if batches is None or args.ignore_data_skip else int(part * batches)
        self.line.start_epoch(batches, self._batch_of_epoch)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End an evaluation, because the training continues."""
        self._end_evaluation(control)

    def forward_begins(self, batch: Any) -> None:
        """Start a batch when the model is called in training mode, unless it is a second call in the same
        batch.
        """
        if not self._batch_is_open:
            self._batch_is_open, self._has_emitted_backward = True, False
            is_share = isinstance(batch, dict) and batch.get("num_items_in_batch") is not None
            self._share = self._share_of_window() if is_share else 1
            self._batch_of_epoch += 1
            if (signal := self.line.start_batch(batch)) is not None:
                raise HookError(
                    f"A hook returned {signal!r} from on_train_batch_start, but {TRANSFORMERS_HOST.name} "
                    "cannot skip a batch; trainer.stop() ends the run after it."
                )

    def _share_of_window(self) -> int:
        """Return the factor that makes a window's partial loss a loss of its own."""
        batches, first = self.line.num_training_batches, self._batch_of_epoch // self._window * self._window
        return self._ranks_in_loss * (
            self._window if batches is None else max(1, min(self._window, batches - first))
        )

    def forward_ends(self, outputs: Any) -> Any:
        """Emit on_before_backward with the loss that the model returned. A replaced loss goes back to the
        model's caller.
        """
        line = self.line
        if line.state.last_loss is not None:
            return None  # a second call in the same batch
        if "outputs" in line.plan.wanted:
            self._outputs = outputs
        loss = loss_in(outputs)
        if self._observed_loss.is_replaced or loss is None or not loss.requires_grad:
            self._observed_loss.refuse(
                "returned none in its outputs (a compute_loss_func of the Trainer hides it from callbacks)"
            )
            return None
        whole = loss if self._share == 1 else loss * self._share
        new = line.before_backward(whole)
        is_new = new is not whole
        if is_new:
            loss = new if self._share == 1 else new / self._share
        self._observed_loss.awaits_backward = True
        loss.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]
        return with_loss(outputs, loss) if is_new else None

    def _backward_begins(self, gradient: Tensor) -> None:
        """Let hooks see the gradients when this backward ends, because transformers clips before any
        callback.
        """
        self._observed_loss.awaits_backward = False
        plan = self.line.plan
        if plan.on_before_optimizer_step is noop and "grad_norm" not in plan.wanted:
            return
        engine = torch.autograd.Variable._execution_engine
        # queued twice, so that it runs after the final callback of DistributedDataParallel
        engine.queue_callback(lambda: engine.queue_callback(self._backward_is_over))

    def _backward_is_over(self) -> None:
        s = self.line.state
        if self._scaler is None:
            if self._gathering is not None and self._gathering.sync_gradients:  # the last one of its window
                self._emit_after_backward()
                self.line.updates.before(0)
        elif "grad_norm" in self.line.plan.wanted:  # transformers must be the first to unscale them
            norm = total_norm(s.optimizers)
            self.line.updates.set_norm(None if norm is None else norm / self._scaler.get_scale())

    def _emit_after_backward(self) -> None:
        if not self._has_emitted_backward:
            self._has_emitted_backward = True
            self.line.after_backward()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Emit events that could not come before the clipping, after the window's last backward."""
        self._emit_after_backward()
        self.line.updates.before(0)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Emit on_before_zero_grad right before the gradients are cleared."""
        updates = self.line.updates
        updates.skip_missing()
        updates.clear(0, self.line.state.optimizers[0])

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End a batch that is not the last of its window."""
        self._emit_after_backward()
        self._end_batch(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the last batch of a window."""
        self._observed_loss.end_step()
        self._end_batch(control)

    def _end_batch(self, control: Any) -> None:
        outputs, self._outputs = self._outputs, None
        self._batch_is_open = False
        self._observed_loss.end_batch()
        self.line.end_batch(outputs)
        self._apply_stop(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the epoch, or wait for an evaluation that is due: transformers runs it later, for hooks it
        belongs to the epoch.
        """
        self._end_evaluation(control)
        self._epoch_end_is_pending = control.should_evaluate
        if not self._epoch_end_is_pending:
            self.line.end_epoch()
        self._apply_stop(control)

    # ---- evaluation, logging, saving -----------------------------------------------------------------------

    def evaluation_begins(self, batch: Any) -> None:
        """Start an evaluation batch when the model is called in eval mode, if an evaluation is due."""
        if self._evaluation_batch_is_open:
            return  # a second call in the same batch: to generate, say
        if self._control.should_evaluate or self._evaluates_first or self._datasets:
            self._evaluation_batch_is_open, self._is_between_datasets = True, False
            (self.line.current_pass or self.line.start_validation()).start_batch(
                batch, dataloader_idx=len(self._datasets)
            )

    def evaluation_ends(self, outputs: Any) -> None:
        """Keep the outputs of the model in eval mode."""
        if self.line.current_pass is not None:
            self._outputs = outputs if "outputs" in self.line.plan.wanted else loss_in(outputs)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End an evaluation batch."""
        outputs, self._outputs = self._outputs, None
        self._evaluation_batch_is_open = False
        if self.line.current_pass is not None:
            self.line.current_pass.end_batch(outputs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **given: Any) -> None:
        """Take over the results. `eval_loss` is also `val/loss`, its name in Hookline."""
        if not self.line.is_running:
            return
        found = {
            key: float(value) for key, value in (metrics or {}).items() if isinstance(value, int | float)
        }
        numbers = {key: value for key, value in found.items() if key != "epoch"}
        name = _dataset_in(numbers)
        self._datasets[name] = numbers | _as_ours(numbers)
        self._is_between_datasets = bool(name) and name != self._last_dataset
        if (
            not self._is_between_datasets
        ):  # else it may continue: in the first round the last dataset is not known
            self._end_evaluation(control)

    def weights_are_read(self) -> None:
        """End an evaluation first, because a hook may have swapped the weights for it."""
        if self._is_between_datasets:
            self._end_evaluation(self._control)

    def _end_evaluation(self, control: Any) -> None:
        """End the validation with the results on all of its datasets, if there is one."""
        if not self._datasets:
            return
        line, measured = self.line, self._datasets
        self._datasets, self._last_dataset, self._is_between_datasets = {}, list(measured)[-1], False
        found = {key: value for each in measured.values() for key, value in each.items()}
        (line.current_pass or line.start_validation()).end_data(found)
        line.end_validation()
        if self._epoch_end_is_pending:
            self._epoch_end_is_pending = False
            line.end_epoch()
        self._apply_stop(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        """Add what hooks have logged to this row; later callbacks see what hooks change in it."""
        line, s = self.line, self.line.state
        if not line.is_running or logs is None:
            return
        pending, s.log.pending = s.log.pending, {}
        numbers = {key: value for key, value in logs.items() if isinstance(value, int | float)}
        if "loss" in numbers:
            self._observed_loss.compare(numbers["loss"])
        ours = _as_ours(numbers)
        values: dict[str, Any] = {**numbers, **ours, **pending}
        over = "evaluation" if any(key.startswith("eval_") for key in logs) else "step"
        row = (edit_row(line.plan, s, values) if over == "step" else Metrics(values)).read()
        logs.update({key: value for key, value in row.items() if key not in ours or value != ours[key]})
        if line.loggers:
            line.loggers.log_row(row, s.step, s.epoch, over)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Emit on_checkpoint_save for a checkpoint of transformers."""
        if not self.line.is_running:
            return
        self._end_evaluation(control)
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        report_saved(self.line, Saved(path, "interval", state.global_step), on_error="raise")

    def _apply_stop(self, control: Any) -> None:
        self._control = control
        if self.line.should_stop:
            control.should_training_stop = True


def _dataset_in(metrics: Mapping[str, float]) -> str:
    """Return the name of one of several datasets, from the key of its run time; empty if there is only
    one.
    """
    names = [
        key[len("eval_") : -len("_runtime")]
        for key in metrics
        if key.startswith("eval_") and key.endswith("_runtime")
    ]
    return names[0] if names and "eval_runtime" not in metrics else ""


def _as_ours(values: Mapping[str, float]) -> dict[str, float]:
    """Return transformers' metrics under Hookline's names, without run times."""
    ours = {HOOKLINE_NAMES[key]: value for key, value in values.items() if key in HOOKLINE_NAMES}
    measured = [
        key for key in values if key.startswith("eval_") and not key.endswith(("_runtime", "_per_second"))
    ]
    return ours | {"val/" + key.removeprefix("eval_"): values[key] for key in measured}


# ---- The calls of the model, because callbacks receive neither batches nor losses ------------------------


class ForwardObserver:
    """Observes a model from `listen` to `release`. A copy of the model is not observed, because it is not
    trained.
    """

    def __init__(self, listener: CallbackInTransformers | None = None) -> None:
        self.listener = listener
        self._handles: list[Any] = []

    def listen(self, module: Any) -> None:
        """Register hooks on the model."""
        self._handles = [
            module.register_forward_pre_hook(self.called, with_kwargs=True),
            module.register_forward_hook(self.returned, with_kwargs=True),
            module.register_state_dict_pre_hook(self.read),
        ]

    def release(self) -> None:
        """Remove the hooks from the model."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def __deepcopy__(self, memo: Any) -> ForwardObserver:
        return ForwardObserver()

    def __reduce__(self) -> Any:
        return ForwardObserver, ()

    def called(self, module: Any, args: Any, kwargs: Any) -> None:
        """Report a call before the forward."""
        if self.listener is not None:
            begins = self.listener.forward_begins if module.training else self.listener.evaluation_begins
            begins(kwargs or args)

    def read(self, *given: Any) -> None:
        """Report a read of the state dict before it happens."""
        if self.listener is not None:
            self.listener.weights_are_read()

    def returned(self, module: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
        """Report the outputs after the forward."""
        if self.listener is None:
            return None
        return (
            self.listener.forward_ends(outputs) if module.training else self.listener.evaluation_ends(outputs)
        )


def loss_in(outputs: Any) -> Tensor | None:
    """Return the loss among a model's outputs, or None."""
    if isinstance(outputs, dict):
        found = outputs.get("loss")
    else:
        found = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    return found if isinstance(found, Tensor) and found.numel() == 1 else None


def with_loss(outputs: Any, loss: Tensor) -> Any:
    """Return the same outputs with another loss."""
    if isinstance(outputs, dict):
        outputs["loss"] = loss
        return outputs
    return type(outputs)([loss, *outputs[1:]]) if isinstance(outputs, tuple | list) else loss


class ObservedLoss:
    """The losses of one run, as the model returned them: does transformers train on what hooks see?"""

    def __init__(self, line: HostedRun) -> None:
        self.line = line
        self.awaits_backward = False
        """Whether hooks have received the loss of this batch, and it is not differentiated yet."""
        self.is_replaced = False
        """Whether transformers differentiates another value than the one that the model returns."""
        self._is_compared = False
        self._sum: Any = 0.0
        """The sum of the losses of `_steps` steps, until transformers first logs its own."""
        self._steps = 0

    def is_requested(self) -> bool:
        """Return whether a hook requests the loss or a value that depends on it."""
        plan = self.line.plan
        return plan.on_before_backward is not noop or bool(plan.wanted & {"loss", "grad_norm"})

    def refuse(self, why: str) -> None:
        """Raise an error if a hook requests the loss, which callbacks cannot see."""
        if self.is_requested():
            raise HookError(f"A hook requests the loss, but {type(self.line.module).__name__} {why}.")

    def end_batch(self) -> None:
        """Check that the loss of this batch was differentiated."""
        if self.awaits_backward:
            self.awaits_backward, self.is_replaced = False, True
            self.refuse(
                "returned one that was not differentiated (a custom compute_loss of the Trainer uses another)"
            )
            self.line.batch.forget_loss()

    def end_step(self) -> None:
        """Add the mean loss of an update."""
        if not self._is_compared and (loss := self.line.state.mean_of_window()) is not None:
            self._sum, self._steps = self._sum + loss, self._steps + 1

    def compare(self, loss: float) -> None:
        """Compare once with the loss that transformers logs, which has just synchronized the device
        itself.
        """
        if self._is_compared:
            return
        self._is_compared = True
        if not self._steps or self.line.state.world_size > 1 or not self.is_requested():
            return  # what transformers logs is the mean over all ranks
        mean = float(self._sum) / self._steps
        if math.isfinite(mean) and abs(mean - loss) > 0.01 * max(abs(mean), abs(loss)) + 0.001:
            log.warning(
                "Hooks see a loss of %.4g, but transformers trains on %.4g, because a custom compute_loss of "
                "the Trainer changes the loss that the model returns.",
                mean,
                loss,
            )
