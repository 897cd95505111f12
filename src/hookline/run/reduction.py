"""Reduce metrics over ranks, all values of a row in one collective."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from hookline.distributed.comm import Ranks
from hookline.engine.plan import Plan
from hookline.metrics.accumulator import Accumulator, ValuePart
from hookline.metrics.metric_log import MetricLog, read_all
from hookline.run.parts import Traits
from hookline.run.rows import MetricRows
from hookline.run.state import State

SEPARATOR = "\x1e"


class RankReduction:
    """Reduces rows over ranks. All ranks know the names of each kind of row, in the same order.

    A row is one collective of plain numbers. If a rank has a new name, the ranks exchange names first.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.names: dict[str, dict[str, str]] = {}
        """For each kind of row: its names and how each is reduced."""

    def __call__(self, kind: str, parts: Mapping[str, ValuePart]) -> dict[str, Any]:
        """Return the values over all ranks. Waits for all ranks."""
        parts = {name: part for name, part in parts.items() if part[1] is not None}
        known = self.names.get(kind, {})
        is_new = any(known.get(name) != part[0] for name, part in parts.items())
        gathered = self.ranks.gather_numbers([float(is_new), *_row_numbers(parts, known)])
        if any(row[0] for row in gathered):
            known = self.names[kind] = {}
            for names in self.ranks.gather({name: part[0] for name, part in parts.items()}):
                for name, reduce in names.items():
                    known.setdefault(name, reduce)
            gathered = self.ranks.gather_numbers([0.0, *_row_numbers(parts, known)])
        values: dict[str, Any] = {}
        for number, (name, reduce) in enumerate(known.items()):
            start = 1 + 3 * number
            # ranks with the same batches have the same values, so the first one counts
            having: dict[int, list[float]] = {}
            for rank, row in zip(self.ranks.data_ranks, gathered, strict=True):
                if row[start]:
                    having.setdefault(rank, row[start : start + 3])
            if (value := _over_ranks(reduce, [*having.values()], self.ranks.data_size)) is not None:
                values[name] = value
        return values


def _row_numbers(parts: Mapping[str, ValuePart], known: Iterable[str]) -> list[float]:
    """Return for each known name whether this rank has it, its total and its weight."""
    totals = read_all({name: part[1] for name, part in parts.items()})
    return [
        number
        for name in known
        for number in ((1.0, totals[name], parts[name][2]) if name in parts else (0.0, 0.0, 0.0))
    ]


def _over_ranks(reduce: str, having: list[list[float]], world_size: int) -> Any:
    """Reduce the totals and weights of the ranks that have a name to one value."""
    if reduce == "object":
        return len(having), world_size
    if reduce == "mean":
        having = [each for each in having if each[2]]
    if not having:
        return None
    totals = [total for _, total, _ in having]
    if reduce == "mean":
        means = [total / weight for _, total, weight in having]
        if means.count(means[0]) == len(means):
            return means[0]  # a value that is equal on all ranks stays bit-exact
        return (
            math.fsum(totals) / math.fsum(weight for _, _, weight in having)
            if all(map(math.isfinite, totals))
            else sum(means)
        )
    if reduce == "last":
        return totals[0]
    if any(map(math.isnan, totals)):
        return math.nan
    return sum(totals) if reduce == "sum" else min(totals) if reduce == "min" else max(totals)


Late = tuple[int, int, dict[str, Any]]
"""A row that is written late: its step, its epoch and its values."""


class WaitingRows:
    """The rows of a run with several ranks. Values between rows wait for the next collective."""

    def __init__(self, ranks: Ranks, log: MetricLog) -> None:
        self.reduce = RankReduction(ranks)
        self.log = log
        self._waiting: list[tuple[int, int, dict[str, ValuePart]]] = []
        self._newest: dict[str, ValuePart] = {}
        """The values that were logged between rows since the last collective."""

    def keep(self, values: Mapping[str, Any], step: int, epoch: int, is_used: bool) -> None:
        """Keep values until the next collective, because not all ranks may have logged something.

        is_used: the row goes to loggers or listeners.
        """
        parts = self.log.parts_of(values)
        self._newest.update(parts)
        if is_used:
            self._waiting.append((step, epoch, parts))

    def alone(self) -> list[Late]:
        """Return the waiting rows with local values, for a run that failed."""
        taken, self._waiting = self._waiting, []
        return [
            (
                step,
                epoch,
                self.log.store_reduced(
                    {
                        name: total / weight if reduce == "mean" and weight else total
                        for name, (reduce, total, weight) in parts.items()
                    }
                ),
            )
            for step, epoch, parts in taken
        ]

    def reduce_rows(
        self, kind: str, values: Mapping[str, Any], step: int
    ) -> tuple[dict[str, Any], list[Late]]:
        """Return a row over all ranks, and the rows that waited, each with its step and epoch."""
        waiting, self._waiting, self._newest = self._waiting, [], {}
        parts = {f"{SEPARATOR}{name}": part for name, part in self.log.parts_of(values).items()}
        for at, epoch, kept in waiting:
            parts |= {f"{step - at}{SEPARATOR}{epoch}{SEPARATOR}{name}": part for name, part in kept.items()}
        done = self.reduce(kind, parts)
        row: dict[str, Any] = {}
        before: dict[tuple[int, int], dict[str, Any]] = {}
        for key, value in done.items():
            back, _, rest = key.partition(SEPARATOR)
            if not back:
                row[rest] = value
            else:
                of_epoch, _, name = rest.partition(SEPARATOR)
                before.setdefault((step - int(back), int(of_epoch)), {})[name] = value
        rows = [
            (at, epoch, self.log.store_reduced(kept))
            for (at, epoch), kept in sorted(before.items(), key=lambda each: each[0])
        ]
        return self.log.store_reduced(row), rows

    def finish(
        self, mode: str, more: Mapping[str, Accumulator], pending: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the results of a pass over all ranks, and reduce the values for the next row with them."""
        logged = self._newest | self.log.parts_of(pending)
        beside = {f"{SEPARATOR}{name}": part for name, part in logged.items()}
        kinds = iter((f"{mode} pass", f"{mode} objects"))

        def pool(parts: dict[str, ValuePart]) -> dict[str, Any]:
            done = self.reduce(next(kinds), parts | beside)
            beside.clear()
            self.log.store_reduced(
                {name[1:]: value for name, value in done.items() if name.startswith(SEPARATOR)}
            )
            return {name: value for name, value in done.items() if not name.startswith(SEPARATOR)}

        with computed_over(self.reduce.ranks.data_group, self.log.objects()):
            return self.log.finish(mode, pool, more)


@contextlib.contextmanager
def computed_over(group: Any, metrics: Iterable[Any]) -> Iterator[None]:
    """Let metric objects (torchmetrics) communicate over this group only. None: over all ranks."""
    parts: list[Any] = [
        part for each in metrics for part in (each.modules() if isinstance(each, nn.Module) else [each])
    ]
    changed = [each for each in parts if group is not None and getattr(each, "process_group", group) is None]
    for metric in changed:
        metric.process_group = group
    try:
        yield
    finally:
        for metric in changed:  # a group cannot be copied, and metrics are
            metric.process_group = None


class RankRows(MetricRows):
    """The rows of one rank of several. Values are reduced over all ranks before they are written."""

    def __init__(self, plan: Plan, state: State, ranks: Ranks, traits: Traits) -> None:
        super().__init__(plan, state)
        self._rows = WaitingRows(ranks, state.log)
        self._traits = traits

    def write_pending(self) -> None:
        """Keep the values that were logged since the last row until the next collective."""
        s = self.state
        if s.log.pending:
            pending, s.log.pending = s.log.pending, {}
            self._rows.keep(
                pending, s.step, s.epoch, self._traits.logs or "on_train_metrics" in self.plan.wanted_at
            )

    def reduce(self, values: dict[str, Any], kind: str = "row") -> dict[str, Any]:
        """Return a row's values over all ranks, after writing the rows that waited."""
        row, before = self._rows.reduce_rows(kind, values, self.state.step)
        for step, epoch, kept in before:
            self.write(kept, "step", step, epoch)
        return row

    def finish(
        self, mode: str, more: Mapping[str, Accumulator], pending: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the results of a pass over all ranks."""
        return self._rows.finish(mode, more, pending)

    def flush(self) -> None:
        """Write rows that were not reduced with local values, because the other ranks are gone."""
        for step, epoch, kept in self._rows.alone():
            self.write(kept, "step", step, epoch)
