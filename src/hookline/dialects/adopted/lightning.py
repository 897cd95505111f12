"""Lightning's callbacks among Hookline's hooks, unchanged: EarlyStopping, ModelCheckpoint,
and people's own.
"""

from __future__ import annotations

import itertools
from typing import Any

from hookline.binding import Binding
from hookline.dialects.adopted.callback import AdoptedCallback
from hookline.dialects.adopted.lightning_binding import bind
from hookline.dialects.adopted.lightning_face import is_lightning_module, shown_to_callbacks
from hookline.dialects.adopted.lightning_parts import missing
from hookline.dialects.adopted.lightning_reading import mentions, out_of_reach, owner_of
from hookline.dialects.adopted.lightning_view import PACKAGES, TrainerView, is_lightnings
from hookline.dialects.lightning.table import CALLBACK_ROWS
from hookline.errors import HookError
from hookline.events import EventTable
from hookline.listener import Listener, refuse_misspelled

MONITORS = ("EarlyStopping", "Checkpoint")
"""Classes whose callbacks Lightning calls after the module at the end of an epoch: they act on metrics."""


class LightningCallback(AdoptedCallback):
    """Stands for one callback. Only the methods that it overrides are called; what they return is ignored, as
    Lightning does.
    """

    kind = "Lightning callback"

    def __init__(self, original: Any) -> None:
        super().__init__(original, PACKAGES, "Callback")
        self.replaces = mentions(original, self.base, "remove_checkpoint")
        self.view = TrainerView(self.base.__module__.removesuffix(".callbacks.callback"), original)
        self._check()

    def usual_tier(self) -> str:
        """Monitors are called after the module."""
        kinds = {cls.__name__ for cls in type(self.original).__mro__ if is_lightnings(cls)}
        return "monitor" if kinds & set(MONITORS) else "user"

    def _check(self) -> None:
        who = type(self.original).__name__
        refuse_misspelled(self.original, {name: len(row.arguments) for name, row in CALLBACK_ROWS.items()})
        if asked := out_of_reach(self.original, self.base):
            paths = ", ".join(f"{path} (in {where})" for path, where in asked)
            raise HookError(
                f"{who} cannot run in Hookline: it reaches into Lightning's own trainer for {paths}. "
                f"{missing(asked[0][0], owner_of(asked[0][0]))}"
            )
        for method in vars(self.base):
            if method.startswith("on_") and method not in CALLBACK_ROWS and self.overrides(method):
                raise HookError(
                    f"{who} listens to {method}, an event of Lightning that Hookline does not have. "
                    f"There are: {', '.join(CALLBACK_ROWS)}."
                )

    def listeners(self, name: str, table: EventTable) -> list[Listener]:
        """One for each overridden method; one that replaces checkpoints also hears when they are complete."""
        found = []
        for method, row in CALLBACK_ROWS.items():
            if method in vars(self.base) and self.overrides(method):
                function = getattr(self.original, method)
                binding = bind(function, method, row, table, self.view, answers=False)
                found.append(Listener("H", name, self, table[row.event], function, binding, []))
        if self.replaces:
            tidy = self.view.remove_replaced
            written = Binding(lambda s: tidy(s.path), ("path",))
            found.append(Listener("H", name, self, table["on_checkpoint_save"], tidy, written, []))
        return found

    def begin_run(self, state: Any) -> None:
        """A run begins: the view shows its trainer and module."""
        module = state.module
        names = module.__dict__ if is_lightning_module(module) else {}
        face = shown_to_callbacks(module, self.view)
        self.view.attach(state.trainer, face, names)
        if face is not None:  # Lightning gives every callback these two of the module
            self.original.log, self.original.log_dict = face.log, face.log_dict

    def before_optimizers(self) -> None:
        """A finetuning makes the parameter groups again that it had added, and what is in them is trained
        again.

        Lightning puts the optimizers back after on_fit_start, which makes the groups, and leaves what is in
        them frozen.
        """
        for cls in type(self.original).__mro__:
            if is_lightnings(cls, "BaseFinetuning"):
                optimizers = self.view.optimizers
                known = [len(each.param_groups) for each in optimizers]
                cls.on_fit_start(self.original, self.view, self.view.moment.face)  # type: ignore[attr-defined]
                for optimizer, groups in zip(optimizers, known, strict=True):
                    for parameter in itertools.chain(
                        *(each["params"] for each in optimizer.param_groups[groups:])
                    ):
                        parameter.requires_grad_(True)

    # ---- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The callback's own state, with the key under which Lightning would look for it."""
        return {"state_key": self.original.state_key, "state": self.original.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back. Of several callbacks of one class each gets what was saved under its key, in whatever
        order they are.
        """
        key = self.original.state_key
        saved = (self.view._own.state.checkpoint or {}).get("hooks", {})
        for each in (state, *saved.values()):
            if isinstance(each, dict) and each.get("state_key") == key:
                self.original.load_state_dict(each["state"])
                return
