"""The base of trackers with artifacts: files that they hold, and checkpoints that they have received."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.engine.checks import Several
from hookline.loggers.base import ClientLogger, file_name
from hookline.loggers.jsonl import jsonable
from hookline.loggers.run_artifacts import ARTIFACTS, CONFIG, FIGURES, safe_name
from hookline.util.limited_json import RECORD_BYTES, parse_json, read_within
from hookline.util.snapshot import remove_if_empty, take_snapshot

DEFAULT_ARTIFACTS = (CONFIG, FIGURES)
OF_THE_RUN = ("config", "figures", "checkpoint")
"""Kinds of artifacts that Hookline logs by itself, one of each in a run."""
RECORDS = ".artifacts"
"""The folder in a run's directory that records which checkpoints a tracker has received."""
MOST_RECORDED = 100
MOST_FIGURES = 200


# ---- the base of trackers ----------------------------------------------------------------------------------


class ArtifactLogger(ClientLogger):
    """Base of trackers with artifacts: a configuration, figures and checkpoints."""

    collects_figures = True
    """Whether figures are logged as an artifact at the end; False: each figure is a file in the tracker."""

    def __init__(self, artifacts: Sequence[str] = DEFAULT_ARTIFACTS, queued: bool = True) -> None:
        super().__init__(queued)
        self.artifacts = check_artifacts(artifacts)
        self._run_id = ""
        """The id of Hookline's run, which its resumes keep."""
        self._figures: dict[str, tuple[bytes, int]] = {}
        self._later: list[str] = []
        """The ids of checkpoints that the client sends until it is closed."""
        self._held: list[Path] = []

    def open(self, run_dir: Callable[[], Path]) -> None:
        super().open(run_dir)
        self._run_id, self._figures, self._later, self._held = "", {}, [], []

    def _upload(self, path: Path, name: str, kind: str, metadata: dict[str, Any], aliases: list[str]) -> bool:
        """Log a file or a directory; return whether the client has all of it when this returns."""
        raise NotImplementedError

    def log_artifact(
        self,
        path: Path | str,
        name: str,
        kind: str = "file",
        metadata: Mapping[str, Any] | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        facts: dict[str, Any] = jsonable(metadata or {})
        self._run_id = facts.get("run", self._run_id)
        is_sent = self._upload(Path(path), name, kind, facts, list(aliases))
        if kind == "checkpoint" and "checkpoint" in facts:
            if is_sent:
                _record(self._folder(), self.label, [facts["checkpoint"]])
            else:
                self._later.append(facts["checkpoint"])

    def add_drawn_figure(self, tag: str, png: bytes, global_step: int | None = None) -> None:
        super().add_drawn_figure(tag, png, global_step)
        if self.collects_figures and FIGURES in self.artifacts:
            self._figures.pop(tag, None)
            self._figures[tag] = png, self._step(global_step)
            if len(self._figures) > MOST_FIGURES:
                del self._figures[next(iter(self._figures))]

    def close(self) -> None:
        """Log the newest figure of each name, then wait until the client has sent everything."""
        run_dir = self._folder() if self._client is not None else None
        try:
            if run_dir is not None and self._figures:
                self._log_figures(run_dir)
        finally:
            try:
                super().close()
            finally:
                self._release()
        if run_dir is not None:
            _record(run_dir, self.label, self._later)

    def _log_figures(self, run_dir: Path) -> None:
        with tempfile.TemporaryDirectory(dir=run_dir, prefix=".figures-") as folder:
            for tag, (png, step) in self._figures.items():
                (Path(folder) / file_name(tag, step, "png")).write_bytes(png)
            self.log_artifact(folder, "figures", "figures", {}, ("latest",))

    # ---- files that a client reads until it is closed ------------------------------------------------------

    def _folder(self) -> Path:
        """Return the run's directory."""
        assert self._run_dir is not None
        return self._run_dir().resolve()

    def _hold(self, path: Path, folder: Path) -> Path:
        """Return links to, or copies of, a file or directory in `folder`, until the run ends."""
        folder.mkdir(parents=True, exist_ok=True)
        target = Path(tempfile.mkdtemp(dir=folder, prefix=f"{path.name}-")) / path.name
        take_snapshot(path, target)
        self._held.append(target.parent)
        return target

    def _release(self) -> None:
        """Remove what was held."""
        for each in self._held:
            shutil.rmtree(each, ignore_errors=True)
            remove_if_empty(each.parent)
        self._held = []

    def has_logged(self, checkpoint: str, run_dir: Path) -> bool:
        return checkpoint in _recorded(run_dir, self.label)

    def _collection(self, name: str, kind: str, run_id: str) -> str:
        """Return the name of an artifact in a project of many runs: those of the run have its id.

        run_id: the tracker's own id of the run, if Hookline's is not known.
        """
        return safe_name(f"{name}-{self._run_id or run_id}" if kind in OF_THE_RUN else name)


# ---- checkpoints that a tracker has ------------------------------------------------------------------------


def _recorded(run_dir: Path, label: str) -> list[str]:
    """Return the ids of the checkpoints that a tracker has received from this run's directory."""
    try:
        found = parse_json(read_within(run_dir / RECORDS / f"{label}.json", RECORD_BYTES))
    except (OSError, ValueError):
        return []
    known = found.get("checkpoints") if isinstance(found, dict) else None
    return [each for each in known if isinstance(each, str)] if isinstance(known, list) else []


def _record(run_dir: Path, label: str, checkpoints: list[str]) -> None:
    """Write down which checkpoints a tracker has, so that a resume does not log them again."""
    if not checkpoints:
        return
    file, known = run_dir / RECORDS / f"{label}.json", [*_recorded(run_dir, label), *checkpoints]
    file.parent.mkdir(exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}-{threading.get_ident()}")
    temporary.write_text(json.dumps({"checkpoints": known[-MOST_RECORDED:]}, indent=1), encoding="ascii")
    temporary.replace(file)


# ---- options and names -------------------------------------------------------------------------------------


def check_artifacts(artifacts: Any, name: str = "artifacts") -> tuple[str, ...]:
    """Return the chosen artifacts as a tuple, or raise."""
    return () if artifacts is None or artifacts is False else Several(ARTIFACTS)(name, artifacts)
