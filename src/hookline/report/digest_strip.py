"""The digests of runs as strips of steps for the page: what is equal, and where runs diverge."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hookline.digests.compare import Comparison, compare
from hookline.digests.diverge import diverge
from hookline.digests.file import RunDigests, read_digests
from hookline.util.errors import OptionError

MOST_BINS = 240
"""Fields of a strip; in a longer run each stands for several digests."""
ALONE, EQUAL, REPEATED, DIFFERS = "alone", "equal", "repeated", "differs"
"""A digest: without another to compare with, equal to it, equal in several attempts, or different."""


def digest_strips(paths: list[Path], names: list[str], against: Path | None = None) -> list[dict[str, Any]]:
    """Return a strip for each run that has digests: compared with `against`, else with the first run, else
    with its own earlier attempts.
    """
    found = []
    for number, path in enumerate(paths):
        digests = read_digests(path)
        if not digests.current:
            continue
        base = against if against is not None else paths[0] if number else None
        is_itself = base is not None and base.resolve() == path.resolve()
        compared = _compared(base, digests) if base is not None and not is_itself else None
        strip: dict[str, Any] = {"run": number, "against": "", "divergence": None, "every": digests.every}
        if base is not None and compared is not None and compared.steps:
            strip["against"] = names[0] if against is None else against.name
            strip["divergence"] = _divergence(base, path)
        found.append({**strip, "bins": _bins(_states(digests, compared))})
    return found


def _compared(base: Path, digests: RunDigests) -> Comparison:
    return compare(read_digests(base).current, digests.current)


def _divergence(base: Path, path: Path) -> dict[str, Any] | None:
    try:
        found = diverge(base, path, (base.name, path.name)).divergence
    except OptionError:
        return None
    return None if found is None else {**found.first.data(), "step": found.step, "exact": found.is_exact}


def _states(digests: RunDigests, compared: Comparison | None) -> list[tuple[int, str]]:
    """Return every digested step and what is known about it."""
    if compared is not None:
        common, differing = set(compared.steps), set(compared.differing)
        return [
            (step, DIFFERS if step in differing else EQUAL if step in common else ALONE)
            for step, _ in digests.current
        ]
    repeated: dict[int, str] = {}
    for later in digests.attempts[1:]:
        for earlier in digests.attempts[: later.number - 1]:
            own = compare(earlier.digests, later.digests)
            repeated |= {step: REPEATED for step in own.steps if repeated.get(step) != DIFFERS}
            repeated |= dict.fromkeys(own.differing, DIFFERS)
    return [(step, repeated.get(step, ALONE)) for step, _ in digests.current]


def _bins(states: Iterable[tuple[int, str]]) -> list[list[Any]]:
    """Return fields of neighbouring digests: first and last step, their number, and the worst state."""
    order = (ALONE, EQUAL, REPEATED, DIFFERS)
    found = list(states)
    size = max(1, math.ceil(len(found) / MOST_BINS))
    made = []
    for start in range(0, len(found), size):
        group = found[start : start + size]
        worst = max((state for _, state in group), key=order.index)
        made.append([group[0][0], group[-1][0], len(group), worst])
    return made
