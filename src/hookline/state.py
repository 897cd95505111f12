"""The live facts of a run in one slotted object. The loops write it, bound listeners read just what they asked for."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.context import StepContext
from hookline.errors import closest
from hookline.metrics import MetricLog, Metrics

if TYPE_CHECKING:
    from collections.abc import Callable


class State(MutableMapping[str, Any]):
    """Where a run is and what it is doing. Attributes are facts; it also reads like a dictionary.

    As a dictionary it has the keys model, optimizer, device, current_epoch, current_batch_idx, latest_loss, avg_loss,
    model_params, status and every fact; keys of your own may be added.
    """

    __slots__ = (
        # who takes part
        "config", "device", "hooks", "local_rank", "logger", "module", "optimizers", "rank", "schedulers", "stage",
        "trainer", "world_size", "wrapped_model",
        # how far the run is; counts are of finished things
        "batches_seen", "epoch", "epochs_seen", "resumed", "samples_seen", "sanity_checking", "should_stop", "status",
        "step", "stop_reason", "tokens_seen",
        # the batch, the loss, the optimizer of this moment
        "batch", "batch_idx", "dataloader_idx", "dataloader_name", "gradient_clip_algorithm", "gradient_clip_val",
        "live_loss", "loss_tensor", "norm_tensor", "optimizer", "optimizer_closure", "optimizer_idx", "predictions",
        "modes", "returned", "scaled_loss", "used_lr", "window_losses",
        # what one event is about
        "checkpoint", "exception", "metric", "own", "path", "reason", "row", "saved_step", "scheduler",
        "cache", "log", "nested_validate", "_extras",
    )  # fmt: skip

    def __init__(self, **facts: Any) -> None:
        for name in self.__slots__:
            setattr(self, name, None)
        self.stage = ""
        self.batches_seen = self.epoch = self.epochs_seen = self.samples_seen = self.step = self.tokens_seen = 0
        self.rank = self.local_rank = self.batch_idx = self.dataloader_idx = self.optimizer_idx = self.saved_step = 0
        self.world_size = 1
        self.resumed = self.sanity_checking = self.should_stop = self.nested_validate = False
        self.status = "created"
        self.stop_reason = ""
        self.dataloader_name = ""
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        self.predictions: list[Any] = []
        self.own: dict[str, Any] = {}
        self.log: MetricLog = MetricLog()
        self.cache: dict[str, tuple[Any, Any]] = {}
        """What was worked out for this batch; the loops empty it when the next one comes."""
        self._extras: dict[str, Any] = {}
        for name, value in facts.items():
            setattr(self, name, value)

    # ---- facts that are worked out when somebody asks, once per moment ------------------------------------------

    def _once(self, name: str, source: Any, make: Callable[[Any], Any]) -> Any:
        """The value made from this very source object, made at most once."""
        known = self.cache.get(name)
        if known is None or known[0] is not source:
            known = self.cache[name] = (source, make(source))
        return known[1]

    @property
    def loss(self) -> float | None:
        """This batch's loss as a float: reads the device."""
        return None if self.loss_tensor is None else self._once("loss", self.loss_tensor, float)

    @property
    def window_loss(self) -> float | None:
        """The mean loss over the accumulation window as a float: reads the device."""
        mean = self.mean_of_window()
        return None if mean is None else self._once("window_loss", mean, float)

    def mean_of_window(self) -> Tensor | None:
        """The same, still on its device."""
        if self.window_losses is None:  # a window of one batch
            return self.loss_tensor  # type: ignore[no-any-return]
        return self._once("mean_of_window", self.window_losses, lambda losses: torch.stack(losses).mean())  # type: ignore[no-any-return]

    @property
    def grad_norm(self) -> float | None:
        """The total gradient norm before clipping as a float: reads the device."""
        return None if self.norm_tensor is None else self._once("grad_norm", self.norm_tensor, float)

    @property
    def outputs(self) -> Any:
        """What the step returned, detached."""
        return self._once("outputs", self.returned, detached)

    @property
    def metrics(self) -> Metrics:
        """The newest reduced values."""
        return self.log.newest

    @property
    def batch_metrics(self) -> Metrics:
        """This batch's values under plain keys, `loss` among them."""
        return self._once("batch_metrics", self.returned, lambda returned: Metrics(self._batch_values(returned)))

    def _batch_values(self, returned: Any) -> dict[str, Any]:
        values: dict[str, Any] = {k: v for k, v in returned.items() if is_scalar(v)} if isinstance(returned, dict) else {}
        values = {key: value.detach() if isinstance(value, Tensor) else value for key, value in values.items()}
        if self.loss_tensor is not None:
            values["loss"] = self.loss_tensor
        return {**values, **self.log.batch_values}

    @property
    def lr(self) -> float | None:
        """The learning rate of the first parameter group."""
        return self.optimizers[0].param_groups[0]["lr"] if self.optimizers else None

    @property
    def ctx(self) -> StepContext:
        """This update as one object."""
        return StepContext(
            self.step, self.mean_of_window(), self.norm_tensor if self.norm_tensor is not None else float("nan"),
            self.used_lr, self.tokens_seen, self.module, self.optimizers[0] if self.optimizers else None,
            epoch=self.epoch, rank=self.rank, world_size=self.world_size, metrics=self.batch_metrics,
        )  # fmt: skip

    @property
    def position(self) -> str:
        """Where the run is, for messages."""
        return f"epoch {self.epoch}, batch {self.batch_idx}, step {self.step}"

    # ---- what listeners may do ----------------------------------------------------------------------------------

    def request_stop(self, reason: str) -> None:
        """End the run at the next batch boundary."""
        self.should_stop = True
        self.stop_reason = self.stop_reason or reason

    def replace(self, name: str, value: Any) -> None:
        """A listener returned a replacement for this attribute."""
        if name == "row" and not isinstance(value, Metrics):
            value = Metrics(value)
        setattr(self, name, value)

    # ---- as a dictionary ----------------------------------------------------------------------------------------

    def __getitem__(self, key: str) -> Any:
        if key in self._extras:
            return self._extras[key]
        if key in _KEYS:
            return _KEYS[key](self)
        if key in _PLAIN_FACTS:
            return getattr(self, key)
        raise KeyError(f"the state has no {key!r}.{closest(key, self)} Keys: {', '.join(self)}")

    def __setitem__(self, key: str, value: Any) -> None:
        if key in _KEYS or key in _PLAIN_FACTS:
            raise TypeError(f"state[{key!r}] is a fact of the run and cannot be replaced; use another key for your own.")
        self._extras[key] = value

    def __delitem__(self, key: str) -> None:
        del self._extras[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*_KEYS, *_PLAIN_FACTS, *self._extras])

    def __len__(self) -> int:
        return len(_KEYS) + len(_PLAIN_FACTS) + len(self._extras)

    def __repr__(self) -> str:
        return f"<State: {self.stage or 'idle'}, {self.position}, {self.status}>"


def _average_loss(s: State) -> float | None:
    mean = s.log.train_loss.compute()
    return None if mean is None else float(mean)


_KEYS: dict[str, Callable[[State], Any]] = {
    "model": lambda s: s.module,
    "optimizer": lambda s: s.optimizers[0] if s.optimizers else None,
    "current_epoch": lambda s: s.epoch,
    "current_batch_idx": lambda s: s.batch_idx,
    "latest_loss": lambda s: s.loss,
    "avg_loss": _average_loss,
    "model_params": lambda s: sum(p.numel() for p in s.module.parameters()) if s.module is not None else 0,
}  # fmt: skip
_PLAIN_FACTS = (
    "device", "status", "trainer", "config", "stage", "epoch", "step", "batches_seen", "samples_seen", "tokens_seen",
    "optimizers", "schedulers", "rank", "local_rank", "world_size", "lr", "resumed", "sanity_checking", "hooks",
    "logger", "metrics", "stop_reason",
)  # fmt: skip


def is_scalar(value: Any) -> bool:
    """Whether a value in a step's dictionary is a metric: a number or a tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, float | int) and not isinstance(value, bool)


def detached(value: Any) -> Any:
    """The same structure with every tensor detached."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: detached(each) for key, each in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(detached(each) for each in value)
    return value

