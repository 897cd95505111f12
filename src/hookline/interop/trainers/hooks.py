"""`TrainingHook`, `HookManager` and the documented built-in hooks of `trainers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, ClassVar

from hookline.engine.events import EVENTS
from hookline.engine.hook import Hook
from hookline.engine.hook_list import Handle, HookList
from hookline.engine.plan import Plan
from hookline.hooks.console_log import ConsoleLog
from hookline.hooks.json_log import JSONLog
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.interop.adapter import FactConverter, Row
from hookline.run.state import State
from hookline.util.errors import HookError, closest

# ---- The state dictionary that hooks of `trainers` get


STATE_KEYS = (
    "model",
    "optimizer",
    "device",
    "current_epoch",
    "current_batch_idx",
    "latest_loss",
    "avg_loss",
    "model_params",
    "status",
)


class StateDict(MutableMapping[str, Any]):
    """The nine documented keys, read live; keys of your own; and any fact of Hookline."""

    __slots__ = ("live",)

    def __init__(self, live: State) -> None:
        self.live = live

    def __getitem__(self, key: str) -> Any:
        if key == "current_epoch":
            return self.live.epoch + 1
        try:
            return self.live[key]
        except KeyError:
            raise KeyError(f"the state has no {key!r}.{closest(key, self)} Keys: {', '.join(self)}") from None

    def __setitem__(self, key: str, value: Any) -> None:
        self.live[key] = value

    def __delitem__(self, key: str) -> None:
        del self.live[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*STATE_KEYS, *self.live.extras])

    def __len__(self) -> int:
        return len(STATE_KEYS) + len(self.live.extras)

    def copy(self) -> dict[str, Any]:
        """Return the current values as a dictionary."""
        return dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))


LEDGER = "_ledger"
"""The name of the trainer's own hook, which lists of hooks leave out."""
READS: Mapping[str, FactConverter] = {"state": StateDict, "epoch": lambda epoch: epoch + 1}
"""`trainers` counts epochs from 1."""
DOCUMENTED: Mapping[str, Row] = {
    "on_train_begin": Row("on_train_start", ("state",), READS),
    "on_epoch_begin": Row("on_train_epoch_start", ("epoch", "state"), READS),
    "on_batch_end": Row("on_train_batch_end", ("batch_idx", "loss", "state"), READS),
    "on_epoch_end": Row("on_train_epoch_end", ("epoch", "state"), READS),
    "on_train_end": Row("on_train_end", ("state",), READS),
    "on_evaluate_begin": Row("on_validation_start", ("state",), READS, in_sanity_check=False),
    "on_evaluate_end": Row("on_validation_end", ("state",), READS, in_sanity_check=False),
}
# other events get the same state and the same epoch numbers
HOOK_EVENTS = [event for event in EVENTS if "H" in event.receivers]
OTHERS = {
    name: Row(event.name, (), READS) for event in HOOK_EVENTS for name in (event.name, *event.spellings)
}


class TrainingHook(Hook):
    """A hook with a name. Override what you need; every other event of Hookline may be overridden too."""

    __hookline_base__: ClassVar[bool] = True
    __hookline_rows__: ClassVar[Mapping[str, Row]] = {**OTHERS, **DOCUMENTED}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> Any:
        """Training starts. Called with state."""

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> Any:
        """An epoch starts; the first is 1. Called with epoch, state."""

    def on_batch_end(self, *args: Any, **kwargs: Any) -> Any:
        """After each batch. A parameter called `batch` is the batch itself. Called with batch_idx, loss,
        state.
        """

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """An epoch ends. Called with epoch, state."""

    def on_train_end(self, *args: Any, **kwargs: Any) -> Any:
        """Training is complete, or was stopped. Called with state."""

    def on_evaluate_begin(self, *args: Any, **kwargs: Any) -> Any:
        """An evaluation starts. Called with state."""

    def on_evaluate_end(self, *args: Any, **kwargs: Any) -> Any:
        """An evaluation is complete. Called with state."""


class NamedHooks:
    """Hooks that are added, removed, enabled and disabled by name: those of a trainer, or of a list."""

    _hooks: HookList

    def add_hook(self, hook: Any) -> Handle:
        """Add a hook; it replaces one with the same name."""
        fresh = HookList(Plan(EVENTS), EVENTS).add(
            hook
        )  # reject a wrong hook before removing the one it replaces
        if fresh.name in self._hooks and fresh.name == getattr(fresh.hook, "name", ""):
            self._hooks.remove(fresh.name)
        return self._hooks.add(fresh.hook)

    def remove_hook(self, name: str) -> Any:
        """Remove a hook by name and return it."""
        return self._hooks.remove(name)

    def enable_hook(self, name: str) -> None:
        """Enable a hook."""
        self._hooks.enable(name)

    def disable_hook(self, name: str) -> None:
        """Disable a hook; it keeps its position."""
        self._hooks.disable(name)


class HookManager(NamedHooks):
    """Hooks by name. A trainer's own is `trainer.hooks`; one made by hand serves your own loop, which calls
    `on_...`.

    hooks: those of a trainer; None: an empty list.
    """

    def __init__(self, hooks: HookList | None = None) -> None:
        self._hooks = HookList(Plan(EVENTS), EVENTS) if hooks is None else hooks

    def get_hook(self, name: str) -> Any:
        """Return the hook of this name."""
        return self._hooks[name]

    def list_hooks(self) -> list[str]:
        """Return the names of the enabled hooks."""
        return [name for name in self._hooks.list_hooks() if name != LEDGER]

    def __iter__(self) -> Iterator[Any]:
        return iter([entry.given for entry in self._hooks.entries() if entry.name != LEDGER])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, hook: Any) -> bool:
        return hook in self._hooks

    # ---- for your own loop ---------------------------------------------------------------------------------

    def on_train_begin(self, state: Any) -> None:
        """Call the hooks when training starts."""
        self._call("on_train_begin", state)

    def on_epoch_begin(self, epoch: int, state: Any) -> None:
        """Call the hooks when an epoch starts."""
        self._call("on_epoch_begin", epoch, state)

    def on_batch_end(self, batch_idx: Any, loss: Any, state: Any) -> None:
        """Call the hooks after each batch."""
        self._call("on_batch_end", batch_idx, loss, state)

    def on_epoch_end(self, epoch: int, state: Any) -> None:
        """Call the hooks when an epoch ends."""
        self._call("on_epoch_end", epoch, state)

    def on_train_end(self, state: Any) -> None:
        """Call the hooks when training is complete."""
        self._call("on_train_end", state)

    def on_evaluate_begin(self, state: Any) -> None:
        """Call the hooks when an evaluation starts."""
        self._call("on_evaluate_begin", state)

    def on_evaluate_end(self, state: Any) -> None:
        """Call the hooks when an evaluation is complete."""
        self._call("on_evaluate_end", state)

    def _call(self, method: str, *arguments: Any) -> None:
        for entry in self._hooks.entries():
            if entry.enabled and entry.name != LEDGER:
                if not isinstance(entry.hook, TrainingHook):
                    raise HookError(
                        f"hook {entry.name!r} is not a TrainingHook of this dialect, so your own loop cannot "
                        f"call its {method}. Use trainer.train(), or disable_hook to skip it."
                    )
                getattr(entry.hook, method)(*arguments)


# ---- the documented built-in hooks: Hookline's, under their documented names -------------------------------


class ConsoleLogHook(ConsoleLog):
    """Progress on the console."""

    name = "console_log"

    def __init__(self, log_every_n_batches: int = 10) -> None:
        super().__init__(log_every_n_batches=log_every_n_batches)


class JSONLogHook(JSONLog):
    """Structured records in `logs/`, below the trainer's `output_dir`."""

    name = "json_log"

    def __init__(self, log_every_n_batches: int = 100) -> None:
        super().__init__(log_every_n_batches=log_every_n_batches)


class CheckpointHook(ModelCheckpoint):
    """Whole checkpoints in `checkpoints/`, below the trainer's `output_dir`; all are kept.

    save_every_n_epochs: epochs between two checkpoints.
    """

    name = "checkpoint"

    def __init__(self, save_every_n_epochs: int = 1) -> None:
        super().__init__(every_n_epochs=save_every_n_epochs, save_top_k=-1)
