"""`trainer.auditing`: audits all hooks of a run, or only the hooks that were attached to it from outside."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hookline.engine.changes import ChangeTable, change_text
from hookline.engine.hook_list import Entry, HookList
from hookline.engine.listener import Listener
from hookline.engine.plan import Plan
from hookline.run.commands import handles_command

if TYPE_CHECKING:
    from hookline.audit.auditor import Auditor

log = logging.getLogger("hookline")


class Auditing:
    """Switches the audit of a trainer's runs on and off."""

    def __init__(self, plan: Plan, hooks: HookList, wanted: bool) -> None:
        self._plan = plan
        self._hooks = hooks
        self._wanted = wanted
        self._run: Any = None
        self._auditor: Auditor | None = None
        self._probes: set[str] = set()
        """The names of attached hooks that may only observe."""

    def __repr__(self) -> str:
        return f"<audit: {'on' if self._auditor is not None else 'off'}>"

    def during(self, run: Any) -> Auditing:
        """Return itself for a `with` around one run."""
        self._run = run
        return self

    def __enter__(self) -> None:
        self._hooks.recorded_changes = ChangeTable(self._run.state.rank) if self._wanted else None
        if self._wanted:
            self._attach()

    def __exit__(self, *error: object) -> None:
        if self._auditor is not None:
            self._plan.detach(self._auditor)
        self._auditor = self._run = None
        self._probes.clear()

    def watch(self, entry: Entry) -> None:
        """Audit a hook that was attached to the run, unless it declares `observes = False`. If it changes
        anything, it is detached.
        """
        may_change = entry.hook.observes is False
        # it may replace a probe of the same name
        (self._probes.discard if may_change else self._probes.add)(entry.name)
        if self._auditor is not None:
            self._plan.compose_again(entry.listeners)
        elif not may_change:
            self._attach()

    def _attach(self) -> None:
        from hookline.audit.auditor import Auditor

        table = self._hooks.recorded_changes
        self._auditor = Auditor(
            ChangeTable() if table is None else table,
            audits=self._is_audited,
            follows_events=self._wanted,
            on_broken=self._detach_probe,
        )
        self._plan.attach(self._auditor)

    def _is_audited(self, listener: Listener) -> bool:
        if getattr(listener.owner, "is_internal", False):
            return False  # a part of a dialect, which a user cannot change
        return self._wanted or listener.name in self._probes

    def _detach_probe(self, listener: Listener, changes: list[tuple[str, str]]) -> bool:
        """Detach an attached hook that has changed something; return False for any other hook."""
        if listener.name not in self._probes:
            return False
        self._probes.discard(listener.name)
        s, what = self._run.state, change_text(changes)
        log.warning(
            "%s was attached to observe and is detached, because it has changed in %s: %s. To let it change "
            "the run, declare `observes = False` in its class.",
            listener.label,
            listener.event.name,
            what,
        )
        s.logger.log_event(
            "control",
            {
                "command": "detach",
                "step": s.step,
                "epoch": s.epoch,
                "hook": listener.name,
                "reason": f"it has changed in {listener.event.name}: {what}",
            },
        )
        self._hooks.disable(listener.name)  # at once here; on all ranks at the next boundary
        self._run.participants.commands.send("detach", hook=listener.name)
        return True


@handles_command("detach")
def _detach(run: Any, sender: int, hook: str) -> None:
    if hook in run.state.hooks:
        run.state.hooks.remove(hook)
