"""`LightningModule`, `LightningDataModule` and `Callback`: Hookline's own under Lightning's names and
arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from os import PathLike
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch.nn import Parameter
from torch.utils.data import DataLoader, IterableDataset

from hookline.checkpoint.weights import read_checkpoint
from hookline.engine.foreign import RunAware
from hookline.engine.hook import Hook
from hookline.engine.listener import overrides
from hookline.interop.adapter import FactConverter, Row
from hookline.interop.lightning.binder import DIVIDED, divided_in_dialect
from hookline.interop.lightning.checkpoint_file import WRAPPED
from hookline.interop.lightning.checkpoints import refuse_start
from hookline.interop.lightning.hparams import (
    DATA_HPARAMS,
    HyperParameters,
    hparams_of_file,
    module_hooks,
    wrap_configure_callbacks,
)
from hookline.interop.lightning.loaders import one_of, wrap_loaders, wrap_steps
from hookline.interop.lightning.module_methods import ModuleTools
from hookline.interop.lightning.names import Reduction, epoch_of, first_of, log_as_lightning, log_value
from hookline.interop.lightning.rules import clears_before_eval
from hookline.interop.lightning.table import CALLBACK_ROWS, DATA_ROWS, MODULE_ROWS, refuse_lightning_1
from hookline.run.module import DataModule
from hookline.run.state_parts import fact
from hookline.util.errors import HookError
from hookline.util.uncopied import Uncopied

NAMED_TRAINER = "hookline.interop.lightning.loop_trainer:NamedTrainer"
"""The trainer class that has all names that these classes use; the command line creates it."""
OF_2019: Mapping[str, Row] = {
    "on_batch_start": Row("on_train_batch_start", ("batch",)),
    "on_tng_metrics": Row("on_train_metrics", ("metrics",)),
}
"""Hooks of the first Lightning that take an argument; their names are other spellings of events."""


def _with_divided_losses(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Return the rows, with the losses that Lightning divides by the batches of an accumulation window."""
    made = dict(rows)
    for method, name in DIVIDED:
        read = made[method].reads.get(name, lambda value: value)

        def convert(value: Any, state: Any, read: FactConverter = read) -> Any:
            return divided_in_dialect(read(value), state)

        convert.takes_state = True  # type: ignore[attr-defined]
        made[method] = dataclasses.replace(made[method], reads={**made[method].reads, name: convert})
    return made


def _number(name: str, doc: str) -> Any:
    """Return a property that is a fact of a module's newest run, or 0 before the first."""
    return property(lambda module: getattr(module._state, name, 0), doc=doc)


class LightningModule(HyperParameters, ModuleTools):
    """A module written for Lightning. Its hooks get Lightning's arguments by position, or facts by name."""

    __hookline_base__: ClassVar[bool] = True
    __hookline_rows__: ClassVar[Mapping[str, Row]] = {**_with_divided_losses(MODULE_ROWS), **OF_2019}
    __hookline_trainer__: ClassVar[str] = NAMED_TRAINER
    steers: ClassVar[tuple[str, ...]] = ("on_train_batch_start",)
    """Lightning ends an epoch if this method of a module returns -1."""
    _toggled: Mapping[Parameter, bool] = MappingProxyType({})
    """Whether parameters required gradients before an optimizer was toggled."""
    _trainer_ref = _state_ref = Uncopied()
    """The trainer and the state of the newest run; empty before the first."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        wrap_loaders(cls)
        wrap_configure_callbacks(cls)
        wrap_steps(cls)
        _wrap_zero_grad(cls)

    def _attach(self, run: Any) -> None:
        if run is not None:
            refuse_lightning_1(self)
            self.__dict__["_trainer_ref"] = Uncopied(run.state.shown_trainer)
            self.__dict__["_state_ref"] = Uncopied(run.state)
            run.data.given |= {kind: one_of(each, kind) for kind, each in run.data.given.items()}
            if run.stage == "fit" and not overrides(self, "validation_step"):
                run.data.loaders["val"] = []  # as Lightning, which then ignores validation loaders
            refuse_start(run)
        super()._attach(run)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | os.PathLike[str],
        map_location: Any = None,
        hparams_file: str | os.PathLike[str] | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **arguments: Any,
    ) -> Self:
        """Make a module from a checkpoint: its hyper-parameters, or the given ones, and its weights.

        hparams_file: a .yaml or .csv file whose hyper-parameters replace the saved ones. map_location: the
        device to move the module to. weights_only: no file is unpickled in any case.
        """
        saved = {} if hparams_file is None else hparams_of_file(hparams_file)
        module = super().load_from_checkpoint(checkpoint_path, strict is not False, **{**saved, **arguments})
        return module if map_location is None or callable(map_location) else module.to(map_location)

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
        """Log a number, with Lightning's arguments.

        In `hookline.Trainer`, `sync_dist` has no effect: it reduces over ranks where decisions need it.
        """
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
            enable_graph=enable_graph,
            sync_dist=sync_dist,
            sync_dist_group=sync_dist_group,
            metric_attribute=metric_attribute,
            rank_zero_only=rank_zero_only,
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
        for parameter, has_gradient in self._toggled.items():
            parameter.requires_grad_(has_gradient and parameter in mine)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Let all parameters require gradients again that did before."""
        for parameter, has_gradient in self._toggled.items():
            parameter.requires_grad_(has_gradient)
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

    def configure_callbacks(self) -> Any:
        """Return callbacks of this module, which replace the trainer's own of the same class."""
        return []

    @property
    def trainer(self) -> Any:
        """Return the trainer that runs this module, or that ran it last."""
        known = self._trainer_ref.value
        return self._run.state.shown_trainer if known is None else known

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self.__dict__["_trainer_ref"] = Uncopied(trainer)

    _state: Any = fact("_state_ref.value", "Return the state of the newest run; None before the first.")

    @property
    def current_epoch(self) -> int:
        """Return the current epoch, from 0; after the training, the number of epochs."""
        return 0 if self._state is None else epoch_of(self._state)

    global_step: int = _number(  # pyright: ignore[reportIncompatibleMethodOverride]
        "step", "Return the number of updates so far; 0 before the first run."
    )
    global_rank: int = _number("rank", "Return this process's rank; 0 before the first run.")
    local_rank: int = _number(
        "local_rank", "Return this process's rank on its machine; 0 before the first run."
    )

    logger: Any = first_of("loggers", "Return the trainer's logger, or None.")

    @property
    def loggers(self) -> list[Any]:
        """Return the trainer's loggers; several of Hookline's are one."""
        found = None if self._state is None else self.trainer.loggers
        return found if isinstance(found, list) else [found] if found else []


def _wrap_zero_grad(cls: type) -> None:
    """Let a class's own `on_validation_model_zero_grad` be called before the change to eval mode."""
    clear = vars(cls).get("on_validation_model_zero_grad")
    if clear is None:
        return
    clear.__hookline_no_event__ = True
    to_eval: Any = cls.on_validation_model_eval  # type: ignore[attr-defined]

    @functools.wraps(to_eval)
    def on_validation_model_eval(self: Any) -> None:
        if clears_before_eval(self._run):
            self.on_validation_model_zero_grad()
        to_eval(self)

    cls.on_validation_model_eval = on_validation_model_eval  # type: ignore[attr-defined]


class LightningDataModule(HyperParameters, DataModule):
    """The data of a run, as Lightning has it."""

    __hookline_base__: ClassVar[bool] = True
    __hookline_rows__: ClassVar[Mapping[str, Row]] = DATA_ROWS
    trainer: Any = None
    """The trainer that runs it."""

    def __init__(self) -> None:
        super().__init__()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        wrap_loaders(cls)

    @property
    def name(self) -> str:
        """Return the name of the class."""
        return type(self).__name__

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> Self:
        """Make a data module from datasets, or from lists or dictionaries of them; training is shuffled.

        datamodule_kwargs: arguments of the class, which also gets `batch_size` and `num_workers` if it takes
        them.
        """
        sizes = {"batch_size": batch_size, "num_workers": num_workers}
        made = cls(**datamodule_kwargs, **_accepted(cls, sizes))
        given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for kind, datasets in given.items():
            if datasets is not None:
                setattr(made, f"{kind}_dataloader", functools.partial(_loaders_of, datasets, kind, sizes))
        return made

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | PathLike[str], map_location: Any = None, **overrides: Any
    ) -> Self:
        """Make a data module with the hyper-parameters in a checkpoint, and restore its state.

        map_location: not needed, because a data module's state has no device. overrides: arguments that
        replace those in the checkpoint.
        """
        contents = read_checkpoint(checkpoint_path).contents
        saved = contents.get("lightning", {}).get(DATA_HPARAMS, {})
        made = cls(**_accepted(cls, {**saved, **overrides}))
        if contents.get("datamodule"):
            made.load_state_dict(contents["datamodule"])
        return made


def _accepted(cls: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that a class takes."""
    taken = inspect.signature(cls.__init__).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    return {name: value for name, value in given.items() if takes_all or name in taken}


def _loaders_of(datasets: Any, kind: str, sizes: dict[str, Any]) -> Any:
    """Return a loader for each dataset, in the structure in which they were passed."""
    if isinstance(datasets, Mapping):
        return {name: _loaders_of(each, kind, sizes) for name, each in datasets.items()}
    if isinstance(datasets, list | tuple):
        return one_of([_loaders_of(each, kind, sizes) for each in datasets], kind)
    shuffle = kind == "train" and not isinstance(datasets, IterableDataset)
    return DataLoader(datasets, shuffle=shuffle, pin_memory=torch.cuda.is_available(), **sizes)


class Callback(RunAware, Hook):
    """A hook whose methods begin with `trainer, pl_module`. Returned values steer as the lifecycle says.

    Request further facts of Hookline by naming them: `def on_train_batch_end(self, trainer, pl_module,
    outputs, grad_norm)`.
    """

    __hookline_base__: ClassVar[bool] = True
    __hookline_rows__: ClassVar[Mapping[str, Row]] = _with_divided_losses(CALLBACK_ROWS)
    __hookline_trainer__: ClassVar[str] = NAMED_TRAINER

    _trainer_ref = Uncopied()

    def begin_run(self, state: Any) -> None:
        """Store the trainer of the run, for `log`."""
        self.__dict__["_trainer_ref"] = Uncopied(state.trainer)

    @property
    def state_key(self) -> str:
        """Return the key under which Lightning stores its state; Hookline uses its `name`."""
        return type(self).__qualname__

    def find_state(self, states: dict[str, Any], name: str) -> Any:
        """Return the callback's state in a checkpoint: by its name, or by Lightning's key."""
        saved = states.get(self.state_key)
        if name not in states and isinstance(saved, dict) and saved.keys() == {WRAPPED, "state"}:
            states[name] = states.pop(self.state_key)["state"]  # from here on it has its name
        return states.get(name)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a number, with the arguments of the module's `log`."""
        run = getattr(self._trainer_ref.value, "_run", None)
        if run is None:
            raise HookError(
                f"{type(self).__name__}.log({name!r}, ...) works only while a trainer runs the callback."
            )
        log_as_lightning(run, name, value, args, options)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Log several numbers."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)
