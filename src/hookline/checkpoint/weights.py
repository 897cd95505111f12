"""Weights alone: load those of another run or file (a warm start), or make a module of them."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn

from hookline.checkpoint import files
from hookline.checkpoint.averages import CHOICES, FoundWeights, check_weights, choose_weights, weights_of_hook
from hookline.checkpoint.base_weights import complete_weights, fingerprint, left_out_in
from hookline.checkpoint.catalog import Read, find_with_files, first_whole, newest_first
from hookline.checkpoint.dcp_folder import is_dcp_folder
from hookline.checkpoint.files import read, read_manifest, read_weights
from hookline.checkpoint.foreign_files import Imported, read_safetensors
from hookline.checkpoint.hf_folder import is_hf_folder, read_hf_folder
from hookline.checkpoint.remote import list_urls
from hookline.checkpoint.sharded import ShardedTensor, materialize_tensor, sharded_tensors
from hookline.engine.events import EVENTS
from hookline.engine.foreign import adopt_steps
from hookline.engine.listener import find_listeners
from hookline.run.record import read_record, run_dir_of, unsaved_end
from hookline.run.state import State
from hookline.util.errors import CheckpointError, OptionError, closest
from hookline.util.terminal import log_notice
from hookline.util.text import list_some, redact
from hookline.util.urls import MANIFEST, as_url, is_url

log = logging.getLogger("hookline")
MOST_NAMES_SHOWN = 8
"""Names of one kind in a report's text; its lists have all names."""

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str | None]


@dataclass(slots=True, repr=False)
class WeightsReport:
    """The result of loading weights into a module; `print` it, or put it in the last line of a cell.

    source: where the weights are from. module: the class of the module. loaded: the names of the loaded
    weights.
    """

    source: str
    module: str
    wanted: int
    """The number of weights in the module."""
    step: int | None = None
    """The step of the checkpoint, if the source is one."""
    weights: str = "raw"
    """'averaged' if a hook has averaged them, else 'raw'."""
    base: str = ""
    """The fingerprint of the base model, if the source holds only trainable weights: the module has it."""
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Weights that only the module has; they are not changed."""
    unexpected: list[str] = field(default_factory=list)
    """Weights that only the source has."""
    mismatched: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    """The shape in the source and the shape in the module; these weights are not loaded."""

    @property
    def complete(self) -> bool:
        """Return whether the source and the module have the same weights."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        facts = [f"step {self.step}"] * (self.step is not None) + ["averaged weights"] * (
            self.weights == "averaged"
        )
        about = f" ({', '.join(facts)})" if facts else ""
        head = f"{self.source}{about} -> {self.module}: {len(self.loaded)} of {self.wanted} weights loaded"
        head += f", the others are those of the base model {self.base}" if self.base else ""
        return "\n".join([head, *self.problems()])

    __repr__ = __str__  # its lists have every name of the model

    def problems(self) -> list[str]:
        """Return a line for each kind of mismatch, and a hint."""
        lines = []
        if self.missing:
            lines.append(f"  missing, only the module has them: {list_some(self.missing, MOST_NAMES_SHOWN)}")
        if self.unexpected:
            lines.append(
                f"  unexpected, only the source has them: {list_some(self.unexpected, MOST_NAMES_SHOWN)}"
            )
        if self.mismatched:
            shapes = [
                f"{name} ({theirs} in the source, {ours} in the module)"
                for name, (theirs, ours) in self.mismatched.items()
            ]
            lines.append(f"  of another shape, not loaded: {list_some(shapes, MOST_NAMES_SHOWN)}")
        return [*lines, *self._hint()]

    def _hint(self) -> list[str]:
        """Return a `rename=` for a common prefix, as from a wrapper, or else the closest names."""
        for longer, shorter, template in (
            (self.unexpected, self.missing, "{{{0!r}: ''}}"),
            (self.missing, self.unexpected, "{{'': {0!r}}}"),
        ):
            known = set(shorter)
            prefixes = {
                name[: -len(each)]
                for name in longer[:MOST_NAMES_SHOWN]
                for each in shorter
                if name.endswith("." + each)
            }
            for prefix in prefixes:
                if 2 * sum(name.removeprefix(prefix) in known for name in longer) > len(longer):
                    return [f"  The names differ by a prefix: pass rename={template.format(prefix)}."]
        near = {name: closest(name, self.missing) for name in self.unexpected[:MOST_NAMES_SHOWN]}
        return [f"  {name}:{hint}" for name, hint in near.items() if hint]


def load_weights(
    module: nn.Module, source: Any, strict: bool = True, rename: Rename | None = None, weights: str = "scored"
) -> WeightsReport:
    """Load the weights of another run into a module: a warm start, without optimizer, counters or hooks.

    source: a checkpoint (a directory, an fsspec URL or a .ckpt file of Lightning), a run's directory (its
    newest complete checkpoint), a .safetensors file, a folder of them as transformers writes it, a mapping of
    names to tensors, or the result of `import_checkpoint`.
    strict: raise an error with the report, and load nothing, unless all weights match; False: load those
    that match, also trainable weights into another base model. rename: {old prefix: new prefix}, or a
    function from a name in the source to the name in the module, or to None to leave the weight out.
    weights: 'scored' takes the weights that evaluations used, 'raw' the trained weights, 'averaged' the
    average. The report says which, and of which step.

    module: the module to load them into.
    """
    _check_strict(strict)
    found = find_weights(source, weights, as_shards=bool(sharded_tensors(module)))
    return put_weights(module, replace(found, weights=rename_weights(found, rename)), strict)


def _check_strict(strict: Any) -> None:
    """Raise an OptionError for another value than True or False, such as the name of a checkpoint."""
    if isinstance(strict, bool):
        return
    instead = (
        f"pass weights={strict!r}"
        if strict in CHOICES
        else "pass the path of a checkpoint as source; trainer.load_best(module) loads the best one of a run"
    )
    raise OptionError(
        f"strict={strict!r} must be True or False. To choose which weights are loaded, {instead}.",
        option="strict",
        value=strict,
    )


def find_weights(source: Any, wanted: str = "scored", as_shards: bool = False) -> FoundWeights:
    """Return the weights of a source. as_shards: leave the sharded tensors of a checkpoint unread."""
    check_weights(wanted)
    if is_plain_source(source) or _is_file(source):
        if isinstance(source, Imported):
            found = FoundWeights(str(source.path), source.weights, source.step)
        elif isinstance(source, Mapping):
            found = FoundWeights("the mapping", source)
        elif _is_file(source):
            found = FoundWeights(str(source), _read_file(Path(source)))
        else:
            found = FoundWeights(str(source), read_hf_folder(Path(source)))
        if wanted == "averaged":
            raise OptionError(
                f"{found.where} does not contain averaged weights: only a checkpoint can. Leave out "
                "weights='averaged'."
            )
        return found
    if not isinstance(source, str | os.PathLike):
        raise OptionError(
            f"Weights cannot be taken from a {type(source).__name__}: pass a checkpoint, a run's directory, "
            "a .safetensors file, a folder of them, or a mapping such as module.state_dict()."
        )
    return weights_of_checkpoint(source, wanted, None, as_shards)


def weights_of_checkpoint(source: Any, wanted: str, hook: str | None, as_shards: bool) -> FoundWeights:
    """Return weights of a checkpoint, or of a run's newest one. hook: those in the state of this hook."""
    if not is_url(source) and is_dcp_folder(Path(source)):
        raise CheckpointError(
            f"{source} was written by torch.distributed.checkpoint. To use its weights, pass the result of "
            f"hookline.import_checkpoint({str(source)!r})."
        )
    if hook is None:
        read = read_checkpoint(source, functools.partial(read_weights, as_shards=as_shards))
        return choose_weights(read.contents, wanted, read.where, read.step)
    read = read_checkpoint(source)
    return FoundWeights(read.where, weights_of_hook(read.contents, hook, read.where), read.step, hook)


def is_plain_source(source: Any) -> bool:
    """Return whether a source has weights and nothing else; another file may be another tool's checkpoint."""
    if isinstance(source, Imported | Mapping):
        return True
    if not isinstance(source, str | os.PathLike) or is_url(source):
        return False
    path = Path(source)
    return (path.suffix == ".safetensors" and path.is_file()) or is_hf_folder(path)


def _is_file(source: Any) -> bool:
    """Return whether a source is a file that is not a checkpoint of Lightning."""
    if not isinstance(source, str | os.PathLike) or as_url(_path_or_url(source)):
        return False
    return Path(source).is_file() and Path(source).suffix != ".ckpt"


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """A checkpoint that was found and read."""

    where: str
    contents: dict[str, Any]
    step: int


def read_checkpoint(source: str | os.PathLike[str], read: Read = read) -> ReadCheckpoint:
    """Read the checkpoint at a path or URL, or else the newest complete one below it, and log which."""
    path = _path_or_url(source)
    url = as_url(path)
    if url:
        return _read_below_url(url, read)
    if Path(path).is_file():
        contents = files.read(path)
        return ReadCheckpoint(str(path), contents, contents["counters"]["step"])
    if not Path(path).is_dir() or (Path(path) / MANIFEST).exists():
        return ReadCheckpoint(str(path), read(path), read_manifest(path)["step"])
    found, broken = find_with_files(Path(path), read_record(Path(path)))
    records = {
        each.path: read_record(run_dir) for each in found if (run_dir := run_dir_of(each.path, Path(path)))
    }
    # the checkpoints of the current run come before those of earlier runs in this directory
    found.sort(key=lambda each: records.get(each.path, {}).get("id", each.run) != each.run)
    chosen, contents, unreadable = first_whole(found, read)
    passed_over = {**broken, **unreadable}
    if chosen is None:
        reasons = "".join(f"\n  {reason}" for reason in passed_over.values())
        raise CheckpointError(f"{path} is not a checkpoint, and there is no complete one below it.{reasons}")
    for skipped, reason in passed_over.items():
        log.warning("skipping %s: %s", skipped, reason)
    step = chosen.manifest["step"]
    log_notice(log, "%s: taking %s, of step %d.", path, chosen.path, step)
    record = records.get(chosen.path, {})
    if record.get("id", chosen.run) != chosen.run:
        log.warning(
            "%s is from an earlier run in this directory; the current run has not saved a checkpoint yet.",
            chosen.path,
        )
    elif missing := unsaved_end(record, chosen.manifest):
        log.warning("%s was %s.", path, missing)
    return ReadCheckpoint(str(chosen.path), contents, step)


def put_weights(module: nn.Module, found: FoundWeights, strict: bool = True) -> WeightsReport:
    """Load weights by name. Use the module's own report, because it may convert older names."""
    own, where = module.state_dict(), found.where
    if any(isinstance(each, Tensor) and each.is_meta for each in own.values()):
        raise OptionError(
            f"{type(module).__name__} is on the meta device, which has no memory for weights: "
            "call module.to_empty(device='cpu') first."
        )
    report = WeightsReport(where, type(module).__name__, len(own), found.step, found.kind)
    left_out = left_out_in(found.weights)
    weights = complete_weights(module, found.weights, where, strict)
    report.base = fingerprint(left_out) if left_out.keys() <= weights.keys() else ""
    sharded = sharded_tensors(module)
    fitting: Any = OrderedDict()
    fitting._metadata = getattr(weights, "_metadata", OrderedDict())  # the versions of the layers
    for name, value in weights.items():
        if name in own and not _fits(value, own[name]):
            report.mismatched[name] = (_shape_of(value), _shape_of(own[name]))
        else:
            is_sharded = isinstance(value, ShardedTensor) or (name in sharded and isinstance(value, Tensor))
            fitting[name] = materialize_tensor(value, sharded.get(name)) if is_sharded else value
    if fitting.keys() == own.keys():
        _load(module, fitting, where)
        report.loaded = [name for name in fitting if name not in left_out]
        return report
    before = {
        name: each.clone() if isinstance(each, Tensor) else each
        for name, each in own.items()
        if strict and not _is_lazy(each)
    }
    result = _load(module, fitting, where, strict=False)  # None from a user's load_state_dict
    missing, unexpected = result or (
        [x for x in own if x not in fitting],
        [x for x in fitting if x not in own],
    )
    report.unexpected = list(unexpected)
    refused = set(unexpected)
    report.loaded = [name for name in fitting if name not in refused and name not in left_out]
    # many tools store tied weights under one name: a weight that shares memory with a loaded one is loaded
    filled = {_memory_of(own.get(name)) for name in report.loaded} - {None}
    report.missing = [
        name for name in missing if name not in report.mismatched and _memory_of(own.get(name)) not in filled
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
    # a module may have its own checks
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"The weights in {where} do not fit {type(module).__name__}: {error}"
        ) from error


def _fits(theirs: Any, ours: Any) -> bool:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor | ShardedTensor):
        return _is_lazy(ours) or _is_lazy(theirs) or theirs.shape == ours.shape
    return not isinstance(ours, Tensor)  # extra state, which the module itself checks


def _is_lazy(value: Any) -> bool:
    return isinstance(value, Tensor) and nn.parameter.is_lazy(value)


def _shape_of(value: Any) -> Any:
    return (
        list(value.shape)
        if isinstance(value, Tensor | ShardedTensor) and not _is_lazy(value)
        else f"a {type(value).__name__}"
    )


def _memory_of(value: Any) -> tuple[Any, ...] | None:
    """Return the address and layout of a tensor; None if it has no memory."""
    if not isinstance(value, Tensor) or _is_lazy(value) or not value.numel():
        return None
    return value.data_ptr(), value.shape, value.stride()


def rename_weights(found: FoundWeights, rename: Rename | None) -> Mapping[str, Any]:
    """Return weights under their new names."""
    weights = found.weights
    if rename is None:
        return weights
    new_name = rename if callable(rename) else _rename_prefixes(weights, rename, found.where)
    renamed: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in weights.items():
        new = new_name(name)
        if new is None:
            continue
        if new in renamed:
            raise OptionError(f"rename: {origin[new]!r} and {name!r} would both be renamed to {new!r}.")
        renamed[new], origin[new] = value, name
    if weights and not renamed:
        raise OptionError(
            f"rename leaves out every weight of {found.where}. Their names start with: "
            f"{list_some(_first_parts(weights), MOST_NAMES_SHOWN)}."
        )
    return renamed


def _rename_prefixes(
    weights: Mapping[str, Any], prefixes: Mapping[str, str], where: str
) -> Callable[[str], str]:
    for old in prefixes:
        if not any(name.startswith(old) for name in weights):
            parts = _first_parts(weights)
            raise OptionError(
                f"rename: no name in {where} starts with {old!r}.{closest(old, parts)} "
                f"They start with: {list_some(parts, MOST_NAMES_SHOWN)}."
            )
    longest_first = sorted(prefixes, key=len, reverse=True)

    def new_name(name: str) -> str:
        old = next((each for each in longest_first if name.startswith(each)), None)
        return name if old is None else prefixes[old] + name.removeprefix(old)

    return new_name


def _first_parts(weights: Mapping[str, Any]) -> list[str]:
    return sorted({f"{name.partition('.')[0]}." for name in weights})


def _read_file(path: Path) -> Mapping[str, Any]:
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path} is not a .safetensors file, or a .ckpt file of Lightning. To read a file of torch.save, "
            f"call load_weights(module, hookline.import_checkpoint({str(path)!r}))."
        )
    return read_safetensors(path)


def _read_below_url(url: str, read: Read) -> ReadCheckpoint:
    below = list_urls(url)
    if url.rstrip("/") in below or not below:
        return ReadCheckpoint(redact(url), read(url), read_manifest(url)["step"])
    problems = []
    for checkpoint in newest_first(below, _manifest_or_empty):
        try:
            taken = ReadCheckpoint(redact(checkpoint), read(checkpoint), read_manifest(checkpoint)["step"])
        except CheckpointError as error:
            problems.append(str(error))
            log.warning("skipping %s: %s", redact(checkpoint), error)
            continue
        log_notice(log, "%s: taking %s, of step %d.", redact(url), taken.where, taken.step)
        return taken
    raise CheckpointError("\n  ".join([f"There is no complete checkpoint below {redact(url)}.", *problems]))


def _manifest_or_empty(url: str) -> Mapping[str, Any]:
    try:
        return read_manifest(url)
    except CheckpointError:
        return {}


def _path_or_url(source: str | os.PathLike[str]) -> Path | str:
    """Return a URL as text, anything else as a Path."""
    return source if isinstance(source, str) and is_url(source) else Path(source)


# ---- a module from a checkpoint ----------------------------------------------------------------------------


M = TypeVar("M", bound=nn.Module)


def load_module(
    cls: type[M], path: str | os.PathLike[str], strict: bool = True, weights: Any = "scored", **overrides: Any
) -> M:
    """Create a `cls` with the arguments in the checkpoint, updated by `overrides`, and load its weights.

    weights: as for `load_weights`; if the class has an argument of this name, the value is for the class.

    cls: the class of the module. path: a checkpoint, an fsspec URL, or the directory of a run. strict: all
    weights must fit. overrides: constructor arguments that replace those of the checkpoint.
    """
    if "weights" in inspect.signature(cls.__init__).parameters:
        overrides, weights = overrides if weights == "scored" else {**overrides, "weights": weights}, "scored"
    check_weights(weights)
    _check_strict(strict)
    read = read_checkpoint(path)
    where, contents = read.where, read.contents
    bound = _bind_arguments(cls, contents, overrides, where)
    module: Any = cls(*bound.args, **bound.kwargs)
    if hasattr(module, "configure_model"):  # not a plain nn.Module
        module.configure_model()
        state = State(module=module, checkpoint=contents, path=where if is_url(where) else Path(where))
        foreign = adopt_steps(module)  # a module of another package has its own hooks
        listeners = (
            foreign.listeners(cls.__name__, EVENTS)
            if foreign
            else find_listeners(module, "M", cls.__name__, EVENTS)
        )
        for listener in listeners:
            if listener.event.name == "module_load_checkpoint":
                listener.binding.call(state)
    put_weights(module, choose_weights(contents, weights, where, read.step), strict)
    return module  # type: ignore[no-any-return]


def _bind_arguments(
    cls: type[nn.Module], contents: dict[str, Any], overrides: dict[str, Any], where: str
) -> inspect.BoundArguments:
    """Bind saved and given arguments to `__init__`; ignore saved ones that it does not take."""
    saved, left_out = contents.get("hparams", {}), contents.get("hparams_left_out", {})
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    rest = next((each.name for each in parameters if each.kind is each.VAR_KEYWORD), None)
    named = {each.name: each for each in parameters if each.kind is not each.VAR_KEYWORD}
    for name in overrides:
        if name not in named and rest is None:
            raise OptionError(
                f"{cls.__name__}.__init__ has no argument {name!r}.{closest(name, named)} "
                f"It has: {', '.join(named) or 'none'}."
            )
    known = {**saved, **overrides}
    missing = [
        name
        for name, each in named.items()
        if each.default is each.empty and each.kind is not each.VAR_POSITIONAL and name not in known
    ]
    if missing:
        listed = ", ".join(
            f"{name} ({left_out[name]}, which a checkpoint cannot hold)" if name in left_out else name
            for name in missing
        )
        hint = "" if saved or left_out else ", or train with hooks=[HParams()]"
        raise OptionError(
            f"{where} does not contain these arguments of {cls.__name__}: {listed}. Pass them "
            f"(load_from_checkpoint(path, {missing[0]}=...)){hint}."
        )
    for name in left_out.keys() & named.keys() - overrides.keys():
        log.warning(
            "%s was created with %s=%s, which a checkpoint cannot hold: the default is used instead. To set "
            "it: load_from_checkpoint(path, %s=...).",
            cls.__name__,
            name,
            left_out[name],
            name,
        )
    bound = inspect.Signature(parameters).bind_partial()
    bound.arguments = {name: known[name] for name in named if name in known}
    if rest is not None:
        bound.arguments[rest] = {name: value for name, value in known.items() if name not in named}
    return bound
