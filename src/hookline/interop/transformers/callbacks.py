"""transformers' callbacks among Hookline's hooks, unchanged: EarlyStoppingCallback, PrinterCallback, and your
own.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hookline.engine.binding import Binding, Caller
from hookline.engine.events import EventTable
from hookline.engine.init_arguments import cannot_keep
from hookline.engine.listener import Listener, refuse_misspelled
from hookline.interop.adapter import AdoptedCallback
from hookline.util.errors import END_EPOCH, HookError, closest

# ---- The run that all callbacks share: one `args`, one `state`, one `control` -----------------------------


class ArgsView:
    """The part of TrainingArguments that a Hookline run has. `Trainer(config=TrainingArguments(...))` shows
    those instead.
    """

    def __init__(self, state: Any) -> None:
        options = state.trainer.options
        watches = [
            each.watch
            for each in state.hooks
            if getattr(each, "tier", "") == "monitor" and hasattr(each, "watch")
        ]
        watched = next((each for each in watches if each.monitor != "-"), None)
        self.metric_for_best_model = eval_name(watched.monitor) if watched is not None else "loss"
        self.greater_is_better = watched is not None and watched.mode == "max"
        self._watched: str = watched.monitor if watched is not None else ""
        self.load_best_model_at_end = False
        self.eval_strategy = "no"
        self.logging_strategy, self.logging_steps = "steps", options.log_every_n_steps
        self.save_strategy = "no"
        self.num_train_epochs, self.max_steps = options.max_epochs, options.max_steps
        self.gradient_accumulation_steps = getattr(options, "accumulate_grad_batches", 1)
        self.max_grad_norm = options.gradient_clip_val or 0.0
        self.output_dir = str(options.run_dir or options.default_root_dir)
        self.seed = options.seed
        self.device = state.device
        self.world_size, self.process_index, self.local_process_index = (
            state.world_size,
            state.rank,
            state.local_rank,
        )
        self.local_rank = state.local_rank
        self.disable_tqdm = not options.enable_progress_bar
        self.report_to: list[str] = []
        self.run_name: str | None = None
        self.logging_dir: str | None = None
        self.resume_from_checkpoint: str | None = None
        self.learning_rate: float | None = None

    def complete(self, state: Any, validates: bool) -> None:
        """Set what is known once the run is set up."""
        self.eval_strategy = "epoch" if validates else "no"
        self.learning_rate, self.device = state.lr, state.device
        self.output_dir = str(state.trainer.run_dir)

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as plain data, which the callbacks of trackers log as hyper-parameters."""
        return {
            name: value if isinstance(value, bool | int | float | str | list | None) else str(value)
            for name, value in vars(self).items()
            if not name.startswith("_")
        }

    to_sanitized_dict = to_dict

    def to_json_string(self) -> str:
        """Return the arguments as a JSON document."""
        return json.dumps(self.to_dict(), indent=2)

    def __getattr__(self, name: str) -> Any:
        """Raise an error that lists the attributes there are."""
        if name.startswith("__"):
            raise AttributeError(name)
        known = [each for each in vars(self) if not each.startswith("_")]
        raise HookError(
            f"A transformers callback reads args.{name}, which a Hookline run does not have."
            f"{closest(name, known)} There are: {', '.join(known)}. "
            "For others pass Trainer(config=TrainingArguments(...))."
        )


def eval_name(name: str) -> str:
    """Return the name in transformers: `val/loss` -> `eval_loss`."""
    return "eval_" + name.removeprefix("val/").removeprefix("val_").removeprefix("eval_")


def eval_names(metrics: Mapping[str, float], watched: str = "") -> dict[str, float]:
    """Return the metrics of a validation under transformers' names; `watched`: a metric of it under any
    name.
    """
    found = {
        eval_name(key): value for key, value in metrics.items() if key.startswith(("val/", "val_", "eval_"))
    }
    return (
        {**found, eval_name(watched): metrics[watched]}
        if watched in metrics and not watched.startswith("train")
        else found
    )


def logged_names(row: Mapping[str, float], epoch: float) -> dict[str, float]:
    """Return a row of training metrics under transformers' names."""
    names = {"train/loss": "loss", "lr": "learning_rate"}
    return {**{names.get(key, key): value for key, value in row.items()}, "epoch": epoch}


class SharedRun:
    """A run as transformers has it. Each callback sees what earlier ones have set in `control`, and may reset
    it.
    """

    def __init__(self, facts: Any, theirs: Any) -> None:
        self.facts = facts
        """The live state of the run."""
        self.args: Any = facts.config if hasattr(facts.config, "metric_for_best_model") else ArgsView(facts)
        self.state: Any = theirs.TrainerState()
        self.control: Any = theirs.TrainerControl()
        self.state.is_world_process_zero, self.state.is_local_process_zero = (
            facts.rank == 0,
            facts.local_rank == 0,
        )
        self.members: list[Any] = []
        self.batches: int | None = None
        """Batches of an epoch, if known."""
        self.ends_epoch = False
        """Whether should_epoch_stop was set after a method returned; later resets do not count."""
        self.logs: dict[str, Any] = {}
        """The newest row, as on_log gets it."""
        self.metrics: dict[str, Any] = {}
        """The newest evaluation, as on_evaluate gets it."""
        self._epoch = -1
        self._evaluated_at = (-1, -1)
        self._stop: tuple[str, int] = ("", -1)
        """The class that requested the stop, and the step."""

    # ---- progress ------------------------------------------------------------------------------------------

    def refresh(self, s: Any) -> None:
        """Update global_step and epoch."""
        self.state.global_step = s.step
        self.state.epoch = s.batches_seen / self.batches if self.batches else float(s.epochs_seen)

    def begin_epoch(self, s: Any) -> None:
        """Reset the flags once for each epoch, before the callbacks of its start."""
        if s.epoch != self._epoch:
            self._epoch = s.epoch
            self.control.should_epoch_stop = self.ends_epoch = False

    def measure(self, s: Any, accumulate: int) -> None:
        """Set the length of an epoch and of the run, as far as they are known."""
        trainer, state = s.trainer, self.state
        self.batches = trainer.num_training_batches
        if trainer.options.max_steps >= 0:
            state.max_steps = trainer.options.max_steps
        elif self.batches is not None and state.num_train_epochs:
            state.max_steps = -(-self.batches // accumulate) * state.num_train_epochs

    # ---- logs and metrics ----------------------------------------------------------------------------------

    def record_row(self, s: Any) -> None:
        """Record a row of training metrics."""
        self.refresh(s)
        self._record(logged_names(s.row.read(), self.state.epoch))

    def record_evaluation(self, s: Any) -> None:
        """Record the results of a validation."""
        self.refresh(s)
        self._evaluated_at = (s.step, s.batches_seen)
        self.metrics = eval_names(s.metrics, getattr(self.args, "_watched", ""))
        self._record({**self.metrics, "epoch": self.state.epoch})

    def _record(self, logs: dict[str, Any]) -> None:
        self.logs = logs
        self.state.log_history.append({**logs, "step": self.state.global_step})

    def update_best(self, s: Any) -> None:
        """Update the best metric, after all callbacks have compared with the previous one."""
        name, best = self.args.metric_for_best_model, self.state.best_metric
        value = self.metrics.get(eval_name(name)) if name else None
        if value is not None and (
            best is None or (value > best if self.args.greater_is_better else value < best)
        ):
            self.state.best_metric, self.state.best_global_step = value, s.step

    # ---- the flags of control ------------------------------------------------------------------------------

    def record_stop(self, who: str, step: int) -> None:
        """Record which class was the first to request a stop at this step."""
        if self._stop[1] != step:
            self._stop = (who, step)

    def request_stop(self, s: Any) -> None:
        """Request the stop, if no callback has reset the flag."""
        if self.control.should_training_stop:
            s.request_stop(f"{self._stop[0]} set control.should_training_stop")

    def apply_control(self, s: Any) -> None:
        """Do what the flags request, each once."""
        control, trainer = self.control, s.trainer
        if control.should_log:
            control.should_log = False
            row, s.log.pending = s.log.pending, {}
            values = {"train/loss": s.mean_of_window(), "lr": s.used_lr, **row}
            rows = getattr(trainer, "_run", trainer).rows  # a hosted run has its rows itself
            rows.write({key: value for key, value in values.items() if value is not None})
        if control.should_evaluate:
            control.should_evaluate = False
            if self._evaluated_at != (
                s.step,
                s.batches_seen,
            ):  # the epoch's own validation may have run first
                trainer.validate()
        if control.should_save:
            control.should_save = False
            trainer.save_checkpoint()

    # ---- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the best metric and the log history."""
        state = self.state
        return {
            "best_metric": state.best_metric,
            "best_global_step": state.best_global_step,
            "log_history": state.log_history,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore them."""
        self.state.best_metric, self.state.best_global_step = (
            saved.get("best_metric"),
            saved.get("best_global_step"),
        )
        self.state.log_history = list(saved.get("log_history", []))


# ---- One callback as a hook --------------------------------------------------------------------------------


TRANSFORMERS_METHODS: Mapping[str, tuple[str, ...]] = {
    "on_init_end": ("setup",),
    "on_train_begin": ("on_train_start",),
    "on_train_end": ("on_train_end",),
    "on_epoch_begin": ("on_train_epoch_start",),
    "on_epoch_end": ("on_train_epoch_end",),
    "on_step_begin": ("on_train_batch_start",),
    "on_substep_end": ("on_train_batch_end",),
    "on_pre_optimizer_step": ("on_before_optimizer_step",),
    "on_optimizer_step": ("on_after_optimizer_step",),
    "on_step_end": ("on_step_end",),
    "on_prediction_step": ("on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end"),
    "on_log": ("on_train_metrics", "on_validation_end"),
    "on_evaluate": ("on_validation_end",),
    "on_predict": ("on_test_end", "on_predict_end"),
    "on_save": ("on_checkpoint_save",),
}
"""Their method -> our events. At one event they are called in this order."""
UNSUPPORTED = {
    "on_push_begin": "Hookline does not push to a hub; hookline.hooks.UploadCheckpoint uploads checkpoints"
}
INSIDE_STEP = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
"""Called inside a step: `state.global_step` and `state.epoch` do not change there until the update is
complete.
"""
REFRESHES = ("on_step_end", "on_train_epoch_end")
"""Further events that update these two for a callback with methods inside a step; others update them before
each call.
"""


class TransformersCallback(AdoptedCallback):
    """Represents one callback. What it sets in `control` is done, unless a later callback resets it."""

    kind = "transformers callback"

    def __init__(self, original: Any) -> None:
        super().__init__(original, ("transformers",), "TrainerCallback")
        refuse_misspelled(
            original, dict.fromkeys(TRANSFORMERS_METHODS, 99)
        )  # arguments beyond three are passed by name
        self.shared: Any = None
        """The run, with what all transformers callbacks have in common (`SharedRun`)."""
        self.given: dict[str, Any] = {}
        self._given: dict[str, dict[str, Any]] = {}
        """The keyword arguments that each method takes."""
        self._accumulate = 1
        self._own = {
            event
            for method, events in TRANSFORMERS_METHODS.items()
            if self.overrides(method)
            for event in events
        }
        """The events at which a method of the callback is called."""
        self._inactive: list[Listener] = []
        """Listeners that are active only after the callback has set a flag, so that others cost nothing."""
        for method, reason in UNSUPPORTED.items():
            if self.overrides(method):
                raise HookError(
                    f"{type(original).__name__} listens to {method}, which Hookline lacks: {reason}."
                )

    # ---- listening -----------------------------------------------------------------------------------------

    def listeners(self, name: str, table: EventTable) -> list[Listener]:
        """Return one listener per event: it updates the shared state, then calls the methods that this
        callback overrides.
        """
        looks_inside = any(self.overrides(method) for method in INSIDE_STEP)
        calls_at: dict[str, list[Caller]] = {
            "on_fit_start": [self._read_run],
            "on_train_start": [self._measure, self._refresh],
            "on_train_epoch_start": [self._new_epoch, self._refresh],
            "on_train_metrics": [self._record_row],
            "on_validation_end": [self._record_evaluation],
            **{event: [self._refresh] for event in REFRESHES if looks_inside},
        }
        for method, events in TRANSFORMERS_METHODS.items():
            if self.overrides(method):
                for event in events:
                    calls_at.setdefault(event, []).append(self._caller(method, event))
        calls_at["on_validation_end"].append(self._update_best)
        calls_at.setdefault("on_train_epoch_end", []).append(
            functools.partial(self._apply_after, "on_train_epoch_end")
        )

        def listener(event: str, *calls: Caller) -> Listener:
            binding = Binding(_in_sequence(calls), ("metrics",) if "metrics" in table[event].facts else ())
            return Listener("H", name, self, table[event], self._origin(event), binding, [])

        ends_epoch = Binding(self._end_epoch, ())
        ends = Listener("H", name, self, table["on_train_batch_start"], self._end_epoch, ends_epoch, [])
        ends.declares_steering = True
        applies = functools.partial(self._apply_after, "on_step_end")
        self._inactive = [ends, listener("on_step_end", applies)]
        return [*(listener(event, *calls) for event, calls in calls_at.items()), *self._inactive]

    def _origin(self, event: str) -> Callable[..., Any]:
        """Return the method that `explain` shows for an event."""
        names = [
            method
            for method, events in TRANSFORMERS_METHODS.items()
            if event in events and self.overrides(method)
        ]
        function: Callable[..., Any] = getattr(self.original, names[0]) if names else self._apply
        return function

    def _caller(self, method: str, event: str) -> Caller:
        function, extra, applies = (
            getattr(self.original, method),
            EXTRA_ARGUMENTS.get((method, event)),
            CONDITIONS.get(method),
        )
        is_between_steps = method not in INSIDE_STEP

        def call(s: Any) -> None:
            if applies is not None and not applies(self, s):
                return
            shared = self.shared
            if is_between_steps:
                shared.refresh(s)
            given = (
                self._given[method]
                if extra is None
                else {**self._given[method], **self._named(method, extra(self, s))}
            )
            control = function(shared.args, shared.state, shared.control, **given)
            if control is None:
                control = shared.control
            else:
                shared.control = control
            if (
                control.should_log
                or control.should_evaluate
                or control.should_save
                or control.should_epoch_stop
                or control.should_training_stop
            ):
                self._handle_control(s, event)

        return call

    def _named(self, method: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that the method accepts."""
        parameters = inspect.signature(getattr(self.original, method)).parameters
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return given
        return {key: value for key, value in given.items() if key in parameters}

    # ---- the flags of control ------------------------------------------------------------------------------

    def _handle_control(self, s: Any, event: str) -> None:
        """Handle a flag in `control`, once no other callback can reset it at this event."""
        shared = self.shared
        if shared.control.should_training_stop:
            shared.record_stop(type(self.original).__name__, s.step)
        if [self, *(each for each in self._callbacks_at(s, event) if event in each._own)][-1] is self:
            shared.request_stop(s)
            (self._apply if event == "on_step_end" else self._activate)(s)

    def _apply_after(self, event: str, s: Any) -> None:
        if self._is_last(s, event):
            self._apply(s)

    def _apply(self, s: Any) -> None:
        """Do what the flags request; deactivate the extra listeners unless the epoch is to end."""
        shared = self.shared
        shared.apply_control(s)
        if shared.control.should_epoch_stop or shared.ends_epoch:
            self._activate(s)
        else:
            for callback in shared.members:
                callback._deactivate(s)

    def _activate(self, s: Any) -> None:
        plan, shared = s.trainer.plan, self.shared
        shared.ends_epoch = shared.ends_epoch or shared.control.should_epoch_stop
        plan.add([each for each in self._inactive if each not in plan])

    def _deactivate(self, s: Any) -> None:
        plan = s.trainer.plan
        plan.remove([each for each in self._inactive if each in plan])

    def _end_epoch(self, s: Any) -> Any:
        """Return END_EPOCH. Several ranks end an epoch together, a batch or two later, once all of them wait
        for signals.
        """
        run = getattr(s.trainer, "_run", None)
        waited_for = run is None or run.boundary.waits_for_signals
        return END_EPOCH if self.shared.ends_epoch and waited_for else None

    def _callbacks_at(self, s: Any, event: str) -> list[Any]:
        """Return the transformers callbacks that listen to this event, in the order of their calls."""
        found = [
            each.owner
            for each in s.trainer.plan.listeners(event)
            if isinstance(each.owner, TransformersCallback)
        ]
        return found or [self]  # it may have removed itself

    def _is_first(self, s: Any, event: str) -> bool:
        return self._callbacks_at(s, event)[0] is self

    def _is_last(self, s: Any, event: str) -> bool:
        return self._callbacks_at(s, event)[-1] is self

    # ---- the run -------------------------------------------------------------------------------------------

    def begin_run(self, state: Any) -> None:
        """Join the state that all transformers callbacks of this run share."""
        others = [
            entry.hook.shared
            for entry in state.hooks.entries()
            if isinstance(entry.hook, TransformersCallback)
        ]
        known = next((each for each in others if each is not None and each.facts is state), None)
        self.shared = known or SharedRun(state, sys.modules[self.base.__module__])
        self.shared.members.append(self)
        self._accumulate = getattr(state.trainer.options, "accumulate_grad_batches", 1)
        self._deactivate(state)
        self._read_run(state)

    def _read_run(self, s: Any) -> None:
        """Read the loaders and the optimizers, which exist from on_fit_start on."""
        trainer, options, shared = s.trainer, s.trainer.options, self.shared
        run = getattr(trainer, "_run", None)
        loaders = {} if run is None else run.data.given
        self.given = {
            "model": s.module,
            "processing_class": None,
            "optimizer": s.optimizers[0] if s.optimizers else None,
            "lr_scheduler": s.schedulers[0] if s.schedulers else None,
            "train_dataloader": loaders.get("train"),
            "eval_dataloader": loaders.get("val"),
        }
        self._given = {method: self._named(method, self.given) for method in TRANSFORMERS_METHODS}
        shared.state.logging_steps = options.log_every_n_steps
        shared.state.num_train_epochs = max(0, options.max_epochs or 0)
        if isinstance(shared.args, ArgsView):
            shared.args.complete(s, bool(trainer.num_batches("val")) or loaders.get("val") is not None)

    def _new_epoch(self, s: Any) -> None:
        self.shared.begin_epoch(s)
        self._measure(s)  # a hand-written loop has its loader only now

    def _measure(self, s: Any) -> None:
        self.shared.measure(s, self._accumulate)

    def _refresh(self, s: Any) -> None:
        self.shared.refresh(s)

    def _record_row(self, s: Any) -> None:
        if s.row_over == "step" and self._is_first(s, "on_train_metrics"):
            self.shared.record_row(s)

    def _record_evaluation(self, s: Any) -> None:
        if not s.sanity_checking and self._is_first(s, "on_validation_end"):
            self.shared.record_evaluation(s)

    def _update_best(self, s: Any) -> None:
        if not s.sanity_checking and self._is_last(s, "on_validation_end"):
            self.shared.update_best(s)

    # ---- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's exported state, and the best metric so far."""
        exported = self.original.state() if hasattr(self.original, "state") else {}
        args = exported.get("args", {})
        kept = {"args": {} if cannot_keep(args) else args, "attributes": exported.get("attributes", {})}
        return {**kept, **(self.shared.state_dict() if self.shared is not None else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state: first what the saved arguments of the constructor make, then the attributes."""
        if args := state.get("args"):
            vars(self.original).update(vars(type(self.original)(**args)))
        for name, value in state.get("attributes", {}).items():
            setattr(self.original, name, value)
        self.shared.load_state_dict(state)


# ---- extra arguments of some methods, and conditions of their calls ----------------------------------------


def _logged(callback: TransformersCallback, s: Any) -> dict[str, Any]:
    return {"logs": callback.shared.logs}


def _tested(callback: TransformersCallback, s: Any) -> dict[str, Any]:
    return {
        "metrics": {
            key.replace("test/", "test_", 1): value
            for key, value in s.metrics.items()
            if key.startswith("test/")
        }
    }


EXTRA_ARGUMENTS: Mapping[tuple[str, str], Callable[[TransformersCallback, Any], dict[str, Any]]] = {
    ("on_log", "on_train_metrics"): _logged,
    ("on_log", "on_validation_end"): _logged,
    ("on_evaluate", "on_validation_end"): lambda callback, s: {"metrics": callback.shared.metrics},
    ("on_predict", "on_test_end"): _tested,
    ("on_predict", "on_predict_end"): lambda callback, s: {"metrics": {}},
}
CONDITIONS: Mapping[str, Callable[[TransformersCallback, Any], bool]] = {
    # a step of theirs is a window of ours
    "on_step_begin": lambda callback, s: (
        s.batch_idx % callback._accumulate == 0 and not callback.shared.ends_epoch
    ),
    "on_substep_end": lambda callback, s: (
        (s.batch_idx + 1) % callback._accumulate != 0 and s.batch_idx + 1 != callback.shared.batches
    ),
    "on_evaluate": lambda callback, s: not s.sanity_checking,
    # a row of an epoch's means is not a log of theirs
    "on_log": lambda callback, s: not s.sanity_checking and (s.row is None or s.row_over == "step"),
    "on_prediction_step": lambda callback, s: not s.sanity_checking,
}


def _in_sequence(calls: Sequence[Caller]) -> Caller:
    """Return one caller for several; the last one's returned value counts."""
    if len(calls) == 1:
        return calls[0]

    def call_all(s: Any) -> Any:
        answer = None
        for call in calls:
            answer = call(s)
        return answer

    return call_all
