"""Values that were logged: kept on their device, folded now and then, read only when somebody looks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from hookline.errors import HooklineError, closest

REDUCTIONS = ("mean", "sum", "min", "max", "last")
FOLD_AFTER = 256  # values kept one by one before they are folded into one: bounds memory, spreads the kernels' cost


class Metrics(MutableMapping[str, float]):
    """A mapping of names to floats. Tensors inside are read when looked at, all in one go."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values: dict[str, Any] = dict(values or {})

    def raw(self) -> dict[str, Any]:
        """The values as they are, tensors unread."""
        return self._values

    def read(self) -> dict[str, float]:
        """All values as floats, with one read per device."""
        waiting = [(key, value) for key, value in self._values.items() if type(value) is not float]
        tensors = [(key, value) for key, value in waiting if isinstance(value, Tensor)]
        devices = {value.device for _, value in tensors}
        few_on_cpu = len(tensors) <= 4 and all(device.type == "cpu" for device in devices)  # then one by one is cheaper
        if len(tensors) > 1 and len(devices) == 1 and not few_on_cpu:
            stacked = torch.stack([value.reshape(()).float() for _, value in tensors])
            self._values.update(zip([key for key, _ in tensors], stacked.tolist(), strict=True))
        for key, value in self._values.items():
            if type(value) is not float:
                self._values[key] = float(value)
        return self._values

    def __getitem__(self, key: str) -> float:
        if key not in self._values:
            known = ", ".join(self._values) or "none yet"
            raise MissingMetric(f"There is no metric {key!r}.{closest(key, self._values)} Metrics: {known}.")
        if type(self._values[key]) is not float:
            self.read()
        value: float = self._values[key]
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        del self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def copy(self) -> Metrics:
        """A mapping of its own."""
        return Metrics(self._values)

    def __repr__(self) -> str:
        return repr(self.read())


class MissingMetric(HooklineError, KeyError):
    """A metric was asked for that nobody logged."""

    def __str__(self) -> str:
        return str(self.args[0])


class Accumulator:
    """A running reduction that costs two list appends per value."""

    __slots__ = ("count", "is_mean", "reduce", "total", "values", "weights")

    def __init__(self, reduce: str = "mean") -> None:
        self.reduce = reduce
        self.is_mean = reduce == "mean"
        self.values: list[Any] = []
        self.weights: list[float] = []
        self.total: Any = None
        self.count: float = 0

    def add(self, value: Any, weight: float) -> None:
        """Take a detached scalar tensor or a number."""
        if self.is_mean and type(value) is float:
            self.total = value * weight if self.total is None else self.total + value * weight
            self.count += weight
            return
        self.values.append(value)
        self.weights.append(weight)
        if len(self.values) >= FOLD_AFTER:
            self.fold()

    def fold(self) -> None:
        """Reduce what has come in since the last time, without reading it."""
        if not self.values:
            return
        values, weights = self.values, self.weights
        self.values, self.weights = [], []
        part = _reduce(values, weights, self.reduce)
        self.count += sum(weights)
        if self.total is None or self.reduce == "last":
            self.total = part
        elif self.reduce in ("mean", "sum"):
            self.total = self.total + part
        else:
            self.total = _reduce([self.total, part], [1, 1], self.reduce)

    def state_dict(self) -> dict[str, Any]:
        """What has come in so far, folded."""
        self.fold()
        return {"reduce": self.reduce, "total": self.total, "count": self.count}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Accumulator:
        """Go on from there."""
        made = cls(state["reduce"])
        made.total, made.count = state["total"], state["count"]
        return made

    def compute(self) -> Any:
        """The reduced value so far, a tensor still on its device or a number; None if nothing came in."""
        self.fold()
        if self.total is None:
            return None
        return self.total / self.count if self.reduce == "mean" and self.count else self.total


def _reduce(values: list[Any], weights: list[float], reduce: str) -> Any:
    if reduce == "last":
        return values[-1]
    if any(isinstance(value, Tensor) for value in values):
        device = next(value.device for value in values if isinstance(value, Tensor))
        dtype = torch.float32 if device.type == "mps" else torch.float64
        try:
            stacked = torch.stack(values).to(dtype).reshape(len(values))
        except (TypeError, RuntimeError):  # numbers, devices or shapes are mixed
            stacked = torch.stack([torch.as_tensor(value, dtype=dtype, device=device).reshape(()) for value in values])
        if reduce == "mean":
            even = weights.count(weights[0]) == len(weights)
            scale = weights[0] if even else torch.tensor(weights, dtype=dtype, device=device)
            return (stacked * scale).sum()
        return stacked.sum() if reduce == "sum" else stacked.min() if reduce == "min" else stacked.max()
    if reduce == "mean":
        return math.fsum(value * weight for value, weight in zip(values, weights, strict=True))
    return math.fsum(values) if reduce == "sum" else min(values) if reduce == "min" else max(values)


class _Key:
    """How one name is logged, settled the first time it is."""

    __slots__ = ("epoch", "epoch_name", "on_step", "prog_bar", "step_name")

    def __init__(self, name: str, on_step: bool, on_epoch: bool, prog_bar: bool, reduce: str) -> None:
        self.on_step = on_step
        self.prog_bar = prog_bar
        self.epoch = Accumulator(reduce) if on_epoch else None
        self.step_name = f"{name}_step" if on_epoch and on_step else name
        self.epoch_name = f"{name}_epoch" if on_epoch and on_step else name


class MetricLog:
    """Everything logged in a run: this step's values, the epoch's accumulators, and the newest results."""

    def __init__(self) -> None:
        self.newest = Metrics()
        """The newest reduced values: what `metrics` shows at epoch, validation and end events."""
        self.pending: dict[str, Any] = {}
        """Logged since the last row went out."""
        self.bar: dict[str, Any] = {}
        """Values a progress bar shows."""
        self.batch_values: dict[str, Any] = {}
        """Logged during this batch."""
        self.mode = "now"
        """'train' or 'eval' while batches run, else 'now': a value logged between batches counts at once."""
        self.prefix = "val"
        """What an evaluation's results begin with."""
        self.weight: float = 1
        """The number of samples in this batch, by which epoch means are weighted."""
        self.loader = ""
        """The loader that this batch came from, if there are several: what is logged then also counts by itself for each."""
        self.train_loss = Accumulator()
        self._means: dict[str, Accumulator] = {}
        self._by_loader: dict[str, dict[str, Accumulator]] = {"train": {}, "eval": {}}
        self._keys: dict[str, dict[str, _Key]] = {"train": {}, "eval": {}}
        """How each name is logged, by mode."""
        self._objects: dict[tuple[str, str], Any] = {}
        """Metric objects (torchmetrics, by duck type), computed when their pass is over."""

    def log(
        self, name: str, value: Any, on_step: bool | None, on_epoch: bool | None,
        prog_bar: bool, reduce: str, batch_size: int | None, on_cpu: bool = False,
    ) -> None:  # fmt: skip
        """Take a value. Tensors are detached, nothing is read from a device.

        `on_cpu`: the run uses no other device, so a scalar on the CPU is taken as the number it is, which is cheaper than
        detaching and keeping it. In other runs such a scalar may still be on its way from a device (`non_blocking=True`).
        """
        if on_cpu and type(value) is Tensor and value.is_cpu:
            try:
                value = float(value.item())
            except (RuntimeError, TypeError):  # not one number: that raises what the user can act on
                value = self._scalar(name, value)
        elif type(value) is Tensor and not value.ndim:
            value = value.detach()
        elif type(value) is not float:
            value = self._scalar(name, value)
            if value is None:
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
            self.pending[key.step_name] = self.newest._values[name] = value
        if key.epoch is not None:
            key.epoch.add(value, self.weight if batch_size is None else batch_size)
        if key.prog_bar:
            self.bar[name] = value
        if self.loader:
            self.add_of_loader(self.mode, name, value, self.weight if batch_size is None else batch_size, self.loader, reduce)

    def add_of_loader(self, mode: str, name: str, value: Any, weight: float, loader: str, reduce: str = "mean") -> None:
        """A value of one loader among several: `train/dl_web/loss` beside `train/loss`."""
        prefix = "train" if mode == "train" else self.prefix
        key = f"{prefix}/dl_{loader}/{name.removeprefix(prefix + '/')}"
        kept = self._by_loader[mode]
        if key not in kept:
            kept[key] = Accumulator(reduce)
        kept[key].add(value, weight)

    def _log_now(self, name: str, value: Any, prog_bar: bool, reduce: str) -> None:
        """Between batches: there is nothing to reduce."""
        _check_reduction(name, reduce)
        self.newest[name] = self.pending[name] = value
        if prog_bar:
            self.bar[name] = value

    def mean(self, name: str, value: Any) -> None:
        """A number that a training step returned: its mean over the epoch, without being asked for."""
        if name not in self._means:
            self._means[name] = Accumulator()
        self._means[name].add(value.detach() if isinstance(value, Tensor) else value, self.weight)
        if self.loader:
            self.add_of_loader("train", name, value.detach() if isinstance(value, Tensor) else value, self.weight, self.loader)

    def _new_key(self, name: str, on_step: bool | None, on_epoch: bool | None, prog_bar: bool, reduce: str) -> _Key:
        _check_reduction(name, reduce)
        training = self.mode == "train"
        step = training if on_step is None else on_step
        epoch = not training if on_epoch is None else on_epoch
        return _Key(name, step, epoch, prog_bar, reduce)

    def _scalar(self, name: str, value: Any) -> Any:
        """Whatever is not a plain tensor or float: numbers, arrays of one element, torchmetrics by duck type."""
        if isinstance(value, Tensor):
            value = value.detach()
        elif hasattr(value, "compute") and hasattr(value, "reset"):
            if self.mode != "now":
                self._objects[self.mode, name] = value
                return None
            value = _computed(value)
        elif not isinstance(value, bool | int | float):
            try:
                value = float("" if isinstance(value, str | bytes) else value)
            except (TypeError, ValueError):
                raise HooklineError(f"log({name!r}, ...) takes a number or a tensor of one element, "
                                    f"not {type(value).__name__}.") from None  # fmt: skip
        if isinstance(value, Tensor) and value.numel() != 1:
            raise HooklineError(f"log({name!r}, ...) takes one number, not a tensor of shape {tuple(value.shape)}; "
                                "log its mean, or use self.experiment.add_histogram.")  # fmt: skip
        return value if isinstance(value, Tensor) else float(value)

    def state_dict(self) -> dict[str, Any]:
        """The training epoch's accumulators, for a checkpoint in the middle of it."""
        return {
            "train_loss": self.train_loss.state_dict(),
            "means": {name: each.state_dict() for name, each in self._means.items()},
            "by_loader": {name: each.state_dict() for name, each in self._by_loader["train"].items()},
            "keys": {
                name: [key.on_step, key.prog_bar, key.epoch.state_dict() if key.epoch else None]
                for name, key in self._keys["train"].items()
            },
            "pending": dict(self.pending),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self.train_loss = Accumulator.from_state(state["train_loss"])
        self._means = {name: Accumulator.from_state(each) for name, each in state["means"].items()}
        self._by_loader["train"] = {name: Accumulator.from_state(each) for name, each in state["by_loader"].items()}
        self.pending = dict(state["pending"])
        for name, (on_step, prog_bar, epoch) in state["keys"].items():
            key = self._keys["train"][name] = _Key(name, on_step, epoch is not None, prog_bar, "mean")
            key.epoch = Accumulator.from_state(epoch) if epoch else None

    def begin(self, mode: str) -> None:
        """A pass over data begins: its accumulators start anew."""
        self._keys[mode].clear()
        self._by_loader[mode].clear()
        if mode == "train":
            self.train_loss = Accumulator()
            self._means = {}

    def finish(self, mode: str) -> dict[str, Any]:
        """The pass is over: its reduced values, which also become the newest."""
        done: dict[str, Any] = {}
        if mode == "train":
            means = {"train/loss": self.train_loss, **self._means}
            done = {name: value for name, each in means.items() if (value := each.compute()) is not None}
        for name, key in self._keys[mode].items():
            if key.epoch is not None:
                value = key.epoch.compute()
                if value is not None:
                    done[key.epoch_name] = value
                    self.newest[name] = value
                    if key.prog_bar:
                        self.bar[name] = value
        for kind, name in [each for each in self._objects if each[0] == mode]:
            done[name] = _computed(self._objects.pop((kind, name)))
        for name, each in self._by_loader[mode].items():
            done[name] = each.compute()
        self.newest.raw().update(done)
        return done


def _check_reduction(name: str, reduce: str) -> None:
    if reduce not in REDUCTIONS:
        allowed = ", ".join(REDUCTIONS)
        raise HooklineError(f"log({name!r}, reduce={reduce!r}): allowed are {allowed}.{closest(reduce, REDUCTIONS)}")


def _computed(metric: Any) -> Any:
    value = metric.compute()
    metric.reset()
    return value.detach() if isinstance(value, Tensor) else value
