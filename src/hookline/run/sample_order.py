"""The order of a run's training data: what determines which samples are behind each update.

It is plain data, in `run.json` and in checkpoints: the batches of each update (`UpdateWindows`), and how each
batch's samples are drawn. It has a new layout whenever the loaders, the ranks or the mixture change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hookline.data.loaders import MOST_PASSES, Loader
from hookline.data.samples import LoaderOrder, describe_loader, generator_states
from hookline.data.samples import Sample as Sample
from hookline.run.update_windows import UpdateWindows
from hookline.util.errors import UnknownSamples

if TYPE_CHECKING:  # only a run with a mixture loads them
    from hookline.data.mixing import MixtureCursor
    from hookline.data.mixture import MixedLoader

Layout = dict[str, Any]
MOST_LAYOUTS = 200
"""The number of layouts that are kept: the first and the newest ones."""
ORDER_VERSION = 1


class SampleOrder:
    """The order of one run."""

    def __init__(self, windows: UpdateWindows) -> None:
        self.windows = windows
        self.layouts: list[Layout] = []
        """Each with the epoch and the batch where it begins, its loaders, and the state of the mixture."""
        self.samplers: dict[str, dict[str, Any]] = {}
        """The samplers of the loaders, by the digest of their description."""
        self.reached: tuple[int, int] | None = None
        """In an order from a record: the epoch and the newest batch when it was written."""
        self.generators: dict[str, dict[str, str]] = {}
        """The states of their generators by loader and pass."""
        self._orders: dict[tuple[str, str], LoaderOrder] = {}
        self._loaders: list[Loader] = []
        """The training loaders, if this process has opened them."""
        self._cursor: MixtureCursor | None = None
        """The mixture of the newest layout, moved to where the run was described last."""

    # ---- what determines it --------------------------------------------------------------------------------

    def describe(
        self, epoch: int, batch: int, loaders: list[Loader], mixture: MixedLoader | None = None
    ) -> None:
        """Describe the training data from a batch on; nothing if it is as before."""
        self._loaders = loaders
        seed = loaders[0].seed if mixture is None else mixture.seed
        layout: dict[str, Any] = {
            "epoch": epoch,
            "batch": batch,
            "loaders": {each.name: {**self._describe(each), "seed": seed} for each in loaders},
            "mixture": None if mixture is None else mixture.order_state(batch),
        }
        if self.layouts and mixture is None and _is_continued(self.layouts[-1], layout):
            return
        while self.layouts and (self.layouts[-1]["epoch"], self.layouts[-1]["batch"]) >= (epoch, batch):
            self.layouts.pop()
        if self.layouts and mixture is not None and self._continues_mixture(layout):
            return
        self.layouts.append(layout)
        self._cursor = None
        del self.layouts[1 : len(self.layouts) - MOST_LAYOUTS + 1]
        used = {known["sampler"] for each in self.layouts for known in each["loaders"].values()}
        self.samplers = {digest: known for digest, known in self.samplers.items() if digest in used}

    def _describe(self, loader: Loader) -> dict[str, Any]:
        found = describe_loader(loader)
        if found["sampler"] is not None:
            text = json.dumps(found["sampler"], sort_keys=True)
            digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
            self.samplers[digest] = found["sampler"]
            found["sampler"] = digest
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the order as plain data."""
        self._keep_generators()
        return {
            "version": ORDER_VERSION,
            **self.windows.state_dict(),
            "layouts": [dict(each) for each in self.layouts],
            "samplers": dict(self.samplers),
            "generators": {name: dict(states) for name, states in self.generators.items()},
        }

    def _keep_generators(self) -> None:
        """Keep the states of the samplers' generators at the starts of the newest passes."""
        for loader in self._loaders:
            if now := generator_states(loader):
                states = self.generators.setdefault(loader.name, {})
                states.update(now)
                for number in sorted(states, key=int)[:-MOST_PASSES]:
                    del states[number]

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the order."""
        self.windows.load_state_dict(saved)
        self.layouts, self.samplers = list(saved["layouts"]), dict(saved["samplers"])
        self.generators = {name: dict(states) for name, states in saved["generators"].items()}
        self.reached = (saved["reached"][0], saved["reached"][1]) if "reached" in saved else None
        self._orders, self._cursor = {}, None

    def _continues_mixture(self, now: dict[str, Any]) -> bool:
        """Return whether the mixture of the newest layout arrives at this state by itself."""
        before = self.layouts[-1]
        if not _is_continued(before, now) or before["mixture"]["given"] != now["mixture"]["given"]:
            return False
        self._cursor = self._cursor or _cursor(before["mixture"])
        try:
            _advance(self._cursor, now["epoch"], now["batch"])
        except UnknownSamples:
            return False
        return bool(self._cursor.state_dict() == now["mixture"])

    # ---- the samples ---------------------------------------------------------------------------------------

    def samples(self, step: int, live: Mapping[str, Loader] | None = None) -> list[Sample]:
        """Return every sample behind the update that makes a step. live: the loaders, if they are here."""
        found = self.windows.batches(step)
        if found is None:
            first = self.windows.stretches[0].step if self.windows.stretches else None
            known = "No update is known" if first is None else f"The order is known from step {first} on"
            raise UnknownSamples(f"{known}, not for step {step}.")
        return self.of_batches(*found, live)

    def of_batches(
        self, epoch: int, batches: list[int], live: Mapping[str, Loader] | None = None
    ) -> list[Sample]:
        """Return the samples of these batches of an epoch, on all ranks."""
        self._keep_generators()
        return [
            Sample(name, rank, epoch, batch, index)
            for batch in batches
            for name, rank, indices in self._of_batch(epoch, batch, live or {})
            for index in indices
        ]

    def _of_batch(
        self, epoch: int, batch: int, live: Mapping[str, Loader]
    ) -> Iterator[tuple[str, int, list[int]]]:
        layout = self._layout(epoch, batch)
        if layout["mixture"] is None:
            (name,) = layout["loaders"]
            number, position = epoch, batch
        else:
            name, number, position = _pick(layout["mixture"], epoch, batch)
        known = layout["loaders"].get(name)
        if known is None:
            raise UnknownSamples(f"The order of the loader {name!r} is not recorded.")
        for rank, indices in self._order(name, known, live.get(name)).samples(number, position):
            yield name, rank, indices

    def _layout(self, epoch: int, batch: int) -> dict[str, Any]:
        for layout in reversed(self.layouts):
            if (layout["epoch"], layout["batch"]) <= (epoch, batch):
                return layout
        raise UnknownSamples(f"The order is not recorded for batch {batch} of epoch {epoch}.")

    def _order(self, name: str, known: dict[str, Any], live: Loader | None) -> LoaderOrder:
        """Return the order of a loader; the newest ones are kept, with the passes that they have drawn."""
        key = (name, json.dumps(known, sort_keys=True))
        states = self.generators.setdefault(name, {})
        if key not in self._orders or self._orders[key].given is not live:
            sampler = None if known["sampler"] is None else self.samplers[known["sampler"]]
            while len(self._orders) >= 8:
                del self._orders[next(iter(self._orders))]
            self._orders[key] = LoaderOrder(name, {**known, "sampler": sampler}, states, live)
        return self._orders[key]


def read_order(recorded: dict[str, Any]) -> SampleOrder:
    """Return the order in a run record."""
    if isinstance(recorded, dict) and "why" in recorded:
        raise UnknownSamples(f"The record does not have the order of the training data: {recorded['why']}.")
    if not isinstance(recorded, dict):
        raise UnknownSamples(f"The order in the record is damaged: it is a {type(recorded).__name__}.")
    if recorded.get("version") != ORDER_VERSION:
        raise UnknownSamples(
            f"The record has the order of the training data in version {recorded.get('version')!r}; this "
            f"version of Hookline reads {ORDER_VERSION}."
        )
    order = SampleOrder(UpdateWindows())
    try:
        order.load_state_dict(recorded)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UnknownSamples(f"The order in the record is damaged: {type(error).__name__}: {error}") from None
    return order


def _is_continued(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether the loaders are as before, and read on from where the order before expects it."""
    if before["loaders"].keys() != now["loaders"].keys():
        return False
    for name, facts in now["loaders"].items():
        was = before["loaders"][name]
        if {**was, "start": None} != {**facts, "start": None}:
            return False
        number, position, passed_over = facts["start"]
        first, start, before_it = was["start"]
        per_turn = facts["size"] * (facts["ranks"] if facts["shared"] else 1)
        is_same_pass = number == first and position >= start
        expected = before_it + (position - start) * per_turn if is_same_pass else position * per_turn
        if passed_over != expected:
            return False
    return True


def _cursor(state: dict[str, Any]) -> MixtureCursor:
    from hookline.data.mixing import Mixture, MixtureCursor

    given = state["given"]
    cursor = MixtureCursor(Mixture(**given["mixture"]), given["lengths"])
    settings = [state["stretch"], state["now"], state["pending"] or state["now"]]
    cursor.load_state_dict(state, awaited=[name for each in settings for name in each["lengths"]])
    return cursor


def _advance(cursor: MixtureCursor, epoch: int, batch: int) -> None:
    """Move a cursor to a batch of an epoch."""
    while cursor.epoch < epoch:
        for _ in cursor:
            pass
        cursor.begin(cursor.epoch + 1)
    while cursor.position < batch:
        if next(cursor, None) is None:
            raise UnknownSamples(f"The mixture has {cursor.position} batches in epoch {epoch}, not {batch}.")


def _pick(state: dict[str, Any], epoch: int, batch: int) -> tuple[str, int, int]:
    """Return the loader of a batch of a mixture, with the loader's pass and the batch in it."""
    cursor = _cursor(state)
    _advance(cursor, epoch, batch)
    index = next(cursor, None)
    if index is None:
        raise UnknownSamples(f"The mixture has {cursor.position} batches in epoch {epoch}, not {batch + 1}.")
    with cursor.as_of(batch):  # not before the pick, which may begin with a loader that was added
        return (cursor.names[index], *cursor.reading(index))
