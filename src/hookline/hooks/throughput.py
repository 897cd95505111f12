"""Log samples, tokens, batches and steps per second, and the utilization of the hardware."""

from __future__ import annotations

import time
from collections import deque
from typing import Annotated, Any, NamedTuple

from hookline.data.batch import first_array
from hookline.engine.checks import Count, Number, checked_parameters
from hookline.engine.hook import Hook
from hookline.util.errors import OptionError


class _Mark(NamedTuple):
    """The progress of the run at a moment."""

    seconds: float
    samples: int
    tokens: int
    batches: int
    steps: int


class Throughput(Hook):
    """Logs `throughput/samples_per_sec`, `tokens_`, `batches_` and `steps_per_sec`, and `throughput/mfu` if
    the FLOPs are given.

    Rates are over a moving window and leave out the time of validation. It does not synchronize with the
    device, which may be a few steps behind; a window of many steps averages this out. Samples and tokens are
    those of all ranks. `peak_flops` is that of one device, and `mfu` the utilization of all devices.
    """

    tier = "builtin"
    observes = True
    on_error = "warn"

    @checked_parameters
    def __init__(
        self,
        every: Annotated[int, Count(1)] = 50,
        window: Annotated[int, Count(1)] = 10,
        flops_per_sample: Annotated[float, Number(1.0)] | None = None,
        flops_per_token: Annotated[float, Number(1.0)] | None = None,
        peak_flops: Annotated[float, Number(1.0)] | None = None,
        tokens: bool | None = None,
    ) -> None:
        """`every`: steps between two reports. `window`: reports that a rate is the mean of.

        `flops_per_sample` or `flops_per_token`: FLOPs of forward and backward (a transformer: about 6 per
        parameter and token). `peak_flops`: FLOPs per second of the device. `tokens`: whether to log tokens;
        by default if a batch holds whole numbers, as token ids are.
        """
        if flops_per_sample is not None and flops_per_token is not None:
            raise OptionError(
                "Throughput: flops_per_sample and flops_per_token exclude each other; give one of them."
            )
        if peak_flops is not None and flops_per_sample is None and flops_per_token is None:
            raise OptionError("Throughput: peak_flops needs flops_per_sample or flops_per_token.")
        self.every = every
        self.flops_per_sample, self.flops_per_token, self.peak_flops = (
            flops_per_sample,
            flops_per_token,
            peak_flops,
        )
        self.tokens = tokens
        self._marks: deque[_Mark] = deque(maxlen=window + 1)
        self._evaluating = self._left_out = 0.0

    def on_train_start(self, state: Any, tokens_seen: int) -> None:
        """Start the window. The parameter `tokens_seen` makes the run count tokens."""
        self._left_out = 0.0
        self._marks.clear()
        self._marks.append(self._mark(state))

    def on_checkpoint_load(self) -> None:
        """Start the window again after a rollback, because the counts have gone back."""
        self._marks.clear()

    def on_validation_start(self) -> None:
        self._evaluating = time.perf_counter()

    def on_validation_end(self) -> None:
        self._left_out += time.perf_counter() - self._evaluating

    def on_step_end(self, step: int, state: Any) -> None:
        if step % self.every == 0:
            self._report(state)

    def on_train_epoch_end(self, state: Any) -> None:
        if len(self._marks) == 1 and state.step > self._marks[0].steps:  # so that a short run has one report
            self._report(state)

    def _mark(self, state: Any) -> _Mark:
        seconds = time.perf_counter() - self._left_out
        return _Mark(seconds, state.samples_seen, state.tokens_seen, state.batches_seen, state.step)

    def _report(self, state: Any) -> None:
        if not self._marks:  # added during the run
            self._marks.append(self._mark(state))
            return
        first, now = self._marks[0], self._mark(state)
        self._marks.append(now)
        seconds = max(now.seconds - first.seconds, 1e-9)
        samples, tokens = (now.samples - first.samples) / seconds, (now.tokens - first.tokens) / seconds
        rates = {
            "samples_per_sec": samples,
            "batches_per_sec": (now.batches - first.batches) / seconds,
            "steps_per_sec": (now.steps - first.steps) / seconds,
        }
        if self.tokens or (self.tokens is None and _holds_tokens(state.batch)):
            rates["tokens_per_sec"] = tokens
        if self.flops_per_sample is not None or self.flops_per_token is not None:
            flops = samples * (self.flops_per_sample or 0.0) + tokens * (self.flops_per_token or 0.0)
            rates["flops_per_sec"] = flops
            if self.peak_flops is not None:
                rates["mfu"] = flops / (self.peak_flops * state.world_size)
        state.trainer.log_dict({f"throughput/{name}": rate for name, rate in rates.items()})


def _holds_tokens(batch: Any) -> bool:
    """Return whether a batch holds whole numbers other than bytes, which are pixels."""
    return str(getattr(first_array(batch), "dtype", "")).endswith(("int16", "int32", "int64"))
