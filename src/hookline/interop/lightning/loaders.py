"""Several training loaders, with a batch from each at every step, as in Lightning."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hookline.data.sources import length_of
from hookline.engine.init_arguments import Wrapped
from hookline.engine.listener import overrides
from hookline.run.state_parts import fact
from hookline.util.errors import HookError


class SideBySide:
    """Yields one batch from each loader, in the structure in which they were passed; shorter ones restart
    until the longest ends.
    """

    def __init__(self, loaders: Mapping[str, Any] | list[Any] | tuple[Any, ...]) -> None:
        self.given = loaders
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


def is_combined(given: Any) -> bool:
    """Return whether it is a CombinedLoader of the installed Lightning."""
    package = type(given).__module__.partition(".")[0]
    return type(given).__name__ == "CombinedLoader" and package in ("lightning", "pytorch_lightning")


def one_of(given: Any, kind: str) -> Any:
    """Return loaders as the loop takes them: for training one, for other stages one or several. One loader,
    or a list of batches, is returned unchanged.
    """
    if is_combined(given):
        is_several = kind != "train" and given._mode == "sequential"
        return given.flattened if is_several else CombinedBatches(given)
    if kind == "train":
        return SideBySide(given) if are_loaders(given) else given
    if isinstance(given, list | tuple) and given and all(is_list_of_numbers(each) for each in given):
        return {f"dl{index}": each for index, each in enumerate(given)}
    return given


def is_list_of_numbers(given: Any) -> bool:
    """Return whether it is a list of numbers or texts, which Lightning takes for a loader of its own."""
    return isinstance(given, list | tuple) and all(isinstance(each, int | float | str) for each in given)


def has_source(run: Any, kind: str) -> bool:
    """Return whether loaders of a kind were given, or the module or data module returns them."""
    given = run.data.given.get(kind)
    if isinstance(given, list | tuple):
        return bool(given)
    owners = [each for each in (run.datamodule, run.steps) if each is not None]
    return given is not None or any(overrides(each, f"{kind}_dataloader") for each in owners)


def wrap_loaders(cls: type) -> None:
    """Wrap a class's `train_dataloader`, `val_dataloader`, ..., so that the loop can use what they return."""
    for kind in ("train", "val", "test", "predict"):
        method = f"{kind}_dataloader"
        ask: Callable[[Any], Any] | None = vars(cls).get(method)
        if ask is not None:
            setattr(cls, method, Wrapped(ask, functools.partial(_converting, kind=kind)))


def _converting(ask: Callable[[Any], Any], kind: str) -> Callable[[Any], Any]:
    return functools.wraps(ask)(lambda self: one_of(ask(self), kind))


# ---- Loaders of the installed Lightning package


def convert_loaders(given: Any, kind: str, of_lightning: Callable[[str, str], Any]) -> Any:
    """Convert the result of `train_dataloader` and so on; `kind`: 'train', 'val', 'test' or 'predict'."""
    if kind == "train" and isinstance(given, list | tuple | dict):
        given = of_lightning("utilities.combined_loader", "CombinedLoader")(given, "max_size_cycle")
    return one_of(given, kind)


def convert_given(
    given: Mapping[str, Any], of_lightning: Callable[[str, str], Any], mixes: bool
) -> dict[str, Any]:
    """Convert the loaders passed to fit and so on. A list of batches is one loader; a given mixture is
    Hookline's own.
    """
    found = dict(given)
    for kind, source in given.items():
        several = are_loaders(source) or (
            isinstance(source, list | tuple) and all(map(is_list_of_numbers, source))
        )
        is_one = isinstance(source, list | tuple | dict) and not several
        if not (kind == "train" and (mixes or is_one)):
            found[kind] = convert_loaders(source, kind, of_lightning)
    return found


def converting_loaders(ask: Callable[[], Any], method: str, view: Any) -> Callable[[], Any]:
    """Return a `train_dataloader`, `val_dataloader`, ... whose result is converted for Hookline's trainer.

    Lightning's takes it as it is (`StageLoaders`).
    """
    kind = method.removesuffix("_dataloader")

    def converted() -> Any:
        made = ask()
        return convert_loaders(made, kind, view.of_lightning) if view.moment.is_native else made

    return functools.wraps(ask)(converted)


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


# ---- Steps that take an iterator


class BatchIterator(Iterator[tuple[Any, ...]]):
    """The `dataloader_iter` of a step: it yields the batch that the loop has fetched, as batch, batch index
    and loader index.
    """

    def __init__(self, step: str, *fetched: Any) -> None:
        self.step = step
        self.fetched: tuple[Any, ...] | None = fetched

    def __next__(self) -> tuple[Any, ...]:
        if self.fetched is None:
            raise HookError(
                f"{self.step} takes a second batch from dataloader_iter, but Hookline's loop fetches one "
                "for each step: take one, or return both from the dataset's collate_fn."
            )
        fetched, self.fetched = self.fetched, None
        return fetched


class TurnIterator(Iterator[tuple[Any, int, int]]):
    """The `dataloader_iter` of a step in Lightning's trainer."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def __next__(self) -> tuple[Any, int, int]:
        return self.turns.next_batch()

    done: bool = fact("turns.done", "Return whether the last batch was taken, as far as it is known.")

    fetched: int = fact("turns.fetched", "Return the number of batches that were taken.")

    length: int | None = fact("turns.limit", "Return the number of batches; None if it is not known.")


class Turns:
    """The loader of a step that takes `dataloader_iter`, in Lightning's trainer.

    Each turn of the loop has this object as its batch. The step takes any number of batches from it, up to
    the limit of the loader; they are not moved to a device.
    """

    def __init__(self, source: Any, limit: int | None, index: int, run: Any) -> None:
        self.source, self.limit, self.index, self.run = source, limit, index, run
        self.iterator = TurnIterator(self)
        self.loaders = [source]
        self.fetched = self.in_turn = 0
        self.is_over = False
        self.loader: Any = None
        """The loader that counts the turns; its length is known after the last one."""
        self.newest: Any = None
        """The batch that was taken last, which the hooks at the end of the turn get."""

    def __iter__(self) -> Iterator[Any]:
        """Yield this object for each turn. A turn that takes nothing, as in a resume, leaves a batch out."""
        self._batches = iter(self.source)
        self.fetched, self.in_turn, self.is_over, self.newest = 0, 1, False, None
        while not self.done:
            if not self.in_turn:
                next(self.iterator, None)
            self.in_turn = 0
            yield self

    @property
    def done(self) -> bool:
        """Return whether the last batch was taken, as far as it is known."""
        most, state = self.limit, self.run.state
        if state.sanity_checking and (checked := self.run.options.num_sanity_val_steps) >= 0:
            most = checked if most is None else min(most, checked)
        return self.is_over or (most is not None and self.fetched >= most)

    def next_batch(self) -> tuple[Any, int, int]:
        """Return a batch, its index and the index of the loader."""
        if self.done:
            raise StopIteration
        try:
            self.newest = next(self._batches)
        except StopIteration:
            self.is_over = True
            raise
        self.fetched += 1
        self.in_turn += 1
        return self.newest, self.fetched - 1, self.index

    def take_turn(self, step: Callable[..., Any]) -> Any:
        """Call the step. It ends the pass with StopIteration."""
        try:
            returned = step(self.iterator)
        except StopIteration:
            self.is_over, returned = True, None
        self.run.state.current.batch = self.newest
        if self.done and self.loader is not None:
            self.loader.length = self.run.state.batch_idx + 1
        return returned


def outside_turns(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook of the transfer of a batch that is not called for turns, whose batches stay."""

    @functools.wraps(hook)
    def unless_turns(batch: Any, *given: Any) -> Any:
        return batch if isinstance(batch, Turns) else hook(batch, *given)

    return unless_turns


def with_iterator(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that takes `dataloader_iter` as a step that takes a batch; any other unchanged."""
    if "dataloader_iter" not in inspect.signature(step).parameters:
        return step

    def step_on_batch(batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        if isinstance(batch, Turns):
            return batch.take_turn(step)
        return step(BatchIterator(step.__qualname__, batch, batch_idx, dataloader_idx))

    return step_on_batch


def wrap_steps(cls: type) -> None:
    """Wrap the steps of a class that take `dataloader_iter`."""
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        function: Any = vars(cls).get(step)
        if inspect.isfunction(function) and "dataloader_iter" in inspect.signature(function).parameters:
            setattr(cls, step, Wrapped(function, _on_batch))


def _on_batch(step: Callable[..., Any]) -> Callable[..., Any]:
    def step_on_batch(self: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        return step(self, BatchIterator(step.__qualname__, batch, batch_idx, dataloader_idx))

    return step_on_batch
