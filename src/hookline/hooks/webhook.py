"""Post messages about a run to Slack, or to a service with the same JSON. The address is a secret."""

from __future__ import annotations

import difflib
import json
import socket
import string
from collections.abc import Iterable, Mapping
from typing import Any

from hookline.engine.checks import as_tuple, refused
from hookline.engine.hook import Hook
from hookline.hooks._monitor import Mode, Monitored
from hookline.hooks._outbox import Outbox, Secret
from hookline.util.errors import OptionError, closest
from hookline.util.text import error_text, redact
from hookline.util.urls import shown

TEMPLATES = {
    "training_start": "{module} on {host}: training started",
    "epoch_end": "{module} on {host}: epoch {epoch} is over, step {step}. {metrics}",
    "validation_end": "{module} on {host}: validated in epoch {epoch}, step {step}. {metrics}",
    "best_model": "{module} on {host}: new best {monitor} {best:.4f} in epoch {epoch}, step {step}",
    "checkpoint": "{module} on {host}: saved {path} ({reason}) at step {step}",
    "training_end": "{module} on {host}: training {status} in epoch {epoch}, step {step}. {reason} {metrics}",
    "exception": "{module} on {host}: {stage} ended in epoch {epoch}, step {step} by {exception}",
}
"""Events and their messages."""
SAMPLE = {
    "event": "",
    "module": "",
    "host": "",
    "stage": "",
    "status": "",
    "reason": "",
    "monitor": "",
    "path": "",
    "exception": "",
    "metrics": "",
    "epoch": 0,
    "step": 0,
    "best": 0.0,
}
"""The fields of a template, by example. Names of metrics are fields too: `{val/loss:.3f}`."""


class Webhook(Hook):
    """Posts `{"text": ...}` when training ends or fails and when a metric is the best so far; see `TEMPLATES`
    for more.

    A thread sends the messages. It drops messages when its queue is full, does not follow redirects, and does
    not retry. Logs, errors, dumps and checkpoints do not show the address.
    """

    tier = "builtin"
    observes = True
    ranks = "zero"
    on_error = "warn"

    def __init__(
        self,
        url: str,
        notify_on: Iterable[str] = ("training_end", "best_model", "exception"),
        template: str | Mapping[str, str] | None = None,
        monitor: str = "val/loss",
        mode: Mode = "auto",
        timeout: float = 10.0,
        queue_size: int = 32,
    ) -> None:
        """`url`: the address, or `env:NAME` to take it from an environment variable.

        `notify_on`: the events that send a message: 'training_start', 'epoch_end', 'validation_end',
        'best_model', 'checkpoint', 'training_end', 'exception'. `template`: the message of every event, or a
        mapping from events to messages. `monitor`: the metric of `best_model`. `mode`: 'min' or 'max', which
        is better; 'auto': by the metric's name. `timeout`: seconds for a request, and for queued messages at
        the end of a run. `queue_size`: messages that may wait to be sent.
        """
        address = Secret(url)
        url = ""  # an error below may be shown with the variables of this function
        self._outbox = Outbox("Webhook", address, timeout, queue_size)
        self.notify_on = _check_events(notify_on)
        self.templates = {**TEMPLATES, **_templates(template)}
        self.watch = Monitored("Webhook", monitor, mode, strict=False)
        self.best: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**self.watch.saved_with(), "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = None if self.watch.difference(state) else state["best"]

    def setup(self, stage: str, rank: int) -> None:
        self.watch.begin(stage, rank)
        if stage == "fit":
            self.best = None  # a resumed run gets it from load_state_dict next

    def on_train_start(self, state: Any) -> None:
        self._notify("training_start", state)

    def on_train_epoch_end(self, state: Any) -> None:
        self._notify("epoch_end", state)

    def on_validation_end(self, state: Any, sanity_checking: bool) -> None:
        if sanity_checking:
            return
        self._notify("validation_end", state)
        if "best_model" in self.notify_on and state.stage == "fit":
            self._notify_if_best(state)

    def on_checkpoint_save(self, state: Any, path: Any, reason: str) -> None:
        self._notify("checkpoint", state, path=shown(path), reason=reason)

    def on_train_end(self, state: Any) -> None:
        self._notify("training_end", state, reason=state.stop_reason)

    def on_exception(self, state: Any, exception: BaseException) -> None:
        self._notify("exception", state, exception=redact(": ".join(error_text(exception)))[:500])

    def teardown(self) -> None:
        self._outbox.close()

    def _notify_if_best(self, state: Any) -> None:
        value = self.watch.find(state.metrics)
        if value is not None and self.watch.is_better(value, self.best):
            self.best = value
            self._notify("best_model", state)

    def _notify(self, event: str, state: Any, **more: str) -> None:
        if event not in self.notify_on:
            return
        metrics = state.metrics.read()
        fields: dict[str, Any] = {
            **metrics,
            "event": event,
            "module": type(state.module).__name__,
            "host": socket.gethostname(),
            "stage": state.stage,
            "status": state.status,
            "epoch": state.epoch,
            "step": state.step,
            "monitor": self.watch.monitor,
            "reason": "",
            "path": "",
            "exception": "",
            "metrics": ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()),
            **more,
        }
        if self.best is not None:
            fields["best"] = self.best
        text = self.templates[event].format_map(_Fields(fields))
        self._outbox.put("POST", json.dumps({"text": text.strip()}).encode())


# ---- events and templates of the user ----------------------------------------------------------------------


class _UnknownField:
    """A field without a value, shown as '?' in any format."""

    def __format__(self, spec: str) -> str:
        return "?"


class _Fields(dict[str, Any]):
    def __missing__(self, key: str) -> _UnknownField:
        return _UnknownField()


def _check_events(given: Iterable[str]) -> tuple[str, ...]:
    events = as_tuple("Webhook: notify_on", given, "events")
    for event in events:
        if event not in tuple(TEMPLATES):
            raise OptionError(
                f"Webhook: there is no event {event!r} to notify on.{closest(str(event), TEMPLATES)} "
                f"There are: {', '.join(TEMPLATES)}.",
                option="notify_on",
                value=event,
                allowed=tuple(TEMPLATES),
            )
    return events


def _templates(given: str | Mapping[str, str] | None) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, str | Mapping):
        raise refused("Webhook: template", given, "text, or a mapping from events to texts")
    found = dict.fromkeys(TEMPLATES, given) if isinstance(given, str) else dict(given)
    _check_events(list(found))
    for template in found.values():
        if not isinstance(template, str):
            raise refused("Webhook: template", template, "text")
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
            if any(set(name) & set(".[") or not name for name in names):
                raise ValueError("a field is a plain name, without dots and brackets.")
            plain = [name for name in names if name not in SAMPLE and "/" not in name]
            wrong = [name for name in plain if difflib.get_close_matches(name, SAMPLE, cutoff=0.75)]
            if wrong:  # anything else may be a metric's name
                raise ValueError(f"unknown field {wrong[0]!r}.{closest(wrong[0], SAMPLE)}")
            template.format_map(_Fields(SAMPLE))
        except ValueError as error:
            raise OptionError(
                f"Webhook: template={template!r}: {error} Fields: {', '.join(SAMPLE)}, and metrics by name, "
                "such as {val/loss:.3f}.",
                option="template",
                value=template,
            ) from None
    return found
