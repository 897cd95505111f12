"""The run that all transformers callbacks share: one `args`, one `state`, one `control`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.util.errors import HookError, closest

# ---- What transformers' callbacks see of a Hookline run


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
        self.learning_rate: float | None = None

    def complete(self, state: Any, validates: bool) -> None:
        """Set what is known once the run is set up."""
        self.eval_strategy = "epoch" if validates else "no"
        self.learning_rate, self.device = state.lr, state.device
        self.output_dir = str(state.trainer.run_dir)

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
            write = trainer.write_row if hasattr(type(trainer), "write_row") else trainer._run.rows.write
            write({key: value for key, value in values.items() if value is not None})
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
