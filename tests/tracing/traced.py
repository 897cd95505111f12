"""Small traced runs, and what their files hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny import Net, batches, quiet

from hookline import Hook


class Watch(Hook):
    def on_train_batch_end(self, loss: float) -> None: ...

    def on_step_end(self) -> None: ...


class Listening(Net):
    def on_train_batch_end(self) -> None: ...


def trace_run(path: str = "trace.json", *hooks: Any, **options: Any) -> list[dict[str, Any]]:
    """Three batches, a validation of two, twice over; the records."""
    trainer = quiet(**{"hooks": [Watch(), *hooks], "trace": path, "max_epochs": 2, **options})
    trainer.fit(Listening(), batches(3), batches(2))
    return load(path)


def load(path: str | Path) -> list[dict[str, Any]]:
    """As any program reads it: one JSON document."""
    found: list[dict[str, Any]] = json.loads(Path(path).read_text())
    return found


def named(records: list[dict[str, Any]], name: str, cat: str = "event") -> list[dict[str, Any]]:
    return [each for each in records if each["name"] == name and each.get("cat") == cat]
