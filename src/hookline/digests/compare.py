"""Compare digests: the first step at which two runs differ, and what differs first in that step.

A step is compared in the order in which it happens: random streams, batch, weights, forward, loss, gradients,
clipping, hyper-parameters, update. What comes first is the cause of all that comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hookline.digests.tensors import as_number
from hookline.util.text import list_some

RANDOM = "random stream"
DATA_ORDER = "data order"
BATCH = "batch"
CHANGED_BATCH = "changed batch"
WEIGHTS = "weights"
BUFFERS = "buffers"
STATE = "optimizer state"
MODE = "mode"
FLAG = "flag"
FORWARD = "forward"
LOSS = "loss"
GRADIENT = "gradient"
CLIPPING = "clipping"
RATE = "learning rate"
SETTING = "hyper-parameter"
UPDATE = "update"
SKIPPED = "skipped update"
HOOK = "hook"
METRIC = "metric"
KINDS: dict[str, str] = {
    RANDOM: "a random stream has another state: another seed, or another number of draws before",
    DATA_ORDER: "the loader returned samples in another order",
    BATCH: "the loader returned other values",
    CHANGED_BATCH: "the loader returned the same batch, and a hook or the transfer changed it",
    WEIGHTS: "the weights differ before the step: other initial weights, or changed outside of the update",
    BUFFERS: "buffers differ before the step, such as the running statistics of batch norm",
    STATE: "the state of an optimizer differs before the step, as after an incomplete resume",
    MODE: "a module is in eval mode in one run only, or a parameter is frozen",
    FLAG: "a setting of torch differs that decides which bits a computation has",
    FORWARD: "a module computed something else from the same weights and the same batch",
    LOSS: "the loss differs though the recorded outputs are the same, or a hook replaced it",
    GRADIENT: "the backward pass computed something else from the same loss",
    CLIPPING: "gradients were changed between the backward pass and the update: clipping, or a hook",
    RATE: "an optimizer used another learning rate",
    SETTING: "an optimizer used another hyper-parameter, such as weight decay",
    UPDATE: "an optimizer computed something else from the same gradients and settings",
    SKIPPED: "an update was made in one run and skipped in the other",
    HOOK: "a hook changed something, as the audit of the run recorded",
    METRIC: "a logged value differs; there are no digests of both runs at this step to say why",
}
"""What a divergence can be, in words."""
CARRIED = (RANDOM, WEIGHTS, BUFFERS, STATE)
"""Kinds that an earlier step may have caused."""
COMPUTED = (FORWARD, LOSS, GRADIENT, UPDATE)
"""Kinds that a mode or a flag may have caused."""
MOMENTS = {
    "start": "before the batch",
    "forward": "before the forward pass",
    "loss": "after the forward pass",
}
BETWEEN_RANKS = (WEIGHTS, STATE, GRADIENT, CLIPPING, RATE, SETTING, UPDATE, SKIPPED)
"""Kinds that ranks with the same weights must agree on. Batches and random streams differ on purpose."""
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs in a step."""

    kind: str
    text: str
    names: tuple[str, ...] = ()

    def data(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"kind": self.kind, "what": self.text, "names": list(self.names)}


@dataclass(slots=True)
class Divergence:
    """The first step at which two runs differ."""

    step: int
    epoch: int | None
    batch: int | None
    """Batches before this step."""
    first: Difference
    """What differs first in the order of the step."""
    later: list[Difference] = field(default_factory=list)
    """What else differs in this step."""
    last_equal: int | None = None
    """The newest step before it that both runs have a digest of, which is equal."""
    is_exact: bool = True
    """Whether the runs differ from this step on, not from one between `last_equal` and this one."""
    notes: list[str] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "batch": self.batch,
            **self.first.data(),
            "exact": self.is_exact,
            "last_equal_step": self.last_equal,
            "also": [each.data() for each in self.later],
            "notes": self.notes,
        }


@dataclass(slots=True)
class Comparison:
    """What a comparison of two series of digests has found."""

    steps: list[int] = field(default_factory=list)
    """The steps that both have."""
    divergence: Divergence | None = None
    notes: list[str] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)
    """The steps that differ."""


def compare(
    one: Mapping[tuple[int, int], Record],
    other: Mapping[tuple[int, int], Record],
    names: tuple[str, str] = ("A", "B"),
    kinds: tuple[str, ...] = (),
) -> Comparison:
    """Return the first difference between two series of digests. kinds: only these; empty: all."""
    found = Comparison()
    first, second = _by_step(one), _by_step(other)
    seen = SeenBatches(one, other)
    quiet: dict[str, Difference] = {}
    """Modes and flags that have differed so far without an effect."""
    before: tuple[Record, Record] | None = None
    for step in sorted(first.keys() & second.keys()):
        found.steps.append(step)
        pairs = list(zip(first[step], second[step], strict=False))
        hidden, differs = _differences_of_step(pairs, first[step], second[step], names, seen)
        differs = [each for each in differs if not kinds or each.kind in kinds]
        if differs:
            found.differing.append(step)
        if differs and found.divergence is None:
            found.divergence = _make_divergence(
                step, pairs, differs, hidden, quiet, before, found.steps, names
            )
        if not differs:
            quiet.update({each.kind: each for each in hidden if not kinds})
        before = pairs[-1]
    if found.divergence is None:
        found.notes += [f"{each.text}; it has had no effect" for each in quiet.values()]
    return found


def _by_step(digests: Mapping[tuple[int, int], Record]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = {}
    for (step, _), record in sorted(digests.items()):
        found.setdefault(step, []).append(record)
    return found


def _differences_of_step(
    pairs: list[tuple[Record, Record]],
    first: list[Record],
    second: list[Record],
    names: tuple[str, str],
    seen: SeenBatches,
) -> tuple[list[Difference], list[Difference]]:
    """Return the modes and flags that differ, and everything else that differs, in the order of the step."""
    hidden: list[Difference] = []
    for a, b in pairs:
        hidden = list(_hidden(a, b, names))
        if differs := list(differences(a, b, names, seen)):
            return hidden, differs
    if len(first) != len(second):
        more = names[0] if len(first) > len(second) else names[1]
        return hidden, [Difference(SKIPPED, f"an update was skipped in {more} only")]
    return hidden, []


def _make_divergence(
    step: int,
    pairs: list[tuple[Record, Record]],
    differs: list[Difference],
    hidden: list[Difference],
    quiet: dict[str, Difference],
    before: tuple[Record, Record] | None,
    steps: list[int],
    names: tuple[str, str],
) -> Divergence:
    last = steps[-2] if len(steps) > 1 else None
    is_exact = step == 1 or last == step - 1 or differs[0].kind not in CARRIED
    # what has differed before without an effect is a possible cause, not the change at this step
    causes = [each for each in hidden if each.kind not in quiet or quiet[each.kind].text != each.text]
    if is_exact and causes and differs[0].kind in COMPUTED:
        differs = [*causes, *differs]
    elif is_exact and causes and differs[0].kind == RANDOM and MOMENTS["loss"] in differs[0].text:
        differs = [*causes, *differs]  # dropout draws in train mode only
    first = differs[0]
    if first.kind == WEIGHTS and is_exact:
        first = _changed_weights(first, step, before, pairs[0], names)
    a = pairs[0][0] if pairs else {}
    made = Divergence(step, a.get("epoch"), a.get("batch"), first, differs[1:], last, is_exact)
    made.notes = [f"{each.text} (since an earlier step)" for each in hidden if each not in causes]
    return made


def _changed_weights(
    first: Difference,
    step: int,
    before: tuple[Record, Record] | None,
    now: tuple[Record, Record],
    names: tuple[str, str],
) -> Difference:
    """Return the difference of weights with the run that has changed them, as far as that is known."""
    if before is None or step == 1:
        return Difference(WEIGHTS, first.text.replace("the weights", "the initial weights"), first.names)
    changed = []
    for run, earlier, later in zip(names, before, now, strict=True):
        old, new = (
            each.get("single", {}).get(part, {}) for each, part in ((earlier, "updated"), (later, "weights"))
        )
        if touched := [name for name in old if name in new and old[name] != new[name]]:
            changed.append(f"in {run} {list_some(touched)} changed")
    what = " and ".join(changed) or first.text
    return Difference(
        WEIGHTS,
        f"{what} between the update of step {step - 1} and the forward pass of step {step}",
        first.names,
    )


# ---- one step ----------------------------------------------------------------------------------------------


class SeenBatches:
    """The batches and samples of both runs, to tell another order from other contents."""

    def __init__(self, *runs: Mapping[tuple[int, int], Record]) -> None:
        self.batches: list[set[str]] = []
        self.samples: list[set[str]] = []
        for run in runs:
            batches = [each for record in run.values() for each in _batches(record)]
            self.batches.append({str(each.get("fetched")) for each in batches})
            self.samples.append({sample for each in batches for sample in each.get("samples") or ()})

    def is_other_order(self, a: Record, b: Record) -> bool:
        """Return whether a batch that differs consists of samples that the other run has read, too."""
        # where a run has the fact `sample_ids`, it decides: equal ids mean other contents
        if isinstance(a.get("sample_ids"), str) and isinstance(b.get("sample_ids"), str):
            return bool(a["sample_ids"] != b["sample_ids"])
        ours, theirs = a.get("samples") or (), b.get("samples") or ()
        if ours and theirs and ours != theirs:  # if they are equal, something beside the tensors differs
            if sorted(ours) == sorted(theirs):
                return True
            new = [each for each in ours if each not in theirs]
            known = sum(each in self.samples[1] for each in new) + sum(
                each in self.samples[0] for each in theirs if each not in ours
            )
            return known > len(new)  # more than half of the samples that differ
        return a.get("fetched") in self.batches[1] or b.get("fetched") in self.batches[0]


def differences(a: Record, b: Record, names: tuple[str, str], seen: SeenBatches) -> Iterator[Difference]:
    """Yield everything that differs in a step, in the order in which it happens."""
    yield from _random(a, b, "start")
    for number, (mine, theirs) in enumerate(zip(_batches(a), _batches(b), strict=False)):
        where = f" of batch {number + 1} of the window" if len(_batches(a)) > 1 else ""
        yield from _batch(mine, theirs, where, seen)
    if len(_batches(a)) != len(_batches(b)) or a.get("batch") != b.get("batch"):
        counts = [
            f"{name}: {each.get('batch')} batches before, {len(_batches(each))} in it"
            for name, each in zip(names, (a, b), strict=True)
        ]
        yield Difference(DATA_ORDER, f"the step has other batches ({'; '.join(counts)})")
    yield from _random(a, b, "forward")
    yield from _tensors(a, b, "weights", WEIGHTS, "the weights of")
    yield from _tensors(a, b, "buffers", BUFFERS, "the buffers of")
    yield from _tensors(a, b, "state", STATE, "the optimizer state of")
    for mine, theirs in zip(_batches(a), _batches(b), strict=False):
        yield from _forward(mine, theirs, names)
    yield from _random(a, b, "loss")
    yield from _tensors(a, b, "gradients", GRADIENT, "the gradients of", later=True)
    if a.get("skipped") != b.get("skipped"):
        words = [
            f"{name}: {each.get('skipped') or 'not skipped'}"
            for name, each in zip(names, (a, b), strict=True)
        ]
        yield Difference(SKIPPED, f"the update was skipped in one run ({', '.join(words)})")
        return
    yield from _tensors(a, b, "used", CLIPPING, "the gradients that the optimizer used of", later=True)
    yield from _settings(a, b, names)
    yield from _tensors(a, b, "rates", RATE, "the hyper-parameters on the device,")
    yield from _tensors(a, b, "updated", UPDATE, "the updated weights of")


def _batches(record: Record) -> list[Any]:
    found = record.get("batches")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _streams(record: Record, until: str) -> dict[str, str]:
    """Return the random streams at a moment of the step; only changes are written."""
    found: dict[str, str] = {}
    for moment, streams in (record.get("random") or {}).items():
        found.update(streams)
        if moment == until:
            break
    return found


def _random(a: Record, b: Record, moment: str) -> Iterator[Difference]:
    one, other = _streams(a, moment), _streams(b, moment)
    names = tuple(name for name in one if name in other and one[name] != other[name])
    if names:
        yield Difference(RANDOM, f"the random stream of {list_some(names)} differs {MOMENTS[moment]}", names)


def _batch(a: Record, b: Record, where: str, seen: SeenBatches) -> Iterator[Difference]:
    if a.get("fetched") != b.get("fetched"):
        if seen.is_other_order(a, b):
            yield Difference(DATA_ORDER, f"the loader returned other samples{where}")
            return
        parts = _differing(a.get("fetched parts"), b.get("fetched parts"))
        mine, theirs = a.get("samples") or (), b.get("samples") or ()
        rows = [n for n, (x, y) in enumerate(zip(mine, theirs, strict=False)) if x != y]
        which = (
            f", sample {list_some([str(n) for n in rows])} of {len(mine)}"
            if rows and len(rows) < len(mine)
            else ""
        )
        yield Difference(
            BATCH, f"the contents{where} differ: {list_some(parts) or 'the batch'}{which}", parts
        )
    elif a.get("batch", a.get("fetched")) != b.get("batch", b.get("fetched")):
        parts = _differing(
            a.get("batch parts") or a.get("fetched parts"), b.get("batch parts") or b.get("fetched parts")
        )
        yield Difference(
            CHANGED_BATCH,
            f"the loader returned the same batch{where}, and {list_some(parts) or 'it'} was changed before "
            "the forward pass",
            parts,
        )


def _differing(one: Any, other: Any) -> tuple[str, ...]:
    one, other = (each if isinstance(each, Mapping) else {} for each in (one, other))
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return tuple(name for name in names if not any(each != name and each.startswith(name) for each in names))


def _tensors(
    a: Record, b: Record, field: str, kind: str, what: str, later: bool = False
) -> Iterator[Difference]:
    """Yield the tensors of a set that differ. later: the last ones come first, as in a backward pass."""
    if a.get(field) == b.get(field):
        return
    if field in ("updated", "used", "gradients") and (a.get(field) is None or b.get(field) is None):
        return  # the update was skipped, which is another difference
    one, other = ((each.get("single") or {}).get(field) or {} for each in (a, b))
    names = _differing(one, other)
    names = tuple(reversed(names)) if later else names
    yield Difference(kind, f"{what} {list_some(names) or 'the model'} differ", names)


def _forward(a: Record, b: Record, names: tuple[str, str]) -> Iterator[Difference]:
    mine, theirs = dict(a.get("modules") or ()), dict(b.get("modules") or ())
    changed = tuple(name for name in mine if name in theirs and mine[name] != theirs[name])
    called = tuple(name for name in {**mine, **theirs} if (name in mine) != (name in theirs))
    if called and mine and theirs:
        yield Difference(FORWARD, f"the forward pass called other modules: {list_some(called)}", called)
    if changed:
        yield Difference(FORWARD, f"the output of {changed[0]} differs, the first of {len(changed)}", changed)
    for key, word in (("loss", "the loss"), ("used loss", "the loss that was differentiated")):
        one, other = a.get(key, a.get("loss")), b.get(key, b.get("loss"))
        if one != other:
            values = [f"{name}: {_number(each)}" for name, each in zip(names, (one, other), strict=True)]
            yield Difference(LOSS, f"{word} differs ({', '.join(values)})")
            return


def _number(text: Any) -> str:
    return repr(as_number(text)) if isinstance(text, str) else "none"


def _settings(a: Record, b: Record, names: tuple[str, str]) -> Iterator[Difference]:
    if a.get("settings") == b.get("settings"):
        return
    one, other = ((each.get("values") or {}).get("settings") or {} for each in (a, b))
    differing = _differing(one, other)
    rates = tuple(each for each in differing if each.endswith((": lr", ": initial_lr")))
    for kind, found in ((RATE, rates), (SETTING, tuple(each for each in differing if each not in rates))):
        if found:
            yield Difference(kind, _values(found, one, other, names), found)


def _values(found: tuple[str, ...], one: Record, other: Record, names: tuple[str, str]) -> str:
    shown = [
        f"{each} is {one.get(each, 'missing')} in {names[0]} and {other.get(each, 'missing')} in {names[1]}"
        for each in found[:3]
    ]
    return "; ".join(shown) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def _hidden(a: Record, b: Record, names: tuple[str, str]) -> Iterator[Difference]:
    """Yield the modes and flags that differ: causes, which need not have an effect."""
    readers: tuple[tuple[str, str, Callable[[str], str]], ...] = (
        ("modes", MODE, lambda text: text or "nothing"),
        ("flags", FLAG, lambda text: text),
    )
    for key, kind, word in readers:
        if a.get(key) != b.get(key):
            one, other = ((each.get("values") or {}).get(key) or {} for each in (a, b))
            differing = _differing(one, other)
            shown = {name: [word(str(each.get(name, ""))) for each in (one, other)] for name in differing}
            yield Difference(
                kind,
                "; ".join(
                    f"{name} is {mine} in {names[0]} and {theirs} in {names[1]}"
                    if kind == FLAG
                    else f"{name}: {mine} in {names[0]}, {theirs} in {names[1]}"
                    for name, (mine, theirs) in shown.items()
                ),
                differing,
            )
