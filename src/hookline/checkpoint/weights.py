"""Weights alone: a warm start from those of another run or file, with a report of what fitted."""

from __future__ import annotations

import functools
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError
from torch import Tensor, nn

from hookline.checkpoint import manifest as manifests
from hookline.checkpoint.averages import check_weights, choose_weights
from hookline.checkpoint.catalog import Read, find, first_whole, newest_first
from hookline.checkpoint.files import read, read_manifest, read_weights
from hookline.checkpoint.foreign_files import Imported
from hookline.checkpoint.remote import list_urls
from hookline.checkpoint.sharded import ShardedTensor, materialize_tensor, sharded_tensors
from hookline.checkpoint.tensors import read_tensors
from hookline.run.record import read_record, run_dir_of, unsaved_end
from hookline.util.errors import CheckpointError, OptionError, closest
from hookline.util.text import redact
from hookline.util.urls import as_url, is_url

log = logging.getLogger("hookline")
SHOWN = 8
"""Names of one kind in a report's text; its lists have them all."""

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str | None]


@dataclass(slots=True)
class WeightsReport:
    """What came of loading weights into a module; print it."""

    source: str
    module: str
    wanted: int
    """How many the module has."""
    step: int | None = None
    """The step of the checkpoint that they are from."""
    weights: str = "raw"
    """'averaged' if they are the average that a hook keeps, else 'raw'."""
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """The module has them, the source does not: they stay as they were."""
    unexpected: list[str] = field(default_factory=list)
    """The source has them, the module does not."""
    mismatched: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    """The shape in the source and the shape in the module; never loaded."""

    @property
    def complete(self) -> bool:
        """Whether everything fitted, both ways."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        facts = [f"step {self.step}"] * (self.step is not None) + ["averaged weights"] * (
            self.weights == "averaged"
        )
        about = f" ({', '.join(facts)})" if facts else ""
        head = f"{self.source}{about} -> {self.module}: {len(self.loaded)} of {self.wanted} weights loaded"
        return "\n".join([head, *self.problems()])

    def problems(self) -> list[str]:
        """What did not fit, a line for each kind, and what may help."""
        lines = []
        if self.missing:
            lines.append(f"  missing, only the module has them: {_some(self.missing)}")
        if self.unexpected:
            lines.append(f"  unexpected, only the source has them: {_some(self.unexpected)}")
        if self.mismatched:
            shapes = [
                f"{name} ({theirs} there, {ours} in the module)"
                for name, (theirs, ours) in self.mismatched.items()
            ]
            lines.append(f"  of another shape, not loaded: {_some(shapes)}")
        return [*lines, *self._hint()]

    def _hint(self) -> list[str]:
        """Most names that do not fit differ by one prefix: a wrapper, or a part of a larger module."""
        for longer, shorter, made in (
            (self.unexpected, self.missing, "{{{0!r}: ''}}"),
            (self.missing, self.unexpected, "{{'': {0!r}}}"),
        ):
            known = set(shorter)
            prefixes = {
                name[: -len(each)] for name in longer[:SHOWN] for each in shorter if name.endswith("." + each)
            }
            for prefix in prefixes:
                if 2 * sum(name.removeprefix(prefix) in known for name in longer) > len(longer):
                    return [f"  The names differ by a prefix: pass rename={made.format(prefix)}."]
        near = {name: closest(name, self.missing) for name in self.unexpected[:SHOWN]}
        return [f"  {name}:{hint}" for name, hint in near.items() if hint]


def load_weights(
    module: nn.Module, source: Any, strict: bool = True, rename: Rename | None = None, weights: str = "scored"
) -> WeightsReport:
    """Give a module the weights of another run: a warm start, without optimizer, counters or hooks.

    source: a checkpoint (a directory or an fsspec URL), a run's directory (its newest whole checkpoint), a
    .safetensors file, a mapping of names to tensors, or what `import_checkpoint` returned.
    strict: everything must fit, otherwise nothing is loaded and the error holds the report; False: what fits
    is loaded. rename: {old prefix: new prefix}, or a function from a name in the source to the module's, or
    to None to leave it out. weights: of a checkpoint with averaged weights: 'scored' takes those that
    evaluations used, 'raw' the trained ones, 'averaged' the average. The report says which, and of which
    step.
    """
    found = find_weights(source, weights, as_shards=bool(sharded_tensors(module)))
    return put_weights(
        module, _renamed(found.weights, rename, found.where), found.where, strict, found.step, found.kind
    )


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """The weights that a source holds."""

    where: str
    """What to call the source in messages."""
    weights: Mapping[str, Any]
    step: int | None = None
    kind: str = "raw"
    """'averaged' or 'raw'."""


def find_weights(source: Any, wanted: str = "scored", as_shards: bool = False) -> FoundWeights:
    """Return the weights that a source holds; `as_shards`: those of a checkpoint may be read
    later, in parts.
    """
    check_weights(wanted)
    if isinstance(source, Imported | Mapping) or _is_file(source):
        if isinstance(source, Imported):
            found = FoundWeights(str(source.path), source.weights)
        elif isinstance(source, Mapping):
            found = FoundWeights("the mapping", source)
        else:
            found = FoundWeights(str(source), _read_file(Path(source)))
        if wanted == "averaged":
            raise OptionError(
                f"{found.where} holds no averaged weights beside others, as a checkpoint does: leave "
                f"weights= out."
            )
        return found
    if not isinstance(source, str | os.PathLike):
        raise OptionError(
            f"Weights cannot be taken from a {type(source).__name__}: pass a checkpoint, a run's directory, "
            "a .safetensors file, or a mapping such as module.state_dict()."
        )
    read = read_checkpoint(source, functools.partial(read_weights, as_shards=as_shards))
    chosen = choose_weights(read.contents, wanted, read.where)
    return FoundWeights(read.where, chosen.weights, read.step, chosen.kind)


def _is_file(source: Any) -> bool:
    return isinstance(source, str | os.PathLike) and not as_url(_plain(source)) and Path(source).is_file()


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """A checkpoint that was found and read."""

    where: str
    contents: dict[str, Any]
    step: int


def read_checkpoint(source: str | os.PathLike[str], read: Read = read) -> ReadCheckpoint:
    """Read a checkpoint by its path or URL, or the newest whole one below it, which is logged
    with its step.
    """
    path = _plain(source)
    url = as_url(path)
    if url:
        return _read_below_url(url, read)
    if not Path(path).is_dir() or (Path(path) / manifests.NAME).exists():
        return ReadCheckpoint(str(path), read(path), read_manifest(path)["step"])
    found, broken = find(Path(path))
    records = {
        each.path: read_record(run_dir) for each in found if (run_dir := run_dir_of(each.path, Path(path)))
    }
    # those of a run that was begun anew in this directory come before those of the run before it
    found.sort(key=lambda each: records.get(each.path, {}).get("id", each.run) != each.run)
    chosen, contents, unreadable = first_whole(found, read)
    passed_over = {**broken, **unreadable}
    if chosen is None:
        reasons = "".join(f"\n  {reason}" for reason in passed_over.values())
        raise CheckpointError(f"{path} is no checkpoint, and there is no whole one below it.{reasons}")
    for each, reason in passed_over.items():
        log.warning("passing over %s: %s", each, reason)
    step = chosen.manifest["step"]
    log.warning("%s: taking %s, of step %d.", path, chosen.path, step)
    record = records.get(chosen.path, {})
    if record.get("id", chosen.run) != chosen.run:
        log.warning(
            "%s is of an earlier run in this directory; the present one has saved nothing yet.", chosen.path
        )
    elif missing := unsaved_end(record, chosen.manifest):
        log.warning("%s was %s.", path, missing)
    return ReadCheckpoint(str(chosen.path), contents, step)


def put_weights(
    module: nn.Module,
    weights: Mapping[str, Any],
    where: str,
    strict: bool = True,
    step: int | None = None,
    kind: str = "raw",
) -> WeightsReport:
    """Load weights by name. What the module says about its names counts: it may have its own ways of reading
    older ones.
    """
    own = module.state_dict()
    if any(isinstance(each, Tensor) and each.is_meta for each in own.values()):
        raise OptionError(
            f"{type(module).__name__} is on the meta device, where weights have no place: "
            "call module.to_empty(device='cpu') first."
        )
    report = WeightsReport(where, type(module).__name__, len(own), step, kind)
    sharded = sharded_tensors(module)
    fitting: Any = OrderedDict()
    fitting._metadata = getattr(weights, "_metadata", OrderedDict())  # the versions of its layers
    for name, value in weights.items():
        if name in own and not _fits(value, own[name]):
            report.mismatched[name] = (_shape(value), _shape(own[name]))
        else:
            is_sharded = isinstance(value, ShardedTensor) or (name in sharded and isinstance(value, Tensor))
            fitting[name] = materialize_tensor(value, sharded.get(name)) if is_sharded else value
    if fitting.keys() == own.keys():
        _load(module, fitting, where)
        report.loaded = list(fitting)
        return report
    before = {
        name: each.clone() if isinstance(each, Tensor) else each
        for name, each in own.items()
        if strict and not _is_lazy(each)
    }
    result = _load(module, fitting, where, strict=False)  # nothing, from a load_state_dict of the user's own
    missing, unexpected = result or (
        [x for x in own if x not in fitting],
        [x for x in fitting if x not in own],
    )
    report.unexpected = list(unexpected)
    refused = set(unexpected)
    report.loaded = [name for name in fitting if name not in refused]
    # many tools store tied weights under one name only: one that lies where a loaded one does has got its
    # numbers
    filled = {_memory(own.get(name)) for name in report.loaded} - {None}
    report.missing = [
        name for name in missing if name not in report.mismatched and _memory(own.get(name)) not in filled
    ]
    if report.complete:
        return report
    if strict:
        module.load_state_dict(before, strict=False)
        report.loaded = []
        raise CheckpointError(
            "\n".join(
                [
                    f"The weights in {where} do not fit {report.module}, and none was loaded:",
                    *report.problems(),
                    "  strict=False loads those that fit.",
                ]
            )
        )
    log.warning("%s", report)
    return report


def _load(module: nn.Module, weights: Mapping[str, Any], where: str, **options: Any) -> Any:
    try:
        return module.load_state_dict(weights, **options)
    except (
        RuntimeError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
    ) as error:  # a module may have checks of its own
        raise CheckpointError(
            f"The weights in {where} do not fit {type(module).__name__}: {error}"
        ) from error


def _fits(theirs: Any, ours: Any) -> bool:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor | ShardedTensor):
        return _is_lazy(ours) or _is_lazy(theirs) or theirs.shape == ours.shape
    return not isinstance(ours, Tensor)  # state of the user's own kind: the module knows


def _is_lazy(value: Any) -> bool:
    return isinstance(value, Tensor) and nn.parameter.is_lazy(value)


def _shape(value: Any) -> Any:
    return (
        list(value.shape)
        if isinstance(value, Tensor | ShardedTensor) and not _is_lazy(value)
        else f"a {type(value).__name__}"
    )


def _memory(value: Any) -> tuple[Any, ...] | None:
    """Where a tensor lies; None for what has no place."""
    if not isinstance(value, Tensor) or _is_lazy(value) or not value.numel():
        return None
    return value.data_ptr(), value.shape, value.stride()


def _renamed(weights: Mapping[str, Any], rename: Rename | None, where: str) -> Mapping[str, Any]:
    if rename is None:
        return weights
    new_name = rename if callable(rename) else _prefixes(weights, rename, where)
    made: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in weights.items():
        new = new_name(name)
        if new is None:
            continue
        if new in made:
            raise OptionError(f"rename: {origin[new]!r} and {name!r} would both be called {new!r}.")
        made[new], origin[new] = value, name
    return made


def _prefixes(weights: Mapping[str, Any], prefixes: Mapping[str, str], where: str) -> Callable[[str], str]:
    for old in prefixes:
        if not any(name.startswith(old) for name in weights):
            parts = sorted({f"{name.partition('.')[0]}." for name in weights})
            raise OptionError(
                f"rename: no name in {where} begins with {old!r}.{closest(old, parts)} "
                f"They begin with: {_some(parts)}."
            )
    longest_first = sorted(prefixes, key=len, reverse=True)

    def new_name(name: str) -> str:
        old = next((each for each in longest_first if name.startswith(each)), None)
        return name if old is None else prefixes[old] + name.removeprefix(old)

    return new_name


def _read_file(path: Path) -> Mapping[str, Any]:
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path} is no .safetensors file. One of torch.save or Lightning is read only by an explicit "
            f"call: load_weights(module, hookline.import_checkpoint({str(path)!r}))."
        )
    try:
        return read_tensors(path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _read_below_url(url: str, read: Read) -> ReadCheckpoint:
    below = list_urls(url)
    if url.rstrip("/") in below or not below:
        return ReadCheckpoint(redact(url), read(url), read_manifest(url)["step"])
    problems = []
    for each in newest_first(below, _manifest_at):
        try:
            taken = ReadCheckpoint(redact(each), read(each), read_manifest(each)["step"])
        except CheckpointError as error:
            problems.append(str(error))
            log.warning("passing over %s: %s", redact(each), error)
            continue
        log.warning("%s: taking %s, of step %d.", redact(url), taken.where, taken.step)
        return taken
    raise CheckpointError("\n  ".join([f"There is no whole checkpoint below {redact(url)}.", *problems]))


def _manifest_at(url: str) -> Mapping[str, Any]:
    try:
        return read_manifest(url)
    except CheckpointError:
        return {}


def _plain(source: str | os.PathLike[str]) -> Path | str:
    """Text if it is a URL, else a path."""
    return source if isinstance(source, str) and is_url(source) else Path(source)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
