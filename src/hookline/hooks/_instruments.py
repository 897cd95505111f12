"""The metrics of a run as OpenTelemetry instruments: gauges of logged values, counters, durations."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from hookline.loggers.base import Logger

PREFIX = "hookline."
LOGGED = f"{PREFIX}metric."
"""What the gauge of a logged value is called before the name of the value."""
MOST_GAUGES = 2000
"""Names of logged values with a gauge; a run that logs more has names that change."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
"""The bounds of the histograms of durations."""
log = logging.getLogger("hookline")

Figures = Iterable[tuple[float, dict[str, Any]]]


class Counter(NamedTuple):
    """A number of the run that is read when metrics are exported, and the attributes of each series."""

    unit: str
    doc: str
    read: Callable[[Any], Figures]
    is_gauge: bool = False


def _seconds(s: Any) -> Figures:
    spent = s.timer.spent if s.timer is not None else {}
    return [(ns / 1e9, {"hookline.part": part}) for part, ns in spent.items()]


def _hook_seconds(s: Any) -> Figures:
    return [(each.spent / 1e9, {"hookline.hook": each.name}) for each in s.hooks.entries() if each.spent]


COUNTERS: Mapping[str, Counter] = {
    "steps": Counter("{step}", "Optimizer updates.", lambda s: [(s.step, {})]),
    "batches": Counter("{batch}", "Training batches.", lambda s: [(s.batches_seen, {})]),
    "samples": Counter("{sample}", "Training samples.", lambda s: [(s.samples_seen, {})]),
    "tokens": Counter(
        "{token}",
        "Training tokens, if a hook such as Throughput makes the run count them.",
        lambda s: [(s.tokens_seen, {})] if s.tokens_seen else [],
    ),
    "epoch": Counter("{epoch}", "The current epoch, from 0.", lambda s: [(s.epoch, {})], is_gauge=True),
    "time": Counter(
        "s",
        "Seconds in which the loop waited for data, validated or saved; `hookline.part` says which.",
        _seconds,
    ),
    "hook.time": Counter("s", "Seconds in the calls of each hook.", _hook_seconds),
}
"""By name, without the prefix. Reading them takes no time of the training."""
SKIPPED = "skipped_steps"
"""The counter of steps without an update."""


class Instruments:
    """The instruments of one meter. A meter cannot forget instruments, so runs join them and leave them."""

    _known: weakref.WeakKeyDictionary[Any, Instruments] = weakref.WeakKeyDictionary()

    def __init__(self, meter: Any) -> None:
        from opentelemetry.metrics import Observation
        from opentelemetry.trace import INVALID_SPAN, set_span_in_context

        self._no_span = set_span_in_context(INVALID_SPAN)
        """For each value: with a span it may become an exemplar, which is chosen by `random`."""
        self._meter = weakref.ref(meter)
        self._made: dict[str, Any] = {}
        self.runs: list[RunMetrics] = []
        for name, counter in COUNTERS.items():

            def observe(options: Any, counter: Counter = counter) -> list[Any]:
                return [
                    Observation(value, {**run.common, **about})
                    for run in list(self.runs)
                    for value, about in counter.read(run.state)
                ]

            make = meter.create_observable_gauge if counter.is_gauge else meter.create_observable_counter
            make(f"{PREFIX}{name}", [observe], counter.unit, counter.doc)

    @classmethod
    def of(cls, meter: Any) -> Instruments:
        """Return the instruments of a meter, made once."""
        if meter not in cls._known:
            cls._known[meter] = cls(meter)
        return cls._known[meter]

    def add_duration(self, name: str, seconds: float, about: dict[str, Any]) -> None:
        """Add to the histogram of a span's seconds."""
        self._instrument(
            f"{PREFIX}{name}.duration",
            lambda meter, full: meter.create_histogram(
                full, "s", f"Seconds of {name}.", explicit_bucket_boundaries_advisory=SECONDS
            ),
        ).record(seconds, about, self._no_span)

    def set_metric(self, name: str, value: float, about: dict[str, Any]) -> None:
        """Set the gauge of a logged value."""
        self._instrument(LOGGED + instrument_name(name), lambda meter, full: meter.create_gauge(full)).set(
            value, {**about, "hookline.metric": name}, self._no_span
        )

    def count_skips(self, count: int, about: dict[str, Any]) -> None:
        """Count steps without an update."""
        self._instrument(
            f"{PREFIX}{SKIPPED}",
            lambda meter, full: meter.create_counter(full, "{step}", "Steps without an update."),
        ).add(count, about, self._no_span)

    @property
    def is_full(self) -> bool:
        """Whether there are too many names of logged values for another one."""
        return len(self._made) >= MOST_GAUGES

    def __contains__(self, name: str) -> bool:
        return LOGGED + instrument_name(name) in self._made

    def _instrument(self, name: str, make: Callable[[Any, str], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make(self._meter(), name)
        return self._made[name]


def instrument_name(name: str) -> str:
    """Return the name of a logged value as OpenTelemetry allows it: `train/loss` -> `train.loss`."""
    return re.sub(r"[^a-zA-Z0-9_.-]", "_", name.replace("/", "."))[:200]


class RunMetrics(Logger):
    """The metrics of one run. It takes rows as a logger does, when the run has read them from the device."""

    queued = False
    tells_rows_apart = True

    def __init__(self, meter: Any, state: Any, common: dict[str, Any]) -> None:
        """Take an OpenTelemetry meter. common: attributes of all values."""
        self.state, self.common = state, common
        self._meter, self._instruments = meter, Instruments.of(meter)
        self._skips = 0
        self._has_warned = False
        self._instruments.runs.append(self)

    @property
    def label(self) -> str:
        return "OpenTelemetry"

    def add_duration(self, name: str, seconds: float, about: dict[str, Any]) -> None:
        """Add the seconds of a span to its histogram."""
        self._instruments.add_duration(name, seconds, {**self.common, **about})

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int, over: str = "step") -> None:
        about = {**self.common, "hookline.over": over}
        for name, value in metrics.items():
            if self._instruments.is_full and name not in self._instruments:
                if not self._has_warned:
                    self._has_warned = True
                    log.warning(
                        "OpenTelemetry: the run logs more than %d names; %r and others are left out",
                        MOST_GAUGES,
                        name,
                    )
                continue
            self._instruments.set_metric(name, value, about)

    def log_event(self, kind: str, data: Mapping[str, Any]) -> None:
        if kind == "skip":  # of many skips, some are logged, each with the number so far
            count, self._skips = int(data["number"]) - self._skips, int(data["number"])
            self._instruments.count_skips(count, {**self.common, "hookline.reason": str(data["reason"])})

    def leave(self) -> None:
        """End the counters of this run."""
        if self in self._instruments.runs:
            self._instruments.runs.remove(self)
