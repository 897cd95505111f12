"""`Module` and `DataModule`, the base classes for users, with a default for every action of a run."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hookline.data.batch import move
from hookline.data.seeding import Creation
from hookline.distributed.sharded_norms import HALF, clip_norm, clip_values
from hookline.engine._methods import DataMethods, ModuleMethods
from hookline.engine.init_arguments import RecordsInit
from hookline.run.optimizers import in_module_order
from hookline.run.state import loss_in
from hookline.util.errors import (
    ATTRIBUTES,
    AdvisesOnNames,
    HooklineError,
    OptionError,
    closest,
    described,
    nearly_named,
)
from hookline.util.uncopied import Uncopied


class DataActions:
    """The actions of a run that concern its data, with their defaults."""

    __hookline_base__: ClassVar[bool] = True

    def _attach(self, run: Any) -> None:
        """Set the run when it begins, and None when it ends."""

    def train_dataloader(self) -> Any:
        """Return the training loader, if none was passed to fit."""

    def val_dataloader(self) -> Any:
        """Return the validation loader, or several."""

    def test_dataloader(self) -> Any:
        """Return the test loader, or several."""

    def predict_dataloader(self) -> Any:
        """Return the loader to predict on, or several."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device.

        batch: nested tensors, and other values, which stay as they are. device: the device of the module.
        dataloader_idx: the number of its loader.
        """
        return move(batch, device)


class Actions(DataActions):
    """The actions of a run with their defaults, for `Module` and for a plain `nn.Module`."""

    __hookline_base__: ClassVar[bool] = True

    automatic_optimization: bool = True
    """False: `training_step` calls `manual_backward` and the optimizers itself."""
    strict_loading: bool = True
    """False: a resume loads the weights that the checkpoint has and keeps the module's own for the others."""

    def configure_hooks(self) -> Any:
        """Return hooks of this module, which are added for the length of a run."""
        return []

    def configure_model(self) -> None:
        """Create or divide layers at the start of a run. A module that FSDP has sharded keeps its layers."""

    def configure_optimizers(self) -> Any:
        """Return an optimizer, several, or a dictionary with 'optimizer' and 'lr_scheduler'."""
        raise OptionError(
            f"{type(self).__name__} has no configure_optimizers. Return an optimizer from it: "
            "`return torch.optim.AdamW(self.parameters(), lr=1e-3)`. Or pass optimizer= to fit."
            + nearly_named(type(self), Module, "configure_optimizers")
        )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of a batch: `training_step(self, batch, batch_idx)`."""
        raise OptionError(
            f"{type(self).__name__} has no training_step(self, batch, batch_idx), which fit needs."
            + nearly_named(type(self), Module, "training_step")
        )

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Measure a validation batch; a returned loss becomes `val/loss`."""
        raise HooklineError(f"{type(self).__name__} has no validation_step(self, batch, batch_idx).")

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Measure a test batch; a returned loss becomes `test/loss`."""
        raise HooklineError(
            f"{type(self).__name__} has no test_step(self, batch, batch_idx), which test needs."
        )

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions for a batch; by default the module's output for its input."""
        batch = args[0]
        return self(batch[0] if isinstance(batch, list | tuple) else batch)  # type: ignore[operator]

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of the loss.

        loss: the loss with its graph. args, kwargs: further arguments of `Tensor.backward`.
        """
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients.

        epoch, batch_idx: the current epoch and batch. optimizer: the optimizer whose gradients are cleared.
        """
        optimizer.zero_grad()

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Update the weights.

        epoch, batch_idx: the current epoch and batch. optimizer: the optimizer to step. optimizer_closure:
        computes the loss again, for an optimizer such as LBFGS.
        """
        optimizer.step(optimizer_closure)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients. An override calls `self.clip_gradients` with its own values.

        optimizer: clip the gradients of its parameters. gradient_clip_val: the largest norm or value; None:
        do not clip. gradient_clip_algorithm: 'norm' or 'value'.
        """
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = "norm",
    ) -> Tensor | None:
        """Clip by total norm or by value. Return the norm before clipping if it was computed."""
        if gradient_clip_val is None:
            return None
        groups = optimizer.param_groups
        known = groups[0]["params"] if len(groups) == 1 else in_module_order([optimizer])
        parameters = [each for each in known if each.grad is not None]
        # sharded over ranks, or in half precision, whose norm may not fit into it
        if any(type(each) is not nn.Parameter or each.dtype in HALF for each in parameters):
            clip = clip_values if gradient_clip_algorithm == "value" else clip_norm
            return clip([each.grad for each in parameters], gradient_clip_val)
        if gradient_clip_algorithm == "value":
            nn.utils.clip_grad_value_(parameters, gradient_clip_val)
            return None
        return nn.utils.clip_grad_norm_(parameters, gradient_clip_val)

    def lr_scheduler_step(self, scheduler: Any, metric: Any = None) -> None:
        """Advance a learning-rate scheduler.

        scheduler: the scheduler to advance. metric: the metric that it monitors, or None.
        """
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(metric)
        else:
            scheduler.step()

    def prepare_data(self) -> None:
        """Download or write data to disk; called once per machine."""


class Module(Actions, ModuleMethods, RecordsInit, nn.Module):
    """A model with its training: override `training_step`, `configure_optimizers` and any event method."""

    __hookline_base__: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._run_ref = Uncopied(made=Creation())

    # ---- the run -------------------------------------------------------------------------------------------

    def _attach(self, run: Any) -> None:
        if "_run_ref" in self.__dict__:
            self._run_ref.value = run
        elif run is not None:
            raise HooklineError(
                f"{type(self).__name__}.__init__ does not call super().__init__(), which must come first."
            )

    def _refuse_second_run(self, strategy: Any, stage: str) -> None:
        """Raise if another trainer runs this module: the end of a second run would detach it from the first.

        A short fit inside a run, such as that of a batch-size finder, shares the strategy and attaches again.
        """
        held = self.__dict__["_run_ref"].value if "_run_ref" in self.__dict__ else None
        if held is not None and held.strategy is not strategy:
            raise HooklineError(
                f"{stage}() of another trainer was called with {type(self).__name__}, which is in a running "
                f"{held.stage}(). A module can be in one run only. To evaluate it in a hook, request "
                "`trainer` and call trainer.validate(), or pass a copy: copy.deepcopy(module)."
            )

    @property
    def _run(self) -> Any:
        run = self.__dict__["_run_ref"].value if "_run_ref" in self.__dict__ else None
        if run is None:
            raise HooklineError(
                f"{type(self).__name__} is not in a run: this works only while a trainer runs it."
            )
        return run

    @property
    def trainer(self) -> Any:
        """The trainer that runs this module."""
        return self._run.trainer

    @property
    def logger(self) -> Any:
        """The logger, or all of them as one."""
        return self._run.state.logger

    @property
    def experiment(self) -> Any:
        """The same as `logger`; it has add_scalar, add_histogram, add_text, add_image and add_figure."""
        return self._run.state.logger

    @property
    def current_epoch(self) -> int:
        """The current epoch, from 0."""
        return self._run.state.epoch  # type: ignore[no-any-return]

    @property
    def global_step(self) -> int:
        """Optimizer updates so far."""
        return self._run.state.step  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    def log(
        self,
        name: str,
        value: Any,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        prog_bar: bool = False,
        reduce: str = "mean",
        batch_size: int | None = None,
    ) -> None:
        """Log a number. By default a training step logs per step, an evaluation step its epoch's mean.

        name: the name of the metric, such as 'train/acc'. value: a number, or a tensor with one element.
        on_step, on_epoch: log the value of each step, or one value for the epoch; None: each step in
        training, the epoch in an evaluation. prog_bar: also show it in the progress bar. reduce: 'mean',
        'sum', 'min', 'max' or 'last', over the batches of the epoch and over the ranks. batch_size: the
        weight of the value in a mean; None: the samples of the batch.
        """
        # the property, which costs a call, is only read to raise its error
        run = self._run_ref.value or self._run
        run.state.log.log(name, value, on_step, on_epoch, prog_bar, reduce, batch_size, run.traits.on_cpu)

    def log_dict(self, values: Mapping[str, Any], **options: Any) -> None:
        """Log several numbers.

        values: numbers by name. options: those of `log`.
        """
        for name, value in values.items():
            self.log(name, value, **options)

    def save_hyperparameters(self, *args: Any, **kwargs: Any) -> None:
        """Raise: the arguments of `__init__` are saved without a call. args, kwargs: as in Lightning."""
        raise HooklineError(f"{type(self).__name__} needs no save_hyperparameters(). {ATTRIBUTES['hparams']}")

    # ---- manual optimization -------------------------------------------------------------------------------

    def optimizers(self) -> Any:
        """Return the optimizer, or a list of optimizers. Their `step` and `zero_grad` emit the events."""
        handles = self._run.manual.optimizers
        return handles[0] if len(handles) == 1 else handles

    def lr_schedulers(self) -> Any:
        """Return the scheduler, or a list of schedulers."""
        schedulers = self._run.state.schedulers
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward with its events and the strategy's scaling.

        loss: the loss with its graph. options: those of `Tensor.backward`.
        """
        self._run.manual.backward(loss, **options)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = "norm",
    ) -> Tensor | None:
        """Clip by total norm or by value. In manual optimization, scaled gradients are unscaled first.

        optimizer: clip the gradients of its parameters. gradient_clip_val: the largest norm or value; None:
        do not clip. gradient_clip_algorithm: 'norm' or 'value'.
        """
        if not self.automatic_optimization:
            self._run.manual.unscale(optimizer)
        return super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    # ---- load ----------------------------------------------------------------------------------------------

    @classmethod
    def load_from_checkpoint(
        cls, path: str | os.PathLike[str], strict: bool = True, weights: Any = "scored", **overrides: Any
    ) -> Self:
        """Make a module from a checkpoint: its constructor arguments, or the given ones, and its weights.

        path: a checkpoint, an fsspec URL, or the directory of a run, whose newest complete checkpoint is
        used. strict: all weights must fit; False: load those that fit and report the others. weights: of a
        checkpoint with averaged weights: 'scored' takes the weights that evaluations used, 'raw' the trained
        ones, 'averaged' the average; the log says which. If `__init__` has an argument `weights`, it is that
        one. overrides: constructor arguments that replace those of the checkpoint.
        """
        # imported by name, because that layer is above this one
        loading = importlib.import_module("hookline.checkpoint.weights")
        return loading.load_module(cls, path, strict, weights, **overrides)  # type: ignore[no-any-return]


class DataModule(DataActions, DataMethods, AdvisesOnNames):
    """The data of a run: prepares the data, makes the loaders and moves the batches."""

    __hookline_base__: ClassVar[bool] = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data module for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        state: the result of `state_dict`.
        """


# ---- A plain nn.Module without a subclass


class PlainSteps(Actions):
    """The steps of a run for a plain nn.Module, which itself is not a listener."""

    __hookline_base__: ClassVar[bool] = True

    def __init__(
        self, net: nn.Module, loss: Callable[..., Any] | None, step: Callable[..., Any] | None, optimizer: Any
    ) -> None:
        if loss is not None and step is not None:
            raise OptionError(
                "Pass either loss= (called with outputs and targets) or step= (called with model and batch)."
            )
        _check_function("loss", loss, "outputs and targets")
        _check_function("step", step, "model and batch")
        self.net = net
        self.loss = loss
        """The loss function of outputs and targets; a hook may replace it."""
        self.is_reused: bool | None = False
        """Whether its functions are those of an earlier run; None: that was reported."""
        self._optimizer = optimizer
        self._step = step
        self._wants_index = step is not None and _wants_index(step)
        self._forward: Callable[[Any], Any] | None = None
        """Calls the model with a batch that is a mapping; chosen at the first one."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `fit` that these steps were made from."""
        return {"loss": self.loss, "step": self._step, "optimizer": self._optimizer}

    @property
    def given_functions(self) -> dict[str, Any]:
        """The function of the user that each step calls, for `explain`."""
        return dict.fromkeys(("training_step", "validation_step", "test_step"), self._step or self.loss)

    def again(self, optimizer: Any) -> PlainSteps:
        """Return the same steps for another run, with another optimizer if one is given."""
        same = PlainSteps(
            self.net, self.loss, self._step, self._optimizer if optimizer is None else optimizer
        )
        same.is_reused = None if self.is_reused is None else True
        return same

    def _measure(self, batch: Any, batch_idx: int) -> Any:
        if self._step is not None:
            return (
                self._step(self.net, batch, batch_idx) if self._wants_index else self._step(self.net, batch)
            )
        if self.loss is None and isinstance(batch, Mapping):
            outputs = self._call_by_name(batch)
            if loss_in(outputs) is None:
                raise self._without_loss(batch, outputs)
            return outputs
        if self.loss is None:
            raise self._lacking(
                "pass loss=torch.nn.functional.cross_entropy (or another function of outputs and targets), "
                "or step=lambda model, batch: ..., or derive it from hookline.Module."
            )
        inputs, targets = _pair(batch)
        return self.loss(self.net(inputs), targets)

    def _call_by_name(self, batch: Mapping[str, Any]) -> Any:
        """Call the model with the entries of a batch as its arguments."""
        if self._forward is None:
            self._forward = _choose_call(self.net, batch)
        try:
            return self._forward(batch)
        except TypeError:
            _choose_call(self.net, batch)  # raises if this batch has an entry that the first one did not have
            raise

    def _without_loss(self, batch: Mapping[str, Any], outputs: Any) -> OptionError:
        keys = f" with {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else ""
        advice = (
            "Models of transformers compute it from 'labels', which the batch does not have: add them, for "
            "example with DataCollatorForLanguageModeling. Or pass"
            if "labels" not in batch
            else "Pass"
        )
        return OptionError(
            f"{type(self.net).__name__} returned no loss, but {type(outputs).__name__}{keys}, for a batch "
            f"with {', '.join(map(str, batch))}. {advice} step=lambda model, batch: ... that returns it."
        )

    def _lacking(self, needed: str) -> OptionError:
        hidden = getattr(self.net, "_orig_mod", None)
        if hasattr(hidden, "training_step") and hasattr(hidden, "configure_optimizers"):
            who = type(hidden).__name__
            return OptionError(
                f"This {who} was wrapped by torch.compile, which hides training_step and "
                f"configure_optimizers: pass the {who} itself, and Trainer(compile=True)."
            )
        return OptionError(f"{type(self.net).__name__} is a plain nn.Module: {needed}")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the result of the step function, or the loss of the model's outputs."""
        return self._measure(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the same as `training_step`."""
        return self._measure(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the same as `training_step`."""
        return self._measure(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the model's output for the batch's input; the entries of a mapping are its arguments."""
        if isinstance(batch, Mapping):
            return self._call_by_name(batch)
        return self.net(batch[0] if isinstance(batch, list | tuple) else batch)

    def configure_optimizers(self) -> Any:
        """Return the optimizer passed to fit: one, several, or the result of a function of the parameters."""
        if self._optimizer is None:
            has_loss = self.loss is not None or self._step is not None
            raise self._lacking(
                "pass optimizer=torch.optim.AdamW(model.parameters()) to fit."
                if has_loss
                else "pass optimizer=torch.optim.AdamW(model.parameters()) to fit, and "
                "loss=torch.nn.functional.cross_entropy (or another function of outputs and targets) or "
                "step=lambda model, batch: ... The loss may be left out if the batches are mappings and the "
                "model returns it."
            )
        return _make_optimizer(self._optimizer, self.net)


def _make_optimizer(given: Any, module: nn.Module) -> Any:
    """Return the optimizer passed to fit, or the result of a function of the parameters."""
    made = given
    if callable(given) and not isinstance(given, list | tuple | dict):
        made = given(module.parameters())
    if isinstance(made, Optimizer | list | tuple | dict):
        return made
    near = next((each for each in vars(torch.optim) if each.lower() == str(made).lower()), "AdamW")
    raise OptionError(
        f"optimizer= {'is' if made is given else 'returned'} {described(made)}; pass an optimizer, several, "
        f"or a function of the parameters: optimizer=torch.optim.{near}(model.parameters(), lr=1e-3).",
        option="optimizer",
        value=given,
    )


def use_optimizer(module: nn.Module, given: Any) -> None:
    """Let a `Module` without configure_optimizers train with the optimizer that was passed to fit."""
    if not isinstance(module, Module) or type(module).configure_optimizers is not Module.configure_optimizers:
        name = type(module).__name__
        raise OptionError(
            "optimizer= is for plain nn.Modules and for a hookline.Module without configure_optimizers. "
            f"Return the optimizer from {name}.configure_optimizers.",
            option="optimizer",
            value=given,
        )
    module.configure_optimizers = functools.partial(_make_optimizer, given, module)  # type: ignore[method-assign]


def _check_function(name: str, given: Any, of: str) -> None:
    """Raise for a class or a value that cannot be called, before the first batch."""
    if inspect.isclass(given):
        raise OptionError(
            f"{name}={given.__name__} is a class; pass an object of it, {given.__name__}(), or a function "
            f"of {of}."
        )
    if given is not None and not callable(given):
        known = (
            [each for each in dir(functional) if each.endswith(("_loss", "_entropy", "_logits"))]
            if name == "loss"
            else []
        )
        near = closest(given, known) or closest(f"{given}_loss", known) if isinstance(given, str) else ""
        hint = near.replace("?", " of torch.nn.functional?")
        raise OptionError(f"{name}={described(given)} must be a function of {of}.{hint}")


def _wants_index(step: Callable[..., Any]) -> bool:
    """Return whether the third argument is the batch index. One of another name keeps its default."""
    signature = inspect.signature(step)
    third = list(signature.parameters.values())[2:3]
    wants = any(each.name == "batch_idx" or each.default is each.empty for each in third)
    try:
        signature.bind("model", "batch", *[0] * wants)
        if wants and third[0].name in ("label", "labels", "target", "targets", "y", "y_true", "yb"):
            raise TypeError
    except TypeError:
        raise OptionError(
            f"step= is a function of {signature}, but gets (model, batch) or (model, batch, batch_idx); "
            "unpack the batch inside: def step(model, batch): inputs, targets = batch"
        ) from None
    return wants


def _choose_call(net: nn.Module, batch: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return a call with the entries of a batch as keywords, or with the batch if `forward` takes that one.

    Raise if `forward` takes some entries and not the others.
    """
    forward = inspect.signature(net.forward).parameters.values()
    named = [each.name for each in forward if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    if any(each.kind is each.VAR_KEYWORD for each in forward) or all(key in named for key in batch):
        return lambda batch: net(**batch)
    unknown = [key for key in batch if key not in named]
    if len(unknown) == len(batch):
        return net
    raise OptionError(
        f"{type(net).__name__}.forward has no argument {unknown[0]!r}, which the batches have."
        f"{closest(unknown[0], named)} Its arguments: {', '.join(named)}. Leave the entry out in the "
        "collate_fn of the loader, or pass step=lambda model, batch: ...."
    )


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    raise OptionError(
        f"loss= needs batches of (inputs, targets), but the loader yields {type(batch).__name__}"
        f"{f' of length {len(batch)}' if isinstance(batch, list | tuple | dict) else ''}. "
        "Pass step=lambda model, batch: ..., or for tensors DataLoader(TensorDataset(inputs, targets))."
    )


def name_of_step(steps: Any) -> str:
    """Return what the user wrote as the training step, for messages: a method, or an argument of `fit`."""
    if not isinstance(steps, PlainSteps):
        return "training_step"
    return f"the function {'loss=' if steps.arguments()['step'] is None else 'step='}"
