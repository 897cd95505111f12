"""What the host knows about a step without reading a device: random streams, settings, modes and flags."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookline.audit.observation import batch_parts, torch_flags, unique_modules
from hookline.digests.tensors import text_digest
from hookline.run.optimizers import bare

MOST_DEPTH = 20
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
PLAIN = (bool, int, float, complex, str, bytes, type(None))
Settings = dict[str, str]
"""A setting in words, by its name: `optimizer 0, group 1: lr`."""


def random_streams(device: torch.device) -> dict[str, str]:
    """Return digests of the random streams of Python, numpy, torch and the device. Nothing is drawn."""
    found = {
        "python": text_digest(random.getstate()),
        "numpy": _numpy_stream(),
        "torch": _bytes_digest(torch.get_rng_state().numpy().tobytes()),
    }
    if device.type == "cuda" and torch.cuda.is_available():
        # the state of the generator of a device is kept on the host
        found[str(device)] = _bytes_digest(torch.cuda.get_rng_state(device).numpy().tobytes())
    elif device.type == "mps":
        found[str(device)] = _bytes_digest(torch.mps.get_rng_state().numpy().tobytes())
    return found


def _numpy_stream() -> str:
    kind, keys, *rest = np.random.get_state()
    return text_digest(str(kind), _bytes_digest(np.asarray(keys).tobytes()), [float(each) for each in rest])


def _bytes_digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=6).hexdigest()


def plain_text(value: Any) -> str:
    """Return the text of a value without places in memory, which are others in each process."""
    return ADDRESS.sub("", repr(value))


# ---- optimizers --------------------------------------------------------------------------------------------


def optimizer_settings(number: int, optimizer: Any) -> Settings:
    """Return the learning rates and hyper-parameters of an optimizer. Tensors on a device are left out."""
    found: Settings = {}
    for place, group in enumerate(bare(optimizer).param_groups):
        for name, value in group.items():
            if name == "params":
                found[f"optimizer {number}, group {place}: parameters"] = str(len(value))
            elif not isinstance(value, Tensor):
                found[f"optimizer {number}, group {place}: {name}"] = plain_text(value)
            elif value.device.type == "cpu":
                found[f"optimizer {number}, group {place}: {name}"] = repr(value.tolist())
    return found


def device_settings(number: int, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the hyper-parameters of an optimizer that are tensors on a device."""
    for place, group in enumerate(bare(optimizer).param_groups):
        for name, value in group.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                yield f"optimizer {number}, group {place}: {name}", value


def optimizer_state(optimizers: Iterable[Any], names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    """Yield the state of optimizers in the order of their parameters, which a resume does not change."""
    for number, optimizer in enumerate(map(bare, optimizers)):
        for owner, parameter in parameters_of(optimizer, names):
            entries = optimizer.state.get(parameter)
            for name, value in entries.items() if isinstance(entries, Mapping) else ():
                yield from batch_leaves(value, f"optimizer {number}, {owner}: {name}")


def parameters_of(optimizer: Any, names: Mapping[int, str]) -> list[tuple[str, Tensor]]:
    """Return the parameters of an optimizer with their names."""
    parameters = [each for group in bare(optimizer).param_groups for each in group["params"]]
    return [(names.get(id(each), f"? {place}"), each) for place, each in enumerate(parameters)]


# ---- the module and the process ----------------------------------------------------------------------------


def modes(module: nn.Module) -> Settings:
    """Return the modules in eval mode and the parameters that are frozen."""
    names = {id(each): name for name, each in module.named_modules()}
    evaluated = [
        names.get(id(each), "?") or "the model" for each in unique_modules(module) if not each.training
    ]
    frozen = [name for name, each in module.named_parameters() if not each.requires_grad]
    return {"in eval mode": ", ".join(evaluated), "frozen": ", ".join(frozen)}


def process_flags() -> Settings:
    """Return the settings of torch that decide which bits a computation has."""
    found = {name: repr(value) for group in torch_flags().values() for name, value in group.items()}
    return {
        **found,
        "torch.get_num_threads": str(torch.get_num_threads()),
        "torch.backends.mkldnn.enabled": str(torch.backends.mkldnn.enabled),
        "torch.backends.cudnn.allow_tf32": str(torch.backends.cudnn.allow_tf32),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
    }


# ---- the batch ---------------------------------------------------------------------------------------------


def batch_leaves(batch: Any, path: str = "batch", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, arrays and plain values of a batch, each with its place: `batch['labels']`."""
    if isinstance(batch, (Tensor, np.ndarray, np.generic, *PLAIN)) or depth > MOST_DEPTH:
        yield path, batch
        return
    parts = batch_parts(batch)
    if parts is None:  # an object: its attributes, as far as they are data
        own = getattr(batch, "__dict__", {})
        parts = [(f".{name}", value) for name, value in own.items() if _is_data(value)]
    yield path, type(batch).__name__
    for part, value in parts:
        yield from batch_leaves(value, f"{path}{part}", depth + 1)


def _is_data(value: Any) -> bool:
    is_table = isinstance(value, Mapping | list | tuple) or dataclasses.is_dataclass(value)
    return is_table or isinstance(value, (Tensor, np.ndarray, *PLAIN))


def as_tensor(leaf: Any) -> Tensor | None:
    """Return a tensor of the bits of a leaf; None if it is a plain value."""
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.ascontiguousarray(leaf)
        if array.dtype.hasobject:
            return None
        return torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.size else None
    return leaf if isinstance(leaf, Tensor) else None
