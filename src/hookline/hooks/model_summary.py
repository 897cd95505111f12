"""Print a table of a model's layers: parameters, sizes, modes; on request FLOPs and shapes of a batch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from hookline.data.batch import describe_batch
from hookline.distributed.sharded_norms import is_sharded, local_part
from hookline.engine.checks import AtLeast, checked_parameters
from hookline.engine.hook import Hook
from hookline.hooks._statistics import tensors_in
from hookline.run.parameter_groups import WRAPPERS, named_parameters
from hookline.util.errors import HookError
from hookline.util.text import align_columns, list_some

OWN = "(module itself)"
"""The row of parameters and buffers that belong to no submodule."""


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer of a table, with everything inside it."""

    name: str
    kind: str
    parameters: int
    trainable: int
    lazy: int
    """Parameters without a shape yet: those of a lazy layer before its first batch."""
    size: int
    """Bytes of parameters and buffers."""
    mode: str
    inputs: str = ""
    outputs: str = ""
    flops: int | None = None
    """FLOPs of its forward, all calls in one batch."""


@dataclass(slots=True)
class Summary:
    """The layers and the totals of a model; `print` it for the table. A shared parameter counts once.

    rows: the layers. parameters, trainable, lazy: numbers of parameters, of those that are trained, and of
    those without a shape yet. train_modules, eval_modules: modules in each mode. batch: the shape of the
    batch that was measured. flops_forward, flops_backward: FLOPs of one batch, or None.
    """

    rows: list[LayerRow]
    parameters: int = 0
    trainable: int = 0
    lazy: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of parameters and buffers by dtype, of the whole model."""
    buffers: int = 0
    """Bytes of the buffers among them."""
    local_size: int | None = None
    """Bytes on this rank, if the model is sharded."""
    train_modules: int = 0
    eval_modules: int = 0
    shared: list[list[str]] = field(default_factory=list)
    """The names of each parameter that has several."""
    batch: str = ""
    flops_forward: int | None = None
    flops_backward: int | None = None

    def data(self) -> dict[str, Any]:
        """Return the totals as plain values."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "rows"}

    def __str__(self) -> str:
        table = [*align_columns(self._table(), left=2), ""] if self.rows else []
        return "\n".join([*table, *align_columns(self._totals())])

    __repr__ = __str__  # the last line of a notebook's cell shows the table

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        head, *rows = self._table()
        table = Table()
        for number, name in enumerate(head):
            table.add_column(name, justify="left" if number < 2 else "right", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        totals = [Text(line) for line in align_columns(self._totals())]
        return Group(*([table] if rows else []), *totals)

    def _table(self) -> list[list[str]]:
        extra = [name for name in ("inputs", "outputs") if any(getattr(row, name) for row in self.rows)]
        has_flops = self.flops_forward is not None
        lines = [
            [
                "layer",
                "class",
                "parameters",
                "trainable",
                "size",
                "mode",
                *extra,
                *["FLOPs forward"] * has_flops,
            ]
        ]
        for row in self.rows:
            counts = [_count(row.parameters, row.lazy), _count(row.trainable, row.lazy), _bytes(row.size)]
            measured = [getattr(row, name) or "-" for name in extra]
            flops = ["-" if row.flops is None else compact(row.flops)] if has_flops else []
            lines.append([row.name, row.kind, *counts, row.mode, *measured, *flops])
        return lines

    def _totals(self) -> list[list[str]]:
        count = _count(self.parameters, self.lazy)
        frozen = self.parameters - self.trainable
        by_type = ", ".join(f"{name} {_bytes(size)}" for name, size in self.sizes.items())
        buffers = f"; buffers {_bytes(self.buffers)}" if self.buffers else ""
        local = "" if self.local_size is None else f"; on this rank {_bytes(self.local_size)}"
        lines = [
            ["parameters", f"{count}: {self.trainable:,} trainable, {frozen:,} frozen"],
            ["size", f"{_bytes(sum(self.sizes.values()))}{f': {by_type}' * bool(by_type)}{buffers}{local}"],
            ["modules", f"{self.train_modules} in train mode, {self.eval_modules} in eval mode"],
        ]
        if self.lazy:
            lines.append(["not counted", f"{self.lazy} parameters without a shape before the first batch"])
        if self.shared:
            lines.append(["shared", list_some((" = ".join(names) for names in self.shared), 3)])
        if self.flops_forward is not None and self.flops_backward is not None:
            passes = f"forward {compact(self.flops_forward)}, backward {compact(self.flops_backward)}"
            lines.append(["FLOPs", f"{passes}; batch: {self.batch}"])
        return lines


class ModelSummary(Hook):
    """Prints the layers of the model when training starts: class, parameters, size and mode. Only rank zero
    prints. A sharded model is shown with its full sizes.

    `flops` and `shapes` are measured while the first training batch runs, without another pass: the training
    is the same bit for bit. The table is then printed after this batch. Later the hook costs nothing.

    Outside a run: `print(ModelSummary(depth=2).of(model))`.
    """

    tier = "builtin"
    rewinds = False

    @checked_parameters
    def __init__(
        self,
        depth: Annotated[int, AtLeast(-1, "a whole number from 0, or -1 for all layers")] = 1,
        flops: bool = False,
        shapes: bool = False,
        name: str | None = None,
    ) -> None:
        """Choose the layers and what is measured.

        depth: levels of submodules; 0: only the totals; -1: all.
        flops: FLOPs of forward and backward of this rank's first batch, of matrix products, convolutions and
        attention (`torch.utils.flop_counter`).
        shapes: the shapes of each layer's inputs and outputs in its first call.
        """
        super().__init__(name)
        self.depth, self.flops, self.shapes = depth, flops, shapes
        self.summary: Summary | None = None
        """The newest summary of a run."""

    def of(self, model: nn.Module) -> Summary:
        """Return the summary of a model, without a run and so without FLOPs and shapes."""
        return summarize(model, self.depth)

    def on_train_start(self, trainer: Any, module: nn.Module, logger: Any, rank: int) -> None:
        self.summary = None
        if not (self.flops or self.shapes):
            self._show(self.of(module), logger, rank)
            return
        options = getattr(trainer, "options", None)
        is_compiled = any(
            each._compiled_call_impl is not None or type(each).__name__ == "OptimizedModule"
            for each in module.modules()
        )
        if getattr(options, "compile", False) or is_compiled:
            raise HookError(
                "ModelSummary: flops and shapes are measured by hooks on the layers, which change how a "
                "compiled model is compiled and run. Measure without compile in a short run "
                "(max_steps=1), or leave out flops and shapes."
            )
        trainer.add_hook(FirstBatch(self))

    def _show(self, made: Summary, logger: Any, rank: int) -> None:
        self.summary = made
        if rank == 0:
            logger.log_event("model", made.data())
            show(made)


class PassCounter(FlopCounterMode):
    """Counts FLOPs, and those of backward passes also by themselves."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.backward = 0

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        before = self.get_total_flops()
        count: Any = super()._count_flops
        result = count(func_packet, out, args, kwargs)
        if self.mod_tracker.is_bw:
            self.backward += self.get_total_flops() - before
        return result


class FirstBatch(Hook):
    """Measures the first training batch for a `ModelSummary`, then removes itself."""

    tier = "builtin"

    def __init__(self, owner: ModelSummary) -> None:
        super().__init__()
        self._owner = owner
        self._counter: Any = None
        self._handles: list[RemovableHandle] = []
        self._shapes: dict[str, tuple[str, str]] = {}
        self._flops: dict[str, int] = {}
        self._in_updates = 0
        self._is_removed = False

    def on_train_batch_start(self, module: nn.Module) -> None:
        self._stop()  # a batch before this one was skipped
        self._shapes, self._flops, self._in_updates = {}, {}, 0
        for name, layer in named_layers(module, self._owner.depth):
            self._watch(name, layer)
        if self._owner.flops:
            self._counter = PassCounter()
            self._counter.__enter__()

    def on_before_optimizer_step(self) -> None:
        self._in_updates -= self._total()

    def on_after_optimizer_step(self) -> None:
        self._in_updates += self._total()

    def on_train_batch_end(self, trainer: Any, module: nn.Module, batch: Any, logger: Any, rank: int) -> None:
        counter, updates = self._counter, max(self._in_updates, 0)  # below 0 if an update was skipped
        self._stop()
        made = summarize(module, self._owner.depth)
        made.rows = [self._measured(row) for row in made.rows]
        if counter is not None:
            made.flops_forward = counter.get_total_flops() - counter.backward - updates
            made.flops_backward = counter.backward
            made.batch = describe_batch(batch)
        self._owner._show(made, logger, rank)
        self._remove(trainer)

    def teardown(self, trainer: Any) -> None:
        self._stop()
        if not self._is_removed:  # the first batch failed, or there was none; a next run adds one of its own
            self._remove(trainer)

    def _remove(self, trainer: Any) -> None:
        self._is_removed = True  # a removal calls teardown
        trainer.remove_hook(self)

    def _total(self) -> int:
        return 0 if self._counter is None else int(self._counter.get_total_flops())

    def _measured(self, row: LayerRow) -> LayerRow:
        inputs, outputs = self._shapes.get(row.name, ("", ""))
        flops = self._flops.get(row.name, 0 if row.name in self._shapes else None)
        if not self._owner.shapes:
            inputs = outputs = ""
        return replace(row, inputs=inputs, outputs=outputs, flops=flops if self._owner.flops else None)

    def _watch(self, name: str, layer: nn.Module) -> None:
        begun: list[int] = []

        def begin(*_: Any) -> None:
            begun.append(self._total())

        def end(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._shapes.setdefault(name, (shapes_in([*args, *kwargs.values()]), shapes_in(output)))
            spent = self._total() - begun.pop()
            if self._counter is None or not self._counter.mod_tracker.is_bw:  # not repeated for a backward
                self._flops[name] = self._flops.get(name, 0) + spent

        self._handles.append(layer.register_forward_pre_hook(begin))
        self._handles.append(layer.register_forward_hook(end, with_kwargs=True))

    def _stop(self) -> None:
        """Remove what measures, also after a failure."""
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
        while self._handles:
            self._handles.pop().remove()


# ---- reading a model ---------------------------------------------------------------------------------------


def summarize(model: nn.Module, depth: int = 1) -> Summary:
    """Return the rows and the totals of a model, without communication between ranks."""
    rows = []
    own = [*model._parameters.values(), *model._buffers.values()]
    if depth and any(each is not None for each in own):
        rows.append(_row(OWN, model, recurse=False))
    rows += [_row(name, layer) for name, layer in named_layers(model, depth)]
    found = list(named_parameters(model))
    buffers = list(model.buffers())
    known = [each.parameter for each in found if not is_lazy(each.parameter)]
    held = [*known, *_with_shape(buffers)]
    sizes: dict[str, int] = {}
    for tensor in held:
        kind = str(tensor.dtype).removeprefix("torch.")
        sizes[kind] = sizes.get(kind, 0) + _size([tensor])
    modes = [each.training for each in model.modules()]
    return Summary(
        rows,
        parameters=sum(each.numel() for each in known),
        trainable=sum(each.numel() for each in known if each.requires_grad),
        lazy=len(found) - len(known),
        sizes=sizes,
        buffers=_size(_with_shape(buffers)),
        local_size=_size(map(_local, held)) if any(map(is_sharded, held)) else None,
        train_modules=modes.count(True),
        eval_modules=modes.count(False),
        shared=[each.names for each in found if len(each.names) > 1],
    )


def named_layers(model: nn.Module, depth: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield submodules down to a depth, without the wrappers of torch."""
    layers = {
        WRAPPERS.sub("", f"{name}.").removesuffix("."): each for name, each in model.named_modules() if name
    }
    for name, layer in layers.items():
        if name and (depth < 0 or name.count(".") < depth):
            yield name, layer


def _row(name: str, layer: nn.Module, recurse: bool = True) -> LayerRow:
    parameters = list(layer.parameters(recurse))
    known = [each for each in parameters if not is_lazy(each)]
    return LayerRow(
        name,
        type(layer).__name__,
        sum(each.numel() for each in known),
        sum(each.numel() for each in known if each.requires_grad),
        len(parameters) - len(known),
        _size([*known, *_with_shape(layer.buffers(recurse))]),
        "train" if layer.training else "eval",
    )


def _with_shape(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [each for each in tensors if not is_lazy(each)]


def _size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of whole tensors; a sharded tensor has the shape of the whole."""
    return sum(each.numel() * each.element_size() for each in tensors)


def _local(tensor: Tensor) -> Tensor:
    return local_part(tensor.detach())


# ---- text --------------------------------------------------------------------------------------------------


def shapes_in(value: Any) -> str:
    """Return the shapes of all tensors in a value: `3x4, 3`."""
    return ", ".join("x".join(map(str, each.shape)) or "scalar" for _, each in tensors_in("", value))


def compact(number: int) -> str:
    """Return `1.23 G`."""
    value, units = float(number), iter(("", "k", "M", "G", "T"))
    unit = next(units)
    while value >= 1000 and (larger := next(units, None)) is not None:
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}".rstrip()


def _bytes(number: int) -> str:
    text = compact(number)
    return f"{text}B" if " " in text else f"{text} B"


def _count(number: int, lazy: int) -> str:
    return f"{number:,}{' + ?' if lazy else ''}"


def show(summary: Summary) -> None:
    """Print a summary to stderr: with lines on a terminal, as plain text elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_interactive and console.file.isatty():
        console.print(summary)
    else:
        print(summary, file=sys.stdout if console.is_jupyter else sys.stderr, flush=True)
