"""Read several training loaders as one: the mixture picks the loader of each batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from hookline.data.batch import batch_size, count_tokens
from hookline.data.loaders import Loader, make_loaders
from hookline.data.mixing import Mixture, MixtureCursor, check_mixture, describe_mixture, proportions
from hookline.data.readers import ListReader
from hookline.data.sharding import END
from hookline.util.errors import CheckpointError, HooklineError, OptionError, closest

log = logging.getLogger("hookline")
T = TypeVar("T")
FIXED = ("loss_weights", "optimizers")
"""Settings of how a batch is trained, not of which loader is next."""


class MixedLoader:
    """The loader that the loop reads and hooks may change: `trainer.loaders`.

    A change takes effect at the next window of the mixture. It is saved in checkpoints and logged.
    """

    name = "mixture"
    is_exact = False

    def __init__(
        self, loaders: list[Loader], mixture: Mixture, count_tokens: Callable[[Any], int] = count_tokens
    ) -> None:
        self.loaders = {loader.name: loader for loader in loaders}
        self._first = frozenset(self.loaders)
        """The loaders that the mixture was made with."""
        self._all = loaders  # the run's list, so that added loaders are closed with the others
        self.cursor = MixtureCursor(mixture, {loader.name: loader.length for loader in loaders})
        self.picked: Callable[[int, str], None] = lambda index, name: None
        """Called before each batch with the index and name of its loader."""
        self.changed: Callable[[str], None] = lambda text: None
        """Called with a description of each change."""
        self.turned: Callable[[int], None] = lambda position: None
        """Called with the position from which on the order is not that of the state before it."""
        self.first_length = self.began_with = self.cursor.total
        """Batches of this epoch when it started; later changes do not affect fractions of it."""
        self.samples: dict[str, int] = dict.fromkeys(self.loaders, 0)
        self.tokens: dict[str, int] = dict.fromkeys(self.loaders, 0)
        self.batches_drawn: dict[str, int] = dict.fromkeys(self.loaders, 0)
        self._count_tokens = count_tokens
        self.sharding = loaders[0].sharding
        self._is_alone = self.sharding.ranks.alone
        self._newest = ("", 0, 0)
        """The loader, samples and tokens of the newest batch; no loader while it is being fetched."""
        self._newest_index = 0
        self._seed: int | None = None
        """The seed of the orders of all loaders."""
        self._streams: dict[int, Iterator[Any]] = {}
        self._restored: dict[str, Any] = {}
        """The loaded state, until the first epoch is opened."""
        self._loaded: object = None
        self._left: dict[str, tuple[int, Any]] = {}
        """Loaders with an open pass in the checkpoint: their batches so far, and the state of a new pass."""
        for doubt in self.cursor.doubts:
            log.warning("Mixture: %s", doubt)

    def leave(self, saved: dict[str, Any]) -> None:
        """Leave an unfinished epoch for a saved state, and drop the loaders that were added after it."""
        for loader in self._all:
            loader.leave(saved)
        self._streams, self._newest = {}, ("", 0, 0)
        for name in [each for each in self.loaders if each not in {*self._first, *saved["loaders"]}]:
            self._all.remove(self.loaders.pop(name))
            for counts in (self.samples, self.tokens, self.batches_drawn):
                del counts[name]
        self.load_state_dict(saved)

    @property
    def seed(self) -> int | None:
        """Return the seed of the orders of all loaders."""
        return self._seed

    def sample_ids(self, batch: int) -> list[int] | None:
        """Return the indices of the newest batch's samples in the dataset of its loader, if they are kept."""
        name = self.cursor.names[self._newest_index]
        return self.loaders[name].sample_ids(self._position_of_pick(self._newest_index, name)[1])

    def order_state(self, position: int) -> dict[str, Any]:
        """Return the state of the mixture before the batch at this position, as plain data."""
        with self.cursor.as_of(position):
            return self.cursor.state_dict()

    @property
    def length(self) -> int:
        """Return the number of batches in this epoch, as far as it is known."""
        return self.cursor.total

    @property
    def may_change(self) -> bool:
        """Return whether a change of the mixture is pending, which may change the length of this epoch."""
        return self.cursor.is_pending

    # ---- reading -------------------------------------------------------------------------------------------

    def open(self, epoch: int, position: int = 0, seed: int | None = None) -> Iterator[Any]:
        """Return the epoch's batches from a position on, each from the loader that the mixture picks."""
        self._finish_passes()
        self._streams = {}
        if self._seed is None:  # drawn now, because a draw during the epoch would change the model's numbers
            if seed is None and not all(
                isinstance(each.reader, ListReader) for each in self.loaders.values()
            ):
                seed = int(torch.randint(2**62, ()).item())  # else there is nothing to shuffle
            self._seed = self.sharding.ranks.from_zero(seed)
        if self._restored:
            self._reopen_passes()
        if self.cursor.epoch != epoch or (position == 0 and self.cursor.position):
            self.cursor.begin(epoch)
            for name, state in self._unread().items():
                self.loaders[name].load_state_dict(state)
            self._left = {}
        if not position:
            self.began_with = self.cursor.total
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        cursor, names = self.cursor, self.cursor.names
        for index in cursor:
            if index >= len(names):
                names = cursor.names  # a loader was added
            name = names[index]
            self._newest = ("", 0, 0)
            batch = next(self._stream(index, name), END)
            if batch is END:
                self._refuse_short(index, name)
                if not cursor.ended(index):
                    self.turned(cursor.position)
                    continue  # the other loaders continue without it
                self.turned(cursor.position - 1)
                del self._streams[index]
                if (batch := next(self._stream(index, name), END)) is END:
                    if excluded := self.loaders[name].exclusions.samples:
                        raise OptionError(
                            f"The training loader {name!r} has no batch: {len(excluded)} of its samples are "
                            "excluded."
                        )
                    cursor.ended(index)  # raises, because the loader is empty
            self._newest = (name, 0, 0)
            self._newest_index = index
            self.batches_drawn[name] += 1
            if self._is_alone:
                self.count(batch_size(batch), self._count_tokens(batch))
            self.picked(index, name)
            yield batch
        self._finish_passes()

    def count(self, samples: int, tokens: int) -> None:
        """Add the samples and tokens of the newest batch, over all ranks."""
        name = self._newest[0]
        self._newest = (name, samples, tokens)
        self.samples[name] += samples
        self.tokens[name] += tokens

    def _finish_passes(self) -> None:
        """Read loaders without further batches to their end, where a loader may reset itself."""
        for index, stream in self._streams.items():
            if self.cursor.reading(index)[1] == 0:
                next(stream, None)

    def _stream(self, index: int, name: str) -> Iterator[Any]:
        if index not in self._streams:
            passes, read = self._position_of_pick(index, name)
            has_new = bool(self.loaders[name].exclusions.pending)
            self._streams[index] = self.loaders[name].open(passes, read, self._seed)
            if has_new:  # they take effect in this pass
                self.turned(self.cursor.position - 1)
        return self._streams[index]

    def _position_of_pick(self, index: int, name: str) -> tuple[int, int]:
        """Return the pass of the batch that is being picked, and its position in the pass."""
        passes, read = self.cursor.reading(index)
        return (passes, read - 1) if read else (passes - 1, (self.cursor.lengths.get(name) or 1) - 1)

    def _refuse_short(self, index: int, name: str) -> None:
        """Raise if a loader with a certain length ends early, which hides an error in its dataset."""
        loader, (_, read) = self.loaders[name], self._position_of_pick(index, name)
        if loader.is_exact and loader.length is not None and 0 < read < loader.length:
            raise OptionError(
                f"The training loader {name!r} ended after {read} of {loader.length} batches. "
                "Check whether its dataset raises StopIteration."
            )

    def _unread(self) -> dict[str, Any]:
        """Return the open passes of the checkpoint from which nothing has been read since."""
        return {
            name: state
            for name, (given, state) in self._left.items()
            if name in self.loaders and self.batches_drawn[name] == given
        }

    def _reopen_passes(self) -> None:
        """Open the unfinished passes now, so that a loader starts a new pass if the epoch ends before it."""
        self._restored = {}
        if missing := [name for name in self.cursor.drawn_from if name not in self.loaders]:
            raise CheckpointError(
                f"The checkpoint uses the training loaders {', '.join(map(repr, missing))}, but this run has "
                f"only {', '.join(map(repr, self.loaders))}. Pass them, or add them in on_train_start."
            )
        for index, name in enumerate(self.cursor.names):
            passes, read = self.cursor.reading(index)
            if read and name in self.loaders:
                self._streams[index] = self.loaders[name].open(passes, read, self._seed)

    def state_dict(self, epoch: int, position: int) -> dict[str, Any]:
        """Return the state of the mixture and its loaders. A batch that was not trained on is drawn again."""
        cursor = self.cursor
        self._finish_passes()  # a sampler may draw from its generator again at its end
        is_over = cursor.epoch != epoch
        counts = {
            "samples": dict(self.samples),
            "tokens": dict(self.tokens),
            "batches": dict(self.batches_drawn),
        }
        if not is_over and cursor.position > position and self._newest[0]:
            name, samples, tokens = self._newest
            for kind, number in (("samples", samples), ("tokens", tokens), ("batches", 1)):
                counts[kind][name] -= number
        with cursor.as_of(cursor.position if is_over else position):
            positions = {name: cursor.reading(index) for index, name in enumerate(cursor.names)}
            if is_over:  # the next epoch starts a new pass of each loader
                positions = {name: (passes + (read > 0), 0) for name, (passes, read) in positions.items()}
            states = {
                name: self.loaders[name].state_dict(*pass_and_batch)
                for name, pass_and_batch in positions.items()
                if name in self.loaders
            }
            left = {
                name: self.loaders[name].state_dict(passes + 1, 0)
                for name, (passes, read) in positions.items()
                if read and name in self.loaders
            } | self._unread()
            return {
                "kind": "mixture",
                "cursor": cursor.state_dict(),
                "seed": self._seed,
                "loaders": states,
                "left": left,
                "began_with": self.began_with,
                **counts,
            }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from the saved state in the first epoch that is opened. Ignore the same state again."""
        if saved is self._loaded:
            return
        if saved.get("kind") != "mixture":
            raise OptionError(
                "The checkpoint was saved with one training loader; this run mixes "
                f"{', '.join(self.loaders)}."
            )
        self._loaded = self._restored = saved
        self.cursor.load_state_dict(saved["cursor"], awaited=saved["loaders"])
        here = {name: state for name, state in saved["loaders"].items() if name in self.loaders}
        if any(self.loaders[name].has_other_batches(state) for name, state in here.items()):
            self.cursor.rebatch({name: self.loaders[name].left_of(state) for name, state in here.items()})
        self._seed, self.began_with = saved["seed"], saved["began_with"]
        for name, state in here.items():
            self.loaders[name].load_state_dict(state)
        for mine, theirs in (
            (self.samples, "samples"),
            (self.tokens, "tokens"),
            (self.batches_drawn, "batches"),
        ):
            mine.update(saved[theirs])
        self._left = {name: (self.batches_drawn[name], state) for name, state in saved["left"].items()}

    # ---- for hooks -----------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Return the loaders of the mixture, with changes that take effect at the next window."""
        return list(self.cursor.latest[1])

    @property
    def weights(self) -> dict[str, float]:
        """Return the newest weights; empty if the order does not use weights."""
        return dict(self.cursor.latest[0].weights)

    def set_weights(self, weights: Mapping[str, float]) -> int:
        """Change weights from the next window on, and return its position. Other loaders keep theirs."""
        return self._revise(f"weights {dict(weights)}", self._with_weights(weights))

    update_weights = set_weights

    def check_weights(self, weights: Mapping[str, float]) -> None:
        """Raise as `set_weights` would, without a change: for hooks that know their weights in advance."""
        check_mixture(self._with_weights(weights), self.names, self.cursor.latest[1])

    def _with_weights(self, weights: Mapping[str, float]) -> Mixture:
        mixture = self.cursor.latest[0]
        if mixture.order not in ("weighted", "random"):
            raise OptionError(
                f"order={mixture.order!r} does not use weights; train with Mixture('weighted', weights=...)."
            )
        return replace(mixture, weights={**mixture.weights, **weights})

    def add(self, name: str, loader: Any, weight: float | None = None) -> int:
        """Add a loader from the next window on; return its position. It needs a weight if others have one."""
        mixture, lengths = self.cursor.latest
        if name in self._restored.get("loaders", {}) and name not in self.loaders:
            return self._add_restored(name, loader)
        if name in lengths:
            raise OptionError(f"There is already a loader named {name!r}; loaders: {', '.join(lengths)}.")
        if mixture.weights and weight is None:
            raise OptionError(
                f"The loader {name!r} needs a weight, because the others have one: {mixture.weights}."
            )
        made = self._readd(name, loader) if name in self.loaders else self._make_loader(name, loader)
        weights = {**mixture.weights, name: weight} if weight is not None else mixture.weights
        at = self._revise(
            f"{name!r} added", replace(mixture, weights=weights), {**lengths, name: made.length}
        )
        if name not in self.loaders:
            self._register(made)
            self.turned(self.cursor.position)  # again, because the order now has this loader
        return at

    def _make_loader(self, name: str, source: Any) -> Loader:
        (made,) = make_loaders({name: source}, 1.0, "train", self.sharding)
        made.agree()
        return made

    def _register(self, made: Loader) -> None:
        self.loaders[made.name] = made
        self._all.append(made)
        for counts in (self.samples, self.tokens, self.batches_drawn):
            counts.setdefault(made.name, 0)

    def _add_restored(self, name: str, source: Any) -> int:
        """Add a loader that is already part of the restored mixture, and restore its position."""
        made = self._make_loader(name, source)
        made.load_state_dict(self._restored["loaders"][name])
        self._register(made)
        return self.cursor.next_window

    def _readd(self, name: str, source: Any) -> Loader:
        """Return a loader that was removed before, to continue it. Raise if the source is another one."""
        if self.loaders[name].source is not source:
            raise OptionError(
                f"There was another loader named {name!r} in this run; use a different name for the new one."
            )
        return self.loaders[name]

    def remove(self, name: str) -> int:
        """Remove a loader from the next window on; return its position."""
        mixture, lengths = self.cursor.latest
        if name not in lengths:
            raise OptionError(
                f"There is no loader named {name!r}.{closest(name, lengths)} Loaders: {', '.join(lengths)}."
            )
        if len(lengths) == 1:
            raise OptionError(
                f"{name!r} is the only loader of the mixture; add another one before you remove it."
            )
        pattern = [each for each in mixture.pattern if each != name]
        if mixture.pattern and not pattern:
            raise OptionError(
                f"The pattern names only {name!r}; rebuild_schedule(pattern=...) before you remove it."
            )
        rest = replace(
            mixture,
            pattern=pattern,
            weights=_without(name, mixture.weights),
            loss_weights=_without(name, mixture.loss_weights),
            optimizers=_without(name, mixture.optimizers),
        )
        return self._revise(f"{name!r} removed", rest, _without(name, lengths))

    def rebuild_schedule(self, **settings: Any) -> int:
        """Change settings from the next window on, as in `rebuild_schedule(order="random", burst=4)`."""
        known = [name for name in self.cursor.latest[0].to_dict() if name not in FIXED]
        for name in settings:
            if name in FIXED:
                raise OptionError(f"{name} is fixed for the whole run and cannot be changed during it.")
            if name not in known:
                raise OptionError(
                    f"Mixture has no setting {name!r}.{closest(name, known)} Settings: {', '.join(known)}."
                )
        return self._revise(f"{settings}", replace(self.cursor.latest[0], **settings))

    def _revise(self, what: str, mixture: Mixture, lengths: Mapping[str, int | None] | None = None) -> int:
        at = self.cursor.revise(mixture, lengths)
        for doubt in self.cursor.doubts:
            log.warning("Mixture: %s", doubt)
        self.changed(f"{what}, from batch {at} of epoch {self.cursor.epoch} on")
        self.turned(self.cursor.position)
        return at

    # ---- results -------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return the samples, tokens and proportion of each loader so far, with the requested proportion."""
        found: dict[str, float] = {}
        weights = self.cursor.mixture.weights
        parts = proportions(self.batches_drawn, weights)
        for name in self.batches_drawn:
            found[f"train/dl_{name}/samples_seen"] = float(self.samples[name])
            found[f"train/dl_{name}/tokens_seen"] = float(self.tokens[name])
            found[f"train/dl_{name}/proportion"] = parts[name].reached
            if weights:
                found[f"train/dl_{name}/proportion_asked"] = parts[name].asked
        return found

    def __str__(self) -> str:
        mixture, lengths = self.cursor.latest
        return describe_mixture(mixture, lengths, self.cursor.epoch)


def _without(name: str, table: Mapping[str, T]) -> dict[str, T]:
    return {each: value for each, value in table.items() if each != name}


class OneLoader:
    """`trainer.loaders` of a run with a single training loader and no mixture."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling look for these
            raise AttributeError(name)
        raise HooklineError(
            f"trainer.loaders.{name}: this run does not mix training loaders. Pass several by name, "
            "fit(train={'web': ..., 'code': ...}), or one with a mixture, to change them during the run."
        )
