"""Where two runs diverge: two runs, a run and its own resume, or the ranks of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hookline.digests import causes
from hookline.digests.compare import BETWEEN_RANKS, KINDS, Comparison, Divergence, compare
from hookline.digests.file import NAME, RunDigests, ranks_of, read_digests
from hookline.run.record import RECORD
from hookline.util.errors import OptionError, folders_with
from hookline.util.text import list_some

HOW = "Trainer(digest='every 10 steps'), or hookline fit CONFIG --trainer.digest 'every 10 steps'"
NOT_KNOWN = "a step without digests, before this one, is the cause; which one is not known yet"
SHARDED = ("FSDP",)
"""Strategies whose ranks hold different parts of the weights."""
MOST_LATER = 6


@dataclass(slots=True)
class DivergeReport:
    """The result of a comparison, for people and for programs.

    names, paths: the names and the directories of the two runs. divergence: the first difference, or None.
    notes: sentences about the comparison.
    """

    names: tuple[str, str]
    paths: tuple[Path, Path]
    basis: str
    """What was compared: 'digests' or 'log'."""
    steps: list[int]
    """The steps that both have."""
    divergence: Divergence | None = None
    rank: int | None = None
    """The rank that has diverged first, of a run with several."""
    notes: list[str] = field(default_factory=list)
    causes: list[dict[str, Any]] = field(default_factory=list)
    """What differs between the records of the runs."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return self.divergence is None

    def data(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {
            "equal": self.is_equal,
            "runs": {name: str(path) for name, path in zip(self.names, self.paths, strict=True)},
            "compared": self.basis,
            "steps": [self.steps[0], self.steps[-1]] if self.steps else [],
            "digests": len(self.steps),
            "rank": self.rank,
            "divergence": None if self.divergence is None else self.divergence.data(),
            "causes": self.causes,
            "notes": self.notes,
        }

    def text(self) -> str:
        """Return the result in lines."""
        return "\n".join(
            [*_headline(self), *_details(self), *_causes(self), *(f"note: {each}" for each in self.notes)]
        )


def diverge(one: str | Path, other: str | Path, names: tuple[str, str] = ("A", "B")) -> DivergeReport:
    """Return the first step at which two runs differ, and what differs first.

    Without digests it compares the logged metrics. Nothing is run and nothing is written.

    one, other: the directories of two runs. names: how the report calls them.
    """
    paths = (find_run(one), find_run(other))
    if paths[0].resolve() == paths[1].resolve():
        raise OptionError(
            f"Both runs are {paths[0]}. `hookline diverge RUN` compares a run with its own resume, and "
            "`hookline diverge RUN --ranks` its ranks."
        )
    ranks = [each for each in ranks_of(paths[0]) if each in ranks_of(paths[1])]
    found: dict[int, Comparison] = {}
    for rank in ranks:
        one_rank, other_rank = (read_digests(path, rank) for path in paths)
        found[rank] = compare(one_rank.current, other_rank.current, names)
    if not any(each.steps for each in found.values()):
        return _from_logs(paths, names)
    report = _earliest(found, names, paths)
    report.causes = causes.different_records(*paths)
    if report.is_equal:
        _read_on(report)
        _note_evaluations(report)
    _explain(report, read_digests(paths[0]), read_digests(paths[1]))
    counts = [len(ranks_of(path)) for path in paths]
    if counts[0] != counts[1]:
        report.notes.append(
            f"{names[0]} has digests of {counts[0]} ranks and {names[1]} of {counts[1]}; the common ones are "
            "compared"
        )
    return report


def _read_on(report: DivergeReport) -> None:
    """Compare the logs after the last digest that both runs have, and say up to where each has digests."""
    last = report.steps[-1]
    _, logged = causes.compare_logs(*report.paths, report.names, equal_until=last)
    if logged is not None:
        logged.last_equal = max(last, logged.last_equal or 0)
        report.divergence = logged
        report.notes.append(f"the digests are equal up to step {last}, the last one that both runs have")
        return
    ends = [max((step for step, _ in read_digests(each).current), default=0) for each in report.paths]
    if ends != [last, last]:
        report.notes.append(
            f"{report.names[0]} has digests up to step {ends[0]}, {report.names[1]} up to step {ends[1]}; "
            "only steps that both have are compared"
        )


def _note_evaluations(report: DivergeReport) -> None:
    """Say of equal trainings that evaluations after the fit differ."""
    _, found = causes.compare_logs(*report.paths, report.names, after_fit=True)
    if report.is_equal and found is not None:
        report.notes.append(f"the trainings are equal; evaluations after the fit differ: {found.first.text}")


def diverge_attempts(run: str | Path) -> DivergeReport:
    """Return the first step at which a resume or a rollback differs from what the run did before."""
    path = find_run(run)
    ranks = ranks_of(path)
    if not ranks:
        raise OptionError(f"{path} has no {NAME}: the run was not digested. {HOW} writes digests.")
    found: dict[int, Comparison] = {}
    names = ("attempt 1", "attempt 2")
    for rank in ranks:
        attempts = read_digests(path, rank).attempts
        earlier: dict[tuple[int, int], dict[str, Any]] = {}
        steps: list[int] = []
        for attempt in attempts:
            labels = (f"attempt {attempt.number - 1}", f"attempt {attempt.number}")
            again = {key: each for key, each in earlier.items() if key[0] > attempt.from_step}
            compared = compare(again, attempt.digests, labels)
            compared.steps = steps = sorted({*steps, *compared.steps})
            known = found.get(rank)
            found[rank] = compared if known is None or known.divergence is None else known
            names = labels if found[rank] is compared else names
            earlier = {
                **{key: each for key, each in earlier.items() if key[0] <= attempt.from_step},
                **attempt.digests,
            }
    report = _earliest(found, names, (path, path))
    _explain(report, None, None)
    if not report.steps:
        count = max(len(read_digests(path, rank).attempts) for rank in ranks)
        why = (
            "the run was never resumed and never went back"
            if count < 2
            else "no step was digested in two attempts, as a resume from the newest checkpoint repeats none"
        )
        report.notes.append(f"there is nothing to compare: {why}")
    return report


def diverge_ranks(run: str | Path) -> DivergeReport:
    """Return the first step at which the ranks of a run have different weights, gradients or settings."""
    path = find_run(run)
    ranks = ranks_of(path)
    if len(ranks) < 2:
        have = f"{len(ranks)} rank" if ranks else "no ranks"
        raise OptionError(
            f"{path} has digests of {have}. `--ranks` compares the ranks of a run with several, each of "
            f"which writes digests. {HOW} switches them on."
        )
    first = read_digests(path, ranks[0])
    if first.about.get("strategy") in SHARDED:
        raise OptionError(
            f"{path} was trained with {first.about['strategy']}: each rank holds another part of the "
            "weights, so ranks cannot be compared. hookline diverge A B compares two runs rank by rank."
        )
    found = {
        rank: compare(
            first.current, read_digests(path, rank).current, ("rank 0", f"rank {rank}"), BETWEEN_RANKS
        )
        for rank in ranks[1:]
    }
    report = _earliest(found, ("rank 0", "rank 1"), (path, path))
    if report.rank is not None:
        report.names = ("rank 0", f"rank {report.rank}")
    report.rank = None
    _explain(report, None, None)
    return report


def find_run(run: str | Path) -> Path:
    """Return the directory of a run; a bare name may be a run in `runs/`. Refuse anything else."""
    path = Path(run)
    below = Path("runs") / path
    if not path.exists() and not path.is_absolute() and below.is_dir():
        path = below
    if not path.is_dir():
        raise OptionError(f"There is no run at {path}.")
    if not any((path / name).is_file() for name in (NAME, "log.jsonl", RECORD)):
        below_it = folders_with(path, "log.jsonl")
        hint = f" There are runs below it: {', '.join(below_it)}." if below_it else ""
        raise OptionError(f"{path} is not the directory of a run: it has neither {NAME} nor log.jsonl.{hint}")
    return path


# ---- results -----------------------------------------------------------------------------------------------


def _earliest(
    found: dict[int, Comparison], names: tuple[str, str], paths: tuple[Path, Path]
) -> DivergeReport:
    """Return the report of the rank that diverged first, in the order of a step."""
    # a rank whose gradients differ may have received them from a rank whose weights differ
    order = list(KINDS)
    diverged = {
        rank: (each.divergence.step, order.index(each.divergence.first.kind))
        for rank, each in found.items()
        if each.divergence is not None
    }
    rank = min(diverged, key=diverged.__getitem__) if diverged else min(found)
    chosen = found[rank]
    report = DivergeReport(names, paths, "digests", chosen.steps, chosen.divergence, notes=list(chosen.notes))
    report.rank = rank if len(found) > 1 or rank else None
    return report


def _explain(report: DivergeReport, one: RunDigests | None, other: RunDigests | None) -> None:
    """Name the hook, the log's narrower interval and how to see more."""
    found = report.divergence
    if found is None:
        return
    hook = (
        causes.blame_hook(found, report.paths, report.names) if one is not None and found.is_exact else None
    )
    if hook is not None:
        found.later.insert(0, found.first)
        found.first = hook
    if one is None or other is None:
        return
    for name, digests in zip(report.names, (one, other), strict=True):
        for key in ("cpu", "threads"):
            values = [each.about.get(key) for each in (one, other)]
            if name == report.names[0] and values[0] != values[1]:
                report.causes.append({"key": f"machine.{key}", "values": values})
        if not digests.about.get("modules") and not found.first.names:
            report.notes.append(
                f"{name} has no digests of single modules and parameters; "
                "digest={'every': ..., 'modules': True} writes them"
            )
    if not found.is_exact:
        _, logged = causes.compare_logs(*report.paths, report.names)
        if logged is not None and (found.last_equal or 0) < logged.step < found.step:
            found.notes.append(f"the logged metrics differ from step {logged.step} on: {logged.first.text}")


def _from_logs(paths: tuple[Path, Path], names: tuple[str, str]) -> DivergeReport:
    steps, found = causes.compare_logs(*paths, names)
    missing = [name for name, path in zip(names, paths, strict=True) if not ranks_of(path)]
    report = DivergeReport(names, paths, "log", [*steps, *([found.step] if found else [])], found)
    report.causes = causes.different_records(*paths)
    if not report.steps:
        why = _without_digests(missing) or "they have no digested step in common"
        raise OptionError(
            f"The runs cannot be compared: {why}, and their logs have no step in common. {HOW} writes "
            "digests."
        )
    why = _without_digests(missing) or "the digests have no step in common"
    is_hosted = not any((path / RECORD).is_file() for path in paths)
    how = "Only hookline.Trainer writes them, not a hookline.Line" if is_hosted else f"{HOW} writes them"
    _note_evaluations(report)
    report.notes.append(f"only the logged metrics are compared, because {why}. {how}")
    return report


def _without_digests(missing: list[str]) -> str:
    return f"{' and '.join(missing)} {'has' if len(missing) == 1 else 'have'} no digests" if missing else ""


# ---- text --------------------------------------------------------------------------------------------------


def _headline(report: DivergeReport) -> list[str]:
    one, other = report.names
    noun = "digests" if report.basis == "digests" else "rows of the logs"
    if report.divergence is None:
        if not report.steps:
            return [f"{one} and {other}: no step in common."]
        span = f"steps {report.steps[0]} to {report.steps[-1]}"
        return [f"{one} and {other} are equal: {len(report.steps)} {noun} of {span}."]
    found = report.divergence
    rank = "" if report.rank is None else f" on rank {report.rank}"
    if found.is_exact:
        return [f"{one} and {other} diverge at step {found.step}{rank}: {found.first.kind}."]
    since = "the start" if found.last_equal is None else f"step {found.last_equal}, which is equal,"
    return [f"{one} and {other} diverge between {since} and step {found.step}{rank}: {found.first.kind}."]


def _details(report: DivergeReport) -> list[str]:
    found = report.divergence
    if found is None:
        return []
    meaning = KINDS[found.first.kind] if found.is_exact else NOT_KNOWN
    lines = [f"  what    {found.first.text}", f"  means   {meaning}"]
    if found.is_exact and found.last_equal is not None:
        lines.append(f"  before  step {found.last_equal} is equal")
    if found.epoch is not None:
        lines.append(f"  where   epoch {found.epoch}, after {found.batch} batches")
    later = list(dict.fromkeys(each.kind for each in found.later if each.kind != found.first.kind))
    if later:
        lines.append(f"  then    {list_some(later, MOST_LATER)}")
    return [*lines, *(f"  note    {each}" for each in found.notes)]


def _causes(report: DivergeReport) -> list[str]:
    if not report.causes:
        return []
    shown = [causes.cause_text(each, report.names) for each in report.causes[: causes.MOST_CAUSES]]
    more = len(report.causes) - len(shown)
    word = (
        "the runs were started differently:"
        if report.divergence
        else "the runs were started differently, without an effect:"
    )
    return [
        word,
        *(f"  {each}" for each in shown),
        *([f"  and {more} more; --json has all"] if more > 0 else []),
    ]
