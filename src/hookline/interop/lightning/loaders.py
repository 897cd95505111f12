"""Several training loaders as Lightning draws from them: all at once."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hookline.data.sources import length_of


class SideBySide:
    """One batch from each loader, in the shape in which they were given; shorter ones begin again until the
    longest is over.
    """

    def __init__(self, loaders: Mapping[str, Any] | list[Any] | tuple[Any, ...]) -> None:
        self.names = list(loaders) if isinstance(loaders, Mapping) else None
        self.loaders = list(loaders.values() if isinstance(loaders, Mapping) else loaders)

    def __iter__(self) -> Iterator[Any]:
        drawn = [iter(each) for each in self.loaders]
        over: set[int] = set()
        while True:
            batches = []
            for index, loader in enumerate(self.loaders):
                batch = next(drawn[index], self)
                if batch is self:
                    over.add(index)
                    if len(over) == len(self.loaders):
                        return
                    drawn[index] = iter(loader)
                    batch = next(drawn[index])
                batches.append(batch)
            yield batches if self.names is None else dict(zip(self.names, batches, strict=True))

    def __len__(self) -> int:
        lengths = [length_of(each) for each in self.loaders]
        if None in lengths:
            raise TypeError("one of the loaders has no length")
        return max(each for each in lengths if each is not None)


def are_loaders(given: Any) -> bool:
    """Whether it is several loaders; a list of batches is one."""
    is_list = (
        isinstance(given, list | tuple) and bool(given) and all(hasattr(each, "dataset") for each in given)
    )
    return is_list or isinstance(given, Mapping)


def side_by_side(given: Any) -> Any:
    """Several loaders as one; one, or a list of batches, as it is."""
    return SideBySide(given) if are_loaders(given) else given


def drawn_side_by_side(cls: type) -> None:
    """A class whose `train_dataloader` returns several: they are drawn from at once."""
    ask: Callable[[Any], Any] | None = vars(cls).get("train_dataloader")
    if ask is None:
        return

    @functools.wraps(ask)
    def train_dataloader(self: Any) -> Any:
        return side_by_side(ask(self))

    cls.train_dataloader = train_dataloader  # type: ignore[attr-defined]


# ---- Several loaders as Lightning draws from them


def loaders_in_turn(given: Any, kind: str, of_lightning: Callable[[str, str], Any]) -> Any:
    """What `train_dataloader` and its like have returned, `kind` one of 'train', 'val',
    'test' and 'predict'.
    """
    combined = of_lightning("utilities.combined_loader", "CombinedLoader")
    if kind == "train" and isinstance(given, list | tuple | dict):
        given = combined(given, "max_size_cycle")
    if not isinstance(given, combined):
        return given
    return given.flattened if kind != "train" and given._mode == "sequential" else CombinedBatches(given)


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


class CombinedBatches:
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
