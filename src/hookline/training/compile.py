"""torch.compile for the model, so that module hooks added later still run, or for the whole training step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hookline.run.run import Run
from hookline.util.errors import OptionError


def compiles_step(given: Any) -> bool:
    """Return whether this value of `Trainer(compile=...)` compiles the whole training step."""
    return given == "step" or (isinstance(given, dict) and bool(given.get("step")))


def compile_step(run: Run) -> None:
    """Compile the training step, once the optimizers are known. Raise an error if it cannot be compiled."""
    if compiles_step(run.options.compile):
        from hookline.training.compiled_step import CompiledStep

        run.traits.compiled = CompiledStep(run)


def explain_graphs(run: Run) -> str:
    """Return a description of the training step's graphs, for `explain`; empty if it is not compiled."""
    if not compiles_step(run.options.compile) or run.stage != "fit":
        return ""
    if run.traits.compiled is not None:
        return str(run.traits.compiled.text())
    from hookline.training.graph_splits import check_compilable, describe, find_splits

    try:
        check_compilable(run)
    except OptionError as error:
        return f"  refused: {error}"
    clips = run.traits.clips and not run.plan.listeners("on_gradient_clip")
    return describe(
        find_splits(run), [("optimizer", clips and not run.plan.listeners("configure_gradient_clipping"), "")]
    )


def compile_model(run: Run) -> None:
    """Compile in place: the module itself if it defines forward, else its children.

    By default torch.compile does not check for module hooks after the first call, so a hook added later would
    never run; with the guard it recompiles and the hook runs.
    """
    if not run.options.compile or compiles_step(run.options.compile):
        return
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    given: dict[str, Any] = run.options.compile if isinstance(run.options.compile, dict) else {}
    options = {name: value for name, value in given.items() if name != "step"}
    has_forward = type(run.module).forward is not nn.Module.forward
    for module in [run.module] if has_forward else run.module.children():
        module.compile(**options)
