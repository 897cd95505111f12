"""The FSDP strategy: each rank holds a shard of every parameter, by torch's FSDP2 (`fully_shard`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from hookline.distributed.base import StepModule, keep_step_module, step_module_of
from hookline.distributed.layer_choice import LayerChoice, choose_layers, default_layers
from hookline.distributed.mesh import (
    check_counts,
    check_mesh,
    data_group,
    data_mesh,
    data_ranks,
    describe_mesh,
    make_mesh,
    mesh_shape,
    tensor_mesh,
)
from hookline.distributed.process_group import MultiRankStrategy
from hookline.distributed.sharded_norms import local_part
from hookline.engine.checks import check_layers
from hookline.util.errors import OptionError

MIXED = "mixed torch.Tensor and DTensor"


class FSDP(MultiRankStrategy):
    """Shards parameters, gradients and optimizer state; a layer is gathered only while it computes."""

    restore_after_setup = True

    def __init__(
        self,
        device: str | torch.device = "auto",
        precision: str | int = 32,
        *,
        wrap: LayerChoice | Sequence[LayerChoice] | None = None,
        activation_checkpointing: bool | LayerChoice | Sequence[LayerChoice] = False,
        reshard_after_forward: bool | int | None = None,
        replicas: int = 1,
        tensor_parallel: int = 1,
        mesh: Any = None,
        offload: bool = False,
        mixed_precision: Any = None,
        timeout: float = 1800,
    ) -> None:
        """Choose how to shard.

        wrap: the layers that are gathered one at a time, by name pattern, class name, class, or a function of
        name and module; None: the items of every ModuleList, where models keep their blocks. All other
        parameters form one more unit. activation_checkpointing: an older place for the trainer's option.
        reshard_after_forward: as in `fully_shard`. replicas: copies of the sharded model (HSDP).
        tensor_parallel: ranks that compute each layer together; your `configure_model` divides the layers
        over `trainer.strategy.tensor_mesh`. mesh: your own DeviceMesh over all ranks instead of these two,
        with one dimension (shards) or two (copies, shards), and a last one named "tp" for tensor parallelism.
        offload: keep parameters on the CPU. mixed_precision: your own MixedPrecisionPolicy instead of the one
        that follows from `precision`.
        """
        super().__init__(device, precision, timeout)
        check_counts(self.world_size, replicas, tensor_parallel)
        if offload and self.device.type == "cpu":
            raise OptionError(
                "FSDP: offload=True keeps the parameters of an accelerator on the CPU, and the device is "
                "the CPU."
            )
        if mesh is not None and (replicas > 1 or tensor_parallel > 1):
            raise OptionError(
                "FSDP: pass either replicas= and tensor_parallel=, or a mesh with these dimensions."
            )
        if mesh is not None:
            check_mesh(mesh, self.world_size, self.device.type)
        self.wrap = None if wrap is None else check_layers("FSDP: wrap", wrap)
        self.activation_checkpointing = (
            False
            if activation_checkpointing is False
            else activation_checkpointing is True
            or check_layers("FSDP: activation_checkpointing", activation_checkpointing)
        )
        self.reshard_after_forward, self.replicas, self.offload = reshard_after_forward, replicas, offload
        self.tensor_parallel, self.mesh = tensor_parallel, mesh
        self.mixed_precision = mixed_precision
        self.shards = self.forward_communicates = self.world_size > 1
        self._step_module: Any = None
        self._steps_through = False
        """Whether steps run through a StepModule. In manual optimization the module itself is the root."""
        self._units: list[Any] = []

    def connect(self) -> None:
        """Connect to the other ranks. Those of one tensor-parallel group get the same data-parallel rank."""
        super().connect()
        self.ranks.data_ranks = data_ranks(self.world_size, self.tensor_parallel, self.mesh)

    @property
    def tensor_mesh(self) -> Any:
        """The DeviceMesh for tensor parallelism, for `configure_model`; None without tensor parallelism."""
        return tensor_mesh(self.mesh)

    @property
    def mesh_text(self) -> str:
        """The dimensions of the mesh as text; empty with one process."""
        if self.world_size == 1:
            return ""
        if self.mesh is not None:
            return describe_mesh(self.mesh.mesh_dim_names, self.mesh.shape)
        dims = mesh_shape(self.world_size, self.replicas, self.tensor_parallel)
        return describe_mesh(list(dims), list(dims.values()))

    def make_mesh(self) -> None:
        """Make the mesh, unless the user passed one."""
        if self.world_size == 1:
            return
        if self.mesh is None:
            self.mesh = make_mesh(
                self.device.type, mesh_shape(self.world_size, self.replicas, self.tensor_parallel)
            )
        if self.ranks.data_group is None:
            self.ranks.data_group = data_group(self.mesh)

    def place(self, module: nn.Module) -> nn.Module:
        """Shard the module in place. Its parameters stay DTensors after the run."""
        if self.world_size == 1:
            module.to(self.device)
            return module
        self._step_module = step_module_of(module)
        if self._step_module is None:
            self.make_mesh()
            self._step_module = self._shard(module)
            keep_step_module(module, self._step_module)
        self._refuse_other_mesh(module)
        self._steps_through = isinstance(self._step_module, StepModule)
        from torch.distributed.fsdp import FSDPModule

        self._units = [each for each in self._step_module.modules() if isinstance(each, FSDPModule)]
        return self._step_module  # type: ignore[no-any-return]

    def teardown(self) -> None:
        """Release the module, which stays sharded."""
        self._step_module, self._units, self._steps_through = None, [], False

    # ---- sharding ------------------------------------------------------------------------------------------

    def _shard(self, module: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        is_meta = any(each.is_meta for each in module.parameters())
        if not is_meta:
            module.to(self.device)
            _broadcast_weights(module, self.ranks.data_group)
        self._check_tensor_parallel(module)
        policy = self.mixed_precision
        if policy is None:
            low = self.precision.dtype
            policy = MixedPrecisionPolicy(
                param_dtype=low, reduce_dtype=torch.float32 if low is not None else None
            )
        options: dict[str, Any] = {
            "mesh": data_mesh(self.mesh),
            "mp_policy": policy,
            "reshard_after_forward": self.reshard_after_forward,
            "offload_policy": CPUOffloadPolicy() if self.offload else OffloadPolicy(),
        }
        units = self.layers_of(module)
        refuse_ties(module, units)
        apart = batch_norms(module) if policy.param_dtype is not None and self.mixed_precision is None else []
        for norm_layer in apart:
            fully_shard(
                norm_layer, **{**options, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
            )
        for unit in reversed(units):  # innermost first
            if unit not in apart:
                fully_shard(unit, **options)
        # a manual step updates the weights in the middle of the step, so every call of the module must gather
        # them again
        root = StepModule(module) if getattr(module, "automatic_optimization", True) else module
        fully_shard(root, **options)
        if is_meta:
            materialize_module(module, self.device)
        return root

    def _refuse_other_mesh(self, module: nn.Module) -> None:
        """Raise if an earlier run divided the layers over another number of ranks."""
        parameters: list[Any] = list(module.parameters())
        meshes = [each.device_mesh for each in parameters if hasattr(each, "device_mesh")]
        before = max((each.size() for each in map(tensor_mesh, meshes) if each is not None), default=1)
        now = 1 if self.tensor_mesh is None else self.tensor_mesh.size()
        if before != now:
            raise OptionError(
                f"{type(module).__name__} was divided by tensor_parallel={before} in an earlier run and "
                f"stays so, but this strategy has tensor_parallel={now}. Use the same mesh again, or load "
                "the weights of a checkpoint into a new module (hookline.load_weights).",
                option="tensor_parallel",
                value=now,
            )

    def _check_tensor_parallel(self, module: nn.Module) -> None:
        """Raise if a mesh with tensor parallelism divides no layer, or one into parts of different sizes."""
        if self.tensor_mesh is None:
            return
        size, name = self.tensor_mesh.size(), type(module).__name__
        divided = {key: each for key, each in module.named_parameters() if hasattr(each, "placements")}
        for key, parameter in divided.items():
            for place in getattr(parameter, "placements", ()):
                if place.is_shard() and parameter.shape[place.dim] % size:
                    raise OptionError(
                        f"FSDP: tensor parallelism cannot divide {key} of shape {list(parameter.shape)}: its "
                        f"dimension {place.dim} is not a multiple of tensor_parallel={size}, a limit of "
                        f"torch. Leave its layer out of parallelize_module, or change its size.",
                        option="tensor_parallel",
                        value=size,
                    )
        if not divided:
            raise OptionError(
                f"FSDP: the {size} ranks of each tensor-parallel group would compute the same, because no "
                f"layer of {name} is divided. Call parallelize_module(layer, "
                f"self.trainer.strategy.tensor_mesh, ...) in {name}.configure_model, or leave tensor "
                "parallelism out.",
                option="tensor_parallel",
                value=size,
            )

    def layers_of(self, module: nn.Module) -> list[nn.Module]:
        """Return the layers that are gathered one at a time, outermost first."""
        return default_layers(module) if self.wrap is None else choose_layers("FSDP: wrap", self.wrap, module)

    # ---- the actions ---------------------------------------------------------------------------------------

    def training_step(self, call: Callable[[], Any]) -> Any:
        """Run the step through the root, which gathers the parameters outside the wrapped layers."""
        try:
            return self._step_module(call) if self._steps_through else call()
        except RuntimeError as error:
            _explain(error)
            raise

    def backward(self, call: Callable[[], Any]) -> None:
        """Run the backward, and explain errors that FSDP causes."""
        try:
            call()
        except RuntimeError as error:
            _explain(error)
            raise

    def validation_step(self, call: Callable[[], Any]) -> Any:
        """Run the step through the root and reshard, because no backward follows that would do it."""
        return self.evaluate(call)

    def test_step(self, call: Callable[[], Any]) -> Any:
        """Run the step as `validation_step` does."""
        return self.evaluate(call)

    def predict_step(self, call: Callable[[], Any]) -> Any:
        """Run the step as `validation_step` does."""
        return self.evaluate(call)

    def evaluate(self, call: Callable[[], Any]) -> Any:
        """Run a function through the root and reshard, because no backward follows that would do it."""
        try:
            return self._step_module(call) if self._steps_through else call()
        finally:
            for unit in self._units:
                unit.reshard()

    def sync_gradients(self, now: bool) -> None:
        """Set whether the next backward reduces gradients over ranks. False until a window's last batch."""
        if self._step_module is not None:
            self._step_module.set_requires_gradient_sync(now)

    def sync_without_batch(self, after_forward: bool) -> None:
        """Run a backward of zero, which reduces the gradients of the window so far, and reshard."""
        if self._step_module is not None:
            zero = torch.zeros((), device=self.device, requires_grad=True)
            self._step_module(functools.partial(torch.mul, zero, 1)).backward()
            for unit in self._units:
                unit.reshard()


def _explain(error: RuntimeError) -> None:
    if "expected scalar type" in str(error):
        error.add_note(
            "FSDP casts parameters to the policy's param_dtype, but not buffers. Batch norm needs both in "
            "float32: leave mixed_precision out and set precision= instead, which keeps them in float32."
        )
    if MIXED in str(error):
        error.add_note(
            "A parameter was used outside the layer that gathers it: leave that layer out of wrap, or use "
            "the parameter in the layer's own forward."
        )


def refuse_ties(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise if two layers that are gathered separately share a parameter."""
    modules, owners = dict(module.named_modules(remove_duplicate=False)), dict[int, tuple[str, nn.Module]]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        above = name.rpartition(".")[0]
        while above and modules[above] not in units:
            above = above.rpartition(".")[0]
        first, owner = owners.setdefault(id(parameter), (name, modules[above]))
        if owner is not modules[above]:
            raise OptionError(
                f"FSDP: {first} and {name} are the same parameter, in layers that are gathered one at a "
                "time. Choose wrap= so that all modules that share a parameter are in one layer, or in none."
            )


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the layers with running averages, whose parameters must stay in float32 as the averages do."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    return [
        each
        for each in module.modules()
        if isinstance(each, kinds) and each.track_running_stats and each.affine
    ]


def _broadcast_weights(module: nn.Module, data_group: Any) -> None:
    """Broadcast rank zero's weights and buffers, because ranks may have initialized differently.

    A rank's part of a tensor-parallel weight goes to the ranks of `data_group`, which have the same part.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if hasattr(tensor, "device_mesh"):
            dist.broadcast(local_part(tensor).detach(), group_src=0, group=data_group)
        else:
            dist.broadcast(tensor.detach(), 0)


def materialize_module(module: nn.Module, device: torch.device) -> None:
    """Allocate a model that was made on the meta device, and initialize its layers."""
    module.to_empty(device=device)
    for name, part in module.named_modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        reset: Any = getattr(part, "reset_parameters", None) or getattr(part, "init_weights", None)
        if own and reset is None:
            raise OptionError(
                f"{name or type(module).__name__} ({type(part).__name__}) was made on the meta device and "
                "has neither reset_parameters() nor init_weights(), so it cannot be initialized. "
                "Add one of them, or make the model on the CPU."
            )
        if own and reset is not None:
            with torch.no_grad():
                reset()
