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


def wrap_train_dataloader(cls: type) -> None:
    """Wrap a class's `train_dataloader`, so that several loaders become one."""
    ask: Callable[[Any], Any] | None = vars(cls).get("train_dataloader")
    if ask is None:
        return

    @functools.wraps(ask)
    def train_dataloader(self: Any) -> Any:
        return side_by_side(ask(self))

    cls.train_dataloader = train_dataloader  # type: ignore[attr-defined]


# ---- Loaders of the installed Lightning package


def convert_loaders(given: Any, kind: str, of_lightning: Callable[[str, str], Any]) -> Any:
    """Convert the result of `train_dataloader` and so on; `kind`: 'train', 'val', 'test' or 'predict'."""
    combined = of_lightning("utilities.combined_loader", "CombinedLoader")
    if kind == "train" and isinstance(given, list | tuple | dict):
        given = combined(given, "max_size_cycle")
    if not isinstance(given, combined):
        return given
    return given.flattened if kind != "train" and given._mode == "sequential" else CombinedBatches(given)


def convert_given(
    given: Mapping[str, Any], of_lightning: Callable[[str, str], Any], mixes: bool
) -> dict[str, Any]:
    """Convert the loaders passed to fit and so on. A list of batches is one loader; a given mixture is
    Hookline's own.
    """
    found = dict(given)
    for kind, each in given.items():
        is_one = isinstance(each, list | tuple | dict) and not are_loaders(each)
        if not (kind == "train" and (mixes or is_one)):
            found[kind] = convert_loaders(each, kind, of_lightning)
    return found


def converting_loaders(
    ask: Callable[[], Any], method: str, of_lightning: Callable[[str, str], Any]
) -> Callable[[], Any]:
    """Return a `train_dataloader`, `val_dataloader`, ... whose result is converted for Hookline's loop."""
    kind = method.removesuffix("_dataloader")
    return functools.wraps(ask)(lambda: convert_loaders(ask(), kind, of_lightning))


class CombinedBatches:
    """Yields only the batches of a CombinedLoader."""

    def __init__(self, combined: Any) -> None:
        self.combined = combined

    def __iter__(self) -> Iterator[Any]:
        for batch, _, _ in self.combined:
            yield batch

    def __len__(self) -> int:
        # its own length exists only after iter(), and calling that inside an epoch would restart it
        combined = self.combined
        mode = sys.modules[type(combined).__module__]._SUPPORTED_MODES[combined._mode]
        return len(mode["iterator"](combined.flattened, combined.limits))
