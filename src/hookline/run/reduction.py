"""Metrics over ranks: everyone's values become one, all of them in one collective, when they are due."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hookline.distributed.comm import Ranks
from hookline.engine.plan import Plan
from hookline.metrics.accumulator import Accumulator, Part
from hookline.metrics.metric_log import MetricLog, read_all
from hookline.run.parts import Traits
from hookline.run.rows import MetricRows
from hookline.run.state import State

SEPARATOR = "\x1e"


class Reduction:
    """What ranks have agreed to tell each other: the names of one kind of row, in an order that all of them
    know.

    As long as no rank has a new name, a row is one exchange of plain numbers; then the names are told first.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.names: dict[str, dict[str, str]] = {}
        """By the kind of row: the names and how each is reduced."""

    def __call__(self, kind: str, parts: Mapping[str, Part]) -> dict[str, Any]:
        """The values over all ranks. Waits for all."""
        parts = {name: part for name, part in parts.items() if part[1] is not None}
        known = self.names.get(kind, {})
        is_new = any(known.get(name) != part[0] for name, part in parts.items())
        told = self.ranks.gather_numbers([float(is_new), *_numbers(parts, known)])
        if any(row[0] for row in told):
            known = self.names[kind] = {}
            for names in self.ranks.gather({name: part[0] for name, part in parts.items()}):
                for name, reduce in names.items():
                    known.setdefault(name, reduce)
            told = self.ranks.gather_numbers([0.0, *_numbers(parts, known)])
        values: dict[str, Any] = {}
        for number, (name, reduce) in enumerate(known.items()):
            place = 1 + 3 * number
            having = [row[place : place + 3] for row in told if row[place]]
            if (value := _over_ranks(reduce, having, len(told))) is not None:
                values[name] = value
        return values


def _numbers(parts: Mapping[str, Part], known: Iterable[str]) -> list[float]:
    """For each known name: whether this rank has it, its total and its weight."""
    totals = read_all({name: part[1] for name, part in parts.items()})
    return [
        number
        for name in known
        for number in ((1.0, totals[name], parts[name][2]) if name in parts else (0.0, 0.0, 0.0))
    ]


def _over_ranks(reduce: str, having: list[list[float]], world_size: int) -> Any:
    """One value from what ranks have: whether, total, weight."""
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
            return means[0]  # the same everywhere stays the same to the last digit
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
"""A row that could not go out at once: its step, its epoch and its values."""


class Rows:
    """A run's rows of metrics, where there are several ranks. What hooks log between rows waits until the
    next time they meet.
    """

    def __init__(self, ranks: Ranks, log: MetricLog) -> None:
        self.reduce = Reduction(ranks)
        self.log = log
        self._waiting: list[tuple[int, int, dict[str, Part]]] = []
        self._newest: dict[str, Part] = {}
        """What was logged between rows since the ranks last met."""

    def keep(self, values: Mapping[str, Any], step: int, epoch: int, is_heard: bool) -> None:
        """Not every rank may have logged something, and none knows it of the others: so nobody waits for
        anybody now.
        """
        parts = self.log.parts_of(values)
        self._newest.update(parts)
        if is_heard:
            self._waiting.append((step, epoch, parts))

    def alone(self) -> list[Late]:
        """What is waiting, as this rank knows it: when the run has failed, nobody can be asked any more."""
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
        """A row over all ranks, and those that were waiting before it, with the step and epoch each belongs
        to.
        """
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
        """A pass's results over all ranks. In the same exchange: what was logged for the next row, so that
        all know the same.
        """
        logged = self._newest | self.log.parts_of(pending)
        beside = {f"{SEPARATOR}{name}": part for name, part in logged.items()}
        kinds = iter((f"{mode} pass", f"{mode} objects"))

        def pool(parts: dict[str, Part]) -> dict[str, Any]:
            done = self.reduce(next(kinds), parts | beside)
            beside.clear()
            self.log.store_reduced(
                {name[1:]: value for name, value in done.items() if name.startswith(SEPARATOR)}
            )
            return {name: value for name, value in done.items() if not name.startswith(SEPARATOR)}

        return self.log.finish(mode, pool, more)


class RankRows(MetricRows):
    """The rows of one rank among several: what goes out is reduced over all of them."""

    def __init__(self, plan: Plan, state: State, ranks: Ranks, traits: Traits) -> None:
        super().__init__(plan, state)
        self._rows = Rows(ranks, state.log)
        self._traits = traits

    def write_pending(self) -> None:
        """Keep what was logged since the last row until the ranks next exchange values."""
        s = self.state
        if s.log.pending:
            pending, s.log.pending = s.log.pending, {}
            self._rows.keep(
                pending, s.step, s.epoch, self._traits.logs or "on_train_metrics" in self.plan.wanted_at
            )

    def reduce(self, values: dict[str, Any], kind: str = "row") -> dict[str, Any]:
        """Return a row's values over all ranks, after writing the rows that were waiting for this."""
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
