"""The live facts of a run: the loops write them to their owners; listeners read what they request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from hookline.engine.checks import check_choice
from hookline.metrics.metric_log import MetricLog, Metrics
from hookline.run.context import OnceFloat, StepContext
from hookline.run.optimizers import total_norm
from hookline.run.state_parts import PARTS, Counts, CurrentBatch, Ending, Facts, Optimization, Setup, Subject
from hookline.run.timings import Timings
from hookline.util.errors import HooklineError, LossError, closest

# ---- The state of a run as a dictionary


class StateMapping(MutableMapping[str, Any]):
    """Lets a state be read like a dictionary; facts cannot be replaced, keys of your own may be added."""

    __slots__ = ()
    extras: dict[str, Any]
    """Keys of the user's own."""

    def __getitem__(self, key: str) -> Any:
        if key in self.extras:
            return self.extras[key]
        if key in STATE_KEYS:
            return STATE_KEYS[key](self)
        if key in PLAIN_FACTS:
            return getattr(self, key)
        raise KeyError(f"the state has no {key!r}.{closest(key, self)} Keys: {', '.join(self)}")

    def __setitem__(self, key: str, value: Any) -> None:
        if key in STATE_KEYS or key in PLAIN_FACTS:
            raise TypeError(
                f"state[{key!r}] is a fact of the run and cannot be replaced; use another key for your own."
            )
        self.extras[key] = value

    def __delitem__(self, key: str) -> None:
        del self.extras[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*STATE_KEYS, *PLAIN_FACTS, *self.extras])

    def __len__(self) -> int:
        return len(STATE_KEYS) + len(PLAIN_FACTS) + len(self.extras)


def _average_loss(s: Any) -> float | None:
    mean = s.log.train_loss.compute()
    return None if mean is None else float(mean)


STATE_KEYS: dict[str, Callable[[Any], Any]] = {
    "model": lambda s: s.module,
    "experiment": lambda s: s.logger,
    "optimizer": lambda s: s.optimizers[0] if s.optimizers else None,
    "current_epoch": lambda s: s.epoch,
    "current_batch_idx": lambda s: s.batch_idx,
    "latest_loss": lambda s: s.loss,
    "avg_loss": _average_loss,
    "model_params": lambda s: sum(p.numel() for p in s.module.parameters()) if s.module is not None else 0,
}
"""Keys that are not facts, or that differ from the fact of the same name."""
PLAIN_FACTS = (
    "module",
    "wrapped_model",
    "batch_idx",
    "device",
    "status",
    "trainer",
    "config",
    "stage",
    "epoch",
    "step",
    "batches_seen",
    "samples_seen",
    "tokens_seen",
    "optimizers",
    "schedulers",
    "rank",
    "local_rank",
    "world_size",
    "lr",
    "resumed",
    "sanity_checking",
    "hooks",
    "fetch_seconds",
    "timings",
    "logger",
    "metrics",
    "stop_reason",
)


# The phases of the loops that take time outside every listener, as `State.running` has them.
LOADER = "<loader>"
"""The placeholder for the loader's name in these texts."""
PASSES = {"validate": "validation", "test": "test", "predict": "prediction"}
"""The words for the passes of the stages, for messages; a fit makes validations."""
FETCHING = (f"waiting for the next batch of loader {LOADER}", None)
OPENING = f"opening loader {LOADER}"
SAVING = "saving a checkpoint"


OWN_ATTRIBUTES = ("cache", "extras", "log", "nested_validate", "running", "sanity_checking")
"""The attributes that the state itself holds."""
STATE_PARTS = tuple(PARTS.values())
WRITTEN = frozenset((*OWN_ATTRIBUTES, *(name for part in STATE_PARTS for name in part.__slots__)))
"""The facts that are written; all others are computed from them."""


class State(StateMapping, Facts):
    """The state of a run. Its attributes are facts; it also reads like a dictionary.

    As a dictionary it has the keys model, optimizer, device, current_epoch, current_batch_idx, latest_loss,
    avg_loss, model_params, status and every fact; keys of your own may be added. The loops write facts to the
    parts that own them.
    """

    __slots__ = (*OWN_ATTRIBUTES, *PARTS)

    def __init__(self, **facts: Any) -> None:
        """Make a state. facts: by name."""
        self.setup, self.counts, self.ending = Setup(), Counts(), Ending()
        self.current, self.optimization, self.subject = CurrentBatch(), Optimization(), Subject()
        self.log = MetricLog()
        self.sanity_checking = self.nested_validate = False
        self.running: tuple[Any, Any] | None = None
        """What runs now (a listener, a predicate, or a phase of the loop as text), and the outer value.

        A call writes it when it begins and restores it when it ends. Each call writes a new tuple, so that
        the watchdog can distinguish two calls.
        """
        self.cache: dict[str, tuple[Any, Any]] = {}
        """The facts that were computed for this batch; the loops clear it at the next batch."""
        self.extras = {}
        self.fill(**facts)

    def fill(self, **facts: Any) -> None:
        """Write facts by name, for a state that no loop drives."""
        for name, value in facts.items():
            setattr(self.owner(name), name, value)
        if "trainer" in facts:
            self.setup.shown_trainer = self.setup.trainer

    def owner(self, name: str) -> Any:
        """Return the part that a fact is written to."""
        for part in (self.setup, self.counts, self.ending, self.current, self.optimization, self.subject):
            if name in part.__slots__:
                return part
        if name in OWN_ATTRIBUTES:
            return self
        raise TypeError(f"{name!r} is not a fact that can be written.{closest(name, WRITTEN)}")

    # ---- facts that are computed when a listener requests them, once per batch -----------------------------

    def _once(self, name: str, source: Any, make: Callable[[Any], Any]) -> Any:
        """Return the value made from this source object, made at most once."""
        known = self.cache.get(name)
        if known is None or known[0] is not source:
            known = self.cache[name] = (source, make(source))
        return known[1]

    @property
    def loss(self) -> float | None:
        """This batch's loss as a float: reads the device."""
        return None if self.last_loss is None else float(self._reader(self.last_loss))

    @property
    def window_loss(self) -> float | None:
        """The mean loss over the accumulation window, and over all ranks, as a float: reads the device."""
        mean = self.mean_of_window() if self.shared_loss is None else self.shared_loss
        return None if mean is None else float(self._reader(mean))

    def _reader(self, loss: Any) -> OnceFloat:
        made: OnceFloat = self._once("read loss" if loss is self.last_loss else "read mean", loss, OnceFloat)
        return made

    def mean_of_window(self) -> Tensor | float | None:
        """Return the mean loss over the window on its device."""
        if self.window_losses is None:  # a window of one batch
            return self.last_loss
        return self._once("mean_of_window", self.window_losses, self._weighted_mean)  # type: ignore[no-any-return]

    def _weighted_mean(self, losses: list[Any]) -> Any:
        if self.window_weights is None:
            return _mean_loss(losses)
        return _mean_loss(
            [loss * weight for loss, weight in zip(losses, self.window_weights, strict=True) if weight],
            sum(self.window_weights),
        )

    @property
    def grad_norm(self) -> float | None:
        """The total gradient norm before clipping as a float: reads the device."""
        norm = self.norm_on_device()
        return None if norm is None else float(self._once("read norm", norm, OnceFloat))

    def norm_on_device(self) -> Tensor | None:
        """Return the gradient norm on its device: that of clipping, or computed from the gradients."""
        if self.norm_tensor is None:
            if self.norm_takes_all:
                self._check_norm_is_requested()
                return torch.tensor(torch.nan)
            self.optimization.set_norm(total_norm(self.optimizers))
        return self.norm_tensor

    def _check_norm_is_requested(self) -> None:
        """Raise if no hook requests the norm. A new hook reads NaN until all ranks know of it."""
        if not any({"grad_norm", "ctx"} & facts for facts in self.trainer.plan.asked_at.values()):
            raise HooklineError(
                "The gradients are sharded over the ranks, so all ranks must compute their norm together. "
                "They do so only if a hook requests it by name: `def on_step_end(self, grad_norm)`. No hook "
                "does."
            )

    @property
    def outputs(self) -> Any:
        """The value that the step returned, detached."""
        known = self.cache.get("outputs")  # `_once` inlined, because many listeners request it
        if known is None or known[0] is not self.returned:
            known = self.cache["outputs"] = (self.returned, detach_all(self.returned))
        return known[1]

    @property
    def metrics(self) -> Metrics:
        """The newest reduced values."""
        return self.log.newest

    @property
    def batch_metrics(self) -> Metrics:
        """This batch's values under plain keys, including `loss`."""
        made: Metrics = self._once(
            "batch_metrics", self.returned, lambda returned: Metrics(self._batch_values(returned))
        )
        return made

    def _batch_values(self, returned: Any) -> dict[str, Any]:
        values: dict[str, Any] = (
            {k: v for k, v in returned.items() if is_scalar(v)} if isinstance(returned, dict) else {}
        )
        values = {
            key: value.detach() if isinstance(value, Tensor) else value for key, value in values.items()
        }
        if self.last_loss is not None:
            values["loss"] = self.last_loss
        return {**values, **self.log.batch_values}

    @property
    def lr(self) -> float | None:
        """The learning rate of the first parameter group."""
        return self.optimizers[0].param_groups[0]["lr"] if self.optimizers else None

    @property
    def fetch_seconds(self) -> float | None:
        """Seconds that the loop waited for this batch."""
        return None if self.fetch_ns is None else self.fetch_ns / 1e9

    @property
    def sample_ids(self) -> list[int] | None:
        """The indices of the batch's samples in the dataset."""
        return None if self.indices_of is None else self.indices_of(self.batch_idx)

    @property
    def timings(self) -> Timings | None:
        """The time spent in each part of this fit so far; None outside of a fit."""
        measured: Timings | None = None if self.timer is None else self.timer.timings()
        return measured

    @property
    def ctx(self) -> StepContext:
        """The current update as one object."""
        made: StepContext = self._once("ctx", self.last_loss, lambda loss: self._make_ctx())
        return made

    def _make_ctx(self) -> StepContext:
        nan = float("nan")
        loss, norm = (
            self.mean_of_window() if self.shared_loss is None else self.shared_loss,
            self.norm_on_device(),
        )
        return StepContext(
            self.step,
            nan if loss is None else self._reader(loss),
            nan if norm is None else self._once("read norm", norm, OnceFloat),
            nan if self.used_lr is None else self.used_lr,
            self.tokens_seen,
            self.module,
            self.optimizers[0] if self.optimizers else None,
            epoch=self.epoch,
            rank=self.rank,
            world_size=self.world_size,
            metrics=self.batch_metrics,
        )

    @property
    def position(self) -> str:
        """The epoch, batch and step, for messages; in an evaluation also its batch."""
        trained = self.current.interrupted_batch
        if trained is None:
            return f"epoch {self.epoch}, batch {self.batch_idx}, step {self.step}"
        name = PASSES.get(self.stage, "validation") if not self.sanity_checking else "sanity check"
        loader = f" of loader {self.dataloader_name!r}" if self.current.several_loaders else ""
        inside = f"{name} batch {self.batch_idx}{loader}"
        at = f"epoch {self.epoch}, batch {trained}, step {self.step}, "
        return f"{at if self.stage == 'fit' else ''}{inside}"

    @property
    def progress(self) -> str:
        """The progress of the run as text, with completed epochs."""
        return progress(
            self.step, self.epochs_seen, is_inside=self.epoch == self.epochs_seen and self.batches_seen > 0
        )

    # ---- what listeners may do -----------------------------------------------------------------------------

    def request_stop(self, reason: str, status: str = "stopped", raises: BaseException | None = None) -> None:
        """End the run at the next batch boundary, as `trainer.stop` does."""
        check_choice("status", status, ("stopped", "pruned"))
        self.ending.request_stop(reason, status, raises)

    def replace(self, name: str, value: Any) -> None:
        """Replace an attribute by the value that a listener returned."""
        if name == "row" and not isinstance(value, Metrics):
            value = Metrics(value)
        elif name == "live_loss" and not (isinstance(value, Tensor) and value.requires_grad):
            raise LossError(
                f"{type(value).__name__} {str(value)[:60]!r} was returned as the loss, and cannot be "
                "differentiated. Return a tensor computed from the given loss, without .item(), .detach() or "
                "float(), or None to keep the given loss."
            )
        setattr(self.owner(name), name, value)

    def __repr__(self) -> str:
        return f"<State: {self.stage or 'idle'}, {self.position}, {self.status}>"


def progress(step: int, epochs: int | None, batches: int = 0, is_inside: bool = False) -> str:
    """Return the progress of a run as text: `step 812, 3 epochs and 12 batches`.

    epochs: completed epochs. batches: batches of the epoch after them; `is_inside` if their number is not
    known.
    """
    at, done = f"step {step:,}", count_noun(batches, "batch", "batches")
    if epochs is None:
        return at
    if epochs == 0 and (batches or is_inside):
        return f"{at}, {done} of the first epoch" if batches else f"{at}, in the first epoch"
    more = f" and {done}" if batches else " and part of the next" if is_inside else ""
    return f"{at}, {count_noun(epochs, 'epoch', 'epochs')}{more}"


def count_noun(number: int, one: str, many: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {one if number == 1 else many}"


def _mean_loss(losses: list[Any], count: float | None = None) -> Any:
    if not losses:
        return None
    if count is None:
        return torch.stack(losses).mean() if isinstance(losses[0], Tensor) else sum(losses) / len(losses)
    return (torch.stack(losses).sum() if isinstance(losses[0], Tensor) else sum(losses)) / count


def is_scalar(value: Any) -> bool:
    """Return whether a value in a step's dictionary is a metric: a number or a tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, float | int) and not isinstance(value, bool)


def loss_in(outputs: Any) -> Any:
    """Return the loss in what a model or a step returned: an entry or an attribute `loss`; None without."""
    if isinstance(outputs, Tensor):
        return outputs
    return outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)


def detach_all(value: Any) -> Any:
    """Return the same structure with every tensor detached."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: detach_all(each) for key, each in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(detach_all(each) for each in value)
    return value
