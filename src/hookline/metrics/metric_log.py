"""Logged values: kept on their device, reduced now and then, and read only when they are used."""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookline.metrics.accumulator import REDUCTIONS, Accumulator, ValuePart
from hookline.util.errors import HooklineError, closest, described

KNOWN_AS = "\x1f"
"""Separates the name of a value in a row (`loss_step`) from the name of its newest value (`loss`)."""
OF_LOADER = "/dataloader_idx_"
"""Precedes the number of a loader in Lightning's names, which need no second name by loader."""
FEW = 4
"""Tensors on the CPU that are read faster one by one than together."""
Pool = Callable[[dict[str, ValuePart]], dict[str, Any]]
"""Maps this rank's parts to the values of all ranks. The result also has names that only other ranks have."""


class Metrics(UserDict[str, float]):
    """A mapping of names to floats. Tensors in it are read together when one of them is used.

    values: numbers or tensors by name.
    """

    data: dict[str, Any]

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self.data = dict(values or {})

    def __setitem__(self, key: str, value: Any) -> None:
        self.data[key] = value

    def raw(self) -> dict[str, Any]:
        """Return the values as they are, with tensors unread."""
        return self.data

    def read(self) -> dict[str, float]:
        """Return all values as floats, with one read per device."""
        self.data.update(
            read_all({key: value for key, value in self.data.items() if type(value) is not float})
        )
        return self.data

    def __getitem__(self, key: str) -> float:
        if key not in self.data:
            known = ", ".join(self.data) or "none yet"
            if isinstance(key, str):
                raise MissingMetric(f"There is no metric {key!r}.{closest(key, self.data)} Metrics: {known}.")
            name = next(iter(self.data), "val/loss")  # Lightning has a mapping for each loader, by its index
            raise MissingMetric(
                f"The metrics of all loaders are one mapping by name: [{name!r}], not [{key!r}]. Metrics: "
                f"{known}."
            )
        if type(self.data[key]) is not float:
            self.read()
        value: float = self.data[key]
        return value

    def copy(self) -> Metrics:
        """Return a separate mapping with the same values."""
        return Metrics(self.data)

    def __repr__(self) -> str:
        return repr(self.read())

    def _repr_html_(self) -> str:
        if not self:
            return "no metrics"
        from hookline.util.notebook import table  # only a notebook calls this

        return table(("metric", "value"), ((key, f"{value:.6g}") for key, value in self.read().items()))


def read_all(values: Mapping[str, Any]) -> dict[str, float]:
    """Return numbers and one-element tensors as floats, with one read per device."""
    read: dict[str, float] = {}
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, {})[name] = value
        else:
            try:
                read[name] = float(value)
            except (TypeError, ValueError):
                raise NotANumber(name, value) from None
    try:
        for device, tensors in by_device.items():
            if device.type == "cpu" and len(tensors) <= FEW:
                read |= {name: float(value) for name, value in tensors.items()}
            else:
                dtype = torch.float32 if device.type == "mps" else torch.float64
                stacked = torch.stack([value.reshape(()).to(dtype) for value in tensors.values()])
                read |= zip(tensors, stacked.tolist(), strict=True)
    except (RuntimeError, ValueError):
        for name, value in values.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise NotANumber(name, value) from None
        raise
    return read


class NotANumber(HooklineError, ValueError):
    """A metric that was set directly and is not a number."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(
            f"The metric {name!r} is {described(value)}, and a metric must be a number or a tensor of one "
            f"element."
        )
        self.name = name


def with_ending(name: str, ending: str) -> str:
    """Append an ending: `loss` -> `loss_step`. The loader number of Lightning's names stays last:
    `loss_step/dataloader_idx_0`.
    """
    plain, of_loader, number = name.partition(OF_LOADER)
    return plain + ending + of_loader + number


class MissingMetric(HooklineError, KeyError):
    """A metric was requested that was not logged."""

    def __str__(self) -> str:
        return str(self.args[0])


class _Key:
    """How one name is logged, decided the first time it is."""

    __slots__ = ("epoch", "epoch_name", "on_step", "prog_bar", "step_name")

    def __init__(self, name: str, on_step: bool, on_epoch: bool, prog_bar: bool, reduce: str) -> None:
        self.on_step = on_step
        self.prog_bar = prog_bar
        self.epoch = Accumulator(reduce) if on_epoch else None
        self.step_name = with_ending(name, "_step") if on_epoch and on_step else name
        self.epoch_name = with_ending(name, "_epoch") if on_epoch and on_step else name


class MetricLog:
    """All values logged in a run: the current step's values, the epoch's accumulators, and the newest
    results.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything that was logged, as in a new run."""
        self.newest = Metrics()
        """The newest reduced values, which `metrics` shows at epoch, validation and end events."""
        self.pending: dict[str, Any] = {}
        """Values logged since the last row was written."""
        self.bar: dict[str, Any] = {}
        """Values that a progress bar shows."""
        self.batch_values: dict[str, Any] = {}
        """Values logged during this batch."""
        self.mode = "now"
        """'train' or 'eval' while batches run, else 'now': a value logged between batches counts at once."""
        self.prefix = "val"
        """The prefix of an evaluation's results."""
        self.weight: float = 1
        """The number of samples in this batch, the weight in epoch means."""
        self.loader = ""
        """The loader of this batch, if there are several; values are then also reduced per loader."""
        self.train_loss = Accumulator()
        self._means: defaultdict[str, Accumulator] = defaultdict(Accumulator)
        self._by_loader: dict[str, dict[str, Accumulator]] = {"train": {}, "eval": {}}
        self._keys: dict[str, dict[str, _Key]] = {"train": {}, "eval": {}}
        """How each name is logged, by mode."""
        self._reductions: dict[str, str] = {}
        """Names in rows whose reduction is not the mean."""
        self._plain: dict[str, str] = {}
        """Names in rows (`loss_step`) with the names of their newest values (`loss`)."""
        self._objects: dict[str, dict[str, Any]] = {"train": {}, "eval": {}}
        """Metric objects (torchmetrics, by duck type) by mode, computed when their pass is over."""
        self._in_bar: set[str] = set()
        """The names of metric objects that a progress bar shows, from the end of their pass on."""

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
        """Log a value. Tensors are detached and not read from a device.

        `on_cpu`: the run uses no other device. A CPU scalar is then stored as a number, which is cheaper than
        detaching and keeping it. In other runs such a scalar may still be in transfer from a device
        (`non_blocking=True`).
        """
        if on_cpu and type(value) is Tensor and value.is_cpu:
            try:
                number = value.item()
                value = number if type(number) is float else float(number)
            except (RuntimeError, TypeError):  # not a single number: `_scalar` raises an error for the user
                value = self._scalar(name, value)
        elif type(value) is Tensor and not value.ndim:
            value = value.detach()
        elif type(value) is not float:
            value = self._scalar(name, value)
            if value is None:
                if prog_bar:
                    self._in_bar.add(name)
                return
        self.batch_values[name] = value
        keys = self._keys.get(self.mode)
        if keys is None:
            self._log_now(name, value, prog_bar, reduce)
            return
        key = keys.get(name)
        if key is None:
            key = keys[name] = self._new_key(name, on_step, on_epoch, prog_bar, reduce)
        if key.on_step:
            self.pending[key.step_name] = self.newest.data[name] = value
        if key.epoch is not None:
            key.epoch.add(value, self.weight if batch_size is None else batch_size)
        if key.prog_bar:
            self.bar[name] = value
        if self.loader and OF_LOADER not in name:
            self.add_of_loader(
                self.mode, name, value, self.weight if batch_size is None else batch_size, self.loader, reduce
            )

    def add_of_loader(
        self, mode: str, name: str, value: Any, weight: float, loader: str, reduce: str = "mean"
    ) -> None:
        """Add a value of one of several loaders: `train/dl_web/loss` beside `train/loss`."""
        prefix = "train" if mode == "train" else self.prefix
        key = f"{prefix}/dl_{loader}/{name.removeprefix(prefix + '/')}"
        kept = self._by_loader[mode]
        if key not in kept:
            kept[key] = Accumulator(reduce)
        kept[key].add(value, weight)

    def _log_now(self, name: str, value: Any, prog_bar: bool, reduce: str) -> None:
        """Log a value between batches, where only the reduction over ranks applies."""
        _check_reduction(name, reduce)
        self._plain[name] = name
        if reduce != "mean":
            self._reductions[name] = reduce
        self.newest[name] = self.pending[name] = value
        if prog_bar:
            self.bar[name] = value

    def mean(self, name: str, value: Any) -> None:
        """Add a number that a training step returned to its mean over the epoch."""
        value = value.detach() if isinstance(value, Tensor) else value
        self._means[name].add(value, self.weight)
        if self.loader:
            self.add_of_loader("train", name, value, self.weight, self.loader)

    def _new_key(
        self, name: str, on_step: bool | None, on_epoch: bool | None, prog_bar: bool, reduce: str
    ) -> _Key:
        _check_reduction(name, reduce)
        training = self.mode == "train"
        step = training if on_step is None else on_step
        epoch = not training if on_epoch is None else on_epoch
        key = _Key(name, step, epoch, prog_bar, reduce)
        self._plain[key.step_name] = name
        if reduce != "mean":
            self._reductions[key.step_name] = reduce
        return key

    def parts_of(self, row: Mapping[str, Any]) -> dict[str, ValuePart]:
        """Return this rank's parts of a row, from its newest batch.

        Each name of a logged value carries the name of its newest value.
        """
        parts = {}
        for name, value in row.items():
            reduce, plain = self._reductions.get(name, "mean"), self._plain.get(name)
            known_as = name if plain is None else f"{name}{KNOWN_AS}{plain}"
            parts[known_as] = (reduce, value * self.weight if reduce == "mean" else value, self.weight)
        return parts

    def store_reduced(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Store the values of all ranks as the newest ones, and return them by their names in the row."""
        row = {}
        for name, value in values.items():
            in_row, _, plain = name.partition(KNOWN_AS)
            row[in_row] = value
            if plain:
                self.newest[plain] = value
        return row

    def _scalar(self, name: str, value: Any) -> Any:
        """Return a float or a tensor for a number, a one-element array or a torchmetrics object (by duck
        type).
        """
        if isinstance(value, Tensor):
            value = value.detach()
        elif hasattr(value, "compute") and hasattr(value, "reset"):
            if self.mode != "now":
                if self._objects[self.mode].setdefault(name, value) is not value:
                    raise HooklineError(
                        f"log({name!r}, ...) has got two metric objects, and one name has one result: log "
                        "each object under a name of its own, and the same object in every batch."
                    )
                return None
            metric, value = value, _value_of(value)
            metric.reset()
        elif not isinstance(value, bool | int | float):
            try:
                value = float("" if isinstance(value, str | bytes) else value)
            except (TypeError, ValueError):
                raise HooklineError(
                    f"log({name!r}, ...) takes a number or a tensor of one element, "
                    f"not {type(value).__name__}."
                ) from None
        if isinstance(value, Tensor) and value.numel() != 1:
            raise HooklineError(
                f"log({name!r}, ...) takes one number, not a tensor of shape {tuple(value.shape)}; "
                "log its mean, or use self.experiment.add_histogram."
            )
        return value if isinstance(value, Tensor) else float(value)

    def objects(self) -> list[Any]:
        """Return the metric objects that were logged and are not computed yet."""
        return [*self._objects["train"].values(), *self._objects["eval"].values()]

    def state_dict(self) -> dict[str, Any]:
        """Return the training epoch's accumulators, for a checkpoint within the epoch."""
        return {
            "train_loss": self.train_loss.state_dict(),
            "means": {name: each.state_dict() for name, each in self._means.items()},
            "by_loader": {name: each.state_dict() for name, each in self._by_loader["train"].items()},
            "keys": {
                name: [key.on_step, key.prog_bar, key.epoch.state_dict() if key.epoch else None]
                for name, key in self._keys["train"].items()
            },
            "pending": dict(self.pending),
            "reductions": dict(self._reductions),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the accumulators."""
        self.train_loss = Accumulator.from_state(state["train_loss"])
        self._means = defaultdict(
            Accumulator, {name: Accumulator.from_state(each) for name, each in state["means"].items()}
        )
        self._by_loader["train"] = {
            name: Accumulator.from_state(each) for name, each in state["by_loader"].items()
        }
        self.pending = dict(state["pending"])
        self._reductions = dict(state.get("reductions", {}))  # older checkpoints have none
        for name, (on_step, prog_bar, epoch) in state["keys"].items():
            key = self._keys["train"][name] = _Key(name, on_step, epoch is not None, prog_bar, "mean")
            key.epoch = Accumulator.from_state(epoch) if epoch else None
            self._plain[key.step_name] = name

    def step_values(self) -> dict[str, Any]:
        """Return the values of training steps that wait for the next row."""
        names = {key.step_name for key in self._keys["train"].values() if key.on_step}
        return {name: value for name, value in self.pending.items() if name in names}

    def evaluated_objects(self) -> list[Any]:
        """Return the metric objects that were logged in an evaluation that is not over."""
        return list(self._objects["eval"].values())

    def object_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of the module's metric objects, for a checkpoint within the epoch."""
        from hookline.metrics.metric_objects import save_objects  # only a checkpoint needs it

        return save_objects(module, self._objects["train"], self.evaluated_objects())

    def load_object_state(self, module: nn.Module, state: dict[str, Any]) -> list[str]:
        """Restore the metric objects; return the names of those that begin anew."""
        from hookline.metrics.metric_objects import load_objects

        logged, lost = load_objects(module, state)
        self._objects["train"] |= logged
        return lost

    def begin(self, mode: str) -> None:
        """Reset the accumulators when a pass over data begins."""
        self._keys[mode].clear()
        self._by_loader[mode].clear()
        if mode == "train":
            self.train_loss = Accumulator()
            self._means.clear()

    def finish(
        self, mode: str, pool: Pool | None = None, more: Mapping[str, Accumulator] | None = None
    ) -> dict[str, Any]:
        """Return the reduced values of a finished pass, and store them as the newest ones.

        pool: reduces over all ranks.
        """
        sums = {**(more or {}), **self._sums(mode)}
        objects = self._objects[mode]
        if pool is None:
            done = {name: value for name, each in sums.items() if (value := each.compute()) is not None}
            done |= {name: _value_of(each) for name, each in objects.items()}
        else:
            known_as = {
                key.epoch_name: f"{key.epoch_name}{KNOWN_AS}{name}" for name, key in self._keys[mode].items()
            }
            parts = {known_as.get(name, name): each.part() for name, each in sums.items()}
            done = self.store_reduced(pool(parts | dict.fromkeys(objects, OBJECT)))
            done |= _computed_by_all(done, objects, pool)
        for metric in objects.values():
            metric.reset()  # after all are computed: one object may have been logged under two names
        self._objects[mode] = {}
        for name, key in self._keys[mode].items():
            if key.epoch_name in done and key.epoch is not None:
                self.newest[name] = done[key.epoch_name]
                if key.prog_bar:
                    self.bar[name] = done[key.epoch_name]
        self.bar.update({name: done[name] for name in objects if name in self._in_bar and name in done})
        self.newest.raw().update(done)
        return done

    def is_of_training(self, name: str) -> bool:
        """Return whether this metric comes from the end of the training epoch and not from an evaluation."""
        return not self.is_of_evaluation(name) and (
            name in self._sums("train") or name in self._objects["train"]
        )

    def is_of_evaluation(self, name: str) -> bool:
        """Return whether this metric is one of the newest evaluation."""
        return name in self._sums("eval")

    def _sums(self, mode: str) -> dict[str, Accumulator]:
        sums = {"train/loss": self.train_loss, **self._means} if mode == "train" else {}
        sums |= {key.epoch_name: key.epoch for key in self._keys[mode].values() if key.epoch is not None}
        return sums | self._by_loader[mode]


OBJECT: ValuePart = ("object", 0.0, 1.0)
"""A metric object, whose own `compute` communicates with the other ranks."""


def _computed_by_all(known: dict[str, Any], objects: dict[str, Any], pool: Pool) -> dict[str, Any]:
    """Compute the same objects in the same order on every rank.

    An object that only some ranks have is computed without the others. `known`: for an object, how many ranks
    have it, and how many there are.
    """
    values: dict[str, Any] = {}
    for name in sorted(name for name, value in known.items() if type(value) is tuple and name in objects):
        (having, world_size), metric = known[name], objects[name]
        if having < world_size and hasattr(metric, "sync_on_compute"):
            before, metric.sync_on_compute = metric.sync_on_compute, False
            values[name] = _value_of(metric)
            metric.sync_on_compute = before
        else:
            values[name] = _value_of(metric)
    if not any(type(value) is tuple for value in known.values()):
        return values
    return values | pool(
        {
            name: ("mean", value, 1.0)
            for name, value in values.items()
            if not isinstance(value, Tensor) or value.numel() == 1
        }
    )


def _check_reduction(name: str, reduce: str) -> None:
    if reduce not in REDUCTIONS:
        raise HooklineError(
            f"log({name!r}, reduce={reduce!r}): allowed are {', '.join(REDUCTIONS)}."
            f"{closest(reduce, REDUCTIONS)}"
        )


def _value_of(metric: Any) -> Any:
    value = metric.compute()
    return value.detach() if isinstance(value, Tensor) else value
