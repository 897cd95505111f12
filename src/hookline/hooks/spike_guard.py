"""Find loss spikes: report them, skip the update, or go back to the last good checkpoint."""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from hookline.engine.checks import Above, Count, checked_parameters
from hookline.engine.hook import FunctionHook, Hook
from hookline.engine.source_text import parse_source, words_of
from hookline.hooks._samples import (
    Samples,
    check_can_exclude,
    exclude,
    find_bad_samples,
    find_samples,
    for_log,
    merge,
    name_command,
    name_samples,
)
from hookline.metrics.metric_log import read_all
from hookline.run.buffers import KeptBuffers
from hookline.util.errors import SKIP_BATCH, SKIP_STEP, HooklineError, OptionError, Signal

log = logging.getLogger("hookline")
WHO = "SpikeGuard"
NORMAL = 1.4826
"""The standard deviation of normal values over their median absolute deviation."""
LEAST_SCALE = 1e-3
"""The smallest scale as a fraction of the median, for values that hardly change."""


class Update(NamedTuple):
    """One update: its number, and the batches of its accumulation window."""

    step: int
    """The step that the update makes, as rows of metrics have it."""
    epoch: int
    first: int
    last: int

    @property
    def place(self) -> str:
        """Return where it is in the run."""
        return f"step {self.step} (epoch {self.epoch}, batch {self.last})"


NO_DECISION = (-1, -1, None)
Batches = tuple[int, int, int]
"""An epoch, and the first and last number of batches in it."""


class SpikeGuard(Hook):
    """Compares the loss of each update with the updates before it. A value far above their range is a spike.

    The range is the median of the last `window` values plus `threshold` times their median absolute
    deviation, scaled to a standard deviation. Unlike mean and standard deviation, it stays the same when
    spikes are among these values, so a spike does not hide the next one. A value that is not finite is a
    spike. The loss is the mean over the accumulation window and over all ranks, so all ranks decide alike.

    'report' reads losses from the device when a row of metrics is due. 'skip' and 'rollback' must decide
    before the update, and read once per update; so does monitor='grad_norm'. 'report' listens to
    on_step_end, the others to on_before_optimizer_step. The others also keep a copy of the module's buffers,
    such as the averages of batch norm, and put it back if a spike has made one of them non-finite. Of spikes
    in a row, the first is reported; the metric `spike/count` counts all.
    """

    tier = "builtin"
    may_listen = ("on_step_end", "on_before_optimizer_step", "on_after_optimizer_step")

    @checked_parameters
    def __init__(
        self,
        action: Literal["report", "skip", "rollback"] = "report",
        monitor: Literal["loss", "grad_norm"] = "loss",
        window: Annotated[int, Count(4)] = 128,
        threshold: Annotated[float, Above(0)] = 6.0,
        patience: Annotated[int, Count(1)] = 3,
        margin: Annotated[int, Count(1)] = 1,
        skip_batches: Annotated[int, Count(0)] = 0,
        max_rollbacks: Annotated[int, Count(1)] = 5,
        exclude: bool = False,
        name: str | None = None,
    ) -> None:
        """Choose what a spike is and what to do about it.

        action: 'report' it; 'skip' its update; 'rollback': skip its update, and after `patience` spikes in a
        row go back to the last good checkpoint and leave out the batches of these updates.
        monitor: 'loss', or 'grad_norm' (before clipping). window: the updates that make the range; before
        half of them, only a value that is not finite is a spike. threshold: standard deviations above the
        median. patience: spikes in a row before a rollback; a loss that is not finite does not wait.
        margin: a checkpoint is good if so many updates without a spike followed it. skip_batches: leave out
        so many batches before the spikes, too. max_rollbacks: the next one in a run is an error. exclude:
        with 'rollback', leave out the samples of these updates, in this epoch and all later ones, instead of
        their batches.
        """
        super().__init__(name)
        self.action, self.monitor, self.window, self.threshold = action, monitor, window, threshold
        self.patience, self.margin, self.skip_batches = patience, margin, skip_batches
        self.max_rollbacks, self.exclude = max_rollbacks, exclude
        if exclude and (action != "rollback" or skip_batches):
            raise OptionError(
                f"{WHO}: exclude=True is for action='rollback' without skip_batches: it leaves out the "
                "samples of the spikes.",
                option="exclude",
                value=exclude,
            )
        listeners = {
            ("report", "loss"): self._keep_loss,
            ("report", "grad_norm"): self._keep_norm,
            ("act", "loss"): self._act_on_loss,
            ("act", "grad_norm"): self._act_on_norm,
        }
        event = "on_step_end" if action == "report" else "on_before_optimizer_step"
        self.__dict__[event] = listeners["report" if action == "report" else "act", monitor]
        if action != "report":
            self.__dict__["on_after_optimizer_step"] = self._keep_buffers
        self._buffers: KeptBuffers | None = None
        self._ranks: Any = None
        self._leaving_out: Any = None
        """The handle of the hook that leaves batches out, while there are any."""
        self._begin()

    def _begin(self) -> None:
        self.spikes = self.rollbacks = 0
        """How many spikes were found, and how often the run went back because of them."""
        self.left_out: list[Batches] = []
        """The batches that are left out after a rollback."""
        self._decided: tuple[int, int, Signal | None] = NO_DECISION
        """The epoch and the last batch of the newest update, and the signal that was decided for it."""
        self._requested: list[Batches] | None = None
        """The batches to leave out once the requested rollback is carried out; None: none is requested."""
        self._missed = 0
        """How many requested rollbacks of the present series of spikes found no checkpoint."""
        self._has_warned = False
        """Whether the warning about an update without a value was logged."""
        self._is_loaded = False
        """Whether a checkpoint that is being restored has a state of this hook."""
        self._begin_values()

    def _begin_values(self) -> None:
        self._recent: deque[float] = deque(maxlen=self.window)
        self._series: list[Update] = []
        """The first updates of the present series of spikes, up to `patience`; empty without one."""
        self._samples: list[Samples] = []
        """The samples behind each of them."""
        self._unread: list[tuple[Any, Update]] = []
        """Values that wait to be read, for 'report'."""
        self._seen: tuple[int, int, bool] = (-1, 0, False)
        """The epoch of the newest update, the batch after it, and whether its value is among the recent."""

    def setup(self, stage: str, state: Any, hooks: Any) -> None:
        if stage != "fit":
            return
        self._begin()
        trainer = state.trainer
        self._ranks = trainer.strategy.ranks if hasattr(trainer, "strategy") else trainer.ranks
        if self.ranks != "all":
            raise OptionError(
                f"{WHO}: ranks={self.ranks!r}, but all ranks must decide alike; leave it at 'all'.",
                option="ranks",
                value=self.ranks,
            )
        if self.action != "rollback":
            return
        if not hasattr(trainer, "roll_back") or getattr(trainer, "rules", None) is not None:
            raise OptionError(
                f"{WHO}: action='rollback' works in a fit of hookline.Trainer; in another trainer or loop "
                "use action='skip'.",
                option="action",
                value=self.action,
            )
        if not trainer.options.saving.last and not _saves_checkpoints([*hooks.entries()], state.module):
            raise OptionError(
                f"{WHO}: action='rollback' needs checkpoints to go back to, and this run saves none: leave "
                "checkpoint=False out, or add ModelCheckpoint(every_n_train_steps=...).",
                option="action",
                value=self.action,
            )

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if self.exclude:
            check_can_exclude(WHO, trainer)
        self._buffers = None if self.action == "report" else KeptBuffers(module)

    def _keep_buffers(self) -> None:
        if self._buffers is not None:
            self._buffers.keep()

    def teardown(self) -> None:
        self._buffers = None
        handle, self._leaving_out = self._leaving_out, None
        if handle is not None:
            handle.remove()

    @property
    def _is_alone(self) -> bool:
        return self._ranks is None or bool(self._ranks.alone)

    # ---- report: values stay on the device until a row of metrics is due -----------------------------------

    def _keep_loss(self, state: Any) -> None:
        self._keep(state, state.mean_of_window())

    def _keep_norm(self, state: Any, grad_norm: float) -> None:
        self._keep(state, grad_norm)

    def _keep(self, state: Any, value: Any) -> None:
        self._unread.append((value, Update(state.step, state.epoch, state.batch_idx, state.batch_idx)))
        if state.step % state.trainer.options.log_every_n_steps == 0:
            self._read(state)

    def on_train_end(self, state: Any) -> None:
        if self._unread:
            self._read(state)

    def _read(self, state: Any) -> None:
        unread, self._unread = self._unread, []
        values = self._over_ranks([value for value, _ in unread])
        for value, (_, update) in zip(values, unread, strict=True):
            if value is None:
                self._warn_of_no_value(update)
            else:
                self._add(value, update, self._is_spike(value), state)

    def _warn_of_no_value(self, update: Update) -> None:
        """Warn once that there is nothing to judge: a loop of its own may not call `line.backward`."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: %s has no %s, so it is not checked. In a loop with hookline.Line, call "
                "line.backward(loss) instead of loss.backward(); with manual optimization, "
                "self.manual_backward(loss).",
                WHO,
                update.place,
                self.monitor,
            )

    def _over_ranks(self, values: Sequence[Any]) -> list[float | None]:
        """Return the mean of each value over the ranks that have one, with one read of the device. None: no
        rank has one.
        """
        known = read_all({str(index): each for index, each in enumerate(values) if each is not None})
        own = [number for index in range(len(values)) for number in _weighted(known.get(str(index)))]
        rows = [own] if self._is_alone else self._ranks.gather_numbers(own)
        totals = [sum(column) for column in zip(*rows, strict=True)]
        return [
            total / weight if weight else None
            for total, weight in zip(totals[::2], totals[1::2], strict=True)
        ]

    # ---- skip and rollback: the decision before the update -------------------------------------------------

    def _act_on_loss(self, state: Any, loss: float | None) -> Signal | None:
        # in other loops, and with manual optimization, each rank has its own loss
        if self._is_decided(state):
            return self._decided[2]
        return self._decide(state, loss, state.shared_loss is None)

    def _act_on_norm(self, state: Any, grad_norm: float | None) -> Signal | None:
        return self._decided[2] if self._is_decided(state) else self._decide(state, grad_norm, True)

    def _is_decided(self, state: Any) -> bool:
        """Return whether the decision is made: an update calls every optimizer."""
        return self._decided[:2] == (state.epoch, state.batch_idx)

    def _decide(self, state: Any, value: float | None, is_local: bool) -> Signal | None:
        if is_local and not self._is_alone:
            (value,) = self._over_ranks([value])
        update = Update(state.step + 1, state.epoch, self._first_batch(state), state.batch_idx)
        self._forget_repeated(update)
        is_spike = value is not None and self._is_spike(value)
        # of a loss that stays NaN, the first requests may have found no checkpoint
        self._missed = (self._missed + (self._requested is not None)) * is_spike
        is_due = len(self._series) + 1 == self.patience or not math.isfinite(value or 0.0)
        goes_back = self.action == "rollback" and is_spike and is_due
        if goes_back and self.rollbacks + self._missed >= self.max_rollbacks:
            # before anything changes: a resume repeats it
            missed = f", and had no checkpoint to go back to {self._missed} times" if self._missed else ""
            raise HooklineError(
                f"{WHO}: {self.monitor} {value:.6g} at {state.position} is a spike, and the run has gone "
                f"back {self.rollbacks} times already{missed} (max_rollbacks={self.max_rollbacks}). Lower "
                "the learning rate, look at the batches in `left_out`, or pass a larger margin or "
                "max_rollbacks, and resume."
            )
        is_added = value is not None and math.isfinite(value)
        signal = SKIP_STEP if is_spike else None
        self._decided = (update.epoch, update.last, signal)
        self._seen = (update.epoch, update.last + 1, is_added)
        self._requested = None
        if is_spike and self._buffers is not None:
            self._buffers.put_back_and_warn()
        if value is None:
            self._warn_of_no_value(update)
        else:
            self._add(value, update, is_spike, state)
        if goes_back:
            self._request_rollback(state, value)
        return signal

    def _first_batch(self, state: Any) -> int:
        """Return the first batch of the window: after the last update, and not left out."""
        epoch, after, _ = self._seen
        last = int(state.batch_idx)
        first = after if epoch == state.epoch else 0 if epoch >= 0 else last
        while self.left_out and first < last and self.is_left_out(state.epoch, first):
            first += 1
        return min(first, last)

    def _forget_repeated(self, update: Update) -> None:
        """Forget an update that was checked before the run failed in it, because a resume repeats it."""
        epoch, after, is_added = self._seen
        if (epoch, after) != (update.epoch, update.last + 1):
            return
        if is_added and self._recent:
            self._recent.pop()
        if self._series and (self._series[-1].epoch, self._series[-1].last) == (update.epoch, update.last):
            self._series.pop()
            self._samples.pop()
            self.spikes -= 1

    def _request_rollback(self, state: Any, value: float | None) -> None:
        first, last, count = self._series[0], self._series[-1], len(self._series)
        reason = f"{WHO}: {self.monitor} {value:.6g} at {last.place}"
        width = first.last - first.first + 1  # whole windows, so that the others keep their batches
        start = max(0, first.first - -(-self.skip_batches // width) * width)
        self._requested = [
            (first.epoch, start, first.last),
            *((each.epoch, each.first, each.last) for each in self._series[1:]),
        ]
        if self.exclude and (samples := merge(self._samples)):
            self._requested = []
            exclude(state.trainer, samples, reason)
        state.trainer.roll_back(
            before=max(0, first.step - 1 - self.margin),
            reason=reason + (f", the last of {count} spikes in a row" if count > 1 else ""),
            on_missing="continue",
        )

    def on_checkpoint_load(self, state: Any) -> None:
        """Leave out batches that are still ahead, after a rollback and in a run that resumes after one."""
        if not self._is_loaded:
            self._begin_values()  # those of the abandoned steps are not the range of the restored ones
        self._is_loaded, self._decided = False, NO_DECISION
        self._keep_buffers()
        if self._requested is not None:
            self.left_out, self._requested = sorted({*self.left_out, *self._requested}), None
            self.rollbacks += 1
        ahead = any(epoch >= state.epochs_seen for epoch, _, _ in self.left_out)
        if self.action == "rollback" and ahead and self._leaving_out is None:
            self._leaving_out = state.trainer.add_hook(LeaveOut(self))

    def is_left_out(self, epoch: int, batch: int) -> bool:
        """Return whether a batch is left out."""
        return any(epoch == of and first <= batch <= last for of, first, last in self.left_out)

    def end_leaving_out(self, epoch: int, batch: int) -> None:
        """Remove the hook that leaves batches out, when no further ones are ahead of this one."""
        if self._leaving_out is not None and all(
            (of, last) < (epoch, batch) for of, _, last in self.left_out
        ):
            handle, self._leaving_out = self._leaving_out, None
            handle.remove()

    # ---- the range -----------------------------------------------------------------------------------------

    def _is_spike(self, value: float) -> bool:
        return not value <= self._range()[1]  # NaN too

    def _add(self, value: float, update: Update, is_spike: bool, state: Any) -> None:
        """Add the value of an update to the recent ones. Report a spike, if it is the first of a series."""
        if is_spike:
            self.spikes += 1
            state.trainer.log("spike/count", self.spikes, reduce="max")
            if len(self._series) < self.patience:
                samples = self._find_samples(value, update, state)
                if not self._series:
                    self._report(value, update, samples, state)
                self._series.append(update)
                self._samples.append(samples)
        else:
            self._series.clear()
            self._samples.clear()
        if math.isfinite(value):
            self._recent.append(value)

    def _find_samples(self, value: float, update: Update, state: Any) -> Samples:
        """Return the samples behind an update; of a loss that is not finite, only those that are not."""
        if self.action == "report":
            return find_samples(state.trainer, update.step)
        bad: Samples = {}
        if not math.isfinite(value):
            bad = find_bad_samples(state)
            bad = bad if self._is_alone else merge(self._ranks.gather(bad))
        return bad or find_samples(state.trainer)

    def _range(self) -> tuple[float, float]:
        """Return the median of the recent values, and the limit above which a value is a spike."""
        if len(self._recent) < self.window // 2:
            return math.nan, sys.float_info.max  # only values that are not finite
        center = _median(self._recent)
        spread = NORMAL * _median(abs(each - center) for each in self._recent)
        return center, center + self.threshold * max(spread, LEAST_SCALE * abs(center))

    def _report(self, value: float, update: Update, samples: Samples, state: Any) -> None:
        center, limit = self._range()
        data = {
            "step": update.step,
            "epoch": update.epoch,
            "batch": update.last,
            "monitor": self.monitor,
            "value": value,
            "median": center,
            "limit": limit,
            "action": self.action,
            "number": self.spikes,
            **for_log(samples),
        }
        state.logger.log_event("spike", data)
        if state.rank == 0:
            why = (
                f"is above its range: the last {len(self._recent)} updates have a median of {center:.6g}, "
                f"the limit is {limit:.6g}"
                if math.isfinite(value)
                else "is not finite"
            )
            then = "" if self.action == "report" else " The update is skipped."
            named = name_samples(samples)
            if self.action != "report" and not self.exclude:
                named += name_command(state.trainer, samples)
            log.warning("%s: %s %.6g at %s %s.%s%s", WHO, self.monitor, value, update.place, why, then, named)

    # ---- its own state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        values = read_all(
            {str(index): value for index, (value, _) in enumerate(self._unread) if value is not None}
        )
        return {
            "recent": list(self._recent),
            "series": [list(each) for each in self._series],
            "samples": self._samples,
            "unread": [[values.get(str(i), math.nan), *each] for i, (_, each) in enumerate(self._unread)],
            "seen": list(self._seen),
            "spikes": self.spikes,
            "rollbacks": self.rollbacks,
            "left_out": [list(each) for each in self.left_out],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state. Counts and left-out batches of this process are kept: they are newer."""
        self._recent = deque(state["recent"], maxlen=self.window)
        self._series = [Update(*each) for each in state["series"]]
        self._samples = list(state.get("samples", [{} for _ in self._series]))
        self._unread = [(value, Update(*each)) for value, *each in state["unread"]]
        epoch, after, is_added = state["seen"]
        self._seen, self._is_loaded = (epoch, after, bool(is_added)), True
        self.spikes = max(self.spikes, state["spikes"])
        self.rollbacks = max(self.rollbacks, state["rollbacks"])
        saved = [(int(epoch), int(first), int(last)) for epoch, first, last in state["left_out"]]
        self.left_out = sorted({*self.left_out, *saved})


class LeaveOut(Hook):
    """Skips the batches that a `SpikeGuard` leaves out. It is a hook of its own, because on several ranks a
    hook that may skip a batch makes the ranks wait for each other before every batch.
    """

    tier = "builtin"

    def __init__(self, guard: SpikeGuard) -> None:
        super().__init__(f"{guard.name or 'spike_guard'}_leave_out")
        self._guard = guard

    def on_train_batch_start(self, epoch: int, batch_idx: int) -> Signal | None:
        if self._guard.is_left_out(epoch, batch_idx):
            return SKIP_BATCH
        self._guard.end_leaving_out(epoch, batch_idx)
        return None


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _weighted(value: float | None) -> tuple[float, float]:
    return (0.0, 0.0) if value is None else (value, 1.0)


def _saves_checkpoints(entries: Sequence[Any], module: Any) -> bool:
    """Return whether a hook or the module calls `save_checkpoint`, by the text of its source."""
    hooks = [each.given for each in entries if not isinstance(each.given, SpikeGuard)]
    functions = [each.function for each in hooks if isinstance(each, FunctionHook)]
    classes = [
        cls
        for each in (*hooks, module)
        for cls in type(each).__mro__
        if not cls.__module__.startswith(("builtins", "torch.", "hookline.engine.", "hookline.run."))
    ]
    trees = [parse_source(each) for each in (*functions, *classes)]
    return any(tree is None or "save_checkpoint" in words_of(tree) for tree in trees)
