"""`GenericTrainer`: Hookline's trainer under the names of the Model Training Framework."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from hookline.checkpoint.catalog import find_checkpoints
from hookline.data.mixing import Mixture
from hookline.engine.checks import refused
from hookline.engine.hook import Hook
from hookline.engine.plan import noop
from hookline.interop.model_training_framework.hooks import HookManager
from hookline.interop.model_training_framework.loaders import (
    LoaderManager,
    aggregation_of,
    configured_mixture,
    loaders_by_name,
)
from hookline.interop.model_training_framework.settings import (
    MultiDataLoaderConfig,
    PreemptionConfig,
    complete_config,
    hooks_of,
    trainer_options,
)
from hookline.metrics.metric_log import Metrics
from hookline.run.module import Module, PlainSteps
from hookline.run.option_tables import OLD_SAVING
from hookline.run.record import read_record
from hookline.run.state_parts import fact
from hookline.training.trainer import Trainer
from hookline.util.errors import CheckpointError, OptionError

# ---- The step functions of a `GenericTrainer` as the steps of a run


FORM = "(trainer, batch, batch_idx, dataloader_idx, dataloader_name)"
StepFunction = Callable[[Any, Any, int, int, str], Any]


def check_step(what: str, function: Any) -> None:
    """Reject a function that cannot be called with the five arguments, before the first batch."""
    if not callable(function):
        raise OptionError(f"{what}() takes a function {FORM}, not {type(function).__name__}.")
    try:
        inspect.signature(function).bind(None, None, 0, 0, "")
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise OptionError(f"{what}({name}): it is called with {FORM}, which does not fit: {error}.") from None
    except ValueError:  # its signature is not known
        return


class StepFunctions(PlainSteps):
    """Calls the step functions with the trainer and the origin of the batch; fires the forward events if a
    hook listens.
    """

    __hookline_base__: ClassVar[bool] = True

    def __init__(
        self,
        trainer: Any,
        net: nn.Module,
        train: StepFunction | None,
        validate: StepFunction | None,
        optimizers: Any,
    ) -> None:
        super().__init__(net, None, None, optimizers)
        self.trainer, self.train, self.validate = trainer, train, validate

    def training_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0, dataloader_name: str = ""
    ) -> Any:
        """Call the function of `set_training_step`."""
        return self._call(self.train, batch, batch_idx, dataloader_idx, dataloader_name)

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0, dataloader_name: str = ""
    ) -> Any:
        """Call the function of `set_validation_step`."""
        return self._call(self.validate, batch, batch_idx, dataloader_idx, dataloader_name)

    def _call(
        self, function: Any, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_name: str
    ) -> Any:
        trainer = self.trainer
        plan = trainer.plan
        if plan.on_before_forward is noop and plan.on_after_forward is noop:
            return function(trainer, batch, batch_idx, dataloader_idx, dataloader_name)
        trainer.emit("on_before_forward")
        began = time.perf_counter()
        returned = function(trainer, batch, batch_idx, dataloader_idx, dataloader_name)
        trainer.emit("on_after_forward", duration_ms=1e3 * (time.perf_counter() - began))
        return returned


log = logging.getLogger("hookline")


class GenericTrainer(Trainer):
    """Trains a model with step functions, hooks and a configuration as the Model Training Framework has them.

    >>> trainer = GenericTrainer(config, model, [optimizer])
    >>> trainer.set_training_step(training_step)
    >>> trainer.fit(train_loaders=[loader], val_loaders=[val_loader], max_epochs=10)
    """

    def __init__(
        self,
        config: Any,
        model: nn.Module,
        optimizers: Any,
        schedulers: Any = None,
        fabric: None = None,
        **options: Any,
    ) -> None:
        """config: a GenericTrainerConfig, or a HooksConfig alone. model: a plain nn.Module. optimizers,
        schedulers: one, or a list of them. fabric: refused: pass `strategy` instead. options: of
        `hookline.Trainer`; they override the config's.
        """
        config = complete_config(config)
        if not isinstance(model, nn.Module) or isinstance(model, Module):
            raise OptionError(
                f"GenericTrainer takes a plain nn.Module and step functions, not {type(model).__name__}; "
                "a hookline.Module is trained by hookline.Trainer."
            )
        if fabric is not None:
            raise OptionError(
                "fabric: Hookline runs on torch.distributed itself. Leave it out and pass strategy= instead."
            )
        self._optimizers = _several(optimizers, "optimizers")
        for optimizer in self._optimizers:
            if not isinstance(optimizer, Optimizer):
                raise OptionError(
                    f"optimizers: {type(optimizer).__name__} is not a torch.optim.Optimizer; pass a list of "
                    "them."
                )
        self._schedulers = [] if schedulers is None else _several(schedulers, "schedulers")
        more = options.pop("hooks", ())
        settings = trainer_options(config)
        if options.keys() & OLD_SAVING:
            del settings["checkpoint"]
        super().__init__(config=config, **{**settings, **options})
        self.state.fill(module=model, optimizers=list(self._optimizers))
        self._net = model
        self._train_step: StepFunction | None = None
        self._validation_step: StepFunction | None = None
        self.best_accuracy = 0.0
        """For hooks to compare with and to set; saved in checkpoints."""
        self.hook_manager = HookManager(self.hooks, config.hooks.on_error)
        self.multi_loader_manager = LoaderManager(self)
        for hook in [*more, *hooks_of(config), BestAccuracy(self)]:
            self.hooks.add(hook)

    multi_loader_config: MultiDataLoaderConfig = fact(
        "config.train_loader_config",
        "Return how the training loaders are mixed; `multi_loader_manager.rebuild_schedule()` applies "
        "changes.",
    )

    def set_training_step(self, function: StepFunction) -> None:
        """Set `function(trainer, batch, batch_idx, dataloader_idx, dataloader_name)`, which returns {'loss':
        ...} or the loss.
        """
        check_step("set_training_step", function)
        self._train_step = function

    def set_validation_step(self, function: StepFunction) -> None:
        """Set the same for validation batches; returned values become `val/loss` and so on."""
        check_step("set_validation_step", function)
        self._validation_step = function

    def fit(  # type: ignore[override]
        self,
        train_loaders: Any,
        val_loaders: Any = None,
        max_epochs: int = 1,
        resume_from_checkpoint: str | Path | None = None,
    ) -> Metrics:
        """Train. Loaders: a list, a dictionary of names, or one.

        resume_from_checkpoint: a checkpoint's path, 'latest' or 'best'. None: a new run, unless the
        configuration says `resume_from_latest_symlink=True` or SLURM has restarted the job: then from the
        newest checkpoint of this experiment.
        """
        config = self.config
        train = loaders_by_name(train_loaders, config.train_loader_config.dataloader_names, "train_loaders")
        val = (
            None
            if val_loaders is None
            else loaders_by_name(val_loaders, config.val_loader_config.dataloader_names, "val_loaders")
        )
        if self._train_step is None:
            raise OptionError("fit() needs a step: call trainer.set_training_step(function) before.")
        if val is not None and self._validation_step is None:
            raise OptionError(
                "fit() got val_loaders, but no step for them: call trainer.set_validation_step(function) "
                "before."
            )
        if not isinstance(max_epochs, int) or isinstance(max_epochs, bool) or max_epochs < 1:
            raise refused("max_epochs", max_epochs, "a whole number from 1")
        if not config.dry_run:
            self.options.max_epochs = max_epochs
        if val is not None:
            self.options.evaluation = {
                **(self.options.evaluation or {}),
                "aggregation": aggregation_of(config.validation, list(val)),
            }
        weights, trained = config.loss_weights_per_loader, config.per_loader_optimizer_id
        mixture = configured_mixture(config.train_loader_config, list(train), weights, trained)
        given = mixture if len(train) > 1 or mixture != Mixture() else None
        start = "auto" if resume_from_checkpoint == "latest" else resume_from_checkpoint
        is_automatic = (
            start is None
            and _resumes_automatically(config.preemption)
            and self._directory.existing() is not None
        )
        if start is None and not is_automatic:
            self._report_earlier_run()
        try:
            return super().fit(self._net, train, val, mixture=given, resume="auto" if is_automatic else start)
        except CheckpointError as error:
            if is_automatic:
                error.add_note(
                    f"the run continued automatically from {self.run_dir}; to start a new run, give it "
                    "another experiment_name, or PreemptionConfig(resume_from_latest_symlink=False)"
                )
            raise

    def _report_earlier_run(self) -> None:
        """Log that a new run starts in the directory of another one: most experiments keep the default
        name.
        """
        known = self._directory.existing()
        record = read_record(known) if known is not None and self.strategy.rank == 0 else {}
        if record and known is not None and find_checkpoints(known)[0]:
            words = {"training": "has not ended", "error": f"failed at step {record['step']}"}
            ended = words.get(record["status"], f"was {record['status']} at step {record['step']}")
            log.warning(
                "A new run starts in %s, where an earlier one %s. To continue that one: "
                'fit(..., resume_from_checkpoint="latest"). To keep both, give this one another '
                "experiment_name.",
                known,
                ended,
            )

    def _plain_steps(self, module: nn.Module, loss: Any, step: Any, optimizer: Any) -> StepFunctions:
        """Return the step functions as the steps of a run."""
        optimizers: Any = (self._optimizers, self._schedulers) if self._schedulers else self._optimizers
        return StepFunctions(self, module, self._train_step, self._validation_step, optimizers)


class BestAccuracy(Hook):
    """Keeps `trainer.best_accuracy`, which hooks compare with, across a resume."""

    tier = "builtin"

    def __init__(self, trainer: GenericTrainer) -> None:
        super().__init__("best_accuracy")
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the current value."""
        return {"best_accuracy": float(self._trainer.best_accuracy)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the value."""
        self._trainer.best_accuracy = state["best_accuracy"]


def _resumes_automatically(config: PreemptionConfig) -> bool:
    """Return whether a fit without a given checkpoint continues the experiment's newest run."""
    if config.resume_from_latest_symlink is not None:
        return config.resume_from_latest_symlink
    return config.requeue_job and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def _several(given: Any, what: str) -> list[Any]:
    if isinstance(given, Mapping | str):
        raise OptionError(f"{what} must be a list, not {type(given).__name__}.")
    return list(given) if isinstance(given, list | tuple) else [given]
