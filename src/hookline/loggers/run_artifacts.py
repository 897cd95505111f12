"""The artifacts of a run: which checkpoints, and whether its record, each logger gets."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hookline.util.limited_json import MANIFEST_BYTES, MANIFEST_LEVELS, parse_json, read_within
from hookline.util.urls import MANIFEST, is_url

log = logging.getLogger("hookline")

CONFIG, FIGURES, CHECKPOINTS = "config", "figures", "checkpoints"
BEST_CHECKPOINT, LAST_CHECKPOINT = "best_checkpoint", "last_checkpoint"
ARTIFACTS = (CONFIG, FIGURES, BEST_CHECKPOINT, LAST_CHECKPOINT, CHECKPOINTS)
"""Allowed values of `artifacts` of a logger."""


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

    def __init__(self, takers: list[Any], call: Callable[..., Any], run_dir: Callable[[], Path]) -> None:
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
        self._best, run_dir = _valid_scores(position), self._run_dir()
        if is_url(path) or not Path(path).exists():  # another trainer's checkpoint has no path
            return
        resumed = self._describe(Path(path), "", 0)
        self._note_score(resumed)
        if not Path(path).resolve().is_relative_to(run_dir.resolve()):
            return  # a checkpoint of another run's directory
        self._newest = resumed
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

    def _send(self, logger: Any, artifact: CheckpointArtifact) -> None:
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
        return CheckpointArtifact(
            path,
            known_as,
            {**facts, "path": place, "checkpoint": known_as},
            ["latest", f"step-{facts['step']}"],
        )

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


def safe_name(name: str) -> str:
    """Return a name with letters, digits, '.', '_' and '-', which every tracker accepts."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:120] or "_"
