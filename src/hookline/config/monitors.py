"""A metric that nobody logs would be waited for in vain: names are compared with what the sanity check
measured.
"""

from __future__ import annotations

import difflib
from typing import Any

from hookline.config.files import Source
from hookline.hook import Hook


class CheckMonitors(Hook):
    """Refuses a misspelt `monitor` of a hook or a schedule before the first step, if validation has shown the
    right one.
    """

    name = "check_monitors"
    tier = "builtin"

    def __init__(self, source: Source, monitors: dict[str, str]) -> None:
        self.source = source
        self.monitors = monitors
        """Key in the configuration -> metric."""

    def on_validation_end(self, metrics: Any, sanity_checking: bool) -> None:
        """Before any training; later validations are the hooks' own business."""
        if not sanity_checking:
            return
        known = sorted(metrics)
        for key, monitor in self.monitors.items():
            near = difflib.get_close_matches(monitor, known, n=1, cutoff=0.75)
            # a metric of training, or one that only comes later, is judged by the hook itself when it looks
            # for it
            if monitor not in known and near and monitor.startswith("val"):
                raise self.source.wrong(
                    key,
                    f"no metric of this name is logged. Did you mean {near[0]!r}? "
                    f"Validation logs: {', '.join(known)}.",
                    monitor,
                )
