"""torch.compile for the model, so that module hooks added later still run, or for the whole training step:
the splits of a compiled step into graphs, and what cannot be compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hookline.distributed.layer_choice import choose_layers, outermost
from hookline.engine.listener import overrides
from hookline.run.optimizers import bare, needs_closure
from hookline.run.run import Run
from hookline.util.errors import OptionError


def compiles_step(given: Any) -> bool:
    """Return whether this value of `Trainer(compile=...)` compiles the whole training step."""
    return given == "step" or (isinstance(given, dict) and bool(given.get("step")))


def explain_graphs(run: Run) -> str:
    """Return a description of the training step's graphs, for `explain`; empty if it is not compiled."""
    if not compiles_step(run.options.compile) or run.stage != "fit":
        return ""
    if run.traits.compiled is not None:
        return str(run.traits.compiled.text())
    try:
        check_compilable(run)
    except OptionError as error:
        return f"  refused: {error}"
    clips = run.traits.clips and not run.plan.listeners("on_gradient_clip")
    return describe_graphs(
        find_splits(run), [("optimizer", clips and not run.plan.listeners("configure_gradient_clipping"), "")]
    )


def compile_model(run: Run) -> None:
    """Compile in place: the module itself if it defines forward, else its children.

    By default torch.compile does not check for module hooks after the first call, so a hook added later would
    never run; with the guard it recompiles and the hook runs.
    """
    if not run.options.compile or compiles_step(run.options.compile) or _blocks(run):
        return
    has_forward = type(run.module).forward is not nn.Module.forward
    _compile_each(run, [run.module] if has_forward else run.module.children())


def compile_blocks(run: Run) -> None:
    """Compile the layers of `compile={"blocks": ...}` in place, before a strategy shards them.

    Layers of one class share compiled code, so that a deep model compiles as fast as a shallow one.
    """
    if blocks := _blocks(run):
        _compile_each(run, choose_blocks(run, "compile: blocks", blocks))


def _compile_each(run: Run, modules: Iterable[nn.Module]) -> None:
    given: dict[str, Any] = run.options.compile if isinstance(run.options.compile, dict) else {}
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    options = {name: value for name, value in given.items() if name not in ("step", "blocks")}
    for module in modules:
        module.compile(**options)


def check_recomputed(run: Run, layers: Sequence[nn.Module]) -> None:
    """Refuse compiled layers that cannot be computed again in the backward pass. layers: those that will be.

    Under tensor parallelism a graph has the device mesh as an input, which torch cannot save for a backward
    pass through checkpointed layers.
    """
    compiled = run.options.compile
    if isinstance(compiled, dict) and compiled.get("backend") == "eager":
        raise OptionError(
            "compile: backend='eager' cannot be combined with activation_checkpointing: a layer that is "
            "computed again would draw other random numbers, so gradients through dropout would be wrong. "
            "Use 'aot_eager'.",
            option="compile",
            value=compiled,
        )
    if not compiled or run.strategy.tensor_mesh is None:
        return
    blocks = _blocks(run)
    graphs = choose_blocks(run, "compile: blocks", blocks) if blocks else [run.module]
    inside = {id(part) for graph in graphs for part in graph.modules()}
    if any(id(layer) in inside for layer in layers):
        raise OptionError(
            "compile cannot be combined with activation_checkpointing of the same layers under tensor "
            "parallelism, a limit of torch. Leave one of them out, or compile other layers: "
            "compile={'blocks': ...}.",
            option="compile",
            value=compiled,
        )


def _blocks(run: Run) -> Any:
    """Return what `compile={"blocks": ...}` chooses: True, choices of layers, or None."""
    return run.options.compile.get("blocks") if isinstance(run.options.compile, dict) else None


def choose_blocks(run: Run, option: str, wanted: Any) -> list[nn.Module]:
    """Return the layers that an option chooses; True: the blocks of the model. Raise if there are none.

    A layer inside a chosen one is recomputed and compiled with it, so that it is left out.
    """
    if wanted is not True:
        return outermost(choose_layers(option, wanted, run.module))
    layers = run.strategy.layers_of(run.module)
    if not layers:
        raise OptionError(
            f"{option}=True means the items of every ModuleList, and {type(run.module).__name__} has none "
            "with parameters. Pass a pattern of names such as 'layers.*', a class of modules or its name, or "
            "a function of name and module.",
            option=option.rpartition(": ")[2],
            value=True,
        )
    return outermost(layers)


# ---- the graphs of a compiled step -------------------------------------------------------------------------


BETWEEN = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward")
"""Events between the forward pass and the gradients. A listener there splits the graph."""
OPTION = "trace_autograd_ops"
"""The private option of torch._dynamo that allows a backward pass in a graph."""
USE_MODEL = "Pass compile=True, which compiles the model alone."


def find_splits(run: Run) -> list[str]:
    """Return a description of everything that has to run between the forward pass and the gradients."""
    return [*_by_listeners(run), *_by_options(run), *_by_torch_hooks(run)]


def _by_listeners(run: Run) -> Iterator[str]:
    for event in BETWEEN:
        for listener in run.plan.listeners(event):
            does = "overrides" if run.plan.table[event].action else "listens to"
            yield f"{listener.label} {does} {event} ({listener.origin})"


def _by_options(run: Run) -> Iterator[str]:
    traits = run.traits
    if traits.accumulate > 1:
        yield f"accumulate_grad_batches={traits.accumulate} divides the loss"
    elif run.window.batches:
        yield "an accumulation window is open"
    if traits.skips_nonfinite:
        yield "nonfinite='skip' holds the loss back"
    if traits.scaler is not None:
        yield f"precision={run.strategy.precision.name!r} scales the loss"
    if run.data.loss_weights is not None:
        yield "the mixture weights the losses of its loaders"
    if run.data.router is not None:
        yield "the mixture's loaders train different optimizers"
    elif run.data.totals is not None:
        yield f"accumulate_by={run.window.by!r} weights the loss"
    for optimizer in run.state.optimizers:
        if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
            yield f"{type(optimizer).__name__} has a zero_grad of its own"


def _by_torch_hooks(run: Run) -> Iterator[str]:
    for name, parameter in run.module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield f"the parameter {name!r} has a gradient hook, which a graph would not call"
    for name, module in run.module.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            yield f"the module {name!r} has a backward hook, which torch refuses in a graph"


def describe_graphs(splits: list[str], updates: list[tuple[str, bool, str]]) -> str:
    """Return a description of the graphs of a step.

    updates: for each optimizer its name, whether its graph clips, and why it has no graph.
    """
    parts = ["training_step", "backward"] if splits else ["training_step, loss and backward"]
    eager = []
    for name, clips, refusal in updates:
        if refusal:
            eager.append(f"{name}.step, because {refusal}")
        else:
            parts.append(f"{'clipping and ' if clips else ''}{name}.step")
    return "\n".join(
        [
            *(f"  graph {number}: {part}" for number, part in enumerate(parts, 1)),
            *(f"  split between forward and backward: {cause}" for cause in splits),
            *(f"  without a graph: {each}" for each in eager),
        ]
    )


def check_compilable(run: Run) -> None:
    """Raise if the step of this run cannot be compiled, before anything is trained."""
    strategy = run.strategy
    if run.traits.is_manual:
        raise OptionError(
            f"compile='step': {type(run.module).__name__} has automatic_optimization = False, so its "
            f"training_step calls the optimizers itself, and that cannot be a graph. {USE_MODEL}"
        )
    around = [name for name in ("training_step", "backward", "optimizer_step") if overrides(strategy, name)]
    if not strategy.ranks.alone or strategy.shards or strategy.differentiate is not None or around:
        ranks = f" with {strategy.world_size} ranks" if strategy.world_size > 1 else ""
        raise OptionError(
            "compile='step' needs one process on one device, and this run uses "
            f"{type(strategy).__name__}{ranks}, which takes part in the step itself. {USE_MODEL}"
        )
    if (
        not hasattr(import_dynamo().config, OPTION)
        or "isolate_recompiles" not in inspect.signature(torch.compile).parameters
    ):
        raise OptionError(
            f"compile='step' needs torch 2.13, whose option torch._dynamo.config.{OPTION} lets a graph hold "
            f"a backward pass; torch {torch.__version__} does not have it. {USE_MODEL}"
        )
    backend = torch_arguments(run.options.compile).get("backend", "inductor")
    if backend == "inductor" and strategy.device.type == "cpu":
        _check_compiler()


def _check_compiler() -> None:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise OptionError(
            "compile='step': torch.compile needs a C++ compiler on the CPU, and found none. Install g++, "
            "name one in the environment variable CXX, or pass compile={'step': True, 'backend': "
            "'aot_eager'}, which compiles no code and is not faster."
        ) from None


def torch_arguments(given: Any) -> dict[str, Any]:
    """Return the arguments of torch.compile. Random numbers are drawn as without a graph."""
    arguments: dict[str, Any] = dict(given) if isinstance(given, dict) else {}
    arguments.pop("step", None)
    if arguments.get("backend", "inductor") == "inductor":
        import torch._inductor

        mode = arguments.pop("mode", None)
        of_mode = {} if mode is None else torch._inductor.list_mode_options(mode)
        arguments["options"] = {**of_mode, "fallback_random": True, **(arguments.get("options") or {})}
    return {**arguments, "isolate_recompiles": True}


def why_eager(optimizer: Any) -> str:
    """Return why an optimizer cannot be compiled; an empty string if it can."""
    if not isinstance(optimizer, Optimizer) or bare(optimizer) is not optimizer:
        return f"{type(optimizer).__name__} wraps it"
    if needs_closure(optimizer):
        return "it calls a closure that computes the loss again"
    if optimizer.defaults.get("differentiable"):
        return "differentiable=True needs gradients of the update"
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return "this object has a step of its own"
    return ""


def import_dynamo() -> Any:
    """Import torch's compiler when it is needed."""
    import torch._dynamo  # takes a second

    return torch._dynamo
