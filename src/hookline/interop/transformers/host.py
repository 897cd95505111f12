"""Hooks inside transformers' Trainer: a TrainerCallback, and two ears on the model for what no callback is
told.
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
from hookline.interop.hosted.checkpoints import as_json, from_json
from hookline.interop.hosted.host import TRANSFORMERS
from hookline.interop.hosted.run import HostedRun
from hookline.interop.transformers.forward_observer import ForwardObserver, ObservedLoss, loss_in, with_loss
from hookline.metrics.metric_log import Metrics
from hookline.run.optimizers import total_norm
from hookline.run.rows import edit_row
from hookline.run.save_request import Saved
from hookline.training.participants import attach_failures, raise_first
from hookline.training.run_events import report_saved
from hookline.util.errors import HookError

log = logging.getLogger("hookline")
NAME = "HooklineCallback"
OWN = {"loss": "train/loss", "learning_rate": "lr"}
"""What transformers logs itself, and what we call it."""


def make_callback(hooks: Iterable[Any], options: dict[str, Any]) -> Any:
    """The callback; hooks that transformers cannot serve are refused now."""
    from transformers.trainer_callback import ExportableState, TrainerCallback  # type: ignore[import-not-found,unused-ignore]

    made: list[Any] = []

    def the_one(
        cls: type,
    ) -> Any:  # transformers makes its callbacks anew to restore them: here that gives the same one
        return made[0] if made else object.__new__(cls)

    kind = type(
        NAME,
        (Listening, TrainerCallback, ExportableState),
        {"__new__": the_one, "__doc__": Listening.__doc__},
    )
    made.append(kind())
    made[0].open(
        HostedRun(
            TRANSFORMERS, hooks=hooks, announces_steps=False, host_logs=True, holds_rows=True, **options
        )
    )
    return made[0]


class Listening:
    """Hookline's hooks as one TrainerCallback. `line` is what they see as `trainer`.

    `with callback: trainer.train()` also tells them of an exception, which transformers tells no callback.
    """

    line: HostedRun

    def open(self, line: HostedRun) -> None:
        """Take up the hooks."""
        self.line = line
        self._forward_observer = ForwardObserver(self)
        self._control: Any = None
        self._scaler: Any = None
        self._gathering: Any = None
        self._inside_with = self._backward_is_told = self._is_first_epoch = False
        self._forget()
        self._window = self._ranks_in_loss = 1
        self._batch_of_epoch = 0
        self._share = 1
        """What a batch's loss is to be multiplied by, where transformers has divided it by the tokens of the
        whole window.
        """

    # ---- what a checkpoint of transformers keeps -----------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The hooks' state, as far as JSON can hold it."""
        return {"args": {}, "attributes": {"kept": self.kept}}

    @property
    def kept(self) -> dict[str, Any]:
        """What is kept of the hooks."""
        return as_json(self.line.state_dict())

    @kept.setter
    def kept(self, kept: dict[str, Any]) -> None:
        self.line.load_state_dict(from_json(kept))

    # ---- from set-up to teardown ---------------------------------------------------------------------------

    def __enter__(self) -> Listening:
        self._inside_with = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside_with = False
        if error is not None and self.line.is_running:
            self.line.fail(error)
            self._release()
            attach_failures(error, self.line.tear_down())

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Everything is in place."""
        line = self.line
        if line.is_running:  # the run before has failed, and nobody said so
            self._release()
            line.tear_down()
        if isinstance(state.stateful_callbacks.get(NAME), list):
            raise HookError(
                "There are several callbacks of hookline.hosts.transformers, and a checkpoint of "
                "transformers cannot tell them apart: give all hooks to one."
            )
        self._warn_of_silence()
        self._control, self._scaler = control, getattr(given["optimizer"], "scaler", None)
        self._gathering = getattr(given["optimizer"], "gradient_state", None)
        line.attach(given["model"], given["optimizer"], given["lr_scheduler"])
        line.take_place(args.process_index, args.local_process_index, args.world_size)
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
        self._steer(control)

    def _resume(self, state: Any) -> None:
        s = self.line.state
        self.line.start_afresh()
        s.counts.continue_at(state.global_step, int((state.epoch or 0) + 1e-6), resumed=state.global_step > 0)
        found = state.stateful_callbacks.get(NAME) if s.resumed else None
        if found is not None:
            self.kept = found["attributes"]["kept"]

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The run ended as meant."""
        line = self.line
        self._end_evaluation(control)
        if state.global_step < state.max_steps and not line.should_stop:
            line.stop("transformers' control.should_training_stop was set")
        line.end_training()
        line.end_fit()
        if line.loggers and (last := line.state.log.pending):  # transformers itself logs no more
            line.loggers.log_row(Metrics(last).read(), line.state.step, line.state.epoch, "step")
        self._release()
        raise_first(line.tear_down())

    def _release(self) -> None:
        self._forward_observer.release()
        self._forget()

    def _forget(self) -> None:
        """Whatever was going on is over, or has failed."""
        self._outputs: Any = None
        self._is_heard = self._epoch_waits = self._evaluates_first = False
        self._evaluation_is_heard = self._is_between_datasets = False
        self._loss = ObservedLoss(self.line)
        self._datasets: dict[str, dict[str, float]] = {}
        """What was measured in an evaluation that may go on with another dataset."""
        self._last_dataset = ""

    def _warn_of_silence(self) -> None:
        deaf = sorted({each.name for each in self.line.plan.listeners("on_exception")})
        if deaf and not self._inside_with:
            log.warning(
                "Nobody is told of an exception by transformers, but %s would like to be: write `with "
                "callback: trainer.train()`. It also tears every hook down after a failure.",
                ", ".join(deaf),
            )

    # ---- training ------------------------------------------------------------------------------------------

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """An epoch under transformers' number. Only a run's first one can go on in the middle; others may
        have been cut short.
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
        """The training goes on: an evaluation is over."""
        self._end_evaluation(control)

    def forward_begins(self, batch: Any) -> None:
        """The model is called in training mode: a batch begins, unless it is a second call in
        the same one.
        """
        if not self._is_heard:
            self._is_heard, self._backward_is_told = True, False
            is_share = isinstance(batch, dict) and batch.get("num_items_in_batch") is not None
            self._share = self._share_of_window() if is_share else 1
            self._batch_of_epoch += 1
            if (signal := self.line.start_batch(batch)) is not None:
                raise HookError(
                    f"A hook returned {signal!r} from on_train_batch_start, but {TRANSFORMERS.name} cannot "
                    "leave a batch out; trainer.stop() ends the run after it."
                )

    def _share_of_window(self) -> int:
        """The losses of a window's batches are its loss together; times its length each of them is a loss by
        itself.
        """
        batches, first = self.line.num_training_batches, self._batch_of_epoch // self._window * self._window
        return self._ranks_in_loss * (
            self._window if batches is None else max(1, min(self._window, batches - first))
        )

    def forward_ends(self, outputs: Any) -> Any:
        """The model has returned: its loss is what backward begins with. A replaced loss goes back to the
        model's caller.
        """
        line = self.line
        if line.state.last_loss is not None:
            return None  # a second call in the same batch
        if "outputs" in line.plan.wanted:
            self._outputs = outputs
        loss = loss_in(outputs)
        if self._loss.is_elsewhere or loss is None or not loss.requires_grad:
            self._loss.refuse(
                "returned none in its outputs (a compute_loss_func of the Trainer's own keeps it from "
                "callbacks)"
            )
            return None
        whole = loss if self._share == 1 else loss * self._share
        new = line.before_backward(whole)
        is_new = new is not whole
        if is_new:
            loss = new if self._share == 1 else new / self._share
        self._loss.is_awaited = True
        loss.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]
        return with_loss(outputs, loss) if is_new else None

    def _backward_begins(self, gradient: Tensor) -> None:
        """Hooks are to see the gradients when this backward is over, because the clipping comes before any
        callback.
        """
        self._loss.is_awaited = False
        plan = self.line.plan
        if plan.on_before_optimizer_step is noop and "grad_norm" not in plan.wanted:
            return
        engine = torch.autograd.Variable._execution_engine
        # twice, so that it comes after what DistributedDataParallel does at the end
        engine.queue_callback(lambda: engine.queue_callback(self._backward_is_over))

    def _backward_is_over(self) -> None:
        s = self.line.state
        if self._scaler is None:
            if self._gathering is not None and self._gathering.sync_gradients:  # the last one of its window
                self._tell_of_backward()
                self.line.updates.before(0)
        elif "grad_norm" in self.line.plan.wanted:  # nobody may unscale them before transformers does
            norm = total_norm(s.optimizers)
            self.line.updates.know_norm(None if norm is None else norm / self._scaler.get_scale())

    def _tell_of_backward(self) -> None:
        if not self._backward_is_told:
            self._backward_is_told = True
            self.line.after_backward()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """After the window's last backward, and after the clipping: for whoever could not be
        told before it.
        """
        self._tell_of_backward()
        self.line.updates.before(0)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Right before the gradients are cleared."""
        updates = self.line.updates
        updates.skip_missing()
        updates.clear(0, self.line.state.optimizers[0])

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """A batch that is not the last of its window."""
        self._tell_of_backward()
        self._end_batch(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The last batch of a window."""
        self._loss.end_step()
        self._end_batch(control)

    def _end_batch(self, control: Any) -> None:
        outputs, self._outputs = self._outputs, None
        self._is_heard = False
        self._loss.end_batch()
        self.line.end_batch(outputs)
        self._steer(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Transformers evaluates after it; for hooks an evaluation that is due belongs to the epoch."""
        self._end_evaluation(control)
        self._epoch_waits = control.should_evaluate
        if not self._epoch_waits:
            self.line.end_epoch()
        self._steer(control)

    # ---- evaluation, logging, saving -----------------------------------------------------------------------

    def evaluation_begins(self, batch: Any) -> None:
        """The model is called in eval mode. Only if an evaluation is due: others may look at
        the model too.
        """
        if self._evaluation_is_heard:
            return  # a second call in the same batch: to generate, say
        if self._control.should_evaluate or self._evaluates_first or self._datasets:
            self._evaluation_is_heard, self._is_between_datasets = True, False
            (self.line.current_pass or self.line.start_validation()).start_batch(
                batch, dataloader_idx=len(self._datasets)
            )

    def evaluation_ends(self, outputs: Any) -> None:
        """The model has returned, in eval mode."""
        if self.line.current_pass is not None:
            self._outputs = outputs if "outputs" in self.line.plan.wanted else loss_in(outputs)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """An evaluation batch is done."""
        outputs, self._outputs = self._outputs, None
        self._evaluation_is_heard = False
        if self.line.current_pass is not None:
            self.line.current_pass.end_batch(outputs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **given: Any) -> None:
        """`eval_loss` is also there as `val/loss`, which is what it is called everywhere else."""
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
        ):  # else it may go on: in the first round nobody can tell which dataset is the last
            self._end_evaluation(control)

    def weights_are_read(self) -> None:
        """Whoever takes them wants those of the training, and not what a hook has put there for an
        evaluation.
        """
        if self._is_between_datasets:
            self._end_evaluation(self._control)

    def _end_evaluation(self, control: Any) -> None:
        """With what was measured on all of its datasets, if there was one."""
        if not self._datasets:
            return
        line, measured = self.line, self._datasets
        self._datasets, self._last_dataset, self._is_between_datasets = {}, list(measured)[-1], False
        found = {key: value for each in measured.values() for key, value in each.items()}
        (line.current_pass or line.start_validation()).end_data(found)
        line.end_validation()
        if self._epoch_waits:
            self._epoch_waits = False
            line.end_epoch()
        self._steer(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        """What hooks have logged goes out with it; what they change, later callbacks see."""
        line, s = self.line, self.line.state
        if not line.is_running or logs is None:
            return
        pending, s.log.pending = s.log.pending, {}
        numbers = {key: value for key, value in logs.items() if isinstance(value, int | float)}
        if "loss" in numbers:
            self._loss.compare(numbers["loss"])
        ours = _as_ours(numbers)
        values: dict[str, Any] = {**numbers, **ours, **pending}
        over = "evaluation" if any(key.startswith("eval_") for key in logs) else "step"
        row = (edit_row(line.plan, s, values) if over == "step" else Metrics(values)).read()
        logs.update({key: value for key, value in row.items() if key not in ours or value != ours[key]})
        if line.loggers:
            line.loggers.log_row(row, s.step, s.epoch, over)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """A checkpoint of transformers' own is on disk."""
        if not self.line.is_running:
            return
        self._end_evaluation(control)
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        report_saved(self.line, Saved(path, "interval", state.global_step), on_error="raise")

    def _steer(self, control: Any) -> None:
        self._control = control
        if self.line.should_stop:
            control.should_training_stop = True


def _dataset_in(metrics: Mapping[str, float]) -> str:
    """The name of one of several datasets, by which transformers has called how long it took; empty if there
    is only one.
    """
    names = [
        key[len("eval_") : -len("_runtime")]
        for key in metrics
        if key.startswith("eval_") and key.endswith("_runtime")
    ]
    return names[0] if names and "eval_runtime" not in metrics else ""


def _as_ours(values: Mapping[str, float]) -> dict[str, float]:
    """What transformers has measured, under the names that it has everywhere else; how long it took is
    nobody's metric.
    """
    ours = {OWN[key]: value for key, value in values.items() if key in OWN}
    measured = [
        key for key in values if key.startswith("eval_") and not key.endswith(("_runtime", "_per_second"))
    ]
    return ours | {"val/" + key.removeprefix("eval_"): values[key] for key in measured}
