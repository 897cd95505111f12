"""`LightningModule`, `LightningDataModule` and `Callback`: Hookline's own under Lightning's names and
arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from torch.nn import Parameter

from hookline.engine.foreign import RunAware
from hookline.interop.adapter import DialectHook, Row, adapt_methods
from hookline.interop.lightning.hparams import HyperParameters, module_hooks, wrap_configure_callbacks
from hookline.interop.lightning.loaders import wrap_train_dataloader
from hookline.interop.lightning.names import Reduction, epoch_of, log_as_lightning, log_value
from hookline.interop.lightning.table import CALLBACK_ROWS, DATA_ROWS, MODULE_ROWS, refuse_lightning_1
from hookline.run.module import DataModule, Module
from hookline.util.errors import HookError
from hookline.util.uncopied import Uncopied

NAMED_TRAINER = "hookline.interop.lightning.trainer:NamedTrainer"
"""The trainer class that has all names that these classes use; the command line creates it."""
OF_2019: Mapping[str, Row] = {
    "on_batch_start": Row("on_train_batch_start", ("batch",)),
    "on_tng_metrics": Row("on_train_metrics", ("metrics",)),
}
"""Hooks of the first Lightning that take an argument; their names are other spellings of events."""


class LightningModule(HyperParameters, Module):
    """A module written for Lightning. Its hooks get Lightning's arguments by position, or facts by name."""

    __hookline_base__: ClassVar[bool] = True
    __hookline_trainer__: ClassVar[str] = NAMED_TRAINER
    steers: ClassVar[tuple[str, ...]] = ("on_train_batch_start",)
    """Lightning ends an epoch if this method of a module returns -1."""
    _toggled: Mapping[Parameter, bool] = MappingProxyType({})
    """Whether parameters required gradients before an optimizer was toggled."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        adapt_methods(cls, {**MODULE_ROWS, **OF_2019})
        wrap_train_dataloader(cls)
        wrap_configure_callbacks(cls)

    def _attach(self, run: Any) -> None:
        if run is not None:
            refuse_lightning_1(self)
        super()._attach(run)

    def configure_hooks(self) -> Any:
        """Return the callbacks of `configure_callbacks`, and a hook for the hyper-parameters if there are
        any.
        """
        return module_hooks(self._run, self, None)

    def log(  # type: ignore[override]
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Reduction = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a number. Hookline reduces over ranks where decisions need it, so `sync_dist` has no effect."""
        log_value(
            self._run,
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

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only the parameters of this optimizer require gradients, until `untoggle_optimizer`."""
        mine = {each for group in optimizer.param_groups for each in group["params"]}
        every = [
            each
            for known in self._run.state.optimizers
            for group in known.param_groups
            for each in group["params"]
        ]
        self._toggled = {
            **{each: each.requires_grad for each in every},
            **self._toggled,
        }  # as they were before the first toggle
        for each, has_gradient in self._toggled.items():
            each.requires_grad_(has_gradient and each in mine)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Let all parameters require gradients again that did before."""
        for each, has_gradient in self._toggled.items():
            each.requires_grad_(has_gradient)
        self._toggled = {}

    @contextlib.contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Toggle the optimizer inside a `with` block."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print, on rank zero only."""
        if self._run.state.rank == 0:
            print(*args, **kwargs)

    @property
    def current_epoch(self) -> int:
        """Return the current epoch, from 0; after the training, the number of epochs."""
        return epoch_of(self._run.state)

    @property
    def global_rank(self) -> int:
        """Return this process's rank."""
        return int(self._run.state.rank)

    @property
    def local_rank(self) -> int:
        """Return this process's rank on its machine."""
        return int(self._run.state.local_rank)


class LightningDataModule(HyperParameters, DataModule):
    """The data of a run, as Lightning has it."""

    __hookline_base__: ClassVar[bool] = True
    trainer: Any = None
    """The trainer that runs it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        adapt_methods(cls, DATA_ROWS)
        wrap_train_dataloader(cls)


class Callback(RunAware, DialectHook):
    """A hook whose methods begin with `trainer, pl_module`. Returned values steer as the lifecycle says.

    Request further facts of Hookline by naming them: `def on_train_batch_end(self, trainer, pl_module,
    outputs, grad_norm)`.
    """

    __hookline_base__: ClassVar[bool] = True
    __hookline_rows__ = CALLBACK_ROWS
    __hookline_trainer__: ClassVar[str] = NAMED_TRAINER

    def begin_run(self, state: Any) -> None:
        """Store the trainer of the run, for `log`."""
        self.__dict__["_trainer_ref"] = Uncopied(state.trainer)

    @property
    def state_key(self) -> str:
        """Return the key under which Lightning stores its state; Hookline uses its `name`."""
        return type(self).__qualname__

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a number, with the arguments of the module's `log`."""
        reference: Uncopied | None = self.__dict__.get("_trainer_ref")
        run = getattr(reference.value, "_run", None) if reference is not None else None
        if run is None:
            raise HookError(
                f"{type(self).__name__}.log({name!r}, ...) works only while a trainer runs the callback."
            )
        log_as_lightning(run, name, value, args, options)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Log several numbers."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)


__all__ = ["Callback", "LightningDataModule", "LightningModule"]
