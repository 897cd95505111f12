"""The events that each host can emit, as tables, and a hook list that rejects hooks which need more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hookline.engine.events import EVENTS, Event
from hookline.engine.hook import Hook
from hookline.engine.hook_list import Entry, HookList
from hookline.engine.listener import Listener
from hookline.engine.source_text import attributes_read
from hookline.util.errors import HookError, closest

TRAINERS = ("trainer", "state.trainer")
"""Expressions by which hooks refer to the trainer."""
ABSENT_BRANCHES = ("sanity", "test", "predict")
"""The branches of the lifecycle that a host need not have: a hook may listen to their events."""
ABSENT_EVENTS = ("on_validation_abandoned", "on_load_checkpoint", "on_checkpoint_load")
"""Further events that need not happen in a host."""
UNKNOWN = "only hookline.Trainer emits it"


@dataclass(frozen=True, slots=True)
class Host:
    """A training loop that is not Hookline's own.

    Each event is offered, or never happens here (a hook may listen to it), or is lacking: then a hook that
    listens to it is rejected when it is added. An event that no table names is lacking, such as a new one.
    """

    name: str
    """Its name in messages: `Lightning's Trainer`."""
    offers: Mapping[str, str]
    """Event -> what emits it: a method of the host's own callbacks, or a call of `Line`."""
    lacks: Mapping[str, str]
    """Event -> why this host cannot emit it, where there is more to say than `UNKNOWN`."""
    useless: Mapping[str, str] = field(default_factory=dict)
    """Built-in hook -> why it has no effect here, although all of its events are offered."""

    def why_lacking(self, event: Event) -> str:
        """Return why a hook cannot listen to this event here; an empty string if it can."""
        if event.inside == "own":  # the loop, or a hook, emits it
            return ""
        is_absent = event.inside.split()[0] in ABSENT_BRANCHES or event.name in ABSENT_EVENTS
        return "" if event.name in self.offers or is_absent else self.lacks.get(event.name, UNKNOWN)


class HostedHooks(HookList):
    """The hooks of a host. A hook that needs an event or attribute that the host lacks is rejected when it is
    added.
    """

    def __init__(self, plan: Any, host: Host, rank: int, offered: frozenset[str]) -> None:
        """offered: the attributes of the object that hooks see as `trainer`."""
        self.host = host
        self._offered = offered
        super().__init__(plan, EVENTS, rank)

    def move_to(self, rank: int) -> None:
        """Change the rank of this process if the launcher's was different, and with it the hooks that run
        here.
        """
        if rank == self._rank:
            return
        self._rank = rank
        for entry in self.entries():
            self._plan.remove(entry.listeners)
            if entry.enabled:
                self._plan.add(self._here(entry))

    def _listeners(self, entry: Entry) -> list[Listener]:
        listeners = super()._listeners(entry)
        who = f"hook {entry.name!r} ({type(entry.given).__name__})"
        for cls in type(entry.given).__mro__:
            if cls.__name__ in self.host.useless and cls.__module__.startswith("hookline.hooks."):
                raise HookError(
                    f"{who} has no effect in {self.host.name}: {self.host.useless[cls.__name__]}."
                )
        for listener in listeners:
            if reason := self.host.why_lacking(listener.event):
                raise HookError(
                    f"{who} listens to {listener.event.name}, which {self.host.name} cannot emit: {reason}."
                )
        for attribute, where in (
            attributes_read(TRAINERS, entry.hook, lambda cls: "__hookline_base__" in vars(cls))
            if isinstance(entry.hook, Hook)
            else ()
        ):
            if attribute not in self._offered:
                raise HookError(
                    f"{who} needs trainer.{attribute} in {where}, which {self.host.name} does not offer to "
                    f"hooks.{closest(attribute, self._offered)}"
                )
        return listeners


# ---- The events of each host


_FETCHES = ("on_before_batch_fetch", "on_after_batch_fetch")
_TRANSFERS = ("on_before_batch_transfer", "on_after_batch_transfer")
_MOVED = "the batch is moved to the device by the host itself, and hooks cannot change it"
_IN_HOST = {
    **dict.fromkeys(_FETCHES, "the host fetches its batches itself and does not report it"),
    **dict.fromkeys(_TRANSFERS, _MOVED),
}
_SIGNALS = "it acts when hookline.Trainer has ended a run on a signal and saved it; here signals are {}"
_BY_THE_LINE = {
    "on_train_metrics": "a row of the values that hooks logged is about to be written",
    "on_save_checkpoint": "line.save_checkpoint, also requested by a hook",
    "on_checkpoint_save": "the checkpoint is durable",
    "on_checkpoint_failed": "the checkpoint could not be written",
}

RAW_LOOP = Host(
    "a loop with hookline.Line",
    offers={
        "setup": "with line",
        "on_fit_start": "with line",
        "on_load_checkpoint": "line.load_checkpoint",
        "on_checkpoint_load": "line.load_checkpoint",
        "on_train_start": "with line",
        "on_train_epoch_start": "line.epoch",
        "on_train_batch_start": "line.epoch",
        "on_before_zero_grad": "optimizer.zero_grad",
        "on_before_backward": "line.backward",
        "on_after_backward": "line.backward",
        "on_before_optimizer_step": "optimizer.step, or before it line.clip_gradients",
        "on_gradient_clip": "line.clip_gradients",
        "on_after_optimizer_step": "optimizer.step",
        "on_step_skipped": "optimizer.step, skipped by a hook",
        "on_train_batch_end": "line.epoch",
        "on_step_end": "line.epoch",
        "on_validation_start": "line.validation",
        "on_validation_epoch_start": "line.validation",
        "on_validation_batch_start": "line.validation",
        "on_validation_batch_end": "line.validation",
        "on_validation_epoch_end": "line.validation",
        "on_validation_end": "line.validation",
        "on_train_epoch_end": "the next line.epoch, line.epochs, or the end",
        "on_train_end": "with line",
        "on_exception": "with line",
        "on_fit_end": "with line",
        "teardown": "with line",
        **_BY_THE_LINE,
    },
    lacks={
        **dict.fromkeys(_FETCHES, "the loop fetches its batches itself; put the code there"),
        **dict.fromkeys(
            _TRANSFERS, "the loop moves its batches itself; change the batch where the loop makes it"
        ),
    },
    useless={"SlurmRequeue": _SIGNALS.format("handled by the loop")},
)

ACCELERATE_HOST = Host(
    "a loop on Accelerate",
    offers={
        **RAW_LOOP.offers,
        "on_before_backward": "line.backward, through accelerator.backward",
        "on_after_backward": "line.backward, through accelerator.backward",
        "on_gradient_clip": "line.clip_gradients, through accelerator.clip_grad_norm_",
    },
    lacks={**RAW_LOOP.lacks, **dict.fromkeys(_TRANSFERS, _MOVED)},
    useless=RAW_LOOP.useless,
)

LIGHTNING_HOST = Host(
    "Lightning's Trainer",
    offers={
        **{
            name: name
            for name in (
                "setup",
                "teardown",
                "on_fit_end",
                "on_sanity_check_start",
                "on_sanity_check_end",
                "on_train_start",
                "on_train_end",
                "on_train_epoch_start",
                "on_train_epoch_end",
                "on_train_batch_start",
                "on_train_batch_end",
                "on_before_zero_grad",
                "on_before_backward",
                "on_after_backward",
                "on_before_optimizer_step",
                "on_exception",
                "on_validation_start",
                "on_validation_epoch_start",
                "on_validation_batch_start",
                "on_validation_batch_end",
                "on_validation_epoch_end",
                "on_validation_end",
                "on_test_start",
                "on_test_epoch_start",
                "on_test_batch_start",
                "on_test_batch_end",
                "on_test_epoch_end",
                "on_test_end",
                "on_predict_start",
                "on_predict_epoch_start",
                "on_predict_batch_start",
                "on_predict_batch_end",
                "on_predict_epoch_end",
                "on_predict_end",
            )
        },
        "on_fit_start": "on_sanity_check_start or on_train_start, whichever is first: the optimizers "
        "exist by then",
        "on_after_optimizer_step": "the optimizer's own step hook",
        "on_step_skipped": "on_train_batch_end, if no update was made",
        "on_step_end": "on_train_batch_end, if an update was made",
        **_BY_THE_LINE,
    },
    lacks={
        **_IN_HOST,
        "on_gradient_clip": "Lightning clips without a callback; on_before_optimizer_step has the gradients "
        "before it",
    },
    useless={"SlurmRequeue": _SIGNALS.format("Lightning's, which requeues by itself (SLURMEnvironment)")},
)

TRANSFORMERS_HOST = Host(
    "transformers' Trainer",
    offers={
        "setup": "on_train_begin",
        "on_fit_start": "on_train_begin",
        "on_train_start": "on_train_begin",
        "on_train_epoch_start": "on_epoch_begin",
        "on_train_batch_start": "the model is called, in training mode",
        "on_before_backward": "the model has returned its loss",
        "on_after_backward": "on_substep_end; of a window's last batch, the end of its backward",
        "on_before_optimizer_step": "the end of a window's last backward; with a scaler "
        "on_pre_optimizer_step",
        "on_after_optimizer_step": "on_optimizer_step",
        "on_step_skipped": "on_optimizer_step, skipped by a hook",
        "on_before_zero_grad": "on_optimizer_step",
        "on_train_batch_end": "on_substep_end, on_step_end",
        "on_step_end": "on_step_end",
        "on_validation_start": "the model is called, in eval mode",
        "on_validation_epoch_start": "the model is called, in eval mode",
        "on_validation_batch_start": "the model is called, in eval mode",
        "on_validation_batch_end": "on_prediction_step",
        "on_validation_epoch_end": "on_evaluate",
        "on_validation_end": "on_evaluate",
        "on_train_epoch_end": "on_epoch_end, after an evaluation that is due",
        "on_train_end": "on_train_end",
        "on_fit_end": "on_train_end",
        "on_exception": "with callback: trainer.train()",
        "teardown": "on_train_end, or with callback: trainer.train()",
        **_BY_THE_LINE,
        "on_train_metrics": "on_log",
        "on_checkpoint_save": "on_save, and checkpoints that hooks request",
    },
    lacks={**_IN_HOST, "on_gradient_clip": "transformers clips without a callback"},
    useless={
        "SlurmRequeue": _SIGNALS.format("not handled"),
        "LRSchedule": "a scheduler of transformers' own always writes the learning rate; choose it by "
        "lr_scheduler_type=",
    },
)

HOSTS = {
    "raw loop": RAW_LOOP,
    "accelerate": ACCELERATE_HOST,
    "lightning": LIGHTNING_HOST,
    "transformers": TRANSFORMERS_HOST,
}
"""By the name of the function of `hookline.hosts` that makes each."""
