"""The base model of a checkpoint that holds only trainable weights: what is left out, and its fingerprint.

A weight is left out if it has never been trained and is, bit for bit, as it was when the model was built.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookline.checkpoint.format import LeftOut, as_storable, is_dense
from hookline.checkpoint.sharded import is_dtensor
from hookline.checkpoint.tensors import CHUNK_BYTES
from hookline.distributed.comm import Ranks
from hookline.distributed.sharded_norms import local_part
from hookline.util.errors import CheckpointError
from hookline.util.text import list_some
from hookline.util.urls import shown

log = logging.getLogger("hookline")
HASH_THREADS = 4
"""Weights hashed in parallel."""
CPU_ELEMENTS, DEVICE_ELEMENTS = 2**18, 2**22
"""Elements of a tensor that `bit_sums` reads at a time: what a cache holds, or what keeps a device busy."""
ODD_FACTOR = -0x61C8864680B583EB
"""The golden ratio in 64 bits: its multiples differ in all bits."""


REMEDY = (
    "Build the model as before: with the same pretrained weights and revision, seed and dtype (pass the same "
    "precision to the trainer; before load_weights, call model.to(dtype)). To load the trainable weights "
    "into another base model: hookline.load_weights(model, path, strict=False)."
)


class BaseWeights:
    """The weights of a model as it was built, by name, to leave out those that have not changed since."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        """Hash every weight once; on several ranks, rank zero hashes. All ranks must create it together."""
        weights = module.state_dict()
        self.held = _trainable_names(module, weights)
        """Weights that checkpoints hold: trainable when the model was built, or trained or changed since."""
        frozen = {name: each for name, each in weights.items() if name not in self.held}
        found = digest_weights(frozen, hashes=ranks.rank == 0)
        plain = {name: [each.dtype, each.shape, each.sha256] for name, each in found.items()}
        self.known = {
            name: LeftOut(dtype, tuple(shape), sha256)
            for name, (dtype, shape, sha256) in ranks.from_zero(plain).items()
        }
        """The frozen weights and the buffers as they were built."""
        self._warned = False
        self._sums: dict[str, int] = {}
        self.begin(weights)

    def begin(self, weights: Mapping[str, Any]) -> None:
        """Detect changes from this moment on. Moving, casting or wrapping the model is not a change."""
        frozen = {name: each for name, each in chosen(weights, self.known).items() if name not in self.held}
        self._sums = bit_sums(frozen)

    def hold_changed(self, weights: Mapping[str, Any], ranks: Ranks) -> set[str]:
        """Hold the weights that have changed since `begin` on any rank, and return their names."""
        waiting = [name for name in self._sums if name in weights and name not in self.held]
        now = bit_sums({name: weights[name] for name in waiting})
        new = set().union(*ranks.gather([name for name in waiting if now[name] != self._sums[name]]))
        self.held |= new
        return new

    def leave_out(self, weights: Mapping[str, Any], module: nn.Module, ranks: Ranks) -> Mapping[str, Any]:
        """Return the weights of a module without those that its base has, which become `LeftOut`.

        All ranks must call it together, because one of them may have changed a weight.
        """
        self.held |= set().union(*ranks.gather(sorted(_trainable_names(module, weights) - self.held)))
        changed = self.hold_changed(weights, ranks)
        if ranks.rank == 0:
            self._warn_of_frozen(changed, module)
        same = self._sums.keys() - self.held
        return _with_metadata_of(
            weights, {name: self.known[name] if name in same else each for name, each in weights.items()}
        )

    def _warn_of_frozen(self, changed: set[str], module: nn.Module) -> None:
        """Warn once of frozen parameters that have changed, because they make the checkpoints larger."""
        names = [name for name, _ in module.named_parameters() if name in changed]
        if names and not self._warned:
            self._warned = True
            log.warning(
                "Checkpoints with weights='trainable' also hold %d parameters that are frozen now, because "
                "they were trained or changed after the model was built: %s.",
                len(names),
                list_some(names),
            )


def left_out_in(weights: Any) -> dict[str, LeftOut]:
    """Return the weights that a checkpoint leaves out."""
    weights = weights if isinstance(weights, Mapping) else {}
    return {name: each for name, each in weights.items() if isinstance(each, LeftOut)}


def fingerprint(left_out: Mapping[str, LeftOut]) -> str:
    """Return the fingerprint of a base model: 32 hexadecimal digits over names, dtypes, shapes and values."""
    listed = [[name, each.dtype, each.shape, each.sha256] for name, each in sorted(left_out.items())]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:32] if listed else ""


def complete_weights(
    module: nn.Module, weights: Mapping[str, Any], where: object, strict: bool = True
) -> Mapping[str, Any]:
    """Return weights with those that their checkpoint leaves out taken from the module.

    If the module was built on another base model, raise a CheckpointError; with strict=False, warn and return
    only the weights that the checkpoint holds. where: its path.
    """
    left_out = left_out_in(weights)
    if not left_out:
        return weights
    own = module.state_dict()
    found = digest_weights(chosen(own, left_out))
    # precision='bf16-true' has converted the base of its run, and loading converts the weights back
    converted = {
        name: own[name].to(getattr(torch, left_out[name].dtype))
        for name, each in found.items()
        if each.dtype != left_out[name].dtype
    }
    same = {name: each for name, each in digest_weights(converted).items() if each == left_out[name]}
    own, found = {**own, **chosen(converted, same)}, {**found, **same}
    problem = other_base(left_out, found, where, type(module).__name__)
    if not problem:
        return with_base(weights, own)
    if strict:
        raise CheckpointError(f"{problem}\n  {REMEDY}")
    log.warning("%s", problem)
    return _with_metadata_of(weights, {name: weights[name] for name in weights if name not in left_out})


def with_base(weights: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return weights with those that are left out taken from `own`, without a check."""
    entries = {name: own[name] if isinstance(each, LeftOut) else each for name, each in weights.items()}
    return _with_metadata_of(weights, entries)


def require_all_weights(weights: Mapping[str, Any], where: object, action: str) -> None:
    """Raise a CheckpointError if weights are left out. action: what needs all of them, as 'An export'."""
    if left_out := left_out_in(weights):
        raise CheckpointError(
            f"{shown(where)} holds only the trainable weights of the base model {fingerprint(left_out)}; "
            f"{len(left_out)} weights are not in it. {action} needs all of them: build the model as for "
            "training, call hookline.load_weights(model, path), and export model.state_dict() with "
            "hookline.export_checkpoint."
        )


def other_base(wanted: Mapping[str, LeftOut], found: Mapping[str, LeftOut], where: object, model: str) -> str:
    """Return how a model differs from the base of a checkpoint; empty if it has what is left out.

    wanted: the weights that are left out. found: those of the model as it was built.
    """
    missing = [name for name in wanted if name not in found]
    other = [name for name in wanted if name in found and found[name] != wanted[name]]
    if not missing and not other:
        return ""
    here = fingerprint(chosen(found, wanted))
    lines = [
        f"{shown(where)} holds only the trainable weights of the base model {fingerprint(wanted)}, and "
        f"{model} was built on another base model, {here or 'which has none of its weights'}."
    ]
    if other:
        texts = [f"{name}{_difference(wanted[name], found[name])}" for name in other]
        lines.append(
            f"{len(other)} of the {len(wanted)} weights that are left out differ: {list_some(texts)}"
        )
    if missing:
        lines.append(f"{model} does not have {len(missing)} of them: {list_some(missing)}")
    return "\n  ".join(lines)


def _difference(wanted: LeftOut, found: LeftOut) -> str:
    if (wanted.dtype, wanted.shape) == (found.dtype, found.shape):
        return ""
    before, now = (f"{each.dtype} {list(each.shape)}" for each in (wanted, found))
    return f" ({before} in the checkpoint's base, {now} here)"


# ---- hashes and sums ---------------------------------------------------------------------------------------


def digest_weights(weights: Mapping[str, Any], hashes: bool = True) -> dict[str, LeftOut]:
    """Return the dtype, shape and sha256 of each whole tensor; skip entries that are not plain tensors.

    The result does not depend on the device, the memory layout or the sharding. Sharded tensors are gathered
    one at a time, by all ranks. hashes: False on a rank that only takes part in this.
    """
    found: dict[str, LeftOut] = {}
    waiting: dict[str, concurrent.futures.Future[LeftOut]] = {}
    with concurrent.futures.ThreadPoolExecutor(HASH_THREADS) as threads:
        for name, value in weights.items():
            if is_dtensor(value):
                whole = value.detach().full_tensor()
                if hashes:
                    found[name] = _digest(whole)
            elif hashes and isinstance(value, Tensor) and is_dense(value):
                waiting[name] = threads.submit(_digest, value.detach())
        return found | {name: each.result() for name, each in waiting.items()}


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor without its class, whose memory has the values themselves."""
    return tensor.as_subclass(Tensor).resolve_conj().resolve_neg()


def _digest(tensor: Tensor) -> LeftOut:
    plain = _plain(tensor)
    digest = hashlib.sha256()
    if plain.numel():
        flat = as_storable(plain).contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), CHUNK_BYTES):
            part: Any = flat[start : start + CHUNK_BYTES].cpu().numpy()
            digest.update(part)  # releases the GIL
    return LeftOut(str(plain.dtype).removeprefix("torch."), tuple(plain.shape), digest.hexdigest())


@torch.no_grad()
def bit_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a number for each tensor that differs if any of its bits, or their order, has changed.

    Of a sharded tensor, this rank's shard counts. The sums are computed on the devices and read at once.
    """
    # writes through `tensor.data` do not count as a new version of a tensor, so only its values are certain
    factors: dict[torch.device, Tensor] = {}
    sums: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        local = _plain(local_part(tensor.detach()))
        plain = torch.view_as_real(local) if local.is_complex() else local
        device = plain.device
        size = CPU_ELEMENTS if device.type == "cpu" else DEVICE_ELEMENTS
        if device not in factors:
            spread = torch.arange(1, size + 1, device=device) * ODD_FACTOR
            # not multiples of one number: [0, 3, 0] and [1, 1, 1] would have the same sum
            factors[device] = (spread ^ (spread >> 32)) * ODD_FACTOR | 1
        bits = plain.reshape(-1).view(_INTEGERS[plain.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=device)
        for start in range(0, bits.numel(), size):
            part = bits[start : start + size]
            total = total * ODD_FACTOR + (part * factors[device][: part.numel()]).sum()
        sums[name] = total
    found: dict[str, int] = {}
    for device in factors:
        names = [name for name, each in sums.items() if each.device == device]
        found |= zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True)
    return found


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""By the bytes of an element; smaller than the sum, in which two changes of the highest bit would cancel."""


# ---- names -------------------------------------------------------------------------------------------------


def _trainable_names(module: nn.Module, weights: Mapping[str, Any]) -> set[str]:
    """Return the weights that require gradients: by name, or by memory if a state_dict has other names."""
    trained = {
        name: each for name, each in module.named_parameters(remove_duplicate=False) if each.requires_grad
    }
    memory = {_address(each) for each in trained.values()} - {0}
    return {
        name
        for name, each in weights.items()
        if name in trained or (isinstance(each, Tensor) and _address(each) in memory)
    }


def _address(tensor: Tensor) -> int:
    """Return where the values of a tensor are; 0 if they have no memory here."""
    local = local_part(tensor.detach())
    return local.data_ptr() if local.numel() and is_dense(local) else 0


def chosen(weights: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of these names, as far as there are any."""
    return {name: weights[name] for name in names if name in weights}


def _with_metadata_of(weights: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entries as a state_dict with the versions of the layers that `weights` has."""
    made: Any = OrderedDict(entries)
    if (metadata := getattr(weights, "_metadata", None)) is not None:
        made._metadata = metadata
    return made  # type: ignore[no-any-return]
