"""Several training loaders, with a batch from each at every step, as in Lightning."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hookline.data.sources import length_of


class SideBySide:
    """Yields one batch from each loader, in the structure in which they were passed; shorter ones restart
    until the longest ends.
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
    """Return whether it is several loaders; a list of batches is one."""
    is_list = (
        isinstance(given, list | tuple) and bool(given) and all(hasattr(each, "dataset") for each in given)
    )
    return is_list or isinstance(given, Mapping)


def side_by_side(given: Any) -> Any:
    """Return several loaders as one; one loader, or a list of batches, unchanged."""
    return SideBySide(given) if are_loaders(given) else given


def drawn_side_by_side(cls: type) -> None:
    """Wrap a class's `train_dataloader`, so that several loaders become one."""
    ask: Callable[[Any], Any] | None = vars(cls).get("train_dataloader")
    if ask is None:
        return

    @functools.wraps(ask)
    def train_dataloader(self: Any) -> Any:
        return side_by_side(ask(self))

    cls.train_dataloader = train_dataloader  # type: ignore[attr-defined]


# ---- Several loaders as Lightning draws from them


def loaders_in_turn(given: Any, kind: str, of_lightning: Callable[[str, str], Any]) -> Any:
    """Convert the result of `train_dataloader` and so on; `kind`: 'train', 'val', 'test' or 'predict'."""
    combined = of_lightning("utilities.combined_loader", "CombinedLoader")
    if kind == "train" and isinstance(given, list | tuple | dict):
        given = combined(given, "max_size_cycle")
    if not isinstance(given, combined):
        return given
    return given.flattened if kind != "train" and given._mode == "sequential" else CombinedBatches(given)


def given_in_turn(
    given: Mapping[str, Any], of_lightning: Callable[[str, str], Any], mixes: bool
) -> dict[str, Any]:
    """Convert the loaders passed to fit and so on. A list of batches is one loader; a given mixture is
    Hookline's own.
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
    """Return a `train_dataloader`, `val_dataloader`, ... whose result is converted for Hookline's loop."""
    kind = method.removesuffix("_dataloader")
    return functools.wraps(ask)(lambda: loaders_in_turn(ask(), kind, of_lightning))


class CombinedBatches:
    """Yields only the batches of a CombinedLoader."""

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
