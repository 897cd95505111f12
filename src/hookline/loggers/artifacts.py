"""Artifacts: which files of a run go to which tracker, and the base of the trackers that take them."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hookline.engine.checks import Several
from hookline.loggers.base import ClientLogger, Logger, file_name
from hookline.loggers.jsonl import jsonable
from hookline.util.limited_json import MANIFEST_BYTES, MANIFEST_LEVELS, RECORD_BYTES, parse_json, read_within
from hookline.util.snapshot import remove_if_empty, take_snapshot
from hookline.util.urls import MANIFEST, is_url

log = logging.getLogger("hookline")

CONFIG, FIGURES, CHECKPOINTS = "config", "figures", "checkpoints"
BEST_CHECKPOINT, LAST_CHECKPOINT = "best_checkpoint", "last_checkpoint"
ARTIFACTS = (CONFIG, FIGURES, BEST_CHECKPOINT, LAST_CHECKPOINT, CHECKPOINTS)
DEFAULT_ARTIFACTS = (CONFIG, FIGURES)
OF_THE_RUN = ("config", "figures", "checkpoint")
"""Kinds of artifacts that Hookline logs by itself, one of each in a run."""
RECORDS = ".artifacts"
"""The folder in a run's directory that records which checkpoints a tracker has received."""
MOST_RECORDED = 100
MOST_FIGURES = 200


# ---- what a run logs ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class CheckpointArtifact:
    """A durable checkpoint, with the facts of its manifest that a tracker shows."""

    path: Path
    id: str
    metadata: dict[str, Any]
    aliases: list[str] = field(default_factory=lambda: ["latest"])


class RunArtifacts:
    """Chooses which artifacts of a run each logger gets.

    The best checkpoint is the one with the best score so far of the metric that it was kept for.
    """

    def __init__(self, takers: list[Logger], call: Callable[..., Any], run_dir: Callable[[], Path]) -> None:
        self._takers, self._call, self._run_dir = takers, call, run_dir
        self._takes_checkpoints = [
            each for each in takers if {BEST_CHECKPOINT, LAST_CHECKPOINT, CHECKPOINTS} & set(each.artifacts)
        ]
        self.status = ""
        """How the run has ended."""
        self._best: dict[str, dict[str, Any]] = {}
        """The best checkpoint by each monitored metric: score, mode, path in the run's directory, and id."""
        self._newest: CheckpointArtifact | None = None
        self._sent: set[tuple[int, str]] = set()
        self._has_warned = False

    def log_config(self, path: Path, run: str) -> None:
        """Log the record of the run."""
        for logger in self._takers:
            if CONFIG in logger.artifacts and path.is_file():
                self._call(logger, "log_artifact", path, "config", "config", {"run": run}, ("latest",))

    def log_checkpoint(self, path: Path | str, reason: str, step: int) -> None:
        """Log a durable checkpoint to those that take it now; the last one is logged at the end."""
        if not self._takes_checkpoints:
            return
        if is_url(path):
            if not self._has_warned:
                log.warning("A checkpoint that is saved to a URL is not logged as an artifact.")
            self._has_warned = True
            return
        newest = self._newest = self._describe(Path(path), reason, step)
        is_best = self._note_score(newest)
        for logger in self._takes_checkpoints:
            if CHECKPOINTS in logger.artifacts or (is_best and BEST_CHECKPOINT in logger.artifacts):
                self._send(logger, newest)

    def resume(self, position: Any, path: Path | str) -> None:
        """Continue from a checkpoint. Log it, and the best one, if a kill has prevented that."""
        if not self._takes_checkpoints:
            return
        self._best = _valid_scores(position)
        run_dir = self._run_dir()
        if is_url(path) or not Path(path).resolve().is_relative_to(run_dir.resolve()):
            return
        resumed = self._newest = self._describe(Path(path), "", 0)
        self._note_score(resumed)
        best = [self._describe(run_dir / each["path"], "", 0) for each in self._best.values()]
        known = {each["id"] for each in self._best.values()}
        for logger in self._takes_checkpoints:
            wanted = [resumed] if CHECKPOINTS in logger.artifacts else []
            if BEST_CHECKPOINT in logger.artifacts:
                wanted += [each for each in best if each.id in known]  # unless it was removed or replaced
            for each in (*wanted, resumed):
                if self._call(logger, "has_logged", each.id, run_dir):
                    self._sent.add((id(logger), each.id))
            for each in wanted:
                each.aliases += self._best_alias(each)
                self._send(logger, each)

    def finish(self) -> None:
        """Log the last checkpoint, unless the run was preempted and will resume."""
        newest = self._newest
        if newest is None or self.status == "preempted":
            return
        newest.aliases = [*newest.aliases, "last"]
        for logger in self._takes_checkpoints:
            if LAST_CHECKPOINT in logger.artifacts and newest.path.exists():
                self._send(logger, newest)

    def position(self) -> dict[str, Any] | None:
        """Return the best scores for a checkpoint, or None."""
        return {"best": self._best} if self._best else None

    def _send(self, logger: Logger, artifact: CheckpointArtifact) -> None:
        if (id(logger), artifact.id) not in self._sent:
            self._sent.add((id(logger), artifact.id))
            given = (artifact.path, "checkpoint", "checkpoint", artifact.metadata, tuple(artifact.aliases))
            self._call(logger, "log_artifact", *given)

    def _describe(self, path: Path, reason: str, step: int) -> CheckpointArtifact:
        manifest = _read_manifest(path)
        try:
            place = path.resolve().relative_to(self._run_dir().resolve()).as_posix()
        except ValueError:
            place = path.name
        facts = {"step": step, "reason": reason} | {
            name: manifest[name]
            for name in ("run", "step", "epoch", "reason", "saved_at", "metrics")
            if name in manifest
        }
        if monitor := manifest.get("monitor"):
            facts |= {"monitor": monitor["name"], "mode": monitor["mode"], "score": monitor["score"]}
        known_as = manifest.get("sha256") or f"{place} of step {step}"
        metadata = {**facts, "path": place, "checkpoint": known_as}
        return CheckpointArtifact(path, known_as, metadata, ["latest", f"step-{facts['step']}"])

    def _note_score(self, artifact: CheckpointArtifact) -> bool:
        """Return whether a checkpoint is better than all before it, and add its alias."""
        facts = artifact.metadata
        name, score = facts.get("monitor"), facts.get("score")
        if name is None or not isinstance(score, int | float) or not math.isfinite(score):
            return False
        known = self._best.get(name, {}).get("score")
        sign = 1 if facts["mode"] == "max" else -1
        if known is not None and sign * score <= sign * known:
            return False
        self._best[name] = {"score": score, "mode": facts["mode"], "path": facts["path"], "id": artifact.id}
        artifact.aliases += self._best_alias(artifact)
        return True

    def _best_alias(self, artifact: CheckpointArtifact) -> list[str]:
        """Return 'best' for the metric that was monitored first, and 'best-NAME' for further ones."""
        for index, (name, known) in enumerate(self._best.items()):
            alias = f"best-{safe_name(name)}" if index else "best"
            if known["id"] == artifact.id and alias not in artifact.aliases:
                return [alias]
        return []


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; empty for a checkpoint of another package."""
    try:
        manifest = parse_json(read_within(path / MANIFEST, MANIFEST_BYTES), MANIFEST_LEVELS)
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _valid_scores(position: Any) -> dict[str, dict[str, Any]]:
    """Return the best scores in a saved position, without entries that are not scores."""
    saved = position.get("best") if isinstance(position, dict) else None
    return {
        name: dict(each)
        for name, each in (saved.items() if isinstance(saved, dict) else ())
        if isinstance(each, dict)
        and isinstance(each.get("score"), int | float)
        and isinstance(each.get("path"), str)
        and not Path(each["path"]).is_absolute()
        and ".." not in Path(each["path"]).parts
        and "id" in each
    }


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
            super().close()
        if run_dir is not None:
            _record(run_dir, self.label, self._later)
            self._release()

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


def safe_name(name: str) -> str:
    """Return a name with letters, digits, '.', '_' and '-', which every tracker accepts."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:120] or "_"
