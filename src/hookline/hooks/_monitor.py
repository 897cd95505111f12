"""Find the metric that a hook monitors, compare its values, decide when to check it, and name checkpoints."""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
import string
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from hookline.engine.checks import LONGEST_FILE_NAME, Number, OneOf, check_bool, refused
from hookline.engine.hook import Hook
from hookline.metrics.direction import ROUNDING, K, best_first, is_same, mode_of
from hookline.util.errors import OptionError, closest

log = logging.getLogger("hookline")

MODES = OneOf("auto", "min", "max")
Mode = Annotated[str, MODES]
NEARLY_THE_SAME = 0.85
"""Similarity from which a missing name counts as misspelt in the sanity check."""
NO_METRIC = "-"
"""The name for a hook that may monitor a metric and monitors none."""
NAME_COUNTERS = ("epoch", "step")
LOSSES = ("train/loss", "val/loss")
"""Metrics that every run has."""
OF_TRAINING = frozenset({"train", "training"})
OF_EVALUATION = frozenset({"val", "valid", "validation", "eval", "dev", "test"})
"""Words in the names of metrics that say where they come from."""


class Monitored:
    """The metric `monitor` on behalf of a hook called `who`; lower is better with mode 'min', higher with
    'max'. With 'auto' the words of its name decide.
    """

    def __init__(
        self, who: str, monitor: str, mode: str = "auto", min_delta: float = 0.0, strict: bool = True
    ) -> None:
        if not isinstance(monitor, str) or not monitor.strip() or not monitor.isprintable():
            raise refused(f"{who}: monitor", monitor, "the name of a metric, such as 'val/loss'")
        MODES(f"{who}: mode", mode)
        Number(0.0)(f"{who}: min_delta", min_delta)
        check_bool(f"{who}: strict", strict)
        # upper case is not a mistake: a metric of the user may be 'val/Loss'
        if strict and (meant := nearest_known(monitor, LOSSES)) and meant != monitor.lower():
            raise OptionError(
                f"{who}: monitor={monitor!r}. Did you mean {meant!r}? If {monitor!r} is a metric of your "
                "own, pass strict=False.",
                option="monitor",
                value=monitor,
            )
        self.who, self.monitor, self.min_delta, self.strict = who, monitor, float(min_delta), strict
        self.rounding = ROUNDING
        """The relative difference up to which values are equal."""
        self.is_by_name = mode == "auto" and monitor != NO_METRIC
        """Whether the name of the metric has decided about the mode."""
        self.mode = mode_of(monitor) if mode == "auto" else mode
        """'min' or 'max'."""
        self._is_quiet = False
        self._has_warned = self._has_waited = False

    def begin(self, stage: str, rank: int) -> None:
        """Let only rank zero of a fit log messages. Log that higher is better, if the name has decided it."""
        self._is_quiet, self._has_waited = stage != "fit" or rank != 0, False
        if self.is_by_name and self.mode == "max" and not self._is_quiet:
            log.info(
                "%s: higher is better for %r, by its name (mode='max'). Pass mode='min' for the opposite.",
                self.who,
                self.monitor,
            )

    def warn(self, text: str, *values: Any) -> None:
        """Log a warning, once in a run with several ranks."""
        if not self._is_quiet:
            log.warning(text, *values)

    def saved_with(self) -> dict[str, str]:
        """Return what a saved best value depends on; empty texts without a metric."""
        if self.monitor == NO_METRIC:
            return {"monitor": "", "mode": ""}
        return {"monitor": self.monitor, "mode": self.mode}

    def difference(self, state: Mapping[str, Any]) -> str:
        """Return how the saved state of a hook differs in metric or mode, in words; empty if it does not.

        An older state does not have them. Then a mode by name was the default of that time, 'min'.
        """
        now = self.saved_with()
        earlier = {**now, "mode": "min"} if self.is_by_name else now
        old = {key: state.get(key, value) for key, value in earlier.items()}
        changed = [key for key in now if old[key] != now[key]]
        if not changed:
            return ""
        why = ", by the name of the metric" if self.is_by_name and "mode" in changed else ""
        saved, here = (
            " and ".join(f"{key}={values[key] or None!r}" for key in changed) for values in (old, now)
        )
        return f"{self.who}: the checkpoint was saved with {saved}, and the hook has {here}{why}"

    def find(self, metrics: Mapping[str, Any]) -> float | None:
        """Return the newest value. If it is missing, raise; with `strict=False` warn once and return None."""
        if self.monitor in metrics:
            return float(metrics[self.monitor])
        if self.strict:
            raise OptionError(self._missing(metrics) + " Pass strict=False to only be warned.")
        if not self._has_warned:
            self.warn("%s", self._missing(metrics))
            self._has_warned = True
        return None

    def warn_of_nonfinite(self, value: float) -> None:
        """Warn once that a value is not finite, so that no checkpoint is the best by it."""
        if not math.isfinite(value) and not self._has_warned:
            self.warn(
                "%s monitors %r, which is %s: such a value is never the best.", self.who, self.monitor, value
            )
            self._has_warned = True

    def warn_of_waiting(self, interval: str, is_of_training: bool) -> None:
        """Warn once in a run that nothing is saved at an interval without a new value, and say what is."""
        if self._has_waited:
            return
        self._has_waited = True
        until, instead = (
            ("epoch end", "monitor a value that training_step logs")
            if is_of_training
            else ("validation", "validate as often: Trainer(val_check_interval=...)")
        )
        self.warn(
            "%s",
            f"{self.who}(monitor={self.monitor!r}, {interval}) saves when its metric has a new value, and it "
            f"had none since the last time: the checkpoint waits for the next {until}. To save at every "
            f"interval, add a second one without a monitor: {self.who}({interval}, dirpath='by_time'). Or "
            f"{instead}.",
        )

    def look_ahead(self, metrics: Mapping[str, Any]) -> None:
        """After the sanity check: refuse a name that is nearly that of a metric, and warn of one that is
        similar. Training may log others later.
        """
        if self.monitor in metrics or not self.strict:
            return
        if difflib.get_close_matches(self.monitor, list(metrics), n=1, cutoff=NEARLY_THE_SAME):
            raise OptionError(self._missing(metrics) + " Pass strict=False to only be warned.")
        words = set(re.findall("[a-z]+", self.monitor.lower()))
        if words & OF_EVALUATION and closest(self.monitor, metrics):
            self.warn("After the sanity check: %s", self._missing(metrics))

    def may_follow(self, state: Any, metrics: Mapping[str, Any]) -> bool:
        """Return whether a validation that has not run yet may log the missing metric, in a loop of which it
        is not known whether it validates. A misspelt metric of training is not waited for.
        """
        if self.monitor == NO_METRIC or self.monitor in metrics or state.trainer.plans_validations:
            return False
        words = set(re.findall("[a-z]+", self.monitor.lower()))
        if words & (OF_EVALUATION | OF_TRAINING):
            return not words & OF_TRAINING
        return not difflib.get_close_matches(self.monitor, list(metrics), n=1, cutoff=NEARLY_THE_SAME)

    def warn_of_no_check(self) -> None:
        """Warn at the end of a run that the metric was never checked."""
        self.warn("%s never checked %r: the run ended before a check was due.", self.who, self.monitor)

    def is_better(self, value: float, best: float | None) -> bool:
        """Return whether a value is better than the best by more than `min_delta` and by more than rounding.
        NaN never is; every finite value is better than None.
        """
        if not math.isfinite(value):
            return False
        if best is None:
            return True
        gain = best - value if self.mode == "min" else value - best
        return gain > self.min_delta and not is_same(value, best, self.rounding)

    def best_first(self, scores: Mapping[K, float]) -> list[K]:
        """Return the keys, that of the best score first; of equal scores the first in the mapping."""
        return best_first(scores, self.mode, self.rounding)

    def passes(self, value: float, threshold: float) -> bool:
        """Return whether a value is better than a threshold."""
        return value < threshold if self.mode == "min" else value > threshold

    def _missing(self, metrics: Mapping[str, Any]) -> str:
        known = ", ".join(metrics) or "none yet"
        # at the first validation, the loss of training is not logged yet
        names = metrics if self.monitor in LOSSES else [*metrics, *LOSSES]
        origin = " It is the mean of the losses that validation_step returns." * (self.monitor == "val/loss")
        return (
            f"{self.who} monitors {self.monitor!r}, which was not "
            f"logged.{origin}{closest(self.monitor, names)} Metrics: {known}."
        )


def nearest_known(name: str, known: tuple[str, ...]) -> str | None:
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


class MetricCheck(Hook):
    """Base of hooks that check a metric after every validation, or at the end of training epochs."""

    tier = "monitor"

    def __init__(
        self, watch: Monitored, check_on_train_epoch_end: bool | None = None, name: str | None = None
    ) -> None:
        """Take the metric. check_on_train_epoch_end: True: at epoch ends; False: after validations; None:
        after validations if there are any, but at epoch ends for a metric of training.
        """
        super().__init__(name)
        self.watch = watch
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.needs_metrics = (watch.monitor,) if watch.strict else ()
        self.needs_validation = watch.strict and check_on_train_epoch_end is False
        self._validated = False

    @property
    def mode(self) -> str:
        """Whether 'min' or 'max' is better."""
        return self.watch.mode

    def _check(self, state: Any, metrics: Any) -> None:
        """Check the metric now."""
        raise NotImplementedError

    def on_validation_end(self, state: Any, metrics: Any) -> None:
        if state.stage != "fit":
            return
        self._validated = True
        if state.sanity_checking:
            if not self.check_on_train_epoch_end:
                self.watch.look_ahead(metrics)
        elif not self._at_epoch_end(state):
            self._check(state, metrics)

    def on_train_epoch_end(self, state: Any, metrics: Any) -> None:
        if not self._validated and self.watch.may_follow(state, metrics):
            return  # the first validation decides
        if self._at_epoch_end(state):
            self._check(state, metrics)
        elif no_validation_in(state, self._validated):
            if self.check_on_train_epoch_end is None:
                self._check(state, metrics)
            elif self.watch.strict and state.trainer.plans_validations:
                raise OptionError(
                    f"{self.watch.who} checks after validations, but this run has none: pass a validation "
                    "loader, or check_on_train_epoch_end=True."
                )

    def _at_epoch_end(self, state: Any) -> bool:
        chosen = self.check_on_train_epoch_end
        return bool(state.log.is_of_training(self.watch.monitor) if chosen is None else chosen)


# ---- names of checkpoints ----------------------------------------------------------------------------------


WHO = "ModelCheckpoint"
FORBIDDEN = set('/\\:*?"<>|') | {chr(code) for code in range(32)}
SUFFIX_BYTES = 26
"""Bytes that the temporary directory of a checkpoint adds to its name: `.NAME-v99.0123abcd-4194304.new`."""


class FileName(str):
    """A template of literal text and fields: {epoch}, {step}, or any metric's name, with a format after a
    colon.

    A subclass of str, so that the run record shows the template.
    """

    def __new__(cls, template: str, insert_names: bool = True) -> FileName:
        """Make the text. `insert_names` has a default, because a copy does not pass it."""
        return super().__new__(cls, template)

    def __init__(self, template: str, insert_names: bool = True) -> None:
        self.template, self.insert_names = template, insert_names
        try:
            self.parts = [
                (text, field, spec or "") for text, field, spec, _ in string.Formatter().parse(template)
            ]
            literal = "".join(text for text, _, _ in self.parts)
            for _, field, spec in self.parts:
                if field is not None:
                    sample = format(0 if field in ("epoch", "step") else 0.0, spec)
                    if set(spec) & FORBIDDEN or len(sample) > 64:
                        raise ValueError(f"the format {spec!r} does not make a file name")
        except (ValueError, TypeError) as error:
            raise OptionError(
                f"{WHO}: filename={template!r} is not a template ({error}). Write fields as {{epoch}}, "
                "{step:06d} or {val/loss:.2f}.",
                option="filename",
                value=template,
            ) from None
        self.metrics = [field for _, field, _ in self.parts if field and field not in NAME_COUNTERS]
        """The metrics among the fields."""
        for field in self.metrics:
            if meant := nearest_known(field, (*NAME_COUNTERS, *LOSSES)):
                raise OptionError(
                    f"{WHO}: filename={template!r} has the field {field!r}. Did you mean {meant!r}? Fields "
                    "are epoch, step and metrics, such as val/loss.",
                    option="filename",
                    value=template,
                )
        if any(field == "" for _, field, _ in self.parts):
            raise OptionError(
                f"{WHO}: filename={template!r} has an empty field {{}}; name it, such as {{epoch}}.",
                option="filename",
                value=template,
            )
        if not template or template.startswith(".") or set(literal) & FORBIDDEN or not template.strip():
            raise refused(
                f"{WHO}: filename",
                template,
                "one plain file name: no '/', no '..', nothing before it; choose the folder by dirpath",
            )
        self.check_length(LONGEST_FILE_NAME)

    def check_length(self, most: int) -> None:
        """Refuse a template whose longest names exceed the limit of the file system."""
        longest = dict.fromkeys(self.metrics, -1.2345678901234567e-300)
        made = self.fill(10**9, 10**9, longest, lambda name: True)
        if (length := len(os.fsencode(made))) > most - SUFFIX_BYTES:
            shown = self.template if len(self.template) < 80 else f"{self.template[:60]}..."
            raise OptionError(
                f"{WHO}: filename={shown!r} makes names of up to {length} bytes; the limit is "
                f"{most - SUFFIX_BYTES} ({most} less {SUFFIX_BYTES} for the temporary directory).",
                option="filename",
                value=shown,
            )

    def look_ahead(self, metrics: Any) -> None:
        """After the sanity check: refuse a field that is nearly the name of a metric. Training may log others
        later.
        """
        for field in self.metrics:
            alike = difflib.get_close_matches(field, list(metrics), n=1, cutoff=NEARLY_THE_SAME)
            if alike and field not in metrics:
                raise self._missing(field, metrics)

    def _missing(self, field: str, known: Any) -> OptionError:
        return OptionError(
            f"{WHO}: filename={self.template!r} names {field!r}, which was not logged."
            f"{closest(field, known)} There are: {', '.join(known)}."
        )

    def fill(self, epoch: int, step: int, metrics: Any, may_come: Callable[[str], bool]) -> str:
        """Return the name. A missing metric is 'nan' if the epoch may still log it, else an error."""
        made = ""
        for text, field, spec in self.parts:
            made += text
            if field is None:
                continue
            known = {**metrics, "epoch": epoch, "step": step}
            if field not in known and not may_come(field):
                raise self._missing(field, known)
            value = known.get(field, math.nan)
            made += (f"{field}=" if self.insert_names else "") + format(value, spec)
        return "".join("_" if each in FORBIDDEN else each for each in made)


def raw_values(metrics: Any) -> Any:
    """Return the stored values without reading the device. A new object means a newly logged value."""
    return metrics.raw() if hasattr(metrics, "raw") else metrics
