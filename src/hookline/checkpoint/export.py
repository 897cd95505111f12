"""Export a checkpoint: its weights for other tools, or its module as a program that runs on its own."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import logging
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from hookline.checkpoint.averages import FoundWeights, check_weights
from hookline.checkpoint.base_weights import require_all_weights
from hookline.checkpoint.catalog import best_below, first_whole
from hookline.checkpoint.cleanup import left_overs
from hookline.checkpoint.export_formats import (
    SHARD_SIZE,
    ExportFormat,
    check_target,
    choose_format,
    put_in_place,
    write_weights,
)
from hookline.checkpoint.files import read_manifest, read_weights
from hookline.checkpoint.hf_folder import parse_size
from hookline.checkpoint.weights import (
    Rename,
    find_weights,
    is_plain_source,
    put_weights,
    rename_weights,
    weights_of_checkpoint,
)
from hookline.util.errors import CheckpointError, OptionError, closest, described, missing_package
from hookline.util.limited_json import RECORD_BYTES, parse_json, read_within
from hookline.util.terminal import log_notice
from hookline.util.text import printable, redact
from hookline.util.urls import MANIFEST, is_url, shown

log = logging.getLogger("hookline")
METHODS = ("forward", "predict_step")
STEP_ARGUMENTS = ("batch", "batch_idx", "dataloader_idx")
RECORD = "hookline.json"
"""The file in the directory that names its checkpoint."""

Write = Callable[[Mapping[str, Any], Path], None]
"""Writes weights, by their names in the module, to files in a directory."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    path: the file or folder. format: its format. step: the step of the checkpoint. tensors, numbers: how many
    tensors, and how many numbers in them.
    """

    path: Path
    format: str
    source: str
    """The checkpoint that was exported."""
    step: int | None
    hook: str | None
    """The hook that averaged the weights; None: they are the trained weights."""
    tensors: int
    numbers: int
    bytes: int
    """The size of all files."""


def export_checkpoint(
    source: Any,
    out: str | os.PathLike[str],
    format: str | None = None,
    *,
    module: nn.Module | None = None,
    example: Any = None,
    method: Literal["forward", "predict_step"] = "forward",
    dynamic_batch: bool = False,
    weights: str = "scored",
    hook: str | None = None,
    rename: Rename | None = None,
    shard_size: str | int | None = None,
    force: bool = False,
    checkpoint: Literal["auto", "best"] = "auto",
) -> Exported:
    """Write the weights of a checkpoint for other tools, or its module as an ONNX or torch.export program.

    source: as for `load_weights`: a checkpoint, a run's directory, a URL, a mapping, or the result of
    `import_checkpoint`. checkpoint: of a run's directory, the newest complete one ('auto') or the best one
    that a monitor kept ('best'). format: torch, safetensors, hf-sharded, dcp, onnx or torch-export; without
    it, the ending of `out` decides (.pt, .safetensors, .onnx, .pt2). The file or folder is complete or
    absent.

    module, example: for onnx and torch-export, a module of the run's class, and inputs for it. The module is
    exported in eval mode with the weights of the checkpoint, and gets its own weights and mode back. method:
    the method to export. For forward, `example` is an input, a tuple of inputs, or a dict of inputs by name;
    for predict_step, it is a batch. dynamic_batch: accept batches of any size, not only that of the example.

    weights: 'scored', 'raw' or 'averaged'. hook: take the weights in the state of this hook where it has
    them. rename: as for `load_weights`. shard_size: the largest file of hf-sharded, such as "5GB". force:
    replace an existing file, or a folder that an export wrote.

    out: the file or folder to write.
    """
    out = Path(out)
    chosen = choose_format(out, format)
    given = {"module": module is not None, "example": example is not None, "dynamic_batch": dynamic_batch}
    if not chosen.is_program and any(given.values()):
        name = next(name for name in given if given[name])
        raise OptionError(
            f"{name}= is for the formats onnx and torch-export, and {chosen.name} has weights only."
        )
    if shard_size is not None and chosen.name != "hf-sharded":
        raise OptionError(f"shard_size= is for the format hf-sharded, and not for {chosen.name}.")
    source = _choose_checkpoint(source, checkpoint)
    if chosen.is_program:
        program = _Program(module, example, method, dynamic_batch, chosen)
        check_target(out, chosen, force)
        found = find_exported(source, weights, hook)
        found = replace(found, weights=rename_weights(found, rename))
        program.export(found, out)
    else:
        found = export_weights(source, out, hook, force, weights, format, rename, shard_size or SHARD_SIZE)
    sizes = [math.prod(each.shape) for each in found.weights.values() if hasattr(each, "shape")]
    written = list(out.iterdir()) if out.is_dir() else [out]
    return Exported(
        out,
        chosen.name,
        found.where,
        found.step,
        found.hook,
        len(sizes),
        sum(sizes),
        sum(each.stat().st_size for each in written),
    )


def _choose_checkpoint(source: Any, which: Any) -> Any:
    """Return the source, or its best checkpoint if that is wanted."""
    if which == "auto":
        return source
    if which != "best":
        raise OptionError(
            f"checkpoint={which!r}: pass 'auto' or 'best'; a path is the source itself.",
            option="checkpoint",
            value=which,
        )
    folder = Path(source) if isinstance(source, str | os.PathLike) and not is_url(source) else None
    if folder is None or is_plain_source(folder) or not folder.is_dir() or (folder / MANIFEST).is_file():
        given = redact(source) if isinstance(source, str | os.PathLike) else f"a {type(source).__name__}"
        raise OptionError(f"checkpoint='best' searches the directory of a run, and {given} is not one.")
    found, _, unreadable = first_whole(best_below(folder), functools.partial(read_weights, as_shards=True))
    for path, reason in unreadable.items():
        log.warning("skipping %s: %s", path, reason)
    if found is None:
        raise CheckpointError(
            f"checkpoint='best': {source} has no checkpoint that a monitor kept for its score "
            "(ModelCheckpoint(monitor=...)) and that can be read. 'auto' takes the newest one."
        )
    log_notice(log, "%s: taking %s, the best, of step %d.", source, found.path, found.manifest["step"])
    return found.path


def export_weights(
    source: Any,
    out: Path,
    hook: str | None = None,
    force: bool = False,
    weights: str = "scored",
    format: str | None = None,
    rename: Rename | None = None,
    shard_size: str | int = SHARD_SIZE,
) -> FoundWeights:
    """Write weights in a format that holds weights only. The arguments are those of `export_checkpoint`.

    Without `format`, the ending of `out` decides. Return the weights, of which sharded ones are not read.
    """
    chosen = choose_format(out, format)
    if chosen.is_program:
        raise OptionError(
            f"The format {chosen.name} stores the computation too: call hookline.export_checkpoint(source, "
            "out, module=..., example=...)."
        )
    parse_size(shard_size)
    check_target(out, chosen, force)
    found = find_exported(source, weights, hook)
    require_all_weights(found.weights, found.where, "An export")
    found = replace(found, weights=rename_weights(found, rename))
    with put_in_place(out, is_file=bool(chosen.ending)) as path:
        write_weights(found.weights, path, chosen, shard_size)
    return found


def find_exported(source: Any, weights: str = "scored", hook: str | None = None) -> FoundWeights:
    """Return the weights to export, with sharded tensors unread. source, weights: as for `load_weights`.

    hook: take the weights in the state of this hook, such as an average, where it has them.
    """
    check_weights(weights)
    if hook is not None and weights == "raw":
        raise OptionError(
            f"--hook {hook} selects the weights of a hook, and --weights raw selects the trained weights: "
            "pass only one of them."
        )
    if is_plain_source(source):
        if hook is not None:
            raise OptionError(
                f"hook={hook!r} selects the weights of a hook, and only a checkpoint has hooks."
            )
        return find_weights(source, weights)
    return weights_of_checkpoint(source, weights, hook, as_shards=True)


# ---- programs ----------------------------------------------------------------------------------------------


class _Program:
    """A module with an example of its inputs, checked before a checkpoint is read."""

    def __init__(
        self, module: Any, example: Any, method: str, dynamic_batch: bool, format: ExportFormat
    ) -> None:
        call = f"hookline.export_checkpoint(source, out, {format.name!r}, module=Net(), example=inputs)"
        if not isinstance(module, nn.Module):
            raise OptionError(
                f"The format {format.name} stores the computation too: pass module=, a module of the class "
                f"that was trained, not {described(module)}: {call}."
            )
        if example is None:
            raise OptionError(
                f"The format {format.name} is traced with an example: pass example=, inputs as "
                f"{type(module).__name__}.{method} takes them: {call}."
            )
        if method not in METHODS or not callable(getattr(module, method, None)):
            raise OptionError(
                f"method={method!r}, allowed: those of {', '.join(METHODS)} that {type(module).__name__} "
                f"has.{closest(str(method), METHODS)}"
            )
        if format.name == "onnx" and importlib.util.find_spec("onnxscript") is None:
            raise OptionError(missing_package("The format onnx", "onnxscript", "onnx"))
        self.module, self.method, self.format = module, method, format
        self.arguments, self.keywords = _inputs(example, method)
        self.shapes: Any = None
        if dynamic_batch:
            self._vary_batch()

    def export(self, found: FoundWeights, out: Path) -> None:
        """Trace the module with these weights and write the program."""
        with _for_inference(self.module), torch.no_grad():
            put_weights(self.module, found)
            traced = self.module if self.method == "forward" else _Method(self.module, self.method)
            try:
                made = self._trace(traced)
            except Exception as error:  # tracing runs the user's code
                raise CheckpointError(self._explain(error)) from error
            with put_in_place(out, is_file=True) as path:
                if self.format.name == "onnx":
                    made.save(path)
                else:
                    torch.export.save(made, path)

    def _trace(self, traced: nn.Module) -> Any:
        if self.format.name == "torch-export":
            return torch.export.export(traced, self.arguments, self.keywords, dynamic_shapes=self.shapes)
        with warnings.catch_warnings():
            # about calls inside of torch and onnxscript, which a user cannot change
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.onnx.export(
                traced,
                self.arguments,
                kwargs=self.keywords,
                dynamic_shapes=self.shapes,
                dynamo=True,
                verbose=False,
            )

    def _explain(self, error: Exception) -> str:
        while error.__cause__ is not None:  # torch.onnx raises a page of advice from it
            error = cast(Exception, error.__cause__)
        reason = printable(str(error).strip().partition("\n")[0][:300]).rstrip(".") or "no reason given"
        hint = (
            "With dynamic_batch, the code must work for any batch size: it may not use the size as a number."
            if self.shapes is not None
            else "Python code that depends on the values of tensors cannot be traced."
        )
        return (
            f"{type(self.module).__name__}.{self.method} could not be exported as {self.format.name}: "
            f"{type(error).__name__}: {reason}. {hint}"
        )

    def _vary_batch(self) -> None:
        """Mark the first dimension of every input that has the batch's size as dynamic."""
        named = inspect.signature(self.module.forward).parameters
        if unnamed := [name for name in self.keywords if name not in named]:
            raise OptionError(
                f"dynamic_batch: torch varies only inputs that are parameters of {type(self.module).__name__}"
                f".forward, not those that **kwargs takes. Name each as a parameter: {', '.join(unnamed)}."
            )
        tensors = [
            each
            for each in _pytree.tree_leaves((self.arguments, self.keywords))
            if isinstance(each, Tensor) and each.dim()
        ]
        if not tensors:
            raise OptionError("dynamic_batch: the example has no tensor with a batch dimension.")
        size = tensors[0].shape[0]
        if size == 1:  # torch treats a dimension of one element as fixed
            self.arguments, self.keywords = _pytree.tree_map(
                lambda each: torch.cat([each, each]) if _has_batch(each, 1) else each,
                (self.arguments, self.keywords),
            )
            size = 2
        batch = torch.export.Dim("batch")
        shapes = _pytree.tree_map(
            lambda each: {0: batch} if _has_batch(each, size) else None, (self.arguments, self.keywords)
        )
        self.shapes = shapes[1] or shapes[0]


def _has_batch(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == size


def _inputs(example: Any, method: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the named inputs of a call."""
    if method == "forward" and isinstance(example, Mapping):
        return (), dict(example)
    if method == "forward" and type(example) is tuple:
        return example, {}
    return (example,), {}


class _Method(nn.Module):
    """A module whose forward is another method of a module, because programs are made of forward."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module = module
        self.call = getattr(module, method)
        known = list(inspect.signature(self.call).parameters.values())
        named = [each.name for each in known if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        if unknown := [name for name in named[1:] if name not in STEP_ARGUMENTS]:
            raise OptionError(
                f"{type(module).__name__}.{method} takes {unknown[0]!r}, which an exported program does not "
                f"have. It has: {', '.join(STEP_ARGUMENTS)}."
            )
        self.numbers = [0] * len(named[1:])

    def forward(self, batch: Any) -> Any:
        """Call the method for the first batch of the first loader."""
        return self.call(batch, *self.numbers)


@contextlib.contextmanager
def _for_inference(module: nn.Module) -> Iterator[None]:
    """Set a module to eval mode; give every part its mode and weights back at the end."""
    modes = {each: each.training for each in module.modules()}
    before = {
        name: each.clone() if isinstance(each, Tensor) else each for name, each in module.state_dict().items()
    }
    module.eval()
    try:
        yield
    finally:
        module.load_state_dict(before, strict=False)
        for each, mode in modes.items():
            each.training = mode


# ---- directories of a run that another program reads -------------------------------------------------------


def export_folder(checkpoint: Path | str, target: Path, write: Write) -> bool:
    """Write the weights of a checkpoint, those that evaluations used; return whether that was necessary.

    The files are written to a temporary directory, flushed and renamed. Only one process may write here: the
    directories that a killed one has left are removed.
    """
    manifest = read_manifest(checkpoint)
    _clean_up(target)
    if target.exists() and _read_record(target).get("checkpoint_sha256") == manifest["sha256"]:
        return False
    found = find_weights(checkpoint)
    target.parent.mkdir(parents=True, exist_ok=True)
    with put_in_place(target, is_file=False) as temporary:
        write(found.weights, temporary)
        about = {
            "checkpoint": _path_from(checkpoint, target),
            "checkpoint_sha256": manifest["sha256"],
            "run": manifest.get("run", ""),
            "step": manifest["step"],
            "weights": found.kind,
        }
        (temporary / RECORD).write_text(json.dumps(about, indent=2) + "\n")
    return True


def _path_from(checkpoint: Path | str, target: Path) -> str:
    """Return the path of the checkpoint as seen from the export, because a run's directory may be moved."""
    if isinstance(checkpoint, str) and is_url(checkpoint):
        return shown(checkpoint)
    return Path(os.path.relpath(checkpoint, target)).as_posix()


def _read_record(folder: Path) -> Mapping[str, Any]:
    """Return the record of an export. Raise if the directory is something else, which would be lost."""
    try:
        record = parse_json(read_within(folder / RECORD, RECORD_BYTES))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} exists and is not an export of Hookline (it has no readable {RECORD}), so it is not "
            "replaced. Move it away, or choose another directory."
        ) from error
    return record if isinstance(record, Mapping) else {}


def _clean_up(target: Path) -> None:
    """Restore an export whose replacement did not finish, and remove what a killed process has left."""
    for path, match in left_overs(target.parent):
        if match["name"] != target.name:
            continue
        if match["kind"] == "old" and not target.exists():
            os.rename(path, target)
        else:
            shutil.rmtree(path, ignore_errors=True)
