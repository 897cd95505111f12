"""Log to Trackio, a local database in the run's directory."""

from __future__ import annotations

import contextvars
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hookline.engine.checks import check_choice, refused
from hookline.loggers.artifacts import DEFAULT_ARTIFACTS, ArtifactLogger
from hookline.loggers.base import flat_params, flat_pixels, histogram_row
from hookline.loggers.run_artifacts import safe_name
from hookline.util.errors import HooklineError
from hookline.util.text import encodable, map_texts

TRACKIO_RESUME = ("allow", "must", "never")
RESERVED = ("project", "run", "timestamp", "step", "time", "metrics")


class Trackio(ArtifactLogger):
    """Logs to a Trackio run, which is `client`, kept in `trackio` of the run's directory.

    See it with `TRACKIO_DIR=RUN/trackio trackio show`. If the environment names a `TRACKIO_DIR`, it is kept
    there instead. Trackio has one directory per process, so two loggers cannot write into different
    directories at once.

    `project`, `name`, `group` and `resume`: those of `trackio.init`.

    `artifacts`: what becomes an artifact, of 'config', 'figures', 'best_checkpoint', 'last_checkpoint' and
    'checkpoints' (all of them). Their names are `config-ID`, `figures-ID` and `checkpoint-ID`, with the id of
    Hookline's run. Trackio stores equal files once.
    """

    package = "trackio"
    extra = "trackio"
    _in_use: ClassVar[dict[int, Path]] = {}

    def __init__(
        self,
        project: str = "hookline",
        name: str | None = None,
        group: str | None = None,
        resume: str = "allow",
        artifacts: Sequence[str] = DEFAULT_ARTIFACTS,
        queued: bool = True,
    ) -> None:
        super().__init__(artifacts, queued)
        if not isinstance(project, str) or not project:
            raise refused("project", project, "the name of a project")
        check_choice("resume", resume, TRACKIO_RESUME)
        self.project, self.name, self.group, self._resume = project, name, group, resume
        self._began = False

    def _connect(self, run_dir: Path) -> Any:
        import trackio

        folder = Path(os.environ.get("TRACKIO_DIR") or run_dir.resolve() / "trackio")
        if any(other != folder for other in self._in_use.values()):
            raise HooklineError(
                f"Trackio already writes to {next(iter(self._in_use.values()))}; it has one directory "
                f"at a time."
            )
        _move_to(folder, self.project)
        # in its own context, so that a run of the program itself is not ended
        run = contextvars.Context().run(
            trackio.init,
            self.project,
            name=self.name,
            group=self.group,
            resume=self._resume,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._in_use[id(self)] = folder
        self._began = False
        return run

    def _disconnect(self) -> None:
        try:
            self._client.finish()
        finally:
            self._in_use.pop(id(self), None)

    def _write(self, metrics: Mapping[str, Any], step: int) -> None:
        self.client.log({_key(name): value for name, value in metrics.items()}, step=step)
        self._began = True

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log them with the first record, or later as text."""
        plain, client = flat_params(params), self.client
        if not self._began:
            client.config.update(
                {f"config{name}" if name.startswith("_") else name: value for name, value in plain.items()}
            )
        else:
            self.add_text("hyperparams", "\n".join(f"- {name}: {value}" for name, value in plain.items()))

    def add_histogram(self, tag: str, values: Any, global_step: int | None = None) -> None:
        import trackio

        self._write(histogram_row(tag, values, trackio.Histogram), self._step(global_step))

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        import trackio

        self._write({tag: trackio.Markdown(encodable(str(text_string)))}, self._step(global_step))

    def add_image(self, tag: str, img_tensor: Any, global_step: int | None = None) -> None:
        import trackio

        self._write({tag: trackio.Image(flat_pixels(tag, img_tensor))}, self._step(global_step))

    def _upload(self, path: Path, name: str, kind: str, metadata: dict[str, Any], aliases: list[str]) -> bool:
        import trackio

        run = self.client
        artifact = trackio.Artifact(
            self._collection(name, kind, run.id),
            "model" if kind == "checkpoint" else safe_name(kind),
            metadata=map_texts(metadata, encodable),
        )
        if path.is_dir():
            artifact.add_dir(path)
        else:
            artifact.add_file(path)
        run.log_artifact(artifact, aliases=[safe_name(each) for each in aliases if each != "latest"])
        return True


def _key(tag: str) -> str:
    name = encodable(tag)
    return f"metric/{name}" if name in RESERVED or name.startswith("__") else name


def _move_to(folder: Path, project: str) -> None:
    """Set Trackio's directory, which several of its modules fix at import."""
    from trackio.sqlite_storage import SQLiteStorage

    places = {"TRACKIO_DIR": folder, "MEDIA_DIR": folder / "media", "ARTIFACTS_DIR": folder / "artifacts"}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trackio":
            for constant, path in places.items():
                if constant in vars(module):
                    setattr(module, constant, path)
    if folder not in SQLiteStorage.get_project_db_path(project).parents:
        raise HooklineError(
            "this version of trackio cannot be moved to the run's directory; set TRACKIO_DIR yourself"
        )
