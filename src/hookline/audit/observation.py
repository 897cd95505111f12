"""What a hook could change, observed without copying a tensor or reading from a device."""

from __future__ import annotations

import dataclasses
import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

PARAMETERS = "parameters"
BUFFERS = "buffers"
GRADIENTS = "gradients"
OPTIMIZER_SETTINGS = "optimizer hyper-parameters"
OPTIMIZER_STATE = "optimizer state"
LEARNING_RATES = "learning rates"
REQUIRES_GRAD = "requires_grad"
MODES = "train/eval modes"
BATCH = "the batch"
RANDOM = "random streams"
GRAD_MODE = "grad mode"
DEFAULT_DTYPE = "default dtype"
DETERMINISM = "deterministic flags"
MODULE_HOOKS = "hooks on modules"
RETURNED = "the returned value"
KINDS = (
    PARAMETERS,
    BUFFERS,
    GRADIENTS,
    OPTIMIZER_SETTINGS,
    OPTIMIZER_STATE,
    LEARNING_RATES,
    REQUIRES_GRAD,
    MODES,
    BATCH,
    RANDOM,
    GRAD_MODE,
    DEFAULT_DTYPE,
    DETERMINISM,
    MODULE_HOOKS,
    RETURNED,
)
"""The kinds of changes, as tables and errors name them."""
Change = tuple[str, str]
"""A kind, and the name of what changed."""

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
SAVED_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
RATES = ("lr", "initial_lr")
PLAIN = (bool, int, float, str, bytes, type(None))


class Tensors:
    """Tensors with their identities, version counters and addresses, in a fixed order.

    It holds the tensors, so that no identity is used again while it exists.
    """

    __slots__ = ("addresses", "labels", "tensors", "versions")

    def __init__(self, found: Iterable[tuple[Any, Any]]) -> None:
        """Observe these tensors; each comes with what its name is made of."""
        pairs = list(found)
        self.labels = [label for label, _ in pairs]
        self.tensors = [tensor for _, tensor in pairs]
        local = [getattr(each, "_local_tensor", each) for each in self.tensors]  # a shard of this rank
        self.versions = [version(each) for each in local]
        self.addresses = [address(each) for each in local]

    def is_like(self, later: Tensors) -> bool:
        """Return whether nothing has changed; the usual case, and a few comparisons of lists."""
        return (
            self.versions == later.versions
            and self.addresses == later.addresses
            and len(self.tensors) == len(later.tensors)
            and all(map(operator.is_, self.tensors, later.tensors))
        )

    def changed(self, later: Tensors) -> Iterator[Any]:
        """Yield the labels of tensors that were written, replaced, added or removed."""
        before = {label: number for number, label in enumerate(self.labels)}
        for number, label in enumerate(later.labels):
            was = before.pop(label, None)
            if (
                was is None
                or self.tensors[was] is not later.tensors[number]
                or self.versions[was] != later.versions[number]
                or self.addresses[was] != later.addresses[number]
            ):
                yield label
        yield from before


def version(tensor: Any) -> int:
    """Return a tensor's version counter. A tensor of the inference mode has none."""
    try:
        return -1 if tensor is None or tensor.is_inference() else tensor._version
    except ValueError:
        return -1  # a parameter of a lazy module before its first forward


def address(tensor: Any) -> int:
    """Return the address of a tensor's data; 0 if it has none, as on the meta device."""
    try:
        return 0 if tensor is None else int(tensor.data_ptr())
    except (RuntimeError, NotImplementedError, ValueError):
        return 0  # a lazy, fake or functional tensor


def storage(tensor: Any) -> int | None:
    """Return the identity of the memory that a tensor is a view of."""
    try:
        return int(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError, ValueError):
        return None


class Observation:
    """The state of a run at one moment, as far as a hook could change it."""

    __slots__ = ("batch", "modules", "tensors", "values")

    def __init__(self, s: Any) -> None:
        """Observe the module, the optimizers, the batch, the random streams and the flags of torch."""
        modules = unique_modules(s.module)
        parameters = [((each, name), tensor) for each in modules for name, tensor in each._parameters.items()]
        self.modules = modules
        self.batch = s.batch
        self.tensors: dict[str, Tensors] = {
            PARAMETERS: Tensors(parameters),
            BUFFERS: Tensors(
                ((each, name), tensor) for each in modules for name, tensor in each._buffers.items()
            ),
            GRADIENTS: Tensors(
                (label, None if parameter is None else parameter.grad) for label, parameter in parameters
            ),
            OPTIMIZER_STATE: Tensors(optimizer_tensors(s.optimizers)),
            BATCH: Tensors(batch_tensors(self.batch)),
        }
        self.values: dict[str, dict[Any, Any]] = {
            REQUIRES_GRAD: {
                label: parameter.requires_grad for label, parameter in parameters if parameter is not None
            },
            MODES: {each: each.training for each in modules},
            MODULE_HOOKS: module_hooks(modules, parameters),
            **optimizer_values(s.optimizers),
            BATCH: batch_values(self.batch),
            RANDOM: random_streams(s.device),
            **torch_flags(),
        }

    def changes(self, later: Observation, written: set[int]) -> list[Change]:
        """Return what differs from a later observation of the same run.

        written: identities of the memory that in-place operators have written to meanwhile.
        """
        found: dict[Change, None] = {}
        names = Names((*self.modules, *later.modules))
        for kind, before in self.tensors.items():
            after = later.tensors[kind]
            if not before.is_like(after):
                found.update(dict.fromkeys((kind, names.of(label)) for label in before.changed(after)))
            if written:
                found.update(
                    dict.fromkeys(
                        (kind, names.of(label))
                        for label, tensor in zip(after.labels, after.tensors, strict=True)
                        if tensor is not None and storage(tensor) in written
                    )
                )
        for kind, values in self.values.items():
            now = later.values[kind]
            if values == now:
                continue
            for label in {**values, **now}:
                if label not in values or label not in now or values[label] != now[label]:
                    found[kind, names.of(label)] = None
        return list(found)


class Names:
    """The names of what was observed, made only if something has changed."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._roots = list(modules)
        self._paths: dict[int, str] = {}

    def of(self, label: Any) -> str:
        """Return the name: `encoder.weight` for a parameter, the text itself for others."""
        if isinstance(label, str):
            return label
        if isinstance(label, nn.Module):
            return self._path(label) or type(label).__name__
        module, name = label
        path = self._path(module)
        return f"{path}.{name}" if path else name

    def _path(self, module: nn.Module) -> str:
        if not self._paths:
            for root in self._roots:
                for path, each in root.named_modules():
                    self._paths.setdefault(id(each), path)
        return self._paths.get(id(module), "")


def unique_modules(root: nn.Module | None) -> list[nn.Module]:
    """Return a module and all modules below it, each once, as `modules()` does, and several times faster."""
    if root is None:
        return []
    found: dict[int, nn.Module] = {}
    waiting: list[Any] = [root]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting.extend(reversed(module._modules.values()))
    return list(found.values())


# ---- optimizers --------------------------------------------------------------------------------------------


def optimizer_tensors(optimizers: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the state of optimizers, with their names."""
    for number, optimizer in enumerate(optimizers):
        for place, entries in enumerate(optimizer.state.values()):
            for name, value in entries.items() if isinstance(entries, Mapping) else ():
                if isinstance(value, Tensor):
                    yield f"optimizer {number}, parameter {place}: {name}", value


def optimizer_values(optimizers: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Return learning rates, hyper-parameters, and state that is not a tensor."""
    rates: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            where = f"optimizer {number}, group {place}"
            for name, value in group.items():
                kept = rates if name in RATES else settings
                kept[f"{where}: {name}"] = [*map(id, value)] if name == "params" else token(value)
        for place, entries in enumerate(optimizer.state.values()):
            for name, value in entries.items() if isinstance(entries, Mapping) else ():
                if not isinstance(value, Tensor):
                    state[f"optimizer {number}, parameter {place}: {name}"] = token(value)
    return {LEARNING_RATES: rates, OPTIMIZER_SETTINGS: settings, OPTIMIZER_STATE: state}


def token(value: Any) -> Any:
    """Return what stands for a value: itself if it is plain, else its identity and version."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return id(value), version(value), address(value)
    if isinstance(value, tuple | list):
        return [token(each) for each in value]
    return id(value)


# ---- the batch ---------------------------------------------------------------------------------------------


def batch_tensors(batch: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch with their places: `batch['labels']`."""
    if isinstance(batch, Tensor):
        yield path, batch
    for part, value in batch_parts(batch) or ():
        yield from batch_tensors(value, f"{path}{part}")


def batch_values(batch: Any, path: str = "batch") -> dict[str, Any]:
    """Return what else a batch holds: plain values, and the identities of other objects."""
    if isinstance(batch, Tensor):
        return {}
    if (parts := batch_parts(batch)) is None:
        return {path: token(batch)}
    found: dict[str, Any] = {path: id(batch)}
    for part, value in parts:
        found |= batch_values(value, f"{path}{part}")
    return found


def batch_parts(batch: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a dictionary, a list, a tuple or a dataclass, with their places, or None."""
    if isinstance(batch, Mapping):
        return [(f"[{key!r}]", value) for key, value in batch.items()]
    if isinstance(batch, list | tuple):
        return [(f"[{number}]", value) for number, value in enumerate(batch)]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [(f".{each.name}", getattr(batch, each.name, None)) for each in dataclasses.fields(batch)]
    return None


# ---- hooks, random streams, flags --------------------------------------------------------------------------


def module_hooks(modules: Iterable[nn.Module], parameters: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the hooks of modules, of parameters and of all modules together, and replaced `forward`s."""
    found: dict[Any, Any] = {}
    for module in modules:
        state = module.__dict__
        tables = tuple([tuple(state[name]) for name in (*HOOK_TABLES, *SAVED_HOOKS) if state.get(name)])
        if tables or "forward" in state:
            found[module] = (tables, id(state.get("forward")))
    for label, parameter in parameters:
        if parameter is not None and (
            parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        ):
            found[label] = tuple(tuple(getattr(parameter, name, None) or ()) for name in TENSOR_HOOKS)
    for name in HOOK_TABLES:
        if table := getattr(global_hooks, f"_global{name}"):
            found[f"all modules: {name.strip('_')}"] = tuple(table)
    return found


def random_streams(device: Any) -> dict[str, Any]:
    """Return the states of the random streams of Python, numpy, torch and the run's device."""
    found: dict[str, Any] = {
        "Python": hash(random.getstate()),
        "torch": hash(torch.get_rng_state().numpy().tobytes()),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = hash((kind, keys.tobytes(), *rest))
    device = torch.device(device) if device is not None else torch.device("cpu")
    if device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generator = torch.cuda.default_generators[device.index or 0]
        found[str(device)] = (generator.initial_seed(), generator.get_offset())  # kept on the host
    elif device.type == "mps":
        found[str(device)] = hash(torch.mps.get_rng_state().numpy().tobytes())
    return found


def torch_flags() -> dict[str, dict[str, Any]]:
    """Return the flags of torch that change how later code computes."""
    return {
        GRAD_MODE: {
            "torch.is_grad_enabled": torch.is_grad_enabled(),
            "torch.is_inference_mode_enabled": torch.is_inference_mode_enabled(),
        },
        DEFAULT_DTYPE: {"torch.get_default_dtype": torch.get_default_dtype()},
        DETERMINISM: {name: read() for name, read in FLAGS.items()},
    }


FLAGS: dict[str, Callable[[], Any]] = {
    "torch.are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
    "torch.is_deterministic_algorithms_warn_only_enabled": (
        torch.is_deterministic_algorithms_warn_only_enabled
    ),
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision,
}
"""Flags that decide whether the same computation gives the same bits."""
