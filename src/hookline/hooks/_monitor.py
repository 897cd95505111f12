"""Find the metric that a hook monitors and compare its values."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Mapping
from typing import Annotated, Any

from hookline.engine.checks import Number, OneOf, check_bool, refused
from hookline.util.errors import OptionError, closest

log = logging.getLogger("hookline")

MODES = OneOf("min", "max")
Mode = Annotated[str, MODES]
NEARLY_THE_SAME = 0.85
"""Similarity from which a missing name counts as misspelt in the sanity check."""
COUNTERS = ("epoch", "step")
LOSSES = ("train/loss", "val/loss")
"""Metrics that every run has."""


class Monitored:
    """The metric `monitor` on behalf of a hook called `who`; lower is better with mode 'min', higher with
    'max'.
    """

    def __init__(
        self, who: str, monitor: str, mode: str = "min", min_delta: float = 0.0, strict: bool = True
    ) -> None:
        if not isinstance(monitor, str) or not monitor.strip() or not monitor.isprintable():
            raise refused(f"{who}: monitor", monitor, "the name of a metric, such as 'val/loss'")
        MODES(f"{who}: mode", mode)
        Number(0.0)(f"{who}: min_delta", min_delta)
        check_bool(f"{who}: strict", strict)
        # upper case is not a mistake: a metric of the user may be 'val/Loss'
        if strict and (meant := misspelt(monitor, LOSSES)) and meant != monitor.lower():
            raise OptionError(
                f"{who}: monitor={monitor!r}. Did you mean {meant!r}? If {monitor!r} is a metric of your "
                "own, pass strict=False.",
                option="monitor",
                value=monitor,
            )
        self.who, self.monitor, self.mode, self.min_delta, self.strict = (
            who,
            monitor,
            mode,
            float(min_delta),
            strict,
        )
        self._has_warned = False

    def find(self, metrics: Mapping[str, Any]) -> float | None:
        """Return the newest value. If it is missing, raise; with `strict=False` warn once and return None."""
        if self.monitor in metrics:
            return float(metrics[self.monitor])
        if self.strict:
            raise OptionError(self._missing(metrics) + " Pass strict=False to only be warned.")
        if not self._has_warned:
            log.warning(self._missing(metrics))
            self._has_warned = True
        return None

    def warn_of_nonfinite(self, value: float) -> None:
        """Warn once that a value is not finite, so that no checkpoint is the best by it."""
        if not math.isfinite(value) and not self._has_warned:
            log.warning(
                "%s monitors %r, which is %s: such a value is never the best.", self.who, self.monitor, value
            )
            self._has_warned = True

    def look_ahead(self, metrics: Mapping[str, Any]) -> None:
        """After the sanity check: refuse a name that is nearly that of a metric. Training may log others
        later.
        """
        alike = difflib.get_close_matches(self.monitor, list(metrics), n=1, cutoff=NEARLY_THE_SAME)
        if self.strict and alike and self.monitor not in metrics:
            raise OptionError(self._missing(metrics) + " Pass strict=False to only be warned.")

    def is_better(self, value: float, best: float | None) -> bool:
        """Return whether a value is better than the best by more than `min_delta`. NaN never is; every finite
        value is better than None.
        """
        if not math.isfinite(value):
            return False
        if best is None:
            return True
        gain = best - value if self.mode == "min" else value - best
        return gain > self.min_delta

    def passes(self, value: float, threshold: float) -> bool:
        """Return whether a value is better than a threshold."""
        return value < threshold if self.mode == "min" else value > threshold

    def _missing(self, metrics: Mapping[str, Any]) -> str:
        known = ", ".join(metrics) or "none yet"
        return (
            f"{self.who} monitors {self.monitor!r}, which was not "
            f"logged.{closest(self.monitor, metrics)} Metrics: {known}."
        )


def misspelt(name: str, known: tuple[str, ...]) -> str | None:
    """Return the known name that differs by case or by one missing, doubled or swapped letter."""
    given = name.lower()
    for right in known if name not in known else ():
        places = range(len(right))
        forms = {
            right,
            *(right[:i] + right[i + 1 :] for i in places),
            *(right[:i] + right[i] + right[i:] for i in places),
            *(right[:i] + right[i + 1 : i + 2] + right[i] + right[i + 2 :] for i in places),
        }
        if given in forms:
            return right
    return None


def no_validation_in(state: Any, validated: bool) -> bool:
    """Return at the end of a training epoch whether this run has no validation."""
    complete = state.epochs_seen == state.epoch + 1
    return (
        complete and not validated and state.epochs_seen % state.trainer.options.check_val_every_n_epoch == 0
    )
