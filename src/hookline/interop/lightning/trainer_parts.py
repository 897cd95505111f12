"""The parts of Lightning's trainer that callbacks and modules access, read from Hookline's run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributed as dist

from hookline.interop.lightning.closure_step import ClosureStep, step_by_hand
from hookline.interop.lightning.names import log_value
from hookline.interop.lightning.package import installed
from hookline.run.state_parts import fact
from hookline.util.errors import HookError, closest


class NotInView(HookError, AttributeError):
    """A callback has accessed an attribute of Lightning's trainer that Hookline's does not have."""


HIDDEN = (
    "PARTS",
    "STATUS",
    "CLASSES",
    "attach",
    "of_lightning",
    "remove_later",
    "remove_replaced",
    "writes_at_end",
    "writes_files",
    "requested",
    "moment",
    "will_exist",
    "run_loop_again",
    "snapshots",
)
"""Attributes of a view for Hookline's own use."""


def missing(path: str, owner: type) -> NotInView:
    """Return the error for an attribute that is not there."""
    has = sorted(
        {
            *(name for name in dir(owner) if not name.startswith("_") and name not in HIDDEN),
            *(name for name in owner.PARTS if not name.startswith("_")),  # type: ignore[attr-defined]
        }
    )
    asked = path.rpartition(".")[2].partition(" ")[0]
    return NotInView(
        f"{path} is not available to Lightning's hooks in Hookline.{closest(asked, has)} "
        f"There are: {', '.join(has)}."
    )


class Part:
    """A part of the view: it has the attributes declared here, and no others."""

    PARTS: ClassVar[Mapping[str, type[Part]]] = {}

    def __init__(self, view: Any, path: str) -> None:
        """path: leads from the trainer to this part."""
        parts = {name: part(view, f"{path}.{name}") for name, part in self.PARTS.items()}
        self.__dict__.update(parts, _view=view, _path=path)

    _own: Any = fact("_view._own")

    def __getattr__(self, name: str) -> Any:
        raise missing(f"trainer.{self._path}.{name}", type(self))

    def __setattr__(self, name: str, value: Any) -> None:
        setter = getattr(getattr(type(self), name, None), "fset", None)
        if setter is None:
            raise missing(f"trainer.{self._path}.{name} = ...", type(self))
        setter(self, value)


class ShownAs(Part):
    """A part that `isinstance` takes for the object of Lightning that it stands for."""

    _shown_as: Any = ("", "")
    """The module and the name of Lightning's class."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore # what isinstance looks at
        found = self._view.of_lightning(*self._shown_as)
        return type(self) if found is None else found


class RunState(Part):
    """`trainer.state`: the stage, and the status of the run."""

    STATUS: ClassVar[Mapping[str, str]] = {
        "created": "initializing",
        "training": "running",
        "running": "running",
        "error": "interrupted",
        "interrupted": "interrupted",
        "preempted": "interrupted",
    }
    """Hookline's and Lightning's words for the status of a run; any other status is 'finished'."""

    def __getattr__(self, name: str) -> Any:
        """Return what Hookline's own state has besides."""
        if name.startswith("_") or not hasattr(self._own.state, name):
            return super().__getattr__(name)
        return getattr(self._own.state, name)

    @property
    def status(self) -> Any:
        """Return running, finished or interrupted, in Lightning's enumeration."""
        in_run = self._own.state.exception is None and self._own._run is not None
        word = "running" if in_run else self.STATUS.get(self._own.status, "finished")
        return self._view.of_lightning("trainer.states", "TrainerStatus")(word)

    @property
    def finished(self) -> bool:
        """Return whether the run has ended without a failure or interruption."""
        return bool(self.status == "finished")

    @property
    def stopped(self) -> bool:
        """Return whether the run is over."""
        return self.status in ("finished", "interrupted")

    @property
    def fn(self) -> Any:
        """Return the stage, in Lightning's enumeration; None before the first."""
        stage = self._own.state.stage
        return self._view.of_lightning("trainer.states", "TrainerFn")(stage) if stage else None

    @fn.setter
    def fn(self, stage: Any) -> None:
        if self._own._run is not None:
            raise missing("trainer.state.fn = ... inside a run", type(self))
        self._own.state.setup.stage = str(getattr(stage, "value", stage) or "")

    def __eq__(self, other: object) -> bool:
        """Compare with Lightning's own state."""
        names = ("status", "fn", "stage")
        return all(getattr(other, name, self) == getattr(self, name) for name in names)

    __hash__ = Part.__hash__

    def __repr__(self) -> str:
        return f"TrainerState(status={self.status!r}, fn={self.fn!r}, stage={self.stage!r})"

    @property
    def stage(self) -> Any:
        """Return training, validating, ... in Lightning's enumeration; None outside of a run."""
        view = self._view
        if self._own._run is None:
            return None
        word = (
            "sanity_check"
            if view.sanity_checking
            else "train"
            if view.training
            else "validate"
            if view.validating
            else None
        )
        return view.of_lightning("trainer.states", "RunningStage")(word or self._own.state.stage)


class StrategyView(ShownAs):
    """`trainer.strategy`: the device, and communication between processes."""

    CLASSES: ClassVar[Mapping[str, str]] = {"DDP": "DDPStrategy", "FSDP": "FSDPStrategy"}

    @property
    def _shown_as(self) -> tuple[str, str]:
        return "strategies", self.CLASSES.get(type(self._own.strategy).__name__, "SingleDeviceStrategy")

    zero_stage_3: ClassVar[bool] = False
    """An attribute of DeepSpeed's strategy, which the model summary reads."""

    root_device: torch.device = fact("_own.device", "Return the device of the module.")

    lightning_module: Any = fact("_own.state.module", "Return the user's module.")

    model: Any = fact("_own.state.wrapped_model", "Return the module or its wrapper.")

    @property
    def optimizers(self) -> list[Any]:
        """Return the optimizers of the run."""
        return self._own.optimizers  # type: ignore[no-any-return]

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        self._own.state.setup.optimizers = optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """Return the schedulers with `scheduler`, `interval`, `frequency`, `monitor`, `name`."""
        return self._view.lr_scheduler_configs  # type: ignore[no-any-return]

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[Any]) -> None:
        self._view.lr_scheduler_configs[:] = configs

    is_global_zero: bool = fact("_view.is_global_zero", "Return whether this is the process that writes.")

    @property
    def _ranks(self) -> Any:
        """Return the communication between ranks; a `hookline.Line` has no strategy."""
        own = self._own
        return own.ranks if hasattr(own, "ranks") else own.strategy.ranks

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the plain value of one rank, on every rank."""
        ranks = self._ranks
        return obj if ranks.alone else ranks.gather(obj)[src]

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self._ranks.barrier()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return the common decision of the ranks."""
        ranks = self._ranks
        if ranks.alone:
            return bool(decision)
        votes = ranks.total([bool(decision)]).read()[0]
        return bool(votes == ranks.world_size if all else votes > 0)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a value reduced over all ranks."""
        return self._own.strategy.reduce(tensor, str(reduce_op).lower())

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return every rank's tensor, stacked; with one rank the tensor itself."""
        if self._own.strategy.ranks.alone:
            return tensor
        gathered = [torch.empty_like(tensor) for _ in range(self._own.strategy.world_size)]
        dist.all_gather(gathered, tensor.detach().contiguous(), group=group)
        return torch.stack(gathered)

    @property
    def checkpoint_io(self) -> Any:
        """Return the object that writes and reads checkpoints: the user's plugin, or Lightning's own."""
        plugin = self._view._checkpoint_io
        return self._view.of_lightning("plugins", "TorchCheckpointIO")() if plugin is None else plugin

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        self._view.__dict__["_checkpoint_io"] = plugin

    remove_checkpoint: Any = fact(
        "_view.remove_later", "Delete a checkpoint, once its replacement is written."
    )

    # ---- manual optimization, for modules ------------------------------------------------------------------

    @property
    def _lightning_optimizers(self) -> list[Any]:
        wrapper = self._view.of_lightning("core.optimizer", "LightningOptimizer")
        return [wrapper._to_lightning_optimizer(each, self) for each in self._own.optimizers]

    def backward(self, closure_loss: Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """Differentiate, with the events around it."""
        self._own._last.manual.backward(closure_loss, **kwargs)
        return closure_loss

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Update the weights, with the events around it; return what the optimizer returns."""
        run = self._own._last
        if not run.traits.is_manual:
            if isinstance(run.step, ClosureStep):
                return run.step.call_optimizer(optimizer, closure, kwargs)
            return optimizer.step(closure=closure, **kwargs)  # training_step and backward have run
        if hasattr(self._own, "lightning_trainer") or kwargs:
            return step_by_hand(run, optimizer, closure, kwargs)
        handle = next(each for each in run.manual.optimizers if each.optimizer is optimizer)
        is_none = getattr(closure, "__name__", "") == "do_nothing_closure"  # Lightning's name for no closure
        return handle.step(None if is_none else closure)


class PrecisionView(ShownAs):
    """`trainer.precision_plugin`: clipping by hand, and the context of a forward."""

    @property
    def _shown_as(self) -> tuple[str, str]:
        named = {"64-true": "DoublePrecision", "bf16-true": "HalfPrecision", "16-true": "HalfPrecision"}
        mixed = "MixedPrecision" if self.precision.endswith("mixed") else "Precision"
        return "plugins", named.get(self.precision, mixed)

    def __getattr__(self, name: str) -> Any:
        """Return what Lightning's own plugin has besides, such as `convert_module`."""
        kind = installed(*self._shown_as) if self.precision.endswith("-true") else None
        if name.startswith("_") or kind is None:
            return super().__getattr__(name)
        return getattr(kind(self.precision) if kind.__name__ == "HalfPrecision" else kind(), name)

    precision: str = fact("_view.precision", "Return the precision under Lightning's name.")

    forward_context: Any = fact(
        "_own.strategy.precision.forward_context",
        "Return the context in which a forward uses the run's precision.",
    )
    module_init_context: Any = fact(
        "_own.strategy.precision.creation_context",
        "Return the context in which the parameters of a module are made in the run's precision.",
    )

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Clip by total norm or by value; scaled gradients are unscaled first."""
        run = self._own._last
        if run.traits.is_manual:
            run.manual.unscale(getattr(optimizer, "_optimizer", optimizer))
        algorithm = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
        run.steps.clip_gradients(optimizer, clip_val or None, algorithm)


class Connector(Part):
    """`trainer._logger_connector`: whether this step's metrics are written."""

    @property
    def should_update_logs(self) -> bool:
        """Return whether the current update is one of every `log_every_n_steps`."""
        own = self._own
        return bool((own.global_step + 1) % own.options.log_every_n_steps == 0 or own.should_stop)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write a row of numbers to every logger at once."""
        values = {name: float(value) for name, value in metrics.items()}
        for logger in self._view.loggers:
            logger.log_metrics(values, self._own.global_step if step is None else step)

    def should_reset_tensors(self, fx: str) -> bool:
        """Return False: Hookline's log resets itself before each pass."""
        return False

    _current_fx: Any = property(lambda connector: None, lambda connector, hook: None)
    """Lightning's log stores the last hook here, which has no effect."""


class DataConnector(Part):
    """`trainer._data_connector`: moves a batch, for a Lightning module that does so itself (its summary
    does).
    """

    @property
    def _datahook_selector(self) -> Any:
        data = self._view.datamodule
        base = self._view.of_lightning("core.datamodule", "LightningDataModule")
        selector = self._view.of_lightning("trainer.connectors.data_connector", "_DataHookSelector")
        return selector(self._own.state.module, data if isinstance(data, base) else None)


class Distributed(Part):
    """`trainer._accelerator_connector`."""

    @property
    def is_distributed(self) -> bool:
        """Return whether there are several processes."""
        return bool(self._own.strategy.world_size > 1)


class Results(Part):
    """`trainer._results`: the target of a Lightning module's `self.log`."""

    def log(
        self,
        fx: str,
        name: str,
        value: Any,
        *,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool = False,
        on_epoch: bool = True,
        reduce_fx: Any = "mean",
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        **others: Any,
    ) -> None:
        """Log one value. Hookline detaches it and reduces it over ranks."""
        run = self._own._last
        if (
            fx == "training_step" and run.state.log.mode == "eval"
        ):  # a hook of Hookline logs in a validation: use the mean
            on_step, on_epoch = on_step and on_epoch, True
        log_value(
            run,
            name,
            value,
            prog_bar=prog_bar,
            logger=logger,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=reduce_fx,
            add_dataloader_idx=add_dataloader_idx,
            batch_size=batch_size,
        )

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: Hookline's log resets itself before each pass."""
