"""KempnerForge's hooks: `TrainingHook`, `StepContext`, `HookRunner`. Change the import line, and both ways to
use them work.

In your own training script a `HookRunner` calls them. In `hookline.Trainer(hooks=[...])` they are hooks like
any other, and may also listen to events that KempnerForge lacks: gradients, the optimizer's step, the loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from hookline.engine.events import EVENTS
from hookline.engine.hook import Hook
from hookline.engine.listener import event_methods
from hookline.hooks.console_log import perplexity_of
from hookline.interop.adapter import Row
from hookline.run.context import StepContext
from hookline.util.errors import HookError

__all__ = ["HookRunner", "StepContext", "TrainingHook"]


def eval_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return an evaluation's results under KempnerForge's names: `val/loss` or `val_loss` is `eval/loss`;
    `eval/perplexity` is added.
    """
    found = {
        f"eval/{name[4:]}": value for name, value in metrics.items() if name.startswith(("val_", "val/"))
    }
    if "eval/loss" in found:
        found.setdefault("eval/perplexity", perplexity_of(found["eval/loss"]))
    return found


ROWS: Mapping[str, Row] = {
    "on_train_begin": Row("on_train_start", ("config",)),
    "on_step_end": Row("on_step_end", ("ctx",)),
    "on_eval_end": Row(
        "on_validation_end", ("metrics", "step"), {"metrics": eval_metrics}, in_sanity_check=False
    ),
    "on_checkpoint_save": Row("on_checkpoint_save", ("step", "path"), {"path": str}),
    "on_train_end": Row("on_train_end", ("step", "tokens_seen")),
}


class TrainingHook(Hook):
    """Override what you need. Other events of Hookline may be overridden too: a trainer calls them, a runner
    rejects them.
    """

    __hookline_base__: ClassVar[bool] = True
    __hookline_rows__: ClassVar[Mapping[str, Row]] = ROWS

    def on_train_begin(self, *args: Any, **kwargs: Any) -> Any:
        """Once, after set-up and before the loop; `config` is what was passed as `Trainer(config=...)`.
        Called with config.
        """

    def on_step_end(self, *args: Any, **kwargs: Any) -> Any:
        """After each optimizer update and its metrics. Called with ctx."""

    def on_eval_end(self, *args: Any, **kwargs: Any) -> Any:
        """After each evaluation, with `eval/loss` and `eval/perplexity`. Called with metrics, step."""

    def on_checkpoint_save(self, *args: Any, **kwargs: Any) -> Any:
        """A checkpoint is complete; `path` is this very checkpoint's, so that it can be uploaded. Called with
        step, path.
        """

    def on_train_end(self, *args: Any, **kwargs: Any) -> Any:
        """Once, after the loop, stopped or shut down runs included. Called with step, tokens_seen."""


class HookRunner:
    """Calls hooks in the order of a list, from your own training script.

    hooks: the hooks, in order.
    """

    def __init__(self, hooks: Iterable[TrainingHook] | None = None) -> None:
        self.hooks: list[TrainingHook] = hooks if isinstance(hooks, list) else list(hooks or ())
        for hook in self.hooks:
            _refuse_unusable(hook)

    def on_train_begin(self, config: Any) -> None:
        """Call the hooks once, before the loop."""
        for hook in self.hooks:
            hook.on_train_begin(config)

    def on_step_end(self, ctx: StepContext) -> None:
        """Call the hooks after every optimizer update."""
        for hook in self.hooks:
            hook.on_step_end(ctx)

    def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
        """Call the hooks after every evaluation."""
        for hook in self.hooks:
            hook.on_eval_end(metrics, step)

    def on_checkpoint_save(self, step: int, path: str) -> None:
        """Call the hooks after a checkpoint was written."""
        for hook in self.hooks:
            hook.on_checkpoint_save(step, path)

    def on_train_end(self, step: int, tokens_seen: int) -> None:
        """Call the hooks once, after the loop."""
        for hook in self.hooks:
            hook.on_train_end(step, tokens_seen)


def _refuse_unusable(hook: Any) -> None:
    """Reject a hook that the runner could not call, or would call with wrong arguments."""
    if not isinstance(hook, TrainingHook):
        made = f"{hook.__name__}()" if inspect.isclass(hook) else "a class derived from TrainingHook"
        raise HookError(
            f"HookRunner takes instances of TrainingHook, not {hook!r}. Pass {made}; pass hooks of another "
            "kind to hookline.Trainer(hooks=[...])."
        )
    for method, _ in event_methods(hook, "H", EVENTS):
        if method not in ROWS:
            raise HookError(
                f"{type(hook).__name__}.{method} would never be called: HookRunner calls {', '.join(ROWS)}. "
                "hookline.Trainer(hooks=[...]) calls every event."
            )
    for method, row in ROWS.items():
        _check_order(f"{type(hook).__name__}.{method}", inspect.unwrap(getattr(type(hook), method)), row)


def _check_order(where: str, function: Any, row: Row) -> None:
    """Reject a parameter that names another fact than the one at its position, because the runner passes by
    position.
    """
    documented, signature = ", ".join(row.arguments), inspect.signature(function)
    try:
        signature.bind("self", *row.arguments)
    except TypeError as error:
        raise HookError(
            f"{where} is called with ({documented}), which it does not accept: {error}."
        ) from None
    for argument, parameter in zip(row.arguments, list(signature.parameters)[1:], strict=False):
        meant = EVENTS.fact(parameter, EVENTS[row.event])
        if meant is not None and meant.name != argument:
            raise HookError(
                f"{where}: HookRunner passes ({documented}) in this order, so {parameter!r} would be the "
                f"{argument}. Change the order; hookline.Trainer(hooks=[...]) also passes facts by name."
            )
