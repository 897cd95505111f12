"""Lightning's metrics of a run: what `self.log` received, what the trainer shows, and what loggers get.

Its methods are called at moments of Hookline's loop, before all hooks of an event or after them, so that the
trainer's dictionaries change exactly when Lightning's do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hookline.engine.binding import Binding
from hookline.engine.listener import Listener
from hookline.engine.plan import Plan
from hookline.interop.lightning.arguments import NO_ROWS
from hookline.interop.lightning.hparams import initial_hparams, merge_hyperparameters
from hookline.interop.lightning.logged_values import (
    LoggedValues,
    Shown,
    as_logged,
    levels,
    log_dtype,
    number_of,
    print_results,
    warn_once,
)
from hookline.interop.lightning.package import possible, refusal, warn
from hookline.interop.lightning.progress import LoopCounts
from hookline.metrics.metric_log import MetricLog
from hookline.metrics.metric_objects import named_metrics
from hookline.run.state import State
from hookline.run.state_parts import fact


def current_hook(running: Any) -> str:
    """Return the name of the method that is running. running: `State.running`."""
    while running is not None:
        what, running = running
        if isinstance(what, Listener):
            return str(getattr(what.function, "__name__", what.event.name))
    return ""


FAR = 10**9
"""The order of a listener that is called before, or with a minus sign after, all others of an event."""


class LoggerConnector:
    """The metrics of one of Lightning's trainers, over all its runs."""

    is_internal = True

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.values = {
            "fit": LoggedValues(training=True),
            **{name: LoggedValues() for name in ("in fit", "validate", "test")},
        }
        """What was logged in each loop; the validation in a fit is a loop of its own."""
        self.shown = Shown()
        """The newest metrics: `callback_metrics`, `logged_metrics` and `progress_bar_metrics`."""
        self.counts = LoopCounts()
        self.verbose = False
        self.results: list[dict[str, Tensor]] = []
        """The results of the newest evaluation, one dictionary for each loader."""
        self._current_fx: str | None = None
        self._is_first: bool | None = None
        """Whether this is the first batch of an epoch; None between epochs."""
        self._is_first_in_fit: bool | None = None
        self._warned_of_none = False
        self._stepped = False
        """Whether the newest training batch is still to be counted as one that stepped."""
        self._loader = 0
        self._evaluated = 0
        self._batches: dict[str, list[int]] = {}
        """The number of batches of each evaluation pass, by stage."""

    def listen(self, plan: Plan) -> None:
        """Call the methods of this object at their moments."""
        for event, moments in MOMENTS.items():
            for is_last, method in enumerate(moments):
                if method is not None:
                    call = method.__get__(self)
                    made = Listener("H", NAME, self, plan.table[event], call, Binding(call, ()), [])
                    made.order = FAR if is_last else -FAR
                    made.after_module = bool(is_last)
                    plan.add([made])

    # ---- what the trainer shows ----------------------------------------------------------------------------

    @property
    def active(self) -> LoggedValues | None:
        """Return the values of the current loop; None outside of a run and in a prediction."""
        own = self.trainer._own
        if own._run is None:
            return None
        s = own.state
        in_validation = s.stage == "fit" and (s.modes or s.sanity_checking)
        return self.values.get("in fit" if in_validation else s.stage)

    _values: LoggedValues = fact("active", "Return the same, in a loop that logs.")

    @property
    def newest(self) -> Shown:
        """Return the metrics with those of this moment."""
        if self.active:
            self._show(self._current())
        return self.shown

    def _current(self) -> Shown:
        return self._values.shown(on_step=self._is_first is not None)

    def _show(self, current: Shown) -> None:
        self.shown.bar.update(current.bar)
        self.shown.callback.update(current.callback)
        self.shown.log.update(current.log)
        log = self.trainer._own.state.log
        log.newest.raw().update(self.shown.callback)  # for Hookline's own hooks and progress bar
        log.bar.update(current.bar)

    def should_reset_tensors(self, fx: str) -> bool:
        """Return whether a hook logs for the first time in this epoch."""
        return self._current_fx != fx and self._is_first is not False

    @property
    def should_update_logs(self) -> bool:
        """Return whether loggers get the values of this batch."""
        trainer = self.trainer
        every = trainer.log_every_n_steps
        if not every:
            return False
        if trainer._own._run is None:
            return True
        is_training = self.active is not None and self.active.training
        step = self.counts.batches_that_stepped + 1 if is_training else self._evaluated
        return bool(step % every == 0 or trainer.should_stop)

    def log(
        self,
        name: str,
        value: Any,
        *,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        add_dataloader_idx: bool = True,
        sync_dist: bool = False,
        **options: Any,
    ) -> None:
        """Log a value of the hook that is running, for a module or callback of this dialect."""
        trainer = self.trainer
        if trainer.barebones:
            warn_once("self.log() does nothing, because Trainer(barebones=True) is set.")
            return
        fx = current_hook(trainer._own.state.running)
        if self.active is None:
            raise refusal(f"You can't self.log() inside `{fx}`: a prediction logs nothing.", "log", name)
        on_step, on_epoch = levels(fx, on_step, on_epoch)
        if add_dataloader_idx and "/dataloader_idx_" in name:
            raise refusal(
                f"self.log({name!r}): Lightning appends the number of the loader itself: leave it out, or "
                "pass add_dataloader_idx=False.",
                "log",
                name,
            )
        value = as_logged(name, value)
        if isinstance(value, Tensor) and not value.is_floating_point():
            value = value.to(log_dtype())
        if self.should_reset_tensors(fx):
            self.active.reset(metrics=False, fx=fx)
        self.active.log(
            fx,
            name,
            value,
            logger=logger is not False,
            on_step=on_step,
            on_epoch=on_epoch,
            add_dataloader_idx=add_dataloader_idx,
            sync_dist=sync_dist and trainer.world_size > 1,
            sync_dist_fn=trainer.strategy.reduce,
            **options,
        )
        self._current_fx = fx

    def log_now(self, name: str, value: Any, prog_bar: bool) -> None:
        """Show and log a value of a hook of Hookline between batches, where nothing is reduced."""
        tensor = value if isinstance(value, Tensor) else Tensor([value]).squeeze().to(log_dtype())
        self._show(Shown({name: tensor}, {name: tensor}, {name: number_of(tensor)} if prog_bar else {}))
        self.log_metrics({name: tensor})

    def log_metrics(self, metrics: Mapping[str, Tensor], step: int | None = None) -> None:
        """Send a row to the loggers, by default under the current step and with the epoch."""
        trainer = self.trainer
        if not trainer.loggers or not metrics:
            return
        self.shown.log.update(metrics)
        if trainer._own.loggers and not trainer.sanity_checking:
            trainer._own.state.log.pending.update(metrics)  # written with Hookline's next row
        row = {name: number_of(value) for name, value in metrics.items()}
        if step is None and "step" in row:
            step = int(row.pop("step"))
        elif step is None:
            row.setdefault("epoch", trainer.current_epoch)
            step = self.counts.batches_that_stepped
        for logger in trainer.lightning_loggers:
            logger.log_metrics(metrics=row, step=step)
            logger.save()

    # ---- a run ---------------------------------------------------------------------------------------------

    def reset_values(self) -> None:
        """Begin a new epoch of the current loop."""
        if self.active is not None:
            self.active.reset()
        self._is_first = self._current_fx = None

    def forget(self, s: State) -> None:
        """Drop all metrics: when a run begins, and before and after the sanity check."""
        self.reset_values()
        self.shown = Shown()
        if s.stage == "fit":
            self.counts.forget_validation()

    def begin(self, s: State) -> None:
        """Begin a run."""
        self.forget(s)
        self.counts.seen.clear()
        self.results, self._stepped, self._warned_of_none = [], False, False

    def resume(self, logged: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[str]:
        """Continue the values of an epoch that was interrupted; return the names of those that begin anew."""
        if logged:
            self._is_first = False  # the next batch is not the first one of the epoch
        return self.values["fit"].load_state_dict(logged, metrics, self.trainer.strategy.reduce)

    def log_hyperparams(self, s: State) -> None:
        """Log the hyper-parameters of module and data module, and the graph of the module."""
        trainer = self.trainer
        if not trainer.lightning_loggers or not trainer._given["enable_autolog_hparams"]:
            return
        module = s.module
        initial = initial_hparams(module, trainer.datamodule)
        merged = merge_hyperparameters(initial)
        for logger in trainer.lightning_loggers:
            if initial:
                logger.log_hyperparams(merged)
            logger.log_graph(module)
            logger.save()

    def close(self) -> None:
        """Move what is left to the CPU when a run is over."""
        for values in self.values.values():
            values.to_cpu()
        for kept in (self.shown.callback, self.shown.log):
            kept.update({name: each.cpu() for name, each in kept.items() if isinstance(each, Tensor)})

    # ---- training ------------------------------------------------------------------------------------------

    def start_training(self, s: State) -> None:
        """Continue the step number of a resumed run, and warn if no step will be logged."""
        trainer = self.trainer
        self.counts.begin_training(trainer._own._run)
        batches, every = trainer.num_training_batches, trainer.log_every_n_steps
        if trainer.lightning_loggers and batches < every and not trainer.fast_dev_run:
            warn(
                f"The number of training batches ({batches}) is smaller than the logging interval, "
                f"log_every_n_steps={every}: no value of a step is logged. Pass a smaller log_every_n_steps.",
                possible(),
            )

    def start_epoch(self, s: State) -> None:
        """Count the batches of validations anew."""
        self._batches.pop("fit", None)

    def start_batch(self, s: State) -> None:
        """Take a training batch, whose samples weight the values that are logged in it."""
        self._count_step()
        self.counts.in_batch = True
        self._take(s.batch, None)

    def end_batch(self, s: State) -> None:
        """Show the values of a training batch, and send them to the loggers when they are due."""
        self._end_batch()
        self.counts.in_batch = False
        done, length = s.batch_idx + 1, self.trainer._own.num_training_batches
        is_last = length is not None and done >= length
        is_accumulating = done % self.trainer.accumulate_grad_batches != 0 and not is_last
        self._stepped = not is_accumulating
        is_automatic = getattr(s.module, "automatic_optimization", True)
        self._check_output(s, is_automatic)
        if is_accumulating and is_automatic:
            return
        is_due = bool(self.should_update_logs or self.trainer.fast_dev_run)
        if is_due:
            self.log_metrics(self._current().log)
        if not is_automatic:
            self._schedule_row(s, is_due)

    def _schedule_row(self, s: State, is_due: bool) -> None:
        """Let Hookline's own row of a manual batch be written when Lightning's is.

        Lightning counts batches for its rows; `step` counts the updates of all optimizers, and may jump over
        a multiple of the interval.
        """
        run = self.trainer._own._run
        run.step.log_every = 1 if is_due else NO_ROWS
        if is_due and s.step == run.progress.step_before_batch:  # no update, so no on_step_end
            run.rows.write_pending()

    def _check_output(self, s: State, is_automatic: bool) -> None:
        """Warn once of batches that are not trained on, and refuse what Lightning refuses."""
        returned = s.current.returned
        if is_automatic and returned is None and not self._warned_of_none:
            self._warned_of_none = True
            warn("`training_step` returned `None`: the weights are not updated with such a batch.")
        if not is_automatic and not (returned is None or isinstance(returned, Tensor | Mapping)):
            raise refusal(
                "In manual optimization, `training_step` must either return a Tensor or have no return, or "
                f"return a dictionary; it returned a {type(returned).__name__}.",
                "training_step",
                returned,
            )

    def _count_step(self) -> None:
        """Count the newest batch. Lightning does so after the validation that may follow it."""
        if self._stepped:
            self.counts.batches_that_stepped += 1
            self._stepped = False
            for logger in self.trainer.lightning_loggers if self.trainer.should_stop else ():
                logger.save()

    def end_data(self, s: State) -> None:
        """From now on the metrics are those of the training epoch."""
        self._count_step()
        self._is_first = None

    def end_epoch(self, s: State) -> None:
        """Show the metrics of a training epoch and send them to the loggers, under its last step."""
        self._show(self._current())
        self._current_fx = None
        self.counts.batches_that_stepped -= 1
        self.log_metrics(self._current().log)
        self.counts.batches_that_stepped += 1
        self.reset_values()

    # ---- evaluation ----------------------------------------------------------------------------------------

    def start_evaluation(self, s: State) -> None:
        """Begin a validation or a test."""
        if s.stage != "fit":
            self.log_hyperparams(s)
        self._is_first_in_fit = self._is_first
        self._loader = 0
        self.results = []
        self._begin_pass(s)
        if s.stage == "fit":
            self.counts.begin_validation(s.epoch)

    def start_evaluation_batch(self, s: State) -> None:
        """Take a batch; the first one of another loader ends the epoch of the loader before."""
        if s.dataloader_idx != self._loader:
            self._end_loader()
            self._loader = s.dataloader_idx
        self.count_batch(s)
        self.counts.start_validation_batch(s.stage)
        loaders = self.trainer._own._run.data.loaders["test" if s.stage == "test" else "val"]
        self._take(s.batch, s.dataloader_idx if len(loaders) > 1 else None)

    def end_evaluation_batch(self, s: State) -> None:
        """Show the values of an evaluation batch and send them to the loggers."""
        self._end_batch()
        self.counts.end_validation_batch(s.stage)
        if not s.sanity_checking:
            seen = self.counts.seen.get(s.dataloader_idx, 0)
            self.log_metrics(self._current().log, step=seen)
            self.counts.seen[s.dataloader_idx] = seen + 1

    def end_evaluation_data(self, s: State) -> None:
        """From now on the metrics are those of the whole pass."""
        self._end_loader()
        self._values.dataloader_idx = None

    def _end_loader(self) -> None:
        self._is_first = None
        self.results.append(self._show_results())

    def _show_results(self) -> dict[str, Tensor]:
        if self.trainer.sanity_checking:
            return {}
        current = self._current()
        self._show(current)
        return current.log

    def end_evaluation_epoch(self, s: State) -> None:
        """Add what was logged at the end of the pass to the results, and send them to the loggers."""
        self._show(self._current())
        self._current_fx = None
        common = self._show_results()
        row: dict[str, Tensor] = {}
        for metrics in reversed(self.results):
            row |= metrics
        row |= common
        for metrics in self.results:
            metrics.update(common)
        if not s.sanity_checking:
            self.log_metrics(row)

    def end_evaluation(self, s: State) -> None:
        """End the pass, and print its results outside of a fit."""
        self.reset_values()
        if s.stage == "fit":
            self._is_first = self._is_first_in_fit
        elif self.verbose and self.trainer.is_global_zero:
            print_results(self.results, s.stage)

    # ---- predictions ---------------------------------------------------------------------------------------

    def start_prediction(self, s: State) -> None:
        """Begin a prediction."""
        self.log_hyperparams(s)
        self._begin_pass(s)

    def _begin_pass(self, s: State) -> None:
        self._evaluated = 0
        self._batches.setdefault(s.stage, []).append(0)

    def count_batch(self, s: State) -> None:
        """Count a batch of an evaluation or prediction."""
        self._evaluated += 1
        self._batches[s.stage][-1] = self._evaluated

    def batches_before(self, stage: str) -> int:
        """Return the batches of all passes of a stage before the newest; in a fit, those of this epoch."""
        return sum(self._batches.get(stage, [])[:-1])

    # ---- batches -------------------------------------------------------------------------------------------

    def _take(self, batch: Any, loader: int | None) -> None:
        self._is_first = self._is_first is None
        values = self._values
        values.batch, values.batch_size, values.dataloader_idx = batch, None, loader

    def _end_batch(self) -> None:
        self._show(self._current())
        self._values.batch = self._values.batch_size = None


NAME = "lightning_metrics"
"""The name of the listeners in traces and in `explain`."""

_Of = LoggerConnector
MOMENTS: Mapping[str, tuple[Callable[[Any, State], None] | None, Callable[[Any, State], None] | None]] = {
    "setup": (None, _Of.begin),
    "on_fit_start": (None, _Of.log_hyperparams),
    "on_sanity_check_start": (_Of.forget, None),
    "on_sanity_check_end": (None, _Of.forget),
    "on_train_start": (_Of.start_training, None),
    "on_train_epoch_start": (_Of.start_epoch, None),
    "on_train_batch_start": (_Of.start_batch, None),
    "on_train_batch_end": (None, _Of.end_batch),
    "on_train_epoch_end": (_Of.end_data, _Of.end_epoch),
    "on_predict_start": (_Of.start_prediction, None),
    "on_predict_batch_start": (_Of.count_batch, None),
    **{
        f"on_{kind}_{moment}": methods
        for kind in ("validation", "test")
        for moment, methods in {
            "start": (_Of.start_evaluation, None),
            "batch_start": (_Of.start_evaluation_batch, None),
            "batch_end": (None, _Of.end_evaluation_batch),
            "epoch_end": (_Of.end_evaluation_data, _Of.end_evaluation_epoch),
            "end": (None, _Of.end_evaluation),
        }.items()
    },
}
"""For each event, what is called before all hooks, and after all hooks and the module."""


class LightningLog(MetricLog):
    """Hookline's log in a run of Lightning's trainer: what Hookline's modules and hooks log is shown and sent
    to Lightning's loggers, too.
    """

    def __init__(self, connector: LoggerConnector) -> None:
        super().__init__()
        self._connector = connector

    def evaluated_objects(self) -> list[Any]:
        """Return the metric objects of a validation; Lightning resets them after its last hook."""
        return [*super().evaluated_objects(), *self._connector.values["in fit"].metrics()]

    def object_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of metric objects, and what Lightning's `self.log` has received in this epoch."""
        names = {id(each): name for name, each in named_metrics(module).items()}
        return {**super().object_state(module), "lightning": self._connector.values["fit"].state_dict(names)}

    def load_object_state(self, module: nn.Module, state: dict[str, Any]) -> list[str]:
        """Restore the metric objects and Lightning's values; return the names of those that begin anew."""
        return [
            *super().load_object_state(module, state),
            *self._connector.resume(state.get("lightning", {}), named_metrics(module)),
        ]

    def log(
        self,
        name: str,
        value: Any,
        on_step: bool | None,
        on_epoch: bool | None,
        prog_bar: bool,
        reduce: str,
        batch_size: int | None,
        on_cpu: bool = False,
    ) -> None:
        """Log a value in Hookline's log and in Lightning's."""
        super().log(name, value, on_step, on_epoch, prog_bar, reduce, batch_size, on_cpu)
        active, scalar = self._connector.active, self.batch_values.get(name)
        if scalar is None or active is None:
            return
        if self.mode == "now":
            self._connector.log_now(name, scalar, prog_bar)
            return
        is_training = self.mode == "train"
        tensor = scalar if isinstance(scalar, Tensor) else Tensor([scalar]).squeeze()
        active.log(
            f"{self._connector.trainer._own.state.stage}: {self.mode}",
            name,
            tensor,
            prog_bar=prog_bar,
            on_step=is_training if on_step is None else on_step,
            on_epoch=not is_training if on_epoch is None else on_epoch,
            reduce_fx="mean" if reduce == "last" else reduce,
            batch_size=batch_size,
        )
