"""Several loaders as Lightning draws from them: in training one batch of each, in an evaluation one loader
after the other.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hookline.dialects.lightning.loaders import are_loaders


def loaders_in_turn(given: Any, kind: str, of_lightning: Callable[[str, str], Any]) -> Any:
    """What `train_dataloader` and its like have returned, `kind` one of 'train', 'val',
    'test' and 'predict'.
    """
    combined = of_lightning("utilities.combined_loader", "CombinedLoader")
    if kind == "train" and isinstance(given, list | tuple | dict):
        given = combined(given, "max_size_cycle")
    if not isinstance(given, combined):
        return given
    return given.flattened if kind != "train" and given._mode == "sequential" else SideBySide(given)


def given_in_turn(
    given: Mapping[str, Any], of_lightning: Callable[[str, str], Any], mixes: bool
) -> dict[str, Any]:
    """What fit and its like were given; a list of batches is one loader, and who says how to mix several
    means Hookline's way.
    """
    found = dict(given)
    for kind, each in given.items():
        is_one = isinstance(each, list | tuple | dict) and not are_loaders(each)
        if not (kind == "train" and (mixes or is_one)):
            found[kind] = loaders_in_turn(each, kind, of_lightning)
    return found


def asked_in_turn(
    ask: Callable[[], Any], method: str, of_lightning: Callable[[str, str], Any]
) -> Callable[[], Any]:
    """A `train_dataloader`, `val_dataloader`, ... that returns what Hookline's loop draws from in Lightning's
    way.
    """
    kind = method.removesuffix("_dataloader")
    return functools.wraps(ask)(lambda: loaders_in_turn(ask(), kind, of_lightning))


class SideBySide:
    """A CombinedLoader that yields its batches alone."""

    def __init__(self, combined: Any) -> None:
        self.combined = combined

    def __iter__(self) -> Iterator[Any]:
        for batch, _, _ in self.combined:
            yield batch

    def __len__(self) -> int:
        # its own length exists only once it is iterated over, and beginning anew in the middle of an epoch
        # would lose its place
        combined = self.combined
        mode = sys.modules[type(combined).__module__]._SUPPORTED_MODES[combined._mode]
        return len(mode["iterator"](combined.flattened, combined.limits))
