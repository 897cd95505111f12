"""torch.compile for the model, such that hooks put on its layers later still fire."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hookline.loops.run import Run


def compile_model(run: Run) -> None:
    """Compile in place: the module itself if it has a forward of its own, else its children, where the work is.

    By default torch.compile does not check for module hooks after the first call, so a hook added later would never
    fire; with the guard it recompiles and the hook runs.
    """
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    options: dict[str, Any] = run.options.compile if isinstance(run.options.compile, dict) else {}
    has_forward = type(run.module).forward is not nn.Module.forward
    for each in [run.module] if has_forward else run.module.children():
        each.compile(**options)
