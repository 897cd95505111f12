"""What transformers' callbacks see of a Hookline run: `args`, and metrics under the names they look for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.errors import HookError, closest


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

    def settle(self, state: Any, validates: bool) -> None:
        """What is known once the run is set up."""
        self.eval_strategy = "epoch" if validates else "no"
        self.learning_rate, self.device = state.lr, state.device
        self.output_dir = str(state.trainer.run_dir)

    def __getattr__(self, name: str) -> Any:
        """Only reached for what is not there."""
        if name.startswith("__"):
            raise AttributeError(name)
        known = [each for each in vars(self) if not each.startswith("_")]
        raise HookError(
            f"A transformers callback asks for args.{name}, which no Hookline run has.{closest(name, known)} "
            f"There are: {', '.join(known)}. For others pass Trainer(config=TrainingArguments(...))."
        )


def eval_name(name: str) -> str:
    """`val/loss` -> `eval_loss`."""
    return "eval_" + name.removeprefix("val/").removeprefix("val_").removeprefix("eval_")


def eval_names(metrics: Mapping[str, float], watched: str = "") -> dict[str, float]:
    """The metrics of a validation under transformers' names; `watched`: one that is of it, whatever it is
    called.
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
    """A row of training metrics under transformers' names."""
    names = {"train/loss": "loss", "lr": "learning_rate"}
    return {**{names.get(key, key): value for key, value in row.items()}, "epoch": epoch}
