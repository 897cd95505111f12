"""The values that `self.log` has received in one loop, reduced as Lightning reduces them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from hookline.interop.lightning.package import refusal

BETTER: Mapping[str, Callable[..., Tensor]] = {"min": torch.min, "max": torch.max}
START = {"min": float("inf"), "max": float("-inf")}
"""What a reduction begins with; others begin with zero."""
EACH_STEP = frozenset(
    {
        "training_step",
        "backward",
        "optimizer_step",
        "optimizer_zero_grad",
        "configure_gradient_clipping",
        "clip_gradients",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
        "on_train_batch_start",
        "on_train_batch_end",
    }
)
"""Hooks of a training batch: the value of each step, unless something else is requested."""
EACH_BATCH = frozenset(
    name
    for kind in ("validation", "test")
    for name in (f"{kind}_step", f"on_{kind}_batch_start", f"on_{kind}_batch_end")
)
"""Hooks of an evaluation batch: the mean of the pass, unless something else is requested."""
EACH_EPOCH = frozenset(
    f"on_{kind}_{moment}"
    for kind in ("train", "validation", "test")
    for moment in ("start", "epoch_start", "epoch_end")
)
"""Hooks outside of batches: only by epoch."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The arguments of one `log` call, which must be the same in every call for a key."""

    fx: str
    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    reduce: str
    enable_graph: bool
    add_dataloader_idx: bool
    dataloader_idx: int | None
    metric_attribute: str | None
    sync_dist: bool
    sync_group: Any
    rank_zero_only: bool

    def shown_name(self, on_step: bool | None) -> str:
        """Return the name of the value of a step or of an epoch; on_step=None: without an ending."""
        ending = "" if on_step is None or not (self.on_step and self.on_epoch) else ENDINGS[on_step]
        number = self.dataloader_idx if self.add_dataloader_idx else None
        return self.name + ending + ("" if number is None else f"/dataloader_idx_{number}")


ENDINGS = {True: "_step", False: "_epoch"}


class LoggedValue:
    """One key: its newest value and its reduction over the epoch."""

    def __init__(self, options: LogOptions, is_tensor: bool, sync: Callable[..., Tensor]) -> None:
        self.options, self.is_tensor = options, is_tensor
        self.has_reset = False
        """Whether nothing was logged since the last reset."""
        self.newest: Any = None
        """The value of this step; None if it is not logged by step."""
        self._sync = sync if options.sync_dist and not options.rank_zero_only else None
        self._computed: Any = None
        self._metric: Any = None
        self._restart()

    def _restart(self) -> None:
        start = START.get(self.options.reduce, 0.0)
        self._total = torch.tensor(start, dtype=log_dtype())
        self._weight: Any = torch.tensor(0)
        self._computed = None

    def update(self, value: Any, weight: int) -> None:
        """Add a value: a tensor, or a metric object that computes its own reduction."""
        self.has_reset, self._computed = False, None
        if not self.is_tensor:
            self._metric, self.newest = value, value._forward_cache
            return
        value = self._as_float(value)
        options, total = self.options, self._total.to(value.device)
        if options.on_step:
            self.newest = self._over_ranks(value.clone())
            if not options.on_epoch:
                return
        if options.reduce == "mean":
            # not in place, so that the type is promoted
            self._total = total + value * weight
            self._weight = self._weight.to(value.device) + weight
        elif options.reduce == "sum":
            self._total = total + value
        else:
            self._total = BETTER[options.reduce](total, value)

    def _as_float(self, value: Tensor) -> Tensor:
        dtype = log_dtype()
        if not torch.is_floating_point(value):
            warn_once(
                f"self.log({self.options.name!r}, ...) in {self.options.fx}: only floating-point values can "
                f"be reduced. Converting it to {dtype}. Pass value.float() to avoid this warning."
            )
        return value if value.dtype in (torch.float32, torch.float64) else value.to(dtype)

    def _over_ranks(self, value: Tensor) -> Tensor:
        if self._sync is None:
            return value
        return self._sync(value, group=self.options.sync_group, reduce_op=self.options.reduce)

    def compute(self) -> Any:
        """Return the reduction over the epoch."""
        if self._computed is None:
            if not self.is_tensor:
                self._computed = self._metric.compute()
            else:
                if not self.options.sync_dist and dist.is_available() and dist.is_initialized():
                    warn_once(
                        f"self.log({self.options.name!r}, ...) logs a mean of this process only. Pass "
                        "sync_dist=True to reduce it over all of them."
                    )
                total = self._over_ranks(self._total.clone())
                is_mean = self.options.reduce == "mean"
                self._computed = total / self._over_ranks(self._weight) if is_mean else total
        return self._computed

    def value(self, on_step: bool) -> Tensor | None:
        """Return the value of this step or of the epoch; None if it is not logged so."""
        options = self.options
        found = self.newest if on_step and options.on_step else None
        if not on_step and options.on_epoch:
            found = self.compute()
        if found is None:
            return None
        if isinstance(found, int | float):  # a metric object that is not of torchmetrics
            return torch.tensor(found, dtype=log_dtype())
        if not isinstance(found, Tensor):
            raise ValueError(
                f"The metric's `compute()` return of {options.name!r} must be a tensor, not {found!r}."
            )
        return found if options.enable_graph else found.detach()

    def reset(self) -> None:
        """Begin a new epoch."""
        if self.is_tensor:
            self._restart()
            self.newest = None
        else:
            self._metric.reset()
        self.has_reset = True

    def state_dict(self, names: Mapping[int, str]) -> dict[str, Any] | None:
        """Return the value so far, for a checkpoint within the epoch; None if it cannot be restored.

        names: those of the module's metric objects, by their ids.
        """
        metric = names.get(id(self._metric))
        if self.options.sync_group is not None or (not self.is_tensor and metric is None):
            return None
        return {
            "options": asdict(self.options),
            "metric": metric,
            "newest": self.newest.detach() if isinstance(self.newest, Tensor) else None,
            "total": self._total.detach(),
            "weight": self._weight,
        }

    def load_state_dict(self, state: dict[str, Any], metrics: Mapping[str, Any]) -> None:
        """Continue from a saved value. metrics: the module's metric objects."""
        self.newest, self._total, self._weight = state["newest"], state["total"], state["weight"]
        if not self.is_tensor:
            self._metric = metrics[state["metric"]]

    def to_cpu(self) -> None:
        """Move the value to the CPU at the end of a run."""
        self._total, self._weight = self._total.cpu(), self._weight.cpu()
        for name in ("newest", "_computed"):
            if isinstance(kept := getattr(self, name), Tensor):
                setattr(self, name, kept.cpu())


@dataclass(slots=True)
class Shown:
    """The metrics of a moment, as Lightning's trainer shows them."""

    callback: dict[str, Tensor] = field(default_factory=dict)
    log: dict[str, Tensor] = field(default_factory=dict)
    bar: dict[str, float] = field(default_factory=dict)


class LoggedValues(dict[str, LoggedValue]):
    """All values that were logged in one loop, by hook, name and loader."""

    def __init__(self, *, training: bool = False) -> None:
        super().__init__()
        self.training = training
        self.batch: Any = None
        self.batch_size: int | None = None
        """The number of samples of this batch, once it was needed."""
        self.dataloader_idx: int | None = None

    def log(
        self,
        fx: str,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool = False,
        on_epoch: bool = True,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_fn: Any = None,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Add one value of the hook `fx`: a tensor of one element, or a metric object."""
        is_tensor = isinstance(value, Tensor)
        if is_tensor and not enable_graph:
            value = value.detach()
        if not on_step and not on_epoch:
            raise refusal(
                f"self.log({name!r}, on_step=False, on_epoch=False) would log nothing, which is not useful.",
                "on_step",
                on_step,
            )
        key = f"{fx}.{name}"
        if add_dataloader_idx and self.dataloader_idx is not None:
            key, fx = f"{key}.{self.dataloader_idx}", f"{fx}.{self.dataloader_idx}"
        options = LogOptions(
            fx,
            name,
            prog_bar,
            logger,
            on_step,
            on_epoch,
            reduction_of(reduce_fx),
            enable_graph,
            add_dataloader_idx,
            self.dataloader_idx,
            metric_attribute,
            sync_dist,
            sync_dist_group,
            rank_zero_only,
        )
        kept = self.get(key)
        if kept is None:
            kept = self[key] = LoggedValue(options, is_tensor, sync_dist_fn)
        elif kept.options != options:
            raise refusal(
                f"self.log({name}, ...) was called twice in `{fx}` with different arguments: pass the same "
                "ones, or use two names.",
                "log",
                name,
            )
        if batch_size is None:
            batch_size = self._samples(kept)
        with torch.no_grad():
            kept.update(value, batch_size)

    def _samples(self, kept: LoggedValue) -> int:
        """Return the weight of a value in the epoch's mean."""
        if self.batch_size is not None:
            return self.batch_size
        if self.batch is None or not (
            kept.is_tensor and kept.options.on_epoch and kept.options.reduce == "mean"
        ):
            return 1
        self.batch_size = samples_of(self.batch)
        return self.batch_size

    def shown(self, on_step: bool) -> Shown:
        """Return the metrics of this step, or of the epoch so far."""
        shown = Shown()
        for logged in self.values():
            options = logged.options
            if logged.has_reset or self.dataloader_idx != options.dataloader_idx:
                continue
            value = logged.value(on_step)
            if value is None:
                continue
            name, with_ending = options.shown_name(None), options.shown_name(on_step)
            if options.logger:
                shown.log[with_ending] = value
            if self.training or (options.on_epoch and not on_step):
                shown.callback[name] = value
                shown.callback[with_ending] = value
            if options.prog_bar:
                shown.bar[with_ending] = number_of(value)
        return shown

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Begin anew. metrics: only metric objects (True) or only tensors (False). fx: only of this hook."""
        for value in self.values():
            is_meant = metrics is None or metrics is not value.is_tensor
            if is_meant and fx in (None, value.options.fx):
                value.reset()

    def metrics(self) -> list[Any]:
        """Return the metric objects that were logged since the last reset."""
        return [each._metric for each in self.values() if not (each.is_tensor or each.has_reset)]

    def state_dict(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return the values since the last reset, for a checkpoint within the epoch."""
        return {key: each.state_dict(names) for key, each in self.items() if not each.has_reset}

    def load_state_dict(self, state: Mapping[str, Any], metrics: Mapping[str, Any], sync: Any) -> list[str]:
        """Continue from saved values; return the names of those that begin anew."""
        self.clear()
        lost = []
        for key, saved in state.items():
            if saved is None or not (saved["metric"] is None or saved["metric"] in metrics):
                lost.append(key)
                continue
            value = self[key] = LoggedValue(LogOptions(**saved["options"]), saved["metric"] is None, sync)
            value.load_state_dict(saved, metrics)
        return lost

    def to_cpu(self) -> None:
        """Move all values to the CPU at the end of a run."""
        for value in self.values():
            value.to_cpu()


def levels(fx: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
    """Return whether a hook logs by step and by epoch; raise where Lightning does not log."""
    if fx not in EACH_STEP | EACH_BATCH | EACH_EPOCH:
        raise refusal(f"You can't self.log() inside `{fx}`: use self.logger there.", "log", fx)
    is_step = fx in EACH_STEP
    on_step = is_step if on_step is None else on_step
    on_epoch = not is_step if on_epoch is None else on_epoch
    if fx in EACH_EPOCH and (on_step or not on_epoch):
        raise refusal(
            f"You can't self.log(on_step={on_step}, on_epoch={on_epoch}) inside `{fx}`, which is not called "
            "for batches: leave both out.",
            "on_step",
            on_step,
        )
    return on_step, on_epoch


def as_logged(name: str, value: Any) -> Any:
    """Return a number as a tensor, and a metric object as it is; raise for anything else."""
    if isinstance(value, Tensor | Number):
        tensor = (
            value.clone().detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=log_dtype())
        )
        if tensor.numel() != 1:
            raise ValueError(
                f"self.log({name}, {value}): the tensor has {tensor.numel()} elements; log its mean."
            )
        return tensor.squeeze()
    if hasattr(value, "compute") and hasattr(value, "reset"):
        return value
    if isinstance(value, Mapping) and any(isinstance(each, Mapping) for each in value.values()):
        raise ValueError(
            f"self.log({name}, {value}): log each number of an inner dictionary under a name of its own."
        )
    raise ValueError(f"self.log({name}, {value}): `{type(value).__name__}` values cannot be logged.")


def log_dtype() -> torch.dtype:
    """Return torch's default type, but at least 32 bits."""
    dtype = torch.get_default_dtype()
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def reduction_of(given: Any) -> str:
    """Return 'mean', 'sum', 'min' or 'max' for a name or one of torch's or Python's functions."""
    if isinstance(given, str):
        word = {"avg": "mean"}.get(given.lower(), given.lower())
    else:
        word = next((name for name, functions in REDUCING.items() if given in functions), "")
    if word not in REDUCING:
        raise refusal(
            f"self.log(..., reduce_fx={given!r}): allowed are min, max, mean and sum. For another reduction "
            "log a torchmetrics.Metric.",
            "reduce_fx",
            given,
        )
    return word


REDUCING: Mapping[str, tuple[Any, ...]] = {
    "mean": (torch.mean,),
    "sum": (torch.sum, sum),
    "min": (torch.min, min),
    "max": (torch.max, max),
}


def number_of(value: Any) -> Any:
    """Return the number that a tensor holds; a number unchanged. Reads the device."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"A metric is one number, but {value} has {value.numel()} elements.")
    return value.item()


def samples_of(batch: Any) -> int:
    """Return the length of the first tensor in a batch, as Lightning counts samples."""
    found: int | None = None
    try:
        for length in _lengths(batch):
            if found is None:
                found = length
            elif found != length:
                warn_once(
                    f"The tensors of a batch have different lengths; its batch_size is taken to be {found}, "
                    "the length of the first one. Pass self.log(..., batch_size=...) to set it."
                )
                break
    except RecursionError:
        raise RecursionError(NO_SAMPLES) from None
    if found is None:
        raise refusal(NO_SAMPLES, "batch_size", None)
    return found


NO_SAMPLES = (
    "The number of samples of this batch is unknown, because no tensor was found in it: pass "
    "self.log(..., batch_size=...)."
)


def _lengths(batch: Any) -> Iterator[int | None]:
    if isinstance(batch, Tensor):
        yield batch.size(0) if batch.ndim else 1
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _lengths(part)
    elif isinstance(batch, Iterable) and not isinstance(batch, str):
        for part in batch:
            yield from _lengths(part)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from _lengths(getattr(batch, field.name))
    else:
        yield None


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn, but only once with the same text."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, UserWarning, stacklevel=4)


NARROWEST = 25
"""The width of a column of short names."""
USUAL_WIDTH = 120
"""The width of the table where the output is not a terminal."""


def print_results(results: Sequence[Mapping[str, Any]], stage: str) -> None:
    """Print a row for each metric and a column for each loader, with rich if it is installed."""
    by_loader = [
        {name.partition("/dataloader_idx_")[0]: _text(value) for name, value in each.items()}
        for each in results
    ]
    names = sorted({name for each in by_loader for name in each})
    if not names:
        return
    headers = [f"DataLoader {number}" for number in range(len(by_loader))]
    width = shutil.get_terminal_size((USUAL_WIDTH, 30)).columns or USUAL_WIDTH
    column = int(min(max(NARROWEST, *map(len, names), *map(len, headers)), width / 2))
    per_table = int((width - column) / column)
    for first in range(0, len(headers), per_table):
        shown = slice(first, first + per_table)
        rows = [[name, *(each.get(name, " ") for each in by_loader[shown])] for name in names]
        table = [f"{stage} metric".capitalize(), *headers[shown]]
        if importlib.util.find_spec("rich") is not None:
            _print_rich(table, rows, column)
        else:
            _print_plain(table, rows, column, width)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    return str(value)


def _print_rich(headers: list[str], rows: list[list[str]], column: int) -> None:
    from rich import get_console
    from rich.table import Column, Table

    styles = ["cyan", *["magenta"] * (len(headers) - 1)]
    table = Table(
        *(
            Column(header, justify="center", style=style, width=column)
            for header, style in zip(headers, styles, strict=True)
        )
    )
    for row in rows:
        table.add_row(*row)
    get_console().print(table)


def _print_plain(headers: list[str], rows: list[list[str]], column: int, width: int) -> None:
    line, half = _line() * width, width // 2
    printed = [line, _centred(headers, column), line]
    for name, *values in rows:
        parts = [name[start : start + half] for start in range(0, len(name), half)]
        printed += [_centred([part, *values], column) for part in parts[:1]]
        printed += [_centred([part, " "], column) for part in parts[1:]]
    print(os.linesep.join([*printed, line]))


def _centred(cells: list[str], column: int) -> str:
    return "".join(f"{cell:^{column}}" for cell in cells).rstrip()


def _line() -> str:
    """Return the character of lines, in an encoding that the terminal has."""
    try:
        "─".encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return "-"
    return "─"
