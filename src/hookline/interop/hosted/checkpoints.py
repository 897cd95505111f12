"""Save and restore the state of a hosted run, in a checkpoint of the host or one of Hookline."""

from __future__ import annotations

import base64
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn

from hookline.checkpoint import files
from hookline.checkpoint.base_weights import complete_weights
from hookline.checkpoint.contents import check_parts
from hookline.checkpoint.format import TensorStore, pack, unpack
from hookline.checkpoint.rank_state import HOOK_PREFIX, checksum
from hookline.checkpoint.sharded import sharded_tensors
from hookline.distributed.comm import Ranks
from hookline.interop.hosted.host import Host, HostedHooks
from hookline.run.finite import describe_nonfinite, find_nonfinite
from hookline.run.parts import EmittingRun
from hookline.run.save_request import Saved, SaveRequest
from hookline.run.state import State
from hookline.run.timer import timed
from hookline.training.restore import (
    check_groups,
    load_optimizer,
    load_scheduler,
    refuse_other_optimizers,
    restore_hook,
    restoring,
)
from hookline.training.run_events import begin_loading, edit_loaded, edit_saved, report_loaded, report_saved
from hookline.training.saving import counts_of, hook_states, kinds, manifest_facts
from hookline.util.errors import CheckpointError, NonFiniteLoss, OptionError
from hookline.util.urls import shown

log = logging.getLogger("hookline")


class KeptRun(EmittingRun, Protocol):
    """A hosted run, as far as a checkpoint is concerned."""

    host: Host
    hooks: HostedHooks

    @property
    def run_dir(self) -> Path:
        """Return the directory in which checkpoints are written."""
        ...

    def save_position(self, ranks: Ranks) -> dict[str, Any]:
        """Return the position of the loop on all ranks as a part of a checkpoint, if there is one."""
        ...

    def load_position(self, kept: dict[str, Any]) -> None:
        """Take the position of a checkpoint."""

    def continue_log(self, position: Any, path: str | Path) -> None:
        """Let the loggers continue from a checkpoint. position: theirs when it was saved, if known."""


HOSTED_PARTS = ("module", "optimizers", "schedulers", "counters", "hooks", "filters", "metrics", "log")
"""The parts of a hosted run's checkpoint. That of a loop also has "loggers", but not in older versions."""
RANKS_PART = "ranks"
"""The part that has, of each rank, what differs from rank 0's state."""


def hosted_state(view: KeptRun) -> dict[str, Any]:
    """Return the state of the hooks and of their filters, the counters and the newest metrics."""
    s, entries = view.state, view.hooks.in_order()
    return {
        "counters": s.counts.state_dict(),
        "hooks": hook_states(entries, s),
        "filters": {each.name: [counts_of(x) for x in each.listeners] for each in entries},
        "metrics": dict(s.metrics.read()),
        "log": s.log.state_dict(),
    }


def restore_state(view: KeptRun, kept: dict[str, Any], path: str | Path = "") -> None:
    """Restore the counters, the metrics, and the state of the hooks by their names. path: of the checkpoint,
    unless the host has loaded it.
    """
    s = view.state
    s.counts.load_state_dict(kept["counters"])
    view.resume.take({key: kept[key] for key in ("hooks", "filters")})
    s.log.newest.raw().update(kept["metrics"])
    if "log" in kept:
        s.log.load_state_dict(kept["log"])
    for entry in view.hooks.in_order():
        restore_hook(entry, kept, s)
    view.load_position(kept)
    view.continue_log(kept.get("loggers"), path or f"a checkpoint of {view.host.name}")


@timed("saving")
def save_hosted(view: KeptRun, request: SaveRequest, ranks: Ranks) -> None:
    """Write one checkpoint on rank 0, and report its success or failure on all ranks."""
    s = view.state
    if bad := find_nonfinite(s.optimizers):
        raise NonFiniteLoss(
            f"{describe_nonfinite(bad, s.optimizers)} {request.path or 'This state'} is not saved."
        )
    if shards := sharded_tensors(s.module):
        raise CheckpointError(
            f"{view.host.name} cannot save weights that are sharded over ranks ({len(shards)}, such as "
            f"{next(iter(shards))}): rank 0 has only its part of them. Save them with "
            "torch.distributed.checkpoint, or train with hookline.Trainer(strategy='fsdp')."
        )
    path = request.path or view.run_dir / "checkpoints" / f"step-{s.step}"
    contents = edit_saved(view, contents_of(view, ranks), path, request.reason)
    saved = Saved(path, request.reason, s.step)
    if s.rank == 0:
        try:
            files.write(
                contents, path, manifest_facts(s, request, view.host.name), staging=lambda: view.run_dir
            )
        except CheckpointError as error:
            saved = replace(saved, error=error)
    refused = ranks.from_zero(str(saved.error) if saved.error is not None else None)
    if refused is not None and saved.error is None:
        saved = replace(saved, error=CheckpointError(refused))
    report_saved(view, saved, view.options.saving.on_error)


def contents_of(view: KeptRun, ranks: Ranks) -> dict[str, Any]:
    """Return the state of module, optimizers and schedulers, what `hosted_state` returns, and the position of
    the loop. With several ranks, also the state of each that differs from rank 0's.
    """
    s, hosted = view.state, hosted_state(view)
    return {
        "module": s.module.state_dict(),
        "optimizers": [each.state_dict() for each in s.optimizers],
        "schedulers": [each.state_dict() for each in s.schedulers],
        "kinds": kinds(s),
        "parameters": parameter_names(s),
        **hosted,
        **view.save_position(ranks),
        **({} if ranks.alone else {RANKS_PART: gather_own_states(hosted, ranks)}),
    }


def parameter_names(s: State) -> list[list[list[str]]]:
    """Return the names of the parameters of each optimizer, by its groups, in its order."""
    names = {id(each): name.replace("_orig_mod.", "") for name, each in s.module.named_parameters()}
    return [
        [
            [names.get(id(each), f"parameter {place}") for place, each in enumerate(group["params"])]
            for group in optimizer.param_groups
        ]
        for optimizer in s.optimizers
    ]


def gather_own_states(hosted: dict[str, Any], ranks: Ranks) -> list[dict[str, Any]]:
    """Return what differs from rank 0's state on each rank, in rank order. Waits for all ranks.

    hosted: what `hosted_state` returns. The state of a hook is compared by itself.
    """
    parts = {name: value for name, value in hosted.items() if name != "hooks"}
    parts |= {f"{HOOK_PREFIX}{name}": state for name, state in hosted["hooks"].items()}
    sums = {}
    for name, value in parts.items():
        store = TensorStore()
        sums[name] = checksum(pack(value, store, name), store)
    sums_of_zero, own = ranks.from_zero(sums), {}
    for name, value in parts.items():
        if sums[name] == sums_of_zero.get(name):
            continue
        try:
            own[name] = _pack_as_json(value, f"{name} of rank {ranks.rank}")
        except CheckpointError as error:
            log.warning("%s It is not saved: after a resume, this rank has that of rank 0.", error)
    return [{name: _unpack_json(each) for name, each in of_rank.items()} for of_rank in ranks.gather(own)]


def take_own_state(contents: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Return a checkpoint's contents with the state of this rank instead of rank 0's, if it has as many
    ranks.
    """
    of_ranks = contents.get(RANKS_PART)
    if not isinstance(of_ranks, list) or len(of_ranks) != world_size or not isinstance(of_ranks[rank], dict):
        return contents
    own: dict[str, Any] = of_ranks[rank]
    hooks = {name.removeprefix(HOOK_PREFIX): own[name] for name in own if name.startswith(HOOK_PREFIX)}
    rest = {name: own[name] for name in own if name in HOSTED_PARTS}
    return {**contents, **rest, "hooks": {**contents.get("hooks", {}), **hooks}}


def gather_positions(state: dict[str, Any], ranks: Ranks, module: nn.Module) -> list[dict[str, Any]]:
    """Return the positions of all ranks, in rank order. Waits for all ranks.

    In an unfinished accumulation window each rank has its own gradients. Every position gets their mean: with
    it on all ranks, the update is the same, whether it takes the mean of their gradients or the sum.
    """
    if ranks.alone:
        return [state]
    gradients = state["window"].get("gradients", {})
    mine = {**state, "window": {"losses": [], **state["window"], "gradients": [*gradients]}}
    states = [_unpack_json(each) for each in ranks.gather(_pack_as_json(mine, "the position of the loop"))]
    names = {name for each in states for name in each["window"]["gradients"]}
    mean = {
        name: _mean_over_ranks(gradients.get(name), parameter, ranks)
        for name, parameter in module.named_parameters()
        if name in names
    }
    windows = [{**each["window"], "gradients": mean} if names else {} for each in states]
    return [{**each, "window": window} for each, window in zip(states, windows, strict=True)]


def _mean_over_ranks(gradient: Tensor | None, parameter: Tensor, ranks: Ranks) -> Tensor:
    total = torch.zeros(parameter.shape, dtype=torch.promote_types(parameter.dtype, torch.float32))
    if gradient is not None:
        total += gradient.detach().cpu()
    distributed.all_reduce(total, group=ranks.group)
    return (total / ranks.world_size).to(parameter.dtype)


def load_hosted(view: KeptRun, path: str | Path) -> dict[str, Any]:
    """Load a checkpoint into module, optimizers, schedulers and hooks; return its contents."""
    s = view.state
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"load_checkpoint({path!r}): pass 'auto', 'best' or the path of a checkpoint.")
    contents = take_own_state(files.read(path), s.rank, s.world_size)
    view.resume.take(contents, path)  # until `restore_state`, the checkpoint may be refused
    begin_loading(view, contents)
    if "log" in contents:
        check_parts(contents, [*HOSTED_PARTS, *({"loggers"} & contents.keys())], path)
    if "log" not in contents or len(contents["optimizers"]) != len(s.optimizers):
        raise CheckpointError(
            f"{shown(path)} is not a checkpoint of a Line with {len(s.optimizers)} optimizers. To load its "
            "weights alone: hookline.load_weights(module, path)."
        )
    contents = edit_loaded(view)
    _refuse_other_optimizers(s, contents, path)
    with restoring(path, "the weights, or the state of an optimizer or a schedule,"):
        s.module.load_state_dict(complete_weights(s.module, contents["module"], path))
        for optimizer, kept in zip(s.optimizers, contents["optimizers"], strict=True):
            load_optimizer(optimizer, kept)
        for scheduler, kept in zip(s.schedulers, contents["schedulers"], strict=False):
            load_scheduler(scheduler, kept)
    if s.rank == 0 and len(contents["schedulers"]) != len(s.schedulers):
        log.warning(
            "%s has the state of %d schedulers, and the Line has %d, so they do not all continue: pass the "
            "same ones, in the same order, to Line(schedulers=[...]).",
            shown(path),
            len(contents["schedulers"]),
            len(s.schedulers),
        )
    restore_state(view, contents, path)
    report_loaded(view, path)
    return contents


def _refuse_other_optimizers(s: State, contents: dict[str, Any], path: str | Path) -> None:
    """Raise if the checkpoint is of other optimizers or schedulers, or of parameters in another order, before
    anything is restored. Older checkpoints have neither.
    """
    saved, here = contents.get("kinds"), kinds(s)
    if saved is not None and len(contents["schedulers"]) != len(s.schedulers):  # a warning says so
        saved, here = saved[: len(s.optimizers)], here[: len(s.optimizers)]
    refuse_other_optimizers(saved, here, path)
    with restoring(path, "the parameters of an optimizer"):
        for was, now in zip(contents.get("parameters", ()), parameter_names(s), strict=False):
            check_groups(*([{"param_names": names} for names in each] for each in (was, now)))


# ---- The state of the hooks for a host that saves only JSON


MOST_ELEMENTS = 1_000_000
"""The most tensor elements that the state of one hook may have: more do not belong into a text file."""


def state_as_json(kept: dict[str, Any]) -> dict[str, Any]:
    """Return the state as JSON values. A hook whose state has no JSON form is left out, with a warning."""
    hooks = {}
    for name, state in kept["hooks"].items():
        try:
            hooks[name] = _pack_as_json(state, f"the state of hook {name!r}")
        except CheckpointError as error:
            log.warning(
                "%s It is not in this host's checkpoints; hookline.hooks.ModelCheckpoint saves it.", error
            )
    return {
        "hooks": hooks,
        "rest": _pack_as_json({key: value for key, value in kept.items() if key != "hooks"}, "the line"),
    }


def state_from_json(kept: dict[str, Any]) -> dict[str, Any]:
    """Return the state from what `state_as_json` returned."""
    return {
        **_unpack_json(kept["rest"]),
        "hooks": {name: _unpack_json(each) for name, each in kept["hooks"].items()},
    }


def _pack_as_json(value: Any, where: str) -> dict[str, Any]:
    tensors = TensorStore()
    structure = pack(value, tensors, where)
    numbers = sum(each.numel() for each in tensors.values())
    if numbers > MOST_ELEMENTS:
        raise CheckpointError(f"{where} has {numbers:,} numbers in tensors, more than {MOST_ELEMENTS:,}.")
    return {"structure": structure, "tensors": {name: _encode_tensor(each) for name, each in tensors.items()}}


def _unpack_json(text: dict[str, Any]) -> Any:
    return unpack(text["structure"], {name: _decode_tensor(*each) for name, each in text["tensors"].items()})


def _encode_tensor(tensor: Tensor) -> tuple[str, list[int], str]:
    plain = tensor.detach().cpu().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(plain.dtype).removeprefix("torch."), list(plain.shape), base64.b64encode(content).decode()


def _decode_tensor(dtype: str, shape: list[int], content: str) -> Tensor:
    kind = getattr(torch, dtype)
    if not content:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(base64.b64decode(content)), dtype=torch.uint8).view(kind).reshape(shape)
