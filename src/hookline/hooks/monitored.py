"""A metric that a hook watches: finding it, and telling what is better. Also the checks that monitors share."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Mapping
from typing import Any

from hookline.errors import OptionError, closest
from hookline.options import check_bool

log = logging.getLogger("hookline")

MODES = ("min", "max")
NEARLY_THE_SAME = 0.85
"""From this similarity on, a name that is missing is taken for a misspelt one already in the sanity check."""


class Monitored:
    """The metric `monitor` on behalf of a hook called `who`; lower is better with mode 'min', higher with 'max'."""

    def __init__(self, who: str, monitor: str, mode: str = "min", min_delta: float = 0.0, strict: bool = True) -> None:
        if not isinstance(monitor, str) or not monitor.strip():
            raise OptionError(f"{who}: monitor={monitor!r} must be the name of a metric, such as 'val/loss'.")
        if mode not in MODES:
            raise OptionError(f"{who}: mode={mode!r}, allowed: 'min', 'max'.{closest(str(mode), MODES)}")
        check_number(who, "min_delta", min_delta, least=0.0)
        check_bool(f"{who}: strict", strict)
        self.who, self.monitor, self.mode, self.min_delta, self.strict = who, monitor, mode, float(min_delta), strict
        self._said = False

    def find(self, metrics: Mapping[str, Any]) -> float | None:
        """Its newest value. A missing one is an error, or with `strict=False` a warning, once, and None."""
        if self.monitor in metrics:
            return float(metrics[self.monitor])
        if self.strict:
            raise OptionError(self._missing(metrics) + " Pass strict=False to only be warned.")
        if not self._said:
            log.warning(self._missing(metrics))
            self._said = True
        return None

    def look_ahead(self, metrics: Mapping[str, Any]) -> None:
        """In the sanity check: refuse a name that is nearly a metric's. Others may still come, with the training."""
        alike = difflib.get_close_matches(self.monitor, list(metrics), n=1, cutoff=NEARLY_THE_SAME)
        if self.strict and alike and self.monitor not in metrics:
            raise OptionError(self._missing(metrics) + " Pass strict=False to only be warned.")

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether a value beats the best one by more than `min_delta`. NaN never does; anything finite beats None."""
        if not math.isfinite(value):
            return False
        if best is None:
            return True
        gain = best - value if self.mode == "min" else value - best
        return gain > self.min_delta

    def passes(self, value: float, threshold: float) -> bool:
        """Whether a value is on the good side of a threshold."""
        return value < threshold if self.mode == "min" else value > threshold

    def _missing(self, metrics: Mapping[str, Any]) -> str:
        known = ", ".join(metrics) or "none yet"
        return f"{self.who} monitors {self.monitor!r}, which was not logged.{closest(self.monitor, metrics)} Metrics: {known}."


def check_number(who: str, name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> None:
    """A finite number within limits."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not least <= value <= most:
        limits = f" from {least:g}" * (least > -math.inf) + f" to {most:g}" * (most < math.inf)
        raise OptionError(f"{who}: {name}={value!r} must be a number{limits}.")


def check_whole(who: str, name: str, value: Any, least: int) -> None:
    """A whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{who}: {name}={value!r} must be a whole number from {least}.")


def no_validation_in(state: Any, validated: bool) -> bool:
    """At the end of a training epoch: whether it is plain by now that this run has no validation."""
    complete = state.epochs_seen == state.epoch + 1
    return complete and not validated and state.epochs_seen % state.trainer.options.check_val_every_n_epoch == 0
