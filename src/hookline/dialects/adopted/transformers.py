"""transformers' callbacks among Hookline's hooks, unchanged: EarlyStoppingCallback, PrinterCallback, and people's own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hookline.binding import Binding, Caller
from hookline.dialects.adopted.callback import AdoptedCallback
from hookline.dialects.adopted.transformers_view import ArgsView, eval_name, eval_names, logged_names
from hookline.errors import END_EPOCH, HookError
from hookline.events import EventTable
from hookline.listener import Listener

METHODS: Mapping[str, tuple[str, ...]] = {
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
NOT_HERE = {"on_push_begin": "nothing is pushed to a hub here; hookline.hooks.UploadCheckpoint sends checkpoints anywhere"}
INSIDE = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
"""Called inside a step: `state.global_step` and `state.epoch` stand still there, until the update is complete."""
REFRESHES = ("on_train_start", "on_train_epoch_start", "on_step_end", "on_train_epoch_end")
"""Where they move on for a callback that looks at them inside; others find them up to date whenever they are called."""
SETTLES = ("on_step_end", "on_train_epoch_end")
"""Where what a callback has asked for by `control` is done: a validation may run here."""


class TransformersCallback(AdoptedCallback):
    """Stands for one callback, with `args`, `state` and `control` of its own; what it sets in `control` is done."""

    kind = "transformers callback"

    def __init__(self, original: Any) -> None:
        super().__init__(original, ("transformers",), "TrainerCallback")
        theirs = sys.modules[self.base.__module__]
        self.args: Any = None
        self.state: Any = theirs.TrainerState()
        self.control: Any = theirs.TrainerControl()
        self.given: dict[str, Any] = {}
        self._given: dict[str, dict[str, Any]] = {}
        """What each method takes of it."""
        self._batches: int | None = None
        self._accumulate = 1
        self._ends_epoch = False
        """Whether should_epoch_stop was set when a method had been called: that counts, whatever is set later."""
        self._asleep: list[Listener] = []
        """Called only after the callback has asked for something, so that asking for nothing costs nothing."""
        for method, reason in NOT_HERE.items():
            if self.overrides(method):
                raise HookError(f"{type(original).__name__} listens to {method}, which cannot be honoured: {reason}.")

    # ---- listening --------------------------------------------------------------------------------------------------

    def listeners(self, name: str, table: EventTable) -> list[Listener]:
        """One per event: the methods that the callback overrides, and then what it asks for by `control`."""
        looks_inside = any(self.overrides(method) for method in INSIDE)
        heard: dict[str, list[Caller]] = {event: [self._refresh] for event in REFRESHES if looks_inside}
        heard["on_fit_start"], heard["on_train_start"] = [self._take_in], [self._measure, self._refresh]
        heard["on_train_epoch_start"] = [self._new_epoch, self._refresh]
        facts: dict[str, tuple[str, ...]] = {}
        for method, events in METHODS.items():
            if self.overrides(method):
                for event in events:
                    heard.setdefault(event, []).append(self._caller(method, event))
                    facts[event] = ("metrics",) if "metrics" in table[event].facts else ()
        if self.overrides("on_evaluate"):
            heard["on_validation_end"].append(self._note_best)
        heard.setdefault("on_train_epoch_end", []).append(self._settle)

        def listener(event: str, *calls: Caller) -> Listener:
            return Listener("H", name, self, table[event], self._origin(event), Binding(_one(calls), facts.get(event, ())), [])

        ends = Listener("H", name, self, table["on_train_batch_start"], self._end_epoch, Binding(self._end_epoch, ()), [])
        self._asleep = [ends, listener("on_step_end", self._settle)]
        return [*(listener(event, *calls) for event, calls in heard.items()), *self._asleep]

    def _origin(self, event: str) -> Callable[..., Any]:
        """The method that `explain` shows for an event."""
        names = [method for method, events in METHODS.items() if event in events and self.overrides(method)]
        function: Callable[..., Any] = getattr(self.original, names[0]) if names else self._settle
        return function

    def _caller(self, method: str, event: str) -> Caller:
        function, extra, applies = getattr(self.original, method), EXTRAS.get((method, event)), APPLIES.get(method)
        moves_on, settles = method not in INSIDE, self._settle if event == "on_step_end" else self._wake

        def call(s: Any) -> None:
            if applies is not None and not applies(self, s):
                return
            state, batches = self.state, self._batches
            if moves_on:
                state.global_step = s.step
                state.epoch = s.batches_seen / batches if batches else float(s.epochs_seen)
            given = self._given[method] if extra is None else {**self._given[method], **self._named(method, extra(self, s))}
            control = function(self.args, state, self.control, **given)
            if control is None:
                control = self.control
            else:
                self.control = control
            if control.should_training_stop:
                s.request_stop(f"{type(self.original).__name__} set control.should_training_stop")
            if control.should_log or control.should_evaluate or control.should_save or control.should_epoch_stop:
                settles(s)

        return call

    def _named(self, method: str, given: dict[str, Any]) -> dict[str, Any]:
        """As far as the method takes it."""
        parameters = inspect.signature(getattr(self.original, method)).parameters
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return given
        return {key: value for key, value in given.items() if key in parameters}

    def _wake(self, s: Any) -> None:
        plan, self._ends_epoch = s.trainer.plan, self._ends_epoch or self.control.should_epoch_stop
        plan.add([each for each in self._asleep if each not in plan.listeners(each.event.name)])

    def _sleep(self, s: Any) -> None:
        plan = s.trainer.plan
        plan.remove([each for each in self._asleep if each in plan.listeners(each.event.name)])

    # ---- the run ----------------------------------------------------------------------------------------------------

    def begin_run(self, state: Any) -> None:
        """A run begins: what the callback is shown is of this run."""
        self.args = state.config if hasattr(state.config, "metric_for_best_model") else ArgsView(state)
        self.control.should_training_stop = False
        self.state.is_world_process_zero, self.state.is_local_process_zero = state.rank == 0, state.local_rank == 0
        self._accumulate = getattr(state.trainer.options, "accumulate_grad_batches", 1)
        self._sleep(state)
        self._take_in(state)

    def _take_in(self, s: Any) -> None:
        """The loaders and the optimizers exist from on_fit_start on."""
        trainer, options = s.trainer, s.trainer.options
        loaders = getattr(getattr(trainer, "_run", None), "given_loaders", {})
        self.given = {
            "model": s.module, "processing_class": None, "optimizer": s.optimizers[0] if s.optimizers else None,
            "lr_scheduler": s.schedulers[0] if s.schedulers else None,
            "train_dataloader": loaders.get("train"), "eval_dataloader": loaders.get("val"),
        }  # fmt: skip
        self._given = {method: self._named(method, self.given) for method in METHODS}
        self.state.logging_steps = options.log_every_n_steps
        self.state.num_train_epochs = max(0, options.max_epochs or 0)
        if isinstance(self.args, ArgsView):
            self.args.settle(s, bool(trainer.num_batches("val")) or loaders.get("val") is not None)

    def _new_epoch(self, s: Any) -> None:
        self.control.should_epoch_stop = self._ends_epoch = False
        self._measure(s)  # a loop of one's own has its loader only now

    def _measure(self, s: Any) -> None:
        """How long an epoch is, and the run, as far as anybody can tell."""
        trainer = s.trainer
        self._batches = trainer.num_training_batches
        if trainer.options.max_steps >= 0:
            self.state.max_steps = trainer.options.max_steps
        elif self._batches is not None and self.state.num_train_epochs:
            self.state.max_steps = -(-self._batches // self._accumulate) * self.state.num_train_epochs

    def _refresh(self, s: Any) -> None:
        self.state.global_step = s.step
        self.state.epoch = s.batches_seen / self._batches if self._batches else float(s.epochs_seen)

    def _end_epoch(self, s: Any) -> Any:
        """Several ranks end an epoch together: once all of them wait to hear of it, a batch or two after this was woken."""
        run = getattr(s.trainer, "_run", None)
        waited_for = run is None or run.agreement is None or run.steers_batches
        return END_EPOCH if self._ends_epoch and waited_for else None

    def _settle(self, s: Any) -> None:
        """What the callback has asked for since the last time."""
        control, trainer = self.control, s.trainer
        if control.should_log:
            control.should_log = False
            row, s.log.pending = s.log.pending, {}
            values = {"train/loss": s.mean_of_window(), "lr": s.used_lr, **row}
            writer = trainer if hasattr(type(trainer), "write_row") else trainer._run
            writer.write_row({key: value for key, value in values.items() if value is not None})
        if control.should_evaluate:
            control.should_evaluate = False
            trainer.validate()
        if control.should_save:
            control.should_save = False
            trainer.save_checkpoint()
        (self._wake if control.should_epoch_stop or self._ends_epoch else self._sleep)(s)

    def _note_best(self, s: Any) -> None:
        """After the callback has judged an evaluation by the best one before it, as transformers does it."""
        name, best = self.args.metric_for_best_model, self.state.best_metric
        value = eval_names(s.metrics).get(eval_name(name)) if name and not s.sanity_checking else None
        if value is not None and (best is None or (value > best if self.args.greater_is_better else value < best)):
            self.state.best_metric, self.state.best_global_step = value, s.step

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the callback exports, and the best metric that it goes by."""
        exported = self.original.state()["attributes"] if hasattr(self.original, "state") else {}
        return {"attributes": exported, "best_metric": self.state.best_metric, "log_history": self.state.log_history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        for name, value in state.get("attributes", {}).items():
            setattr(self.original, name, value)
        self.state.best_metric, self.state.log_history = state.get("best_metric"), list(state.get("log_history", []))


# ---- what some methods are given, and when they are not called -------------------------------------------------------


def _row(callback: TransformersCallback, s: Any) -> dict[str, Any]:
    return _noted(callback, logged_names(s.row.read(), callback.state.epoch))


def _evaluated_row(callback: TransformersCallback, s: Any) -> dict[str, Any]:
    return _noted(callback, {**eval_names(s.metrics), "epoch": callback.state.epoch})


def _noted(callback: TransformersCallback, logs: dict[str, Any]) -> dict[str, Any]:
    callback.state.log_history.append({**logs, "step": callback.state.global_step})
    return {"logs": logs}


def _evaluated(callback: TransformersCallback, s: Any) -> dict[str, Any]:
    return {"metrics": eval_names(s.metrics)}


def _tested(callback: TransformersCallback, s: Any) -> dict[str, Any]:
    return {"metrics": {key.replace("test/", "test_", 1): value for key, value in s.metrics.items() if key.startswith("test/")}}


EXTRAS: Mapping[tuple[str, str], Callable[[TransformersCallback, Any], dict[str, Any]]] = {
    ("on_log", "on_train_metrics"): _row,
    ("on_log", "on_validation_end"): _evaluated_row,
    ("on_evaluate", "on_validation_end"): _evaluated,
    ("on_predict", "on_test_end"): _tested,
    ("on_predict", "on_predict_end"): lambda callback, s: {"metrics": {}},
}
APPLIES: Mapping[str, Callable[[TransformersCallback, Any], bool]] = {
    # a step of theirs is a window of ours
    "on_step_begin": lambda callback, s: s.batch_idx % callback._accumulate == 0 and not callback._ends_epoch,
    "on_substep_end": lambda callback, s: (s.batch_idx + 1) % callback._accumulate != 0 and s.batch_idx + 1 != callback._batches,
    "on_evaluate": lambda callback, s: not s.sanity_checking,
    "on_log": lambda callback, s: not s.sanity_checking,
    "on_prediction_step": lambda callback, s: not s.sanity_checking,
}


def _one(calls: Sequence[Caller]) -> Caller:
    """Several calls as one; the last one's answer counts."""
    if len(calls) == 1:
        return calls[0]

    def all_of_them(s: Any) -> Any:
        answer = None
        for call in calls:
            answer = call(s)
        return answer

    return all_of_them
