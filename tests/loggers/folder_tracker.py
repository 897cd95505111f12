"""A tracker that keeps its artifacts as folders: the smallest one that is real."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiny import Net

from hookline import Hook
from hookline.hooks import ModelCheckpoint
from hookline.loggers.artifacts import ArtifactLogger


class FolderTracker(ArtifactLogger):
    """Copies each artifact to `folder/NUMBER-NAME`, with its facts beside it, once `gate` is open."""

    package = "json"
    extra = "none"

    def __init__(self, folder: str = "tracked", **options: Any) -> None:
        super().__init__(**options)
        self.folder, self.gate = Path(folder).absolute(), threading.Event()
        self.gate.set()
        self.began = threading.Event()

    def _connect(self, run_dir: Path) -> Any:
        self.folder.mkdir(exist_ok=True)
        return self.folder

    def _disconnect(self) -> None:
        (self.folder / "closed").touch()

    def _write(self, metrics: Mapping[str, float], step: int) -> None: ...

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None: ...

    def _upload(self, path: Path, name: str, kind: str, metadata: dict[str, Any], aliases: list[str]) -> bool:
        if kind == "checkpoint":
            self.began.set()
            assert self.gate.wait(300)
        target = self.client / f"{len(list(self.client.glob('*.facts')))}-{name}"
        (shutil.copytree if path.is_dir() else shutil.copy)(path, target)
        facts = {"name": name, "kind": kind, "metadata": metadata, "aliases": aliases, "file": path.name}
        target.with_name(f"{target.name}.facts").write_text(json.dumps(facts))
        return True


def tracked(kind: str, folder: str = "tracked") -> list[tuple[Path, dict[str, Any]]]:
    """The artifacts of a kind in the order in which they came, each with its facts."""
    found = sorted(Path(folder).glob("*.facts"), key=lambda path: int(path.name.partition("-")[0]))
    every = [(path.with_suffix(""), json.loads(path.read_text())) for path in found]
    return [(path, facts) for path, facts in every if facts["kind"] == kind]


class Scored(Net):
    """Logs the next of these scores at the end of each epoch."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores = scores

    def on_train_epoch_end(self) -> None:
        self.log("score", self.scores[self.current_epoch])


class Opens(Hook):
    """Opens a gate at the end of training."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.gate = gate

    def on_train_end(self) -> None:
        self.gate.set()


def keeps(**options: Any) -> ModelCheckpoint:
    """A checkpoint each epoch, of which the best is kept."""
    given = {"monitor": "score", "filename": "e{epoch}", "auto_insert_metric_name": False, **options}
    return ModelCheckpoint(**given)
