"""What a module brings into a run: its callbacks, in the place of the trainer's of the same class, and its
hyper-parameters.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from hookline.dialects.lightning.hparams import KeptHParams
from hookline.hooks.hparams import HParams

log = logging.getLogger("hookline")


def brought(run: Any, module: Any, returned: Any) -> list[Any]:
    """The hooks to add; `returned` is what `configure_callbacks` gave."""
    callbacks = (
        list(returned) if isinstance(returned, list | tuple) else [returned] if returned is not None else []
    )
    hooks = run.state.hooks
    kinds = {type(each) for each in callbacks}
    displaced = [entry for entry in hooks.entries() if type(entry.given) in kinds]
    for entry in displaced:
        log.warning(
            "%s.configure_callbacks brings a %s, which takes the place of hook %r in this run.",
            type(module).__name__,
            type(entry.given).__name__,
            entry.name,
        )
    if displaced:
        run.participants.on_close.append(hooks.set_aside(displaced))
    data = getattr(run.datamodule, "original", run.datamodule)
    has_some = any(getattr(each, "hparams", None) for each in (module, data))
    is_kept = any(isinstance(each, HParams) for each in hooks)
    return [*callbacks, KeptHParams(module, data)] if has_some and not is_kept else callbacks


def brought_by(cls: type) -> None:
    """A class that has its own `configure_callbacks`: what that returns is brought as Lightning does."""
    ask: Callable[[Any], Any] | None = vars(cls).get("configure_callbacks")
    if ask is None:
        return

    @functools.wraps(ask)
    def configure_callbacks(self: Any) -> Any:
        return brought(self._run, self, ask(self))

    cls.configure_callbacks = configure_callbacks  # type: ignore[attr-defined]
