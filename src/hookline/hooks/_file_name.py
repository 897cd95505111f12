"""Name checkpoints by a template with the epoch, the step and metrics."""

from __future__ import annotations

import difflib
import math
import os
import string
from collections.abc import Callable
from typing import Any

from hookline.engine.checks import LONGEST_FILE_NAME, refused
from hookline.hooks._monitor import COUNTERS, LOSSES, NEARLY_THE_SAME, misspelt
from hookline.util.errors import OptionError, closest

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
        self.metrics = [field for _, field, _ in self.parts if field and field not in COUNTERS]
        """The metrics among the fields."""
        for field in self.metrics:
            if meant := misspelt(field, (*COUNTERS, *LOSSES)):
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


def _raw(metrics: Any) -> Any:
    """Return the stored values without reading the device. A new object means a newly logged value."""
    return metrics.raw() if hasattr(metrics, "raw") else metrics
